"""The Triton kernels against the float64 recurrence, on a CPU in Triton's interpreter.

On a GPU, `make test-gpu` runs the tests of the operators themselves with these kernels; some here run there too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from oracle import KINDS, SHAPES, Layer, poison, relative_error
from torch import Tensor

from replayssm import ReplayPool, ops

pytest.importorskip("triton")

BIG = ("gdn-128x128-ratio1", "gdn-128x128-ratio2", "gdn-64x64-ratio3", "mamba2-64x128-groups2")
INTERPRETED = [shape for shape in SHAPES if shape not in BIG]  # the interpreter takes milliseconds for each program


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are defined for the GPU here, not for the interpreter")
    return {"device": request.param, "backend": "triton"}


def new_pool(layer: Layer, num_slots: int, ring_len: int, **options: object) -> ReplayPool:
    pool = ReplayPool([layer.spec], num_slots, ring_len=ring_len, device=layer.device, backend="triton", **options)
    poison(pool)
    return pool


@pytest.mark.parametrize("shape", INTERPRETED)
def test_every_output_and_state_equals_the_recurrence(shape: str, place: dict[str, str]) -> None:
    """With a padding row, a row that is forced to flush, and a ring that is longer than its flush period."""
    layer = Layer.named(shape, beta_scale=2.0 if "olmo" in shape else 1.0, **place)
    pool = new_pool(layer, 3, 3, ring_capacity=4)
    rows = pool.alloc(2)
    slots = pool.slot_tensor([rows[1], -1])
    state = layer.zero_state(2)
    for step in range(6):
        inputs = layer.draw(2)
        force = torch.tensor([step == 4, True], device=layer.device) if step > 2 else None
        y = layer.decode(inputs, **pool.state_args(0), slots=slots, force_flush=force)
        pool.advance(slots, force)
        state, expected = layer.reference(inputs, state)
        # The GPU's exponential is off by two units in the last place, the interpreter's by less than one.
        assert relative_error(y[0], expected[0]) < (1e-6 if layer.device == "cpu" else 2e-6)
        assert (y[1] == 0).all()
        assert relative_error(pool.read_state(0, [rows[1]]), state[:1]) < 1e-6
    assert pool.write_pos[rows[1]] == 1
    assert pool.counters()["flushes"] == 2
    assert pool.fold_args(0)["ring_u"][rows[0]].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_forks_snapshots_and_staggered_cursors(kind: str, place: dict[str, str]) -> None:
    """The same program with the Triton kernels and with PyTorch's: equal states and equal cursors."""
    results = []
    for backend in ("triton", "torch"):
        layer = Layer(kind, 1, 1, 8, 8, seed=4, device=place["device"])
        pool = ReplayPool([layer.spec], 6, ring_len=3, device=layer.device, backend=backend)
        poison(pool)
        a, b = pool.alloc(2)
        outputs: list[Tensor] = []

        def step(*rows: int) -> None:
            slots = pool.slot_tensor(rows)  # noqa: B023
            outputs.append(layer.decode(layer.draw(len(rows)), **pool.state_args(0), slots=slots))  # noqa: B023
            pool.advance(slots)  # noqa: B023

        step(a)
        step(a, -1, b)
        kept = pool.snapshot(a)
        first, second = pool.fork(kept), pool.fork(b)
        for _ in range(4):
            step(second, a, first)
        pool.materialize(a, b)
        step(b, a)
        states = pool.read_state(0, [a, b, first, second, kept])
        results.append((torch.cat(outputs), states, pool.write_pos[[a, b, first, second]], pool.counters()))
    (y, states, cursors, counters), (y_torch, states_torch, cursors_torch, counters_torch) = results
    assert relative_error(y, y_torch) < 1e-6
    assert relative_error(states, states_torch) < 1e-6
    assert torch.equal(cursors, cursors_torch)
    assert counters == counters_torch


