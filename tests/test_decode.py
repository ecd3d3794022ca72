"""The decode operators against the float64 recurrence, step by step."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from oracle import KINDS, SHAPES, Layer, poison, relative_error
from torch import Tensor

from replayssm import ReplayPool, ops
from replayssm.state import LayerSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
OUTPUT_ERROR = {F32: 1e-6, BF16: 4e-3, F16: 5e-4}


def pool_for(layer: Layer, num_slots: int, **options: object) -> ReplayPool:
    """A pool of one layer, with NaN wherever nothing may be read."""
    pool = ReplayPool(
        [layer.spec],
        num_slots,
        activation_dtype=layer.dtype,
        device=layer.device,
        backend=layer.backend,
        **{"ring_len": 16, **options},
    )
    poison(pool)
    return pool


def beta_scale(shape: str) -> float:
    return 2.0 if "olmo" in shape else 1.0


@pytest.mark.parametrize("ring_len", [1, 2, 4, 7, 16, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_output_and_state_equals_the_recurrence(shape: str, ring_len: int, place: dict[str, str]) -> None:
    layer = Layer.named(shape, beta_scale=beta_scale(shape), **place)
    pool = pool_for(layer, 4, ring_len=ring_len)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(2)
    for _ in range(2 * ring_len + 3):
        inputs = layer.draw(2)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, expected = layer.reference(inputs, state)
        assert relative_error(y, expected) < 1e-6
        assert relative_error(pool.read_state(0, rows), state) < 1e-6


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("state_dtype", [F32, BF16, F16], ids=["state32", "statebf16", "state16"])
@pytest.mark.parametrize("shape", ["gdn-64x64-ratio3", "kda-128x128", "mamba2-80x128-groups1"])
def test_16_bit_activations(shape: str, state_dtype: torch.dtype, dtype: torch.dtype, place: dict[str, str]) -> None:
    """An fp32 state stays exact under 16-bit activations: no record is rounded on its way into it."""
    layer = Layer.named(shape, dtype=dtype, **place)
    pool = pool_for(layer, 3, state_dtype=state_dtype, ring_len=5)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(2)
    for _ in range(23):
        inputs = layer.draw(2)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, expected = layer.reference(inputs, state)
        assert y.dtype == dtype
        if state_dtype == F32:
            assert relative_error(y, expected) < OUTPUT_ERROR[dtype]
            assert relative_error(pool.read_state(0, rows), state) < 1e-6
        else:
            assert relative_error(y, expected) < 1e-2


@pytest.mark.usefixtures("either_cpu_backend")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("gdn", "kda") else pytest.mark.thorough) for kind in KINDS]
)
def test_fp32_state_after_10000_steps(kind: str) -> None:
    layer = Layer(kind, 1, 1 if kind.startswith("kda") else 2, 16, 16, seed=3)
    pool = pool_for(layer, 1)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(1)
    worst = 0.0
    for step in range(10_000):
        inputs = layer.draw(1)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, expected = layer.reference(inputs, state)
        if step % 97 == 0 or step == 9_999:
            worst = max(worst, relative_error(y, expected), relative_error(pool.read_state(0, rows), state))
    assert worst < 1e-5


def errors_beside_stepwise(layer: Layer, ring_len: int, state_dtype: torch.dtype, ring_dtype: object) -> Tensor:
    """RMS over a run of state and output errors: ``[replay, stepwise] × [state, output]``."""
    pool = ReplayPool(
        [layer.spec],
        2,
        ring_len=ring_len,
        state_dtype=state_dtype,
        activation_dtype=layer.dtype,
        ring_dtype=ring_dtype,  # type: ignore[arg-type]
    )
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    exact, stepwise = layer.zero_state(2), layer.zero_state(2, F32)
    errors = []
    for step in range(160):
        inputs = layer.draw(2)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        exact, expected = layer.reference(inputs, exact)
        stepwise, y_stepwise = layer.reference(inputs, stepwise, F32)
        stepwise = stepwise.to(state_dtype).float()
        if step >= 32:
            folded = pool.read_state(0, rows)
            errors.append(
                [
                    [relative_error(folded, exact), relative_error(y, expected)],
                    [relative_error(stepwise, exact), relative_error(y_stepwise.to(layer.dtype), expected)],
                ]
            )
    return torch.tensor(errors, dtype=torch.float64).square().mean(0).sqrt()


@pytest.mark.usefixtures("either_cpu_backend")
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("state_dtype", [BF16, F16], ids=["statebf16", "state16"])
@pytest.mark.parametrize("shape", ["gdn-64x64-ratio3", "kda-bounded-64x64", "mamba2-64x64-groups4"])
def test_16_bit_checkpoint_is_never_worse_than_stepwise(
    shape: str, state_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Same dtype, updated at every step: replay rounds the state once in L steps instead."""
    for ring_len in (1, 4, 16):
        layer = Layer.named(shape, dtype=dtype, seed=ring_len)
        replay, stepwise = errors_beside_stepwise(layer, ring_len, state_dtype, "auto")
        assert (replay <= stepwise * 1.005).all(), (ring_len, replay, stepwise)


