"""How many tokens the engine drafts: what pays by what steps take, and never a token changed."""

from __future__ import annotations

import random

import pytest

from replayssm.engine.draft_length import FIRST_WAIT, LONGEST_WAIT, PLAIN_STEPS, DraftLength, Pace
from replayssm.engine.engine import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from tests.test_engine import SMALL, engine_with
from tests.token_model import TokenRunner, greedy, memory_for, random_prompt, token_model

# Milliseconds of a plain step and of a window of four tokens on an H200 with a model of four billion parameters.
STEPS = {1: (6.2, 7.2), 8: (6.8, 8.8), 32: (8.0, 12.4), 128: (11.6, 30.4), 512: (26.4, 130.0)}


class World:
    """An engine's steps as a :class:`DraftLength` sees them: rows that all have three drafts, and what steps take."""

    def __init__(self, rows: int, chance: float, seed: int = 0) -> None:
        self.lengths, self.rows, self.chance = DraftLength(3), rows, chance
        self.plain, self.window = STEPS[rows]
        self.dice = random.Random(seed)
        self.tokens = self.seconds = 0.0
        self.windows = 0

    def run(self, steps: int) -> float:
        """How many times the tokens per second of plain steps it has made."""
        self.tokens = self.seconds = self.windows = 0
        for _ in range(steps):
            drafts = self.lengths.choose([3] * self.rows) if self.lengths.begin(self.rows) else 0
            accepted = [self._accepted(drafts) for _ in range(self.rows)] if drafts else [0] * self.rows
            took = self.window if drafts else self.plain
            self.lengths.took(self.rows, drafts, took)
            if drafts:
                self.windows += 1
                self.lengths.saw([drafts] * self.rows, accepted)
            self.tokens += self.rows + sum(accepted)
            self.seconds += took
        return self.tokens / self.seconds / (self.rows / self.plain)

    def _accepted(self, drafts: int) -> int:
        right = 0
        while right < drafts and self.dice.random() < self.chance:
            right += 1
        return right


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_drafting_is_hardly_ever_slower_than_plain_steps(rows, chance):
    world = World(rows, chance)
    assert world.run(400) > 0.95  # it has to find out first
    assert world.run(1000) > 0.98


@pytest.mark.parametrize(("rows", "chance", "least"), [(1, 0.9, 2.7), (8, 0.9, 2.4), (32, 0.8, 1.75), (128, 0.9, 1.25)])
def test_windows_run_where_they_pay(rows, chance, least):
    world = World(rows, chance)
    assert world.run(1000) > least
    assert world.windows > 900


@pytest.mark.parametrize(("rows", "chance"), [(8, 0.05), (32, 0.3), (128, 0.6), (512, 1.0)])
def test_windows_are_rare_where_they_do_not_pay(rows, chance):
    world = World(rows, chance)
    world.run(800)
    assert world.windows < 40
    world.run(800)
    assert 0 < world.windows < 12  # it still looks, since that may change


def test_drafts_that_become_right_are_taken_up_again():
    world = World(32, 0.1)
    world.run(1000)
    world.chance = 0.9
    world.run(LONGEST_WAIT + 50)
    assert world.run(500) > 1.8


def test_drafts_that_are_no_longer_right_are_left():
    world = World(32, 0.9)
    assert world.run(500) > 1.8
    world.chance = 0.05
    world.run(20)
    assert world.run(1000) > 0.97


def test_batches_of_different_size_are_judged_by_themselves():
    lengths = DraftLength(3)
    for rows in (1, 128):
        for _ in range(PLAIN_STEPS):
            assert not lengths.begin(rows)
            lengths.took(rows, 0, 1.0)
        for _ in range(2):
            lengths.took(rows, 3, 1.1 if rows == 1 else 5.0)
    assert lengths.choose([3]) == 3
    assert lengths.choose([3] * 128) == 0
    assert lengths.begin(1)
    assert not lengths.begin(128)
    assert lengths.choose([3]) == 3


def test_a_pause_of_the_caller_does_not_make_windows_pay():
    world, windows = World(8, 0.0), 0
    for _ in range(20):
        world.run(16)
        windows += world.windows
        world.lengths.took(world.rows, 0, 100 * world.plain)
    assert windows < 20


def test_the_first_steps_have_no_drafts_so_that_they_are_known():
    lengths = DraftLength(3)
    assert [lengths.begin(4) for _ in range(PLAIN_STEPS + 1)] == [False] * PLAIN_STEPS + [True]


def test_a_drafter_with_nothing_to_say_is_asked_again_after_a_while():
    lengths = DraftLength(3)
    for _ in range(PLAIN_STEPS):
        lengths.begin(2)
    asked = []
    for step in range(200):
        if lengths.begin(2):
            asked.append(step)
            assert lengths.choose([0, 0]) == 0
    assert asked[:8] == [0, 1, 2, 3, *(4 + FIRST_WAIT + step for step in range(4))]
    assert len(asked) < 20


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Noted(DraftLength):
    def __init__(self) -> None:
        super().__init__(3)
        self.seen: list[tuple[int, int, float]] = []

    def took(self, rows: int, num_drafts: int, seconds: float) -> None:
        self.seen.append((rows, num_drafts, seconds))


def steps_of(pace: Pace, clock: Clock, steps: list[tuple[float, int, int, bool, bool]]) -> None:
    """Steps of so many seconds, rows and drafts, that ran ahead or not, with drafts in mind or not."""
    for seconds, rows, num_drafts, ahead, drafting in steps:
        clock.now += 100.0  # whoever steps the engine does other things in between
        pace.begin()
        clock.now += seconds
        pace.end(rows, num_drafts, ahead=ahead, drafting=drafting)


