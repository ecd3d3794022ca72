"""transformers' own assisted decoding through replay: greedy tokens are the plain ones, whatever is drafted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from families import FAMILIES, built_models, cache_name, disturbed, prompts

import replayssm
from replayssm import ReplayCache
from replayssm.models.recording import EXTRA_ROWS

NEW_TOKENS = 48
ONE_PER_KIND = ["qwen3_5", "kimi_linear", "bamba", "falcon_h1"]  # GDN, KDA, Mamba-2, a hybrid layer


@pytest.fixture(scope="module")
def models():
    """Each test must leave them disabled."""
    return built_models()


def skip_unless_assisted(name):
    """Before 5.24 transformers looks for the cache under a name that the pure Mamba-2 model doesn't use."""
    if name == "mamba2" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        pytest.skip(f"transformers {transformers.__version__} has no assisted decoding of this model")


@pytest.fixture
def crops(monkeypatch):
    """How many tokens each call of `crop` took back, counted."""
    counted = Counter()
    crop = ReplayCache.crop

    def counting(self, tokens_to_remove):
        counted[-int(tokens_to_remove)] += 1
        crop(self, tokens_to_remove)

    monkeypatch.setattr(ReplayCache, "crop", counting)
    return counted


def greedy(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def repeating_prompt():
    """A prompt in which a look-up finds something."""
    piece = prompts(length=7)["input_ids"]
    ids = torch.cat([piece, piece, piece[:, :4]], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def forward(model, ids, cache):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{cache_name(model): cache}).logits


@pytest.mark.parametrize("ring_len", [4, 16])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_prompt_lookup_gives_the_plain_greedy_tokens(name, ring_len, models, crops):
    skip_unless_assisted(name)
    model, inputs = models(name), repeating_prompt()
    expected = greedy(model, inputs)
    replayssm.enable(model, ring_len=ring_len)
    assert greedy(model, inputs, prompt_lookup_num_tokens=5).tolist() == expected.tolist()
    assert sum(n for taken, n in crops.items() if taken), f"no draft was rejected: {crops}"
    replayssm.disable(model)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_an_assistant_model_gives_the_plain_greedy_tokens(name, models, crops):
    skip_unless_assisted(name)
    model, inputs = models(name), prompts()
    assistant = disturbed(model)
    expected = greedy(model, inputs)
    replayssm.enable(model, ring_len=8)
    replayssm.enable(assistant, ring_len=8)
    assert greedy(model, inputs, assistant_model=assistant).tolist() == expected.tolist()
    assert sum(n for taken, n in crops.items() if taken), f"no draft was rejected: {crops}"
    replayssm.disable(model)


def test_a_window_longer_than_one_call_takes(models, crops):
    model, inputs = models("qwen3_5"), repeating_prompt()
    expected = greedy(model, inputs)
    replayssm.enable(model, ring_len=4)
    assert greedy(model, inputs, prompt_lookup_num_tokens=40, max_matching_ngram_size=1).tolist() == expected.tolist()
    assert max(crops) > 20
    replayssm.disable(model)


@pytest.mark.parametrize("name", ONE_PER_KIND)
@pytest.mark.parametrize("batch", [1, 3], ids=["one", "left-padded"])
def test_crop_leaves_no_trace(name, batch, models):
    """After tokens were taken back, logits are those of a cache that never saw them."""
    model = replayssm.enable(models(name), ring_len=4)
    inputs = prompts(batch)
    ids = torch.randint(1, 101, (batch, 30), generator=torch.Generator().manual_seed(3))
    mask = inputs["attention_mask"]

    def step(cache, tokens, mask):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]  # Bamba counts from 0 without them
        arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        with torch.no_grad():
            return model(input_ids=tokens, **arguments, **{cache_name(model): cache}).logits

    def extended(mask, tokens):
        return torch.cat([mask, mask.new_ones(batch, tokens)], dim=1)

    cache, plain = ReplayCache(model), ReplayCache(model)
    cache.activate_past_recording()
    for made in (cache, plain):
        step(made, inputs["input_ids"], mask)
    position = 0
    for window, taken in ((5, 3), (1, 0), (7, 7), (2, 1), (6, 0), (3, 2), (1, 1), (4, 0)):
        kept = window - taken
        drafts = torch.randint(1, 101, (batch, taken), generator=torch.Generator().manual_seed(position))
        tokens = torch.cat([ids[:, position : position + kept], drafts], dim=1)
        got = step(cache, tokens, extended(mask, window))
        cache.crop(-taken)
        for i in range(kept):
            mask = extended(mask, 1)
            wanted = step(plain, ids[:, position + i : position + i + 1], mask)
            torch.testing.assert_close(got[:, i], wanted[:, 0], atol=2e-4, rtol=2e-4)
        position += kept
    replayssm.disable(model)


def test_drafts_of_several_forwards_are_taken_back_at_once(models):
    """An assistant drafts token by token and crops once."""
    model = replayssm.enable(models("qwen3_5"), ring_len=4)
    ids = torch.randint(1, 101, (1, 40), generator=torch.Generator().manual_seed(3))
    cache, plain = ReplayCache(model), ReplayCache(model)
    cache.activate_past_recording()
    for made in (cache, plain):
        forward(model, ids[:, :9], made)
    for token in range(9, 22):
        forward(model, ids[:, token : token + 1], cache)
    cache.crop(-13)
    torch.testing.assert_close(
        forward(model, ids[:, 30:32], cache), forward(model, ids[:, 30:32], plain), atol=1e-4, rtol=1e-4
    )
    replayssm.disable(model)


def test_a_cache_with_records_may_begin_to_record(models):
    """Its rings are too short for what may be taken back, and for a window of twenty."""
    model = replayssm.enable(models("qwen3_5"), ring_len=4)
    ids = torch.randint(1, 101, (1, 60), generator=torch.Generator().manual_seed(3))
    cache, plain = ReplayCache(model), ReplayCache(model)
    for made in (cache, plain):
        for start, end in ((0, 9), (9, 10), (10, 11)):
            forward(model, ids[:, start:end], made)
    cache.activate_past_recording()
    forward(model, ids[:, 20:40], cache)
    cache.crop(-20)
    for token in range(40, 46):
        torch.testing.assert_close(
            forward(model, ids[:, token : token + 1], cache),
            forward(model, ids[:, token : token + 1], plain),
            atol=1e-4,
            rtol=1e-4,
        )
    replayssm.disable(model)


def test_a_crop_that_is_not_possible_says_why(models):
    model = replayssm.enable(models("qwen3_5"))
    ids = torch.randint(1, 101, (1, 200), generator=torch.Generator().manual_seed(3))
    cache = ReplayCache(model)
    forward(model, ids[:, :6], cache)
    with pytest.raises(ValueError, match=r"crop\(-1\) of a ReplayCache that doesn't record"):
        cache.crop(-1)
    cache.crop(0)
    with pytest.raises(ValueError, match="as -2"):
        cache.crop(2)
    cache = ReplayCache(model)
    cache.activate_past_recording()
    forward(model, ids, cache)
    with pytest.raises(ValueError, match=f"crop of 150 tokens.*can take back {16 + EXTRA_ROWS}"):
        cache.crop(-150)
    replayssm.disable(model)
