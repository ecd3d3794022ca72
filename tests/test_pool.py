"""The slot pool: who may use a slot, what a fork and a snapshot hold, and what everything costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import Layer, poison, relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from windows import int32

from replayssm import LayerSpec, ReplayPool, ops
from replayssm.state import SlotError

LAYERS = [Layer("gdn", 1, 2, 16, 16), Layer("kda", 2, 2, 16, 8, seed=1), Layer("mamba2", 1, 2, 16, 16, seed=2)]
SPECS = [LayerSpec(**{**vars(layer.spec), "conv_dim": 12}) for layer in LAYERS]


def new_pool(num_slots: int = 6, **options: object) -> ReplayPool:
    pool = ReplayPool(SPECS, num_slots, **{"ring_len": 4, **options})
    poison(pool)
    return pool


class Run:
    """Slots of a pool beside their float64 states."""

    def __init__(self, pool: ReplayPool) -> None:
        self.pool = pool
        self.states: dict[int, list[torch.Tensor]] = {}

    def alloc(self) -> int:
        (slot,) = self.pool.alloc()
        self.states[slot] = [layer.zero_state(1) for layer in LAYERS]
        return slot

    def step(self, *rows: int, count: int = 1) -> None:
        """Decode random tokens in all layers and check each output."""
        slots = self.pool.slot_tensor(rows)
        for _ in range(count):
            for i, layer in enumerate(LAYERS):
                inputs = layer.draw(len(rows))
                y = layer.decode(inputs, **self.pool.state_args(i), slots=slots)
                for row, slot in enumerate(rows):
                    one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
                    self.states[slot][i], expected = layer.reference(one, self.states[slot][i])
                    assert relative_error(y[row], expected[0]) < 2e-6
            self.pool.advance(slots)

    def check(self) -> None:
        for slot, states in self.states.items():
            for i, state in enumerate(states):
                assert relative_error(self.pool.read_state(i, [slot]), state) < 2e-6


def test_slots_are_handed_out_zeroed_and_reset_on_reuse() -> None:
    run = Run(new_pool())
    first = run.alloc()
    run.step(first, count=6)
    run.pool.conv_state(0)[first] = 7
    run.pool.free(first)
    del run.states[first]
    again = run.alloc()
    assert again == first
    assert (run.pool.conv_state(0)[again] == 0).all()
    run.check()
    run.step(again, count=6)
    run.check()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda pool: pool.free(5), "slot 5 is not in use"),
        (lambda pool: pool.free(6), "slot 6 is out of range: 0 to 5 is wanted"),
        (lambda pool: pool.free(-1), "slot -1 is out of range"),
        (lambda pool: pool.free([0, 0]), r"slots \[0, 0\] name a slot more than once"),
        (lambda pool: pool.free(["0"]), "slot '0' is a str: an integer is wanted"),
        (lambda pool: (pool.free(0), pool.free(0)), "slot 0 is not in use: it was freed"),
        (lambda pool: (pool.free(0), pool.slot_tensor([0])), "slot 0 is not in use: it was freed"),
        (lambda pool: (pool.free(0), pool.read_state(0, [0])), "slot 0 is not in use"),
        (lambda pool: (pool.free(0), pool.fork(0)), "slot 0 is not in use"),
        (lambda pool: (pool.free(0), pool.materialize(1, 0)), "slot 0 is not in use"),
        (lambda pool: pool.alloc(5), "5 slots are wanted, 4 of 6 are free"),
        (lambda pool: pool.alloc(-1), "count is -1"),
        (lambda pool: pool.slot_tensor([1, 1]), "more than once"),
        (lambda pool: pool.slot_tensor(["a"]), "slot 'a' is a str: an integer is wanted"),
        (lambda pool: pool.free(1.0), "slot 1.0 is a float: an integer is wanted"),
        (lambda pool: pool.slot_tensor([pool.snapshot(0)]), "slot 2 is a snapshot: fork it and use the fork"),
        (lambda pool: pool.materialize(0, pool.snapshot(0)), "slot 2 is a snapshot"),
        (lambda pool: pool.reset_cursors([pool.snapshot(0)]), "slot 2 is a snapshot"),
    ],
)
def test_misused_slots_are_named(misuse: object, message: str) -> None:
    pool = new_pool()
    pool.alloc(2)
    with pytest.raises(SlotError, match=message):
        misuse(pool)  # type: ignore[operator]


def test_a_refused_call_changes_nothing() -> None:
    pool = new_pool()
    pool.alloc(2)
    for misuse in (lambda: pool.free([1, 4]), lambda: pool.alloc(5), lambda: pool.free([0, 0])):
        with pytest.raises(SlotError):
            misuse()
        assert pool.num_free == 4
    pool.slot_tensor([0, 1])


class FailingAt(TorchDispatchMode):
    """The device fails at one operation, counted from 0."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "call",
    [
        lambda pool, live, kept: pool.alloc(2),
        lambda pool, live, kept: pool.fork(live),
        lambda pool, live, kept: pool.fork(kept),
        lambda pool, live, kept: pool.snapshot(live),
    ],
    ids=["alloc", "fork", "fork-of-snapshot", "snapshot"],
)
def test_a_call_that_fails_anywhere_keeps_no_slot(call: Callable[[ReplayPool, int, int], object]) -> None:
    run = Run(new_pool(5))
    live = run.alloc()
    run.step(live, count=2)
    kept = run.pool.snapshot(live)
    for number in range(1000):
        try:
            with FailingAt(number):
                call(run.pool, live, kept)
            break
        except RuntimeError:
            assert run.pool.num_free == 3
            assert not run.pool.has_readers(kept)
    assert number > 3
    run.step(live, count=3)
    run.check()


