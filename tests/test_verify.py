"""Verify windows, chains and trees, against the float64 recurrence along every path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import KINDS, SHAPES, Layer, relative_error
from torch import Tensor
from windows import TREES, Run, chain, int32, random_tree

from replayssm import ReplayPool, ops

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Place = dict[str, str]


def small(kind: str, **options: Any) -> Layer:
    """With a d_k that the backend has kernels for."""
    head_k_dim = 64 if options.get("backend") == "cuda" else 16
    return Layer(kind, 2, 2 if kind.startswith("kda") else 4, head_k_dim, 32, **options)


@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_token_and_state_of_a_chain_equals_the_recurrence(shape: str, tokens: int, place: Place) -> None:
    """From an empty ring, behind records, and with the fold that makes room; any number accepted."""
    run = Run(Layer.named(shape, beta_scale=2.0 if "olmo" in shape else 1.0, **place), ring=16)
    for accepted in (tokens, tokens // 2, tokens, 0, max(1, tokens - 1), tokens):
        run.verify(tokens)
        run.commit([range(accepted)] * 2)


@pytest.mark.parametrize("tokens", range(1, 17))
@pytest.mark.parametrize("kind", KINDS)
def test_every_length_of_a_window(kind: str, tokens: int, place: Place) -> None:
    run = Run(small(kind, **place), ring=max(tokens, 6))
    for _ in range(5):
        run.verify(tokens)
        run.commit([range(run.pick(tokens)), range(run.pick(tokens))])


@pytest.mark.parametrize("tree", ["width2", "width3", "random"])
@pytest.mark.parametrize("tokens", [2, 7, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_a_tree_equals_the_recurrence_along_its_path(
    kind: str, tokens: int, tree: str, place: Place
) -> None:
    """And what was accepted goes on as if it had been a chain."""
    run = Run(small(kind, seed=tokens, **place), ring=16)
    for _ in range(6):
        run.verify(tokens, tree=TREES[tree])
        run.commit(run.random_paths())
        run.decode()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_rows_padding_and_staggered_cursors(kind: str, tree: str, place: Place) -> None:
    """Rows of any length, none among them, in any order; slots that don't take part keep every bit."""
    run = Run(small(kind, **place), 5, ring=7)
    for step in range(12):
        order = [run.rows[i] for i in torch.randperm(5, generator=run.rng).tolist()][: 1 + step % 5]
        batch = [*order, -1] if step % 2 else [-1, *order, -3]
        tokens = 1 + run.pick(6)
        counts = [run.pick(tokens) for _ in batch]
        used = [slot for slot, n in zip(batch, counts, strict=True) if slot >= 0 and n]
        resting = [slot for slot in range(run.pool.num_slots) if slot not in used]
        before = [t[resting].clone() for t in run.pool.fold_args(0).values()]
        run.verify(tokens, counts, batch, TREES[tree])
        run.commit(run.random_paths())
        for tensor, kept in zip(run.pool.fold_args(0).values(), before, strict=True):
            assert torch.equal(tensor[resting].view(torch.int32), kept.view(torch.int32))
        if step % 3 == 0:
            run.decode(order)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_takes_the_committed_records_and_no_draft(kind: str, place: Place) -> None:
    """Only where the window doesn't fit; the drafts then start the ring, and all of them may be rejected."""
    run = Run(small(kind, **place), 1, ring=6)
    (slot,) = run.rows
    checkpoint = run.pool.fold_args(0)["checkpoint"]
    run.verify(4)
    run.commit([range(4)])
    before, committed = checkpoint.clone(), run.states[slot]
    run.verify(2)  # fits: 4 + 2 rows
    assert torch.equal(checkpoint[slot], before[slot])
    run.commit([[]])
    run.verify(3)
    assert relative_error(checkpoint[slot : slot + 1], committed) < 1e-6
    run.commit([[]])
    assert run.pool.write_pos[slot] == 0
    run.decode()
    run.verify(6)
    run.commit([range(6)])
    assert run.pool.write_pos[slot] == 6
    run.decode()  # a full ring flushes
    assert run.pool.write_pos[slot] == 0