def test_steps_that_are_read_at_once_take_what_lies_between_their_begin_and_end():
    clock, lengths = Clock(), Noted()
    steps_of(Pace(lengths, clock), clock, [(2.0, 5, 3, False, True), (1.0, 5, 0, False, False)])
    assert lengths.seen == [(5, 3, 2.0), (5, 0, 1.0)]


def test_steps_that_run_ahead_take_what_lies_between_two_ends():
    clock, lengths = Clock(), Noted()
    steps_of(Pace(lengths, clock), clock, [(2.0, 5, 0, True, False)] * 3)
    assert lengths.seen == [(5, 0, 102.0)] * 2


def test_steps_that_do_other_things_or_find_no_drafts_are_no_measure():
    clock, lengths = Clock(), Noted()
    steps = [(2.0, 0, 0, True, False), (2.0, 5, 0, True, False), (3.0, 5, 0, False, True), (1.0, 0, 0, False, False)]
    steps_of(Pace(lengths, clock), clock, steps)
    assert lengths.seen == []


# In the engine


class TimedRunner(TokenRunner):
    """Its steps take what those of an H200 do, by a clock that it moves."""

    clock: Clock
    window = 8.8

    def decode(self, *given):
        self.clock.now += 6.8
        return super().decode(*given)

    def verify(self, *given):
        self.clock.now += self.window
        return super().verify(*given)


def timed_engine(monkeypatch: pytest.MonkeyPatch, window: float, **options: object) -> Engine:
    clock = Clock()
    monkeypatch.setattr(TimedRunner, "clock", clock, raising=False)
    monkeypatch.setattr(TimedRunner, "window", window)
    wanted = memory_for(8, 8, 800) | SMALL | {"max_step_tokens": 96, "speculate": "ngram"} | options
    engine = Engine(token_model(context=700), EngineOptions(**wanted), runner=TimedRunner)
    assert engine.pace is not None
    engine.pace.clock = clock
    return engine


def repetitive(count: int) -> list[list[int]]:
    """Prompts whose continuations they hold already."""
    beginnings = [random_prompt(random.Random(seed), 9) for seed in range(40)]
    whole = [[*one, *greedy(one, 150)] for one in beginnings]
    return [one for one in whole if len(one) > 150][:count]


LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


@pytest.mark.parametrize("ahead", [False, True], ids=["in-step", "ahead"])
@pytest.mark.parametrize("window", [6.9, 40.0], ids=["cheap", "dear"])
def test_the_engine_drafts_where_windows_are_cheap_and_gives_the_same_tokens(monkeypatch, window, ahead):
    prompts = repetitive(6)
    assert len(prompts) == 6
    expected = [output.completions[0].token_ids for output in engine_with().generate(prompts, LONG)]
    engine = timed_engine(monkeypatch, window, run_ahead=ahead)
    assert [output.completions[0].token_ids for output in engine.generate(prompts, LONG)] == expected
    stats = engine.stats()
    if window < 10:
        assert stats.accepted > stats.generated_tokens / 6
    else:
        assert stats.accepted < stats.generated_tokens / 12


def test_a_step_tells_of_all_its_rows_those_without_drafts_too(monkeypatch):
    engine = timed_engine(monkeypatch, 6.9)
    told = []
    monkeypatch.setattr(engine.pace.lengths, "saw", lambda drafted, accepted: told.append((drafted, accepted)))
    prompts = [*repetitive(2), *(random_prompt(random.Random(seed), 4) for seed in range(4))]
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert all(len(drafted) == len(accepted) for drafted, accepted in told)
    assert any(min(drafted) == 0 and max(drafted) > 0 for drafted, _ in told)
    assert max(len(drafted) for drafted, _ in told) == 6


@pytest.mark.parametrize("stop", [(), (" 7", " 11 3")], ids=["by tokens", "by text"])
def test_text_that_is_made_a_step_later_is_the_same(stop):
    prompts = [random_prompt(random.Random(seed), 12) for seed in range(8)]
    params = SamplingParams(temperature=0, max_tokens=30, stop=stop, logprobs=1, n=2)
    outputs = []
    for options in ({}, {"run_ahead": True}):
        engine = engine_with(speculate="ngram", fixed_draft=True, **options)
        outputs.append([output.completions for output in engine.generate(prompts, params)])
        assert not engine.requests
    assert outputs[0] == outputs[1]
    reasons = {completion.finish_reason for completions in outputs[0] for completion in completions}
    assert reasons == {"stop", "length"}


def test_what_was_read_and_not_told_is_told_before_a_cancellation():
    engine = engine_with(speculate="ngram", fixed_draft=True, run_ahead=True)
    prompt = random_prompt(random.Random(3), 12)
    name = engine.add(prompt, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    updates = [update for _ in range(6) for update in engine.step()]
    read = len(engine.requests[name].sequences[0].tokens) - len(prompt)
    assert read > sum(len(update.token_ids) for update in updates)
    engine.cancel(name)
    updates += engine.step()
    assert sum(len(update.token_ids) for update in updates) == read
    assert [update.finish_reason for update in updates if update.finish_reason] == ["abort"]


def test_the_last_update_of_a_sample_that_is_done_comes_though_the_next_step_fails(monkeypatch):
    engine = engine_with(speculate="ngram", fixed_draft=True, run_ahead=True)
    short = engine.add([5, 6, 7], SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    long = engine.add([8, 9], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))

    def broken(*_):
        raise RuntimeError("out of order")

    monkeypatch.setattr(engine.runner, "prefill", broken)
    with pytest.raises(RuntimeError):
        engine.step()
    ends = {update.request_id: update.finish_reason for update in engine.take_updates()}
    assert ends == {short: "length", long: "error"}
    assert not engine.requests
