"""Operators on whole slots: fold the records, move the cursors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.backends.step import ABSENT
from replayssm.ops.checks import (
    check_count,
    check_rank,
    check_slots_on_host,
    check_state,
    check_tensor,
)
from replayssm.ops.dispatch import backend_module, call, register, resolve_backend
from replayssm.ops.known import recall, remember


def read_state(
    checkpoint: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    slots: Tensor,
    *,
    backend: str = "auto",
) -> Tensor:
    """The state at each slot's cursor, ``S_h = S_c exp(G_h) + Σ_j u_j (k_j exp(G_h − G_j))ᵀ``. Changes nothing.

    Args:
        checkpoint ... checkpoint_slot: see :mod:`replayssm.ops`.
        slots: ``[M]`` int32, none negative.
        backend: see :mod:`replayssm.ops`.

    Returns:
        float32 ``[M, H_v, d_v, d_k]``.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or on a CPU a slot is out of range.
    """
    state = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot)
    check_state(state, channel=has_channel_gate(ring_g))
    check_rank("slots", slots, "[M]")
    check_tensor("slots", slots, (slots.numel(),), "[M]", (torch.int32,), checkpoint.device)
    return call("read_state", *state, slots, resolve_backend(backend, checkpoint.device))


def materialize(
    checkpoint: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    src: Tensor,
    dst: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Write the state at the cursor of ``src`` into the checkpoint of ``dst``.

    The source, its ring and its cursor stay as they are, so its flushes come when they would have come. Cursors of
    ``dst`` belong to the caller (:meth:`replayssm.ReplayPool.materialize` sets them).

    Args:
        checkpoint ... checkpoint_slot: see :mod:`replayssm.ops`.
        src, dst: ``[M]`` int32, none negative; no slot twice in dst. A slot in both is read before it is written.
        backend: see :mod:`replayssm.ops`.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or on a CPU a slot is out of range or twice in dst.
    """
    state = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot)
    check_state(state, channel=has_channel_gate(ring_g))
    check_rank("src", src, "[M]")
    check_tensor("src", src, (src.numel(),), "[M]", (torch.int32,), checkpoint.device)
    check_tensor("dst", dst, (src.numel(),), "[M]", (torch.int32,), checkpoint.device)
    call("materialize", *state, src, dst, resolve_backend(backend, checkpoint.device))


def advance(
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    slots: Tensor,
    *,
    flush_period: int,
    force_flush: Tensor | None = None,
    counters: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Move the cursors after a decode step of all layers.

    ``write_pos = 0 if flush else write_pos + 1``, with ``flush = force_flush | (write_pos ≥ L − 1)``, as the decode
    operators decided. A slot that flushed reads its own checkpoint from now on.

    Args:
        write_pos, checkpoint_slot: ``[N]`` int32, updated in place.
        slots: ``[B]`` int32, negative for a padding row.
        flush_period: L.
        force_flush: ``[B]`` bool or int32, or None.
        counters: int64 ``[N, 3]`` or None; steps, flushes and records read are added.
        backend: see :mod:`replayssm.ops`.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or flush_period is no whole number above 0.
    """
    forced = ABSENT[3] if force_flush is None else force_flush
    tensors = (write_pos, checkpoint_slot, slots, forced, ABSENT[4] if counters is None else counters)
    options = ("advance", backend)
    known = recall(options, tensors)
    if known is None:
        _check_cursors(write_pos, checkpoint_slot, slots, force_flush, counters)
        known = remember(options, tensors, backend)
    check_count("flush_period", flush_period, 1)
    known.call(write_pos, checkpoint_slot, counters, slots, flush_period, force_flush, known.backend)


def _check_cursors(
    write_pos: Tensor, checkpoint_slot: Tensor, slots: Tensor, force_flush: Tensor | None, counters: Tensor | None
) -> None:
    check_rank("write_pos", write_pos, "[N]")
    check_rank("slots", slots, "[B]")
    device = write_pos.device
    slot_count = tuple(write_pos.shape[:1])
    check_tensor("write_pos", write_pos, slot_count, "[N]", (torch.int32,))
    check_tensor("checkpoint_slot", checkpoint_slot, slot_count, "[N]", (torch.int32,), device)
    check_tensor("slots", slots, (slots.numel(),), "[B]", (torch.int32,), device)
    if force_flush is not None:
        check_tensor("force_flush", force_flush, (slots.numel(),), "[B]", (torch.bool, torch.int32), device)
    if counters is not None:
        check_tensor("counters", counters, (*slot_count, 3), "[N, 3]", (torch.int64,), device)


def has_channel_gate(ring_g: Tensor) -> bool:
    """Whether there is one decay per key channel; anything else is left to the checks."""
    return isinstance(ring_g, Tensor) and ring_g.dim() == 4


def _read_state(*args: Any) -> Tensor:
    *state, slots, backend = args
    check_folded_slots("slots", slots, state[0].shape[0])
    return backend_module(backend).read_state(tuple(state), slots)


def _materialize(*args: Any) -> None:
    *state, src, dst, backend = args
    check_folded_slots("src", src, state[0].shape[0])
    check_folded_slots("dst", dst, state[0].shape[0])
    check_slots_on_host(dst, state[0].shape[0], "dst")
    checkpoint, run = state[0], backend_module(backend)
    if src.numel() == 1:
        run.materialize(tuple(state), src, dst)
    else:  # a target may be a source, too, and is read before it is written
        checkpoint[dst.long()] = run.read_state(tuple(state), src).to(checkpoint.dtype)


def _advance(
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    counters: Tensor | None,
    slots: Tensor,
    flush_period: int,
    force_flush: Tensor | None,
    backend: str,
) -> None:
    check_slots_on_host(slots, write_pos.shape[0])
    backend_module(backend).advance(write_pos, checkpoint_slot, counters, slots, flush_period, force_flush)


def check_folded_slots(name: str, slots: Tensor, num_slots: int) -> None:
    """Where slots can be read without waiting for a device: each in range; padding has no state to fold."""
    if slots.device.type == "cpu" and slots.numel():
        for bad in (int(slots.min()), int(slots.max())):
            if not 0 <= bad < num_slots:
                raise ValueError(f"{name} holds {bad}: slots from 0 to N - 1 = {num_slots - 1} are wanted")


register(
    "read_state(Tensor checkpoint, Tensor ring_u, Tensor ring_k, Tensor ring_g, Tensor write_pos, "
    "Tensor checkpoint_slot, Tensor slots, str backend) -> Tensor",
    _read_state,
    lambda checkpoint, *rest: checkpoint.new_empty((len(rest[5]), *checkpoint.shape[1:]), dtype=torch.float32),
)
register(
    "materialize(Tensor(a!) checkpoint, Tensor ring_u, Tensor ring_k, Tensor ring_g, Tensor write_pos, "
    "Tensor checkpoint_slot, Tensor src, Tensor dst, str backend) -> ()",
    _materialize,
    lambda *_: None,
)
register(
    "advance(Tensor(a!) write_pos, Tensor(b!) checkpoint_slot, Tensor(c!)? counters, Tensor slots, int flush_period, "
    "Tensor? force_flush, str backend) -> ()",
    _advance,
    lambda *_: None,
)
