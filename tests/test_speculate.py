"""Speculation without a cache: acceptance, sampling and the loop, over models that run whole texts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from speculation import (
    GRANITE,
    KIMI,
    NEW,
    NEW_TOKENS,
    PROMPTS,
    QWEN,
    ROWS,
    VOCAB,
    Scripted,
    TableVerifier,
    counting_table,
    drafter_of,
    model_of,
    plain,
    tables,
)
from torch import Tensor

from replayssm import bundled
from replayssm.speculate import (
    Acceptance,
    AdaptiveLength,
    Drafter,
    ModelDrafter,
    MtpDrafter,
    NgramDrafter,
    RecomputingVerifier,
    Sampling,
    accept_greedy,
    accept_point_mass,
    accept_rejection,
    loop,
    speculate,
)
from replayssm.speculate.drafter import candidates
from replayssm.speculate.sampling import draw


def walk_by_hand(chosen: list[int], tokens: list[int], parents: list[int], num_tokens: int) -> tuple[list[int], int]:
    """Path and next token, one step at a time."""
    path = [0]
    while True:
        wanted = chosen[path[-1]]
        children = [i for i in range(1, num_tokens) if parents[i] == path[-1] and tokens[i] == wanted]
        if not children:
            return path, wanted
        path.append(children[0])


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_greedy_acceptance_is_the_walk_along_the_likeliest_tokens(tree):
    generator = torch.Generator().manual_seed(0)
    batch, length, vocab = 200, 9, 3
    logits = torch.randn(batch, length, vocab, generator=generator)
    tokens = torch.randint(vocab, (batch, length), generator=generator)
    num_tokens = torch.randint(0, length + 1, (batch,), generator=generator, dtype=torch.int32)
    parents = [[-1, *(int(torch.randint(i, (), generator=generator)) for i in range(1, length))] for _ in range(batch)]
    if not tree:
        parents = [list(range(-1, length - 1))] * batch
    found = accept_greedy(logits, tokens, torch.tensor(parents, dtype=torch.int32) if tree else None, num_tokens)
    assert (found.num_accepted.dtype, found.path.dtype) == (torch.int32, torch.int32)
    places = torch.arange(length)
    assert (found.path >= places).all()
    longest = 0
    for row in range(batch):
        if num_tokens[row] == 0:
            assert found.num_accepted[row] == 0
            continue
        path, following = walk_by_hand(
            logits[row].argmax(-1).tolist(), tokens[row].tolist(), parents[row], int(num_tokens[row])
        )
        assert found.path[row, : found.num_accepted[row]].tolist() == path
        assert found.next_token[row] == following
        longest = max(longest, len(path))
    assert longest >= 4, "the seed must give long paths, too"


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_acceptance_never_waits_for_the_device(tree):
    # On the meta device, asking for any value is an error.
    where = {"device": "meta"}
    tokens, num_tokens = torch.zeros(2, 4, dtype=torch.int64, **where), torch.zeros(2, dtype=torch.int32, **where)
    parents = torch.zeros(2, 4, dtype=torch.int32, **where) if tree else None
    probs, draft_probs = torch.zeros(2, 4, 5, **where), torch.zeros(2, 3, 5, **where)
    for found in (
        accept_greedy(probs, tokens, parents, num_tokens),
        accept_point_mass(probs, tokens, parents, num_tokens),
        accept_rejection(probs, draft_probs, tokens, parents, num_tokens),
    ):
        assert [tuple(x.shape) for x in found] == [(2,), (2, 4), (2,)]


def test_unused_places_and_idle_rows_do_not_matter():
    logits = torch.full((2, 3, 4), float("nan"))
    logits[0, 0] = torch.tensor([0.0, 1, 0, 0])
    tokens = torch.tensor([[2, 1, 1], [0, 0, 0]])
    found = accept_greedy(logits, tokens, None, torch.tensor([1, 0], dtype=torch.int32))
    assert found.num_accepted.tolist() == [1, 0]
    assert found.next_token[0] == 1
    found = accept_rejection(
        torch.where(logits.isnan(), logits, torch.tensor([0.0, 1, 0, 0])),
        torch.full((2, 2, 4), float("nan")),
        tokens,
        None,
        torch.tensor([1, 0], dtype=torch.int32),
    )
    assert found.num_accepted.tolist() == [1, 0]
    assert found.next_token[0] == 1


def chi_square_excess(tokens: list[list[int]], table: Tensor) -> float:
    """How far the joint counts of NEW tokens after token 0 are from the table's chain, in standard deviations.

    The cube root of chi-square over its degrees of freedom is nearly normal (Wilson and Hilferty).
    """
    flat = torch.tensor(tokens) @ torch.tensor([VOCAB**i for i in reversed(range(NEW))])
    counts = flat.bincount(minlength=VOCAB**NEW).double()
    expected = table[0].double()
    for _ in range(NEW - 1):
        expected = (expected.view(-1, VOCAB, 1) * table.double()).reshape(-1)
    expected = expected * len(tokens)
    kept = expected > 0
    if counts[~kept].sum():
        return math.inf  # a token of probability 0 was drawn
    assert expected[kept].min() > 5
    degrees = int(kept.sum()) - 1
    statistic = ((counts - expected)[kept].square() / expected[kept]).sum().item()
    variance = 2 / (9 * degrees)
    return ((statistic / degrees) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)


def sampled(drafter: Drafter | None, num_drafts: int, width: int):
    target = tables()[0]
    generator = torch.Generator().manual_seed(1)
    return speculate(
        TableVerifier(target),
        drafter,
        [[1, 2, 3, 0, 2, 1, 0, 3, 1, 0]] * ROWS,
        max_new_tokens=NEW,
        num_drafts=num_drafts,
        width=width,
        sampling=Sampling(),
        generator=generator,
    )


DRAFTERS = {
    "distribution": lambda: ModelDrafter(TableVerifier(tables()[1])),
    "likeliest": lambda: ModelDrafter(TableVerifier(tables()[1]), sample=False),
    "ngram": lambda: NgramDrafter(),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("num_drafts", "width"), [(1, 1), (2, 1), (2, 2), (2, 3)], ids=["K1", "K2", "tree2", "tree3"])
def test_sampled_speculation_leaves_the_distribution_unchanged(drafter, num_drafts, width):
    found = sampled(DRAFTERS[drafter](), num_drafts, width)
    assert chi_square_excess(found.tokens, tables()[0]) < 3.5
    assert found.statistics.accepted > 0.15 * ROWS, "the drafts must matter"


def keeps_every_draft(probs, draft_probs, tokens, parents, num_tokens, generator=None):
    chosen = torch.cat([tokens[:, 1:], draw(probs, generator)[:, -1:]], 1)
    return loop.accept_greedy(torch.nn.functional.one_hot(chosen, VOCAB), tokens, None, num_tokens)


def draws_from_p_after_a_rejection(probs, draft_probs, tokens, parents, num_tokens, generator=None):
    found = accept_rejection(probs, draft_probs, tokens, parents, num_tokens, generator)
    last = found.path.gather(1, (found.num_accepted.long() - 1).clamp_min(0)[:, None])
    return Acceptance(found.num_accepted, found.path, draw(probs, generator).gather(1, last.long())[:, 0])


def forgets_that_siblings_differ(probs, draft_probs, tokens, parents, num_tokens, generator=None):
    """Takes each sibling to be drawn from the first one's distribution."""
    first = draft_probs[:, :1].expand_as(draft_probs)
    return accept_rejection(probs, first, tokens, parents, num_tokens, generator)


