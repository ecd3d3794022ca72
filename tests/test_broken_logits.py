"""Logits that are NaN or infinite end their request with an error, and nothing else is different."""

import asyncio
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from replayssm import bundled, cli
from replayssm.engine import AsyncEngine, Engine, EngineOptions, SamplingParams
from replayssm.errors import BROKEN_LOGITS
from replayssm.loading import load_model
from replayssm.options import LoadOptions
from tests.test_engine import GREEDY, LONG, assert_all_is_accounted_for, engine_with, run, tokens_of
from tests.token_model import greedy, random_prompt

POISON = 60
QWEN = "qwen3_5-tiny"
WAYS = {
    "in step": {},
    "ahead": {"run_ahead": True},
    "drafts": {"speculate": "ngram", "num_draft": 3, "fixed_draft": True},
    "no cache": {"prefix_cache": False},
}


def poisoned(token: int = POISON, **options) -> Engine:
    """An engine whose model gives NaN from a token on."""
    engine = engine_with(**options)
    engine.runner.pool.poison = token
    return engine


def sound_prompts(count: int) -> list[list[int]]:
    """Prompts after which the model never says POISON."""
    prompts = (random_prompt(random.Random(seed), 5 + seed) for seed in range(100))
    return [prompt for prompt in prompts if POISON not in (*prompt, *greedy(prompt, 24))][:count]


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def way(request):
    return request.param


def test_a_prompt_that_breaks_the_model_ends_with_an_error_and_its_neighbours_do_not_notice(way):
    engine, prompts = poisoned(**way), sound_prompts(4)
    broken = engine.add([1, 2, POISON, 3], SamplingParams(n=2, logprobs=2))
    assert tokens_of(engine, prompts) == [greedy(prompt, 24) for prompt in prompts]
    updates = run(engine)[broken]
    assert sorted(update.index for update in updates) == [0, 1]
    for update in updates:
        assert (update.token_ids, update.text, update.logprobs) == ((), "", ())
        assert (update.finish_reason, update.message) == ("error", BROKEN_LOGITS)
    assert_all_is_accounted_for(engine)


def test_a_sample_keeps_the_tokens_before_its_logits_break(way):
    prompt = sound_prompts(1)[0]
    said = greedy(prompt, 24)
    place = next(i for i, token in enumerate(said) if i > 8 and token not in (*prompt, *said[:i]))
    engine = poisoned(said[place], **way)
    (output,) = engine.generate([prompt], SamplingParams(temperature=0, logprobs=0, **LONG))
    (completion,) = output.completions
    assert completion.token_ids == said[: place + 1]
    assert completion.text == "".join(f" {token}" for token in said[: place + 1])
    assert [one.token for one in completion.logprobs] == completion.token_ids
    assert (completion.finish_reason, completion.message) == ("error", BROKEN_LOGITS)
    assert run(engine) == {}  # what was computed ahead
    assert_all_is_accounted_for(engine)


def cached_texts(engine: Engine) -> list[tuple[int, ...]]:
    """What the prefix cache's snapshots stand for."""
    return [engine.runner.pool.tokens(node.snapshot) for node in engine.cache.recent]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("in_prompt", [False, True], ids=["in its output", "in its prompt"])
def test_the_prefix_cache_forgets_broken_snapshots_and_keeps_the_others(ahead, in_prompt):
    beginning = [1 + token % 50 for token in random_prompt(random.Random(7), 34)]
    engine = poisoned(run_ahead=ahead)
    engine.generate([[*beginning, 5, 6, 7, 8, 9]], SamplingParams(temperature=0, max_tokens=2))
    kept = cached_texts(engine)
    prompt = [*beginning, POISON if in_prompt else 1, *[2] * 44]  # the token behind it ends where a snapshot is taken
    draws_poison = {} if in_prompt else {"logit_bias": {POISON: 100.0}}
    engine.generate([prompt], SamplingParams(temperature=0, **draws_poison, **LONG))
    assert run(engine) == {}
    found = cached_texts(engine)
    assert set(found) >= set(kept)
    assert not any(POISON in text for text in found)
    assert len(found) == len(kept) if in_prompt else len(found) > len(kept)
    engine.runner.pool.poison = None
    assert tokens_of(engine, [prompt]) == [greedy(prompt, 24)]
    assert run(engine) == {}
    assert_all_is_accounted_for(engine)