@pytest.mark.parametrize("at", [0, 1, 3, 4, 6])
def test_a_fork_goes_its_own_way(at: int) -> None:
    run = Run(new_pool())
    parent = run.alloc()
    run.step(parent, count=at)
    run.pool.conv_state(1)[parent] = 3
    child = run.pool.fork(parent)
    assert (run.pool.conv_state(1)[child] == 3).all()
    run.states[child] = list(run.states[parent])
    run.check()
    run.step(parent, count=5)
    run.step(child, parent, count=5)
    run.check()
    run.pool.free(parent)
    del run.states[parent]
    run.step(child, count=5)
    run.check()


def test_forks_of_a_snapshot_share_its_checkpoint_until_they_flush() -> None:
    run = Run(new_pool())
    source = run.alloc()
    run.step(source, count=6)
    kept = run.pool.snapshot(source)
    run.states[kept] = list(run.states[source])
    run.step(source, count=3)
    copied = run.pool.counters()["state_bytes_copied"]
    forks = [run.pool.fork(kept) for _ in range(2)]
    assert run.pool.counters()["state_bytes_copied"] == copied
    assert run.pool.checkpoint_slot[forks].tolist() == [kept, kept]
    for fork in forks:
        run.states[fork] = list(run.states[kept])
    run.check()
    run.step(forks[0], count=3)
    assert run.pool.checkpoint_slot[forks].tolist() == [kept, kept]
    run.step(*forks)
    assert run.pool.checkpoint_slot[forks].tolist() == [forks[0], kept]
    run.step(*forks, source, count=5)
    assert run.pool.checkpoint_slot[forks].tolist() == forks
    run.check()


@pytest.mark.parametrize("at", [0, 2])
def test_a_fork_of_a_fork_that_still_reads_a_snapshot(at: int) -> None:
    """Its checkpoint is the snapshot's, not what lies in the fork's own slot."""
    run = Run(new_pool())
    source = run.alloc()
    run.step(source, count=5)
    kept = run.pool.snapshot(source)
    run.states[kept] = list(run.states[source])
    fork = run.pool.fork(kept)
    run.states[fork] = list(run.states[kept])
    if at:
        run.step(fork, count=at)
    second = run.pool.fork(fork)
    run.states[second] = list(run.states[fork])
    run.check()
    run.step(fork, second, count=6)
    run.check()


def test_the_convolution_state_follows_the_slot() -> None:
    """Into forks of slots and of snapshots, into snapshots, and by materialize; a copy each time."""
    pool = new_pool()
    source, other = pool.alloc(2)
    convs = [pool.conv_state(i) for i in range(len(SPECS))]
    for conv in convs:
        conv[source] = torch.randn_like(conv[source])
    wanted = [conv[source].clone() for conv in convs]
    kept = pool.snapshot(source)
    copies = [kept, pool.fork(source), pool.fork(kept), other]
    pool.materialize(kept, other)
    for conv in convs:
        conv[source] = 7
    for slot in copies:
        assert all(torch.equal(conv[slot], before) for conv, before in zip(convs, wanted, strict=True)), slot


