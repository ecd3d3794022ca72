"""Kernels in the place of a model's own: against float64, and beside the modules whose place they take."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, build, prompts
from oracle import relative_error
from running import Desk, loaded
from torch import Tensor, nn

import replayssm
from replayssm import bundled
from replayssm.engine.window import find_window
from replayssm.models import switch
from replayssm.models.fused import FUSIONS, FusedModules
from replayssm.models.fused.linears import fused_linears
from replayssm.models.fused.norms import fused_norms
from replayssm.models.fused.rotary import fused_rotary
from replayssm.models.fused.stream import Stream, plain
from replayssm.models.fused.swiglu import fused_swiglu

triton = pytest.importorskip("triton")
from replayssm.backends.triton.norm import Form, add_rms_norm, rms_norm  # noqa: E402
from replayssm.backends.triton.pointwise import HeadNorms, rotary, sigmoid_gated, swiglu  # noqa: E402
from replayssm.backends.triton.single_row import single_row  # noqa: E402

EPS = 1e-5
FORMS = {
    "weight": Form(EPS),
    "weight-from-1": Form(EPS, weight_offset=1.0),
    "silu-after": Form(EPS, "silu"),
    "sigmoid-after": Form(EPS, "sigmoid"),
    "silu-before-groups": Form(EPS, "silu", gate_first=True, num_groups=3),
    "groups": Form(EPS, num_groups=3),
}
SIZES = {"heads-128": (2, 3, 4, 128), "odd-rows": (5, 96), "long": (2, 1, 2559)}
IN_CI = (*bundled.names(), "mamba2")
MODELS = [
    pytest.param(name, marks=[] if name in IN_CI else pytest.mark.thorough) for name in (*bundled.names(), *FAMILIES)
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        if torch.cuda.is_available():
            pytest.skip("kernels are defined for the GPU here, not for the interpreter")
        if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
            pytest.skip("the interpreter of triton 3.6 needs a numpy before 2.4")
    return request.param


def skip_truncated(dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter cuts numbers off where it makes bfloat16 of them")


def bound(device: str) -> float:
    return 1e-6 if device == "cpu" else 2e-6


def draw(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers, of which each line is a part of a longer one, as of a merged product."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape[:-1], shape[-1] + 8, generator=rng).to(device, dtype)[..., : shape[-1]]


def by_hand(x: Tensor, weight: Tensor, form: Form, z: Tensor) -> Tensor:
    """The formula in float64."""
    x, weight, z = x.double(), weight.double(), z.double()
    gate = {None: torch.ones_like(z), "silu": z * z.sigmoid(), "sigmoid": z.sigmoid()}[form.gate]
    x = (x * gate if form.gate_first else x).unflatten(-1, (form.num_groups, -1))
    y = (x / (x.square().mean(-1, keepdim=True) + form.eps).sqrt()).flatten(-2) * (weight + form.weight_offset)
    return y if form.gate_first else y * gate


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_is_its_formula(form: str, size: str, device: str) -> None:
    shape, kind = SIZES[size], FORMS[form]
    if shape[-1] % kind.num_groups:
        shape = (*shape[:-1], 3 * 43)
    x, z = (draw(*shape, device=device, seed=seed) for seed in (0, 1))
    weight = draw(shape[-1], device=device, seed=2)
    y = rms_norm(x, weight, kind, z if kind.gate else None)
    assert y.is_contiguous()
    assert relative_error(y, by_hand(x, weight, kind, z)) < bound(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_is_rounded_as_torch_rounds_it_and_then_normalised(dtype: torch.dtype, device: str) -> None:
    skip_truncated(dtype, device)
    x, delta = (draw(3, 2, 96, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = draw(96, device=device, dtype=dtype, seed=2)
    total, y = add_rms_norm(x, delta, weight, FORMS["weight"])
    assert torch.equal(total, x + delta)
    assert torch.equal(y, rms_norm(total, weight, FORMS["weight"]))


@pytest.mark.parametrize("form", ["weight", "silu-after", "silu-before-groups"])
def test_a_line_has_the_same_bits_in_any_batch(form: str, device: str) -> None:
    x, z = (draw(9, 2, 96, device=device, seed=seed) for seed in (0, 1))
    weight = draw(96, device=device, seed=2)
    whole = rms_norm(x, weight, FORMS[form], z if FORMS[form].gate else None)
    for part in (slice(0, 1), slice(4, 5), slice(3, 9)):
        alone = rms_norm(x[part], weight, FORMS[form], z[part] if FORMS[form].gate else None)
        assert torch.equal(alone, whole[part])


def test_swiglu_is_silu_of_the_gate_times_up(device: str) -> None:
    gate, up = draw(2, 3, 2 * 1500, device=device).chunk(2, dim=-1)
    gate = 30 * gate
    expected = F.silu(gate.double()) * up.double()
    assert relative_error(swiglu(gate, up), expected) < bound(device)


@pytest.mark.parametrize("num_inputs", [96, 700])
@pytest.mark.parametrize("num_outputs", [5, 8200])
def test_a_product_of_one_row_is_exact(num_outputs: int, num_inputs: int, device: str) -> None:
    if device == "cpu" and num_outputs > 8:
        num_outputs = 9  # of more programs the interpreter takes seconds
    x = draw(1, num_inputs, device=device)
    weight = draw(num_outputs, num_inputs, device=device, seed=1)
    assert relative_error(single_row(x, weight), x.double() @ weight.double().T) < bound(device)


@pytest.mark.parametrize("turned", [24, 16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_rotary_turns_the_first_elements_of_each_head(tokens: int, turned: int, device: str) -> None:
    q, k = (draw(2, tokens, heads, 24, device=device, seed=heads).transpose(1, 2) for heads in (5, 2))
    angle = 6 * draw(2, tokens, turned // 2, device=device)
    cos, sin = (torch.cat([x, x], dim=-1) for x in (angle.cos(), angle.sin()))
    for x, y in zip((q, k), rotary(q, k, cos, sin), strict=True):
        pair = torch.view_as_complex(x[..., :turned].double().unflatten(-1, (2, -1)).transpose(-1, -2).contiguous())
        pair = torch.view_as_real(pair * torch.polar(torch.ones(()).double().to(device), angle.double())[:, None])
        expected = torch.cat([pair.transpose(-1, -2).flatten(-2), x[..., turned:].double()], dim=-1)
        assert relative_error(y, expected) < bound(device)
        assert y.transpose(1, 2).is_contiguous()


def test_rotary_after_norms_is_both_one_after_the_other(device: str) -> None:
    q, k = (draw(2, 3, heads, 24, device=device, seed=heads).transpose(1, 2) for heads in (5, 2))
    weights = [draw(24, device=device, seed=seed) for seed in (3, 4)]
    cos, sin = (draw(2, 3, 16, device=device, seed=seed) for seed in (5, 6))
    form = FORMS["weight-from-1"]
    normed = (by_hand(x, weight, form, x).float() for x, weight in zip((q, k), weights, strict=True))
    expected = rotary(*normed, cos, sin)
    for y, both in zip(expected, rotary(q, k, cos, sin, HeadNorms(*weights, form.eps, 1.0)), strict=True):
        assert relative_error(both, y) < bound(device)


def test_the_gate_of_an_attention_multiplies_each_head(device: str) -> None:
    gate = draw(2, 3, 5, 2 * 24, device=device).chunk(2, dim=-1)[1]
    x = draw(2, 3, 5 * 24, device=device, seed=1)
    y = sigmoid_gated(x, gate)
    assert y.is_contiguous()
    assert relative_error(y, x.double() * gate.double().sigmoid().flatten(-2)) < bound(device)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("pages", [3, 0], ids=["pages", "no-attention"])
def test_one_kernel_finds_the_places_that_torch_finds(pages: int, length: int, device: str) -> None:
    slots = torch.tensor([4, -1, 0, 2], dtype=torch.int32, device=device)
    lengths = torch.tensor([5, 9, 0, 7], dtype=torch.int32, device=device)
    table = torch.arange(12, dtype=torch.int32, device=device).flip(0).view(4, 3)[:, :pages]
    tokens = torch.arange(1, 21, device=device).view(4, 5)[:, :length]
    for num_tokens in (None, torch.tensor([1, 1, 0, length], dtype=torch.int32, device=device)):
        given = (slots, table, lengths, tokens, num_tokens)
        one, many = (find_window(*given, page_size=4, nowhere=48, fused=fused) for fused in (True, False))
        for name, found, expected in zip(one._fields, one, many, strict=True):
            assert torch.equal(found, expected), name
            assert found.dtype == expected.dtype


# Modules of models.


def model_of(name: str, **settings: Any) -> Any:
    return loaded(name).model if name in bundled.names() else build(name, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_each_family_is_fused_and_gives_the_same_logits(name: str, device: str) -> None:
    """All of its RMS norms, and the rotary embeddings and MLPs that we know; test_runner.py has the unfused tokens."""
    if device == "cuda" and name not in bundled.names():
        pytest.skip("on a GPU only models that are loaded there")
    logits = []
    for fused in ((), FUSIONS):
        with Desk(name, device=device, max_window=3, fused=fused) as desk:
            found = Counter(type(module).__name__ for module in desk.runner.fused.forwards)
            rows = desk.start(4, 1)
            made = [desk.decode([rows[0], None]).logits[:1]]
            desk.verify(rows, [[7], []], 2)
            made.append(desk.decode(rows[:1]).logits)
            logits.append(torch.cat(made))
    assert relative_error(logits[1], logits[0]) < (3e-6 if device == "cpu" else 1e-5)
    modules = Counter(type(module).__name__ for module in loaded(name, device).model.modules())
    assert {kind: found[kind] for kind in modules if "RMSNorm" in kind} == {
        kind: count for kind, count in modules.items() if "RMSNorm" in kind
    }
    for kind in modules:
        gated = kind.endswith("MLP") and kind not in ("NemotronHMLP", "Zamba2MLP")
        turns = kind.endswith("Attention") and not name.startswith(("kimi", "bailing", "nemotron"))
        if gated or (turns and "Delta" not in kind):
            assert found[kind] == modules[kind], kind


@pytest.mark.parametrize("name", [*bundled.names(), *FAMILIES])
def test_projections_that_are_merged_share_their_input(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is one product, in decode, verify and prefill: else it would be computed again for another input."""
    model, calls = loaded(name).model, []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *given: calls.append(given) or linear(*given))
    counts = []
    for fused in ((), ("linears",)):
        with Desk(name, max_window=2, fused=fused) as desk:
            merged = list(desk.runner.fused.forwards)
            calls.clear()
            desk.decode([None])
            counts.append(len(calls))
    groups = {module.weight.untyped_storage().data_ptr() for module in merged}
    # A block that several layers share has its projections once and runs them more often.
    saved = len(merged) - len(groups)
    assert counts[0] - counts[1] == saved or (name == "zamba2" and counts[0] - counts[1] > saved)
    if name not in ("mamba2", "granitemoehybrid"):
        assert len(merged) > len(groups) > 0
    assert all(p.is_contiguous() for p in model.parameters())


