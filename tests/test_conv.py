"""The one-token causal convolution against torch's own over the whole sequence."""

from __future__ import annotations

import pytest
import torch
from oracle import relative_error

from replayssm import ops


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", "swish", None])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_equals_the_convolution_of_the_whole_sequence(
    width: int, activation: str | None, bias: bool, place: dict[str, str]
) -> None:
    rng, device, backend = torch.Generator().manual_seed(width), place["device"], place["backend"]
    x = torch.randn(2, 5, 11, generator=rng).to(device)
    weight = torch.randn(5, width, generator=rng).to(device)
    offset = torch.randn(5, generator=rng).to(device) if bias else None
    padded = torch.nn.functional.pad(x.double(), (width - 1, 0))
    wanted = torch.nn.functional.conv1d(
        padded, weight.double().unsqueeze(1), None if offset is None else offset.double(), groups=5
    )
    wanted = wanted if activation is None else torch.nn.functional.silu(wanted)
    state = torch.full((4, 5, width - 1), float("nan"), device=device)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    state[[0, 2]] = 0
    for t in range(11):
        token = torch.stack([x[0, :, t], x[1, :, t], x[1, :, t]])
        y = ops.causal_conv1d_update(token, state, weight, offset, slots=slots, activation=activation, backend=backend)
        assert relative_error(y[[0, 2]], wanted[:, :, t]) < 1e-6
        assert (y[1] == 0).all()
    if width > 1:
        assert torch.equal(state[[2, 0]], x[:, :, 12 - width :])
    assert state[[1, 3]].isnan().all()


@pytest.mark.usefixtures("either_cpu_backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_summed_in_fp32(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 64).to(dtype), torch.randn(64, 4).to(dtype)
    state = torch.randn(3, 64, 3).to(dtype)
    window = torch.cat([state, x[..., None]], dim=-1).double()
    slots = torch.arange(3, dtype=torch.int32)
    y = ops.causal_conv1d_update(x, state, weight, slots=slots)
    assert y.dtype == dtype
    assert torch.equal(y, (window * weight.double()).sum(-1).to(dtype))


@pytest.mark.usefixtures("either_cpu_backend")
def test_same_row_same_bits_in_any_batch() -> None:
    x, weight, state = torch.randn(33, 70), torch.randn(70, 4), torch.randn(33, 70, 3)
    slots = torch.arange(33, dtype=torch.int32)
    every = ops.causal_conv1d_update(x, state.clone(), weight, slots=slots, activation="silu")
    for rows in ([5], [4, 5], [32, 5, 0], list(range(7)), list(range(32, -1, -1))):
        some = ops.causal_conv1d_update(x[rows], state.clone(), weight, slots=slots[rows], activation="silu")
        assert torch.equal(some, every[rows])


@pytest.mark.usefixtures("either_cpu_backend")
def test_registered_and_compiles() -> None:
    x, weight, state = torch.randn(2, 6), torch.randn(6, 4), torch.randn(3, 6, 3)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    args = (x, state, weight, None, slots, "silu", ops.resolve_backend("auto", "cpu"))
    torch.library.opcheck(
        torch.ops.replayssm.causal_conv1d_update.default,
        args,
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )
    compiled = torch.compile(ops.causal_conv1d_update, fullgraph=True, backend="aot_eager")
    first, second = state.clone(), state.clone()
    assert torch.equal(
        compiled(x, first, weight, slots=slots), ops.causal_conv1d_update(x, second, weight, slots=slots)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 7)}, r"x has shape \[2, 7\]: \[B, C\] = \[2, 6\]"),
        ({"conv_state": torch.zeros(3, 6, 4)}, r"conv_state has shape \[3, 6, 4\]: \[N, C, W-1\] = \[3, 6, 3\]"),
        ({"conv_state": torch.zeros(3, 6, 3).half()}, "conv_state has dtype float16: float32 is wanted"),
        ({"activation": "relu"}, "activation is 'relu': 'silu', 'swish' or None is wanted"),
        ({"slots": torch.tensor([3, 0], dtype=torch.int32)}, "slots holds 3: numbers below N = 3"),
        ({"bias": torch.zeros(5)}, r"bias has shape \[5\]"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    call = {
        "x": torch.zeros(2, 6),
        "conv_state": torch.zeros(3, 6, 3),
        "weight": torch.zeros(6, 4),
        "slots": torch.tensor([2, 0], dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        ops.causal_conv1d_update(**{**call, **change})  # type: ignore[arg-type]
