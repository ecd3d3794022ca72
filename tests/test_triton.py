"""The Triton kernels against the float64 recurrence, on a CPU in Triton's interpreter and on a GPU.

`make test-gpu` runs the tests of the operators themselves with these kernels, too. What only a GPU can show is in
test_gpu.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from oracle import KINDS, SHAPES, Layer, poison, relative_error, run_forks
from torch import Tensor

from replayssm import ReplayPool, ops
from replayssm.ops.rows import delta_decode_rows, mamba2_decode_rows

triton = pytest.importorskip("triton")

BIG = ("gdn-128x128-ratio1", "gdn-128x128-ratio2", "gdn-64x64-ratio3", "mamba2-64x128-groups2")
INTERPRETED = [shape for shape in SHAPES if shape not in BIG]  # the interpreter takes milliseconds for each program


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are defined for the GPU here, not for the interpreter")
        if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            pytest.skip("the interpreter of triton 3.6 needs a numpy before 2.4 for loops up to a loaded number")
    return {"device": request.param, "backend": "triton"}


def new_pool(layer: Layer, num_slots: int, ring_len: int, **options: object) -> ReplayPool:
    options = {"device": layer.device, "backend": "triton", **options}
    pool = ReplayPool([layer.spec], num_slots, ring_len=ring_len, **options)
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
        # One row's terms may cancel. On an H200 the mean error is 1.4e-7, that of PyTorch's fp32 recurrence 1.6e-7.
        assert relative_error(y[0], expected[0]) < (1e-6 if layer.device == "cpu" else 2e-6)
        assert (y[1] == 0).all()
        assert relative_error(pool.read_state(0, [rows[1]]), state[:1]) < 1e-6
    assert pool.write_pos[rows[1]] == 1
    assert pool.counters()["flushes"] == 2
    assert pool.fold_args(0)["ring_u"][rows[0]].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_forks_snapshots_and_staggered_cursors(kind: str, place: dict[str, str]) -> None:
    """The same program with the Triton kernels and with PyTorch's: equal states and equal cursors."""
    found, expected = (
        run_forks(
            layer := Layer(kind, 1, 1, 8, 8, seed=4, device=place["device"]), new_pool(layer, 6, 3, backend=backend)
        )
        for backend in ("triton", "torch")
    )
    assert relative_error(found.outputs, expected.outputs) < 1e-6
    assert relative_error(found.states, expected.states) < 1e-6
    assert torch.equal(found.cursors, expected.cursors)
    assert found.counters == expected.counters


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


@pytest.mark.parametrize("width", [1, 2, 4])
def test_convolution_of_sequences(width: int, place: dict[str, str]) -> None:
    """Equal to PyTorch's kernels: empty and short sequences, blocks with two of them, strides, an unused channel."""
    device, lengths = place["device"], (1, 0, 20, 2, 40)
    x = torch.full((2 * sum(lengths), 310), float("nan"), device=device)[::2]
    x[:, :300] = torch.randn(len(x), 300, device=device)
    x = x[:, :300]
    weight = torch.randn(width, 300, device=device).T
    bias = torch.randn(300, device=device)
    state = torch.randn(len(lengths), width - 1, 300, device=device).transpose(1, 2)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()

    def convolved(backend: str) -> tuple[Tensor, Tensor]:
        return ops.causal_conv1d_prefill(
            x, state, weight, bias, cu_seqlens=cu_seqlens, activation="silu", backend=backend
        )

    expected, expected_last = convolved("torch")
    with torch.device("meta"):  # a default of somebody's
        mine, last = convolved("triton")
    assert relative_error(mine, expected) < 1e-6
    assert torch.equal(last, expected_last)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "gdn" else pytest.mark.thorough) for kind in KINDS]
)
def test_fp32_state_after_10000_steps(kind: str, place: dict[str, str]) -> None:
    """In the interpreter 400 steps: all 10,000, which pass, take it three minutes for each kind."""
    steps = 400 if place["device"] == "cpu" else 10_000
    layer = Layer(kind, 1, 1, 8, 8, seed=3, **place)
    pool = new_pool(layer, 1, 16)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(1)
    state_args = pool.state_args(0)
    drawn = layer.draw(steps)
    worst = 0.0
    with torch.no_grad():
        for step in range(steps):
            inputs = {name: tensor[step : step + 1] for name, tensor in drawn.items()}
            y = layer.decode(inputs, **state_args, slots=slots)
            pool.advance(slots)
            state, expected = layer.reference(inputs, state)
            if step % 97 == 0 or step == steps - 1:
                worst = max(worst, relative_error(y, expected), relative_error(pool.read_state(0, rows), state))
    assert worst < 1e-5


