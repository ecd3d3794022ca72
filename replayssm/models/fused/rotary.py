"""The rotary embedding of queries and keys as one kernel.

transformers' attention modules call a function of their file, ``apply_rotary_pos_emb``. A copy of their forward gets
ours instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.models.fused.check import Forward, agree, draw, own_forward

NAME = "apply_rotary_pos_emb"


def fused_rotary(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """Each attention module whose function is the one that we know, with its forward around ours."""
    forwards: dict[Any, Any] = {}
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType) or NAME not in forward.__code__.co_names:
            continue
        if forward not in forwards:
            device = next(module.parameters()).device
            forwards[forward] = _with_ours(forward) if _is_known(forward.__globals__[NAME], dtype, device) else None
        if forwards[forward] is not None and own_forward(module) is not None:
            yield module, partial(forwards[forward], module)


def _with_ours(forward: FunctionType) -> FunctionType:
    scope = {**forward.__globals__, NAME: _rotary(forward.__globals__[NAME])}
    copy = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _rotary(own: Any) -> Any:
    from replayssm.backends.triton.pointwise import rotary

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or q.dim() != 4 or cos.dim() != 3 or q.dtype != k.dtype:
            return own(q, k, cos, sin, *args, **kwargs)
        return rotary(q, k, cos, sin)

    return apply_rotary_pos_emb


def _is_known(own: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the function turns the first half of the first elements with the second half, as ours does."""
    size, ours = 32, _rotary(own)
    q, k = (draw(2, heads, 3, size, dtype=dtype, device=device) for heads in (3, 1))
    for rotary_size in (size, size // 2):
        angle = torch.rand(2, 3, rotary_size, generator=torch.Generator().manual_seed(0)) * 6
        inputs = (q, k, angle.cos().to(device, dtype), angle.sin().to(device, dtype))
        try:
            expected = own(*inputs)
        except Exception:  # a function that turns all elements or none
            if rotary_size == size:
                return False
            continue
        if not agree(lambda: ours(*inputs), lambda: expected):  # noqa: B023
            return False
    return True
