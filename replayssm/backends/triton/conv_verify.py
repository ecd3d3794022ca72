"""Causal depthwise convolution of a verify window, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.step import Window
from replayssm.backends.triton.conv import BLOCK_C


@triton.jit
def _conv_window_kernel(
    x_ptr,
    state_ptr,
    window_ptr,
    weight_ptr,
    bias_ptr,
    slots_ptr,
    num_tokens_ptr,
    parents_ptr,
    y_ptr,
    tokens,
    channels,
    parents_row,
    x_row,
    x_token,
    x_channel,
    state_slot,
    state_channel,
    state_column,
    window_slot,
    window_channel,
    window_column,
    weight_channel,
    weight_column,
    WIDTH: tl.constexpr,
    TREE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One token of one row: its own input, its ancestors', then the committed ones."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64)  # times a stride, it may need more than 32 bits
    channel = (tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    inside = channel < channels
    y_at = y_ptr + (row * tokens + token) * channels + channel
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (slot < 0) | (token >= tl.load(num_tokens_ptr + row)):
        tl.store(y_at, tl.zeros([BLOCK_C], tl.float32).to(y_ptr.dtype.element_ty), mask=inside)
        return
    x_at = x_ptr + row * x_row + channel * x_channel
    state_at = state_ptr + slot * state_slot + channel * state_channel
    weight_at = weight_ptr + channel * weight_channel
    own = tl.load(x_at + token * x_token, mask=inside)
    tl.store(window_ptr + slot * window_slot + channel * window_channel + token * window_column, own, mask=inside)
    total = own.to(tl.float32) * tl.load(weight_at + (WIDTH - 1) * weight_column, mask=inside, other=0.0).to(tl.float32)
    node = token
    before = tl.full([], 0, tl.int64)  # committed inputs taken so far
    for tap in tl.static_range(WIDTH - 1):
        if node >= 0:
            if TREE:
                node = tl.load(parents_ptr + row * parents_row + node).to(tl.int64)
            else:
                node = node - 1
        if node >= 0:
            past = tl.load(x_at + node * x_token, mask=inside, other=0.0)
        else:
            past = tl.load(state_at + (WIDTH - 2 - before) * state_column, mask=inside, other=0.0)
            before += 1
        weight = tl.load(weight_at + (WIDTH - 2 - tap) * weight_column, mask=inside, other=0.0)
        total += past.to(tl.float32) * weight.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=inside)


def causal_conv1d_verify(
    x: Tensor,
    conv_state: Tensor,
    conv_window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    activation: str | None,
    window: Window,
) -> Tensor:
    """See :func:`replayssm.ops.causal_conv1d_verify`."""
    batch, tokens, channels = x.shape
    y = torch.empty((batch, tokens, channels), dtype=x.dtype, device=x.device)
    if not batch:
        return y
    num_tokens, parents = window.num_tokens.contiguous(), window.parents
    if parents is not None and parents.stride(1) != 1:
        parents = parents.contiguous()
    _conv_window_kernel[(batch, tokens, triton.cdiv(channels, BLOCK_C))](
        x,
        conv_state,
        conv_window,
        weight,
        weight if bias is None else bias.contiguous(),
        slots.contiguous(),
        num_tokens,
        num_tokens if parents is None else parents,
        y,
        tokens,
        channels,
        0 if parents is None else parents.stride(0),
        *x.stride(),
        *conv_state.stride(),
        *conv_window.stride(),
        *weight.stride(),
        WIDTH=weight.shape[1],
        TREE=parents is not None,
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        BLOCK_C=BLOCK_C,
        num_warps=4,
    )
    return y