@pytest.mark.usefixtures("either_cpu_backend")
def test_16_bit_checkpoint_with_fp32_updates_gains_the_root_of_ring_len() -> None:
    """Rounded L times less often, the error falls by about √L: 4 at L = 16, as docs/architecture.md says."""
    layer = Layer.named("gdn-64x64-ratio3", dtype=BF16)
    replay, stepwise = errors_beside_stepwise(layer, 16, BF16, F32)
    assert stepwise[0] / replay[0] > 3.5


@pytest.mark.parametrize("kind", KINDS)
def test_staggered_cursors_padding_and_slot_0(kind: str, place: dict[str, str]) -> None:
    """Rows with other cursors, flushing at other steps; padding rows; slots in any order, slot 0 among them."""
    layer = Layer(kind, 2, 2, 32, 16, **place)
    pool = pool_for(layer, 9, ring_len=4)
    rows = pool.alloc(6)
    assert 0 in rows
    states = {slot: layer.zero_state(1) for slot in rows}
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        order = [rows[i] for i in torch.randperm(6, generator=generator).tolist()][: 1 + step % 6]
        batch = [*order, -1, -7] if step % 2 else [-1, *order]
        slots = pool.slot_tensor(batch)
        inputs = layer.draw(len(batch))
        before = pool.fold_args(0)["ring_u"].clone()
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        for row, slot in enumerate(batch):
            if slot < 0:
                assert (y[row] == 0).all()
                continue
            one = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
            states[slot], expected = layer.reference(one, states[slot])
            assert relative_error(y[row], expected[0]) < 1e-6
        untouched = [slot for slot in range(9) if slot not in order]
        assert torch.equal(
            before[untouched].view(torch.int32), pool.fold_args(0)["ring_u"][untouched].view(torch.int32)
        )
        pool.advance(slots)
        for slot in rows:
            assert relative_error(pool.read_state(0, [slot]), states[slot]) < 1e-6


@pytest.mark.parametrize("flag_dtype", [torch.bool, torch.int32])
@pytest.mark.parametrize("kind", KINDS)
def test_forced_flush(kind: str, flag_dtype: torch.dtype, place: dict[str, str]) -> None:
    layer = Layer(kind, 1, 1, 16, 32, **place)
    pool = pool_for(layer, 3, ring_len=8)
    rows = pool.alloc(3)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(3)
    generator = torch.Generator().manual_seed(5)
    for _ in range(30):
        force = (torch.rand(3, generator=generator) < 0.3).to(device=layer.device, dtype=flag_dtype)
        inputs = layer.draw(3)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots, force_flush=force)
        pool.advance(slots, force)
        state, expected = layer.reference(inputs, state)
        assert relative_error(y, expected) < 1e-6
        assert relative_error(pool.read_state(0, rows), state) < 1e-6
        flushed = force.bool()
        assert (pool.write_pos[flushed] == 0).all()
        if flushed.any():
            assert relative_error(pool.fold_args(0)["checkpoint"][flushed], state[flushed]) < 1e-6


@pytest.mark.usefixtures("either_cpu_backend")
def test_only_a_flush_writes_the_checkpoint() -> None:
    layer = Layer("gdn", 1, 2, 16, 16)
    pool = pool_for(layer, 1, ring_len=4)
    slots = pool.slot_tensor(pool.alloc(1))
    checkpoint = pool.fold_args(0)["checkpoint"]
    for step in range(12):
        before = checkpoint.clone()
        layer.decode(layer.draw(1), **pool.state_args(0), slots=slots)
        pool.advance(slots)
        assert torch.equal(before, checkpoint) == (step % 4 != 3)


