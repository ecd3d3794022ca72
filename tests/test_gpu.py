"""What only a GPU can show of the Triton and CUDA kernels: the same bits in any company, CUDA graphs, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from conftest import NEEDS_HOPPER
from oracle import KINDS, SHAPES, Layer, relative_error
from test_triton import new_pool
from torch import Tensor
from windows import Run

from replayssm import ReplayPool, ops
from replayssm.ops.rows import delta_decode_rows, mamba2_decode_rows

pytestmark = pytest.mark.gpu

ROWS, SLOTS, RING = 9, 24, 4
BF16 = torch.bfloat16
BACKENDS = ["triton", pytest.param("cuda", marks=NEEDS_HOPPER)]


@dataclass
class Call:
    """One operator with inputs for nine rows and contents for as many slots.

    ``run(inputs, state, slots)`` works in place and returns an output ``[B, ...]``, or None.
    """

    inputs: dict[str, Tensor]  # [9, ...]
    state: dict[str, Tensor]  # [9, ...] per slot
    run: Callable[[dict[str, Tensor], dict[str, Tensor], Tensor], Tensor | None]
    padding: bool = True


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).cuda()


def records(layer: Layer) -> dict[str, Tensor]:
    """A checkpoint and a full ring for each of nine slots."""
    h_k, h_v, d_k, d_v = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    return {
        "checkpoint": random(ROWS, h_v, d_v, d_k),
        "ring_u": random(ROWS, h_v, RING, d_v),
        "ring_k": random(ROWS, h_k, RING, d_k, dtype=layer.dtype),
        "ring_g": -random(ROWS, h_v, RING, *layer.spec.gate_shape).abs(),
    }


def decode_call(layer: Layer, backend: str) -> Call:
    state = records(layer) | {
        "write_pos": torch.arange(ROWS, dtype=torch.int32, device="cuda") % RING,
        "checkpoint_slot": torch.zeros(ROWS, dtype=torch.int32, device="cuda"),
    }

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> Tensor:
        forced = inputs["forced"] > 1
        inputs = {name: tensor for name, tensor in inputs.items() if name != "forced"}
        state["checkpoint_slot"].copy_(torch.arange(SLOTS, device="cuda"))
        return layer.decode(inputs, **state, slots=slots, flush_period=RING, force_flush=forced, backend=backend)

    return Call(layer.draw(ROWS) | {"forced": random(ROWS)}, state, run)


def rows_call(layer: Layer, backend: str) -> Call:
    cursors = {"write_pos": torch.arange(ROWS, dtype=torch.int32, device="cuda") % RING}

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> Tensor:
        x = dict(inputs)
        cursor = x.pop("write_pos")
        v = x["x" if layer.kind == "mamba2" else "v"]
        out = torch.zeros_like(v)
        common = {"checkpoint": state["checkpoint"], "write_pos": cursor, "slots": slots, "out": out}
        rings = [state[name] for name in ("ring_u", "ring_k", "ring_g")]
        if layer.kind == "mamba2":
            named = dict(zip(("ring_x", "ring_B", "ring_dt"), rings, strict=True)) | {"flush": cursor == RING - 1}
            numbers = {"A": -layer.A_log.exp(), "D": layer.D, "dt_bias": layer.dt_bias, "dt_softplus": True}
            mamba2_decode_rows(**x, **numbers, **named, **common, backend=backend)
        else:
            named = dict(zip(("ring_u", "ring_k", "ring_g"), rings, strict=True)) | {"force_flush": None}
            numbers = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "scale": 0.5, "qk_l2norm": True}
            delta_decode_rows(**x, **numbers, lower_bound=None, **named, **common, backend=backend)
        return out

    return Call(layer.draw(ROWS) | cursors, records(layer), run)


def conv_call() -> Call:
    weight, bias = random(300, 4), random(300)

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> Tensor:
        return ops.causal_conv1d_update(inputs["x"], state["conv"], weight, bias, slots=slots, activation="silu")

    return Call({"x": random(ROWS, 300)}, {"conv": random(ROWS, 300, 3)}, run)


def fold_call(layer: Layer, into: str) -> Call:
    """read_state, or materialize of every slot into itself."""
    state = records(layer) | {"write_pos": torch.arange(ROWS, dtype=torch.int32, device="cuda") % RING}

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> Tensor | None:
        own = torch.arange(SLOTS, dtype=torch.int32, device="cuda")
        if into == "output":
            return ops.read_state(**state, checkpoint_slot=own, slots=slots)
        ops.materialize(**state, checkpoint_slot=own, src=slots, dst=slots)
        return None

    return Call({"unused": random(ROWS)}, state, run, padding=False)


def advance_call() -> Call:
    state = {
        "write_pos": torch.arange(ROWS, dtype=torch.int32, device="cuda") % RING,
        "counters": torch.arange(3 * ROWS, device="cuda").view(ROWS, 3),
    }

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> None:
        own = torch.arange(SLOTS, dtype=torch.int32, device="cuda")
        ops.advance(checkpoint_slot=own, **state, slots=slots, flush_period=RING)

    return Call({"unused": random(ROWS)}, state, run)


def window_inputs(tokens: int) -> dict[str, Tensor]:
    """For each row how many tokens it uses (none, too), a tree, and how many are accepted along a path."""
    count = torch.arange(ROWS, dtype=torch.int32) % (tokens + 1)
    parents = torch.tensor([-1, 0, 0, 2], dtype=torch.int32)[:tokens].expand(ROWS, -1)
    path = torch.tensor([0, 2, 3, 3], dtype=torch.int32)[:tokens].expand(ROWS, -1)
    accepted = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32)[count]
    found = {"num_tokens": count.flip(0), "parents": parents, "path": path, "num_accepted": accepted.flip(0)}
    return {name: tensor.contiguous().cuda() for name, tensor in found.items()}


def verify_call(layer: Layer, *, tree: bool) -> Call:
    """A window of four tokens over a ring of four rows: most rows fold."""
    state = records(layer) | {
        "write_pos": torch.arange(ROWS, dtype=torch.int32, device="cuda") % RING,
        "checkpoint_slot": torch.zeros(ROWS, dtype=torch.int32, device="cuda"),
    }
    window = window_inputs(4)

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> Tensor:
        inputs = dict(inputs)
        parents = inputs.pop("parents") if tree else None
        state["checkpoint_slot"].copy_(torch.arange(SLOTS, device="cuda"))
        return layer.verify(inputs, **state, slots=slots, parents=parents)

    taken = {name: window[name] for name in ("num_tokens", *(["parents"] if tree else []))}
    return Call(layer.draw_window(ROWS, 4) | taken, state, run)


def conv_verify_call() -> Call:
    weight, bias, window = random(300, 4), random(300), window_inputs(4)

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> Tensor:
        return ops.causal_conv1d_verify(
            **inputs, **state, weight=weight, bias=bias, slots=slots, activation="silu", backend="triton"
        )

    inputs = {"x": random(ROWS, 4, 300)} | {name: window[name] for name in ("num_tokens", "parents")}
    return Call(inputs, {"conv_state": random(ROWS, 300, 3), "conv_window": random(ROWS, 300, 4)}, run)


def accept_call(layer: Layer) -> Call:
    state = {name: tensor for name, tensor in records(layer).items() if name != "checkpoint"}
    state |= {"conv_state": random(ROWS, 300, 3), "conv_window": random(ROWS, 300, 4)}
    state["write_pos"] = torch.arange(ROWS, dtype=torch.int32, device="cuda") % RING
    window = window_inputs(4)

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> None:
        ops.accept(**state, **inputs, slots=slots, backend="triton")

    return Call({name: window[name] for name in ("num_tokens", "num_accepted", "path")}, state, run)


def commit_call() -> Call:
    state = {
        "write_pos": torch.arange(ROWS, dtype=torch.int32, device="cuda") % RING,
        "counters": torch.arange(5 * ROWS, device="cuda").view(ROWS, 5),
    }
    window = window_inputs(4)

    def run(inputs: dict[str, Tensor], state: dict[str, Tensor], slots: Tensor) -> None:
        own = torch.arange(SLOTS, dtype=torch.int32, device="cuda")
        ops.commit(checkpoint_slot=own, **state, **inputs, slots=slots, ring_rows=RING, backend="triton")

    return Call({name: window[name] for name in ("num_tokens", "num_accepted")}, state, run)


def layer_of(kind: str) -> Layer:
    key_heads = 2 if kind.startswith("kda") else 1
    return Layer(kind, key_heads, 2, 64, 48, dtype=BF16, device="cuda")


def decode_calls(backend: str) -> dict[str, Callable[[], Call]]:
    return {
        **{f"{kind}_decode-{backend}": lambda kind=kind: decode_call(layer_of(kind), backend) for kind in KINDS},
        f"delta_decode_rows-gdn-{backend}": lambda: rows_call(layer_of("gdn"), backend),
        f"delta_decode_rows-kda-{backend}": lambda: rows_call(layer_of("kda"), backend),
        f"mamba2_decode_rows-{backend}": lambda: rows_call(layer_of("mamba2"), backend),
    }


CALLS: dict[str, Callable[[], Call]] = {
    **decode_calls("triton"),
    **({} if NEEDS_HOPPER else decode_calls("cuda")),
    "causal_conv1d_update": conv_call,
    **{f"read_state-{kind}": lambda kind=kind: fold_call(layer_of(kind), "output") for kind in ("gdn", "kda")},
    **{f"materialize-{kind}": lambda kind=kind: fold_call(layer_of(kind), "slots") for kind in ("gdn", "kda")},
    "advance": advance_call,
    **{f"{kind}_verify-chain": lambda kind=kind: verify_call(layer_of(kind), tree=False) for kind in KINDS},
    **{f"{kind}_verify-tree": lambda kind=kind: verify_call(layer_of(kind), tree=True) for kind in KINDS},
    "causal_conv1d_verify": conv_verify_call,
    **{f"accept-{kind}": lambda kind=kind: accept_call(layer_of(kind)) for kind in ("gdn", "kda")},
    "commit": commit_call,
}


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class Prepared:
    """A call on some of its rows, which lie in slots of any order, behind padding if the operator has it."""

    def __init__(self, call: Call, rows: list[int], padding: bool) -> None:
        self.call, self.rows = call, rows
        self.pad = int(padding and call.padding)
        self.slot_of = [(5 * row + len(rows)) % SLOTS for row in rows]
        taken = [-1] * self.pad + self.slot_of + [-3] * self.pad
        self.slots = torch.tensor(taken, dtype=torch.int32, device="cuda")
        picked = [rows[0]] * self.pad + rows + [rows[-1]] * self.pad
        self.inputs = {name: tensor[picked].clone() for name, tensor in call.inputs.items()}
        self.state = {
            name: torch.full((SLOTS, *t.shape[1:]), 3, dtype=t.dtype, device="cuda") for name, t in call.state.items()
        }
        self.output: Tensor | None = None

    def reset(self) -> None:
        for name, tensor in self.state.items():
            tensor.fill_(3)
            tensor[self.slot_of] = self.call.state[name][self.rows]

    def run(self, graph: bool) -> dict[str, Tensor]:
        """The bits that row 0 and its slot have afterwards."""
        self.reset()
        if graph:
            with torch.no_grad():
                self.call.run(self.inputs, self.state, self.slots)  # compiles
            captured = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(captured):
                self.output = self.call.run(self.inputs, self.state, self.slots)
            self.reset()
            captured.replay()
        else:
            with torch.no_grad():
                self.output = self.call.run(self.inputs, self.state, self.slots)
        at = self.rows.index(0)
        found = {
            name: bits(tensor[self.slot_of[at]]) for name, tensor in self.state.items() if name != "checkpoint_slot"
        }
        if self.output is not None:
            found["output"] = bits(self.output[at + self.pad])
        return found


@pytest.mark.parametrize("name", CALLS)
def test_same_row_same_bits_alone_in_batches_padded_and_in_a_graph(name: str) -> None:
    call = CALLS[name]()
    alone = Prepared(call, [0], padding=False).run(graph=False)
    assert any(found.any() for found in alone.values())
    for rows in ([0], [0, 1], [2, 0, 1], list(range(8, -1, -1))):
        for padding in (False, True):
            for graph in (False, True):
                for tensor, found in Prepared(call, rows, padding).run(graph).items():
                    assert torch.equal(found, alone[tensor]), (tensor, rows, padding, graph)


@pytest.mark.parametrize("name", CALLS)
def test_a_thousand_launches_give_the_same_bits(name: str) -> None:
    prepared = Prepared(CALLS[name](), list(range(ROWS)), padding=True)
    first: list[Tensor] = []
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    with torch.no_grad():
        for _ in range(1000):
            prepared.reset()
            output = prepared.call.run(prepared.inputs, prepared.state, prepared.slots)
            results = [bits(t) for t in (*prepared.state.values(), *([] if output is None else [output]))]
            first = first or [result.clone() for result in results]
            for result, expected in zip(results, first, strict=True):
                differs |= (result != expected).any()
    assert not differs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_row_same_bits_on_a_gpu(shape: str, state_dtype: torch.dtype, backend: str) -> None:
    """Alone, in batches of many sizes and orders, with padding and neighbours at other cursors; 20 repeats."""
    layer = Layer.named(shape, device="cuda", dtype=torch.bfloat16)
    steps = [layer.draw(33) for _ in range(9)]

    def run(rows: list[int]) -> Tensor:
        pool = new_pool(layer, 40, 4, state_dtype=state_dtype, activation_dtype=torch.bfloat16, backend=backend)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_graph_replays_a_decode_step(kind: str, backend: str) -> None:
    """One captured step, replayed: cursors, slots and inputs change in place, and rows flush when their turn comes."""
    layer = Layer(kind, 2, 2, 64, 64, device="cuda")
    pool = new_pool(layer, 5, 3, backend=backend)
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
            assert relative_error(pool.read_state(0, [slot]), states[slot]) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_window_of_a_pool_may_be_captured(kind: str, tokens: int, backend: str) -> None:
    """Windows of its slots before the graph is replayed, between replays and the replays themselves are right."""
    layer = Layer(kind, 2, 2 if kind.startswith("kda") else 4, 64, 64, device="cuda", backend=backend)
    compiling = Run(layer, ring=6)  # its slots lie elsewhere
    compiling.verify(tokens, [tokens] * 2)
    memory = torch.cuda.graph_pool_handle()
    before = torch.cuda.CUDAGraph()
    with torch.cuda.graph(before, pool=memory):  # what it leaves in the graphs' memory is no zeros
        sevens = [torch.full((128,), 7, dtype=torch.int32, device="cuda") for _ in range(256)]
        del sevens
    before.replay()

    run = Run(layer, ring=6)
    held, slots = run.pool.fold_args(0), run.pool.slot_tensor(run.rows)
    given, num_tokens = layer.draw_window(2, tokens), torch.full_like(slots, tokens)

    def window() -> Tensor:
        return layer.verify(given, **run.pool.verify_args(0), slots=slots, num_tokens=num_tokens)

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, pool=memory):
        y = window()
    for _ in range(3):
        for _ in range(6):  # then the ring is full, and the next one folds
            run.verify(tokens)
            run.commit()
        kept = {name: tensor.clone() for name, tensor in held.items()}
        expected = window()
        after = {name: bits(tensor) for name, tensor in held.items()}
        for _ in range(2):
            for name, tensor in held.items():
                tensor.copy_(kept[name])
            graph.replay()
            assert torch.equal(y, expected)
            assert all(torch.equal(bits(tensor), after[name]) for name, tensor in held.items())
        for name, tensor in held.items():
            tensor.copy_(kept[name])


def test_a_window_waits_for_nothing_and_allocates_its_output_alone() -> None:
    layer = Layer("gdn", 2, 4, 64, 64, device="cuda")
    pool = new_pool(layer, 4, 6, max_window=4)
    slots = pool.slot_tensor(pool.alloc(4))
    inputs, window = layer.draw_window(4, 4), {n: t[:4].clone() for n, t in window_inputs(4).items()}
    where = {"slots": slots, "num_tokens": window["num_tokens"]}

    def step() -> Tensor:
        y = layer.verify(inputs, **pool.verify_args(0), **where, parents=window["parents"])
        pool.commit(**where, num_accepted=window["num_accepted"], path=window["path"])
        return y

    step()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_waits_for_nothing_on_a_gpu(backend: str) -> None:
    """Neither operators nor cursors synchronise with the host."""
    layer = Layer("gdn", 2, 4, 64, 64, device="cuda")
    pool = new_pool(layer, 4, 3, backend=backend)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16], ids=["statebf16", "state16"])
@pytest.mark.parametrize("shape", ["gdn-64x64-ratio3", "kda-bounded-64x64", "mamba2-64x64-groups4"])
def test_16_bit_checkpoint_is_never_worse_than_stepwise(shape: str, state_dtype: torch.dtype, backend: str) -> None:
    """Same dtype, updated at every step: replay rounds the state once in L steps instead."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for ring_len in (1, 4, 16):
            layer = Layer.named(shape, dtype=dtype, seed=ring_len, device="cuda")
            replay, stepwise = errors_beside_stepwise(layer, ring_len, state_dtype, "auto", backend)
            assert (replay <= stepwise * 1.005).all(), (dtype, ring_len, replay, stepwise)


