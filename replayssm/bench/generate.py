"""transformers' own `generate` of the same model, at the same batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm.bench.engines import random_tokens
from replayssm.bench.rows import milliseconds
from replayssm.loading import LoadedModel, quiet_libraries
from replayssm.models.fallback import on_a_cpu
from replayssm.models.support import find_adapters
from replayssm.models.switch import CACHE_ARGUMENTS

if TYPE_CHECKING:
    from replayssm.bench.e2e import Options

MOST_STEPS = 24  # that are timed of a filled context; each takes the same time
WARM_UP = 4


class Stamps:
    """A streamer that notes when tokens came. The prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:  # noqa: ARG002
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def filled(loaded: LoadedModel, options: Options, batch: int) -> dict[str, float]:
    """Decode steps behind a context that was computed once, and copied for each row."""
    steps = min(options.new_tokens, MOST_STEPS)
    with _prepared(loaded):
        tokens = _random(loaded, options.prompt_tokens + 1, 1)
        name, cache = _computed(loaded.model, tokens[:, :-1])
        cache.reorder_cache(torch.zeros(batch, dtype=torch.int64, device=loaded.device))
        times = _generate(loaded, tokens.expand(batch, -1), 1 + WARM_UP + steps, **{name: cache})
    step = (times[-1] - times[-1 - steps]) / steps
    return {
        "tokens_per_s": round(batch / step, 1),
        "tpot_ms": milliseconds(step),
        "step_ms": milliseconds(step),
        "tokens_per_step": 1.0,
    }


def served(loaded: LoadedModel, options: Options, batch: int) -> dict[str, float]:
    """Prompts of their own, all of one length."""
    runs = []
    with _prepared(loaded):
        for _ in range(1 + options.rounds):
            tokens = _random(loaded, options.prompt_tokens, batch)
            runs.append(_generate(loaded, tokens, options.new_tokens))
    later = max(1, options.new_tokens - 1)
    whole = median(times[-1] - times[0] for times in runs[1:])
    return {
        "tokens_per_s": round(batch * options.new_tokens / whole, 1),
        "ttft_ms": milliseconds(median(times[1] - times[0] for times in runs[1:])),
        "tpot_ms": milliseconds(median((times[-1] - times[1]) / later for times in runs[1:])),
    }


@contextmanager
def _prepared(loaded: LoadedModel) -> Iterator[None]:
    """The model without an end of sequence, which `generate` would take from the model's own defaults."""
    from transformers import GenerationConfig

    model = loaded.model
    mixers = [adapter.mixer for adapter in find_adapters(model)] if loaded.device == "cpu" else []
    defaults, model.generation_config = model.generation_config, GenerationConfig()
    try:
        with quiet_libraries(), on_a_cpu(mixers), torch.no_grad():
            yield
    finally:
        model.generation_config = defaults


def _random(loaded: LoadedModel, count: int, batch: int) -> Tensor:
    """Token ids ``[batch, count]``."""
    vocab_size = loaded.model.get_output_embeddings().weight.shape[0]
    return torch.tensor([random_tokens(vocab_size, count, seed) for seed in range(batch)], device=loaded.device)


def _computed(model: Any, tokens: Tensor) -> tuple[str, Any]:
    """The cache that a prefill of ``[1, T]`` tokens leaves, and the argument that takes it."""
    outputs = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    return next((name, outputs[name]) for name in CACHE_ARGUMENTS if outputs.get(name) is not None)


def _generate(loaded: LoadedModel, tokens: Tensor, new_tokens: int, **cache: Any) -> list[float]:
    """When `generate` began, and when each token of all rows was there."""
    from transformers import GenerationConfig

    stamps = Stamps()
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    mask = torch.ones_like(tokens)
    loaded.model.generate(
        tokens, attention_mask=mask, generation_config=config, streamer=stamps, use_cache=True, **cache
    )
    return stamps.times
