"""How an engine divides its memory, once, at its start: rows, snapshots, pages."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replayssm.engine.options import EngineOptions
from replayssm.errors import InputError

MIB = 2**20
CPU_BYTES = 1024 * MIB  # at most, unless asked for
CPU_SHARE = 0.25  # of what is free
GPU_SHARE = 0.9
CPU_ROWS = 32
GPU_ROWS = 256
CGROUP = Path("/sys/fs/cgroup")
TYPICAL_TOKENS = 1024  # of a request, to choose the number of rows by
SNAPSHOTS_PER_ROW = 16  # more are hardly ever of use
STEP_TOKENS = 2048
GPU_STEP_TOKENS = (8192, 4096)  # a host launches hardly more kernels for them
STEP_SHARE = 0.1  # of the memory, for the forward of a step of so many tokens


@dataclass(frozen=True)
class Costs:
    """Bytes that things take.

    Attributes:
        slot: a row's state or a snapshot, in all recurrent layers: checkpoint, ring, convolution, cursors.
        page: keys and values of a page's tokens, in all attention layers.
        work: for a number of rows, what is there besides: the largest forward, graph buffers, the sampler's tables.
    """

    slot: int
    page: int
    work: Callable[[int], int]


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine has room for.

    Attributes:
        max_rows: sequences that run at once.
        snapshots: slots beyond those that rows need.
        num_pages: pages.
        page_size: tokens of each.
        max_context: the longest sequence, in tokens.
        costs: what each takes.
    """

    max_rows: int
    snapshots: int
    num_pages: int
    page_size: int
    max_context: int
    costs: Costs

    @property
    def num_slots(self) -> int:
        return self.max_rows + self.snapshots

    @property
    def max_pages_per_row(self) -> int:
        return -(-self.max_context // self.page_size)

    @property
    def nbytes(self) -> int:
        return self.costs.work(self.max_rows) + self.num_slots * self.costs.slot + self.num_pages * self.costs.page

    def fitting(self, tokens: int) -> int:
        """How many requests of so many tokens fit at once."""
        return min(self.max_rows, self.num_pages // -(-tokens // self.page_size))

    def __str__(self) -> str:
        tokens = self.num_pages * self.page_size
        lengths = [length for length in (1024, 4096, 16384, 65536) if length < self.max_context]
        fits = ", ".join(f"{self.fitting(length)} of {length:,} tokens" for length in [*lengths, self.max_context])
        return (
            f"{self.nbytes / MIB:,.0f} MiB: {self.max_rows} rows and {self.snapshots} snapshots of "
            f"{self.costs.slot / MIB:.2f} MiB, {self.num_pages} pages for {tokens:,} tokens "
            f"({self.num_pages * self.costs.page / MIB:,.0f} MiB), {self.costs.work(self.max_rows) / MIB:,.0f} MiB "
            f"for the rest; "
            f"requests that fit at once: {fits}"
        )


def plan_memory(options: EngineOptions, costs: Costs, budget: int, model_context: int, default_rows: int) -> MemoryPlan:
    """Divide a budget.

    Rows come first, then the snapshots' share, then pages from what is left. An engine for which all of its rows could
    be as long as the context takes no more pages than that, and as many again for the prefixes of its snapshots.

    Args:
        options: what was asked for.
        costs: bytes of each thing.
        budget: bytes for all of it.
        model_context: tokens that the model was made for.
        default_rows: at most, where the options don't say.

    Raises:
        InputError: not even one request fits, or not what was asked for; the message says how much is wanted.
    """
    size = options.page_size
    context = options.max_context or model_context
    pages_of_context = -(-context // size)
    share = options.snapshot_share if options.prefix_cache else 0.0
    rows = options.max_rows or _rows_that_fit(options, costs, int(budget * (1 - share)), pages_of_context, default_rows)
    room = budget - costs.work(rows)
    snapshots = 0
    if options.prefix_cache:
        snapshots = max(0, min(int(room * share) // costs.slot, SNAPSHOTS_PER_ROW * rows))
    left = room - (rows + snapshots) * costs.slot
    most = 2 * rows * pages_of_context
    num_pages = min(most, left // costs.page) if costs.page else most
    wanted = pages_of_context if options.max_context else 1
    if left < 0 or num_pages < wanted:
        least = costs.work(rows) + (rows + snapshots) * costs.slot + wanted * costs.page
        raise InputError(
            f"memory of {budget / MIB:,.1f} MiB is too small: {rows} rows, {snapshots} snapshots and "
            f"{wanted * size} tokens of context want {least / MIB:,.1f} MiB"
        )
    return MemoryPlan(rows, snapshots, num_pages, size, min(context, num_pages * size), costs)


def _rows_that_fit(options: EngineOptions, costs: Costs, budget: int, pages_of_context: int, most: int) -> int:
    """As many rows as have room for typical requests, one at least."""
    pages = min(-(-TYPICAL_TOKENS // options.page_size), pages_of_context)
    if options.max_step_tokens is not None:
        most = min(most, (options.max_step_tokens - options.least_piece) // options.max_window)
    rows = range(1, most + 1)
    return max(1, bisect_right(rows, budget, key=lambda n: costs.work(n) + n * (costs.slot + pages * costs.page)))


def step_tokens(options: EngineOptions, device: str, budget: int, forward: Callable[[int], int]) -> int:
    """Tokens of all sequences in a step, where the options don't say.

    Args:
        options: what was asked for.
        device: "cpu" or a GPU.
        budget: bytes for all that the engine takes.
        forward: bytes of a prefill of so many tokens.
    """
    if options.max_step_tokens is not None:
        return options.max_step_tokens
    larger = () if device == "cpu" else GPU_STEP_TOKENS
    found = next((tokens for tokens in larger if forward(tokens) <= STEP_SHARE * budget), STEP_TOKENS)
    return max(found, options.least_step_tokens)


def budget_bytes(options: EngineOptions, device: str) -> int:
    """The bytes that the engine may take, once its model is on the device."""
    if options.memory_bytes is not None:
        return options.memory_bytes
    free = free_bytes(device)
    return min(CPU_BYTES, int(CPU_SHARE * free)) if device == "cpu" else int(GPU_SHARE * free)


def check_free(plan: MemoryPlan, device: str) -> None:
    """Refuse a plan for more memory than there is, which `memory_bytes` may have asked for.

    Raises:
        InputError: it says how much is wanted, and how much is free.
    """
    free = free_bytes(device) + _kept_bytes(device)
    if plan.nbytes > free:
        raise InputError(
            f"{plan.max_rows} rows of up to {plan.max_context} tokens want {plan.nbytes / MIB:,.0f} MiB of memory, and "
            f"{free / MIB:,.0f} MiB are free on the {device} device"
        )


def free_bytes(device: str) -> int:
    """Memory of the device that nobody has taken."""
    if device == "cpu":
        return available_bytes()
    import torch

    return torch.cuda.mem_get_info()[0]


def _kept_bytes(device: str) -> int:
    """Memory of the device that torch keeps for tensors to come."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def available_bytes() -> int:
    """Memory that this machine's processes, and this container's, may still take."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    most, used = (_lines(CGROUP / name) for name in ("memory.max", "memory.current"))
    if most and used and most[0].isdigit():  # else it is "max"
        free = min(free, max(0, int(most[0]) - int(used[0])))
    return free


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
