"""Causal depthwise convolution, one token, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_C = 256


@triton.jit
def _conv_kernel(
    x_ptr,
    state_ptr,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    y_ptr,
    channels,
    x_row,
    x_channel,
    state_slot,
    state_channel,
    state_column,
    weight_channel,
    weight_column,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    y_at = y_ptr + row * channels + channel
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        tl.store(y_at, tl.zeros([BLOCK_C], tl.float32).to(y_ptr.dtype.element_ty), mask=inside)
        return
    x = tl.load(x_ptr + row * x_row + channel.to(tl.int64) * x_channel, mask=inside, other=0.0)
    weight_at = weight_ptr + channel * weight_channel
    total = x.to(tl.float32) * tl.load(weight_at + (WIDTH - 1) * weight_column, mask=inside, other=0.0).to(tl.float32)
    # From column to column by addition: the product of a column and its stride may need more than 32 bits.
    at = state_ptr + slot * state_slot + channel.to(tl.int64) * state_channel
    before = at
    for column in tl.static_range(WIDTH - 1):
        past = tl.load(at, mask=inside, other=0.0)
        total += past.to(tl.float32) * tl.load(weight_at + column * weight_column, mask=inside, other=0.0).to(
            tl.float32
        )
        if column > 0:
            tl.store(before, past, mask=inside)
        before = at
        at += state_column
    if WIDTH > 1:
        tl.store(before, x, mask=inside)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=inside)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, activation: str | None
) -> Tensor:
    """See :func:`replayssm.ops.causal_conv1d_update`."""
    batch, channels = x.shape
    y = torch.empty((batch, channels), dtype=x.dtype, device=x.device)
    if not batch:
        return y
    _conv_kernel[(batch, triton.cdiv(channels, BLOCK_C))](
        x,
        conv_state,
        weight,
        weight if bias is None else bias.contiguous(),
        slots,
        y,
        channels,
        *x.stride(),
        *conv_state.stride(),
        *weight.stride(),
        WIDTH=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        BLOCK_C=BLOCK_C,
        num_warps=4,
    )
    return y
