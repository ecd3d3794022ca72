"""The CUDA verify kernels' arithmetic, against the float64 recurrence along every path, on a CPU: emulated.

`make test-gpu` runs test_verify.py with these kernels on a GPU, too.
"""

from __future__ import annotations

import gc
from itertools import product

import emulated_cuda
import pytest
import torch
from oracle import KINDS, Layer, relative_error
from test_cuda import CUTS, DTYPES, KERNELS, SIZES, install, sometimes
from torch.multiprocessing.reductions import StorageWeakRef
from windows import TREES, Run, int32

from replayssm.backends.cuda import blocks, verify, windows

_MISSING = emulated_cuda.missing()
pytestmark = [pytest.mark.skip(reason=_MISSING)] if _MISSING else []

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the blocks that are launched; few multiprocessors, so large blocks, unless a test installs others."""
    emulated_cuda.install(monkeypatch)
    return emulated_cuda.launches_of(monkeypatch, "replayssm_verify")


def install_for(monkeypatch: pytest.MonkeyPatch, batch: str) -> None:
    """What runs in a small batch, in a large one, or, "staying", in one so large that blocks take item after item."""
    emulated_cuda.install(monkeypatch, multiprocessors=SIZES.get(batch, 1))
    for name, value in {"FEW_ROWS": 1, "MANY_ROWS": 1, "SHARED_BYTES": 0}.items():  # none left for a second block
        monkeypatch.setattr(windows, name, value if batch == "staying" else FOUND[name])


FOUND = {name: getattr(windows, name) for name in ("FEW_ROWS", "MANY_ROWS", "SHARED_BYTES")}


@pytest.mark.parametrize(
    ("batch", "shape", "tokens", "tree"),
    sometimes(
        product((*SIZES, "staying"), KERNELS, (2, 3, 4, 8, 13), ("chain", "random")),
        {
            ("small", "gdn-128x128-ratio2", 4, "chain"),
            ("staying", "gdn-128x128-ratio2", 4, "chain"),
            ("large", "gdn-64x64-ratio3", 13, "random"),
            ("staying", "kda-bounded-64x64", 3, "random"),
            ("staying", "mamba2-80x128-groups1", 4, "chain"),
        },
    ),
)
def test_every_token_and_state_equals_the_recurrence(
    batch: str, shape: str, tokens: int, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From an empty ring, behind records, with folds by one block of a key head and by several, then a decode step."""
    install_for(monkeypatch, batch)
    launched = emulated_cuda.launches_of(monkeypatch, "replayssm_verify")
    run = Run(Layer.named(shape, backend="cuda"), ring=tokens + 2)
    for step in range(5):
        run.verify(tokens, tree=TREES[tree])
        run.commit([range(max(1, tokens - step % 2))] * 2 if tree == "chain" else run.random_paths())
    run.decode()
    assert len(launched) == 5
    assert (set(launched) == {1}) == (batch == "staying")
    assert not any(counters.numbers.any() for counters in verify._arrivals.values())


@pytest.mark.parametrize(("kind", "tree"), sometimes(product(KINDS, TREES), {("gdn", "chain"), ("kda", "width2")}))
def test_ragged_rows_and_padding(kind: str, tree: str, launched: list[int]) -> None:
    """Rows of any length, none among them; what isn't used holds NaN, and slots that don't take part keep every bit."""
    run = Run(Layer(kind, 1, 1 if kind.startswith("kda") else 2, 64, 32, backend="cuda"), 3, ring=5)
    for step in range(6):
        batch = [run.rows[step % 3], -1, run.rows[(step + 1) % 3]]
        resting = run.rows[(step + 2) % 3]
        before = [t[resting].clone() for t in run.pool.fold_args(0).values()]
        run.verify(4, [run.pick(4), 2, 4 - step % 2], batch, TREES[tree])
        run.commit(run.random_paths())
        for tensor, kept in zip(run.pool.fold_args(0).values(), before, strict=True):
            assert torch.equal(tensor[resting].view(torch.int32), kept.view(torch.int32))
    assert len(launched) == 6


DTYPES_OF_PRODUCTS = pytest.mark.parametrize(
    ("kind", "state", "activations"),
    sometimes(
        product(KINDS, DTYPES, DTYPES),
        {("gdn", "bf16", "bf16"), ("kda", "bf16", "bf16"), ("mamba2", "f16", "bf16")},
    ),
)


