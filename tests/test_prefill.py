"""Prefill operators beside the float64 recurrence."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from oracle import SHAPES, Layer, relative_error

from replayssm import ops, recurrence
from replayssm.backends import fla
from replayssm.backends.torch.prefill import CHUNK, chunked

# One of each kind, and odd sizes; the others take the same path.
IN_CI = ("gdn-64x64-ratio3", "gdn-odd-17x33", "kda-bounded-64x64", "mamba2-64x64-groups4", "mamba2-80x128-groups1")
GRID = [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.thorough) for name in SHAPES]

#: Lengths around the chunk's, an empty sequence among them.
RAGGED = (1, CHUNK - 1, 0, CHUNK, 2 * CHUNK + 2, CHUNK + 1)


def cuts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def sequences(layer, lengths):
    """Projections of packed sequences, and states of order 1 that they continue from."""
    inputs = layer.draw(sum(lengths))
    state = torch.randn(len(lengths), *layer.spec.checkpoint_shape, generator=layer.rng).to(layer.device)
    return inputs, state, cuts(lengths)


def stepwise(layer, inputs, state, cu_seqlens):
    """Outputs and final states by the recurrence in float64, one token of all sequences at a time."""
    lengths = cu_seqlens.diff()
    state = state.double()
    outputs = torch.zeros(int(cu_seqlens[-1]), *layer.spec.checkpoint_shape[:2], dtype=torch.double)
    for t in range(int(lengths.max())):
        rows = (lengths > t).nonzero().squeeze(1)
        at = cu_seqlens[:-1][rows] + t
        after, y = layer.reference({name: x[at] for name, x in inputs.items()}, state[rows])
        state[rows] = after
        outputs[at] = y.cpu()
    return outputs.to(layer.device), state


def in_float64(rule, channel, group, lengths, gates=None, dtype=torch.float64):
    """`chunked` on raw values of the recurrence, and the recurrence."""
    rng = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    total, h_k, d_k, d_v = sum(lengths), 2, 12, 9
    h_v = h_k * group
    q, k, v = normal(total, h_k, d_k), normal(total, h_k, d_k), normal(total, h_v, d_v)
    k /= k.norm(dim=-1, keepdim=True)
    g = -normal(total, h_v, *[d_k] * channel).abs() if gates is None else gates(total, h_v, *[d_k] * channel)
    beta = normal(total, h_v).sigmoid() * 2 if rule == "delta" else None
    state = normal(len(lengths), h_v, d_v, d_k)
    cu_seqlens = cuts(lengths).tolist()
    given = [None if x is None else x.to(dtype) for x in (q, k, v, g, beta, state)]
    found = chunked(rule, *given, tuple(cu_seqlens))
    outputs, finals = [torch.zeros(0, h_v, d_v, dtype=torch.double)], []
    for s in range(len(lengths)):
        one = state[s : s + 1]
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            token = [x[t : t + 1] for x in (q, k, v, g)]
            one, y = recurrence.step(one, *token, None if beta is None else beta[t : t + 1], rule)
            outputs.append(y)
        finals.append(one)
    return *found, torch.cat(outputs), torch.cat(finals)


@pytest.mark.parametrize("rule", ["delta", "additive"])
@pytest.mark.parametrize("channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("group", [1, 3])
def test_chunks_are_the_recurrence_for_each_gate_and_rule(rule, channel, group):
    y, final, expected, expected_final = in_float64(rule, channel, group, (5, 70, 0, 64, 1))
    assert relative_error(y, expected) < 1e-13
    assert relative_error(final, expected_final) < 1e-13


@pytest.mark.parametrize("name", GRID)
def test_outputs_and_final_states_are_the_recurrence(name, place):
    layer = Layer.named(name, **place, beta_scale=2.0 if "olmo" in name else 1.0)
    inputs, state, cu_seqlens = sequences(layer, RAGGED)
    y, final = layer.prefill(inputs, initial_state=state, cu_seqlens=cu_seqlens, backend=layer.backend)
    expected, expected_final = stepwise(layer, inputs, state, cu_seqlens)
    assert y.dtype == final.dtype == torch.float32
    assert relative_error(y, expected) < 1e-6
    for row in range(len(RAGGED)):
        assert relative_error(final[row], expected_final[row]) < 1e-6
    assert torch.equal(final[2], state[2])  # the empty one


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("name", ["gdn-32x32-ratio4", "kda-bounded-64x64", "mamba2-64x64-groups4"])
def test_only_the_output_is_rounded_to_16_bits(name, dtype, tolerance):
    layer = Layer.named(name, dtype=dtype)
    inputs, state, cu_seqlens = sequences(layer, (70, 3))
    y, final = layer.prefill(inputs, initial_state=state, cu_seqlens=cu_seqlens)
    expected, expected_final = stepwise(layer, inputs, state, cu_seqlens)
    assert y.dtype == dtype
    assert relative_error(y, expected) < tolerance
    assert relative_error(final, expected_final) < 1e-6


EXTREMES = {
    "all-forget": lambda *shape: torch.full(shape, -1e4, dtype=torch.double),
    "none-forgets": lambda *shape: torch.zeros(shape, dtype=torch.double),
    "forget-for-good": lambda *shape: torch.full(shape, -float("inf"), dtype=torch.double),
    # Differences of one running sum would lose the small decays, and its exponentials would leave float32.
    "large-then-small": lambda total, *rest: torch.where(
        torch.arange(total).view(-1, *[1] * len(rest)) % 5 == 0, -3e3, -1e-3
    ).expand(total, *rest).double(),
    "growing": lambda total, *rest: -(torch.arange(total).view(-1, *[1] * len(rest)) % 64 * 4.0).expand(
        total, *rest
    ).double(),
}  # fmt: skip


@pytest.mark.parametrize("gates", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("rule", ["delta", "additive"])
def test_extreme_decays_neither_overflow_nor_lose_digits(rule, channel, gates):
    y, final, expected, expected_final = in_float64(rule, channel, 1, (67, 64, 9), gates, torch.float32)
    assert relative_error(y, expected) < 2e-6
    assert relative_error(final, expected_final) < 2e-6


@pytest.mark.parametrize("name", ["gdn-64x64-ratio3", "kda-bounded-64x64", "mamba2-64x64-groups4"])
def test_a_sequence_gives_the_same_bits_beside_any_others(name):
    layer = Layer.named(name)
    lengths = (70, 130, 5, 64)
    inputs, state, cu_seqlens = sequences(layer, lengths)
    y, final = layer.prefill(inputs, initial_state=state, cu_seqlens=cu_seqlens)
    for row, (start, end) in enumerate(pairwise(cu_seqlens)):
        alone = {key: x[start:end] for key, x in inputs.items()}
        one, one_final = layer.prefill(alone, initial_state=state[row : row + 1], cu_seqlens=cuts([lengths[row]]))
        assert torch.equal(one, y[start:end])
        assert torch.equal(one_final[0], final[row])


@pytest.mark.parametrize("name", ["gdn-64x64-ratio3", "kda-bounded-64x64", "mamba2-64x64-groups4"])
def test_a_prompt_in_parts_ends_in_the_same_state(name):
    layer = Layer.named(name)
    inputs, state, cu_seqlens = sequences(layer, (200,))
    expected, expected_final = stepwise(layer, inputs, state, cu_seqlens)
    outputs, start = [], 0
    for length in (1, 64, 30, 105):
        part = {key: x[start : start + length] for key, x in inputs.items()}
        y, state = layer.prefill(part, initial_state=state, cu_seqlens=cuts([length]))
        outputs.append(y)
        start += length
    assert relative_error(torch.cat(outputs), expected) < 1e-6
    assert relative_error(state, expected_final) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolution_is_that_of_single_tokens(dtype, biased, activation, place):
    rng = torch.Generator().manual_seed(0)
    lengths, channels, width, device = (1, 7, 0, 2, 40), 10, 4, place["device"]

    def normal(*shape):
        return torch.randn(*shape, generator=rng).to(dtype).to(device)

    x, state, weight = normal(sum(lengths), channels), normal(len(lengths), channels, width - 1), normal(channels, 4)
    bias = normal(channels) if biased else None
    cu_seqlens = cuts(lengths)
    y, final = ops.causal_conv1d_prefill(
        x, state, weight, bias, cu_seqlens=cu_seqlens, activation=activation, backend=place["backend"]
    )
    for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        slot = torch.tensor([row], dtype=torch.int32, device=device)
        for t in range(start, end):
            one = ops.causal_conv1d_update(x[t : t + 1], state, weight, bias, slots=slot, activation=activation)
            torch.testing.assert_close(y[t : t + 1], one)
    assert torch.equal(final, state)


def test_the_convolution_gives_tensors_laid_out_as_its_fake_says():
    tensors = torch.randn(5, 6).T, torch.randn(2, 5, 3), torch.randn(5, 4), None, cuts([4, 2])
    operator = torch.ops.replayssm.causal_conv1d_prefill.default
    torch.library.opcheck(operator, (*tensors, "silu", "torch"), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["gdn-16x16-ratio8", "kda-128x128", "mamba2-64x64-groups4"])
def test_operators_are_registered_with_fakes(name):
    layer = Layer.named(name)
    inputs, state, cu_seqlens = sequences(layer, (3, 4))
    operator = getattr(torch.ops.replayssm, f"{layer.kind}_prefill").default
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is operator:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with torch.enable_grad(), Watch():
        layer.prefill(inputs, initial_state=state, cu_seqlens=cu_seqlens, backend="torch")
    torch.library.opcheck(operator, seen[0], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 3])}, r"cu_seqlens has dtype int64: int32 is wanted"),
        ({"cu_seqlens": cuts([3, 1])}, r"cu_seqlens has shape \[3\]: \[S\+1\] = \[2\] is wanted"),
        ({"cu_seqlens": cuts([3])}, r"cu_seqlens is \[0, 3\]: numbers from 0 to total = 4, .* are wanted"),
        ({"initial_state": torch.zeros(1, 4, 32)}, r"initial_state has shape \[1, 4, 32\]: \[S, H_v, d_v, d_k\]"),
        ({"initial_state": torch.zeros(1, 4, 32, 32).double()}, "initial_state has dtype float64: float32 is wanted"),
        ({"a": torch.zeros(4, 3)}, r"a has shape \[4, 3\]: \[total, H_v\] = \[4, 4\] is wanted"),
        ({"q": torch.zeros(4, 3, 32), "k": torch.zeros(4, 3, 32)}, "v has 4 heads, k 3: H_v must be a multiple of H_k"),
    ],
)
def test_errors_name_the_argument_and_what_is_wanted(changed, message):
    layer = Layer.named("gdn-32x32-ratio4")
    inputs, state, cu_seqlens = sequences(layer, (4,))
    given = {**inputs, "initial_state": state, "cu_seqlens": cu_seqlens, **changed}
    with pytest.raises(ValueError, match=message):
        ops.gdn_prefill(**given, A_log=layer.A_log, dt_bias=layer.dt_bias)


def documented(called, channel):
    """flash-linear-attention's function for a head or a channel gate, as its documentation describes it."""

    def run(
        q, k, v, g, beta, *, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, state_v_first,
        cu_seqlens, cu_seqlens_cpu,
    ):  # fmt: skip
        called.append(channel)
        assert q.shape[0] == 1, "packed sequences are one row"
        assert output_final_state
        assert use_qk_l2norm_in_kernel
        assert state_v_first
        assert cu_seqlens.dtype == cu_seqlens_cpu.dtype == torch.int64
        assert (g.dim() == 4) == channel
        q, k, v, g, beta = (x[0].float() for x in (q, k, v, g, beta))
        q, k = (x / x.square().sum(-1, keepdim=True).add(1e-6).sqrt() for x in (q, k))
        y, state = chunked("delta", q * scale, k, v, g, beta, initial_state, tuple(cu_seqlens.tolist()))
        return y.to(torch.bfloat16).unsqueeze(0), state

    return run


