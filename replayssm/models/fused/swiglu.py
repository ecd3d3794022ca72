"""The gated MLP, ``down(silu(gate)·up)``, with one kernel between its matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.models.fused.check import Forward, agree, by_kind, draw, own_forward

# What such a module has, with two projections, and with one for gate and up together.
_APART = ("gate_proj", "up_proj", "down_proj", "act_fn")
_TOGETHER = ("input_linear", "output_linear", "activation")


def fused_swiglu(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """Each MLP that computes just that, with a forward of ours."""
    for module, _ in by_kind(filter(_may_be, model.modules()), lambda module: _is_right(module, dtype)):
        yield module, _forward(module)


def _may_be(module: nn.Module) -> bool:
    return own_forward(module) is not None and (_has(module, _APART) or _has(module, _TOGETHER))


def _has(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(hasattr(module, name) for name in names)


def _is_right(module: Any, dtype: torch.dtype) -> bool:
    weight = next(module.parameters(), None)
    if weight is None or weight.dim() != 2:
        return False
    x, forward = draw(2, 3, weight.shape[-1], dtype=dtype, device=weight.device), _forward(module)
    return agree(lambda: [forward(x)], lambda: [module.forward(x)])


def _forward(module: Any) -> Forward:
    from replayssm.backends.triton.pointwise import swiglu

    def apart(x: Tensor) -> Tensor:
        return module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))

    def together(x: Tensor) -> Tensor:
        return module.output_linear(swiglu(*module.input_linear(x).chunk(2, dim=-1)))

    return apart if _has(module, _APART) else together
