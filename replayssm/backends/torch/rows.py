"""Rows of a batch and the slots that they use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Slots of some rows, on the host and on the device.

    Consecutive slots are read and written through a view. Others are gathered, which copies.
    """

    slots: list[int]
    device: torch.device

    @property
    def run(self) -> slice | None:
        first, last = self.slots[0], self.slots[-1]
        consecutive = self.slots == list(range(first, last + 1))
        return slice(first, last + 1) if consecutive else None

    @property
    def index(self) -> Tensor:
        return torch.tensor(self.slots, device=self.device)

    def read(self, pool: Tensor) -> Tensor:
        """Rows of ``pool`` ``[N, ...]`` as ``[B, ...]``; may be a view."""
        run = self.run
        return pool[run] if run is not None else pool.index_select(0, self.index)

    def write(self, pool: Tensor, values: Tensor) -> None:
        """Store ``values`` ``[B, ...]`` in the rows of ``pool`` ``[N, ...]``, rounded to its dtype."""
        run = self.run
        if run is not None:
            pool[run].copy_(values)
        else:
            pool[self.index] = values.to(pool.dtype)

    def append(self, ring: Tensor, positions: list[int], values: Tensor) -> None:
        """Store ``values`` ``[B, H, ...]`` at one position per row of ``ring`` ``[N, H, R, ...]``."""
        run = self.run
        if run is not None and positions.count(positions[0]) == len(positions):
            ring[run, :, positions[0]].copy_(values)
        else:
            at = torch.tensor(positions, device=self.device)
            ring[self.index, :, at] = values.to(ring.dtype)
