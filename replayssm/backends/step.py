"""What every decode kernel gets beside the layer's own tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """State of all slots, and which rows step. Shapes and dtypes: :mod:`replayssm.ops`."""

    checkpoint: Tensor
    ring_u: Tensor
    ring_k: Tensor
    ring_g: Tensor
    write_pos: Tensor
    checkpoint_slot: Tensor
    slots: Tensor
    flush_period: int
    force_flush: Tensor | None

    def pick(self, rows: list[int]) -> Step:
        """The same step for some of the rows."""
        forced = None if self.force_flush is None else self.force_flush[rows]
        return self._replace(slots=self.slots[rows], force_flush=forced)