@pytest.mark.parametrize(
    ("rule", "width"),
    [(keeps_every_draft, 1), (draws_from_p_after_a_rejection, 1), (forgets_that_siblings_differ, 3)],
    ids=lambda value: getattr(value, "__name__", f"width{value}"),
)
def test_the_chi_square_test_finds_a_wrong_rule(monkeypatch, rule, width):
    # A draft model that is further off shows more.
    sharper = (tables()[0] + 0.02) ** 3
    sharper /= sharper.sum(1, keepdim=True)
    found = sampled(ModelDrafter(TableVerifier(sharper)), 1, width)
    assert chi_square_excess(found.tokens, tables()[0]) < 3.5
    monkeypatch.setattr(loop, "accept_rejection", rule)
    found = sampled(ModelDrafter(TableVerifier(sharper)), 1, width)
    assert chi_square_excess(found.tokens, tables()[0]) > 10


def test_plain_sampling_passes_the_chi_square_test():
    assert chi_square_excess(sampled(None, 1, 1).tokens, tables()[0]) < 3.5


def test_a_draft_from_the_target_itself_is_always_kept():
    found = sampled(ModelDrafter(TableVerifier(tables()[0])), 2, 1)
    assert found.statistics.tokens_per_step == NEW - 1


def test_candidates_are_drawn_without_replacement_even_when_too_few_have_a_chance():
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(0))
    tokens, drawn_from = candidates(logits, 3, Sampling(top_k=1), torch.Generator().manual_seed(0))
    assert all(len(set(row)) == 3 for row in tokens.tolist())
    assert torch.allclose(drawn_from.sum(-1), torch.ones(50, 3))
    assert (drawn_from.gather(2, tokens[..., None]) > 0).all()
    assert tokens[:, 0].equal(logits.argmax(-1))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers_generate(settings):
    model = model_of(GRANITE)
    ids = torch.tensor([PROMPTS[0]])
    torch.manual_seed(0)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        max_new_tokens=1,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        **({"top_k": 0} | settings),
    )
    found = Sampling(**settings).probabilities(out.logits[0])
    assert torch.allclose(found, out.scores[0].softmax(-1), atol=1e-6)
    assert 0 < (found > 0).sum() <= found.numel()


