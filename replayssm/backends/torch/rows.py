"""Rows of a batch and the slots that they use."""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """Slots of some rows, on the host and on the device.

    Consecutive slots are read and written through a view. Others are gathered, which copies.
    """

    def __init__(self, slots: list[int], device: torch.device) -> None:
        self.slots = slots
        self.device = device
        first, end = slots[0], slots[0] + len(slots)
        self.run = slice(first, end) if slots == list(range(first, end)) else None

    @property
    def index(self) -> Tensor:
        return torch.tensor(self.slots, device=self.device)

    def read(self, pool: Tensor) -> Tensor:
        """Rows of ``pool`` ``[N, ...]`` as ``[B, ...]``; may be a view."""
        if self.run is None:
            return pool.index_select(0, self.index)
        return pool if self.run == slice(0, pool.shape[0]) else pool[self.run]

    def write(self, pool: Tensor, values: Tensor) -> None:
        """Store ``values`` ``[B, ...]`` in the rows of ``pool`` ``[N, ...]``, rounded to its dtype."""
        if self.run is None:
            pool[self.index] = values.to(pool.dtype)
        else:
            self.read(pool).copy_(values)

    def append(self, ring: Tensor, positions: list[int], values: Tensor) -> None:
        """Store ``values`` ``[B, H, ...]`` at one position per row of ``ring`` ``[N, H, R, ...]``."""
        if self.run is not None and positions.count(positions[0]) == len(positions):
            self.read(ring).select(2, positions[0]).copy_(values)
        else:
            at = torch.tensor(positions, device=self.device)
            ring[self.index, :, at] = values.to(ring.dtype)

    def append_runs(self, ring: Tensor, starts: list[int], counts: list[int], values: Tensor) -> None:
        """Store the first ``counts[b]`` of ``values`` ``[B, T, H, ...]`` from row ``starts[b]`` of the ring on."""
        start, count = starts[0], counts[0]
        if self.run is not None and starts.count(start) == counts.count(count) == len(starts):
            self.read(ring).narrow(2, start, count).copy_(values[:, :count].transpose(1, 2))
            return
        places = [
            (row, self.slots[row], token, starts[row] + token) for row, n in enumerate(counts) for token in range(n)
        ]
        row, slot, token, at = torch.tensor(places, device=self.device).T
        ring[slot, :, at] = values[row, token].to(ring.dtype)