@pytest.mark.parametrize("tree", ["chain", "random"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_leaves_a_shared_snapshot_alone(kind: str, tree: str, place: Place) -> None:
    run = Run(small(kind, **place), 1, ring=4, tolerance=2e-6)
    (source,) = run.rows
    run.decode()
    kept = run.pool.snapshot(source)
    forks = [run.pool.fork(kept), run.pool.fork(kept)]
    run.states |= dict.fromkeys([kept, *forks], run.states[source])
    checkpoint = run.pool.fold_args(0)["checkpoint"]
    before = checkpoint[kept].clone()
    for fork in forks:
        run.verify(3, batch=[fork], tree=TREES[tree])
        run.commit([[0]])
    run.verify(4, [4, 2], batch=forks, tree=TREES[tree])  # the first has no room
    run.commit([[0], [0]])
    assert run.pool.checkpoint_slot[forks].tolist() == [forks[0], kept]
    assert torch.equal(checkpoint[kept], before)
    run.verify(4, batch=forks, tree=TREES[tree])
    run.commit(run.random_paths())
    assert run.pool.checkpoint_slot[forks].tolist() == forks
    assert torch.equal(checkpoint[kept], before)


@pytest.mark.parametrize("flush_period", [1, 3, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_and_windows_alternate(kind: str, flush_period: int, place: Place) -> None:
    """A decode behind an accepted window flushes where the cursor is past L - 1, and on demand."""
    run = Run(small(kind, **place), 3, ring=8, ring_len=flush_period, ring_capacity=8)
    for step in range(25):
        if step % 3:
            force = torch.tensor([step % 4 == 0, False, step % 5 == 0], device=run.layer.device)
            run.decode(force=force if step % 2 else None)
        else:
            run.verify(1 + run.pick(6), tree=random_tree if step % 2 else chain)
            run.commit(run.random_paths())


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_of_one_token_equals_a_decode(kind: str, place: Place) -> None:
    decoded, verified = (Run(small(kind, **place), ring=5) for _ in range(2))
    slots, one = decoded.pool.slot_tensor(decoded.rows), int32([1, 1], place["device"])
    for _ in range(12):
        inputs = decoded.layer.draw(2)
        y = decoded.layer.decode(inputs, **decoded.pool.state_args(0), slots=slots)
        decoded.pool.advance(slots)
        window = {name: x.unsqueeze(1) for name, x in inputs.items()}
        mine = verified.layer.verify(window, **verified.pool.verify_args(0), slots=slots)
        verified.pool.commit(slots, one, one)
        assert relative_error(mine[:, 0], y) < 1e-6
        states = [run.pool.read_state(0, run.rows) for run in (decoded, verified)]
        assert relative_error(states[1], states[0]) < 1e-6


@pytest.mark.parametrize("tree", ["chain", "random"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", ["gdn-64x64-ratio3", "kda-128x128", "mamba2-80x128-groups1"])
def test_an_fp32_state_stays_exact_under_16_bit_activations(
    shape: str, dtype: torch.dtype, tree: str, place: Place
) -> None:
    run = Run(Layer.named(shape, dtype=dtype, **place), ring=6, state_dtype=F32)
    for _ in range(8):
        run.verify(4, tree=TREES[tree])
        run.commit(run.random_paths())


@pytest.mark.parametrize("state_dtype", [BF16, F16], ids=["statebf16", "state16"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", ["gdn-64x64-ratio3", "kda-bounded-64x64", "mamba2-64x64-groups4"])
def test_16_bit_checkpoint_is_never_worse_than_stepwise(
    shape: str, dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    """Windows of 4, 3 accepted, beside an update of the same dtype for each accepted token."""
    layer = Layer.named(shape, dtype=dtype)
    run = Run(layer, ring=8, state_dtype=state_dtype)
    slots, count, taken = run.pool.slot_tensor(run.rows), int32([4, 4]), int32([3, 3])
    exact, stepwise = layer.zero_state(2), layer.zero_state(2, F32)
    errors = []
    for step in range(50):
        window = layer.draw_window(2, 4)
        y = layer.verify(window, **run.pool.verify_args(0), slots=slots)
        run.pool.commit(slots, count, taken)
        for i in range(3):
            token = {name: x[:, i] for name, x in window.items()}
            exact, expected = layer.reference(token, exact)
            stepwise, y_stepwise = layer.reference(token, stepwise, F32)
            stepwise = stepwise.to(state_dtype).float()
            if step >= 10:
                errors.append([relative_error(y[:, i], expected), relative_error(y_stepwise.to(dtype), expected)])
        if step >= 10:
            errors.append([relative_error(run.pool.read_state(0, run.rows), exact), relative_error(stepwise, exact)])
    states, outputs = torch.tensor(errors[3::4]), torch.tensor([e for i, e in enumerate(errors) if i % 4 < 3])
    for measured in (states, outputs):
        replay, plain = measured.square().mean(0).sqrt().tolist()
        assert replay <= plain * 1.005


@pytest.mark.parametrize("tree", ["chain", "random"])
@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_strong_and_weak_decays_side_by_side_keep_their_digits(kind: str, tree: str, place: Place) -> None:
    """Log decays of −30 and −1e-4, per channel for KDA: no ratio of decays is formed that could overflow."""
    layer = small(kind, **place)
    layer.A_log, layer.dt_bias = torch.zeros_like(layer.A_log), torch.zeros_like(layer.dt_bias)
    run = Run(layer, ring=16, tolerance=3e-6)
    gate = "dt" if kind == "mamba2" else "a"
    for _ in range(5):
        inputs = layer.draw_window(2, 16)
        strong = torch.rand(inputs[gate].shape, generator=run.rng).to(layer.device) < 0.5
        inputs[gate] = torch.where(strong, 30.0, math.log(math.expm1(1e-4)))
        run.verify(16, tree=TREES[tree], inputs=inputs)
        run.commit(run.random_paths())


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_leave_no_trace(kind: str, place: Place) -> None:
    """Whatever the drafts behind the accepted tokens held: not a bit of outputs and states, folds included."""
    one, other = (Run(small(kind, **place), ring=8) for _ in range(2))
    for step in range(6):
        inputs = one.layer.draw_window(2, 6)
        changed = {name: torch.cat([x[:, :3], 50 + 100 * x[:, 3:]], dim=1) for name, x in inputs.items()}
        for run, window in ((one, inputs), (other, changed)):
            run.verify(6, inputs=window, tree=TREES["chain" if step % 2 else "width2"])
            run.commit([[0, 1, 2] if step % 2 else [1]] * 2)
        assert torch.equal(one.y[:, :3], other.y[:, :3])
        assert torch.equal(one.pool.read_state(0, [0, 1]), other.pool.read_state(0, [0, 1]))


@pytest.mark.parametrize("tree", ["chain", "width2"])
@pytest.mark.parametrize("state_dtype", [F32, BF16], ids=["state32", "statebf16"])
@pytest.mark.parametrize("shape", ["gdn-64x64-ratio3", "gdn-odd-17x33", "kda-128x128", "mamba2-80x128-groups1"])
def test_same_row_same_bits_in_any_company(shape: str, state_dtype: torch.dtype, tree: str) -> None:
    """Alone, in a batch, in another order, padded, beside longer and shorter rows: bit-equal, folds included."""
    layer = Layer.named(shape)
    windows = [layer.draw_window(6, 5) for _ in range(6)]
    parents = TREES[tree](5, torch.Generator())

    def results(rows: list[int], padding: int) -> tuple[Tensor, Tensor]:
        """Outputs and final state of row 0, which has 4 tokens, of which 3 or 1 are accepted."""
        run = Run(layer, 6, ring=7, state_dtype=state_dtype)
        at = rows.index(0) + padding
        batch = [*[-1] * padding, *[run.rows[(5 * row + len(rows)) % 6] for row in rows], *[-1] * (2 * padding)]
        slots, outputs = run.pool.slot_tensor(batch), []
        for step, window in enumerate(windows):
            counts = int32([4 if i == at else (i + step) % 6 for i in range(len(batch))])
            taken = int32([1 + 2 * (step % 2) if i == at else min(i, int(counts[i])) for i in range(len(batch))])
            index = torch.tensor([*[1] * padding, *rows, *[2] * (2 * padding)])
            inputs = {name: x[index] for name, x in window.items()}
            given = None if tree == "chain" else int32([parents] * len(batch))
            y = layer.verify(inputs, **run.pool.verify_args(0), slots=slots, num_tokens=counts, parents=given)
            run.pool.commit(slots, counts, taken)
            outputs.append(y[at])
        return torch.stack(outputs), run.pool.read_state(0, [batch[at]])[0]

    alone = results([0], padding=0)
    for rows in ([0, 1], [3, 2, 0], [5, 4, 3, 2, 1, 0], [1, 0, 2, 4]):
        for padding in (0, 1):
            for mine, expected in zip(results(rows, padding), alone, strict=True):
                assert torch.equal(mine, expected), (rows, padding)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_may_be_views_of_one_projection(kind: str, place: Place) -> None:
    layer = small(kind, **place)
    packed, apart = Run(layer, ring=6), Run(layer, ring=6)
    slots = packed.pool.slot_tensor(packed.rows)
    count = int32([4, 4], place["device"])
    for _ in range(3):
        inputs = layer.draw_window(2, 4)
        token = torch.cat([x.flatten(2) for x in inputs.values()], dim=2)
        parts = token.split([x[0, 0].numel() for x in inputs.values()], dim=2)
        views = {name: part.unflatten(2, x.shape[2:]) for (name, x), part in zip(inputs.items(), parts, strict=True)}
        mine = layer.verify(views, **packed.pool.verify_args(0), slots=slots)
        assert torch.equal(mine, layer.verify(inputs, **apart.pool.verify_args(0), slots=slots))
        for run in (packed, apart):
            run.pool.commit(slots, count, count)
    assert torch.equal(packed.pool.read_state(0, [0, 1]), apart.pool.read_state(0, [0, 1]))


def operator_args(kind: str, layer: Layer, pool: ReplayPool, slots: Tensor, tokens: int, parents: Tensor | None) -> Any:
    """The registered operator and its positional arguments."""
    x = layer.draw_window(len(slots), tokens)
    state = [*pool.fold_args(0).values(), slots, int32([tokens] * len(slots)), parents, "torch"]
    if kind == "mamba2":
        head = [*[x[n] for n in ("x", "dt", "B", "C")], -layer.A_log.exp(), layer.D, x["z"], layer.dt_bias, True]
        return torch.ops.replayssm.mamba2_verify.default, (*head, 0.0, math.inf, *state)
    head = [*[x[n] for n in ("q", "k", "v", "a", "b")], layer.A_log, layer.dt_bias, *([] if kind == "gdn" else [-5.0])]
    operator = torch.ops.replayssm.gdn_verify if kind == "gdn" else torch.ops.replayssm.kda_verify
    return operator.default, (*head, 1.0, 0.25, True, *state)


@pytest.mark.parametrize("kind", KINDS)
def test_registered_correctly_with_torch_library(kind: str) -> None:
    layer = small(kind)
    pool = ReplayPool([layer.spec], 3, ring_len=4)
    slots = pool.slot_tensor(pool.alloc(2))
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    for parents in (None, int32([[-1, 0, 0], [-1, -1, 1]])):
        operator, args = operator_args(kind, layer, pool, slots, 3, parents)
        torch.library.opcheck(operator, args, test_utils=utils)
        pool.write_pos += 3  # the second window folds


def test_accept_and_commit_are_registered_correctly() -> None:
    layer = small("gdn")
    pool = ReplayPool([layer.spec], 3, ring_len=4)
    state = pool.fold_args(0)
    rings = [state[name].zero_() for name in ("ring_u", "ring_k", "ring_g")]
    slots, counts, taken, path = int32([2, 0]), int32([3, 4]), int32([2, 3]), int32([[1, 2, 9, 9], [0, 1, 3, 9]])
    cursors = [pool.write_pos, slots, counts, taken]
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    conv = [torch.randn(3, 5, 3), torch.randn(3, 5, 4)]
    accept, commit = torch.ops.replayssm.accept.default, torch.ops.replayssm.commit.default
    torch.library.opcheck(accept, (*rings, *conv, *cursors, path, "torch"), test_utils=utils)
    torch.library.opcheck(accept, (*rings, None, None, *cursors, path, "torch"), test_utils=utils)
    counters = torch.zeros(3, 5, dtype=torch.int64)
    args = (pool.write_pos, pool.checkpoint_slot, counters, slots, counts, taken, 4, "torch")
    torch.library.opcheck(commit, args, test_utils=utils)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_graph_breaks(kind: str) -> None:
    """A whole speculative step: window, acceptance, cursors."""
    layer = small(kind)
    conv = torch.randn(4, 3)

    def step(pool: ReplayPool, x: Tensor, inputs: dict[str, Tensor], slots: Tensor, *counts: Tensor) -> Tensor:
        y = layer.verify(inputs, **pool.verify_args(0), slots=slots, num_tokens=counts[0], parents=counts[2])
        state = pool.conv_state(0), pool.conv_window(0)
        z = ops.causal_conv1d_verify(x, *state, conv, slots=slots, num_tokens=counts[0], parents=counts[2])
        pool.commit(slots, counts[0], counts[1], counts[3])
        return y.flatten(2).sum(2) + z.sum(2)

    def run(step: Any) -> tuple[Tensor, Tensor, Tensor]:
        layer.rng.manual_seed(9)
        x = torch.randn(2, 4, 4, generator=layer.rng)
        spec = type(layer.spec)(**{**vars(layer.spec), "conv_dim": 4, "conv_width": 3})
        pool = ReplayPool([spec], 3, ring_len=6, max_window=4)
        rows = pool.alloc(2)
        slots, counts, taken = pool.slot_tensor(rows), int32([4, 3]), int32([2, 1])
        tree, path = int32([[-1, 0, 0, 2], [-1, -1, 1, 9]]), int32([[0, 2, 9, 9], [1, 9, 9, 9]])
        outputs = [step(pool, x, layer.draw_window(2, 4), slots, counts, taken, tree, path) for _ in range(5)]
        return torch.stack(outputs), pool.read_state(0, rows), pool.conv_state(0)[rows]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for mine, expected in zip(run(compiled), run(step), strict=True):
        assert torch.equal(mine, expected)


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "17 tokens": ({"tokens": 17}, "the window has T = 17 tokens: from 1 to 16 are wanted"),
    "no token": ({"tokens": 0}, "the window has T = 0 tokens: from 1 to 16"),
    "longer than the ring": ({"tokens": 7}, "the window has T = 7 tokens, the ring R = 6 rows: at most R tokens"),
    "q of another dtype": ({"q": torch.zeros(2, 3, 2, 16).half()}, "q has dtype float16: float32 is wanted"),
    "k of one token": ({"k": torch.zeros(2, 2, 16)}, r"k has shape \[2, 2, 16\]: \[B, T, H_k, d_k\] = \[2, 3, 2, 16\]"),
    "v of one token": ({"v": torch.zeros(2, 4, 32)}, r"v has shape \[2, 4, 32\]: \[B, T, H_v, d_v\] is wanted"),
    "a of another length": ({"a": torch.zeros(2, 2, 4)}, r"a has shape \[2, 2, 4\]: \[B, T, H_v\] = \[2, 3, 4\]"),
    "long counts": ({"num_tokens": torch.ones(2).long()}, "num_tokens has dtype int64: int32 is wanted"),
    "counts of another batch": ({"num_tokens": int32([1])}, r"num_tokens has shape \[1\]: \[B\] = \[2\]"),
    "more tokens than T": ({"num_tokens": int32([1, 4])}, r"num_tokens\[1\] is 4: a number from 0 to 3 is wanted"),
    "fewer than none": ({"num_tokens": int32([-1, 3])}, r"num_tokens\[0\] is -1: a number from 0 to 3"),
    "parents of one row": ({"parents": int32([-1, 0, 1])}, r"parents has shape \[3\]: \[B, T\] = \[2, 3\]"),
    "float parents": ({"parents": torch.zeros(2, 3)}, "parents has dtype float32: int32 is wanted"),
    "its own parent": (
        {"parents": int32([[-1, 0, 1], [-1, 1, 0]])},
        r"parents\[1, 1\] is 1: an earlier token of the window, below 1, or -1 is wanted",
    ),
    "a parent of -2": ({"parents": int32([[-2, 0, 1], [-1, 0, 0]])}, r"parents\[0, 0\] is -2"),
    "slot out of range": ({"slots": int32([0, 3])}, "slots holds 3: numbers below N = 3"),
    "slot twice": ({"slots": int32([1, 1])}, "slots holds 1 more than once"),
    "a scale in words": ({"scale": "1"}, "scale is '1': a number is wanted"),
    "unknown backend": ({"backend": "tpu"}, "backend 'tpu' is unknown"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments_are_named(name: str) -> None:
    layer = small("gdn")
    pool = ReplayPool([layer.spec], 3, ring_len=6)
    change, message = BAD_CALLS[name]
    change = dict(change)
    tokens = change.pop("tokens", 3)
    call = {
        **layer.draw_window(2, tokens),
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        **pool.verify_args(0),
        "slots": pool.slot_tensor(pool.alloc(2)),
    }
    with pytest.raises(ValueError, match=message) as error:
        ops.gdn_verify(**{**call, **change})
    assert "\n" not in str(error.value)


def test_bad_arguments_of_kda_and_mamba2_are_named() -> None:
    kda, mamba = small("kda"), small("mamba2")
    pool = ReplayPool([kda.spec, mamba.spec], 1, ring_len=4)
    slots = int32([0])
    gate = {**kda.draw_window(1, 2), "A_log": kda.A_log, "dt_bias": kda.dt_bias, **pool.verify_args(0), "slots": slots}
    with pytest.raises(ValueError, match=r"lower_bound is 0\.5: a negative number"):
        ops.kda_verify(**gate, lower_bound=0.5)
    with pytest.raises(ValueError, match=r"a has shape \[1, 2, 2\]: \[B, T, H, d_k\] = \[1, 2, 2, 16\]"):
        ops.kda_verify(**{**gate, "a": torch.zeros(1, 2, 2)})
    ssm = {**mamba.draw_window(1, 2), "A": -mamba.A_log.exp(), **pool.verify_args(1), "slots": slots}
    with pytest.raises(ValueError, match=r"dt_limit is \(1.0, 0.5\)"):
        ops.mamba2_verify(**ssm, dt_limit=(1.0, 0.5))
    with pytest.raises(ValueError, match=r"z has shape \[1, 4, 32\]: \[B, T, H, P\] = \[1, 2, 4, 32\]"):
        ops.mamba2_verify(**{**ssm, "z": torch.zeros(1, 4, 32)})


BAD_COMMITS: dict[str, tuple[dict[str, Any], str]] = {
    "more accepted than there were": (
        {"num_accepted": int32([1, 3])},
        r"num_accepted\[1\] is 3: a number from 0 to num_tokens = 2 is wanted",
    ),
    "a negative count": ({"num_accepted": int32([-1, 0])}, r"num_accepted\[0\] is -1"),
    "more tokens than the ring has rows": ({"num_tokens": int32([5, 2])}, r"num_tokens\[0\] is 5: .* from 0 to 4"),
    "counts of another dtype": ({"num_accepted": torch.ones(2)}, "num_accepted has dtype float32: int32"),
    "a path that turns back": (
        {"path": int32([[1, 0, 9], [0, 1, 9]])},
        r"path\[0, 1\] is 0: a token from 2 to 2 is wanted, accepted tokens being in the window's order",
    ),
    "a path past the window": ({"path": int32([[0, 3, 9], [0, 1, 9]])}, r"path\[0, 1\] is 3: a token from 1 to 2"),
    "a path of one row": ({"path": int32([0, 1, 2])}, r"path has shape \[3\]: \[B, T\] is wanted"),
    "slots twice": ({"slots": int32([1, 1])}, "slots holds 1 more than once"),
}


@pytest.mark.parametrize("name", BAD_COMMITS)
def test_an_impossible_commit_is_named_and_changes_nothing(name: str) -> None:
    layer = small("gdn")
    pool = ReplayPool([layer.spec], 2, ring_len=4, max_window=3)
    call = {"slots": pool.slot_tensor(pool.alloc(2)), "num_tokens": int32([3, 2]), "num_accepted": int32([2, 2])}
    layer.verify(layer.draw_window(2, 3), **pool.verify_args(0), slots=call["slots"], num_tokens=call["num_tokens"])
    before = [t.clone() for t in pool.fold_args(0).values()]
    change, message = BAD_COMMITS[name]
    with pytest.raises(ValueError, match=message):
        pool.commit(**{**call, **change})
    for tensor, kept in zip(pool.fold_args(0).values(), before, strict=True):
        assert torch.equal(tensor.view(torch.int32), kept.view(torch.int32))
    pool.commit(**call)
    assert pool.write_pos.tolist() == [2, 2]