def test_modules_are_what_they_were_outside_a_forward_and_after_closing(tmp_path: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are defined for the GPU here, not for the interpreter")
    model = build("qwen3_5")
    ids = torch.arange(1, 8)[None]
    with torch.no_grad():
        before = model(ids).logits
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    fused = FusedModules(model, FUSIONS)
    assert not any("forward" in vars(module) for module in model.modules())
    with fused:
        assert all("forward" in vars(module) for module in fused.forwards)
    with pytest.raises(KeyError), fused:
        raise KeyError
    assert not any("forward" in vars(module) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
    assert {name: weight.tolist() for name, weight in model.state_dict().items()} == {
        name: weight.tolist() for name, weight in weights.items()
    }
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(weight, weights[name]) for name, weight in again.state_dict().items())


def test_a_module_keeps_a_forward_that_somebody_gave_it_since_it_was_looked_at() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are defined for the GPU here, not for the interpreter")
    fused = FusedModules(build("qwen3_5"), ("norms", "swiglu"))
    module, *others = fused.forwards
    module.forward = theirs = lambda x: x
    for _ in range(2):
        with fused:
            assert module.forward is theirs
            assert all("forward" in vars(other) for other in others)
        assert module.forward is theirs
        assert not any("forward" in vars(other) for other in others)


def merged(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[Any]:
    return list(fused_linears(model, dtype, merged=True, single_row=False))


def test_merged_weights_are_there_once_and_a_twin_finds_them_merged() -> None:
    model = build("qwen3_5")
    twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    weights = [module.weight for module, _ in merged(model)]
    places = [weight.data_ptr() for weight in weights]
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
    assert sum(storages.values()) == sum(weight.nbytes for weight in weights) > 0
    assert [module.weight.data_ptr() for module, _ in merged(twin)] == places


def projections(*, bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    module = nn.Module()
    torch.manual_seed(0)
    module.gate_proj, module.up_proj = (nn.Linear(8, size, bias=bias, dtype=dtype) for size in (5, 3))
    return module


def test_a_projection_that_gets_another_input_or_weight_computes_its_own() -> None:
    module = projections()
    x, y = draw(2, 8), draw(2, 8, seed=1)
    (gate, of_gate), (up, of_up) = merged(module)
    with torch.no_grad():
        for given in ((x, x), (x, y), (y, y), (y, x), (x, x)):
            for one, forward, value in zip((gate, up), (of_gate, of_up), given, strict=True):
                torch.testing.assert_close(forward(value), one(value))
        torch.testing.assert_close(of_gate(x), of_gate(x))  # taken once, computed once more
        up.weight = nn.Parameter(2 * up.weight)
        torch.testing.assert_close((of_gate(x), of_up(x)), (gate(x), up(x)))


@pytest.mark.parametrize("together", [False, True], ids=["alone", "merged"])
def test_products_of_one_row_are_ours(together: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = projections(dtype=torch.float16).to(device)
    forwards = [forward for _, forward in fused_linears(module, torch.float16, merged=together, single_row=True)]
    calls, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *given: calls.append(given) or linear(*given))
    with torch.no_grad():
        for shape, ours in (((1, 1, 8), True), ((8,), True), ((2, 1, 8), False)):
            x = draw(*shape, device=device, dtype=torch.float16)
            calls.clear()
            y = [forward(x) for forward in forwards]
            assert (not calls) == ours
            torch.testing.assert_close(y, [module.gate_proj(x), module.up_proj(x)], rtol=1e-2, atol=1e-3)
    assert list(fused_linears(projections(), torch.float32, merged=False, single_row=True)) == []  # the library's own


class Quantised(nn.Linear):
    """Any class of another library."""


def test_projections_of_other_kinds_are_left_alone() -> None:
    hooked, other, tied = projections(), projections(), projections()
    hooked.up_proj.forward = lambda x: x
    other.up_proj = Quantised(8, 3, bias=False)
    tied.head = nn.Linear(8, 3, bias=False)
    tied.head.weight = tied.up_proj.weight
    for module in (projections(bias=True), projections(dtype=torch.float16), hooked, other, tied):
        assert merged(module) == []


class CenteredRMSNorm(nn.Module):
    """Not one of those that we know."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.layer_norm(x, (len(self.weight),), eps=self.eps)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns neighbours with each other, not halves."""
    q, k = (x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin for x in (q, k))
    return q, k


class InterleavedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos[:, None], sin[:, None])


class GeluMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.act_fn = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_modules_that_compute_something_else_are_left_alone(device: str) -> None:
    odd = nn.ModuleList([CenteredRMSNorm(8), InterleavedAttention(), GeluMLP()]).to(device)
    for find in (fused_norms, fused_rotary, fused_swiglu):
        with torch.no_grad():
            assert list(find(odd, torch.float32)) == []


def test_a_norm_with_a_forward_of_somebodys_own_is_left_alone(device: str) -> None:
    model = build("qwen3_5").to(device)
    model.model.norm.forward = lambda x: x
    with torch.no_grad():
        found = [module for module, _ in fused_norms(model, torch.float32)]
    assert model.model.norm not in found
    assert model.model.layers[0].input_layernorm in found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_module_is_at_least_as_exact_as_the_models_own(dtype: torch.dtype, device: str) -> None:
    """Beside the same module in float64."""
    skip_truncated(dtype, device)
    model = build("qwen3_5", dtype).to(device)
    fused = FusedModules(model, ("norms", "swiglu"))
    seen = set()
    for module, forward in fused.forwards.items():
        if type(module) in seen:
            continue
        seen.add(type(module))
        exact = copy.deepcopy(module).double()
        size = next(module.parameters()).shape[-1]
        inputs = [
            draw(4, 64, size, device=device, dtype=dtype, seed=seed)
            for seed in range(1 + ("Gated" in type(module).__name__))
        ]
        with torch.no_grad():
            own, ours = module(*inputs), forward(*inputs)
            expected = exact(*(x.double() for x in inputs))
        assert relative_error(ours, expected) <= 1.02 * relative_error(own, expected)
    assert len(seen) == 3


def test_an_enabled_model_is_fused_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: in `generate`, in a copy of the model and after pickling, and with a forward that fails."""
    if torch.cuda.is_available():
        pytest.skip("kernels are defined for the GPU here, not for the interpreter")
    model = build("qwen3_5")
    ids = prompts(length=2)
    settings = {"max_new_tokens": 3, "do_sample": False}
    with torch.no_grad():
        expected = model.generate(**ids, **settings)
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    monkeypatch.setattr(switch, "fusions_for", lambda _: ("norms",))
    norm = type(model.model.norm)
    own, calls = norm.forward, []
    monkeypatch.setattr(norm, "forward", lambda self, x: calls.append(x) or own(self, x))
    replayssm.enable(model)
    for each in (model, copy.deepcopy(model)):
        calls.clear()
        assert torch.equal(each.generate(**ids, **settings), expected)
        assert len(calls) < 10  # for the check
        each.model.layers[2].register_forward_pre_hook(fail := Fail())
        with pytest.raises(ZeroDivisionError):
            each.generate(**ids, **settings)
        assert not any("forward" in vars(module) for module in each.modules() if "Norm" in type(module).__name__)
        fail.failing = False
        again = pickle.loads(pickle.dumps(each))
        assert torch.equal(again.generate(**ids, **settings), expected)
        replayssm.disable(each)
        assert (len(each._forward_hooks), len(each._forward_pre_hooks)) == hooks
        assert not each._forward_pre_hooks_with_kwargs
        assert not each._forward_hooks_always_called
        calls.clear()
        assert torch.equal(each.generate(**ids, **settings), expected)
        assert len(calls) > 10


class Fail:
    """A hook that fails, as long as it is to."""

    failing = True

    def __call__(self, *_: object) -> None:
        if self.failing:
            raise ZeroDivisionError


def test_whatever_looks_at_a_stream_sees_the_sum() -> None:
    x, delta, more = (draw(2, 3, 8, seed=seed) for seed in range(3))
    total = x + delta
    looks = (lambda s: s * 2, lambda s: torch.cat([more, s]), lambda s: s.to(torch.float64), lambda s: s[0], Tensor.sum)
    looks += (lambda s: more - s, lambda s: F.linear(s, torch.eye(8)), lambda s: s + 1, lambda s: s + more[0])
    for look in looks:
        seen = look(Stream.of(x) + delta)
        assert type(seen) is Tensor
        assert torch.equal(seen, look(total))
    stream = delta + Stream.of(x)
    assert (stream.shape, stream.dtype, stream.device, stream.dim()) == (x.shape, x.dtype, x.device, 3)
    assert stream.delta is not None  # nothing of this made the sum
    longer = stream + more
    assert torch.equal(plain(longer), total + more)
    assert torch.equal(plain(stream), total)
    stream += more
    assert torch.equal(plain(stream), total + more)


def test_names_of_fusions_are_checked() -> None:
    with pytest.raises(ValueError, match="fused has conv, mlp: some of norms, sums, .* are wanted"):
        FusedModules(build("mamba2"), ("norms", "mlp", "conv"))


def test_a_cpu_has_the_models_own_modules() -> None:
    with Desk("qwen3_5-tiny") as desk:
        assert desk.runner.fused.forwards == {}