@pytest.mark.parametrize("name", ["gdn-32x32-ratio4", "kda-bounded-64x64", "mamba2-64x64-groups4"])
def test_flash_linear_attention_gets_what_its_documentation_wants(name, monkeypatch):
    """With stand-ins for its functions; tests on a GPU call its own, where it is installed."""
    called = []
    for package, function, channel in (
        ("gated_delta_rule", "chunk_gated_delta_rule", False),
        ("kda", "chunk_kda", True),
    ):
        module = ModuleType(f"fla.ops.{package}")
        setattr(module, function, documented(called, channel))
        monkeypatch.setitem(sys.modules, f"fla.ops.{package}", module)
        monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
        monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setattr(fla, "serves", lambda v, k: True)
    layer = Layer.named(name, dtype=torch.bfloat16)
    inputs, state, cu_seqlens = sequences(layer, (70, 0, 3))
    given = {"initial_state": state, "cu_seqlens": cu_seqlens}
    y, final = layer.prefill(inputs, **given)
    assert called == {"gdn": [False], "mamba2": []}.get(layer.kind, [True])
    expected, expected_final = layer.prefill(inputs, **given, backend="torch")
    assert relative_error(y, expected) < 4e-3
    assert relative_error(final, expected_final) < 1e-6


def test_flash_linear_attention_gets_the_same_cuts_for_all_layers_of_a_forward():
    lengths, device = (0, 3, 8), torch.device("cpu")
    with torch.device("meta"):  # a default of somebody's
        made = fla._cuts(lengths, device)
    assert [tensor.device for tensor in made] == [device, device]
    assert all(again is tensor for again, tensor in zip(fla._cuts((*lengths,), device), made, strict=True))
    assert made[1].tolist() == [0, 3, 8]


def test_flash_linear_attention_serves_16_bit_activations_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr(fla, "_is_installed", lambda: True)
    assert not fla.serves(torch.zeros(1, 1, 8, dtype=torch.bfloat16), torch.zeros(1, 1, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gdn-128x128-ratio2", "kda-128x128"])
def test_flash_linear_attention_on_a_gpu_is_the_recurrence(name):
    pytest.importorskip("fla")
    layer = Layer.named(name, dtype=torch.bfloat16, device="cuda", backend="triton")
    inputs, state, cu_seqlens = sequences(layer, RAGGED)
    assert fla.serves(inputs["v"], inputs["k"])
    y, final = layer.prefill(inputs, initial_state=state, cu_seqlens=cu_seqlens, backend="triton")
    expected, expected_final = stepwise(layer, inputs, state, cu_seqlens)
    assert relative_error(y, expected) < 1e-2
    assert relative_error(final, expected_final) < 1e-2
