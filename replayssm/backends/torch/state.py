"""Folding a slot's records, and moving its cursor."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.step import State
from replayssm.backends.torch.decode import decays_with_token, flushing_rows, fold_rows, read_ring
from replayssm.backends.torch.rows import Rows


def read_state(state: State, slots: Tensor) -> Tensor:
    """See :func:`replayssm.ops.read_state`."""
    checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot = state
    host = slots.tolist()
    if not host:
        return checkpoint.new_zeros((0, *checkpoint.shape[1:]), dtype=torch.float32)
    rows = Rows(host, checkpoint.device)
    cursors = rows.read(write_pos).tolist()
    committed = Rows(rows.read(checkpoint_slot).tolist(), checkpoint.device).read(checkpoint)
    if not any(cursors):
        return committed.to(torch.float32, copy=True)
    ring = read_ring(rows, cursors, ring_u, ring_k, ring_g)
    none = torch.zeros_like(ring.g[:, :, 0])  # there is no token after the records
    return fold_rows(committed.float(), decays_with_token(ring.g, none), ring)


def materialize(state: State, src: Tensor, dst: Tensor) -> None:
    """See :func:`replayssm.ops.materialize`; of one slot."""
    Rows(dst.tolist(), dst.device).write(state[0], read_state(state, src))


def advance(
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    counters: Tensor | None,
    slots: Tensor,
    flush_period: int,
    force_flush: Tensor | None,
) -> None:
    """See :func:`replayssm.ops.advance`."""
    host = slots.tolist()
    live = [i for i, slot in enumerate(host) if slot >= 0]
    if not live:
        return
    if len(live) < len(host):
        slots = slots[live]
        force_flush = None if force_flush is None else force_flush[live]
    rows = Rows([host[i] for i in live], slots.device)
    cursors = rows.read(write_pos).tolist()
    flush = flushing_rows(cursors, flush_period, force_flush)
    moved = [0 if flushes else cursor + 1 for cursor, flushes in zip(cursors, flush, strict=True)]
    rows.write(write_pos, torch.tensor(moved, dtype=torch.int32, device=slots.device))
    if any(flush):
        own = [slot for slot, flushes in zip(rows.slots, flush, strict=True) if flushes]
        flushed = Rows(own, slots.device)
        flushed.write(checkpoint_slot, flushed.index.int())
    if counters is not None:
        counted = [[1, int(flushes), cursor] for cursor, flushes in zip(cursors, flush, strict=True)]
        rows.write(counters, rows.read(counters) + torch.tensor(counted, device=slots.device))
