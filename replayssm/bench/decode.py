"""`replayssm bench decode`: one step of one layer, ours beside rivals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from replayssm import ops
from replayssm.bench.contenders import Contender, Ours
from replayssm.bench.measure import Entries, Options
from replayssm.bench.rivals import common, delta, flashinfer, mamba2
from replayssm.bench.upstream import Upstream
from replayssm.bench.workload import Workload

LEAST_CALLS = 4  # of a walk on a GPU, so that the launch of a graph is a small part of it
GPU_BACKENDS = ("cuda", "triton")
RIVALS = (*delta.OFFERS, *mamba2.OFFERS, *flashinfer.STEPS)


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(Options):
    """Every combination of these and of each L in ``ring_lens``."""

    suite: ClassVar[str] = "decode"
    ring_lens: tuple[int, ...]

    @property
    def num_points(self) -> int:
        return super().num_points * len(self.ring_lens)


def contenders_of(options: Options) -> tuple[list[Contender], list[str]]:
    """Who takes part on this device, and a line for each project that can't."""
    ours = ours_on(options)
    if options.device.type != "cuda":
        return [*ours, Upstream()], []
    found, notes = common.found_in(options.rivals, RIVALS)
    return [*ours, *found], notes


def ours_on(options: Options) -> list[Contender]:
    """Our decode with each backend of the device."""
    on_gpu = options.device.type == "cuda"
    return [
        Ours(name)
        for name in ops.BACKENDS
        if (name in GPU_BACKENDS) == on_gpu and ops.unavailable_reason(name, options.device) is None
    ]


def points(options: DecodeOptions, contenders: list[Contender]) -> Iterator[Entries]:
    """One for each combination, all of the first L first: what a time limit cuts off are other L.

    A contender without a ring takes part for the first L alone.
    """
    for ring_len in options.ring_lens:
        for kind, state_dtype, batch in options.grid():
            calls = options.calls(kind, state_dtype, batch, options.ring_lens, LEAST_CALLS)
            spec, activations = options.shapes[kind], options.activation_dtype
            workload = Workload(kind, spec, batch, state_dtype, ring_len, activations, options.device, calls)
            yield [
                (common.as_taken(contender, workload), contender)
                for contender in contenders
                if contender.takes(workload) and (contender.has_ring or ring_len == options.ring_lens[0])
            ]
