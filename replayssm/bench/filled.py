"""The filled load: decode steps of rows whose contexts are copies of one that was computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean, median
from typing import TYPE_CHECKING

import torch

from replayssm.bench.engines import (
    ENGINES,
    clear,
    computed_context,
    engines,
    fill,
    free_memory,
    random_tokens,
    row_tensors,
    stepped,
    synchronize,
)
from replayssm.bench.rows import FILLED, Row, milliseconds, new_row, said, setting
from replayssm.bench.set_windows import set_windows
from replayssm.bench.timing import Walk, time_in_turns
from replayssm.engine.engine import Engine
from replayssm.engine.options import EngineOptions
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Saved
from replayssm.loading import LoadedModel

if TYPE_CHECKING:
    from replayssm.bench.e2e import Options

logger = logging.getLogger(__name__)

MOST_SPECULATING = 128  # rows; beyond them the matrix products alone make windows no gain
SEED = 1
DRAWN = SamplingParams(temperature=1.0, top_p=0.95, seed=0)


@dataclass(frozen=True)
class Turn:
    """What one engine did while it was its turn: so many steps, new tokens, in so many seconds.

    Attributes:
        waited: of these seconds, those in which the host had nothing to do but wait for the device.
    """

    steps: int
    tokens: int
    seconds: float
    waited: float


def points(loaded: LoadedModel, options: Options) -> Iterator[list[Row]]:
    """The rows of each context and batch.

    The engines are made once, for the largest batch; if there is no room for them, that batch is left out.
    """
    left = [(filling, batch) for filling in options.filled for batch in options.batches]
    while left:
        largest = max(batch for _, batch in left)
        wanted = _engine_options(options.filled[0], largest)
        try:
            with engines(loaded, wanted) as made:
                if "speculate" in made:
                    set_windows(made["speculate"], options.kept)
                contexts: dict[int, Saved] = {}
                while left:
                    filling, batch = left[0]
                    if filling.prompt_tokens not in contexts:
                        contexts = {filling.prompt_tokens: _context(loaded, made, filling.prompt_tokens)}
                    yield _point(loaded, filling, made, contexts[filling.prompt_tokens], batch)
                    left.pop(0)
        except Exception as error:
            logger.exception("no engines for %d rows", largest)
            for filling in options.filled:
                if (filling, largest) in left:
                    left.remove((filling, largest))
                    yield [new_row(loaded, filling, name, FILLED, largest) | {"error": said(error)} for name in wanted]


def _context(loaded: LoadedModel, made: dict[str, Engine], num_tokens: int) -> Saved:
    """States, keys and values of so many random tokens."""
    vocab_size = loaded.model.get_output_embeddings().weight.shape[0]
    return computed_context(next(iter(made.values())), random_tokens(vocab_size, num_tokens, SEED))


def _engine_options(options: Options, largest: int) -> dict[str, EngineOptions]:
    """Of each contender; prefixes aren't kept, as nothing here has any."""
    made = {}
    for name in ENGINES:
        if name in options.contenders:
            speculates = name == "speculate"
            rows = min(largest, MOST_SPECULATING) if speculates else largest
            window = options.window if speculates else 1
            made[name] = EngineOptions(
                ring_len=options.ring_len,
                state_dtype=options.state_dtype,
                max_rows=rows,
                max_context=options.prompt_tokens + options.filled_tokens(speculates=speculates) + window,
                prefix_cache=False,
                replay=name != "no-replay",
                speculate="ngram" if speculates else None,
                num_draft=options.num_draft,
                fixed_draft=not options.adapt,
                backend=options.backend,
            )
    return made


def _point(loaded: LoadedModel, options: Options, made: dict[str, Engine], context: Saved, batch: int) -> list[Row]:
    """Rows of the engines at one batch: all are filled, then take turns, first with steps, then with forwards alone."""
    taking_part = {name: engine for name, engine in made.items() if batch <= engine.plan.max_rows}
    rows = {name: new_row(loaded, options, name, FILLED, batch) for name in taking_part}
    try:
        for name, engine in taking_part.items():
            new_tokens = options.filled_tokens(speculates=name == "speculate")
            params = DRAWN if options.sampled else None
            fill(engine, context, batch, new_tokens, groups=min(batch, options.ring_len), params=params)
        turns = _take_turns(taking_part, options, loaded.device)
        forwards = _time_forwards(taking_part, options)
        for name, engine in taking_part.items():
            rows[name] |= setting(engine) | _figures(turns[name], forwards[name], batch)
    except Exception as error:  # out of memory, mostly: other points are still to be measured
        logger.exception("%d rows", batch)
        for row in rows.values():
            row["error"] = said(error)
    finally:
        for engine in taking_part.values():
            clear(engine)
        free_memory()
    return list(rows.values())


def _take_turns(made: dict[str, Engine], options: Options, device: str) -> dict[str, list[Turn]]:
    """Turns of each engine, without the first. A turn's L steps have the same flushes for each row."""
    turns: dict[str, list[Turn]] = {name: [] for name in made}
    for _ in range(1 + options.num_turns):
        for name, engine in made.items():
            turns[name].append(_turn(engine, options.ring_len))
            synchronize(device)
    return {name: taken[1:] for name, taken in turns.items()}


def _turn(engine: Engine, steps: int) -> Turn:
    """Time some steps. The one before them isn't timed: the device was another's, and an engine launches ahead."""
    stepped(engine)
    tokens, waited = 0, engine.waited_seconds
    start = time.perf_counter()
    for _ in range(steps):
        tokens += sum(len(update.token_ids) for update in stepped(engine))
    return Turn(steps, tokens, time.perf_counter() - start, engine.waited_seconds - waited)


def _time_forwards(made: dict[str, Engine], options: Options) -> dict[str, float]:
    """Seconds of the model's part of a step, on the device alone."""
    device = next(iter(made.values())).runner.pool.device
    walks = [_forward(engine, options, speculates=name == "speculate") for name, engine in made.items()]
    times = time_in_turns(walks, 2 * options.ring_len, device)
    return {name: mean(seconds) for name, seconds in zip(made, times, strict=True)}


def _forward(engine: Engine, options: Options, *, speculates: bool) -> Walk:
    """Runs each row's last tokens again; only the cursors move on."""
    runner, window = engine.runner, options.window if speculates else 1
    slots, pages, lengths = row_tensors(engine, window)
    tokens = torch.zeros(len(slots), window, dtype=torch.int64, device=slots.device)
    if not speculates:
        return lambda: runner.decode(slots, pages, lengths, tokens[:, 0])
    num_tokens, kept = (torch.full_like(slots, count) for count in (window, min(window, options.kept)))

    def verify() -> None:
        runner.verify(slots, pages, lengths, tokens, num_tokens)
        runner.commit(slots, num_tokens, kept)

    return verify


def _figures(turns: list[Turn], forward: float, batch: int) -> dict[str, float]:
    step = median(turn.seconds / turn.steps for turn in turns)
    per_step = mean(turn.tokens / turn.steps for turn in turns)
    return {
        "tokens_per_s": round(per_step / step, 1),
        "tpot_ms": milliseconds(step * batch / per_step),
        "step_ms": milliseconds(step),
        "forward_ms": milliseconds(forward),
        "host_ms": milliseconds(median((turn.seconds - turn.waited) / turn.steps for turn in turns)),
        "tokens_per_step": round(per_step / batch, 2),
    }
