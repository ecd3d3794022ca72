"""What is measured, in which order, and what is chosen of it. A timer measures; it may be anything that gives times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from typing import Protocol

import torch

from replayssm.backends.cuda import blocks
from replayssm.backends.cuda.blocks import Block
from replayssm.backends.cuda.cuts import tuned_shape
from replayssm.ops.checks import dtype_name
from replayssm.state import LayerSpec, StateDtypes
from replayssm.tuned import Cut, Ring, TunedLayer
from replayssm.tuner.layers import block_shape

#: How much faster than what is chosen anyway something must be, to be chosen: timing has some noise.
WORTH = 0.02
DEFAULT_RING_LEN = 16


@dataclass(frozen=True)
class Call:
    """A step whose time is asked for."""

    kind: str
    spec: LayerSpec
    batch: int
    state_dtype: torch.dtype
    activation_dtype: torch.dtype
    ring_len: int
    ring_dtype: torch.dtype

    @property
    def shape(self) -> blocks.Shape:
        return block_shape(self.spec, self.state_dtype, self.ring_len, self.ring_dtype)


class Timer(Protocol):
    """Measures steps."""

    def cuts(self, call: Call) -> Sequence[Block]:
        """Cuts that it can measure, other than the one that is chosen anyway."""
        ...

    def expect(self, asked: Iterable[tuple[Call, Sequence[Block | None]]]) -> None:
        """Be told what will be asked for next, to compile it."""
        ...

    def microseconds(self, call: Call, cuts: Sequence[Block | None]) -> list[float | None]:
        """Times of a step, for each cut; None as a cut: what is chosen anyway; None as a time: it fails or is wrong."""
        ...


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to tune for.

    Args:
        layers: by kind.
        batches: rows of a step.
        state_dtypes: of the checkpoint.
        activation_dtype: of the model.
        ring_lens: flush periods to choose from.
    """

    layers: dict[str, list[LayerSpec]]
    batches: tuple[int, ...]
    state_dtypes: tuple[torch.dtype, ...]
    activation_dtype: torch.dtype
    ring_lens: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """Measurements: of rings, of the other ring dtype and of cuts, for each layer and batch."""
        one = len(self.batches) * (len(self.ring_lens) + (self.activation_dtype is not torch.float32) + 1)
        return one * sum(map(len, self.layers.values())) * len(self.state_dtypes)


def tune(options: Options, timer: Timer, on_step: Callable[[Call], None] = lambda _: None) -> tuple[TunedLayer, ...]:
    """The settings of each layer.

    First the flush periods of all, with the cuts that are chosen anyway; then, with these periods, the cuts. So there
    are two times to compile, and each can use all cores.
    """
    searches = [
        _Search(options, timer, on_step, kind, spec, state_dtype)
        for kind, specs in options.layers.items()
        for spec in specs
        for state_dtype in options.state_dtypes
    ]
    timer.expect((call, [None]) for search in searches for call in search.ring_calls())
    times = [search.ring_times() for search in searches]
    rings = [fastest_ring(found) for found in times]
    timer.expect(asked for search, ring in zip(searches, rings, strict=True) for asked in search.asked(ring))
    return tuple(search.layer(found, ring) for search, found, ring in zip(searches, times, rings, strict=True))


RingTimes = dict[int, list[float | None]]


@dataclass(frozen=True)
class _Search:
    """For one layer."""

    options: Options
    timer: Timer
    on_step: Callable[[Call], None]
    kind: str
    spec: LayerSpec
    state_dtype: torch.dtype

    @property
    def ring_dtype(self) -> torch.dtype:
        """Of updates, as accuracy has it."""
        return StateDtypes.choose(self.state_dtype, self.options.activation_dtype, "auto").ring_u

    @property
    def other_dtype(self) -> torch.dtype:
        """The one that updates could have, or the same if there is no other."""
        return self.options.activation_dtype if self.ring_dtype is torch.float32 else torch.float32

    def ring_calls(self) -> Iterator[Call]:
        for ring_len in self.options.ring_lens:
            yield from self.calls(ring_len, self.ring_dtype)

    def ring_times(self) -> RingTimes:
        return {ring_len: self.times(ring_len, self.ring_dtype) for ring_len in self.options.ring_lens}

    def asked(self, ring_len: int) -> Iterator[tuple[Call, Sequence[Block | None]]]:
        """What is measured once the flush period is chosen."""
        for call in self.calls(ring_len, self.other_dtype):
            yield call, [None]
        for call in self.calls(ring_len, self.ring_dtype):
            yield call, [None, *self.timer.cuts(call)]

    def layer(self, times: RingTimes, ring_len: int) -> TunedLayer:
        us = {f"{length} {dtype_name(self.ring_dtype)}": row for length, row in times.items()}
        if self.other_dtype is not self.ring_dtype:
            us[f"{ring_len} {dtype_name(self.other_dtype)}"] = self.times(ring_len, self.other_dtype)
        complete = {name: [us for us in row if us is not None] for name, row in us.items() if None not in row}
        ring = Ring(ring_len, dtype_name(self.ring_dtype), list(self.options.batches), complete)
        cuts = map(self.cut, self.calls(ring_len, self.ring_dtype))
        shape = tuned_shape(block_shape(self.spec, self.state_dtype), self.options.activation_dtype)
        return TunedLayer(shape, ring, tuple(cut for cut in cuts if cut is not None))

    def cut(self, call: Call) -> Cut | None:
        cuts: list[Block | None] = [None, *self.timer.cuts(call)]
        times = self.measure(call, cuts)
        untuned = times[0]
        if untuned is None:
            return None
        us, best = min((us, i) for i, us in enumerate(times) if us is not None)
        block = cuts[best] if us < untuned * (1 - WORTH) else None
        values = {} if block is None else {name: int(value) for name, value in asdict(block).items()}
        return Cut(call.batch, values, us if values else untuned, untuned)

    def times(self, ring_len: int, ring_dtype: torch.dtype) -> list[float | None]:
        return [self.measure(call, [None])[0] for call in self.calls(ring_len, ring_dtype)]

    def calls(self, ring_len: int, ring_dtype: torch.dtype) -> list[Call]:
        activations = self.options.activation_dtype
        return [
            Call(self.kind, self.spec, batch, self.state_dtype, activations, ring_len, ring_dtype)
            for batch in self.options.batches
        ]

    def measure(self, call: Call, cuts: list[Block | None]) -> list[float | None]:
        times = self.timer.microseconds(call, cuts)
        self.on_step(call)
        return times


def fastest_ring(times: RingTimes) -> int:
    """The flush period with the smallest mean of times, each as a ratio to the fastest of its batch.

    The usual one, if it is as fast; that, too, where nothing was measured.
    """
    whole = {length: [us for us in row if us is not None] for length, row in times.items() if None not in row}
    if not whole:
        return DEFAULT_RING_LEN
    least = [min(column) for column in zip(*whole.values(), strict=True)]
    cost = {
        length: geometric_mean(us / best for us, best in zip(row, least, strict=True)) for length, row in whole.items()
    }
    best = min(cost, key=lambda length: cost[length])
    usual = cost.get(DEFAULT_RING_LEN, math.inf)
    return DEFAULT_RING_LEN if usual <= cost[best] * (1 + WORTH) else best
