"""Log-probabilities of the model itself, for the rows that ask for them.

n rows, L rows that ask, V vocabulary size, T tokens of a window, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.engine.distribution import log_normaliser
from replayssm.engine.outputs import TokenLogprobs
from replayssm.engine.params import MAX_TOP_LOGPROBS


class Logprobs(NamedTuple):
    """On the device, or copied from it.

    Attributes:
        chosen: fp32 ``[L]``, of the tokens that were drawn.
        top: fp32 ``[L, k]``, of the likeliest tokens in falling order.
        top_tokens: int64 ``[L, k]``.
    """

    chosen: Tensor
    top: Tensor
    top_tokens: Tensor


def model_logprobs(logits: Tensor, tokens: Tensor) -> Logprobs:
    """Of the tokens ``[n]`` and the likeliest ones, by logits ``[n, V]``.

    As many likeliest ones whatever is asked, so that which of two equal ones comes first doesn't depend on a neighbour.
    """
    normaliser = log_normaliser(logits)[:, None]
    top = logits.topk(min(MAX_TOP_LOGPROBS, logits.shape[1]), dim=-1)
    chosen = logits.gather(1, tokens[:, None]) - normaliser
    return Logprobs(chosen[:, 0], top.values - normaliser, top.indices)


def token_logprobs(tokens: Sequence[int], wanted: Sequence[int], logprobs: Logprobs) -> list[TokenLogprobs]:
    """One for each of L rows, which wants so many of the likeliest. Of equal ones the lower token id comes first."""
    return [
        TokenLogprobs(token, chosen, tuple(sorted(zip(ids, top, strict=True), key=_falling)[:count]))
        for token, count, chosen, top, ids in zip(tokens, wanted, *(part.tolist() for part in logprobs), strict=True)
    ]


def joined(parts: Sequence[Logprobs]) -> Logprobs:
    """Rows one after the other."""
    return parts[0] if len(parts) == 1 else Logprobs(*map(torch.cat, zip(*parts, strict=True)))


def _falling(pair: tuple[int, float]) -> tuple[float, int]:
    return -pair[1], pair[0]