def test_a_freed_snapshot_is_reused_only_when_no_fork_reads_it() -> None:
    run = Run(new_pool(3))
    source = run.alloc()
    run.step(source, count=2)
    kept = run.pool.snapshot(source)
    fork = run.pool.fork(kept)
    run.states[fork] = list(run.states[source])
    run.pool.free(kept)
    with pytest.raises(SlotError, match=f"slot {kept} is not in use"):
        run.pool.free(kept)
    with pytest.raises(SlotError, match="0 of 3 are free"):
        run.pool.alloc()
    run.step(fork, count=4)
    assert run.alloc() == kept
    run.step(fork, source, kept, count=5)
    run.check()


def test_freeing_the_last_fork_gives_the_freed_snapshot_back() -> None:
    pool = new_pool(3)
    (source,) = pool.alloc()
    kept = pool.snapshot(source)
    fork = pool.fork(kept)
    pool.free(kept)
    assert pool.num_free == 0
    pool.free(fork)
    assert pool.num_free == 2


def test_a_fork_that_got_a_state_of_its_own_gives_the_freed_snapshot_back() -> None:
    pool = new_pool(3)
    (source,) = pool.alloc()
    kept = pool.snapshot(source)
    fork = pool.fork(kept)
    assert pool.has_readers(kept)
    pool.reset_cursors([fork])  # as after a prefill
    assert not pool.has_readers(kept)
    pool.free(kept)
    assert pool.num_free == 1
    assert not pool.has_readers(source)


def test_snapshots_and_materialize_do_not_disturb_their_source() -> None:
    """Bits, ring and flush cadence of the source are those of a run without snapshots."""
    results = []
    for disturb in (False, True):
        for layer in LAYERS:
            layer.rng.manual_seed(11)
        run = Run(new_pool())
        source, other = run.alloc(), run.alloc()
        for _ in range(11):
            run.step(source)
            if disturb:
                run.pool.free(run.pool.snapshot(source))
                run.pool.materialize(source, other)
        args = [run.pool.fold_args(i) for i in range(3)]
        results.append(
            [run.pool.write_pos[source].clone()]
            + [a[name][source].clone() for a in args for name in ("checkpoint", "ring_u", "ring_k", "ring_g")]
        )
        if disturb:
            run.states[other] = run.states[source]
            run.check()
            assert run.pool.write_pos[other] == 0
    for plain, disturbed in zip(*results, strict=True):
        assert torch.equal(plain.view(torch.int32), disturbed.view(torch.int32))


def test_a_prefill_replaces_state_and_records() -> None:
    run = Run(new_pool())
    rows = [run.alloc(), run.alloc()]
    run.step(*rows, count=2)
    for i, spec in enumerate(SPECS):
        state = torch.randn(2, *spec.checkpoint_shape)
        run.pool.write_state(i, rows, state)
        for row, slot in enumerate(rows):
            run.states[slot][i] = state[row : row + 1].double()
    run.pool.reset_cursors(rows)
    run.check()
    run.step(*rows, count=6)
    run.check()
    with pytest.raises(ValueError, match=r"state has shape \[1, 2, 16, 16\]: \[B, H_v, d_v, d_k\] = \[2, 2, 16, 16\]"):
        run.pool.write_state(0, rows, torch.zeros(1, 2, 16, 16))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation_dtype", [torch.float32, torch.bfloat16])
def test_bytes_include_rings_convolution_and_cursors(state_dtype: torch.dtype, activation_dtype: torch.dtype) -> None:
    dtypes = {"state_dtype": state_dtype, "activation_dtype": activation_dtype}
    pool = new_pool(5, ring_capacity=7, max_window=6, **dtypes)
    tensors = {}
    for i in range(len(SPECS)):
        for tensor in (*pool.fold_args(i).values(), pool.conv_state(i), pool.conv_window(i)):
            tensors[tensor.data_ptr()] = tensor
    counters = 5 * (3 + 5) * 8
    assert pool.nbytes == sum(t.nbytes for t in tensors.values()) + counters
    assert pool.bytes_per_slot * 5 == pool.nbytes
    assert pool.fold_args(0)["ring_u"].shape[2] == 7
    assert pool.conv_window(0).shape == (5, 12, 6)
    assert pool.bytes_of(0).conv - new_pool(5, **dtypes).bytes_of(0).conv == 12 * 6 * activation_dtype.itemsize