def test_a_broken_snapshot_of_a_cancelled_request_goes_with_the_first_that_used_it():
    engine, prompt = poisoned(chunk_tokens=8, max_step_tokens=16), [1, 2, POISON, *[3] * 60]
    engine.add(prompt, GREEDY, request_id="cancelled")
    engine.step()
    engine.cancel("cancelled")
    assert [POISON in text for text in cached_texts(engine)] == [True] * len(engine.cache.recent) != []
    (output,) = engine.generate([prompt], GREEDY)
    assert output.cached_tokens > 0
    assert output.completions[0].message == BROKEN_LOGITS
    assert cached_texts(engine) == []
    assert [update.finish_reason for update in run(engine)["cancelled"]] == ["abort"]
    assert_all_is_accounted_for(engine)


# A real model, one of whose tokens has an embedding of NaN.

BAD = "\x07"


@pytest.fixture(scope="module")
def broken_model(tmp_path_factory):
    """A folder."""
    (token,) = load_model(QWEN).tokenizer(BAD)["input_ids"]
    return folder_with(token, tmp_path_factory.mktemp("models") / "broken")


def folder_with(token, folder):
    """A model that gives NaN from this token on."""
    shutil.copytree(bundled.path(QWEN), folder)
    weights = load_file(folder / "model.safetensors")
    (name,) = (name for name in weights if name.endswith("embed_tokens.weight"))
    weights.setdefault("lm_head.weight", weights[name].clone())  # tied, it would break the logits of all
    weights[name][token] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return folder


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("speculate", [None, "mtp"])
def test_pages_slots_and_rows_of_a_broken_request_serve_others_with_the_same_bits(broken_model, speculate, device):
    texts = ["def fibonacci(n):\n    ", "class Tree:\n    def __init__(self"]
    # Of a GPU's matrix products the last bits vary with the batch.
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1 if device == "cpu" else None)
    options = EngineOptions(max_rows=3, max_context=64, speculate=speculate, fixed_draft=speculate is not None)
    with Engine(str(broken_model), options, LoadOptions(device=device, dtype="float32")) as engine:
        expected = [output.completions[0] for output in engine.generate(texts, params)]
        engine.cache.clear()
        for _ in range(2):
            asked = [f"import os{BAD}\nimport sys", *texts]
            broken, *others = (output.completions[0] for output in engine.generate(asked, params))
            assert (broken.finish_reason, broken.token_ids, broken.message) == ("error", [], BROKEN_LOGITS)
            assert others == expected
            engine.cache.clear()
        assert_all_is_accounted_for(engine)
        if speculate == "mtp":
            drafts = engine.launcher.drafts
            assert all(bool(kept[:-1].isfinite().all()) for kept in drafts._pages.keys.values())


GENERATE = {
    "engine": [],
    "stepwise": ["--no-replay"],
    "drafts": ["--speculate", "draft", "--draft-model", QWEN],
    "tree": ["--speculate", "ngram", "--tree", "2"],
}


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("extra", GENERATE.values(), ids=GENERATE.keys())
def test_the_command_line_says_it_in_one_line(broken_model, extra, temperature, capfd):
    args = ["--model", str(broken_model), "--max-new-tokens", "4", "--temperature", temperature, *extra]
    assert cli.run(["generate", "--prompt", f"import{BAD}", *args]) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"replayssm: error: {BROKEN_LOGITS}\n")


@pytest.mark.parametrize("extra", GENERATE.values(), ids=GENERATE.keys())
def test_the_command_line_streams_what_came_before_the_logits_broke(extra, tmp_path, capfd):
    prompt = "class Tree:\n    def __init__(self"
    with Engine(QWEN, EngineOptions(max_rows=1, max_context=64)) as engine:
        (output,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=20))
        said = output.completions[0].token_ids
        place = next(i for i, token in enumerate(said) if i > 9 and token not in said[:i])
        # In a window of drafts, attention carries NaN to the places before it.
        least, most = (engine.loaded.tokenizer.decode(said[:end]) for end in (place - 2, place + 1))
    folder = folder_with(said[place], tmp_path / "broken")
    args = ["--model", str(folder), "--prompt", prompt, "--max-new-tokens", "20", "--stream", *extra]
    assert cli.run(["generate", *args]) == 2
    out, err = capfd.readouterr()
    assert most.startswith(out)
    assert out.startswith(least if "draft" in extra else most)
    assert err == f"replayssm: error: {BROKEN_LOGITS}\n"


def test_an_async_stream_ends_with_the_error():
    async def updates():
        async with AsyncEngine(poisoned()) as engine:
            return [update async for update in engine.generate([POISON], GREEDY)]

    (update,) = asyncio.run(updates())
    assert (update.finish_reason, update.message) == ("error", BROKEN_LOGITS)
