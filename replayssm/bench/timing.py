"""Time of walks over a contender's calls: CUDA graphs on a GPU, plain calls on a CPU. All contenders take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Walk = Callable[[], None]

WARM_UP = 3  # rounds before the first that counts


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
    with torch.cuda.graph(graph):
        walk()
    return graph.replay


def time_in_turns(walks: Sequence[Walk], replays: int, device: torch.device) -> list[list[float]]:
    """Seconds of each replay of each walk, which run one after the other in every round."""
    times = _gpu_times if device.type == "cuda" else _cpu_times
    return times(walks, replays + WARM_UP)


def _cpu_times(walks: Sequence[Walk], rounds: int) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in walks]
    for _ in range(rounds):
        for walk, seconds in zip(walks, times, strict=True):
            start = time.perf_counter()
            walk()
            seconds.append(time.perf_counter() - start)
    return [seconds[WARM_UP:] for seconds in times]


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
    return [[start.elapsed_time(end) * 1e-3 for start, end in pairs[WARM_UP:]] for pairs in stamps]