@pytest.mark.usefixtures("either_cpu_backend")
def test_a_small_decay_behind_a_large_one_keeps_its_digits() -> None:
    """log decays of −90 and −1e-3 side by side: as differences of one running sum, 1e-5 of the state would be lost."""
    layer = Layer("mamba2", 1, 1, 16, 16)
    layer.D = torch.zeros(1)
    pool = pool_for(layer, 1, ring_len=8)
    rows = pool.alloc(1)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(1)
    for step in range(24):
        inputs = layer.draw(1)
        inputs["dt"] = torch.full((1, 1), 90.0 if step % 3 == 0 else -5.0)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, expected = layer.reference(inputs, state)
        assert relative_error(y, expected) < 2e-6
        assert relative_error(pool.read_state(0, rows), state) < 2e-6


@pytest.mark.usefixtures("either_cpu_backend")
def test_beta_is_fp32_when_its_projection_is_16_bit() -> None:
    """A β rounded to bf16 would be off by 2e-3; the fp32 state shows that it isn't."""
    layer = Layer("gdn", 1, 1, 32, 32, dtype=BF16)
    pool = pool_for(layer, 1, ring_len=1)
    rows = pool.alloc(1)
    inputs = layer.draw(1)
    layer.decode(inputs, **pool.state_args(0), slots=pool.slot_tensor(rows))
    state, _ = layer.reference(inputs, layer.zero_state(1))
    assert relative_error(pool.fold_args(0)["checkpoint"], state) < 1e-6


def strided_state(spec: LayerSpec, num_slots: int, ring_len: int) -> dict[str, Tensor]:
    """All of a slot's tensors in one page of a larger pool, so that slot strides are larger than the slots."""
    h_v, d_v, d_k, h_k = spec.num_v_heads, spec.head_v_dim, spec.head_k_dim, spec.num_k_heads
    shapes = {
        "checkpoint": (h_v, d_v, d_k),
        "ring_u": (h_v, ring_len, d_v),
        "ring_k": (h_k, ring_len, d_k),
        "ring_g": (h_v, ring_len, *spec.gate_shape),
    }
    page = torch.full((num_slots, sum(math.prod(s) for s in shapes.values()) + 13), float("nan"))
    state, offset = {}, 5
    for name, shape in shapes.items():
        state[name] = page[:, offset : offset + math.prod(shape)].unflatten(1, shape)
        offset += math.prod(shape)
    state["page"] = page
    return state


