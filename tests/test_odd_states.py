"""States and batches that a pool doesn't make by itself, but that the operators take."""

from __future__ import annotations

import itertools

import pytest
import torch
from oracle import KINDS, Layer, poison, relative_error
from torch import Tensor

from replayssm import ReplayPool, ops, recurrence

pytestmark = pytest.mark.usefixtures("either_cpu_backend")

GROUP = {"gdn": 2, "mamba2": 2}  # value heads per key head; the others have one


def odd_layer(kind: str, dtype: torch.dtype = torch.float32) -> Layer:
    return Layer(kind, 2, 2 * GROUP.get(kind, 1), 12, 5, dtype=dtype)


def permuted(order: tuple[int, ...], *shape: int) -> Tensor:
    """A tensor of NaN of this shape, whose dimensions lie in memory in another order."""
    base = torch.full([shape[i] for i in order], float("nan"))
    return base.permute([order.index(i) for i in range(len(order))])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[2, 0], [0, 1], [0, 1, 2], [1]], ids=str)
def test_state_and_inputs_in_any_memory_order(kind: str, rows: list[int]) -> None:
    layer = odd_layer(kind)
    spec = layer.spec
    h_k, h_v, d_k, d_v = spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
    state = {
        "checkpoint": permuted((3, 2, 1, 0), 3, h_v, d_v, d_k),
        "ring_u": permuted((2, 0, 3, 1), 3, h_v, 4, d_v),
        "ring_k": permuted((2, 0, 3, 1), 3, h_k, 4, d_k),
        "ring_g": permuted((2, 1, 0, 3)[: 3 + len(spec.gate_shape)], 3, h_v, 4, *spec.gate_shape),
        "write_pos": torch.zeros(6, dtype=torch.int32)[::2],
        "checkpoint_slot": torch.arange(6, dtype=torch.int32)[:3],
    }
    state["checkpoint"][rows] = 0
    slots = torch.tensor(rows, dtype=torch.int32)
    exact = layer.zero_state(len(rows))
    for _ in range(9):
        inputs = {name: tensor.transpose(0, -1).contiguous().transpose(0, -1) for name, tensor in layer.draw(3).items()}
        inputs = {name: tensor[: len(rows)] for name, tensor in inputs.items()}
        y = layer.decode(inputs, **state, slots=slots, flush_period=4)
        ops.advance(state["write_pos"], state["checkpoint_slot"], slots, flush_period=4)
        exact, expected = layer.reference(inputs, exact)
        assert relative_error(y, expected) < 1e-6
        assert relative_error(ops.read_state(**state, slots=slots), exact) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_cursor_past_the_flush_period_flushes(kind: str) -> None:
    """A shorter period may be wanted while the ring holds more records than it allows."""
    layer = odd_layer(kind)
    pool = ReplayPool([layer.spec], 3, ring_len=2, ring_capacity=8)
    poison(pool)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    exact = layer.zero_state(2)
    for step, period in enumerate([8] * 6 + [2] * 5):
        inputs = layer.draw(2)
        y = layer.decode(inputs, **{**pool.state_args(0), "flush_period": period}, slots=slots)
        ops.advance(pool.write_pos, pool.checkpoint_slot, slots, flush_period=period)
        exact, expected = layer.reference(inputs, exact)
        assert pool.write_pos[rows].tolist() == [step + 1 if step < 6 else (step - 6) % 2] * 2
        assert relative_error(y, expected) < 1e-6
        assert relative_error(pool.read_state(0, rows), exact) < 1e-6


