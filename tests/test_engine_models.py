"""The engine with the bundled models, one for each kind of layer: greedy tokens are transformers' own."""

import random
import subprocess
import sys

import pytest
import torch

from replayssm.bundled import names
from replayssm.engine import Engine, EngineOptions, SamplingParams
from replayssm.engine.setup import just_enough
from replayssm.errors import InputError
from replayssm.loading import load_model
from tests.test_engine import assert_all_is_accounted_for, run

NEW = 18  # a ring of 16 is flushed once
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\n"
TEXTS = [TEXT + "def ", TEXT + "class Tree:\n    def", "The", TEXT + TEXT[:40]]
FIRST_BY_DEFAULT = [names()[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in names()[1:])]
SMALL = {"chunk_tokens": 32, "max_step_tokens": 80, "snapshot_every": 16}


@pytest.fixture(scope="module", params=names())
def model(request):
    """A loaded model, the texts' tokens, and what transformers makes of them."""
    loaded = load_model(request.param)
    prompts = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    expected = [
        loaded.model.generate(torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        for prompt in prompts
    ]
    return loaded, prompts, [out[0, len(prompt) :].tolist() for out, prompt in zip(expected, prompts, strict=True)]


def tokens_of(engine, prompts, params=GREEDY):
    return [output.completions[0].token_ids for output in engine.generate(prompts, params)]


def few_pages(loaded, pages):
    """Memory for four rows, no snapshots and so many pages of 16 tokens."""
    options = {"max_rows": 4, "max_context": pages * 4, "snapshot_share": 0.0}  # for each row a fourth of the pages
    memory = just_enough(loaded, EngineOptions(**options, **SMALL)).memory_bytes
    return options | {"max_context": pages * 16, "memory_bytes": memory}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.thorough),
        pytest.param(SMALL | {"run_ahead": True}, id="chunks-ahead"),
        pytest.param(SMALL | {"speculate": "ngram", "fixed_draft": True}, id="speculating"),
        pytest.param(SMALL | {"prefix_cache": False}, id="no-cache", marks=pytest.mark.thorough),
        pytest.param(SMALL | {"replay": False}, id="no-replay", marks=pytest.mark.thorough),
        pytest.param(SMALL | {"batch_invariant": True}, id="batch-invariant", marks=pytest.mark.thorough),
    ],
)
def test_greedy_tokens_are_those_of_transformers(model, options):
    loaded, prompts, expected = model
    with Engine(loaded, EngineOptions(max_rows=6, **options)) as engine:
        assert tokens_of(engine, prompts) == expected
        assert tokens_of(engine, prompts[::-1]) == expected[::-1]  # from the cache, where there is one
        assert_all_is_accounted_for(engine)


@pytest.mark.parametrize("model", FIRST_BY_DEFAULT, indirect=True)
def test_batch_invariant_logprobs_are_bit_equal_whatever_shares_the_batch(model):
    loaded, prompts, _ = model
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    options = EngineOptions(max_rows=4, batch_invariant=True, **SMALL)
    with Engine(loaded, options) as engine:
        together = engine.generate(prompts, params)
        again = engine.generate(prompts[::-1], params)[::-1]  # their prefixes are in the cache now
        assert sum(output.cached_tokens for output in again) > 0
    for prompt, first, second in zip(prompts, together, again, strict=True):
        with Engine(loaded, options) as engine:
            alone = engine.generate([prompt], params)[0]
        assert first.completions == second.completions == alone.completions


def test_a_models_own_head_drafts_for_rows_that_come_and_go(model):
    loaded, prompts, expected = model
    if loaded.name != "qwen3_5-tiny":
        with pytest.raises(InputError, match="speculation with mtp"):
            Engine(loaded, EngineOptions(speculate="mtp"))
        return
    options = EngineOptions(max_rows=3, speculate="mtp", num_draft=2, fixed_draft=True, **SMALL)
    with Engine(loaded, options) as engine:
        assert tokens_of(engine, prompts) == expected
        assert tokens_of(engine, prompts[::-1]) == expected[::-1]
        stats = engine.stats()
        assert stats.accepted > stats.windows / 2
        assert_all_is_accounted_for(engine)


@pytest.mark.parametrize("model", FIRST_BY_DEFAULT, indirect=True)
def test_neighbours_that_are_preempted_or_cancelled_change_no_token(model):
    loaded, prompts, expected = model
    pages = max(-(-(len(prompt) + NEW) // 16) for prompt in prompts)
    with Engine(loaded, EngineOptions(**few_pages(loaded, pages + 2), **SMALL)) as engine:
        cancelled = [engine.add(prompt, GREEDY) for prompt in prompts]
        kept = [engine.add(prompt, GREEDY) for prompt in prompts]
        updates = [update for _ in range(5) for update in engine.step()]
        for name in cancelled:
            engine.cancel(name)
        updates += [update for its in run(engine).values() for update in its]
        tokens = [[t for update in updates if update.request_id == name for t in update.token_ids] for name in kept]
        assert tokens == expected
        assert engine.stats().preemptions > 0
        assert_all_is_accounted_for(engine)


@pytest.mark.parametrize("model", FIRST_BY_DEFAULT, indirect=True)
def test_the_second_of_two_long_prompts_computes_its_tail_only(model):
    loaded, prompts, _ = model
    rng = random.Random(0)
    prefix = [token for _ in range(60) for token in rng.choice(prompts)][:2000]
    first, second = [*prefix, *prompts[2]], [*prefix, *prompts[3]]
    with Engine(loaded, EngineOptions(max_rows=2, prefix_cache=False)) as engine:
        (expected,) = tokens_of(engine, [second])
    with Engine(loaded, EngineOptions(max_rows=2)) as engine:
        engine.add(first, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        while engine.stats().generated_tokens < 3:
            engine.step()
        before = engine.stats().prefilled_tokens
        (output,) = engine.generate([second], GREEDY)
        assert output.cached_tokens == 2000
        assert engine.stats().prefilled_tokens - before == len(prompts[3])
        assert output.completions[0].token_ids == expected


RESTORE = """
import sys
from replayssm.engine import Engine, EngineOptions
engine = Engine(sys.argv[1], EngineOptions(max_rows=2))
tokens, name = engine.import_session(sys.argv[2])
while engine.has_work:
    tokens += [token for update in engine.step() for token in update.token_ids]
print(engine.stats().prefilled_tokens, *tokens)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST_BY_DEFAULT)
def test_an_exported_request_goes_on_in_a_new_process(name, tmp_path):
    with Engine(name, EngineOptions(max_rows=2)) as engine:
        request = engine.add(TEXT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        for _ in range(11):
            engine.step()
        engine.export_session(request, tmp_path / "session")
        run(engine)
        whole = engine.generate([TEXT], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    command = [sys.executable, "-c", RESTORE, name, str(tmp_path / "session")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    prefilled, *tokens = map(int, done.stdout.split())
    assert prefilled == 1
    assert tokens == whole.prompt_token_ids + whole.completions[0].token_ids
