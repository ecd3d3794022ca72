"""Speculation through checkpoint and ring on the bundled models: greedy tokens are the plain ones."""

from __future__ import annotations

import pytest
import torch
from families import build, disturbed, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import replayssm
from replayssm import bundled
from replayssm.speculate import AdaptiveLength, GivenCosts, ModelDrafter, MtpDrafter, NgramDrafter, speculate
from replayssm.speculate.replay import ReplayVerifier

TEXTS = ("import os\nimport sys\n\ndef main(", "class TestCase(unittest.TestCase):\n    def test_", "x")
NEW_TOKENS = 96
LONG = 512
DRAFTERS = [(name, kind) for name in bundled.names() for kind in ("ngram", "draft")] + [("qwen3_5-tiny", "mtp")]


SHAPES = [(4, 1, 1), (16, 3, 1), (32, 7, 1), (4, 3, 2), (16, 4, 3), (32, 7, 2)]  # L, drafts, candidates
IN_CI = {(4, 1, 1, 3), (16, 3, 1, 1), (32, 7, 1, 3), (4, 3, 2, 1), (16, 4, 3, 3)}
GRID = [
    pytest.param(*shape, rows, marks=[] if (*shape, rows) in IN_CI else pytest.mark.thorough)
    for shape in SHAPES
    for rows in (1, 3)
]
LONG_GRID = [(ring_len, drafts, width) for ring_len in (4, 16, 32) for drafts in (1, 3, 7) for width in (1, 2, 3)]


@pytest.fixture(scope="module")
def models():
    """Bundled models with their prompts and plain greedy tokens, one row at a time by transformers' own step."""
    built = {}

    def get(name):
        if name not in built:
            folder = bundled.path(name)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            ids = [tokenizer(text)["input_ids"] for text in TEXTS]
            built[name] = model, ids, [greedy(model, row) for row in ids]
        return built[name]

    yield get
    for model, *_ in built.values():
        replayssm.disable(model)


def greedy(model, row, tokens=NEW_TOKENS):
    """The plain continuation of one prompt, by transformers' own step unless the model is enabled."""
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([row]), **options)[0, len(row) :].tolist()


@pytest.fixture(scope="module")
def long_plain(models):
    built = {}

    def get(name):
        if name not in built:
            model, ids, _ = models(name)
            replayssm.disable(model)
            built[name] = greedy(model, ids[0], LONG)
        return built[name]

    return get


def drafter_for(kind, model, name):
    if kind == "ngram":
        return NgramDrafter()
    if kind == "mtp":
        return MtpDrafter(model, bundled.path(name))
    # Another model with the same vocabulary: mostly wrong, now and then right.
    other = bundled.names()[(bundled.names().index(name) + 1) % 3]
    draft = AutoModelForCausalLM.from_pretrained(bundled.path(other)).eval()
    return ModelDrafter(ReplayVerifier(replayssm.enable(draft)))


@pytest.mark.slow
@pytest.mark.parametrize(("ring_len", "num_drafts", "width", "rows"), GRID)
@pytest.mark.parametrize(("name", "kind"), DRAFTERS)
def test_greedy_tokens_are_the_plain_ones(models, name, kind, ring_len, num_drafts, width, rows):
    model, ids, plain = models(name)
    replayssm.enable(model, ring_len=ring_len)
    verifier = ReplayVerifier(model)
    found = speculate(
        verifier,
        drafter_for(kind, model, name),
        ids[:rows],
        max_new_tokens=NEW_TOKENS,
        num_drafts=num_drafts,
        width=width,
    )
    assert found.tokens == plain[:rows]
    assert found.statistics.accepted > 0
    if kind != "mtp":  # whose drafts are nearly all right
        assert found.statistics.accepted < found.statistics.drafted
    counters = verifier.cache.require_pool().counters()
    assert counters["tokens_accepted"] == found.statistics.accepted + found.statistics.row_steps
    assert counters["folds"] <= rows * NEW_TOKENS / ring_len
    replayssm.disable(model)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("ring_len", "num_drafts", "width"), LONG_GRID)
