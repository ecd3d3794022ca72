"""Decode, verify and commit as CUDA graphs, one of each for some numbers of rows.

A graph's inputs and outputs lie at fixed addresses. A call copies its rows into them, makes padding rows of the rest,
which touch nothing, and replays the next larger graph: one launch instead of hundreds, and no allocation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replayssm.engine.forward import Forward

if TYPE_CHECKING:
    from replayssm.engine.runner import Runner


def row_counts(max_rows: int) -> list[int]:
    """Numbers of rows that graphs are made for: a batch is padded by less than its own size, and by 15 at most."""
    return [*(n for n in (1, 2, 4, 8, *range(16, max_rows, 16)) if n < max_rows), max_rows]


class Graphs:
    """The captured steps of a runner, with logits as the model has them.

    Args:
        runner: whose `run_decode`, `run_verify` and `run_commit` are captured.
        max_rows: rows of the largest batch.
        max_window: tokens of a window; 0 for a runner without windows.
        max_pages: pages of the longest row.
        device: a GPU.
        only_largest: pad every batch to max_rows.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        max_rows: int,
        max_window: int,
        max_pages: int,
        device: torch.device,
        only_largest: bool,
    ) -> None:
        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.runner = runner
        self.length = max(1, max_window)
        self.counts = [max_rows] if only_largest else row_counts(max_rows)
        self.slots = new(max_rows) - 1
        self.page_table = new(max_rows, max(1, max_pages))
        self.lengths = new(max_rows)
        self.tokens = new(max_rows, self.length, dtype=torch.int64)
        self.num_tokens = new(max_rows)
        self.num_accepted = new(max_rows)
        one = runner.run_decode(self.slots[:1], self.page_table[:1], self.lengths[:1], self.tokens[:1, 0])
        self.logits = new(max_rows * self.length, one.logits.shape[1], dtype=one.logits.dtype)
        self.hidden = new(max_rows * self.length, one.hidden.shape[1], dtype=one.hidden.dtype)
        names = ("decode", "verify", "commit") if max_window else ("decode",)
        self._replays = self._capture([(name, rows) for rows in reversed(self.counts) for name in names])

    def takes(self, rows: int, pages: int = 1, length: int = 1) -> bool:
        """Whether a batch fits the graphs."""
        return rows <= self.counts[-1] and pages <= self.page_table.shape[1] and length <= self.length

    def decode(self, slots: Tensor, page_table: Tensor, lengths: Tensor, tokens: Tensor) -> Forward:
        """See :meth:`Runner.decode`. The next step overwrites what it gives."""
        rows = len(slots)
        self._place(slots, page_table, lengths)
        self.tokens[:rows, 0].copy_(tokens)
        self._replay("decode", rows)
        return Forward(self.logits[:rows], self.hidden[:rows])

    def verify(self, slots: Tensor, page_table: Tensor, lengths: Tensor, tokens: Tensor, num_tokens: Tensor) -> Forward:
        """See :meth:`Runner.verify`. The next step overwrites what it gives."""
        rows, length = tokens.shape
        self._place(slots, page_table, lengths)
        self.tokens[:rows, :length].copy_(tokens)
        self.num_tokens[:rows].copy_(num_tokens)
        self._replay("verify", rows)
        logits, hidden = (x.view(-1, self.length, x.shape[1])[:rows, :length] for x in (self.logits, self.hidden))
        return Forward(logits, hidden)

    def commit(self, slots: Tensor, num_tokens: Tensor, num_accepted: Tensor) -> None:
        """See :meth:`Runner.commit`."""
        rows = len(slots)
        self._place_slots(slots)
        self.num_tokens[:rows].copy_(num_tokens)
        self.num_accepted[:rows].copy_(num_accepted)
        self._replay("commit", rows)

    def run(self, name: str, rows: int) -> None:
        """One step of the first rows, from the inputs to the outputs."""
        batch = (self.slots[:rows], self.page_table[:rows], self.lengths[:rows])
        if name == "commit":
            self.runner.run_commit(self.slots[:rows], self.num_tokens[:rows], self.num_accepted[:rows])
            return
        if name == "decode":
            given = self.runner.run_decode(*batch, self.tokens[:rows, 0])
        else:
            given = self.runner.run_verify(*batch, self.tokens[:rows], self.num_tokens[:rows])
        for fixed, found in ((self.logits, given.logits), (self.hidden, given.hidden)):
            flat = found.reshape(-1, found.shape[-1])
            fixed[: len(flat)].copy_(flat)

    def _capture(self, wanted: list[tuple[str, int]]) -> dict[tuple[str, int], Callable[[], None]]:
        """Record graphs, the largest first: its memory serves the others too. Shows a progress bar."""
        from rich.console import Console
        from rich.progress import track

        memory = torch.cuda.graph_pool_handle()
        replays: dict[tuple[str, int], Callable[[], None]] = {}
        for name, rows in track(wanted, "capturing CUDA graphs", console=Console(stderr=True), transient=True):
            self._warm_up(name, rows)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self.run(name, rows)
            replays[name, rows] = graph.replay
        return replays

    def _warm_up(self, name: str, rows: int) -> None:
        """Run a step once with padding rows, so that kernels are compiled and libraries have their workspaces."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run(name, rows)
        torch.cuda.current_stream().wait_stream(stream)

    def _place(self, slots: Tensor, page_table: Tensor, lengths: Tensor) -> None:
        rows, pages = page_table.shape
        self._place_slots(slots)
        self.page_table[:rows, :pages].copy_(page_table)
        self.lengths[:rows].copy_(lengths)

    def _place_slots(self, slots: Tensor) -> None:
        """Rows, and behind them padding."""
        self.slots[: len(slots)].copy_(slots)
        self.slots[len(slots) :].fill_(-1)

    def _replay(self, name: str, rows: int) -> None:
        self._replays[name, next(count for count in self.counts if count >= rows)]()