def test_counters_count_what_was_moved() -> None:
    """Two slots, four layers' worth of steps: 1/L of the stepwise writes."""
    run = Run(new_pool())
    rows = [run.alloc(), run.alloc()]
    state = sum(4 * spec.num_v_heads * spec.head_v_dim * spec.head_k_dim for spec in SPECS)
    for i, spec in enumerate(SPECS):
        run.pool.write_state(i, rows, torch.zeros(2, *spec.checkpoint_shape))
    run.pool.reset_cursors(rows)
    for slot in rows:
        run.states[slot] = [layer.zero_state(1) for layer in LAYERS]
    run.step(*rows, count=15)
    counters = run.pool.counters()
    record = sum(run.pool.bytes_of(i).record for i in range(3))
    assert counters == {
        "decode_steps": 30,
        "flushes": 6,
        "verify_steps": 0,
        "folds": 0,
        "tokens_verified": 0,
        "tokens_accepted": 0,
        "state_bytes_read": 30 * state,
        "state_bytes_written": (2 + 6) * state,
        "state_bytes_written_stepwise": (2 + 30) * state,
        "state_bytes_copied": 0,
        "ring_bytes_read": 2 * (3 * 6 + 3) * record,
        "ring_bytes_written": 24 * record,
    }
    assert counters["state_bytes_written"] * 4 == counters["state_bytes_written_stepwise"]


def test_counters_count_windows_and_their_folds() -> None:
    """Three windows of two slots, the last with a fold in one; a row without tokens and padding don't count."""
    run = Run(new_pool(ring_capacity=6, max_window=4))
    first, second = run.alloc(), run.alloc()
    slots = run.pool.slot_tensor([first, -1, second])
    for counts, taken in (([4, 4, 3], [3, 4, 0]), ([3, 1, 0], [1, 0, 0]), ([4, 2, 4], [0, 0, 4])):
        for i, layer in enumerate(LAYERS):
            window = layer.draw_window(3, 4)
            layer.verify(window, **run.pool.verify_args(i), slots=slots, num_tokens=int32(counts))
        run.pool.commit(slots, int32(counts), int32(taken))
    assert run.pool.write_pos[[first, second]].tolist() == [0, 4]
    counters, state = run.pool.counters(), run.pool.checkpoint_bytes_per_slot
    record = sum(run.pool.bytes_of(i).record for i in range(3))
    assert counters == {
        "decode_steps": 0,
        "flushes": 0,
        "verify_steps": 5,
        "folds": 1,
        "tokens_verified": 4 + 3 + 3 + 4 + 4,
        "tokens_accepted": 3 + 0 + 1 + 0 + 4,
        "state_bytes_read": 5 * state,
        "state_bytes_written": state,
        "state_bytes_written_stepwise": 8 * state,
        "state_bytes_copied": 0,
        "ring_bytes_read": (0 + 0 + 3 + 4 + 0) * record,
        "ring_bytes_written": 18 * record,
    }