def random_run(kind: str, state: str, activations: str, ring: int) -> Run:
    """One row with a random checkpoint."""
    dtypes = {"state_dtype": DTYPES[state], "ring_dtype": F32}
    heads = (1, 1 if kind.startswith("kda") else 2)
    run = Run(Layer(kind, *heads, 64, 32, dtype=DTYPES[activations], backend="cuda"), 1, ring=ring, **dtypes)
    checkpoint = run.pool.fold_args(0)["checkpoint"]
    checkpoint[:] = torch.randn(checkpoint.shape)
    return run


@DTYPES_OF_PRODUCTS
def test_products_are_exact(kind: str, state: str, activations: str, launched: list[int]) -> None:
    """The outputs of one window from a random checkpoint and its records: no factor of a product is rounded."""
    run = random_run(kind, state, activations, ring=8)
    (slot,) = run.rows
    for _ in range(3):
        run.states[slot] = run.pool.read_state(0, run.rows).double()
        run.verify(3)
        slots, count = run.pool.slot_tensor(run.rows), int32([3])
        run.pool.commit(slots, count, count)
        rounding = {"f32": 1e-6, "bf16": 3e-3, "f16": 4e-4}[state]
        assert relative_error(run.pool.read_state(0, run.rows), run.after[0][2]) < rounding
    assert len(launched) == 3


# --- windows of one token, which run in the decode kernel


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As `launched`, of the decode kernel."""
    emulated_cuda.install(monkeypatch)
    return emulated_cuda.launches_of(monkeypatch, "replayssm_decode")


@pytest.mark.parametrize(
    ("cut", "shape"),
    sometimes(
        product(CUTS, KERNELS),
        {("small", "gdn-64x64-ratio3"), ("large", "kda-bounded-64x64"), ("middle", "mamba2-80x128-groups1")},
    ),
)
def test_one_token_windows_equal_the_recurrence(cut: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With resting rows, padding, a rejected token, a decode step, folds by one block of a key head and by several."""
    install(monkeypatch, cut)
    decoded = emulated_cuda.launches_of(monkeypatch, "replayssm_decode")
    run = Run(Layer.named(shape, backend="cuda"), 3, ring=2)
    folds = 0
    for step in range(8):
        first, second, third = (run.rows[(step + n) % 3] for n in range(3))
        counts = [1, 1, int(step % 4 == 3), 1]
        folds += int((run.pool.write_pos[[first, third]] == 2).sum())
        run.verify(1, counts, [first, -1, second, third])
        run.commit([range(step % 5 > 0), [0], range(counts[2]), [0]])
        if step == 4:
            run.decode(run.rows[1:])
    assert folds > 2
    assert len(decoded) == 9
    assert not any(counters.numbers.any() for counters in verify._arrivals.values())


@DTYPES_OF_PRODUCTS
def test_products_of_one_token_are_exact(kind: str, state: str, activations: str, decoded: list[int]) -> None:
    """As those of longer windows, also where they fold: the last does."""
    run = random_run(kind, state, activations, ring=3)
    (slot,) = run.rows
    slots, one = run.pool.slot_tensor(run.rows), int32([1])
    for step in range(4):
        run.states[slot] = before = run.pool.read_state(0, run.rows).double()
        run.verify(1)
        if step == 3:
            rounding = {"f32": 1e-6, "bf16": 3e-3, "f16": 4e-4}[state]
            assert relative_error(run.pool.fold_args(0)["checkpoint"][slot], before[0]) < rounding
        else:
            run.pool.commit(slots, one, one)
            assert relative_error(run.pool.read_state(0, run.rows), run.after[0][0]) < 1e-6
    assert len(decoded) == 4


