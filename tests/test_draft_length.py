"""Draft length: as long as acceptance pays for, and off when it does not."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from speculation import (
    NEW_TOKENS,
    PROMPTS,
    QWEN,
    Scripted,
    TableVerifier,
    counting_table,
    drafter_of,
    model_of,
    plain,
)

from replayssm.speculate import (
    AdaptiveLength,
    GivenCosts,
    MeasuredCosts,
    RecomputingVerifier,
    speculate,
)


def settle(adaptive: AdaptiveLength, accepted: Any, steps: int = 80) -> list[int]:
    """Choices when `accepted(K)` of K drafts are accepted in each step."""
    chosen = []
    for _ in range(steps):
        drafted = adaptive.choose()
        chosen.append(drafted)
        adaptive.observe([drafted], [accepted(drafted)])
    return chosen


def test_drafts_grow_longer_while_all_are_accepted():
    assert settle(AdaptiveLength(7), lambda k: k)[-1] == 7


def test_drafts_are_as_long_as_what_is_accepted():
    chosen = settle(AdaptiveLength(7), lambda k: min(k, 2))
    assert set(chosen[-20:]) <= {2, 3}


def test_speculation_turns_itself_off_and_probes_ever_less_often():
    chosen = settle(AdaptiveLength(5, probe_after=4, longest_wait=16), lambda k: 0, steps=200)
    start = chosen.index(0)
    probes = [i for i, k in enumerate(chosen) if k and i > start]
    gaps = [b - a for a, b in pairwise(probes)]
    assert gaps[:3] == [9, 17, 17]
    assert all(chosen[i] == 2 for i in probes)
    assert chosen.count(0) > 150


def test_speculation_comes_back_when_it_pays_again():
    adaptive = AdaptiveLength(5, probe_after=4, longest_wait=8, weight=0.3)
    assert settle(adaptive, lambda k: 0, steps=60)[-3:].count(0) >= 2
    assert settle(adaptive, lambda k: k, steps=120)[-1] == 5


def test_the_same_observations_give_the_same_choices():
    def run() -> list[int]:
        generator = torch.Generator().manual_seed(4)
        draws = iter(torch.rand(10_000, generator=generator).tolist())
        return settle(AdaptiveLength(6), lambda k: next((i for i in range(k) if next(draws) > 0.6), k), steps=100)

    assert run() == run()


def test_expensive_drafts_are_not_made_and_free_ones_are():
    assert settle(AdaptiveLength(4, GivenCosts(per_token=0.6, per_draft=0.6)), lambda k: k // 2)[-1] == 0
    assert settle(AdaptiveLength(4, GivenCosts(per_token=0.0, per_draft=0.0)), lambda k: k // 2)[-1] == 4


def test_expected_tokens_follow_the_acceptance_of_each_depth():
    adaptive = AdaptiveLength(3, weight=1.0)
    adaptive.observe([3, 3, 3, 3], [3, 2, 1, 0])
    # 3 of 4 at depth 1; of those, 2 of 3; of those, 1 of 2.
    assert [round(adaptive.acceptance(d), 3) for d in (1, 2, 3)] == [0.75, 0.667, 0.5]
    assert adaptive.expected_tokens(3) == pytest.approx(1 + 3 / 4 + 2 / 4 + 1 / 4)


def test_rows_without_drafts_pay_for_the_window_of_the_others():
    adaptive = AdaptiveLength(3, weight=1.0)
    adaptive.observe([3, 0, 0, 0], [3, 0, 0, 0])
    assert adaptive.expected_tokens(1) == pytest.approx(1 + 1 / 4)


def test_measured_costs_are_medians_that_leave_out_the_first_step():
    costs = MeasuredCosts(last=3)
    costs.observe(0, 100.0)  # a warm-up
    assert costs.step(3) == GivenCosts().step(3)
    costs.observe(0, 1.0)
    costs.observe(0, 2.0)
    assert costs.step(0) == 1.5
    costs.observe(0, 400.0)  # the caller paused
    assert costs.step(0) == 2.0
    for _ in range(2):
        costs.observe(0, 1.5)
    assert costs.step(0) == 1.5
    costs.observe(4, 100.0)
    costs.observe(4, 3.5)
    assert costs.step(2) == 2.5
    assert costs.step(8) == pytest.approx(3.5 * 1.8 / 1.4)


def test_the_loop_stops_drafting_when_nothing_is_accepted():
    drafter = Scripted(lambda row, place: (place + 3) % 7)
    adaptive = AdaptiveLength(3, probe_after=10)
    found = speculate(
        TableVerifier(counting_table()), drafter, [[0]], max_new_tokens=100, num_drafts=3, adaptive=adaptive
    )
    assert found.tokens == [[(i + 1) % 7 for i in range(100)]]
    assert found.statistics.drafted_steps < 40


def test_the_loop_measures_what_its_steps_take():
    costs = MeasuredCosts()
    speculate(
        TableVerifier(counting_table()),
        Scripted(lambda row, place: (place + 1) % 7),
        [[0]],
        max_new_tokens=40,
        num_drafts=3,
        adaptive=AdaptiveLength(3, costs),
    )
    assert 0 < costs.step(3) < 1  # seconds


@pytest.mark.parametrize("kind", ["ngram", "mtp", "model"])
def test_adaptive_speculation_gives_the_plain_greedy_tokens(kind):
    found = speculate(
        RecomputingVerifier(model_of(QWEN)),
        drafter_of(kind, QWEN),
        PROMPTS,
        max_new_tokens=NEW_TOKENS[QWEN],
        num_drafts=5,
        adaptive=AdaptiveLength(5, GivenCosts(0.2, 0.2), probe_after=2, longest_wait=3),
    )
    assert found.tokens == plain(QWEN)


@pytest.mark.parametrize(
    "options",
    [{"max_drafts": 0}, {"first_guess": 1.0}, {"probe_after": 0}, {"weight": 0.0}],
    ids=str,
)
def test_adaptive_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is"):
        AdaptiveLength(**({"max_drafts": 3} | options))