def test_a_small_decay_behind_a_large_one_keeps_its_digits(place: dict[str, str]) -> None:
    """log decays of −90 and −1e-3 side by side: as differences of one running sum, 1e-5 of the state would be lost."""
    layer = Layer("mamba2", 1, 1, 16, 16, **place)
    layer.D = torch.zeros(1, device=layer.device)
    pool = new_pool(layer, 1, 8)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(1)
    for step in range(24):
        inputs = layer.draw(1)
        inputs["dt"] = torch.full_like(inputs["dt"], 90.0 if step % 3 == 0 else -5.0)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, expected = layer.reference(inputs, state)
        assert relative_error(y, expected) < 2e-6
        assert relative_error(pool.read_state(0, rows), state) < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_a_flush_of_decays_alone_is_exact(kind: str, place: dict[str, str]) -> None:
    """A checkpoint behind updates that add nothing: no fresh update hides the error of the decays."""
    layer = Layer(kind, 1, 1, 8, 8, **place)
    pool = new_pool(layer, 1, 4)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    state = torch.randn(1, 1, 8, 8, generator=layer.rng).to(layer.device)
    pool.write_state(0, rows, state)
    state = first = state.double()
    for _ in range(4):
        inputs = layer.draw(1)
        inputs["x" if kind == "mamba2" else "v"].zero_()
        inputs["dt" if kind == "mamba2" else "a"].fill_(1.0)
        if kind != "mamba2":
            inputs["b"].fill_(-math.inf)  # β = 0
        layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, _ = layer.reference(inputs, state)
    assert pool.write_pos[rows[0]] == 0
    assert state.norm() < 0.9 * first.norm()
    assert relative_error(pool.fold_args(0)["checkpoint"], state) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_beta_and_gates_are_fp32_when_their_projections_are_16_bit(kind: str, place: dict[str, str]) -> None:
    """A β or a decay rounded to fp16 would be off by 2e-4; the fp32 state shows that none is."""
    layer = Layer(kind, 1, 1, 16, 16, dtype=torch.float16, **place)
    pool = new_pool(layer, 1, 2, activation_dtype=torch.float16)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(1)
    for _ in range(5):
        inputs = layer.draw(1)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, expected = layer.reference(inputs, state)
        assert y.dtype == torch.float16
        assert relative_error(y, expected) < 5e-4
        assert relative_error(pool.read_state(0, rows), state) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_activations(kind: str, place: dict[str, str]) -> None:
    """Keys reach the ring bit by bit, and the fp32 state is exact.

    The interpreter loads bf16 exactly but cuts it off where it stores it, so its outputs may be off by a whole unit in
    the last place. For the same reason a bf16 checkpoint or ring is tested on a GPU alone (test_decode.py).
    """
    layer = Layer(kind, 1, 1, 16, 16, dtype=torch.bfloat16, **place)
    pool = new_pool(layer, 1, 4, activation_dtype=torch.bfloat16)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(1)
    for step in range(11):
        inputs = layer.draw(1)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        if step % 4 < 3:
            key = inputs["B" if kind == "mamba2" else "k"]
            assert torch.equal(pool.fold_args(0)["ring_k"][rows[0], :, step % 4], key[0])
        pool.advance(slots)
        state, expected = layer.reference(inputs, state)
        unit = 2.0 ** (expected.abs().log2().floor() - 7)
        error = (y.double() - expected).abs() / unit
        assert (error <= (1.001 if layer.device == "cpu" else 0.501)).all()
        assert relative_error(pool.read_state(0, rows), state) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_flush_writes_the_checkpoint(kind: str, place: dict[str, str]) -> None:
    layer = Layer(kind, 1, 1, 8, 8, **place)
    pool = new_pool(layer, 1, 4)
    slots = pool.slot_tensor(pool.alloc(1))
    checkpoint = pool.fold_args(0)["checkpoint"]
    for step in range(9):
        before = checkpoint.clone()
        layer.decode(layer.draw(1), **pool.state_args(0), slots=slots)
        pool.advance(slots)
        assert torch.equal(before, checkpoint) == (step % 4 != 3)