@pytest.mark.parametrize(
    ("shape", "state"),
    sometimes(
        product(("gdn-128x128-ratio2", "kda-bounded-64x64", "mamba2-80x128-groups1"), ("f32", "bf16")),
        {("kda-bounded-64x64", "bf16")},
    ),
)
def test_same_row_same_bits_however_one_token_is_cut(shape: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it folds, too; where it doesn't, also those of a decode step."""
    layer = Layer.named(shape, dtype=BF16, backend="cuda")
    steps = [layer.draw_window(3, 1) for _ in range(5)]
    results = []
    for cut, batch, num_decoded in (*product(CUTS, ([0], [2, 0, 1]), [0]), ("large", [0], 2)):
        install(monkeypatch, cut)
        run = Run(layer, 3, ring=3, ring_capacity=4, state_dtype=DTYPES[state])
        slots, one = run.pool.slot_tensor([run.rows[row] for row in batch]), int32([1] * len(batch))
        outputs = []
        for number, inputs in enumerate(steps):
            picked = {name: x[batch] for name, x in inputs.items()}
            if number < num_decoded:
                token = {name: x[:, 0] for name, x in picked.items()}
                y = layer.decode(token, **run.pool.state_args(0), slots=slots)
            else:
                y = layer.verify(picked, **run.pool.verify_args(0), slots=slots)[:, 0]
            outputs.append(y[batch.index(0)])
            run.pool.commit(slots, one, one)
        results.append((torch.stack(outputs), run.pool.read_state(0, run.rows[:1])))
    for outputs, folded in results[1:]:
        assert torch.equal(outputs, results[0][0])
        assert torch.equal(folded, results[0][1])


# ---


@pytest.mark.parametrize("shape", ["gdn-128x128-ratio2", pytest.param("kda-128x128", marks=pytest.mark.thorough)])
def test_a_fold_of_more_records_than_are_taken_at_once(shape: str, launched: list[int]) -> None:
    """33 of them; the state is rounded once, at the end."""
    layer = Layer.named(shape, dtype=BF16, backend="cuda")
    run = Run(layer, 1, ring=34, state_dtype=BF16, ring_dtype=F32, max_window=2)
    for _ in range(17):
        inputs = layer.draw_window(1, 2)
        slots, two = run.pool.slot_tensor(run.rows), int32([2])
        layer.verify(inputs, **run.pool.verify_args(0), slots=slots)
        run.pool.commit(slots, two, two)
    before = run.pool.read_state(0, run.rows)
    layer.verify(layer.draw_window(1, 2), **run.pool.verify_args(0), slots=slots)
    folded = run.pool.fold_args(0)["checkpoint"][run.rows]
    assert (folded == before.to(BF16)).double().mean() > 0.99
    assert len(launched) == 18


@pytest.mark.parametrize(
    ("shape", "state"),
    sometimes(
        product(("gdn-128x128-ratio2", "kda-bounded-64x64", "mamba2-80x128-groups1"), ("f32", "bf16")),
        {("gdn-128x128-ratio2", "f32")},
    ),
)
def test_same_row_same_bits_however_a_window_is_cut(shape: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind unused tokens, which a longer kernel runs."""
    layer = Layer.named(shape, dtype=BF16, backend="cuda")
    steps = [layer.draw_window(3, 5) for _ in range(4)]
    results = []
    for size, batch, length in (("large", [0], 3), ("small", [2, 0, 1], 3), ("staying", [0, 1], 5)):
        install_for(monkeypatch, size)
        run = Run(layer, 3, ring=7, state_dtype=DTYPES[state])
        slots, count = run.pool.slot_tensor([run.rows[row] for row in batch]), int32([3] * len(batch))
        outputs = []
        for inputs in steps:
            picked = {name: x[batch, :length] for name, x in inputs.items()}
            y = layer.verify(picked, **run.pool.verify_args(0), slots=slots, num_tokens=count)
            outputs.append(y[batch.index(0), :3])
            run.pool.commit(slots, count, count)
        results.append((torch.stack(outputs), run.pool.read_state(0, run.rows[:1])))
    for outputs, folded in results[1:]:
        assert torch.equal(outputs, results[0][0])
        assert torch.equal(folded, results[0][1])


def test_a_fold_leaves_a_shared_snapshot_alone(launched: list[int]) -> None:
    """A slot that reads another's checkpoint, which the copy from its own has to make way for."""
    run = Run(Layer("gdn", 1, 1, 64, 16, backend="cuda"), 1, ring=4, tolerance=2e-6)
    (source,) = run.rows
    run.decode()
    kept = run.pool.snapshot(source)
    forks = [run.pool.fork(kept), run.pool.fork(kept)]
    run.states |= dict.fromkeys([kept, *forks], run.states[source])
    for tokens in (3, 4, 3):
        run.verify(tokens, batch=forks)
        run.commit([[0], range(tokens)])
    assert run.pool.checkpoint_slot[forks].tolist() == forks
    assert len(launched) == 3


def test_inputs_may_be_views_of_one_projection_at_any_address(launched: list[int]) -> None:
    layer = Layer("gdn", 1, 2, 64, 32, dtype=BF16, backend="cuda")
    packed, apart = (Run(layer, ring=6, state_dtype=BF16) for _ in range(2))
    slots = packed.pool.slot_tensor(packed.rows)
    inputs = layer.draw_window(2, 4)
    token = torch.cat([torch.zeros(2, 4, 1, dtype=BF16), *(x.flatten(2) for x in inputs.values())], dim=2)
    parts = token[..., 1:].split([x[0, 0].numel() for x in inputs.values()], dim=2)
    views = {name: part.unflatten(2, x.shape[2:]) for (name, x), part in zip(inputs.items(), parts, strict=True)}
    mine = layer.verify(views, **packed.pool.verify_args(0), slots=slots)
    assert torch.equal(mine, layer.verify(inputs, **apart.pool.verify_args(0), slots=slots))
    assert len(launched) == 2


@pytest.mark.parametrize(("kind", "d_k", "d_v"), [("gdn", 32, 32), ("kda", 64, 24)])
def test_what_has_no_kernel_runs_on_the_other_backend(kind: str, d_k: int, d_v: int, launched: list[int]) -> None:
    run = Run(Layer(kind, 1, 1, d_k, d_v, backend="cuda"), ring=4)
    for _ in range(2):
        run.verify(3)
        run.commit()
    assert launched == []


@pytest.mark.parametrize("tiles", [1, 7, 660, 2641, 8192, 16389])
def test_items_of_several_tiles_come_first_and_as_many_for_each_block(tiles: int) -> None:
    for per_multiprocessor, span in product((0, 2, 5), (1, 2, 3, 4)):
        cut = windows.Window(4, 64, 4, 128, per_multiprocessor, span)
        whole, blocks = cut.items(tiles, 132)
        singles = tiles - whole * span
        assert singles >= 0
        assert 0 < blocks <= whole + singles
        if per_multiprocessor:
            assert whole % blocks == 0
            assert singles < per_multiprocessor * 132 * span
        else:
            assert blocks == whole + singles


@pytest.mark.parametrize("head_v_dim", range(16, 257, 16))
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_blocks_divide_the_heads_of_a_key_head(head_v_dim: int, state_dtype: torch.dtype) -> None:
    groups = [(1, False), (1, True), (2, False), (3, False), (8, False), (16, False)]
    for (group, channel), head_k_dim, tokens in product(groups, blocks.HEAD_K_DIMS, (1, 4, 16)):
        shape = blocks.Shape(channel, True, head_v_dim, head_k_dim, group, group * 2, 16, state_dtype)
        for rows in (100, 10_000, 1_000_000):
            cut = windows.choose(shape, tokens, BF16, rows, 132, 227 * 1024)
            assert cut is not None or (channel and head_k_dim == 256 and tokens == 16)
            if cut is not None:
                assert cut.fits(shape)
                assert cut.shared_bytes(shape, BF16) <= 227 * 1024


@pytest.mark.usefixtures("launched")
def test_counters_go_after_the_checkpoints_that_they_are_for() -> None:
    """Those of another pool at the same address are its own; what a broken launch has left there is gone, too."""
    for num_rows in (1, 2, 2, 3, 2):
        runs = [Run(Layer("gdn", 1, 2, 64, 32, backend="cuda"), num_rows, ring=4) for _ in range(2)]
        for run in runs:
            run.verify(2)
        assert len(verify._arrivals) == 2
        assert not any(counters.numbers.any() for counters in verify._arrivals.values())
        for counters in verify._arrivals.values():
            counters.numbers.fill_(1)
        del run, runs
        gc.collect()


@pytest.mark.usefixtures("launched")
def test_counters_that_became_too_few_stay_where_a_graph_may_count() -> None:
    run = Run(Layer("gdn", 1, 2, 64, 32, backend="cuda"), ring=4)
    wanted, (checkpoint, ring_k) = 3, (run.pool.fold_args(0)[name] for name in ("checkpoint", "ring_k"))
    numbers = [verify._arrivals_of(checkpoint, count * ring_k.shape[1]) for count in (1, wanted)]
    addresses = [one.data_ptr() for one in numbers]
    storages = [StorageWeakRef(one.untyped_storage()) for one in numbers]
    assert addresses[0] != addresses[1]
    del numbers
    gc.collect()
    assert not any(storage.expired() for storage in storages)
    del run, checkpoint, ring_k
    gc.collect()
    Run(Layer("gdn", 1, 2, 64, 32, backend="cuda"), ring=4).verify(2)  # which looks for those of no use
    assert all(storage.expired() for storage in storages)
