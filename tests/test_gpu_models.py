"""Whole models on a GPU: the bundled ones write 256 tokens there, and those that transformers writes on a CPU.

By `generate`, compiled, and with each step as one CUDA graph. Compiled steps are tested on a CPU, too. Where
flash-linear-attention is installed, transformers uses it for prefill on a GPU (it chooses at import):
`test_prefill_with_flash_linear_attention` is about that and is skipped elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from families import build, cache_name, prompts
from torch import Tensor
from transformers import AutoModelForCausalLM

import replayssm
from replayssm import bundled, ops
from replayssm.models import ReplayCache, last_cache
from replayssm.models.fallback import without_gpu_kernels
from replayssm.models.support import find_adapters

NAMES = bundled.names()
PROMPT = "import json\n\n\ndef load(path):\n"
TOKENS = 256
HAS_FLA = find_spec("fla") is not None

Step = Callable[[Tensor], Tensor]
Launcher = Callable[[Any, ReplayCache, Tensor], Step]


def model_on(name: str, device: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(bundled.path(name), dtype=torch.float32).eval().to(device)


def prompt(device: str) -> Tensor:
    return torch.tensor([list(PROMPT.encode())], device=device)


def generate(model: Any, tokens: int) -> Tensor:
    ids = prompt(model.device)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    return model.generate(ids, **options)[0, ids.shape[1] :].cpu()


@cache
def tokens_of_transformers_on_a_cpu(name: str) -> Tensor:
    return generate(model_on(name, "cpu"), TOKENS)


def call(model: Any, cache: ReplayCache, ids: Tensor) -> Tensor:
    """The next token of each row, ``[B, 1]``."""
    return model(ids, **{cache_name(model): cache}).logits[:, -1:].argmax(-1)


def eager(model: Any, cache: ReplayCache, token: Tensor) -> Step:
    return lambda token: call(model, cache, token)


def compiled(model: Any, cache: ReplayCache, token: Tensor, **options: Any) -> Step:
    step = torch.compile(lambda token: call(model, cache, token), fullgraph=True, **options)
    return lambda token: step(token).clone()


def compiled_into_graphs(model: Any, cache: ReplayCache, token: Tensor) -> Step:
    return compiled(model, cache, token, mode="reduce-overhead")


def captured(model: Any, cache: ReplayCache, token: Tensor) -> Step:
    """One CUDA graph of a step on fixed addresses, replayed for each token."""
    given = token.clone()
    graph = torch.cuda.CUDAGraph()
    before = addresses(cache)
    with torch.cuda.graph(graph):
        following = call(model, cache, given)

    def step(token: Tensor) -> Tensor:
        given.copy_(token)
        graph.replay()
        assert addresses(cache) == before
        return following.clone()

    return step


def addresses(cache: ReplayCache) -> list[int]:
    tensors = cache.require_pool().tensors()
    tensors += [layer.keys for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    return [tensor.data_ptr() for tensor in tensors]


@torch.no_grad()
def decode(model: Any, launcher: Launcher, tokens: int, *, warm: int = 2) -> Tensor:
    """Greedy tokens, the first ``warm`` of them eagerly, the rest as the launcher has it."""
    ids = prompt(model.device)
    cache = ReplayCache(model, max_cache_len=ids.shape[1] + tokens)
    written = [call(model, cache, ids)]
    while len(written) < warm:
        written.append(call(model, cache, written[-1]))
    step = launcher(model, cache, written[-1])
    while len(written) < tokens:
        written.append(step(written[-1]))
    return torch.cat(written, dim=1)[0].cpu()


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.thorough) for n in NAMES[1:])])
def test_fixed_keys_and_values_and_compiled_steps_on_a_cpu(name: str) -> None:
    """With max_cache_len, a graph without breaks serves every step."""
    model = replayssm.enable(model_on(name, "cpu"))
    expected = tokens_of_transformers_on_a_cpu(name)[:40]
    assert torch.equal(decode(model, eager, 40), expected)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    steps = decode(model, lambda *given: compiled(*given, backend="aot_eager"), 40)
    assert torch.equal(steps, expected)
    # The first counts the cache's tokens in its code, the second has their number as a variable.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("launcher", [compiled_into_graphs, captured], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_on_a_gpu_equal_the_cpus(name: str, launcher: Launcher) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = replayssm.enable(model_on(name, "cuda"))
    assert torch.equal(decode(model, launcher, TOKENS), tokens_of_transformers_on_a_cpu(name))
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", NAMES)
def test_generate_on_a_gpu_equals_the_cpus(name: str, backend: str) -> None:
    reason = ops.unavailable_reason(backend, "cuda")
    if reason is not None:
        pytest.skip(reason)
    model = replayssm.enable(model_on(name, "cuda"), backend=backend)
    assert torch.equal(generate(model, TOKENS), tokens_of_transformers_on_a_cpu(name))
    assert last_cache(model).pool.backend == backend


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_FLA, reason="flash-linear-attention is not installed")
@pytest.mark.parametrize("name", [name for name in NAMES if "granite" not in name])
def test_prefill_with_flash_linear_attention(name: str) -> None:
    """transformers prefills with fla's chunked kernel, and replay continues from the state that it returns."""
    model = model_on(name, "cuda")
    mixers = [adapter.mixer for adapter in find_adapters(model)]
    assert all(without_gpu_kernels(mixer) is not None for mixer in mixers)
    expected = generate(model, TOKENS)
    assert torch.equal(decode(replayssm.enable(model), captured, TOKENS), expected)


@pytest.mark.parametrize("name", ["falcon_h1", "zamba2", "mamba2", "nemotron_h"])
def test_fixed_keys_and_values_beside_other_layers(name: str) -> None:
    """Hybrid layers, layers without a cache, and no attention at all; rows then stay as they are."""
    model = replayssm.enable(build(name))
    ids = prompts()["input_ids"]
    written = []
    for room in (None, 64):
        cache = ReplayCache(model, max_cache_len=room)
        with torch.no_grad():
            tokens = [call(model, cache, ids)]
            for _ in range(30):
                tokens.append(call(model, cache, tokens[-1]))
        written.append(torch.cat(tokens, dim=1))
    assert torch.equal(*written)
    for change in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(ValueError, match="max_cache_len stay as they are"):
            change()


@pytest.mark.parametrize("room", [0, -1, 2.5])
def test_a_bad_max_cache_len_is_named(room: object) -> None:
    with pytest.raises(ValueError, match=f"^max_cache_len is {room}: a whole number of at least 1 is wanted$"):
        ReplayCache(replayssm.enable(build("qwen3_5")), max_cache_len=room)