@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0}, {"min_p": 1.5}], ids=str
)
def test_a_sampling_setting_out_of_range_is_named(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} is"):
        Sampling(**settings)


SHAPES = [(1, 1), (3, 1), (7, 1), (3, 2), (7, 3)]
MODELS = [(QWEN, "ngram"), (QWEN, "mtp"), (QWEN, "model"), (GRANITE, "ngram"), (GRANITE, "model")]
CASES = [(*model, *shape) for model in MODELS for shape in SHAPES] + [(KIMI, "ngram", 3, 1), (KIMI, "ngram", 3, 2)]
IN_CI = [case for case in CASES if case[2] == 3 and case != (KIMI, "ngram", 3, 1)]


@pytest.mark.parametrize(
    ("name", "kind", "num_drafts", "width"),
    [
        pytest.param(*case, marks=[] if case in IN_CI else pytest.mark.thorough, id="{}-{}-K{}w{}".format(*case))
        for case in CASES
    ],
)
def test_greedy_speculation_gives_the_plain_greedy_tokens(name, kind, num_drafts, width):
    found = speculate(
        RecomputingVerifier(model_of(name)),
        drafter_of(kind, name),
        PROMPTS,
        max_new_tokens=NEW_TOKENS[name],
        num_drafts=num_drafts,
        width=width,
    )
    assert found.tokens == plain(name)
    assert found.statistics.accepted > 0


def test_plain_greedy_tokens_are_those_of_transformers_generate():
    model, prompt = model_of(GRANITE), torch.tensor([PROMPTS[0]])
    expected = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=NEW_TOKENS[GRANITE],
        eos_token_id=None,
    )
    assert plain(GRANITE)[0] == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("kind", ["ngram", "mtp", "model"])
def test_a_row_does_not_depend_on_its_neighbours(kind, width):
    together = plain(QWEN)
    for row, prompt in enumerate(PROMPTS[1:], start=1):
        alone = speculate(
            RecomputingVerifier(model_of(QWEN)), drafter_of(kind, QWEN), [prompt], max_new_tokens=12, width=width
        )
        assert alone.tokens[0] == together[row][:12]


def test_right_drafts_give_one_more_token_than_there_are_drafts():
    drafter = Scripted(lambda row, place: (place + 1 + row) % 7)
    found = speculate(TableVerifier(counting_table()), drafter, [[0], [1]], max_new_tokens=17, num_drafts=3)
    assert found.tokens == [[(i + 1 + row) % 7 for i in range(17)] for row in range(2)]
    statistics = found.statistics
    assert (statistics.tokens_per_step, statistics.acceptance_length, statistics.steps) == (4, 4, 4)
    assert statistics.accepted_at == [8, 8, 8]
    assert (statistics.new_tokens, statistics.drafted, statistics.accepted) == (34, 24, 24)


def test_wrong_drafts_cost_steps_but_no_token():
    drafter = Scripted(lambda row, place: (place + 3) % 7)
    found = speculate(TableVerifier(counting_table()), drafter, [[0]], max_new_tokens=9, num_drafts=3)
    assert found.tokens == [[(i + 1) % 7 for i in range(9)]]
    assert (found.statistics.tokens_per_step, found.statistics.accepted) == (1, 0)


def test_rows_that_accept_differently_stay_apart():
    drafter = Scripted(lambda row, place: (place + 1) % 7 if row == 0 or place % 3 else 0)
    found = speculate(TableVerifier(counting_table()), drafter, [[0], [0]], max_new_tokens=30, num_drafts=5)
    assert found.tokens[0] == found.tokens[1] == [(i + 1) % 7 for i in range(30)]
    assert found.statistics.steps > 29 / 6


