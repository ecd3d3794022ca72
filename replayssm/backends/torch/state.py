"""Folding a slot's records, and moving its cursor."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.torch.decode import read_ring, replay
from replayssm.backends.torch.rows import Rows
from replayssm.recurrence import replayed_decays


def read_state(
    checkpoint: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    slots: Tensor,
) -> Tensor:
    """See :func:`replayssm.ops.read_state`."""
    host = slots.tolist()
    if not host:
        return checkpoint.new_zeros((0, *checkpoint.shape[1:]), dtype=torch.float32)
    rows = Rows(host, checkpoint.device)
    cursors = rows.read(write_pos).tolist()
    state = Rows(rows.read(checkpoint_slot).tolist(), checkpoint.device).read(checkpoint)
    if not any(cursors):
        return state.to(torch.float32, copy=True)
    u, k, g = read_ring(rows, cursors, ring_u, ring_k, ring_g)
    total, after = replayed_decays(g)
    return replay(state.float(), total, u, k, after)


def materialize(
    checkpoint: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    src: Tensor,
    dst: Tensor,
) -> None:
    """See :func:`replayssm.ops.materialize`."""
    if not src.numel():
        return
    folded = read_state(checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot, src)
    Rows(dst.tolist(), checkpoint.device).write(checkpoint, folded)


def advance(
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    counters: Tensor | None,
    slots: Tensor,
    flush_period: int,
    force_flush: Tensor | None,
) -> None:
    """See :func:`replayssm.ops.advance`."""
    live = slots >= 0
    index = slots[live].long()
    cursor = write_pos[index]
    flush = cursor >= flush_period - 1
    if force_flush is not None:
        flush = flush | force_flush[live].bool()
    if counters is not None:
        counters[index] += torch.stack([torch.ones_like(cursor), flush, cursor], dim=1)
    write_pos[index] = torch.where(flush, 0, cursor + 1)
    checkpoint_slot[index] = torch.where(flush, index.int(), checkpoint_slot[index])
