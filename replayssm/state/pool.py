"""The slot pool: the one owner of slots and cursors."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from replayssm import ops
from replayssm.ops.checks import check_count
from replayssm.state.layout import LayerBytes, LayerSpec, LayerState, StateDtypes, layer_bytes
from replayssm.state.transfer import to_device

KEPT_INDICES = 16  # lists of slots whose tensors are kept: a prefill asks for some in each layer


class SlotError(ValueError):
    """A slot is out of range, was freed, or is not to be written."""


class _Use(Enum):
    FREE = "free"
    LIVE = "live"
    SNAPSHOT = "a snapshot"
    RETIRED = "freed"  # a snapshot that was freed while a fork may still read it


class ReplayPool:
    """Recurrent state of many requests: for each a slot with checkpoint, ring and convolution state in every layer.

    Cursors are shared by all layers and move once per forward, by :meth:`advance`. A decode step waits for
    nothing on the device. Methods that take slots as numbers may, to send them there.

    A verify forward writes draft records behind the cursors and may fold the committed ones; :meth:`commit` closes it.
    Between the two a slot's window is open, which the pool can't see: until then such a slot may be freed, but not
    decoded, read, forked, snapshotted or materialized.

    Args:
        layers: one spec per recurrent layer, in the order in which a forward runs them.
        num_slots: N.
        ring_len: L, the flush period in tokens; 1 updates the checkpoint at every step.
        ring_capacity: R ≥ L rows in each ring; default L. A verify folds the records of a ring that has no room for
            its window, so R is the flush period of those.
        max_window: T_max, the longest verify window in tokens; 0 if there is none to come. At most 16, at most R.
        state_dtype: dtype of the checkpoints: float32, bfloat16 or float16.
        activation_dtype: dtype in which layers produce keys; also of the convolution state.
        ring_dtype: dtype of the ring's updates: float32, the activation dtype, or ``"auto"`` for bfloat16 beside
            bfloat16 checkpoints and activations, and float32 otherwise.
        device: where the tensors live.
        backend: see :mod:`replayssm.ops`.

    Raises:
        ValueError: a number or dtype is out of range.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_slots: int,
        *,
        ring_len: int = 16,
        ring_capacity: int | None = None,
        max_window: int = 0,
        state_dtype: torch.dtype = torch.float32,
        activation_dtype: torch.dtype = torch.float32,
        ring_dtype: torch.dtype | str = "auto",
        device: torch.device | str = "cpu",
        backend: str = "auto",
    ) -> None:
        ring_capacity = ring_len if ring_capacity is None else ring_capacity
        if not layers:
            raise ValueError("layers is empty: a LayerSpec for each recurrent layer is wanted")
        check_count("num_slots", num_slots, 1)
        check_count("ring_len", ring_len, 1)
        check_count("ring_capacity", ring_capacity, ring_len, f"a whole number of at least ring_len = {ring_len}")
        _check_max_window(max_window, ring_capacity)
        self.layers = tuple(layers)
        self.num_slots = num_slots
        self.ring_len = ring_len
        self.ring_capacity = ring_capacity
        self.max_window = max_window
        self.dtypes = StateDtypes.choose(state_dtype, activation_dtype, ring_dtype)
        self.device = torch.device(device)
        self.backend = ops.resolve_backend(backend, self.device)
        self.write_pos = torch.zeros(num_slots, dtype=torch.int32, device=self.device)
        self.checkpoint_slot = torch.arange(num_slots, dtype=torch.int32, device=self.device)
        self._states = [
            LayerState.empty(spec, num_slots, ring_capacity, max_window, self.dtypes, self.device) for spec in layers
        ]
        self._counters = torch.zeros(num_slots, 3, dtype=torch.int64, device=self.device)
        self._window_counters = torch.zeros(num_slots, 5, dtype=torch.int64, device=self.device)
        self._prefill_bytes = 0
        self._copied_bytes = 0
        self._use = [_Use.FREE] * num_slots
        self._free = list(range(num_slots))
        self._indexed: dict[tuple[int, ...], Tensor] = {}
        self._forks: dict[int, set[int]] = {}  # snapshot -> live slots forked from it

    # Slots

    @property
    def num_free(self) -> int:
        """Slots that :meth:`alloc` can hand out without asking the device for more."""
        return len(self._free)

    def alloc(self, count: int = 1, *, zero: bool = True) -> list[int]:
        """Take slots, the lowest numbers first.

        Args:
            count: how many.
            zero: with a zero state; otherwise a prefill must write to them before anything reads them.

        Raises:
            SlotError: fewer than ``count`` slots are free; none is taken.
        """
        with self._taking(count) as slots:
            if zero:
                run = self._index(slots)
                for state in self._states:
                    state.checkpoint[run] = 0
                    state.conv[run] = 0
        return slots

    def free(self, slots: int | Sequence[int]) -> None:
        """Give slots back. A snapshot's memory is reused once no fork reads it any more.

        Raises:
            SlotError: a slot is out of range or not in use, or named twice; none is freed.
        """
        slots = self._checked(slots)
        for slot in slots:
            self._use[slot] = _Use.RETIRED if self._forks.get(slot) else _Use.FREE
        for slot in slots:
            if self._use[slot] is _Use.FREE:
                self._forks.pop(slot, None)
                heapq.heappush(self._free, slot)
        self._stop_reading(slots)

    def has_readers(self, snapshot: int) -> bool:
        """Whether a fork of it may still read its checkpoint, so that freeing it gives no slot yet."""
        return bool(self._forks.get(snapshot))

    def fork(self, src: int) -> int:
        """A new slot that continues from ``src``: same state, same records, same cursor.

        From a snapshot no state is copied: the new slot reads the snapshot's checkpoint until its first flush.

        Raises:
            SlotError: ``src`` is not in use, or no slot is free.
        """
        self._checked(src)
        with self._taking(1) as (dst,):
            if self._use[src] is _Use.SNAPSHOT:
                self._refer(src, dst)
            else:
                self._copy(src, dst)
        return dst

    def snapshot(self, src: int) -> int:
        """Keep the state of ``src`` at its cursor in a new slot, which can be forked but not decoded.

        ``src`` goes on as if nothing had happened.

        Raises:
            SlotError: ``src`` is not in use, or no slot is free.
        """
        self._checked(src)
        with self._taking(1) as (dst,):
            self._fold_into(src, dst)
            self.seal(dst)
        return dst

    def seal(self, slot: int) -> None:
        """Make a snapshot of a live slot whose checkpoint a prefill has written: it is forked from now on, not decoded.

        Raises:
            SlotError: it isn't live.
        """
        self._checked_live([slot])
        self._use[slot] = _Use.SNAPSHOT
        self._forks[slot] = set()

    def materialize(self, src: int, dst: int) -> None:
        """Write the state of ``src`` at its cursor into the live slot ``dst``, with an empty ring.

        Raises:
            SlotError: a slot is not in use, or ``dst`` is a snapshot.
        """
        self._checked(src)
        self._checked_live(dst)
        self._fold_into(src, dst)

    def slot_tensor(self, slots: Sequence[int]) -> Tensor:
        """Live slots, or negative padding, as the int32 device tensor that the operators take.

        Raises:
            SlotError: a slot is not in use, is a snapshot, or named twice.
        """
        slots = [self._number(slot) for slot in slots]
        self._checked_live([slot for slot in slots if slot >= 0])
        return torch.tensor(slots, dtype=torch.int32, device=self.device)

    # States and cursors

    def state_args(self, layer: int) -> dict[str, Tensor | int | str]:
        """Keyword arguments of a decode operator: everything but ``slots`` and ``force_flush``."""
        return {**self.fold_args(layer), "flush_period": self.ring_len, "backend": self.backend}

    def verify_args(self, layer: int) -> dict[str, Tensor | str]:
        """Keyword arguments of a verify operator: everything but ``slots``, ``num_tokens`` and ``parents``."""
        return {**self.fold_args(layer), "backend": self.backend}

    def fold_args(self, layer: int) -> dict[str, Tensor]:
        """The state tensors of one layer, named as the operators name them."""
        state = self._states[layer]
        return {
            "checkpoint": state.checkpoint,
            "ring_u": state.ring_u,
            "ring_k": state.ring_k,
            "ring_g": state.ring_g,
            "write_pos": self.write_pos,
            "checkpoint_slot": self.checkpoint_slot,
        }

    def conv_state(self, layer: int) -> Tensor:
        """Convolution state of one layer, ``[N, C, W − 1]``, oldest input first."""
        return self._states[layer].conv

    def conv_window(self, layer: int) -> Tensor:
        """Convolution inputs of one layer's window in flight, ``[N, C, T_max]``."""
        return self._states[layer].conv_window

    def tensors(self) -> list[Tensor]:
        """Every tensor of the pool, whose addresses stay as they are."""
        states = [getattr(state, field.name) for state in self._states for field in fields(state)]
        return [self.write_pos, self.checkpoint_slot, self._counters, self._window_counters, *states]

    def read_state(self, layer: int, slots: Sequence[int]) -> Tensor:
        """State at each slot's cursor, float32 ``[B, H_v, d_v, d_k]``."""
        index = self._index(self._checked(slots))
        return ops.read_state(**self.fold_args(layer), slots=index.int(), backend=self.backend)

    def write_state(self, layer: int, slots: Sequence[int], state: Tensor, *, kept: bool = False) -> None:
        """Store a prefill's final state ``[B, H_v, d_v, d_k]`` as checkpoint.

        After all layers, :meth:`reset_cursors` drops the records that the new checkpoints hold already.

        Args:
            layer: whose.
            slots: live ones.
            state: of each.
            kept: it is another slot's state that is kept for a snapshot: counted as a copy.
        """
        slots = self._checked_live(slots)
        wanted = (len(slots), *self.layers[layer].checkpoint_shape)
        if tuple(state.shape) != wanted:
            raise ValueError(f"state has shape {list(state.shape)}: [B, H_v, d_v, d_k] = {list(wanted)} is wanted")
        checkpoint = self._states[layer].checkpoint
        checkpoint[self._index(slots)] = state.to(checkpoint)
        nbytes = len(slots) * self.bytes_of(layer).checkpoint
        if kept:
            self._copied_bytes += nbytes
        else:
            self._prefill_bytes += nbytes

    def reset_cursors(self, slots: Sequence[int]) -> None:
        """Start anew from the slots' own checkpoints, with empty rings."""
        slots = self._checked_live(slots)
        index = self._index(slots)
        self.write_pos[index] = 0
        self.checkpoint_slot[index] = index.int()
        self._stop_reading(slots)

    def advance(self, slots: Tensor, force_flush: Tensor | None = None) -> None:
        """Move the cursors after a decode step of all layers, with the slots and flags that the step had.

        Args:
            slots: ``[B]`` int32, from :meth:`slot_tensor`.
            force_flush: ``[B]`` bool or int32, or None.
        """
        ops.advance(
            self.write_pos,
            self.checkpoint_slot,
            slots,
            flush_period=self.ring_len,
            force_flush=force_flush,
            counters=self._counters,
            backend=self.backend,
        )

    def commit(self, slots: Tensor, num_tokens: Tensor, num_accepted: Tensor, path: Tensor | None = None) -> None:
        """Keep the accepted tokens of a verify of all layers; the others leave nothing behind.

        Args:
            slots: ``[B]`` int32, as the verify had them.
            num_tokens: ``[B]`` int32, tokens that each row's window had.
            num_accepted: ``[B]`` int32, from 0 to num_tokens.
            path: ``[B, T]`` int32, the accepted tokens of a tree, see :func:`replayssm.ops.accept`. None: the first
                num_accepted tokens.
        """
        rows = {"write_pos": self.write_pos, "slots": slots, "num_tokens": num_tokens, "num_accepted": num_accepted}
        for spec, state in zip(self.layers, self._states, strict=True):
            with_conv = spec.conv_dim > 0 and spec.conv_width > 1
            ops.accept(
                state.ring_u,
                state.ring_k,
                state.ring_g,
                conv_state=state.conv if with_conv else None,
                conv_window=state.conv_window if with_conv else None,
                path=path,
                backend=self.backend,
                **rows,
            )
        ops.commit(
            **rows,
            checkpoint_slot=self.checkpoint_slot,
            ring_rows=self.ring_capacity,
            counters=self._window_counters,
            backend=self.backend,
        )

    # Bytes

    def bytes_of(self, layer: int) -> LayerBytes:
        """Bytes of one slot in one layer."""
        return layer_bytes(self.layers[layer], self.dtypes, self.ring_capacity, self.max_window)

    @property
    def checkpoint_bytes_per_slot(self) -> int:
        return sum(self.bytes_of(i).checkpoint for i in range(len(self.layers)))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one more slot takes: checkpoints, rings, convolution inputs and cursors of all layers."""
        per_slot = (self.write_pos, self.checkpoint_slot, self._counters, self._window_counters)
        return sum(self.bytes_of(i).total for i in range(len(self.layers))) + sum(t[0:1].nbytes for t in per_slot)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_slots * self.bytes_per_slot

    def counters(self) -> dict[str, int]:
        """What was read and written since the pool was made, summed over slots and layers.

        ``decode_steps`` and ``flushes`` count slots' steps, ``verify_steps`` and ``folds`` their committed windows,
        ``tokens_verified`` and ``tokens_accepted`` the tokens in these. ``state_bytes_written`` are checkpoint writes
        of prefills, flushes and folds; ``state_bytes_written_stepwise`` those that updating the state at every step
        and for every accepted token would have made. Copies made by forks, snapshots and materialize are
        ``state_bytes_copied``. Records that move along a tree's path are not counted.
        """
        steps, flushes, records = self._counters.sum(0).tolist()
        windows, folds, window_records, tokens, accepted = self._window_counters.sum(0).tolist()
        state = self.checkpoint_bytes_per_slot
        record = sum(self.bytes_of(i).record for i in range(len(self.layers)))
        return {
            "decode_steps": steps,
            "flushes": flushes,
            "verify_steps": windows,
            "folds": folds,
            "tokens_verified": tokens,
            "tokens_accepted": accepted,
            "state_bytes_read": (steps + windows) * state,
            "state_bytes_written": self._prefill_bytes + (flushes + folds) * state,
            "state_bytes_written_stepwise": self._prefill_bytes + (steps + accepted) * state,
            "state_bytes_copied": self._copied_bytes,
            "ring_bytes_read": (records + window_records) * record,
            "ring_bytes_written": (steps - flushes + tokens) * record,
        }

    # Inside

    def _index(self, slots: Sequence[int]) -> Tensor:
        """Slots on the device; the last ones are kept, because layer after layer asks for the same."""
        key = tuple(slots)
        if key not in self._indexed:
            if len(self._indexed) == KEPT_INDICES:
                del self._indexed[next(iter(self._indexed))]
            self._indexed[key] = to_device(slots, torch.int64, self.device)
        return self._indexed[key]

    @contextmanager
    def _taking(self, count: int) -> Iterator[list[int]]:
        """Slots for whoever fills them; free again if that fails."""
        slots = self._take(count)
        try:
            if slots:
                self.reset_cursors(slots)
            yield slots
        except BaseException:
            self.free(slots)
            raise

    def _take(self, count: int) -> list[int]:
        if count < 0:
            raise SlotError(f"count is {count}: 0 or more slots are wanted")
        if count > len(self._free):
            self._reclaim()
        if count > len(self._free):
            raise SlotError(f"{count} slots are wanted, {len(self._free)} of {self.num_slots} are free")
        slots = [heapq.heappop(self._free) for _ in range(count)]
        for slot in slots:
            self._use[slot] = _Use.LIVE
        return slots

    def _refer(self, src: int, dst: int) -> None:
        """Let ``dst`` read the checkpoint of a snapshot."""
        for state in self._states:
            state.conv[dst] = state.conv[src]
        self.checkpoint_slot[dst] = src
        self._forks[src].add(dst)

    def _copy(self, src: int, dst: int) -> None:
        """Write state, records and cursor of a live slot into ``dst``."""
        source = self.checkpoint_slot[src : src + 1]
        for state in self._states:
            state.checkpoint[dst] = state.checkpoint.index_select(0, source)[0]
            for tensor in state.per_slot:
                tensor[dst] = tensor[src]
        self.write_pos[dst] = self.write_pos[src]
        self._copied_bytes += self.checkpoint_bytes_per_slot

    def _fold_into(self, src: int, dst: int) -> None:
        for layer, state in enumerate(self._states):
            source, target = (self._index([s]).int() for s in (src, dst))
            ops.materialize(**self.fold_args(layer), src=source, dst=target, backend=self.backend)
            if src != dst:
                state.conv[dst] = state.conv[src]
        self.reset_cursors([dst])
        self._copied_bytes += self.checkpoint_bytes_per_slot

    def _reclaim(self) -> None:
        """Release freed snapshots whose forks have all flushed; asks the device, so only when slots run out."""
        if _Use.RETIRED not in self._use:
            return
        source = self.checkpoint_slot.tolist()
        for snapshot, forks in list(self._forks.items()):
            forks &= {slot for slot in forks if source[slot] == snapshot}
            if not forks and self._use[snapshot] is _Use.RETIRED:
                self._release(snapshot)

    def _stop_reading(self, slots: Sequence[int]) -> None:
        """These slots read no snapshot any more; release the freed snapshots that nobody reads then."""
        for snapshot, forks in list(self._forks.items()):
            forks.difference_update(slots)
            if not forks and self._use[snapshot] is _Use.RETIRED:
                self._release(snapshot)

    def _release(self, snapshot: int) -> None:
        del self._forks[snapshot]
        self._use[snapshot] = _Use.FREE
        heapq.heappush(self._free, snapshot)

    def _checked(self, slots: int | Sequence[int]) -> list[int]:
        """Slots as a list, each in range, in use, and named once."""
        slots = [self._number(slot) for slot in (slots if hasattr(slots, "__iter__") else [slots])]
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise SlotError(f"slot {slot} is out of range: 0 to {self.num_slots - 1} is wanted")
            if self._use[slot] not in (_Use.LIVE, _Use.SNAPSHOT):
                raise SlotError(f"slot {slot} is not in use: it was freed, or never handed out by alloc or fork")
        if len(set(slots)) < len(slots):
            raise SlotError(f"slots {slots} name a slot more than once")
        return slots

    @staticmethod
    def _number(slot: SupportsIndex) -> int:
        if not isinstance(slot, SupportsIndex):
            raise SlotError(f"slot {slot!r} is a {type(slot).__name__}: an integer is wanted")
        return index(slot)

    def _checked_live(self, slots: int | Sequence[int]) -> list[int]:
        """As _checked, and none a snapshot."""
        checked = self._checked(slots)
        for slot in checked:
            if self._use[slot] is _Use.SNAPSHOT:
                raise SlotError(f"slot {slot} is a snapshot: fork it and use the fork")
        return checked


def _check_max_window(max_window: int, ring_capacity: int) -> None:
    check_count("max_window", max_window, 0)
    if max_window > ops.MAX_WINDOW:
        raise ValueError(f"max_window is {max_window}: at most {ops.MAX_WINDOW} tokens are wanted")
    if max_window > ring_capacity:
        raise ValueError(
            f"max_window is {max_window}, but a ring has {ring_capacity} rows: "
            f"a shorter window, or ring_capacity={max_window} or more, is wanted"
        )