def test_mamba2_options(place: dict[str, str]) -> None:
    """Without D, z, bias or softplus, and with time-step limits; without these, a negative step stays."""
    layer = Layer("mamba2", 1, 2, 16, 16, **place)
    pool = new_pool(layer, 1, 4)
    slots = pool.slot_tensor(pool.alloc(1))
    x = layer.draw(1)
    x["dt"] = torch.tensor([[-0.4, 0.5]], device=x["dt"].device)
    none = (0.0, math.inf)
    for softplus, limit in ((True, none), (False, none), (False, (0.2, 0.6)), (False, (0.0, 0.3)), (True, (0.5, 0.6))):
        plain = {name: x[name] for name in ("x", "dt", "B", "C")}
        state = {**pool.state_args(0), "flush_period": 1}
        pool.fold_args(0)["checkpoint"].zero_()
        options = {"dt_softplus": softplus, "dt_limit": limit}
        y = ops.mamba2_decode(**plain, A=-layer.A_log.exp(), **state, slots=slots, **options)  # type: ignore[arg-type]
        delta = torch.nn.functional.softplus(x["dt"].double()) if softplus else x["dt"].double()
        u = (delta if limit == none else delta.clamp(*limit))[..., None] * x["x"].double()
        expected = u * (x["B"].double() * x["C"].double()).sum(-1, keepdim=True)
        assert relative_error(y, expected) < 1e-6


def test_16_bit_convolution_is_summed_in_fp32(place: dict[str, str]) -> None:
    x, weight, state = torch.randn(3, 64).half(), torch.randn(64, 4).half(), torch.randn(3, 64, 3).half()
    window = torch.cat([state, x[..., None]], dim=-1).double()
    here = [t.to(place["device"]) for t in (x, state, weight)]
    slots = torch.arange(3, dtype=torch.int32, device=place["device"])
    y = ops.causal_conv1d_update(*here, slots=slots, backend="triton")
    assert torch.equal(y.cpu(), (window * weight.double()).sum(-1).half())


def operator_calls(kind: str, place: dict[str, str]) -> dict[str, tuple[object, ...]]:
    """Arguments of every registered operator that a layer of this kind uses."""
    layer = Layer(kind, 1, 1, 16, 16, **place)
    pool = ReplayPool([layer.spec], 3, ring_len=4, **place)  # type: ignore[arg-type]
    slots = pool.slot_tensor(pool.alloc(2))
    x = layer.draw(2)
    state = [*pool.fold_args(0).values()]
    step = [slots, 4, None, "triton"]
    row_state = [*state[:4], pool.write_pos[:2].clone(), slots]
    out = torch.zeros(2, 1, 16, device=layer.device)
    forced = torch.tensor([True, False], device=layer.device)
    calls: dict[str, tuple[object, ...]] = {
        "read_state": (*state, slots, "triton"),
        "materialize": (*state, slots[:1], slots[1:], "triton"),
        "advance": (*state[4:], pool._counters, slots, 4, None, "triton"),
    }
    if kind == "mamba2":
        head = [x["x"], x["dt"], x["B"], x["C"], -layer.A_log.exp(), layer.D, x["z"], layer.dt_bias, True]
        calls["mamba2_decode"] = (*head, 0.0, math.inf, *state, *step)
        calls["mamba2_decode_rows"] = (*head, *row_state, forced, out, "triton")
        return calls
    head = [*(x[n] for n in ("q", "k", "v", "a", "b")), layer.A_log, layer.dt_bias]
    bound = [] if kind == "gdn" else [-5.0 if kind == "kda_bounded" else None]
    calls["gdn_decode" if kind == "gdn" else "kda_decode"] = (*head, *bound, 1.0, 0.25, True, *state, *step)
    calls["delta_decode_rows"] = (*head, *(bound or [None]), 0.25, True, *row_state, forced, out, "triton")
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_registered_correctly_with_torch_library(kind: str, place: dict[str, str]) -> None:
    """Schema, declared mutations and fake implementation of each operator, by torch's own checker."""
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    for name, args in operator_calls(kind, place).items():
        torch.library.opcheck(getattr(torch.ops.replayssm, name).default, args, test_utils=utils)