def test_a_slot_freed_with_its_window_open_is_as_good_as_new() -> None:
    run = Run(new_pool(max_window=4))
    slot = run.alloc()
    run.step(slot, count=3)
    slots = run.pool.slot_tensor([slot])
    for i, layer in enumerate(LAYERS):  # folds: its checkpoint and its ring are no longer those of the cursor
        layer.verify(layer.draw_window(1, 4), **run.pool.verify_args(i), slots=slots)
    run.pool.free(slot)
    assert run.alloc() == slot
    run.check()
    run.step(slot, count=6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ring_len": 0}, "ring_len is 0: a whole number of at least 1 is wanted"),
        ({"ring_len": 2.5}, "ring_len is 2.5: a whole number"),
        ({"ring_len": True}, "ring_len is True: a whole number"),
        ({"num_slots": "2"}, "num_slots is '2': a whole number"),
        ({"num_slots": 0}, "num_slots is 0"),
        ({"ring_capacity": 3}, "ring_capacity is 3: a whole number of at least ring_len = 4"),
        ({"max_window": 5}, "max_window is 5, but a ring has 4 rows: a shorter window, or ring_capacity=5 or more"),
        ({"max_window": 17, "ring_capacity": 32}, "max_window is 17: at most 16 tokens are wanted"),
        ({"max_window": -1}, "max_window is -1: a whole number of at least 0"),
        ({"state_dtype": torch.float64}, "state_dtype is torch.float64: torch.float32, torch.bfloat16 or"),
        ({"activation_dtype": torch.int8}, "activation_dtype is torch.int8"),
        ({"ring_dtype": torch.float16}, "ring_dtype is torch.float16: 'auto', torch.float32 is wanted"),
        ({"ring_dtype": "half"}, "ring_dtype is half"),
        ({"layers": []}, "layers is empty"),
        ({"backend": "nope"}, "backend 'nope' is unknown"),
    ],
)
def test_bad_settings_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayPool(**{"layers": SPECS, "num_slots": 2, "ring_len": 4, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": "row"}, "gate is 'row'"),
        ({"rule": "hebb"}, "rule is 'hebb'"),
        ({"num_v_heads": 3}, "num_v_heads is 3, num_k_heads 2: a multiple"),
        ({"gate": "channel", "num_v_heads": 4}, "a channel gate wants them equal"),
        ({"head_k_dim": 0}, "head_k_dim is 0"),
        ({"conv_dim": -1}, "conv_dim is -1"),
        ({"conv_width": 2.5}, "conv_width is 2.5: a whole number"),
    ],
)
def test_bad_layer_specs_are_named(change: dict[str, object], message: str) -> None:
    good = {"gate": "head", "rule": "delta", "num_k_heads": 2, "num_v_heads": 2, "head_k_dim": 8, "head_v_dim": 8}
    LayerSpec(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        LayerSpec(**{**good, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "activation", "ring"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16, torch.float32),  # an update divided by a small norm overflows
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),  # bf16 updates would be coarser than the state
    ],
)
def test_automatic_ring_dtype(state: torch.dtype, activation: torch.dtype, ring: torch.dtype) -> None:
    pool = new_pool(state_dtype=state, activation_dtype=activation)
    assert pool.fold_args(0)["ring_u"].dtype == ring
    assert pool.fold_args(0)["ring_k"].dtype == activation


@pytest.mark.parametrize("end", ["prefill", "materialize", "free"])
def test_a_fork_that_gets_another_state_leaves_its_snapshot(end: str) -> None:
    """Before its first flush a fork reads the snapshot's checkpoint; a new state of its own ends that."""
    run = Run(new_pool())
    source = run.alloc()
    run.step(source, count=6)
    kept = run.pool.snapshot(source)
    fork = run.pool.fork(kept)
    if end == "prefill":
        run.states[fork] = []
        for i, spec in enumerate(SPECS):
            state = torch.randn(1, *spec.checkpoint_shape)
            run.pool.write_state(i, [fork], state)
            run.states[fork].append(state.double())
        run.pool.reset_cursors([fork])
    elif end == "materialize":
        run.step(source, count=2)
        run.pool.materialize(source, fork)
        run.states[fork] = list(run.states[source])
    else:
        run.pool.free(fork)
        assert run.alloc() == fork
    assert run.pool.checkpoint_slot[fork] == fork
    run.check()
    run.step(fork, source, count=5)
    run.check()


def test_copied_bytes_are_counted() -> None:
    """A snapshot, a fork of a live slot and a materialize copy a state each; a fork of a snapshot copies none."""
    pool = new_pool()
    (source,) = pool.alloc()
    pool.fork(pool.snapshot(source))
    pool.materialize(source, pool.fork(source))
    assert pool.counters()["state_bytes_copied"] == 3 * pool.checkpoint_bytes_per_slot


def test_slots_may_be_numpy_or_torch_integers() -> None:
    pool = new_pool()
    pool.alloc(3)
    assert pool.slot_tensor(torch.tensor([2, -1, 0])).tolist() == [2, -1, 0]  # type: ignore[arg-type]
    pool.free(torch.tensor([0, 2]).numpy())  # type: ignore[arg-type]
    assert pool.num_free == 5


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_slot_may_be_source_and_target_of_one_materialize(backend: str) -> None:
    """States move down one slot in one call: each is read before any is written."""
    if backend == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels are defined for the GPU here")
    pool = ReplayPool([LAYERS[0].spec], 4, ring_len=3, backend=backend)
    slots = pool.alloc(4)
    for slot in slots:
        pool.fold_args(0)["checkpoint"][slot] = float(slot)
    source, target = (torch.tensor(s, dtype=torch.int32) for s in ([0, 1, 2], [1, 2, 3]))
    ops.materialize(**pool.fold_args(0), src=source, dst=target, backend=backend)
    assert pool.fold_args(0)["checkpoint"][:, 0, 0, 0].tolist() == [0, 0, 1, 2]