@pytest.mark.parametrize("cursors", [(0, 0, 0), (0, 1, 2), (2, 2, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_a_row_reads_its_checkpoint_before_a_neighbour_overwrites_it(kind: str, cursors: tuple[int, ...]) -> None:
    """Each row's checkpoint in any slot, also one that flushes in the same step; no other slot is written."""
    layer = odd_layer(kind)
    for sources in itertools.product(range(4), repeat=3):
        pool = ReplayPool([layer.spec], 4, ring_len=3)
        poison(pool)
        pool.alloc(4)
        state = pool.fold_args(0)
        state["checkpoint"].normal_()
        for slot, count in enumerate(cursors):
            for name in ("ring_u", "ring_k", "ring_g"):
                state[name][slot, :, :count] = -torch.rand_like(state[name][slot, :, :count])
        state["write_pos"][:3] = torch.tensor(cursors, dtype=torch.int32)
        state["checkpoint_slot"][:3] = torch.tensor(sources, dtype=torch.int32)
        rows = [[0, 1, 2], [2, 0, 1]][sum(sources) % 2]
        exact, before = pool.read_state(0, rows).double(), state["checkpoint"].clone()
        inputs = layer.draw(3)
        y = layer.decode(inputs, **pool.state_args(0), slots=pool.slot_tensor(rows))
        exact, expected = layer.reference(inputs, exact)
        assert relative_error(y, expected) < 2e-6
        for row, slot in enumerate(rows):
            if cursors[slot] == 2:
                assert relative_error(state["checkpoint"][slot], exact[row]) < 1e-6
                before[slot] = state["checkpoint"][slot]
        assert torch.equal(state["checkpoint"], before)


@pytest.mark.parametrize("batch", [[], [-1], [-1, -9]], ids=["no rows", "padding", "paddings"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_live_rows_touches_nothing(kind: str, batch: list[int]) -> None:
    layer = odd_layer(kind)
    pool = ReplayPool([layer.spec], 2, ring_len=3)
    poison(pool)
    slots = pool.slot_tensor(batch)
    y = layer.decode(layer.draw(len(batch)), **pool.state_args(0), slots=slots)
    pool.advance(slots)
    assert torch.equal(y, torch.zeros(len(batch), *y.shape[1:]))
    assert all(pool.fold_args(0)[name].isnan().all() for name in ("checkpoint", "ring_u", "ring_k", "ring_g"))
    assert pool.write_pos.tolist() == [0, 0]
    assert pool.read_state(0, []).shape == (0, *layer.spec.checkpoint_shape)
    none = torch.zeros(0, dtype=torch.int32)
    ops.materialize(**pool.fold_args(0), src=none, dst=none)
    conv = torch.full((2, 3, 3), float("nan"))
    x = ops.causal_conv1d_update(torch.ones(len(batch), 3), conv, torch.ones(3, 4), slots=slots)
    assert torch.equal(x, torch.zeros(len(batch), 3))
    assert conv.isnan().all()


@pytest.mark.parametrize("kept", [(), ("D",), ("z",), ("D", "z")], ids=str)
def test_padding_rows_of_mamba2_are_zero_with_and_without_its_options(kept: tuple[str, ...]) -> None:
    """`D x` and `silu(z)` are computed for every row, NaN inputs of padding rows included."""
    layer = odd_layer("mamba2")
    pool = ReplayPool([layer.spec], 2, ring_len=3)
    slots = pool.slot_tensor([-1, *pool.alloc(1)])
    inputs = {"D": layer.D, **layer.draw(2)}
    for name in ("x", "z"):
        inputs[name][0] = float("nan")
    options = {name: inputs.pop(name) for name in ("D", "z")}
    options = {name: options[name] for name in kept}
    y = ops.mamba2_decode(**inputs, **options, A=-layer.A_log.exp(), **pool.state_args(0), slots=slots)
    assert (y[0] == 0).all()
    assert y[1].isfinite().all()
    assert y[1].norm() > 0


def test_time_steps_are_fp32_when_their_projection_is_16_bit() -> None:
    """Also without a bias, whose dtype would else decide; a Δ rounded to bfloat16 would be off by 2e-3."""
    layer = odd_layer("mamba2", torch.bfloat16)
    layer.dt_bias.zero_()
    pool = ReplayPool([layer.spec], 2, ring_len=1, activation_dtype=torch.bfloat16)
    rows = pool.alloc(2)
    inputs = layer.draw(2)
    ops.mamba2_decode(**inputs, A=-layer.A_log.exp(), **pool.state_args(0), slots=pool.slot_tensor(rows))
    exact, _ = layer.reference(inputs, layer.zero_state(2))
    assert relative_error(pool.read_state(0, rows), exact) < 1e-6


@pytest.mark.parametrize("size", [0.0, 1e-5, 1e-4], ids=["zero", "1e-5", "1e-4"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_tiny_keys_do_not_overflow_a_float16_ring(kind: str, size: float) -> None:
    """Their updates carry the norm factor, up to 1,000: infinite ones would turn the state into NaN."""
    layer = odd_layer(kind, torch.float16)
    dtypes = dict.fromkeys(("state_dtype", "activation_dtype", "ring_dtype"), torch.float16)
    pool = ReplayPool([layer.spec], 1, ring_len=4, **dtypes)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    for _ in range(6):
        inputs = layer.draw(1)
        inputs |= {"k": inputs["k"] * size, "v": inputs["v"] * 200}
        assert layer.decode(inputs, **pool.state_args(0), slots=slots).isfinite().all()
        pool.advance(slots)
        assert pool.read_state(0, rows).isfinite().all()


@pytest.mark.parametrize("steps", [0, 2], ids=["no records", "records"])
def test_a_state_that_was_read_stays_as_it_was(steps: int) -> None:
    """It is a copy, not a view of the checkpoint that the next flush overwrites."""
    layer = odd_layer("gdn")
    pool = ReplayPool([layer.spec], 2, ring_len=3)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    for step in range(steps + 4):
        if step == steps:
            read = pool.read_state(0, rows)
            before = read.clone()
        layer.decode(layer.draw(2), **pool.state_args(0), slots=slots)
        pool.advance(slots)
    assert torch.equal(read, before)
    read.zero_()
    assert pool.read_state(0, rows).norm() > 0


def test_every_row_of_a_full_ring_is_read() -> None:
    """A window of accepted drafts may fill a ring up to its last row."""
    layer = odd_layer("kda")
    pool = ReplayPool([layer.spec], 1, ring_len=4)
    poison(pool)
    pool.alloc()
    state = pool.fold_args(0)
    for name in ("ring_u", "ring_k", "ring_g"):
        state[name].uniform_(-1, 0)
    state["write_pos"].fill_(4)
    u, k, g = (state[name].double() for name in ("ring_u", "ring_k", "ring_g"))
    assert relative_error(pool.read_state(0, [0]), recurrence.fold(layer.zero_state(1), u, k, g)) < 1e-6
