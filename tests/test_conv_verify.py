"""The causal convolution of verify windows, and what stays of them, against float64 sums along each path."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from oracle import poison, relative_error
from torch import Tensor
from windows import TREES, int32, path_to

from replayssm import LayerSpec, ReplayPool, ops

CHANNELS = 6
Place = dict[str, str]


def new_pool(place: Place, width: int, dtype: torch.dtype = torch.float32) -> ReplayPool:
    spec = LayerSpec("head", "delta", 1, 1, 8, 8, conv_dim=CHANNELS, conv_width=width)
    pool = ReplayPool([spec], 6, ring_len=8, max_window=8, activation_dtype=dtype, **place)  # type: ignore[arg-type]
    poison(pool)
    return pool


def along(path: Sequence[int], committed: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Output ``[C]`` of the last token of a path, in float64."""
    inputs = torch.cat([committed.double(), window.double()[list(path)].T], dim=1)[:, -weight.shape[1] :]
    y = (inputs * weight.double()).sum(1)
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_taps_follow_the_path_and_then_the_committed_inputs(
    width: int, tree: str, activation: str | None, place: Place
) -> None:
    """Ragged rows and padding, window after window; a row that accepts none keeps its inputs."""
    rng, device = torch.Generator().manual_seed(width), place["device"]
    pool = new_pool(place, width)
    rows = pool.alloc(3)
    state, window = pool.conv_state(0), pool.conv_window(0)
    weight = torch.randn(CHANNELS, width, generator=rng).to(device)
    bias = torch.randn(CHANNELS, generator=rng).to(device) if activation else None
    batch = [rows[2], -1, rows[0], rows[1]]
    slots = pool.slot_tensor(batch)
    for tokens in (7, 1, 4, 8):
        x = torch.randn(4, tokens, CHANNELS, generator=rng).to(device)
        counts = [tokens, tokens, tokens // 2, 0]
        parents = [TREES[tree](tokens, rng) for _ in batch]
        for row, n in enumerate(counts):
            x[row, n:] = float("nan")
            parents[row][n:] = [99] * (tokens - n)
        before, untouched = state.clone(), window[batch[3]].clone()
        y = ops.causal_conv1d_verify(
            x,
            state,
            window,
            weight,
            bias,
            slots=slots,
            num_tokens=int32(counts, device),
            parents=None if tree == "chain" else int32(parents, device),
            activation=activation,
            backend=pool.backend,
        )
        assert torch.equal(state[rows], before[rows])
        assert torch.equal(window[batch[3]].view(torch.int32), untouched.view(torch.int32))
        paths: list[list[int]] = [[], [], [], []]
        for row in (0, 2):
            nodes = [path_to(i, parents[row]) for i in range(counts[row])]
            paths[row] = nodes[int(torch.randint(0, len(nodes), (1,), generator=rng))] if nodes else []
            for i, path in enumerate(nodes):
                wanted = along(path, before[batch[row]], x[row], weight, bias)
                wanted = wanted if activation is None else torch.nn.functional.silu(wanted)
                assert relative_error(y[row, i], wanted) < 1e-6
        for row in range(4):
            assert (y[row, counts[row] if batch[row] >= 0 else 0 :] == 0).all()
        shown = [[*path, *([77] * (tokens - len(path)))] for path in paths]
        taken = int32([len(path) for path in paths], device)
        pool.commit(slots, int32(counts, device), taken, None if tree == "chain" else int32(shown, device))
        for row in (0, 2, 3):
            kept = torch.cat([before[batch[row]], x[row][paths[row]].T], dim=1)
            assert torch.equal(state[batch[row]], kept[:, kept.shape[1] - width + 1 :])
    unused = [slot for slot in range(6) if slot not in rows]
    assert state[unused].isnan().all()
    assert window[unused].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_window_equals_its_tokens_one_by_one(dtype: torch.dtype, place: Place) -> None:
    device = place["device"]
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, CHANNELS, generator=rng).to(dtype).to(device)
    weight = torch.randn(CHANNELS, 4, generator=rng).to(device)
    once, stepwise = new_pool(place, 4, dtype), new_pool(place, 4, dtype)
    slots = once.slot_tensor(once.alloc(2))
    stepwise.alloc(2)
    options = {"slots": slots, "activation": "silu", "backend": once.backend}
    y = ops.causal_conv1d_verify(x, once.conv_state(0), once.conv_window(0), weight, **options)  # type: ignore[arg-type]
    assert y.dtype == dtype
    count = int32([5, 5], device)
    once.commit(slots, count, count)
    for i in range(5):
        token = ops.causal_conv1d_update(x[:, i], stepwise.conv_state(0), weight, **options)  # type: ignore[arg-type]
        assert relative_error(y[:, i], token) < {torch.float32: 1e-6, torch.bfloat16: 8e-3}.get(dtype, 1e-3)
    assert torch.equal(once.conv_state(0)[:2], stepwise.conv_state(0)[:2])


