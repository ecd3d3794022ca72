"""Keys and values of the MTP layers: rows of different lengths, left-aligned, forgotten by moving a length back.

Names: B rows, n tokens added at once, S places held, H key heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KeysValues:
    """Stands where transformers' attention expects its cache, of which it uses `update` alone.

    Each row's valid places are the first ``lengths[b]``. New keys go behind them and stay tentative until
    :meth:`keep`: what is added next overwrites what wasn't kept.

    Attributes:
        lengths: ``[B]`` int64, kept places of each row.
        offset: tentative places behind the kept ones that the next tokens go behind.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.capacity = capacity
        self.longest = 0  # no row has more kept places: known without asking the device
        self.offset = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def positions(self, num_tokens: int) -> Tensor:
        """``[B, n]``: positions of the next tokens."""
        steps = torch.arange(num_tokens, device=self.lengths.device)
        return self.lengths[:, None] + self.offset + steps

    def mask(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        """``[B, 1, n, S]`` to be added to the scores: each of the next tokens sees itself and all before it."""
        places = torch.arange(self._places(num_tokens), device=self.lengths.device)
        hidden = places > self.positions(num_tokens)[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put ``[B, H, n, d]`` behind what is there; returns all of it, ``[B, H, S, d]``."""
        num_tokens = keys.shape[2]
        if layer not in self._layers:
            # Zeros, not garbage: masked places are multiplied by a zero weight.
            self._layers[layer] = tuple(  # type: ignore[assignment]
                x.new_zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in (keys, values)
            )
        places = self.positions(num_tokens).clamp_max(self.capacity - 1)[:, None, :, None]
        for held, new in zip(self._layers[layer], (keys, values), strict=True):
            held.scatter_(2, places.expand(-1, new.shape[1], -1, new.shape[3]), new)
        seen = self._places(num_tokens)
        held_keys, held_values = self._layers[layer]
        return held_keys[:, :, :seen], held_values[:, :, :seen]

    def keep(self, count: Tensor, longest: int) -> None:
        """The first ``count [B]`` of the last tokens added are kept; no row keeps more than ``longest``."""
        self.lengths = self.lengths + count
        self.longest = min(self.capacity, self.longest + longest)

    def _places(self, num_tokens: int) -> int:
        return min(self.capacity, self.longest + self.offset + num_tokens)