@pytest.mark.usefixtures("either_cpu_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_slots_may_be_pages_of_a_larger_pool(kind: str) -> None:
    layer = Layer(kind, 2, 2, 16, 16)
    state_args = strided_state(layer.spec, 5, 4)
    page = state_args.pop("page")
    cursors = {
        "write_pos": torch.zeros(5, dtype=torch.int32),
        "checkpoint_slot": torch.arange(5, dtype=torch.int32),
    }
    slots = torch.tensor([3, 1], dtype=torch.int32)
    state_args["checkpoint"][slots.long()] = 0
    state = layer.zero_state(2)
    for _ in range(11):
        inputs = layer.draw(2)
        y = layer.decode(inputs, **state_args, **cursors, slots=slots, flush_period=4)
        ops.advance(**cursors, slots=slots, flush_period=4)
        state, expected = layer.reference(inputs, state)
        assert relative_error(y, expected) < 1e-6
        folded = ops.read_state(**state_args, **cursors, slots=slots)
        assert relative_error(folded, state) < 1e-6
    assert page[[0, 2, 4]].isnan().all()
    assert page[:, :5].isnan().all()
    assert page[:, -8:].isnan().all()


@pytest.mark.usefixtures("either_cpu_backend")
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=["state32", "statebf16"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if "128x128-ratio1" not in s])
def test_same_row_same_bits_in_any_company(shape: str, state_dtype: torch.dtype) -> None:
    """Alone, in a batch, in another order, with padding and with staggered neighbours: bit-equal, flushes included.

    On a CPU: on a GPU, torch's matrix products choose their order of summation by the batch size (seen on an H200).
    """
    layer = Layer.named(shape)
    steps = [layer.draw(7) for _ in range(13)]

    def run(rows: list[int], stagger: bool, padding: bool) -> tuple[Tensor, Tensor]:
        """Outputs and final checkpoint of row 0, which is somewhere in `rows`."""
        pool = pool_for(layer, 12, ring_len=5, state_dtype=state_dtype)
        taken = pool.alloc(9)
        batch = [taken[(5 * row + len(rows)) % 9] for row in rows]
        if stagger:  # neighbours start with other cursors
            for i, row in enumerate(rows):
                if row:
                    pool.write_pos[batch[i]] = i % 5
                    for name in ("ring_u", "ring_k", "ring_g"):
                        pool.fold_args(0)[name][batch[i]] = -0.5
        outputs = []
        at = rows.index(0)
        for inputs in steps:
            one = {name: tensor[rows] for name, tensor in inputs.items()}
            slots = pool.slot_tensor(batch)
            if padding:
                one = {name: torch.cat([tensor[:1], tensor, tensor[:2]]) for name, tensor in one.items()}
                slots = pool.slot_tensor([-1, *batch, -1, -1])
            y = layer.decode(one, **pool.state_args(0), slots=slots)
            pool.advance(slots)
            outputs.append(y[at + padding])
        return torch.stack(outputs), pool.read_state(0, [batch[at]])[0]

    alone = run([0], stagger=False, padding=False)
    for rows in ([0, 1], [3, 2, 0], [6, 5, 4, 3, 2, 1, 0], [1, 0, 2, 3, 4]):
        for stagger in (False, True):
            for padding in (False, True):
                for mine, expected in zip(run(rows, stagger, padding), alone, strict=True):
                    assert torch.equal(mine, expected), (rows, stagger, padding)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_be_views_of_one_projection(kind: str, place: dict[str, str]) -> None:
    """As layers hand them over: slices of a wider tensor, so rows don't follow each other in memory."""
    layer = Layer(kind, 2, 2, 16, 32, **place)
    packed, apart = pool_for(layer, 4, ring_len=3), pool_for(layer, 4, ring_len=3)
    slots = packed.slot_tensor(packed.alloc(3))
    apart.alloc(3)
    for _ in range(7):
        inputs = layer.draw(3)
        row = torch.cat([tensor.flatten(1) for tensor in inputs.values()], dim=1)
        parts = row.split([tensor[0].numel() for tensor in inputs.values()], dim=1)
        views = {n: p.unflatten(1, t.shape[1:]) for (n, t), p in zip(inputs.items(), parts, strict=True)}
        assert not any(view.is_contiguous() for view in views.values())
        mine = layer.decode(views, **packed.state_args(0), slots=slots)
        assert torch.equal(mine, layer.decode(inputs, **apart.state_args(0), slots=slots))
        packed.advance(slots)
        apart.advance(slots)
    assert torch.equal(packed.read_state(0, [0, 1, 2]), apart.read_state(0, [0, 1, 2]))