@pytest.mark.parametrize("tree", ["chain", "width2"])
def test_same_row_same_bits_in_any_batch(tree: str) -> None:
    rng = torch.Generator().manual_seed(1)
    x, weight = torch.randn(9, 5, 70, generator=rng), torch.randn(70, 4, generator=rng)
    state, window = torch.randn(9, 70, 3, generator=rng), torch.zeros(9, 70, 5)
    slots = torch.arange(9, dtype=torch.int32)

    def outputs(rows: list[int], counts: list[int]) -> Tensor:
        parents = None if tree == "chain" else int32([TREES[tree](5, rng)] * len(rows))
        some = {"slots": slots[rows], "num_tokens": int32(counts), "parents": parents, "activation": "silu"}
        return ops.causal_conv1d_verify(x[rows], state, window, weight, **some)  # type: ignore[arg-type]

    every = outputs(list(range(9)), [5] * 9)
    for rows in ([4], [3, 4], [8, 4, 0], list(range(8, -1, -1))):
        counts = [3 if row == 4 else row % 6 for row in rows]
        some = outputs(rows, counts)
        for i, row in enumerate(rows):
            assert torch.equal(some[i, : counts[i]], every[row, : counts[i]])


def test_registered_correctly_with_torch_library() -> None:
    args = (torch.randn(2, 3, 6), torch.randn(3, 6, 3), torch.randn(3, 6, 4), torch.randn(6, 4), None, int32([2, 0]))
    operator = torch.ops.replayssm.causal_conv1d_verify.default
    utils = ("test_schema", "test_faketensor", "test_autograd_registration")
    for parents in (None, int32([[-1, 0, 0], [-1, -1, 1]])):
        torch.library.opcheck(operator, (*args, int32([3, 2]), parents, "silu", "torch"), test_utils=utils)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 6)}, r"x has shape \[2, 6\]: \[B, T, C\] is wanted"),
        ({"x": torch.zeros(2, 5, 6)}, "the window has T = 5 tokens: conv_window has room for T_max = 4"),
        ({"x": torch.zeros(2, 17, 6)}, "the window has T = 17 tokens: from 1 to 16"),
        ({"conv_window": torch.zeros(3, 5, 4)}, r"conv_window has shape \[3, 5, 4\]: \[N, C, T_max\] = \[3, 6, 4\]"),
        ({"conv_window": torch.zeros(3, 6, 4).half()}, "conv_window has dtype float16: float32 is wanted"),
        ({"num_tokens": int32([4, 3])}, r"num_tokens\[0\] is 4: a number from 0 to 3"),
        ({"parents": int32([[0, 0, 0]] * 2)}, r"parents\[0, 0\] is 0: an earlier token"),
        ({"activation": "relu"}, "activation is 'relu'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    call = {
        "x": torch.zeros(2, 3, 6),
        "conv_state": torch.zeros(3, 6, 3),
        "conv_window": torch.zeros(3, 6, 4),
        "weight": torch.zeros(6, 4),
        "slots": int32([2, 0]),
    }
    with pytest.raises(ValueError, match=message):
        ops.causal_conv1d_verify(**{**call, **change})  # type: ignore[arg-type]
