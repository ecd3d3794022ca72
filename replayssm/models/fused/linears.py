"""Projections of one input as one matrix product, and products of one row by a kernel of ours.

The weights of projections that belong together come to lie one behind the other, each still the module's own parameter;
nothing is there twice. The first projection that is given an input computes all, the others take their part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replayssm.models.fused.check import Forward, own_forward

Product = Callable[[Tensor, Tensor], Tensor]
#: Submodules that are given the same input, by families; of each module the first line that it has all of.
TOGETHER = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_proj", "k_proj", "v_proj", "g_a_proj", "forget_gate.f_a_proj", "b_proj"),
    ("q_proj", "k_proj", "v_proj", "g_proj", "forget_gate.f_proj", "b_proj"),
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
)


def fused_linears(
    model: nn.Module, dtype: torch.dtype, *, merged: bool, single_row: bool
) -> Iterator[tuple[nn.Module, Forward]]:
    """Projections with other forwards.

    Args:
        model: any.
        dtype: of the weights.
        merged: those that share an input share a product.
        single_row: products of one row, with 16-bit weights, read them as fast as memory goes.
    """
    product = _product if single_row and dtype.itemsize == 2 else F.linear
    found = dict(_merged_linears(model, dtype, product)) if merged else {}
    yield from found.items()
    if product is _product:
        alone = (module for module in model.modules() if _is_plain(module, dtype) and module not in found)
        yield from ((module, _alone(module)) for module in alone)


def _alone(linear: Any) -> Forward:
    return lambda x: _product(x, linear.weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    from replayssm.backends.triton.single_row import single_row

    alone = x.numel() == x.shape[-1] and x.dtype == weight.dtype
    return single_row(x, weight) if alone else F.linear(x, weight)


def _merged_linears(model: nn.Module, dtype: torch.dtype, product: Product) -> Iterator[tuple[nn.Module, Forward]]:
    owners: dict[int, int] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    for module in list(model.modules()):
        linears = _together(module)
        if linears and all(_is_plain(x, dtype) and owners[id(x.weight)] == 1 for x in linears):
            shared = _Shared(_merged([x.weight for x in linears]), [x.out_features for x in linears], product)
            for index, linear in enumerate(linears):
                yield linear, shared.forward(linear, index)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the weights' old places


def _together(module: nn.Module) -> list[Any]:
    for names in TOGETHER:
        try:
            return [module.get_submodule(name) for name in names]
        except AttributeError:
            continue
    return []


def _is_plain(linear: Any, dtype: torch.dtype) -> bool:
    """Neither quantised, nor with an adapter or a bias, nor one that another library moves about."""
    return (
        type(linear) is nn.Linear
        and getattr(linear, "bias", None) is None
        and type(linear.weight) is nn.Parameter
        and linear.weight.dtype == dtype
        and own_forward(linear) is not None
    )


@torch.no_grad()
def _merged(weights: Sequence[Any]) -> Tensor:
    """The weights ``[D_i, D]`` as parts of one ``[Σ D_i, D]``; made once, a copy of the model finds it there."""
    rows, width = sum(len(weight) for weight in weights), weights[0].shape[1]
    first = weights[0].data
    if _follow_each_other(weights):
        return first.as_strided((rows, width), (width, 1))
    merged = first.new_empty(rows, width)
    for weight, part in zip(weights, merged.split([len(weight) for weight in weights]), strict=True):
        weight.data = part.copy_(weight.data)
    return merged


def _follow_each_other(weights: Sequence[Tensor]) -> bool:
    storage, at = weights[0].untyped_storage().data_ptr(), weights[0].storage_offset()
    for weight in weights:
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != at:
            return False
        at += weight.numel()
    return all(weight.is_contiguous() for weight in weights)


class _Shared:
    """One product, handed out in parts.

    Args:
        weight: ``[Σ D_i, D]``.
        sizes: D_i.
        product: computes it.
    """

    def __init__(self, weight: Tensor, sizes: list[int], product: Product) -> None:
        self.weight = weight
        self.sizes = sizes
        self.product = product
        self.input: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def forward(self, linear: Any, index: int) -> Forward:
        """Of one of the projections; if it was given another weight meanwhile, its own."""
        own, address = linear.forward, linear.weight.data_ptr()

        def forward(x: Tensor) -> Tensor:
            if linear.weight.data_ptr() != address:
                return own(x)
            if x is not self.input:
                self.input = x
                self.parts = dict(enumerate(self.product(x, self.weight).split(self.sizes, dim=-1)))
            part = self.parts.pop(index, None)
            if not self.parts:
                self.input = None
            return own(x) if part is None else part

        return forward
