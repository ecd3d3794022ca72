"""RMS norm of a line, with what may stand around it: a sum before it, a gate before or behind it; one kernel.

A line is a head, a group of channels or all of them. ``y = w · x / sqrt(mean(x²) + eps)``, in float32, rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LINE_OF_A_WARP = 512  # elements; shorter lines share a program
GATES = {None: 0, "silu": 1, "sigmoid": 2}


class Form(NamedTuple):
    """Which norm it is.

    Attributes:
        eps: under the root.
        gate: None, ``"silu"`` or ``"sigmoid"``, of the gate z.
        gate_first: the gate multiplies x before the norm, else the result.
        weight_offset: added to the weight: 1 where weights are stored as their distance from 1.
        num_groups: lines that a weight stretches over.
    """

    eps: float
    gate: str | None = None
    gate_first: bool = False
    weight_offset: float = 0.0
    num_groups: int = 1


class Cut(NamedTuple):
    """How a program takes lines: columns, a power of 2, lines of a program, and its warps."""

    block: int
    lines: int
    num_warps: int


def cut(size: int) -> Cut:
    """For lines of so many elements; whatever their number, so that a line has the same bits in any batch."""
    block = triton.next_power_of_2(size)
    return Cut(block, max(1, LINE_OF_A_WARP // block), min(8, max(1, block // LINE_OF_A_WARP)))


@triton.jit
def _gated(x, z, GATE: tl.constexpr):
    factor = 1.0 / (1.0 + tl.exp(-z))
    return x * (z * factor if GATE == 1 else factor)


@triton.jit
def _norm_kernel(
    x_ptr,
    z_ptr,
    delta_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    lines,
    inner,
    x_outer,
    x_inner,
    z_outer,
    z_inner,
    delta_outer,
    delta_inner,
    eps,
    weight_offset,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    column = tl.arange(0, BLOCK)
    inside = (line < lines)[:, None] & (column < SIZE)[None, :]
    outer, within = line // inner, line % inner
    at = (outer * x_outer + within * x_inner)[:, None] + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    own = line[:, None] * SIZE + column[None, :]
    if HAS_DELTA:
        at = (outer * delta_outer + within * delta_inner)[:, None] + column[None, :]
        rounded = (x + tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + own, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if GATE > 0:
        at = (outer * z_outer + within * z_inner)[:, None] + column[None, :]
        z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATE_FIRST:
            x = _gated(x, z, GATE)
    weight_at = (line % NUM_GROUPS * SIZE)[:, None] + column[None, :]
    weight = tl.load(weight_ptr + weight_at, mask=(column < SIZE)[None, :], other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 1) / SIZE
    y = x * (1.0 / tl.sqrt(mean + eps))[:, None] * (weight + weight_offset)
    if GATE > 0 and not GATE_FIRST:
        y = _gated(y, z, GATE)
    tl.store(y_ptr + own, y.to(y_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, form: Form, z: Tensor | None = None) -> Tensor:
    """Normalise the last dimension, or each of its groups.

    Args:
        x: ``[..., num_groups · S]``.
        weight: ``[num_groups · S]``.
        form: which norm.
        z: the gate, shaped like x, of any dtype; given if and only if the form has a gate.

    Returns:
        Shape and dtype of x, contiguous.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, z, None, weight, y, y, form)
    return y


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """``x + delta``, rounded to the dtype of x, and its norm, which has no gate; all shaped like x."""
    total, y = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    _launch(x, None, delta, weight, y, total, form)
    return total, y


def _launch(
    x: Tensor, z: Tensor | None, delta: Tensor | None, weight: Tensor, y: Tensor, total: Tensor, form: Form
) -> None:
    size = x.shape[-1] // form.num_groups
    lines = y.numel() // max(1, size)
    if not lines:
        return
    given = [x if t is None else t for t in (x, z, delta)]
    x, z, delta = (_lines(t, form.num_groups) for t in given)
    strides = [stride for t in (x, z, delta) for stride in t.stride()[:2]]
    block, share, num_warps = cut(size)
    _norm_kernel[(triton.cdiv(lines, share),)](
        x,
        z,
        delta,
        weight,
        y,
        total,
        lines,
        x.shape[1],
        *strides,
        form.eps,
        form.weight_offset,
        SIZE=size,
        NUM_GROUPS=form.num_groups,
        GATE=GATES[form.gate],
        GATE_FIRST=form.gate_first,
        HAS_DELTA=total is not y,
        BLOCK=block,
        LINES=share,
        num_warps=num_warps,
        enable_fp_fusion=False,  # so that all lanes end with the same bits of a sum
    )


def _lines(x: Tensor, num_groups: int) -> Tensor:
    """``[outer, inner, S]``: of two strides, so that heads which lie between others needn't be copied."""
    x = x if num_groups == 1 else x.unflatten(-1, (num_groups, -1))
    x = x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, x.shape[-1])
    return x if x.stride(2) == 1 else x.contiguous()
