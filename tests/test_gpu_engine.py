"""The engine on a GPU: the tokens of a CPU, by graphs, ahead and with drafts; steps that neither wait nor allocate."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from replayssm.engine import Engine, EngineOptions, SamplingParams
from replayssm.options import LoadOptions

pytestmark = pytest.mark.gpu

MODEL = "qwen3_5-tiny"
PROMPTS = ["import json\n\n\ndef load(path):\n", "class Tree:\n", "for i in range(10):\n    print(i)\n"] * 2
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SAMPLED = [
    SamplingParams(temperature=0.8, seed=seed, max_tokens=60, ignore_eos=True, **more)
    for seed, more in enumerate(
        ({}, {"top_k": 8}, {"top_p": 0.8}, {"min_p": 0.05, "top_k": 30, "top_p": 0.9}, {"presence_penalty": 0.5})
    )
] + [GREEDY]


def tokens_of(
    params: SamplingParams | list[SamplingParams], device: str = "cuda", **options: object
) -> list[list[int]]:
    settings = EngineOptions(max_rows=6, max_context=256, memory_bytes=2**29, **options)
    with Engine(MODEL, settings, LoadOptions(device=device, dtype="float32")) as engine:
        return [output.completions[0].token_ids for output in engine.generate(PROMPTS, params)]


@cache
def on_a_cpu() -> list[list[int]]:
    return tokens_of(GREEDY, device="cpu")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"graphs": False},
        {"run_ahead": False},
        {"speculate": "ngram"},
        {"speculate": "ngram", "fixed_draft": True},
        {"speculate": "mtp"},
        {"speculate": "mtp", "fixed_draft": True},
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_a_cpu(options):
    assert tokens_of(GREEDY, **options) == on_a_cpu()


@pytest.mark.parametrize("options", [{"run_ahead": False}, {"speculate": "ngram", "fixed_draft": True}], ids=str)
def test_sampled_tokens_are_the_same_however_steps_are_made(options):
    assert tokens_of(SAMPLED, **options) == tokens_of(SAMPLED)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED[3]], ids=["greedy", "sampled"])
def test_a_step_waits_for_nothing_but_its_tokens_and_takes_no_memory(params):
    settings = EngineOptions(max_rows=6, max_context=256, memory_bytes=2**29, prefix_cache=False)
    with Engine(MODEL, settings, LoadOptions(device="cuda")) as engine:
        for prompt in PROMPTS:
            engine.add(prompt, params)
        for _ in range(20):
            engine.step()
        segments = torch.cuda.memory_stats()["segment.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            updates = [update for _ in range(20) for update in engine.step()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert sum(len(update.token_ids) for update in updates) == 20 * len(PROMPTS)
        assert torch.cuda.memory_stats()["segment.all.allocated"] == segments
