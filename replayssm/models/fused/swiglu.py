"""The gated MLP, ``down(silu(gate)·up)``, with one kernel between its matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from replayssm.models.fused.check import Forward, agree, draw, kind, own_forward


def fused_swiglu(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, Forward]]:
    """Each MLP that computes just that, with a forward of ours."""
    known: dict[Any, bool] = {}
    for module in model.modules():
        forward = None if own_forward(module) is None else _forward(module)
        if forward is None:
            continue
        key = kind(module)
        if key not in known:
            known[key] = _is_right(module, forward, dtype)
        if known[key]:
            yield module, forward


def _is_right(module: Any, forward: Forward, dtype: torch.dtype) -> bool:
    weight = next(module.parameters(), None)
    if weight is None or weight.dim() != 2:
        return False
    x = draw(2, 3, weight.shape[-1], dtype=dtype, device=weight.device)
    return agree(lambda: [forward(x)], lambda: [module.forward(x)])


def _forward(module: Any) -> Forward | None:
    """What the module may be: with two projections, or with one for gate and up together."""
    from replayssm.backends.triton.pointwise import swiglu

    def apart(x: Tensor) -> Tensor:
        return module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))

    def together(x: Tensor) -> Tensor:
        return module.output_linear(swiglu(*module.input_linear(x).chunk(2, dim=-1)))

    if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
        return apart
    if all(hasattr(module, name) for name in ("input_linear", "output_linear", "activation")):
        return together
    return None
