"""Taking what was accepted of a verify window, as Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.step import Accepted, Conv, Rings
from replayssm.backends.triton.decode import check_dense

BLOCK_T = 16
BLOCK_C = 128


@triton.jit
def _move_kernel(
    ring_ptr,
    write_pos_ptr,
    slots_ptr,
    num_tokens_ptr,
    num_accepted_ptr,
    path_ptr,
    path_row,
    ring_stride,
    RING_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accepted records of one row and head move to the window's first places; all are read before one is written."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    accepted = tl.load(num_accepted_ptr + row)
    if (slot < 0) | (accepted <= 0):
        return
    cursor = tl.load(write_pos_ptr + slot)
    base = tl.where(cursor + tl.load(num_tokens_ptr + row) > RING_ROWS, 0, cursor)
    place = tl.arange(0, BLOCK_T)
    element = tl.arange(0, BLOCK)
    taken = place < accepted
    node = tl.load(path_ptr + row * path_row + place, mask=taken, other=0)
    at = ring_ptr + slot * ring_stride + tl.program_id(1) * RING_ROWS * WIDTH + element[None, :]
    mask = taken[:, None] & (element < WIDTH)[None, :]
    record = tl.load(at + (base + node)[:, None] * WIDTH, mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(at + (base + place)[:, None] * WIDTH, record, mask=mask)


@triton.jit
def _shift_kernel(
    state_ptr,
    window_ptr,
    slots_ptr,
    num_accepted_ptr,
    path_ptr,
    path_row,
    channels,
    state_slot,
    state_channel,
    state_column,
    window_slot,
    window_channel,
    window_column,
    KEPT: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The last inputs of the committed ones followed by the accepted ones, oldest first, in place."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    accepted = tl.load(num_accepted_ptr + row).to(tl.int64)  # times a stride, it may need more than 32 bits
    if (slot < 0) | (accepted <= 0):
        return
    channel = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    inside = channel < channels
    state_at = state_ptr + slot * state_slot + channel * state_channel
    window_at = window_ptr + slot * window_slot + channel * window_channel
    for column in tl.static_range(KEPT):  # a place takes its input from a later one, or from the window
        place = column + accepted
        if place < KEPT:
            value = tl.load(state_at + place * state_column, mask=inside)
        else:
            node = place - KEPT
            if not CHAIN:
                node = tl.load(path_ptr + row * path_row + node).to(tl.int64)
            value = tl.load(window_at + node * window_column, mask=inside)
        tl.store(state_at + (place - accepted) * state_column, value, mask=inside)


def accept(rings: Rings, conv: Conv, write_pos: Tensor, accepted: Accepted) -> None:
    """See :func:`replayssm.ops.accept`."""
    batch = accepted.slots.numel()
    if not batch:
        return
    ring_u, ring_k, ring_g = rings
    check_dense(ring_u=ring_u, ring_k=ring_k, ring_g=ring_g)
    slots, num_tokens, num_accepted = (t.contiguous() for t in accepted[:3])
    path, (conv_state, conv_window) = accepted.path, conv
    if path is not None:
        path = path if path.stride(1) == 1 else path.contiguous()
        for ring in rings:
            width = ring.shape[3] if ring.dim() == 4 else 1
            _move_kernel[(batch, ring.shape[1])](
                ring,
                write_pos,
                slots,
                num_tokens,
                num_accepted,
                path,
                path.stride(0),
                ring.stride(0),
                RING_ROWS=ring.shape[2],
                WIDTH=width,
                BLOCK_T=BLOCK_T,
                BLOCK=triton.next_power_of_2(width),
                num_warps=4,
            )
    if conv_state is not None and conv_window is not None and conv_state.shape[2]:
        channels = conv_state.shape[1]
        _shift_kernel[(batch, triton.cdiv(channels, BLOCK_C))](
            conv_state,
            conv_window,
            slots,
            num_accepted,
            slots if path is None else path,
            0 if path is None else path.stride(0),
            channels,
            *conv_state.stride(),
            *conv_window.stride(),
            KEPT=conv_state.shape[2],
            CHAIN=path is None,
            BLOCK_C=BLOCK_C,
            num_warps=4,
        )


@triton.jit
def _commit_kernel(
    write_pos_ptr,
    checkpoint_slot_ptr,
    counters_ptr,
    slots_ptr,
    num_tokens_ptr,
    num_accepted_ptr,
    batch,
    ring_rows,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row, mask=row < batch, other=-1)
    count = tl.load(num_tokens_ptr + row, mask=row < batch, other=0)
    live = (slot >= 0) & (count > 0)
    accepted = tl.load(num_accepted_ptr + row, mask=live, other=0)
    cursor = tl.load(write_pos_ptr + slot, mask=live, other=0)
    folds = cursor + count > ring_rows
    tl.store(write_pos_ptr + slot, tl.where(folds, 0, cursor) + accepted, mask=live)
    tl.store(checkpoint_slot_ptr + slot, slot, mask=live & folds)
    if COUNTED:
        at = counters_ptr + slot.to(tl.int64) * 5
        tl.store(at, tl.load(at, mask=live, other=0) + 1, mask=live)
        tl.store(at + 1, tl.load(at + 1, mask=live, other=0) + folds.to(tl.int64), mask=live)
        tl.store(at + 2, tl.load(at + 2, mask=live, other=0) + cursor.to(tl.int64), mask=live)
        tl.store(at + 3, tl.load(at + 3, mask=live, other=0) + count.to(tl.int64), mask=live)
        tl.store(at + 4, tl.load(at + 4, mask=live, other=0) + accepted.to(tl.int64), mask=live)


def commit(
    write_pos: Tensor, checkpoint_slot: Tensor, counters: Tensor | None, accepted: Accepted, ring_rows: int
) -> None:
    """See :func:`replayssm.ops.commit`."""
    batch = accepted.slots.numel()
    if not batch:
        return
    check_dense(write_pos=write_pos[None], checkpoint_slot=checkpoint_slot[None])
    slots, num_tokens, num_accepted = (t.contiguous() for t in accepted[:3])
    block = 128
    _commit_kernel[(triton.cdiv(batch, block),)](
        write_pos,
        checkpoint_slot,
        write_pos if counters is None else counters,
        slots,
        num_tokens,
        num_accepted,
        batch,
        ring_rows,
        COUNTED=counters is not None,
        BLOCK=block,
        num_warps=4,
    )
