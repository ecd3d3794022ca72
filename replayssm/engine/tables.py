"""What the device knows of each row: its pages, and the token that comes next."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.engine.request import Sequence
from replayssm.engine.transfer import to_device


class Batch(NamedTuple):
    """The rows of a decode step on the device.

    Attributes:
        rows: int64 ``[B]``.
        slots: int32 ``[B]``.
        lengths: int32 ``[B]``, tokens that are in slot and pages already.
        pages: int32 ``[B, P]``.
    """

    rows: Tensor
    slots: Tensor
    lengths: Tensor
    pages: Tensor


class RowTables:
    """Device tensors with a line for each row, so that a step sends only what is new.

    Args:
        max_rows: lines.
        max_pages: pages of the longest sequence.
        device: where they live.

    Attributes:
        tokens: int64 ``[max_rows]``, the last token that was sampled in each row: the next step's input.
        pages: int32 ``[max_rows, max_pages]``.
    """

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        self.device = device
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.pages = torch.zeros(max_rows, max(max_pages, 1), dtype=torch.int32, device=device)
        self._sent = [0] * max_rows  # pages of each row that the device has

    def join(self, sequence: Sequence) -> None:
        """A sequence got a row: what the device has there is of another."""
        self._sent[sequence.row] = 0

    def batch(self, sequences: Sequence_[Sequence], lengths: Sequence_[int]) -> Batch:
        """The rows of a step, and how many tokens each has already."""
        self._send_pages(sequences)
        columns = [[s.row for s in sequences], [s.slot for s in sequences], lengths]
        rows, slots, lengths_there = to_device(columns, torch.int64, self.device).unbind()
        width = max(len(s.pages) for s in sequences)
        pages = self.pages[:, : max(width, 1)].index_select(0, rows)
        return Batch(rows, slots.int(), lengths_there.int(), pages)

    def _send_pages(self, sequences: Sequence_[Sequence]) -> None:
        new: list[tuple[int, int, int]] = []  # row, place, page
        for sequence in sequences:
            row, held = sequence.row, sequence.pages
            sent = self._sent[row]
            if sent < len(held):
                new += [(row, place, held[place]) for place in range(sent, len(held))]
                self._sent[row] = len(held)
        if new:
            rows, places, pages = to_device(new, torch.int64, self.device).unbind(1)
            self.pages.index_put_((rows, places), pages.int())
