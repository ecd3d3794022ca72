"""What may be drawn from a row of scores, and how likely the model finds a token.

A row's result must not depend, in any bit, on the rows beside it. Sums of floating-point numbers do where a library
picks their order by the shape of the batch. Here probabilities are summed as whole numbers, exact in any order.

n rows, V vocabulary size. All tensors are fp32 unless it's said.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Of the likeliest token's weight. The sum over 2**22 tokens fits int64; what is lost per token is below 1e-12.
UNIT = 2.0**40
NONE = float("-inf")


class Filters(NamedTuple):
    """Attributes: ``[n]`` each; `top_k` int64, 0 takes all; `top_p` 1 takes all; `log_min_p` −inf takes all."""

    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor


def threshold(scores: Tensor, filters: Filters, num_sorted: int) -> Tensor:
    """``[n]``: the lowest of the scores ``[n, V]`` that may be drawn. Equal scores are kept or left out together.

    Args:
        scores: logits divided by the temperature.
        filters: what to keep.
        num_sorted: so many of the highest scores are looked at: the largest top_k, V for a row with top_p alone, or 0
            where no row has either.
    """
    if num_sorted == 0:
        return scores.amax(-1) + filters.log_min_p
    highest = scores.topk(num_sorted, dim=-1).values if num_sorted < scores.shape[-1] else _sorted(scores)
    num_sorted = highest.shape[-1]
    count = torch.where(filters.top_k > 0, filters.top_k, num_sorted).clamp_max(num_sorted)
    by_k = highest.gather(-1, count[:, None] - 1)[:, 0].masked_fill(filters.top_k == 0, NONE)
    by_p = _nucleus(highest, count, filters.top_p).masked_fill(filters.top_p >= 1, NONE)
    by_min_p = highest[:, 0] + filters.log_min_p
    return by_k.maximum(by_p).maximum(by_min_p)


def log_normaliser(logits: Tensor) -> Tensor:
    """``[n]``: the logarithm of the sum of exp(logits ``[n, V]``)."""
    largest = logits.amax(-1)
    return largest + (_weights(logits, largest).sum(-1).double() / UNIT).log().float()


def _nucleus(highest: Tensor, count: Tensor, top_p: Tensor) -> Tensor:
    """``[n]``: the lowest of the first `count` sorted scores before which less than `top_p` of their mass lies."""
    inside = torch.arange(highest.shape[-1], device=highest.device) < count[:, None]
    weights = _weights(highest, highest[:, 0]).mul_(inside)
    upto = weights.cumsum(-1)
    wanted = (upto[:, -1].double() * top_p).ceil().long()
    kept = (upto.sub_(weights) < wanted[:, None]).logical_and_(inside).sum(-1)
    return highest.gather(-1, (kept - 1).clamp_min(0)[:, None])[:, 0]


def _weights(scores: Tensor, largest: Tensor) -> Tensor:
    """``[n, m]`` int64: exp(scores) in units of `UNIT` for the largest."""
    return (scores - largest[:, None]).exp_().mul_(UNIT).long()


def _sorted(scores: Tensor) -> Tensor:
    return scores.sort(-1, descending=True).values
