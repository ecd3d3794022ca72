"""Penalties for tokens that were seen: counts on the device for the rows that ask for them, and for no others.

n rows, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.engine.transfer import to_device

IN_PROMPT = 1
IN_OUTPUT = 2  # per occurrence, so that one number tells both


class Penalties(NamedTuple):
    """Attributes: fp32 ``[n]`` each, as :class:`replayssm.engine.params.SamplingParams` describes them."""

    presence: Tensor
    frequency: Tensor
    repetition: Tensor


class SeenTokens:
    """Which tokens each penalised row has in its prompt, and how often in its output.

    A penalised row gets a place of V numbers. Memory for places is taken when they are needed, twice as many each time.

    Attributes:
        counts: int32 ``[., V]``, by place.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._places: dict[int, int] = {}

    @staticmethod
    def max_bytes(vocab_size: int, max_rows: int) -> int:
        """The most it holds, while it grows."""
        return 2 * 4 * vocab_size * max_rows  # int32, and what it grows from

    def join(self, row: int, prompt: Sequence[int], output: Sequence[int], max_rows: int) -> None:
        """Begin to count for a row, with what is there already."""
        if not self._free:
            self._grow(min(max_rows, max(1, 2 * len(self.counts))))
        place = self._places[row] = self._free.pop()
        seen, device = self.counts[place].zero_(), self.counts.device
        if prompt:
            seen.index_fill_(0, to_device(prompt, torch.int64, device), IN_PROMPT)
        if output:
            tokens = to_device(output, torch.int64, device)
            seen.scatter_add_(0, tokens, torch.full_like(tokens, IN_OUTPUT, dtype=torch.int32))

    def leave(self, row: int) -> None:
        """Forget a row, if it is counted for."""
        if row in self._places:
            self._free.append(self._places.pop(row))

    def place(self, row: int) -> int:
        """Where the counts of a row are."""
        return self._places[row]

    def add(self, places: Tensor, tokens: Tensor, amounts: Tensor) -> None:
        """Count one token for each of some rows `amounts` times more: ``[n]`` int64, int64 and int32."""
        flat = places * self.counts.shape[1] + tokens
        self.counts.view(-1).scatter_add_(0, flat, amounts * IN_OUTPUT)

    def apply(self, logits: Tensor, places: Tensor, penalties: Penalties) -> None:
        """Penalise logits ``[n, V]`` in place."""
        seen = self.counts.index_select(0, places)
        repetition = penalties.repetition[:, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits.copy_(torch.where(seen > 0, repeated, logits))
        logits.sub_((seen >> 1) * penalties.frequency[:, None])
        logits.sub_((seen >= IN_OUTPUT) * penalties.presence[:, None])

    def _grow(self, num_places: int) -> None:
        held = len(self.counts)
        larger = self.counts.new_zeros(num_places, self.counts.shape[1])
        larger[:held] = self.counts
        self.counts = larger
        self._free += range(held, num_places)
