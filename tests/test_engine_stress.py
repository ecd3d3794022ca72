"""Random requests with shared prefixes, cancellations, preemptions and tiny budgets: each as if it were alone."""

import random
from dataclasses import dataclass

import pytest

from replayssm.engine.draft_length import DraftLength
from replayssm.engine.engine import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from tests.test_engine import SMALL, assert_all_is_accounted_for
from tests.token_model import VOCAB, TokenRunner, memory_for, random_prompt, token_model

ROOMS = {  # rows, snapshots, pages
    "ample": memory_for(8, 40, 900),
    "few pages": memory_for(6, 8, 70),
    "few slots": memory_for(5, 1, 200),
    "one row": memory_for(1, 3, 60),
    "no snapshots": memory_for(4, 0, 64),
}
WAYS = {
    "plain": {},
    "ahead": {"run_ahead": True},
    "speculating": {"speculate": "ngram", "num_draft": 4, "fixed_draft": True},
    "speculating at times": {"speculate": "ngram", "num_draft": 4, "run_ahead": True},
    "no cache": {"prefix_cache": False},
    "no cache, ahead": {"prefix_cache": False, "run_ahead": True},
    "invariant": {"batch_invariant": True, "run_ahead": True},
}


class LengthsByChance(DraftLength):
    """Drafts in some steps and not in others, of whatever length."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(max_drafts=4)
        self.rng = rng

    def begin(self, rows: int) -> bool:
        return self.rng.random() < 0.5

    def choose(self, counts: list[int]) -> int:
        return self.rng.randint(0, max(counts))


@dataclass
class Asked:
    """A request, and what comes of it."""

    prompt: list[int]
    params: SamplingParams
    at: int  # step
    priority: int
    cancel_after: int | None  # steps

    def __post_init__(self):
        self.tokens = [[] for _ in range(self.params.n)]
        self.reasons = [None] * self.params.n

    def take(self, update):
        assert self.reasons[update.index] is None
        self.tokens[update.index] += update.token_ids
        self.reasons[update.index] = update.finish_reason


def random_params(rng: random.Random, most: int) -> SamplingParams:
    common = {"max_tokens": rng.randrange(1, most), "n": rng.choice([1, 1, 1, 2, 3]), "ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.4:
        common["stop_token_ids"] = (rng.randrange(VOCAB),)
    if rng.random() < 0.5:
        return SamplingParams(temperature=0, **common)
    penalties = {"frequency_penalty": 0.2, "repetition_penalty": 1.1} if rng.random() < 0.4 else {}
    return SamplingParams(seed=rng.randrange(1000), temperature=0.7, top_k=rng.choice([0, 8]), **penalties, **common)


def random_requests(rng: random.Random, count: int, room: int) -> list[Asked]:
    """Prompts that begin with parts of a few texts, or with another's prompt, as chats do."""
    texts = [random_prompt(rng, room // 2) for _ in range(3)]
    asked: list[Asked] = []
    for number in range(count):
        params = random_params(rng, room // 3)
        text = rng.choice(texts) if not asked or rng.random() < 0.7 else rng.choice(asked).prompt
        prompt = text[: rng.randrange(len(text) + 1)] + random_prompt(rng, rng.randrange(1, 12))
        prompt = prompt[: room - params.max_tokens]
        cancel = rng.randrange(1, 25) if rng.random() < 0.2 else None
        asked.append(Asked(prompt, params, number // 2 + rng.randrange(8), rng.choice([0, 0, 0, 1, -2]), cancel))
    slow = SamplingParams(temperature=0, max_tokens=room // 2, ignore_eos=True)
    return [*asked, Asked(random_prompt(rng, 5), slow, at=0, priority=2, cancel_after=6)]


def serve(engine: Engine, asked: list[Asked]) -> None:
    """Add and cancel while stepping, until all is done."""
    todo = sorted(asked, key=lambda one: one.at, reverse=True)
    there: dict[str, Asked] = {}
    step = 0
    while todo or engine.has_work:
        while todo and todo[-1].at <= step:
            one = todo.pop()
            there[engine.add(one.prompt, one.params, priority=one.priority)] = one
        for update in engine.step():
            there[update.request_id].take(update)
        for name, one in there.items():
            if one.cancel_after is not None and step == one.at + one.cancel_after:
                engine.cancel(name)
        step += 1
        assert step < 400 * len(asked)


def alone(asked: list[Asked]) -> list[list[list[int]]]:
    """Each request by itself in an engine with room and without a cache."""
    engine = Engine(
        token_model(),
        EngineOptions(
            **memory_for(3, 0, 400) | SMALL | {"chunk_tokens": 512, "max_step_tokens": 2048}, prefix_cache=False
        ),
        runner=TokenRunner,
    )
    tokens = []
    for one in asked:
        (output,) = engine.generate([one.prompt], one.params)
        tokens.append([completion.token_ids for completion in output.completions])
    return tokens


def check(room: str, way: str, count: int, seed: int) -> Engine:
    rng = random.Random(seed)
    options = ROOMS[room] | SMALL | WAYS[way] | {"ring_len": rng.choice([1, 4, 5])}
    engine = Engine(token_model(), EngineOptions(**options), runner=TokenRunner)
    if engine.pace is not None:
        engine.pace.lengths = engine.launcher.lengths = LengthsByChance(rng)
    asked = random_requests(rng, count, min(engine.max_context, 150))
    serve(engine, asked)
    for one, expected in zip(asked, alone(asked), strict=True):
        for tokens, reason, whole in zip(one.tokens, one.reasons, expected, strict=True):
            if reason == "abort":
                assert tokens == whole[: len(tokens)]
            else:
                assert tokens == whole
                assert reason in ("stop", "length")
    assert_all_is_accounted_for(engine)
    return engine


@pytest.mark.parametrize(
    ("room", "way"), [(room, way) for i, room in enumerate(ROOMS) for j, way in enumerate(WAYS) if (i + j) % 2 == 0]
)
def test_each_request_is_served_as_if_it_were_alone(room, way):
    engine = check(room, way, count=12, seed=hash((len(room), len(way))))
    stats = engine.stats()
    assert stats.cancelled > 0
    cached = WAYS[way].get("prefix_cache", True)
    if cached and room in ("ample", "few pages"):
        assert stats.cached_tokens > 0
    if cached and room in ("few pages", "few slots", "one row"):
        assert stats.evictions > 0
    if room in ("few pages", "no snapshots"):
        assert (stats.preemptions > 0) == (way != "invariant")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", ROOMS)
def test_thousands_of_requests_are_served_as_if_they_were_alone(room, way, seed):
    check(room, way, count=200, seed=seed)
