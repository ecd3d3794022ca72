"""The CUDA kernels' arithmetic, against the float64 recurrence, on a CPU: blocks of threads are emulated there.

`make test-gpu` runs the tests of the operators with these kernels on a GPU, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import emulated_cuda
import pytest
import torch
from oracle import KINDS, SHAPES, Layer, poison, relative_error, run_forks
from torch import Tensor

from replayssm import ReplayPool, ops
from replayssm.backends.cuda import blocks, launch
from replayssm.ops.rows import delta_decode_rows, mamba2_decode_rows

_MISSING = emulated_cuda.missing()
pytestmark = [pytest.mark.skip(reason=_MISSING)] if _MISSING else []

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = {"f32": F32, "bf16": BF16, "f16": F16}
KERNELS = [s for s in SHAPES if SHAPES[s][3] in blocks.HEAD_K_DIMS]
SIZES = {"large": 1, "small": 1000}  # of blocks, which the number of multiprocessors decides
CUTS = ("large", "middle", "small")  # of a decode step: by the rows that a multiprocessor has
LEAST_ROWS = {name: getattr(blocks, name) for name in ("FEW_ROWS", "SOME_ROWS", "MANY_ROWS")}


def install(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    emulated_cuda.install(monkeypatch, multiprocessors=1000 if cut == "small" else 1)
    for name, rows in LEAST_ROWS.items():
        monkeypatch.setattr(blocks, name, 0 if cut == "large" else rows)


def sometimes(cases: Iterable[tuple[Any, ...]], often: set[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a grid; CI has time for those that run often."""
    marks = {True: [], False: [pytest.mark.thorough]}
    return [pytest.param(*case, marks=marks[case in often], id="-".join(map(str, case))) for case in cases]


def new_pool(layer: Layer, num_slots: int, ring_len: int, **options: object) -> ReplayPool:
    options = {"activation_dtype": layer.dtype, "backend": "cuda", **options}
    pool = ReplayPool([layer.spec], num_slots, ring_len=ring_len, **options)
    poison(pool)
    return pool


