"""Between a layer's matrix products: each function is one kernel, in float32, rounded once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, y_ptr, size, gate_row, up_row, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_ptr + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate)·up`` of two ``[..., D]`` of one dtype; contiguous."""
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if not y.numel():
        return y
    size = gate.shape[-1]
    gate, up = (rows_of(t) for t in (gate, up))
    grid = (len(gate), triton.cdiv(size, BLOCK))
    _swiglu_kernel[grid](
        gate,
        up,
        y,
        size,
        gate.stride(0),
        up.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    num_q_heads,
    tokens,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    eps,
    weight_offset,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    batch, token = place // tokens, place % tokens
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, turned = column < DIM, column < ROTARY
    low = column < ROTARY // 2
    partner = tl.where(low, column + ROTARY // 2, column - ROTARY // 2)
    cos = tl.load(cos_ptr + batch * cos_batch + token * cos_token + column, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + batch * sin_batch + token * sin_token + column, mask=turned, other=0.0).to(tl.float32)
    sin = tl.where(low, -sin, sin)
    if head < num_q_heads:
        at = q_ptr + batch * q_batch + head * q_head + token * q_token
        weight_at = q_weight_ptr
        out = q_out_ptr + (place * num_q_heads + head) * DIM
    else:
        head -= num_q_heads
        at = k_ptr + batch * k_batch + head * k_head + token * k_token
        weight_at = k_weight_ptr
        out = k_out_ptr + (place * (tl.num_programs(1) - num_q_heads) + head) * DIM
    x = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + partner, mask=turned, other=0.0).to(tl.float32)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / DIM + eps)
        x *= factor * (tl.load(weight_at + column, mask=inside, other=0.0).to(tl.float32) + weight_offset)
        other *= factor * (tl.load(weight_at + partner, mask=turned, other=0.0).to(tl.float32) + weight_offset)
    tl.store(out + column, (x * cos + other * sin).to(q_out_ptr.dtype.element_ty), mask=inside)


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys, head by head: weights ``[d]``, epsilon, and what is added to the weights."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    weight_offset: float


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None) -> tuple[Tensor, Tensor]:
    """Turn the first r elements of queries and keys, the first half of them with the second, perhaps after norms.

    Args:
        q: ``[B, H, T, d]``.
        k: ``[B, H_k, T, d]``, dtype of q.
        cos, sin: ``[B, T, r]`` or ``[1, T, r]``.
        norms: of each head, first.

    Returns:
        Shapes and dtype of q and k; in memory the heads of a token follow each other.
    """
    batch, num_q_heads, tokens, dim = q.shape
    num_k_heads = k.shape[1]
    q_out = q.new_empty(batch, tokens, num_q_heads, dim)
    k_out = k.new_empty(batch, tokens, num_k_heads, dim)
    if q_out.numel():
        q, k, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, cos, sin))
        cos, sin = (t.expand(batch, -1, -1) for t in (cos, sin))
        _rotary_kernel[(batch * tokens, num_q_heads + num_k_heads)](
            q,
            k,
            q if norms is None else norms.q_weight,
            k if norms is None else norms.k_weight,
            cos,
            sin,
            q_out,
            k_out,
            num_q_heads,
            tokens,
            *q.stride()[:3],
            *k.stride()[:3],
            *cos.stride()[:2],
            *sin.stride()[:2],
            0.0 if norms is None else norms.eps,
            0.0 if norms is None else norms.weight_offset,
            DIM=dim,
            ROTARY=cos.shape[-1],
            NORM=norms is not None,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


@triton.jit
def _gate_kernel(x_ptr, gate_ptr, y_ptr, size, dim, x_row, gate_row, gate_head, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    x = tl.load(x_ptr + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    gate_at = gate_ptr + row * gate_row + column // dim * gate_head + column % dim
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-gate))
    tl.store(y_ptr + row * size + column, y.to(y_ptr.dtype.element_ty), mask=inside)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """``x·sigmoid(gate)``, ``[..., H·d]``, for x ``[..., H·d]`` and gate ``[..., H, d]``, both of one dtype."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if y.numel():
        rows, size, dim = rows_of(x), x.shape[-1], gate.shape[-1]
        gate = gate.reshape(-1, *gate.shape[-2:])
        gate = gate if gate.stride(2) == 1 else gate.contiguous()
        strides = (rows.stride(0), gate.stride(0), gate.stride(1))
        grid = (len(rows), triton.cdiv(size, BLOCK))
        _gate_kernel[grid](rows, gate, y, size, dim, *strides, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)
    return y


def rows_of(x: Tensor) -> Tensor:
    """``[rows, D]``, the elements of a row one behind the other."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()
