"""Folding a slot's records, and moving its cursor, as Triton kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.step import State
from replayssm.backends.triton.decode import check_dense, fuses


@triton.jit
def _fold_kernel(
    checkpoint_ptr,
    ring_u_ptr,
    ring_k_ptr,
    ring_g_ptr,
    write_pos_ptr,
    checkpoint_slot_ptr,
    src_ptr,
    dst_ptr,
    out_ptr,
    checkpoint_stride,
    ring_u_stride,
    ring_k_stride,
    ring_g_stride,
    out_stride,
    GROUP: tl.constexpr,
    HEAD_V_DIM: tl.constexpr,
    HEAD_K_DIM: tl.constexpr,
    RING_ROWS: tl.constexpr,
    CHANNEL_GATE: tl.constexpr,
    TO_SLOTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``S_h = S_c exp(G_h) + Σ_j u_j (k_j exp(G_h − G_j))ᵀ``, from the newest record back to the oldest."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    dim_k = tl.arange(0, BLOCK_K)
    is_v = dim_v < HEAD_V_DIM
    is_k = dim_k < HEAD_K_DIM
    slot = tl.load(src_ptr + row).to(tl.int64)
    cursor = tl.load(write_pos_ptr + slot)
    source = tl.load(checkpoint_slot_ptr + slot).to(tl.int64)
    tile_offset = (head * HEAD_V_DIM + dim_v)[:, None] * HEAD_K_DIM + dim_k[None, :]
    is_tile = is_v[:, None] & is_k[None, :]
    state = tl.load(checkpoint_ptr + source * checkpoint_stride + tile_offset, mask=is_tile, other=0.0).to(tl.float32)
    keys = ring_k_ptr + slot * ring_k_stride + (head // GROUP) * RING_ROWS * HEAD_K_DIM + dim_k
    updates = ring_u_ptr + slot * ring_u_stride + head * RING_ROWS * HEAD_V_DIM + dim_v
    added = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if CHANNEL_GATE:
        behind = tl.zeros([BLOCK_K], tl.float32)
    else:
        behind = 0.0
    for i in range(cursor):
        j = cursor - 1 - i
        key = tl.load(keys + j * HEAD_K_DIM, mask=is_k, other=0.0).to(tl.float32)
        update = tl.load(updates + j * HEAD_V_DIM, mask=is_v, other=0.0).to(tl.float32)
        if CHANNEL_GATE:
            key *= tl.exp(behind)
            behind += tl.load(
                ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + j) * HEAD_K_DIM + dim_k, mask=is_k, other=0.0
            )
        else:
            update *= tl.exp(behind)
            behind += tl.load(ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + j)
        added += update[:, None] * key[None, :]
    if CHANNEL_GATE:
        state = state * tl.exp(behind)[None, :] + added
    else:
        state = state * tl.exp(behind) + added
    target = row
    if TO_SLOTS:
        target = tl.load(dst_ptr + row).to(tl.int64)
    tl.store(out_ptr + target * out_stride + tile_offset, state.to(out_ptr.dtype.element_ty), mask=is_tile)


def fold_tile(head_v_dim: int, head_k_dim: int) -> tuple[int, int, int]:
    """Rows and columns of the state in one program, and its warps."""
    rows, columns = triton.next_power_of_2(head_v_dim), triton.next_power_of_2(head_k_dim)
    return min(rows, 16), columns, max(1, columns // 128)


def _fold(state: State, src: Tensor, dst: Tensor | None, out: Tensor) -> None:
    checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot = state
    _, num_v_heads, head_v_dim, head_k_dim = checkpoint.shape
    block_v, block_k, num_warps = fold_tile(head_v_dim, head_k_dim)
    if not src.numel():
        return
    check_dense(checkpoint=checkpoint, ring_u=ring_u, ring_k=ring_k, ring_g=ring_g)
    check_dense(write_pos=write_pos[None], checkpoint_slot=checkpoint_slot[None], src=src[None])
    if dst is not None:
        check_dense(dst=dst[None])
    _fold_kernel[(src.numel(), num_v_heads, triton.cdiv(head_v_dim, block_v))](
        *state,
        src,
        src if dst is None else dst,
        out,
        *(t.stride(0) for t in (checkpoint, ring_u, ring_k, ring_g, out)),
        GROUP=num_v_heads // ring_k.shape[1],
        HEAD_V_DIM=head_v_dim,
        HEAD_K_DIM=head_k_dim,
        RING_ROWS=ring_u.shape[2],
        CHANNEL_GATE=ring_g.dim() == 4,
        TO_SLOTS=dst is not None,
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        num_warps=num_warps,
        enable_fp_fusion=fuses(head_v_dim, head_k_dim),
    )


def read_state(state: State, slots: Tensor) -> Tensor:
    """See :func:`replayssm.ops.read_state`."""
    out = torch.empty((slots.numel(), *state[0].shape[1:]), dtype=torch.float32, device=slots.device)
    _fold(state, slots, None, out)
    return out


def materialize(state: State, src: Tensor, dst: Tensor) -> None:
    """See :func:`replayssm.ops.materialize`; of one slot."""
    _fold(state, src, dst, state[0])


@triton.jit
def _advance_kernel(
    write_pos_ptr,
    checkpoint_slot_ptr,
    counters_ptr,
    slots_ptr,
    force_flush_ptr,
    batch,
    flush_period,
    FORCED: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row, mask=row < batch, other=-1)
    live = slot >= 0
    cursor = tl.load(write_pos_ptr + slot, mask=live, other=0)
    flush = cursor >= flush_period - 1
    if FORCED:
        flush = flush | (tl.load(force_flush_ptr + row, mask=live, other=0) != 0)
    tl.store(write_pos_ptr + slot, tl.where(flush, 0, cursor + 1), mask=live)
    tl.store(checkpoint_slot_ptr + slot, slot, mask=live & flush)
    if COUNTED:
        at = counters_ptr + slot.to(tl.int64) * 3
        tl.store(at, tl.load(at, mask=live, other=0) + 1, mask=live)
        tl.store(at + 1, tl.load(at + 1, mask=live, other=0) + flush.to(tl.int64), mask=live)
        tl.store(at + 2, tl.load(at + 2, mask=live, other=0) + cursor.to(tl.int64), mask=live)


def advance(
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    counters: Tensor | None,
    slots: Tensor,
    flush_period: int,
    force_flush: Tensor | None,
) -> None:
    """See :func:`replayssm.ops.advance`."""
    batch = slots.numel()
    if not batch:
        return
    check_dense(write_pos=write_pos[None], checkpoint_slot=checkpoint_slot[None], slots=slots[None])
    block = 128
    _advance_kernel[(triton.cdiv(batch, block),)](
        write_pos,
        checkpoint_slot,
        write_pos if counters is None else counters,
        slots,
        slots if force_flush is None else force_flush,
        batch,
        flush_period,
        FORCED=force_flush is not None,
        COUNTED=counters is not None,
        BLOCK=block,
        num_warps=4,
    )