@pytest.mark.parametrize(
    ("cut", "shape"),
    sometimes(
        product(CUTS, KERNELS),
        {
            ("large", "gdn-128x128-ratio2"),
            ("large", "kda-bounded-64x64"),
            ("middle", "mamba2-80x128-groups1"),
            ("small", "mamba2-64x256"),
        },
    ),
)
def test_every_output_and_state_equals_the_recurrence(cut: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a padding row, a row that is forced to flush, and a ring that is longer than its flush period."""
    install(monkeypatch, cut)
    launched = emulated_cuda.launches_of(monkeypatch, "replayssm_decode")
    layer = Layer.named(shape, backend="cuda")
    pool = new_pool(layer, 3, 3, ring_capacity=4)
    rows = pool.alloc(2)
    slots = pool.slot_tensor([rows[1], -1])
    state = layer.zero_state(2)
    for step in range(6):
        inputs = layer.draw(2)
        force = torch.tensor([step == 4, True]) if step > 2 else None
        y = layer.decode(inputs, **pool.state_args(0), slots=slots, force_flush=force)
        pool.advance(slots, force)
        state, expected = layer.reference(inputs, state)
        assert relative_error(y[0], expected[0]) < 1e-6
        assert (y[1] == 0).all()
        assert relative_error(pool.read_state(0, [rows[1]]), state[:1]) < 1e-6
    assert pool.write_pos[rows[1]] == 1
    assert pool.counters()["flushes"] == 2
    assert pool.fold_args(0)["ring_u"][rows[0]].isnan().all()
    assert len(launched) == 6


@pytest.mark.parametrize(
    ("kind", "state", "activations"),
    sometimes(
        product(KINDS, ("bf16", "f16"), ("f32", "bf16", "f16")),
        {("gdn", "bf16", "bf16"), ("kda", "bf16", "f32"), ("mamba2", "f16", "bf16"), ("gdn", "f16", "f32")},
    ),
)
def test_products_with_a_16_bit_checkpoint_are_exact(
    kind: str, state: str, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of one step from a random checkpoint and its records: no factor of a product is rounded."""
    state_dtype, dtype = DTYPES[state], DTYPES[activations]
    emulated_cuda.install(monkeypatch)
    layer = Layer(kind, 2, 2, 64, 32, dtype=dtype, backend="cuda")
    pool = new_pool(layer, 2, 8, state_dtype=state_dtype, ring_dtype=F32)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    held = pool.fold_args(0)
    held["checkpoint"][:] = torch.randn(held["checkpoint"].shape)
    for _ in range(5):
        before = pool.read_state(0, rows).double()
        inputs = layer.draw(2)
        inputs = {name: x * 1e-3 if name in "qkBC" else x for name, x in inputs.items()}
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, expected = layer.reference(inputs, before)
        assert relative_error(y, expected) < {F32: 1e-6, BF16: 4e-3, F16: 5e-4}[dtype]
        assert relative_error(pool.read_state(0, rows), state) < 1e-6


@pytest.mark.parametrize(
    ("shape", "state"),
    sometimes(
        product(("gdn-128x128-ratio2", "kda-bounded-64x64", "mamba2-80x128-groups1"), ("f32", "bf16")),
        {("gdn-128x128-ratio2", "bf16")},
    ),
)
def test_same_row_same_bits_however_a_step_is_cut(shape: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer.named(shape, dtype=BF16, backend="cuda")
    steps = [layer.draw(3) for _ in range(6)]
    results = []
    for cut in CUTS:
        install(monkeypatch, cut)
        for batch in ([0], [2, 0, 1]):
            pool = new_pool(layer, 3, 5, state_dtype=DTYPES[state])
            taken = pool.alloc(3)
            slots = pool.slot_tensor([taken[row] for row in batch])
            outputs = []
            for inputs in steps:
                picked = {name: x[batch] for name, x in inputs.items()}
                outputs.append(layer.decode(picked, **pool.state_args(0), slots=slots)[batch.index(0)])
                pool.advance(slots)
            results.append((torch.stack(outputs), pool.read_state(0, taken[:1])))
    for outputs, folded in results[1:]:
        assert torch.equal(outputs, results[0][0])
        assert torch.equal(folded, results[0][1])


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ("gdn-128x128-ratio2", blocks.Block(64, 4, 96, resident=5)),
        pytest.param("mamba2-64x128-groups2", blocks.Block(192, 6, 96, resident=2), marks=pytest.mark.thorough),
        pytest.param("kda-128x128", blocks.Block(64, 2, 168, resident=1), marks=pytest.mark.thorough),
    ],
    ids=["gdn", "tiles-of-2-heads", "channel-gates"],
)
def test_blocks_that_take_tile_after_tile_change_no_bit(
    shape: str, block: blocks.Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with padding between them, and with slots that read another's checkpoint."""
    results = []
    for chosen in (None, block):
        emulated_cuda.install(monkeypatch, multiprocessors=1000)
        if chosen is not None:
            monkeypatch.setattr(blocks, "choose", lambda *_: block)
            monkeypatch.setattr(launch, "properties", lambda _: launch.Properties(1, 227 * 1024, "cpu"))
        launched = emulated_cuda.launches_of(monkeypatch, "replayssm_decode")
        layer = Layer.named(shape, backend="cuda")
        pool = new_pool(layer, 4, 3, state_dtype=F32)
        first = pool.alloc(1)
        outputs = []
        for step in range(5):
            if step == 2:
                forked = pool.fork(pool.snapshot(first[0]))
            batch = [first[0], *([-1, forked] if step > 1 else [])]
            slots = pool.slot_tensor(batch)
            outputs.append(layer.decode(layer.draw(len(batch)), **pool.state_args(0), slots=slots).flatten())
            pool.advance(slots)
        results.append((torch.cat(outputs), pool.read_state(0, [first[0], forked])))
        assert (max(launched) == block.resident) == (chosen is block)
    for mine, expected in zip(*results, strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(
    ("cut", "kind"), sometimes(product(CUTS, KINDS), {("large", "gdn"), ("small", "kda"), ("middle", "mamba2")})
)
def test_forks_and_snapshots(cut: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that read another's checkpoint, which the copy from their own has to make way for."""
    install(monkeypatch, cut)
    found, expected = (
        run_forks(layer := Layer(kind, 1, 1, 64, 16, seed=4), new_pool(layer, 6, 3, backend=backend))
        for backend in ("cuda", "torch")
    )
    assert relative_error(found.outputs, expected.outputs) < 1e-6
    assert relative_error(found.states, expected.states) < 1e-6
    assert torch.equal(found.cursors, expected.cursors)
    assert found.counters == expected.counters


def run_rows(kind: str, backend: str) -> list[Tensor]:
    """Outputs and rings of the operators for callers with records of their own."""
    layer = Layer(kind, 2, 2, 64, 32, seed=2)
    spec = layer.spec
    rings = (torch.zeros(3, 2, 4, 32), torch.zeros(3, 2, 4, 64), torch.zeros(3, 2, 4, *spec.gate_shape))
    common = {"checkpoint": torch.randn(3, 2, 32, 64, generator=torch.Generator().manual_seed(1)), "backend": backend}
    outputs = []
    for step in range(6):
        x = layer.draw(3)
        out = torch.full((3, 2, 32), 7.0)
        where = {
            "write_pos": torch.tensor([step % 4] * 3, dtype=torch.int32),
            "slots": torch.tensor([2, -1, 0], dtype=torch.int32),
            "out": out,
        }
        flush = torch.tensor([step % 4 == 3] * 3)
        if kind == "mamba2":
            named = dict(zip(("ring_x", "ring_B", "ring_dt"), rings, strict=True)) | {"flush": flush}
            numbers = {"A": -layer.A_log.exp(), "D": layer.D, "dt_bias": layer.dt_bias, "dt_softplus": True}
            mamba2_decode_rows(**x, **numbers, **named, **common, **where)
        else:
            named = dict(zip(("ring_u", "ring_k", "ring_g"), rings, strict=True)) | {"force_flush": None}
            numbers = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "scale": 0.5, "qk_l2norm": True}
            delta_decode_rows(**x, **numbers, lower_bound=None, **named, **common, **where)
        outputs.append(out)
    return [torch.stack(outputs), *rings, common["checkpoint"]]


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_records_as_other_projects_define_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_cuda.install(monkeypatch)
    launched = emulated_cuda.launches_of(monkeypatch, "replayssm_decode")
    for mine, expected in zip(run_rows(kind, "cuda"), run_rows(kind, "torch"), strict=True):
        assert relative_error(mine, expected) < 1e-6
    assert len(launched) == 6


# --- states with their records folded in


@pytest.mark.parametrize(
    ("cut", "shape", "state"),
    sometimes(
        product(("large", "small"), KERNELS, ("f32", "bf16", "f16")),
        {
            ("large", "gdn-64x64-ratio3", "bf16"),
            ("small", "kda-bounded-64x64", "f32"),
            ("small", "mamba2-80x128-groups1", "f16"),
        },
    ),
)
def test_states_are_folded_as_exactly_as_float32_allows(
    cut: str, shape: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of slots at any cursor, one of which reads another's checkpoint; a checkpoint gets the same, rounded once."""
    install(monkeypatch, cut)
    folded = emulated_cuda.launches_of(monkeypatch, "replayssm_fold")
    layer = Layer.named(shape, dtype=BF16, backend="cuda")
    pool = new_pool(layer, 6, 36, state_dtype=DTYPES[state], ring_dtype=F32)
    first, second = pool.alloc(2)
    held = pool.fold_args(0)
    held["checkpoint"][first] = torch.randn(held["checkpoint"][first].shape)
    states = {first: pool.read_state(0, [first]).double(), second: layer.zero_state(1)}
    fork = pool.fork(pool.snapshot(first))
    states[fork] = states[first]
    for stepped in ([first, second], [first, fork], *[[first]] * 32):
        slots = pool.slot_tensor(stepped)
        inputs = layer.draw(len(stepped))
        layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        new, _ = layer.reference(inputs, torch.cat([states[slot] for slot in stepped]))
        states |= zip(stepped, new.split(1), strict=True)
    read = pool.read_state(0, [fork, first, second])
    for mine, slot in zip(read, (fork, first, second), strict=True):
        assert relative_error(mine, states[slot][0]) < 1e-6
    kept = {name: tensor[[first, fork]].clone() for name, tensor in held.items()}
    pool.materialize(first, second)
    assert torch.equal(held["checkpoint"][second], read[1].to(DTYPES[state]))
    for name, tensor in held.items():
        assert torch.equal(tensor[[first, fork]].view(torch.uint8), kept[name].view(torch.uint8))
    assert len(folded) == 4


def test_a_slot_may_take_a_state_that_is_overwritten_in_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_cuda.install(monkeypatch)
    layer = Layer("gdn", 1, 2, 64, 32, backend="cuda")
    pool = new_pool(layer, 3, 4)
    rows = pool.alloc(3)
    slots = pool.slot_tensor(rows)
    for _ in range(2):
        layer.decode(layer.draw(3), **pool.state_args(0), slots=slots)
        pool.advance(slots)
    before = pool.read_state(0, rows)
    held = pool.fold_args(0)
    ops.materialize(**held, src=slots, dst=slots.roll(1), backend="cuda")
    assert torch.equal(held["checkpoint"][rows], before.roll(-1, 0))


@pytest.mark.parametrize("into", ["out", "slot"])
def test_states_that_have_no_kernel_are_folded_on_the_other_backend(into: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_cuda.install(monkeypatch)
    folded = emulated_cuda.launches_of(monkeypatch, "replayssm_fold")
    layer = Layer("gdn", 1, 1, 32, 32, backend="cuda")
    pool = new_pool(layer, 2, 4)
    first, second = pool.alloc(2)
    slots = pool.slot_tensor([first])
    inputs = layer.draw(1)
    layer.decode(inputs, **pool.state_args(0), slots=slots)
    pool.advance(slots)
    expected, _ = layer.reference(inputs, layer.zero_state(1))
    if into == "slot":
        pool.materialize(first, second)
    mine = pool.read_state(0, [first]) if into == "out" else pool.fold_args(0)["checkpoint"][[second]]
    assert relative_error(mine, expected) < 1e-6
    assert folded == []


@pytest.mark.parametrize(
    ("kind", "d_k", "d_v", "offset"), [("gdn", 32, 32, 0), ("kda", 64, 24, 0), ("mamba2", 64, 32, 1)]
)
def test_what_has_no_kernel_runs_on_the_other_backend(
    kind: str, d_k: int, d_v: int, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dims that no kernel is made for, and slots that don't begin at multiples of 16 bytes."""
    emulated_cuda.install(monkeypatch)
    launched = emulated_cuda.launches_of(monkeypatch, "replayssm_decode")
    layer = Layer(kind, 1, 1, d_k, d_v, backend="cuda")
    pool = new_pool(layer, 2, 2)
    slots = pool.slot_tensor(pool.alloc(2))
    state_args = pool.state_args(0)
    numbers = state_args["checkpoint"].numel()
    state_args["checkpoint"] = torch.zeros(numbers + offset)[offset:].view_as(state_args["checkpoint"])
    inputs = layer.draw(2)
    _, expected = layer.reference(inputs, layer.zero_state(2))
    assert relative_error(layer.decode(inputs, **state_args, slots=slots), expected) < 1e-6
    assert launched == []


@pytest.mark.parametrize("head_v_dim", range(16, 257, 16))
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_blocks_divide_the_heads_of_a_key_head(head_v_dim: int, state_dtype: torch.dtype) -> None:
    groups = [(1, False), (1, True), (2, False), (3, False), (8, False), (16, False)]
    for (group, channel), head_k_dim, key_heads in product(groups, blocks.HEAD_K_DIMS, (1, 3, 8)):
        heads = group * key_heads
        shape = blocks.Shape(channel, True, head_v_dim, head_k_dim, group, heads, 16, state_dtype)
        for rows in (100, 10_000, 100_000, 200_000, 1_000_000):
            block = blocks.choose(shape, BF16, rows, 132, 227 * 1024)
            assert block is not None
            assert block.fits(shape)
            assert head_v_dim % block.rows == 0 or (group * head_v_dim) % block.rows == 0 == block.rows % head_v_dim
            assert block.rows % block.warps == 0
            assert block.rows // block.warps in (8, 16, 32)
            assert block.shared_bytes(shape, BF16) <= 227 * 1024