def test_small_gates_keep_their_digits(place: dict[str, str]) -> None:
    """softplus of −12 is 6e-6: the hardware's logarithm of 1 + 6e-6 would be off by a percent."""
    layer = Layer("mamba2", 1, 1, 8, 8, **place)
    pool = new_pool(layer, 1, 2)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(1)
    for dt in (-12.0, -3.0, 5.0, -30.0, 40.0, -0.5):
        inputs = layer.draw(1)
        inputs["dt"] = torch.full_like(inputs["dt"], dt)
        layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, _ = layer.reference(inputs, state)
        assert relative_error(pool.read_state(0, rows), state) < 1e-6


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution(width: int, place: dict[str, str]) -> None:
    """Equal to PyTorch's kernels, over more channels than one program takes, strides included."""
    device = place["device"]
    x = torch.randn(3, 600, device=device)[:, ::2]
    weight = torch.randn(width, 300, device=device).T
    bias = torch.randn(300, device=device)
    slots = torch.tensor([4, -1, 0], dtype=torch.int32, device=device)
    states = [torch.full((5, width - 1, 300), float("nan"), device=device).transpose(1, 2) for _ in range(2)]
    for state in states:
        state[[4, 0]] = 0.5
    for _ in range(width + 1):
        mine, expected = (
            ops.causal_conv1d_update(x, state, weight, bias, slots=slots, activation="silu", backend=backend)
            for state, backend in zip(states, ("triton", "torch"), strict=True)
        )
        assert relative_error(mine, expected) < 1e-6
        assert torch.equal(states[0].nan_to_num(7), states[1].nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_row_same_bits_on_a_gpu(shape: str, state_dtype: torch.dtype) -> None:
    """Alone, in batches of many sizes and orders, with padding and neighbours at other cursors; 20 repeats."""
    layer = Layer.named(shape, device="cuda", dtype=torch.bfloat16)
    steps = [layer.draw(33) for _ in range(9)]

    def run(rows: list[int]) -> Tensor:
        pool = new_pool(layer, 40, 4, state_dtype=state_dtype, activation_dtype=torch.bfloat16)
        taken = pool.alloc(34)
        batch = [taken[(7 * row + len(rows)) % 34] for row in rows]
        for i, row in enumerate(rows):
            if row:
                pool.write_pos[batch[i]] = i % 4
                for name in ("ring_u", "ring_k", "ring_g"):
                    pool.fold_args(0)[name][batch[i]] = -0.5
        outputs = []
        slots = pool.slot_tensor([-1, *batch])
        for inputs in steps:
            picked = {name: tensor[[0, *rows]] for name, tensor in inputs.items()}
            outputs.append(layer.decode(picked, **pool.state_args(0), slots=slots)[1 + rows.index(0)])
            pool.advance(slots)
        state = pool.read_state(0, [batch[rows.index(0)]])[0]
        return torch.cat([torch.stack(outputs).float().flatten(), state.flatten()])

    alone = run([0])
    batches = [[0, 1], [2, 0, 1], list(range(32, -1, -1)), list(range(17))]
    for rows in batches * 5:
        assert torch.equal(run(rows), alone), rows


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graph_replays_a_decode_step(kind: str) -> None:
    """One captured step, replayed: cursors, slots and inputs change in place, and rows flush when their turn comes."""
    layer = Layer(kind, 2, 2, 64, 64, device="cuda")
    pool = new_pool(layer, 5, 3)
    rows = pool.alloc(4)
    inputs = layer.draw(3)
    slots = pool.slot_tensor(rows[:3])

    def step() -> Tensor:
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        return y

    step()  # compiles
    for slot in rows:
        pool.fold_args(0)["checkpoint"][slot] = 0
    pool.reset_cursors(rows)
    pool.write_pos[rows[1]] = 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    states = {slot: layer.zero_state(1) for slot in rows}
    batches = [rows[:3], [rows[3], -1, rows[0]], [rows[1], rows[2], rows[3]]]
    for i in range(24):
        batch = batches[i % 3]
        slots.copy_(torch.tensor(batch, dtype=torch.int32))
        for name, tensor in layer.draw(3).items():
            inputs[name].copy_(tensor)
        graph.replay()
        for row, slot in enumerate(batch):
            if slot < 0:
                assert (y[row] == 0).all()
                continue
            one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
            states[slot], expected = layer.reference(one, states[slot])
            assert relative_error(y[row], expected[0]) < 2e-6
            assert relative_error(pool.read_state(0, [slot]), states[slot]) < 2e-6


@pytest.mark.gpu
def test_a_step_waits_for_nothing_on_a_gpu() -> None:
    """Neither operators nor cursors synchronise with the host."""
    layer = Layer("gdn", 2, 4, 64, 64, device="cuda")
    pool = new_pool(layer, 4, 3)
    slots = pool.slot_tensor(pool.alloc(4))
    inputs = layer.draw(4)
    state = pool.state_args(0)
    layer.decode(inputs, **state, slots=slots)
    pool.advance(slots)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(7):
            layer.decode(inputs, **state, slots=slots)
            pool.advance(slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
