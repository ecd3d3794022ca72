"""How a next token is drawn from logits: temperature, top-k, top-p and min-p as transformers' `generate` does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

NO_TOKEN = -1  # what the host reads where logits were broken


@dataclass(frozen=True)
class Sampling:
    """A distribution made from logits; each token's depends on that token's logits alone.

    Attributes:
        temperature: above 0. Greedy decoding is not a Sampling: pass None where one is wanted.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens that together reach this probability; 1 keeps all.
        min_p: keep tokens at least this likely, relative to the likeliest; 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: it must be above 0 and finite")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}: it must be from 0 to 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """fp32 probabilities of logits, both ``[..., V]``."""
        scores = logits.reshape(-1, logits.shape[-1]).float()
        for warper in self._warpers:
            scores = warper(None, scores)
        return scores.softmax(-1).view(logits.shape)

    @cached_property
    def _warpers(self) -> list[Any]:
        """transformers' own, in the order of `generate`, which leaves out those that change nothing."""
        from transformers.generation import logits_process as warpers

        found: list[Any] = []
        if self.temperature != 1:
            found.append(warpers.TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            found.append(warpers.TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            found.append(warpers.TopPLogitsWarper(float(self.top_p)))
        if self.min_p:
            found.append(warpers.MinPLogitsWarper(float(self.min_p)))
        return found


def draw(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One index per row, ``[..., V] → [...]`` int64, with chances proportional to non-negative fp32 weights.

    The largest of weight / noise, the noise exponential: no cumulative sum, whose rounding favours early tokens in a
    large vocabulary, and no host synchronisation. A token of weight 0 is never drawn unless all are 0.
    """
    noise = torch.empty_like(weights).exponential_(generator=generator)
    # fp32 noise may come out as 0: the smallest positive number in its place keeps 0 / noise at 0.
    return (weights / noise.clamp_min(torch.finfo(weights.dtype).tiny)).argmax(-1)


def told(tokens: Tensor, scores: Tensor) -> Tensor:
    """Tokens that were drawn, with NO_TOKEN where the largest score is NaN or infinite: both ``[...]``."""
    return torch.where(scores.isfinite(), tokens, NO_TOKEN)