@pytest.mark.usefixtures("either_cpu_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_registered_correctly_with_torch_library(kind: str) -> None:
    """Schema, declared mutations and fake implementation, by torch's own checker."""
    layer = Layer(kind, 1, 1, 16, 16)
    pool = ReplayPool([layer.spec], 3, ring_len=4)
    slots = pool.slot_tensor(pool.alloc(2))
    x = layer.draw(2)
    state = [*pool.fold_args(0).values(), slots, 4, None, pool.backend]
    gate = [layer.A_log, layer.dt_bias]
    if kind == "mamba2":
        op, head = "mamba2_decode", [*[x[n] for n in ("x", "dt", "B", "C")], -layer.A_log.exp(), layer.D, x["z"]]
        head += [layer.dt_bias, True, 0.0, math.inf]
    else:
        op = "gdn_decode" if kind == "gdn" else "kda_decode"
        head = [*[x[n] for n in ("q", "k", "v", "a", "b")], *gate, *([] if kind == "gdn" else [-5.0]), 1.0, 0.25, True]
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(getattr(torch.ops.replayssm, op).default, (*head, *state), test_utils=utils)
    pool.write_pos += 3
    torch.library.opcheck(getattr(torch.ops.replayssm, op).default, (*head, *state), test_utils=utils)


@pytest.mark.usefixtures("either_cpu_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_want_gradients_leave_the_pool_alone(kind: str) -> None:
    """In grad mode, too: a graph through ring and checkpoint would grow at each step."""
    layer = Layer(kind, 1, 1, 8, 8)
    layer.A_log.requires_grad_()
    layer.dt_bias.requires_grad_()
    pool = pool_for(layer, 1, ring_len=2)
    slots = pool.slot_tensor(pool.alloc(1))
    with torch.enable_grad():
        for _ in range(4):
            layer.decode(layer.draw(1), **pool.state_args(0), slots=slots)
            pool.advance(slots)
    assert not any(tensor.requires_grad for tensor in pool.fold_args(0).values())


@pytest.mark.parametrize(("kind", "compiler"), [*((kind, "aot_eager") for kind in KINDS), ("gdn", "inductor")])
def test_compiles_without_graph_breaks(kind: str, compiler: str) -> None:
    if compiler == "inductor" and not shutil.which("g++"):
        pytest.skip("torch.compile for a CPU needs a C++ compiler")
    layer = Layer(kind, 1, 1, 16, 16)

    def run(decode: object) -> tuple[Tensor, Tensor]:
        layer.rng.manual_seed(9)
        pool = pool_for(layer, 3, ring_len=3)
        rows = pool.alloc(2)
        slots = pool.slot_tensor(rows)
        outputs = []
        for _ in range(8):
            outputs.append(decode(layer.draw(2), pool.state_args(0), slots))  # type: ignore[operator]
            pool.advance(slots)
        return torch.stack(outputs), pool.read_state(0, rows)

    def step(inputs: dict[str, Tensor], state: dict[str, object], slots: Tensor) -> Tensor:
        return layer.decode(inputs, **state, slots=slots) * 2

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for mine, expected in zip(run(compiled), run(step), strict=True):
        assert torch.equal(mine, expected)


def bad_calls() -> dict[str, tuple[dict[str, object], str]]:
    """Name to changed arguments of a valid gdn_decode call, and what the error says."""
    return {
        "q of another dtype": ({"q": torch.zeros(2, 1, 16, dtype=BF16)}, "q has dtype bfloat16: float32 is wanted"),
        "q of another shape": (
            {"q": torch.zeros(2, 1, 15)},
            r"q has shape \[2, 1, 15\]: \[B, H_k, d_k\] = \[2, 1, 16\]",
        ),
        "integer v": ({"v": torch.zeros(2, 2, 16, dtype=torch.int32)}, "v has dtype int32: float32 or bfloat16"),
        "v without heads": ({"v": torch.zeros(2, 16)}, r"v has shape \[2, 16\]: \[B, H_v, d_v\]"),
        "no tensor": ({"v": 3}, "v is a int: a tensor"),
        "a of another batch": ({"a": torch.zeros(3, 2)}, r"a has shape \[3, 2\]: \[B, H_v\] = \[2, 2\]"),
        "A_log of another length": ({"A_log": torch.zeros(3)}, r"A_log has shape \[3\]"),
        "double checkpoint": ({"checkpoint": torch.zeros(3, 2, 16, 16).double()}, "checkpoint has dtype float64"),
        "long slots": ({"slots": torch.zeros(2, dtype=torch.int64)}, "slots has dtype int64: int32 is wanted"),
        "slot out of range": ({"slots": torch.tensor([0, 3], dtype=torch.int32)}, "slots holds 3: numbers below N = 3"),
        "slot twice": ({"slots": torch.tensor([1, 1], dtype=torch.int32)}, "slots holds 1 more than once"),
        "float cursors": ({"write_pos": torch.zeros(3)}, "write_pos has dtype float32: int32 is wanted"),
        "flush period 2.5": ({"flush_period": 2.5}, r"flush_period is 2\.5: a number from 1 to R = 4"),
        "flush period 0": ({"flush_period": 0}, "flush_period is 0: a number from 1 to R = 4"),
        "flush period beyond the ring": ({"flush_period": 5}, "flush_period is 5: a number from 1 to R = 4"),
        "ring_g of the other gate": ({"ring_g": torch.zeros(3, 2, 4, 16)}, r"ring_g has shape \[3, 2, 4, 16\]"),
        "ring_k of another dtype": ({"ring_k": torch.zeros(3, 1, 4, 16, dtype=F16)}, "ring_k has dtype float16"),
        "force_flush of another shape": ({"force_flush": torch.zeros(3, dtype=torch.bool)}, "force_flush has shape"),
        "a scale in words": ({"scale": "1"}, "scale is '1': a number is wanted"),
        "no beta_scale": ({"beta_scale": None}, "beta_scale is None: a number is wanted"),
        "unknown backend": ({"backend": "tpu"}, "backend 'tpu' is unknown: use 'auto', 'cpu', 'torch'"),
        "absent backend": ({"backend": "cuda"}, "backend 'cuda' is not available"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_arguments_are_named(name: str) -> None:
    layer = Layer("gdn", 1, 2, 16, 16)
    pool = ReplayPool([layer.spec], 3, ring_len=4)
    call = {
        **layer.draw(2),
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        **pool.state_args(0),
        "slots": pool.slot_tensor(pool.alloc(2)),
    }
    ops.gdn_decode(**call)  # type: ignore[arg-type]
    change, message = bad_calls()[name]
    with pytest.raises(ValueError, match=message) as error:
        ops.gdn_decode(**{**call, **change})  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_checks_all_of_its_tensors(kind: str) -> None:
    """Also between calls with good ones, whose look is remembered."""
    layer = Layer(kind, 2, 2, 16, 16)
    pool = ReplayPool([layer.spec], 3, ring_len=4)
    slots = pool.slot_tensor(pool.alloc(2))
    inputs, state = layer.draw(2), {**pool.state_args(0), "slots": slots, "force_flush": torch.zeros(2).bool()}
    parameters = ("A_log", "dt_bias") if kind != "mamba2" else ("A_log", "dt_bias", "D")
    for name in (*inputs, *state, *parameters):
        tensor = getattr(layer, name) if name in parameters else {**inputs, **state}[name]
        if not isinstance(tensor, Tensor):
            continue
        for changed in (tensor.double(), torch.cat([tensor, tensor]), tensor.unsqueeze(0)):
            assert layer.decode(inputs, **state).isfinite().all()
            with pytest.raises(ValueError, match="is wanted"):
                if name in parameters:
                    other = Layer(kind, 2, 2, 16, 16)
                    setattr(other, name, changed)
                    other.decode(inputs, **state)
                else:
                    layer.decode(
                        {key: changed if key == name else x for key, x in inputs.items()},
                        **{key: changed if key == name else x for key, x in state.items()},
                    )


def test_bad_arguments_of_kda_and_mamba2_are_named() -> None:
    kda, mamba = Layer("kda", 2, 2, 16, 16), Layer("mamba2", 1, 2, 16, 16)
    pool = ReplayPool([kda.spec, mamba.spec], 1, ring_len=4)
    slots = torch.zeros(1, dtype=torch.int32)
    gate = {**kda.draw(1), "A_log": kda.A_log, "dt_bias": kda.dt_bias, **pool.state_args(0), "slots": slots}
    with pytest.raises(ValueError, match=r"lower_bound is 0\.5: a negative number"):
        ops.kda_decode(**gate, lower_bound=0.5)  # type: ignore[arg-type]
    ssm = {**mamba.draw(1), "A": -mamba.A_log.exp(), **pool.state_args(1), "slots": slots}
    with pytest.raises(ValueError, match=r"dt_limit is None"):
        ops.mamba2_decode(**ssm, dt_limit=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dt_bias is a NoneType: a tensor"):
        ops.kda_decode(**{**gate, "dt_bias": None})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slots is a list: a tensor"):
        ops.read_state(**pool.fold_args(0), slots=[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write_pos is a list: a tensor"):
        ops.advance([0], pool.checkpoint_slot, slots, flush_period=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dt_limit is \(1.0, 0.5\)"):
        ops.mamba2_decode(**ssm, dt_limit=(1.0, 0.5))  # type: ignore[arg-type]
    ssm["B"] = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match=r"B has shape \[1, 2, 16\]: \[B, G, N\] = \[1, 1, 16\]"):
        ops.mamba2_decode(**ssm)  # type: ignore[arg-type]


@pytest.mark.usefixtures("either_cpu_backend")
def test_mamba2_options() -> None:
    """Without D, z, bias or softplus, and with time-step limits; without these, a negative step stays."""
    layer = Layer("mamba2", 1, 2, 16, 16)
    pool = ReplayPool([layer.spec], 1, ring_len=4)
    slots = pool.slot_tensor(pool.alloc(1))
    x = layer.draw(1)
    A = -layer.A_log.exp()
    x["dt"] = torch.tensor([[-0.4, 0.5]], device=x["dt"].device)
    none = (0.0, math.inf)
    for softplus, limit in ((True, none), (False, none), (False, (0.2, 0.6)), (False, (0.0, 0.3)), (True, (0.5, 0.6))):
        plain = {name: x[name] for name in ("x", "dt", "B", "C")}
        state = {**pool.state_args(0), "flush_period": 1}
        pool.fold_args(0)["checkpoint"].zero_()
        y = ops.mamba2_decode(**plain, A=A, **state, slots=slots, dt_softplus=softplus, dt_limit=limit)  # type: ignore[arg-type]
        delta = torch.nn.functional.softplus(x["dt"].double()) if softplus else x["dt"].double()
        u = (delta if limit == none else delta.clamp(*limit))[..., None] * x["x"].double()
        expected = u * (x["B"].double() * x["C"].double()).sum(-1, keepdim=True)
        assert relative_error(y, expected) < 1e-6
