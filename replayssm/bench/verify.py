"""`replayssm bench verify`: a verify window of one layer, ours beside rivals, and our decode step to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from replayssm.bench.contenders import Contender, Ours, OurWindows
from replayssm.bench.decode import ours_on
from replayssm.bench.measure import Entries, Options
from replayssm.bench.rivals import common, flashinfer, sglang_windows, windows
from replayssm.bench.rivals.loading import Project
from replayssm.bench.rivals.projects import FLASHINFER, SGLANG, VLLM, VLLM_FORK
from replayssm.bench.workload import WindowWorkload, Workload
from replayssm.ops.dispatch import backend_module

RIVALS = (*windows.OFFERS, *sglang_windows.OFFERS, *flashinfer.WINDOWS)
LEAST_CALLS = 2  # of a walk on a GPU: a rival's window of 8 writes eight states for each row


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Options):
    """Every combination of these and of each T in ``windows``.

    Raises:
        ValueError: L is not a multiple of each T. With others the projects' rules fold at different cursors.
    """

    suite: ClassVar[str] = "verify"
    projects: ClassVar[tuple[Project, ...]] = (SGLANG, VLLM, VLLM_FORK, FLASHINFER)
    windows: tuple[int, ...]
    ring_len: int = 16

    def __post_init__(self) -> None:
        for tokens in self.windows:
            if self.ring_len % tokens:
                raise ValueError(f"window is {tokens}: it must divide ring-len, {self.ring_len}")

    @property
    def num_points(self) -> int:
        return super().num_points * len(self.windows)


def contenders_of(options: VerifyOptions) -> tuple[list[Contender], list[str]]:
    """Who takes part on this device, decode steps of ours too, and a line for each project that can't."""
    decodes = ours_on(options)
    windows = [OurWindows(c.backend) for c in decodes if isinstance(c, Ours) and _has_windows(c.backend)]
    if options.device.type != "cuda":
        return [*windows, *decodes], []
    found, notes = common.found_in(options.rivals, RIVALS)
    return [*windows, *found, *decodes], notes


def _has_windows(backend: str) -> bool:
    """Whether verify is the backend's own, not that of another which it falls back to."""
    return str(backend_module(backend).verify_step.__module__).startswith(f"replayssm.backends.{backend}")


def points(options: VerifyOptions, contenders: list[Contender]) -> Iterator[Entries]:
    """One for each combination, all of the first T first; decode steps take part in those."""
    for tokens in options.windows:
        for kind, state_dtype, batch in options.grid():
            workload = _workload(options, kind, state_dtype, batch, tokens)
            windows = [c for c in contenders if not _is_decode(c) and c.takes(workload)]
            entries: list[tuple[Workload, Contender]] = [(common.as_taken(c, workload), c) for c in windows]
            if tokens == options.windows[0]:
                calls = options.calls(kind, state_dtype, batch, [options.ring_len], LEAST_CALLS)
                shared = (kind, workload.spec, batch, state_dtype, options.ring_len, workload.activation_dtype)
                decode = Workload(*shared, options.device, calls)
                entries += [(decode, c) for c in contenders if _is_decode(c)]
            yield entries


def _is_decode(contender: Contender) -> bool:
    return type(contender) is Ours


def _workload(options: VerifyOptions, kind: str, state_dtype: torch.dtype, batch: int, tokens: int) -> WindowWorkload:
    phases = [options.ring_len // tokens]
    calls = options.calls(kind, state_dtype, batch, phases, LEAST_CALLS)
    spec, activations = options.shapes[kind], options.activation_dtype
    shared = (kind, spec, batch, state_dtype, options.ring_len, activations, options.device, calls)
    return WindowWorkload(*shared, tokens)
