"""Causal depthwise convolution of packed sequences, as a Triton kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_T, BLOCK_C = 8, 128


@triton.jit
def _conv_prefill_kernel(
    x_ptr,
    state_ptr,
    weight_ptr,
    bias_ptr,
    sequence_ptr,
    cuts_ptr,
    y_ptr,
    last_ptr,
    tokens,
    channels,
    token_blocks,
    x_token,
    x_channel,
    state_row,
    state_channel,
    state_column,
    weight_channel,
    weight_column,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The first programs have a block of tokens each, then one for each sequence copies its last W − 1 inputs."""
    block = tl.program_id(0)
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)  # times a stride, it may need 64 bits
    inside = channel < channels
    if block >= token_blocks:
        row = (block - token_blocks).to(tl.int64)
        start = tl.load(cuts_ptr + row).to(tl.int64)
        end = tl.load(cuts_ptr + row + 1).to(tl.int64)
        last_at = last_ptr + (row * channels + channel) * (WIDTH - 1)
        for column in tl.static_range(WIDTH - 1):
            place = end - start - (WIDTH - 1) + column
            if place >= 0:
                kept = tl.load(x_ptr + (start + place) * x_token + channel * x_channel, mask=inside)
            else:
                old_at = state_ptr + row * state_row + channel * state_channel
                kept = tl.load(old_at + (place + WIDTH - 1) * state_column, mask=inside)
            tl.store(last_at + column, kept, mask=inside)
        return

    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    used = token < tokens
    row = tl.load(sequence_ptr + token, mask=used, other=0).to(tl.int64)
    place = token - tl.load(cuts_ptr + row, mask=used, other=0)  # within its sequence
    token = token.to(tl.int64)
    both = used[:, None] & inside[None, :]
    x_at = x_ptr + token[:, None] * x_token + channel[None, :] * x_channel
    old_at = state_ptr + row[:, None] * state_row + channel[None, :] * state_channel
    weight_at = weight_ptr + channel * weight_channel
    weight = tl.load(weight_at + (WIDTH - 1) * weight_column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(x_at, mask=both, other=0.0).to(tl.float32) * weight[None, :]
    for tap in tl.static_range(WIDTH - 1):
        is_new = (place >= WIDTH - 1 - tap)[:, None]
        past = tl.load(x_at - (WIDTH - 1 - tap) * x_token, mask=both & is_new, other=0.0)
        old = tl.load(old_at + (place + tap).to(tl.int64)[:, None] * state_column, mask=both & ~is_new, other=0.0)
        weight = tl.load(weight_at + tap * weight_column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(is_new, past, old).to(tl.float32) * weight[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    y_at = y_ptr + token[:, None] * channels + channel[None, :]
    tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=both)


def causal_conv1d_prefill(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`replayssm.ops.causal_conv1d_prefill`."""
    tokens, channels = x.shape
    y, last = torch.empty_like(x, memory_format=torch.contiguous_format), conv_state.new_empty(conv_state.shape)
    sequence, cuts = _places(tuple(cu_seqlens.tolist()), x.device)
    token_blocks = triton.cdiv(tokens, BLOCK_T)
    grid = (token_blocks + len(last), triton.cdiv(channels, BLOCK_C))
    if not grid[0]:
        return y, last
    _conv_prefill_kernel[grid](
        x,
        conv_state,
        weight,
        weight if bias is None else bias.contiguous(),
        sequence,
        cuts,
        y,
        last,
        tokens,
        channels,
        token_blocks,
        *x.stride(),
        *conv_state.stride(),
        *weight.stride(),
        WIDTH=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        BLOCK_T=BLOCK_T,
        BLOCK_C=BLOCK_C,
        num_warps=4,
    )
    return y, last


@lru_cache(maxsize=8)  # the layers of one forward have the same
def _places(cu_seqlens: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Int32 on the device: each token's sequence ``[total]``, and where the sequences begin and end ``[S + 1]``."""
    cuts = torch.tensor(cu_seqlens, dtype=torch.int32, device="cpu")  # whatever torch's default device is
    sequence = torch.arange(len(cuts) - 1, dtype=torch.int32, device="cpu").repeat_interleave(cuts.diff())
    return sequence.to(device), cuts.to(device)
