"""Random programs of pool and decode calls, run beside a float64 model of what every slot holds."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import Layer, poison, relative_error

from replayssm import ReplayPool
from replayssm.state import SlotError

NUM_SLOTS = 5


class Programs(RuleBasedStateMachine):
    """Slots live or frozen, each with the exact state of every layer and the cursor that it should have."""

    @initialize(ring_len=st.integers(1, 5), spare=st.integers(0, 2), seed=st.integers(0, 2**31))
    def start(self, ring_len: int, spare: int, seed: int) -> None:
        self.layers = [
            Layer("gdn", 1, 2, 8, 4, seed=seed),
            Layer("kda_bounded", 1, 1, 8, 4, seed=seed + 1),
            Layer("mamba2", 1, 2, 4, 8, seed=seed + 2),
        ]
        specs = [layer.spec for layer in self.layers]
        self.pool = ReplayPool(specs, NUM_SLOTS, ring_len=ring_len, ring_capacity=ring_len + spare)
        poison(self.pool)
        self.live: dict[int, list[torch.Tensor]] = {}
        self.frozen: dict[int, list[torch.Tensor]] = {}
        self.cursor: dict[int, int] = {}
        self.steps = self.flushes = 0

    def pick(self, data: st.DataObject, slots: dict[int, Any]) -> int:
        return data.draw(st.sampled_from(sorted(slots)))

    def try_new(self, make: Any) -> int | None:
        """A new slot, or None if the pool says that none is free."""
        try:
            slot = make()
        except SlotError as error:
            assert "are free" in str(error)  # noqa: PT017 (a full pool is a fair answer)
            assert len(self.live) + len(self.frozen) + self.retired_at_most() >= NUM_SLOTS
            return None
        assert slot not in self.live
        assert slot not in self.frozen
        return int(slot)

    def retired_at_most(self) -> int:
        """Freed snapshots that a live fork may still read."""
        named = set(self.pool.checkpoint_slot[sorted(self.live)].tolist()) if self.live else set()
        return len(named - set(self.live) - set(self.frozen))

    @rule()
    def alloc(self) -> None:
        slot = self.try_new(lambda: self.pool.alloc()[0])
        if slot is not None:
            self.live[slot] = [layer.zero_state(1) for layer in self.layers]
            self.cursor[slot] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), seed=st.integers(0, 2**31))
    def prefill(self, data: st.DataObject, seed: int) -> None:
        slot = self.pick(data, self.live)
        rng = torch.Generator().manual_seed(seed)
        for i, spec in enumerate(self.pool.layers):
            state = torch.randn(1, *spec.checkpoint_shape, generator=rng)
            self.pool.write_state(i, [slot], state)
            self.live[slot][i] = state.double()
        self.pool.reset_cursors([slot])
        self.cursor[slot] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 4), forced=st.booleans())
    def decode(self, data: st.DataObject, count: int, forced: bool) -> None:
        batch = data.draw(st.permutations([*sorted(self.live), -1]))[: data.draw(st.integers(1, len(self.live) + 1))]
        slots = self.pool.slot_tensor(batch)
        for _ in range(count):
            force = torch.tensor([data.draw(st.booleans()) for _ in batch]) if forced else None
            for i, layer in enumerate(self.layers):
                inputs = layer.draw(len(batch))
                y = layer.decode(inputs, **self.pool.state_args(i), slots=slots, force_flush=force)
                for row, slot in enumerate(batch):
                    if slot < 0:
                        assert (y[row] == 0).all()
                        continue
                    one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
                    self.live[slot][i], expected = layer.reference(one, self.live[slot][i])
                    assert relative_error(y[row], expected[0]) < 1e-5
            self.pool.advance(slots, force)
            for row, slot in enumerate(batch):
                if slot >= 0:
                    flush = self.cursor[slot] >= self.pool.ring_len - 1 or (force is not None and bool(force[row]))
                    self.cursor[slot] = 0 if flush else self.cursor[slot] + 1
                    self.steps += 1
                    self.flushes += flush

    @precondition(lambda self: self.live or self.frozen)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        src = self.pick(data, {**self.live, **self.frozen})
        slot = self.try_new(lambda: self.pool.fork(src))
        if slot is not None:
            self.live[slot] = list(self.live.get(src) or self.frozen[src])
            self.cursor[slot] = self.cursor[src]

    @precondition(lambda self: self.live or self.frozen)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        src = self.pick(data, {**self.live, **self.frozen})
        slot = self.try_new(lambda: self.pool.snapshot(src))
        if slot is not None:
            self.frozen[slot] = list(self.live.get(src) or self.frozen[src])
            self.cursor[slot] = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def materialize(self, data: st.DataObject) -> None:
        src, dst = self.pick(data, {**self.live, **self.frozen}), self.pick(data, self.live)
        self.pool.materialize(src, dst)
        self.live[dst] = list(self.live.get(src) or self.frozen[src])
        self.cursor[dst] = 0

    @precondition(lambda self: self.live or self.frozen)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = self.pick(data, {**self.live, **self.frozen})
        self.pool.free(slot)
        self.live.pop(slot, None)
        self.frozen.pop(slot, None)
        with_error = None
        try:
            self.pool.free(slot)
        except SlotError as error:
            with_error = error
        assert with_error is not None

    @invariant()
    def every_slot_holds_its_state(self) -> None:
        if not hasattr(self, "pool"):
            return
        for slot, states in {**self.live, **self.frozen}.items():
            assert int(self.pool.write_pos[slot]) == self.cursor[slot]
            for i, state in enumerate(states):
                folded = self.pool.read_state(i, [slot])
                if float(state.norm()) == 0:
                    assert float(folded.norm()) == 0
                else:
                    assert relative_error(folded, state) < 1e-5

    @invariant()
    def every_step_is_counted(self) -> None:
        if hasattr(self, "pool"):
            counters = self.pool.counters()
            assert (counters["decode_steps"], counters["flushes"]) == (self.steps, self.flushes)


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