@pytest.mark.parametrize("num_drafts", [1, 3, 6])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 8])
def test_no_row_gets_more_than_max_new_tokens(num_drafts, max_new_tokens):
    drafter = Scripted(lambda row, place: (place + 1) % 7)
    found = speculate(
        TableVerifier(counting_table()), drafter, [[0]], max_new_tokens=max_new_tokens, num_drafts=num_drafts
    )
    assert found.tokens == [[(i + 1) % 7 for i in range(max_new_tokens)]]
    # As no draft is longer than what is wanted, nothing was cut off either.
    assert found.statistics.new_tokens == max_new_tokens


def test_a_row_ends_after_an_end_token_in_the_middle_of_a_window_and_others_go_on():
    drafter = Scripted(lambda row, place: (place + 1 + row) % 7)
    found = speculate(
        TableVerifier(counting_table()), drafter, [[0], [1]], max_new_tokens=12, num_drafts=5, eos_token_ids=[3]
    )
    assert found.tokens == [[1, 2, 3], [2, 3]]
    found = speculate(
        TableVerifier(counting_table()),
        drafter,
        [[0], [1]],
        max_new_tokens=12,
        num_drafts=5,
        stop=lambda row, tokens: row == 0 and tokens[-2:] == [2, 3],
    )
    assert found.tokens == [[1, 2, 3], [(i + 2) % 7 for i in range(12)]]


def test_an_end_token_from_the_prefill_ends_a_row_before_any_window():
    found = speculate(TableVerifier(counting_table()), NgramDrafter(), [[0]], max_new_tokens=5, eos_token_ids=[1])
    assert found.tokens == [[1]]
    assert found.statistics.steps == 0


def test_the_callback_gets_every_token_once_in_order():
    heard: list[list[int]] = [[], []]
    calls = []

    def on_tokens(row: int, tokens: list[int]) -> None:
        assert tokens
        heard[row] += tokens
        calls.append(len(tokens))

    drafter = Scripted(lambda row, place: (place + 1 + row) % 7)
    found = speculate(
        TableVerifier(counting_table()), drafter, [[0], [1]], max_new_tokens=11, num_drafts=4, on_tokens=on_tokens
    )
    assert heard == found.tokens
    assert max(calls) == 5


def test_a_drafter_serves_one_batch_after_another():
    drafter = NgramDrafter()
    first = speculate(RecomputingVerifier(model_of(GRANITE)), drafter, PROMPTS, max_new_tokens=6)
    second = speculate(RecomputingVerifier(model_of(GRANITE)), drafter, PROMPTS[:1], max_new_tokens=6)
    assert second.tokens == first.tokens[:1]


class Untouchable(TableVerifier):
    def prefill(self, ids, mask):
        pytest.fail("something ran before the error")


def refuse(match: str, drafter: Drafter | None = None, prompts: Any = ((0,),), **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        speculate(
            Untouchable(counting_table(), max_window=8),
            drafter or NgramDrafter(),
            prompts,
            **({"max_new_tokens": 4} | options),
        )
    assert "\n" not in str(caught.value)


def test_what_cannot_work_is_refused_before_anything_runs():
    refuse("at most 8 tokens", num_drafts=8)
    refuse("num_drafts is 0", num_drafts=0)
    refuse("width is 0", width=0)
    refuse("max_new_tokens is 0", max_new_tokens=0)
    refuse("prompt is empty", prompts=[[1], []])
    refuse("max_new_tokens is 2.5: a whole number of at least 1 is wanted", max_new_tokens=2.5)
    refuse("prompt is empty", prompts=[])
    refuse("prompts has 0: a list of token ids for each row is wanted", prompts=[0, 1])
    refuse("prompts has 'text'", prompts=["text"])
    refuse("a prompt has 7: token ids from 0 to 6 are wanted", prompts=[[0, 7]])
    refuse("a prompt has -1", prompts=[[-1]])
    refuse("a prompt has 0.5", prompts=[[0.5]])
    refuse("adaptive.max_drafts is 5", adaptive=AdaptiveLength(5))
    refuse("draft model has 4 tokens, the target 7", ModelDrafter(TableVerifier(tables()[0])))
    refuse("windows of at most 2", ModelDrafter(TableVerifier(counting_table(), max_window=2)), num_drafts=4)
    refuse("gives_hidden", MtpDrafter(model_of(QWEN), bundled.path(QWEN)))
    verifier = TableVerifier(counting_table())
    with pytest.raises(ValueError, match="needs one of its own"):
        speculate(verifier, ModelDrafter(verifier), [[0]], max_new_tokens=4)