def test_16_bit_checkpoint_with_fp32_updates_gains_the_root_of_ring_len() -> None:
    """Rounded L times less often, the error falls by about √L."""
    layer = Layer.named("gdn-64x64-ratio3", dtype=BF16, device="cuda")
    replay, stepwise = errors_beside_stepwise(layer, 16, BF16, torch.float32, "triton")
    assert stepwise[0] / replay[0] > 3.5


def errors_beside_stepwise(
    layer: Layer, ring_len: int, state_dtype: torch.dtype, ring_dtype: object, backend: str
) -> Tensor:
    """RMS over a run of state and output errors: ``[replay, stepwise] × [state, output]``."""
    options = {"state_dtype": state_dtype, "activation_dtype": layer.dtype, "ring_dtype": ring_dtype}
    options["backend"] = backend
    pool = new_pool(layer, 2, ring_len, **options)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    exact, stepwise = layer.zero_state(2), layer.zero_state(2, torch.float32)
    errors = []
    for step in range(160):
        inputs = layer.draw(2)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        exact, expected = layer.reference(inputs, exact)
        stepwise, y_stepwise = layer.reference(inputs, stepwise, torch.float32)
        stepwise = stepwise.to(state_dtype).float()
        if step >= 32:
            both = ((pool.read_state(0, rows), y), (stepwise, y_stepwise.to(layer.dtype)))
            errors.append([[relative_error(s, exact), relative_error(o, expected)] for s, o in both])
    return torch.tensor(errors, dtype=torch.float64).square().mean(0).sqrt()


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_with_inductor_without_graph_breaks(kind: str) -> None:
    layer = Layer(kind, 1, 1, 16, 16, device="cuda")

    def run(decode: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        layer.rng.manual_seed(9)
        pool = new_pool(layer, 3, 3)
        rows = pool.alloc(2)
        slots = pool.slot_tensor(rows)
        outputs = []
        for _ in range(8):
            outputs.append(decode(layer.draw(2), pool.state_args(0), slots))
            pool.advance(slots)
        return torch.stack(outputs), pool.read_state(0, rows)

    def step(inputs: dict[str, Tensor], state: dict[str, object], slots: Tensor) -> Tensor:
        return layer.decode(inputs, **state, slots=slots) * 2

    for mine, expected in zip(run(torch.compile(step, fullgraph=True)), run(step), strict=True):
        assert torch.equal(mine, expected)


#: H_k, H_v, d_k, d_v of released models
RELEASED = {"gdn": (16, 32, 128, 128), "kda": (32, 32, 128, 128), "mamba2": (8, 128, 128, 64)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", RELEASED)
def test_a_row_of_a_large_batch_has_the_bits_that_it_has_alone(kind: str, backend: str) -> None:
    """Kernels cut the work of 256 rows otherwise than that of one: through two flushes, outputs and state."""
    layer = Layer(kind, *RELEASED[kind], dtype=BF16, device="cuda")
    settings = {"ring_len": 3, "activation_dtype": BF16, "device": "cuda", "backend": backend}
    many, alone = (ReplayPool([layer.spec], slots, **settings) for slots in (256, 1))
    all_slots, one = many.slot_tensor(many.alloc(256)), alone.slot_tensor(alone.alloc(1))
    for _ in range(7):
        inputs = layer.draw(256)
        y = layer.decode(inputs, **many.state_args(0), slots=all_slots)
        mine = layer.decode({n: x[201:202] for n, x in inputs.items()}, **alone.state_args(0), slots=one)
        many.advance(all_slots)
        alone.advance(one)
        assert torch.equal(y[201:202], mine)
    assert torch.equal(many.read_state(0, [201]), alone.read_state(0, [0]))
