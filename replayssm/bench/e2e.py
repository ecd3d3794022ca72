"""Throughput, time to first token and time per output token of the engine, beside transformers' own `generate`.

Loads:

- *filled*: rows whose contexts are copies of one that was computed. Decode time, at any batch, without prefills.
- *no-prefix*: requests with prompts of their own, all at once.
- *shared-prefix*: three quarters of their prompts are the same, and in the prefix cache.

Contenders: *replay*; *no-replay*, which writes states at every token; *speculate*, replay with verify windows; and
*transformers*, its `generate` of the same model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch

from replayssm.bench import filled, generate, served
from replayssm.bench.engines import free_memory
from replayssm.bench.measure import environment
from replayssm.bench.rows import CONTENDERS, FILLED, LOADS, NO_PREFIX, Row, new_row, said
from replayssm.bench.timing import read_bandwidth
from replayssm.loading import LoadedModel

Point = list[Row]
PACKAGES = ("flash-linear-attention", "causal-conv1d", "kernels")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        batches: rows of the filled load.
        requests: of the other loads.
        prompt_tokens: of a prompt.
        contexts: tokens of each context of the filled load; none: as many as a prompt has.
        new_tokens: steps that are timed of the filled load, tokens of an answer in the others.
        ring_len: L.
        num_draft: drafts of a window.
        kept: tokens that the filled load keeps of each window.
        adapt: in the filled load, too, the engine goes without drafts where that is faster, as it does in the others.
        sampled: the filled load's tokens are drawn at temperature 1 with a top_p, not the likeliest.
        state_dtype: of the checkpoints, by torch's name.
        backend: of the engines' operators.
        loads, contenders: which of them.
        rounds: of turns.
        seconds: no point begins later than this; None sets no limit.
    """

    batches: tuple[int, ...]
    requests: int = 8
    prompt_tokens: int = 1000
    contexts: tuple[int, ...] = ()
    new_tokens: int = 64
    ring_len: int = 16
    num_draft: int = 3
    kept: int = 3
    adapt: bool = False
    sampled: bool = False
    state_dtype: str = "float32"
    backend: str = "auto"
    loads: tuple[str, ...] = LOADS
    contenders: tuple[str, ...] = CONTENDERS
    rounds: int = 3
    seconds: float | None = None

    @property
    def filled(self) -> tuple[Options, ...]:
        """The same with each context of the filled load as the prompt, the longest first: it takes the most memory."""
        contexts = sorted(self.contexts or (self.prompt_tokens,), reverse=True)
        return tuple(replace(self, prompt_tokens=tokens, contexts=()) for tokens in contexts)

    @property
    def most_tokens(self) -> int:
        """Of a sequence, in any load."""
        served = self.prompt_tokens + self.new_tokens
        if FILLED not in self.loads:
            return served
        new = self.filled_tokens(speculates="speculate" in self.contenders) + self.window
        return max(served, self.filled[0].prompt_tokens + new)

    @property
    def window(self) -> int:
        return 1 + self.num_draft

    @property
    def num_turns(self) -> int:
        """Turns of L steps in the filled load; with one that doesn't count, they make the steps that were asked for."""
        return max(self.rounds, -(-self.new_tokens // self.ring_len))

    def filled_tokens(self, *, speculates: bool) -> int:
        """Tokens that a row of the filled load gets while rows join, and in all turns.

        Each turn has a step before it that isn't timed.
        """
        steps = self.ring_len + 1 + (1 + self.num_turns) * (self.ring_len + 1) + 1
        return steps * (self.window if speculates else 1)

    @property
    def num_points(self) -> int:
        engines = set(self.contenders) - {"transformers"}
        filled = len(self.batches) * len(self.filled) * (FILLED in self.loads)
        points = filled + len(set(self.loads) - {FILLED}) if engines else 0
        if "transformers" in self.contenders:
            points += filled + (NO_PREFIX in self.loads)
        return points


def run(
    loaded: LoadedModel, options: Options, on_point: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Measure all, and give the result as it is stored, ``meta`` and ``rows``; after each point to ``on_point``, too.

    What fails has a row with the error and without times. Where the time is up, ``meta`` says how many points there
    was none for, as ``points_left``.
    """
    start = time.monotonic()
    device = torch.device(loaded.device)
    bandwidth = read_bandwidth(device)
    free_memory()
    rows: list[Row] = []
    result: dict[str, Any] = {"meta": _meta(loaded, device, bandwidth), "rows": rows}
    left = options.num_points
    with closing(points(loaded, options)) as measured:
        for point in measured:
            rows += point
            left -= 1
            late = options.seconds is not None and time.monotonic() - start > options.seconds
            result["meta"]["points_left"] = left if late else 0
            on_point(result)
            if late:
                break
    return result


def _meta(loaded: LoadedModel, device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Where, when and with what, also the packages that the engine or transformers take up where they are installed."""
    import transformers

    return {
        "suite": "e2e",
        **environment(device),
        "transformers": transformers.__version__,
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "read_tbps": round(bandwidth / 1e12, 3),
        "model_dtype": loaded.dtype,
        "parameters": loaded.model.num_parameters(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def points(loaded: LoadedModel, options: Options) -> Generator[Point]:
    """Rows of each point: first the engines', then transformers', which need the memory for themselves."""
    if set(options.contenders) - {"transformers"}:
        if FILLED in options.loads:
            yield from filled.points(loaded, options)
        for load in options.loads:
            if load != FILLED:
                yield served.point(loaded, options, load)
    if "transformers" in options.contenders:
        yield from _of_transformers(loaded, options)


def _of_transformers(loaded: LoadedModel, options: Options) -> Iterator[Point]:
    """Its rows; it has no prefix cache, so the load with shared prefixes is to it as any other."""
    if FILLED in options.loads:
        for filling in options.filled:
            for batch in filling.batches:
                row = new_row(loaded, filling, "transformers", FILLED, batch)
                yield _measured(row, generate.filled, loaded, filling)
    if NO_PREFIX in options.loads:
        row = new_row(loaded, options, "transformers", NO_PREFIX, options.requests)
        yield _measured(row, generate.served, loaded, options)


def _measured(
    row: Row, measure: Callable[[LoadedModel, Options, int], dict[str, float]], loaded: LoadedModel, options: Options
) -> Point:
    try:
        row |= measure(loaded, options, row["batch"])
    except Exception as error:  # out of memory, mostly: other points are still to be measured
        row["error"] = said(error)
    free_memory()
    return [row]
