"""Random programs of decodes, verify windows and pool calls, beside a float64 model of what every slot holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import Layer, poison, relative_error
from torch import Tensor
from windows import TREES, int32, path_to

from replayssm import ReplayPool, ops
from replayssm.state import SlotError

NUM_SLOTS = 5
CHANNELS, WIDTH = 3, 4


@dataclass
class Held:
    """What a slot should hold: exact states of all layers, the last inputs of the convolution, and the cursor."""

    states: list[Tensor]
    inputs: Tensor  # [C, W - 1]
    cursor: int = 0


class Programs(RuleBasedStateMachine):
    """Slots live or frozen, on one device and backend."""

    place: ClassVar[dict[str, str]] = {"device": "cpu", "backend": "torch"}
    dims: ClassVar[Sequence[tuple[int, int]]] = [(8, 4), (8, 4), (4, 8)]  # of the layers' keys and values
    sizes: ClassVar[Sequence[tuple[int, int]]] = [(ring_len, spare) for ring_len in range(1, 6) for spare in range(5)]

    @initialize(data=st.data(), seed=st.integers(0, 2**31))
    def start(self, data: st.DataObject, seed: int) -> None:
        ring_len, spare = data.draw(st.sampled_from(self.sizes))
        self.device = self.place["device"]
        self.layers = [
            Layer("gdn", 1, 2, *self.dims[0], seed=seed, **self.place),
            Layer("kda_bounded", 1, 1, *self.dims[1], seed=seed + 1, **self.place),
            Layer("mamba2", 1, 2, *self.dims[2], seed=seed + 2, **self.place),
        ]
        specs = [layer.spec for layer in self.layers]
        specs[1] = replace(specs[1], conv_dim=CHANNELS, conv_width=WIDTH)
        self.rows = ring_len + spare
        sizes = {"ring_len": ring_len, "ring_capacity": self.rows, "max_window": self.rows}
        self.pool = ReplayPool(specs, NUM_SLOTS, **sizes, **self.place)  # type: ignore[arg-type]
        poison(self.pool)
        self.rng = torch.Generator().manual_seed(seed)
        self.weight = torch.randn(CHANNELS, WIDTH, generator=self.rng).to(self.device)
        self.live: dict[int, Held] = {}
        self.frozen: dict[int, Held] = {}
        self.steps = self.flushes = self.windows = self.folds = 0

    def pick(self, data: st.DataObject, slots: dict[int, Any]) -> int:
        return data.draw(st.sampled_from(sorted(slots)))

    def pick_batch(self, data: st.DataObject) -> list[int]:
        """Some live slots in any order, and perhaps a padding row."""
        return data.draw(st.permutations([*sorted(self.live), -1]))[: data.draw(st.integers(1, len(self.live) + 1))]

    def held(self, slot: int) -> Held:
        """A copy of what a slot holds."""
        held = self.live.get(slot) or self.frozen[slot]
        return replace(held, states=list(held.states))

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

    def new_inputs(self, *shape: int) -> Tensor:
        return torch.randn(*shape, CHANNELS, generator=self.rng).to(self.device)

    @rule()
    def alloc(self) -> None:
        slot = self.try_new(lambda: self.pool.alloc()[0])
        if slot is not None:
            zeros = torch.zeros(CHANNELS, WIDTH - 1, device=self.device)
            self.live[slot] = Held([layer.zero_state(1) for layer in self.layers], zeros)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), seed=st.integers(0, 2**31))
    def prefill(self, data: st.DataObject, seed: int) -> None:
        slot = self.pick(data, self.live)
        rng = torch.Generator().manual_seed(seed)
        for i, spec in enumerate(self.pool.layers):
            state = torch.randn(1, *spec.checkpoint_shape, generator=rng).to(self.device)
            self.pool.write_state(i, [slot], state)
            self.live[slot].states[i] = state.double()
        self.pool.reset_cursors([slot])
        self.live[slot].cursor = 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 4), forced=st.booleans())
    def decode(self, data: st.DataObject, count: int, forced: bool) -> None:
        batch = self.pick_batch(data)
        slots = self.pool.slot_tensor(batch)
        for _ in range(count):
            force = None
            if forced:
                force = torch.tensor([data.draw(st.booleans()) for _ in batch], device=self.device)
            for i, layer in enumerate(self.layers):
                inputs = layer.draw(len(batch))
                y = layer.decode(inputs, **self.pool.state_args(i), slots=slots, force_flush=force)
                for row, slot in enumerate(batch):
                    if slot < 0:
                        assert (y[row] == 0).all()
                        continue
                    states = self.live[slot].states
                    states[i], expected = layer.reference(row_of(inputs, row), states[i])
                    assert_output(y[row], expected[0], states[i])
            x = self.new_inputs(len(batch))
            ops.causal_conv1d_update(x, self.pool.conv_state(1), self.weight, slots=slots, backend=self.pool.backend)
            self.pool.advance(slots, force)
            for row, slot in enumerate(batch):
                if slot >= 0:
                    held = self.live[slot]
                    flush = held.cursor >= self.pool.ring_len - 1 or (force is not None and bool(force[row]))
                    held.cursor = 0 if flush else held.cursor + 1
                    held.inputs = torch.cat([held.inputs, x[row, :, None]], dim=1)[:, 1:]
                    self.steps += 1
                    self.flushes += flush

    @precondition(lambda self: self.live)
    @rule(data=st.data(), tree=st.sampled_from(sorted(TREES)), count=st.integers(1, 3), ragged=st.booleans())
    def verify_and_commit(self, data: st.DataObject, tree: str, count: int, ragged: bool) -> None:
        """Windows one after the other, each with a commit of any number, none and all among them."""
        batch = self.pick_batch(data)
        for _ in range(count):
            tokens = data.draw(st.integers(1, self.rows))
            counts = [data.draw(st.integers(0, tokens)) if ragged else tokens for _ in batch]
            self.window(data, batch, tree, tokens, counts)

    def window(self, data: st.DataObject, batch: list[int], tree: str, tokens: int, counts: list[int]) -> None:
        slots, num_tokens = self.pool.slot_tensor(batch), int32(counts, self.device)
        parents = [TREES[tree](tokens, self.rng) for _ in batch]
        given = None if tree == "chain" else int32(parents, self.device)
        window = {"slots": slots, "num_tokens": num_tokens, "parents": given}
        after: list[dict[int, list[Tensor]]] = []
        for i, layer in enumerate(self.layers):
            inputs = layer.draw_window(len(batch), tokens)
            y = layer.verify(unused_as_nan(inputs, counts), **self.pool.verify_args(i), **window)
            after.append({})
            for row, slot in enumerate(batch):
                used = counts[row] if slot >= 0 else 0
                assert (y[row, used:] == 0).all()
                if used:
                    one = {name: x[:, :used] for name, x in row_of(inputs, row).items()}
                    state = self.live[slot].states[i]
                    after[i][slot], expected = layer.reference_window(one, state, parents[row][:used])
                    for token, state in enumerate(after[i][slot]):
                        assert_output(y[row, token], expected[0, token], state)
        x = self.new_inputs(len(batch), tokens)
        conv = self.pool.conv_state(1), self.pool.conv_window(1)
        ops.causal_conv1d_verify(x, *conv, self.weight, **window, backend=self.pool.backend)

        nodes = [data.draw(st.integers(-1, n - 1)) for n in counts]
        paths = [path_to(node, line) for node, line in zip(nodes, parents, strict=True)]
        by_path = tree != "chain" or data.draw(st.booleans())
        path = int32([[*p, *([99] * (tokens - len(p)))] for p in paths], self.device) if by_path else None
        self.pool.commit(slots, num_tokens, int32([len(p) for p in paths], self.device), path)
        for slot, used, accepted, row_x in zip(batch, counts, paths, x, strict=True):
            if slot < 0 or not used:
                continue
            held = self.live[slot]
            fold = held.cursor + used > self.rows
            held.cursor = (0 if fold else held.cursor) + len(accepted)
            held.inputs = torch.cat([held.inputs, row_x[accepted].T], dim=1)[:, -(WIDTH - 1) :]
            if accepted:
                held.states = [states[slot][accepted[-1]] for states in after]
            self.windows += 1
            self.folds += fold

    @precondition(lambda self: self.live or self.frozen)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        src = self.pick(data, {**self.live, **self.frozen})
        slot = self.try_new(lambda: self.pool.fork(src))
        if slot is not None:
            self.live[slot] = self.held(src)

    @precondition(lambda self: self.live or self.frozen)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        src = self.pick(data, {**self.live, **self.frozen})
        slot = self.try_new(lambda: self.pool.snapshot(src))
        if slot is not None:
            self.frozen[slot] = replace(self.held(src), cursor=0)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def materialize(self, data: st.DataObject) -> None:
        src, dst = self.pick(data, {**self.live, **self.frozen}), self.pick(data, self.live)
        self.pool.materialize(src, dst)
        self.live[dst] = replace(self.held(src), cursor=0)

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
        every = {**self.live, **self.frozen} if hasattr(self, "pool") else {}
        if not every:
            return
        assert self.pool.write_pos[list(every)].tolist() == [held.cursor for held in every.values()]
        for i in range(len(self.layers)):
            folded = self.pool.read_state(i, list(every))
            for state, held in zip(folded, every.values(), strict=True):
                if float(held.states[i].norm()) == 0:
                    assert float(state.norm()) == 0
                else:
                    assert relative_error(state, held.states[i][0]) < 1e-5
        for slot, held in every.items():
            assert torch.equal(self.pool.conv_state(1)[slot], held.inputs)

    @invariant()
    def every_step_is_counted(self) -> None:
        if hasattr(self, "pool"):
            counters = self.pool.counters()
            assert (counters["decode_steps"], counters["flushes"]) == (self.steps, self.flushes)
            assert (counters["verify_steps"], counters["folds"]) == (self.windows, self.folds)


def assert_output(y: Tensor, expected: Tensor, state: Tensor) -> None:
    """An output is S q, and its sums may cancel (seen: to 1e-4 of the state), so S counts beside it."""
    error = float((y.double() - expected).norm())
    assert error < 1e-5 * float(expected.norm()) + 1e-6 * float(state.norm())


def row_of(inputs: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: x[row : row + 1] for name, x in inputs.items()}


def unused_as_nan(inputs: dict[str, Tensor], counts: list[int]) -> dict[str, Tensor]:
    copies = {name: x.clone() for name, x in inputs.items()}
    for x in copies.values():
        for row, used in enumerate(counts):
            x[row, used:] = float("nan")
    return copies


def programs(device: str, backend: str) -> Any:
    """The test case of one backend: 150 examples, about 4,000 steps of a slot, two fifths of them windows."""
    place: dict[str, Any] = {"place": {"device": device, "backend": backend}}
    examples, calls = 150, 50
    if (device, backend) == ("cpu", "triton"):  # interpreted: 10 s for an example of 50 calls
        examples, calls = 3, 30
    if device == "cuda":  # fewer lengths of rings, for each of which there are kernels to compile
        examples, place["sizes"] = 80, [(1, 0), (3, 0), (4, 2)]
    if backend == "cuda":  # of dims that it has kernels for
        place["dims"] = [(64, 16), (64, 16), (64, 32)]
    case = type(f"Programs_{device}_{backend}", (Programs,), place).TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=calls,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )
    return pytest.mark.gpu(case) if device == "cuda" else case


def places() -> Iterator[tuple[str, str]]:
    """Devices and backends that are here."""
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        for backend in ops.BACKENDS:
            if ops.unavailable_reason(backend, device) is None:
                yield device, backend


globals().update({f"TestPrograms_{device}_{backend}": programs(device, backend) for device, backend in places()})
