"""Time of walks over a contender's calls: CUDA graphs on a GPU, plain calls on a CPU. All contenders take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch

Walk = Callable[[], None]

WARM_UP = 3  # rounds before the first that counts, unless told otherwise


class Phases:
    """How long a measurement spent in what, by name: to see what makes it slow."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize()  # what was begun belongs to this phase
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    def rounded(self) -> dict[str, float]:
        return {name: round(seconds, 1) for name, seconds in self.seconds.items()}


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large reduction."""
    data = torch.ones(2**30 if device.type == "cuda" else 2**26, device=device)

    def read() -> None:
        data.sum()

    return data.nbytes / median(time_in_turns([read], 12, device)[0])


def recorded(walk: Walk, device: torch.device) -> Walk:
    """On a GPU the walk as a CUDA graph, on a CPU the walk. It must have run before."""
    if device.type != "cuda":
        return walk
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: it gives all unused memory back to the driver first, and each contender of each point would
    # have its gigabytes to ask for again.
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            walk()
        finally:
            graph.capture_end()
    return graph.replay


def make_room(device: torch.device) -> None:
    """Give back what is unused once it is half of the GPU: the allocator keeps the tensors of sizes that are over."""
    if device.type != "cuda":
        return
    if unused_bytes(device) > torch.cuda.get_device_properties(device).total_memory / 2:
        torch.cuda.empty_cache()


def unused_bytes(device: torch.device) -> int:
    """Memory of the GPU that PyTorch keeps for new tensors."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def time_in_turns(
    walks: Sequence[Walk], replays: int, device: torch.device, warm_up: int = WARM_UP
) -> list[list[float]]:
    """Seconds of each replay of each walk, which run one after the other in every round."""
    times = _gpu_times if device.type == "cuda" else _cpu_times
    return [seconds[warm_up:] for seconds in times(walks, replays + warm_up)]


def _cpu_times(walks: Sequence[Walk], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in walks]
    for _ in range(rounds):
        for walk, seconds in zip(walks, times, strict=True):
            start = time.perf_counter()
            walk()
            seconds.append(time.perf_counter() - start)
    return times


def _gpu_times(walks: Sequence[Walk], rounds: int) -> list[list[float]]:
    """Nothing waits between the rounds: were the GPU idle at a start event, the launch of the graph would count."""
    stamps: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in walks]
    for _ in range(rounds):
        for walk, pairs in zip(walks, stamps, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            walk()
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) * 1e-3 for start, end in pairs] for pairs in stamps]
