"""The loads of whole requests: prompts are computed, or taken from the prefix cache, and answers decoded."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from replayssm.bench.engines import ENGINES, Tokens, check_ends, engines, random_tokens
from replayssm.bench.rows import SHARED_PREFIX, Row, milliseconds, new_row, said, setting
from replayssm.engine.engine import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.loading import LoadedModel

if TYPE_CHECKING:
    from replayssm.bench.e2e import Options

logger = logging.getLogger(__name__)

SHARED = 0.75  # of a prompt, in the load with shared prefixes


@dataclass(frozen=True)
class Served:
    """One turn of an engine; times are medians over its requests."""

    tokens_per_s: float
    ttft: float
    tpot: float
    cached_tokens: float
    tokens_per_step: float | None


def point(loaded: LoadedModel, options: Options, load: str) -> list[Row]:
    """Rows of one load: in each round the engines serve the same new prompts in turn. The first round doesn't count."""
    wanted = {name: _engine_options(options, name) for name in ENGINES if name in options.contenders}
    rows = {name: new_row(loaded, options, name, load, options.requests) for name in wanted}
    turns: dict[str, list[Served]] = {name: [] for name in wanted}
    try:
        with engines(loaded, wanted) as made:
            for name, engine in made.items():
                rows[name] |= setting(engine)
            for number in range(1 + options.rounds):
                # In turn each of them goes first: caches and clocks are not what the one before finds.
                for name, engine in list(made.items())[:: 1 if number % 2 else -1]:
                    turns[name].append(
                        _serve(engine, _prompts(options, load, engine.runner.vocab_size, number), options)
                    )
        for name, row in rows.items():
            row.update(_figures(turns[name][1:]))
            if "no-replay" in turns and name != "no-replay":
                row["ttft_ratio"] = _ttft_ratio(turns[name][1:], turns["no-replay"][1:])
    except Exception as error:  # out of memory, mostly: other points are still to be measured
        logger.exception("load %s", load)
        for row in rows.values():
            row["error"] = said(error)
    return list(rows.values())


def _engine_options(options: Options, name: str) -> EngineOptions:
    return EngineOptions(
        ring_len=options.ring_len,
        state_dtype=options.state_dtype,
        max_rows=options.requests,
        max_context=options.prompt_tokens + options.new_tokens,
        replay=name != "no-replay",
        speculate="ngram" if name == "speculate" else None,
        num_draft=options.num_draft,
        backend=options.backend,
    )


def _prompts(options: Options, load: str, vocab_size: int, number: int) -> list[Tokens]:
    """Prompts of a round, which no other round has; what they share is the same in all rounds."""
    shared = int(SHARED * options.prompt_tokens) if load == SHARED_PREFIX else 0
    prefix = random_tokens(vocab_size, shared, seed=0)
    seeds = range(1 + number * options.requests, 1 + (number + 1) * options.requests)
    return [prefix + random_tokens(vocab_size, options.prompt_tokens - shared, seed) for seed in seeds]


def _serve(engine: Engine, prompts: list[Tokens], options: Options) -> Served:
    params = SamplingParams(max_tokens=options.new_tokens, temperature=0.0, ignore_eos=True)
    before = engine.stats()
    start = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - start
    after = engine.stats()
    check_ends(output.completions[0] for output in outputs)
    windows, accepted = after.windows - before.windows, after.accepted - before.accepted
    later = max(1, options.new_tokens - 1)
    return Served(
        tokens_per_s=sum(len(output.completions[0].token_ids) for output in outputs) / seconds,
        ttft=median(output.ttft_seconds for output in outputs),
        tpot=median((output.seconds - output.ttft_seconds) / later for output in outputs),
        cached_tokens=median(output.cached_tokens for output in outputs),
        tokens_per_step=1 + accepted / windows if windows else None,
    )


def _ttft_ratio(turns: list[Served], others: list[Served]) -> float:
    """The median over the rounds: in each, both had the same prompts, and the host the same speed, which drifts."""
    return round(median(turn.ttft / other.ttft for turn, other in zip(turns, others, strict=True)), 3)


def _figures(turns: list[Served]) -> dict[str, float | None]:
    accepted = [turn.tokens_per_step for turn in turns if turn.tokens_per_step is not None]
    return {
        "tokens_per_s": round(median(turn.tokens_per_s for turn in turns), 1),
        "ttft_ms": milliseconds(median(turn.ttft for turn in turns)),
        "tpot_ms": milliseconds(median(turn.tpot for turn in turns)),
        "cached_tokens": int(median(turn.cached_tokens for turn in turns)),
        "tokens_per_step": round(median(accepted), 2) if accepted else None,
    }