def run_rows(kind: str, backend: str, device: str, head_v_dim: int = 8) -> list[Tensor]:
    """Outputs, checkpoint and ring after 8 steps of an operator for callers that own their cursors."""
    layer = Layer(kind, 1, 2 if kind == "gdn" else 1, 8, head_v_dim, device=device, backend=backend)
    pool = ReplayPool([layer.spec], 4, ring_len=3, device=device, backend=backend)
    poison(pool)
    pool.alloc(4)
    state = dict(zip(("checkpoint", "u", "k", "g"), pool.fold_args(0).values(), strict=False))
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    cursors = torch.zeros(3, dtype=torch.int32, device=device)
    outputs = []
    for _ in range(8):
        x = layer.draw(3)
        out = torch.full((3, layer.num_v_heads, head_v_dim), 7.0, device=device)
        flush = cursors == 2
        common = {"checkpoint": state["checkpoint"], "write_pos": cursors, "slots": slots, "out": out}
        common |= {"backend": backend}
        if kind == "mamba2":
            rings = {"ring_x": state["u"], "ring_B": state["k"], "ring_dt": state["g"], "flush": flush}
            numbers = {"A": -layer.A_log.exp(), "D": layer.D, "dt_bias": layer.dt_bias, "dt_softplus": True}
            mamba2_decode_rows(**x, **numbers, **rings, **common)
        else:
            rings = {"ring_u": state["u"], "ring_k": state["k"], "ring_g": state["g"], "force_flush": None}
            numbers = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "scale": 0.5, "qk_l2norm": True}
            delta_decode_rows(**x, **numbers, lower_bound=None, **rings, **common)
        cursors = torch.where(flush, 0, cursors + 1).int()
        outputs.append(out)
    return [torch.stack(outputs), *(tensor[[2, 0]] for tensor in state.values())]


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_rows_operators_equal_pytorchs(kind: str, place: dict[str, str]) -> None:
    """With the caller's cursors, outputs and records; padding rows of Mamba-2's output stay as they were."""
    mine, expected = (run_rows(kind, backend, place["device"]) for backend in ("triton", "torch"))
    for x, reference in zip(mine, expected, strict=True):
        assert relative_error(x.nan_to_num(3.0), reference.nan_to_num(3.0)) < 1e-6
        assert torch.equal(x.isnan(), reference.isnan())


def run_steps(kind: str, device: str) -> list[Tensor]:
    """Outputs and the whole state of decodes, natural and forced flushes, windows of one token that fold, padding."""
    layer = Layer(kind, 1, 2 if kind in {"gdn", "mamba2"} else 1, 8, 20, device=device, backend="triton")
    pool = new_pool(layer, 3, 3, max_window=1)
    rows = pool.alloc(3)
    slots, one = pool.slot_tensor([rows[2], -1, rows[0]]), torch.tensor([1, 1, 0], dtype=torch.int32, device=device)
    outputs = []
    for step in range(8):
        if step != 6:
            force = torch.tensor([False, True, step == 5], device=device)
            outputs.append(layer.decode(layer.draw(3), **pool.state_args(0), slots=slots, force_flush=force))
            pool.advance(slots, force)
        else:
            for _ in range(4):
                window = layer.verify(layer.draw_window(3, 1), **pool.verify_args(0), slots=slots, num_tokens=one)
                pool.commit(slots, one, one)
                outputs.append(window.squeeze(1))
    assert pool.counters()["folds"] > 0
    return [torch.stack(outputs), *pool.fold_args(0).values()]


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_tiles_one_after_the_other_or_at_once_give_the_same_bits(
    kind: str, place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large batch has a program take several tiles of a head; 20 rows are two of 8 and half a one."""
    from replayssm.backends.triton import decode

    found = []
    for enough, tiles in ((10**9, 1), (1, 3)):
        monkeypatch.setattr(decode, "ENOUGH_PROGRAMS", enough)
        assert decode.tiles_of_a_program(3, 2, 3) == tiles
        found.append([*run_steps(kind, place["device"]), *run_rows(kind, "triton", place["device"], head_v_dim=20)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x.nan_to_num(3.0), y.nan_to_num(3.0))


def test_the_largest_batches_have_programs_of_many_tiles() -> None:
    from replayssm.backends.triton import decode

    assert decode.tiles_of_a_program(1, 32, 16) == 1
    assert decode.tiles_of_a_program(256, 32, 16) == 8