@pytest.mark.parametrize(("name", "kind"), DRAFTERS)
def test_512_greedy_tokens_are_the_plain_ones(models, long_plain, name, kind, ring_len, num_drafts, width):
    plain = long_plain(name)
    model, ids, _ = models(name)
    replayssm.enable(model, ring_len=ring_len)
    options = {"max_new_tokens": LONG, "num_drafts": num_drafts, "width": width}
    found = speculate(ReplayVerifier(model), drafter_for(kind, model, name), ids[:1], **options)
    assert found.tokens == [plain]
    assert found.statistics.accepted > 0
    replayssm.disable(model)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ngram", "draft"])
@pytest.mark.parametrize("name", bundled.names())
def test_tokens_that_differ_in_bf16_had_equal_logits_but_for_rounding(name, kind):
    """Windows round otherwise than single steps do. Each time a token differs, go on from the plain one."""
    tokenizer = AutoTokenizer.from_pretrained(bundled.path(name))
    model = AutoModelForCausalLM.from_pretrained(bundled.path(name), dtype=torch.bfloat16).eval()
    replayssm.enable(model, state_dtype=torch.bfloat16)
    drafter = drafter_for(kind, model, name)
    row = tokenizer(TEXTS[0])["input_ids"]
    plain, done, differences = greedy(model, row, LONG), 0, 0
    while done < LONG:
        prefix = row + plain[:done]
        (found,) = speculate(ReplayVerifier(model), drafter, [prefix], max_new_tokens=LONG - done, num_drafts=3).tokens
        same = next((i for i, pair in enumerate(zip(found, plain[done:], strict=True)) if pair[0] != pair[1]), None)
        if same is None:
            break
        logits = model(torch.tensor([prefix + found[:same]])).logits[0, -1].float()
        chosen, other = logits[found[same]], logits[plain[done + same]]
        assert abs(chosen - other) <= 2**-6 * logits.abs().max(), f"token {done + same}: {chosen} and {other}"
        done += same + 1
        differences += 1
    print(f"{name}, {kind}: {differences} of {LONG} tokens differed")
    assert differences < LONG / 8


def test_lengths_that_adapt_change_no_token(models):
    model, ids, plain = models("qwen3_5-tiny")
    replayssm.enable(model)
    adaptive = AdaptiveLength(7, GivenCosts())
    found = speculate(
        ReplayVerifier(model), NgramDrafter(), ids, max_new_tokens=NEW_TOKENS, num_drafts=7, adaptive=adaptive
    )
    assert found.tokens == plain
    replayssm.disable(model)


@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "nemotron_h", "bamba", "falcon_h1", "zamba2"])
@pytest.mark.parametrize("width", [1, 2], ids=["chain", "tree"])
def test_other_families_verify_batches_and_trees(name, width):
    """Drafts of one model by a disturbed copy of it."""
    model = build(name)
    draft = disturbed(model)
    ids = [row[mask.bool()].tolist() for row, mask in zip(*prompts(3).values(), strict=True)]
    plain = [
        model.generate(torch.tensor([row]), max_new_tokens=40, do_sample=False)[0, len(row) :].tolist() for row in ids
    ]
    drafter = ModelDrafter(ReplayVerifier(replayssm.enable(draft)))
    verifier = ReplayVerifier(replayssm.enable(model, ring_len=6))
    found = speculate(verifier, drafter, ids, max_new_tokens=40, num_drafts=3, width=width)
    assert found.tokens == plain
    assert found.statistics.accepted > 0


def test_a_window_wants_a_commit_and_room(models):
    model, ids, _ = models("qwen3_5-tiny")
    with pytest.raises(ValueError, match=r"call enable\(model\) first"):
        ReplayVerifier(model)
    replayssm.enable(model)
    with pytest.raises(ValueError, match="max_window is 17"):
        ReplayVerifier(model, max_window=17)
    verifier = ReplayVerifier(model, max_window=4)
    row = torch.tensor([ids[0]])
    verifier.prefill(row, torch.ones_like(row, dtype=torch.bool))
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"commit\(\) of a ReplayCache without a window"):
        verifier.commit(one, None)
    verifier.verify(row[:, :2], None, one)
    with pytest.raises(ValueError, match="wasn't committed"):
        verifier.verify(row[:, :2], None, one)
    verifier.commit(one, None)
    with pytest.raises(ValueError, match="T = 5"):
        verifier.verify(row[:, :5], None, one)
    replayssm.disable(model)
