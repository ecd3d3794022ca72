"""The rows of one batch, in parts that need the same work of the sampler.

B rows of the batch, n rows of a part, L rows that want log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from replayssm.engine.params import SamplingParams


class Kind(NamedTuple):
    """The work that a row needs.

    Attributes:
        sampled: it is drawn, not greedy.
        filtered: top_k, top_p or min_p leave tokens out.
        whole: all its scores are sorted, for a top_p without a top_k.
        penalised, edited, constrained: its logits are changed by what was seen, by bias or min_tokens, by a mask.
    """

    sampled: bool = False
    filtered: bool = False
    whole: bool = False
    penalised: bool = False
    edited: bool = False
    constrained: bool = False

    @property
    def bits(self) -> int:
        """For the kernel that draws; see :mod:`replayssm.backends.triton.draw`."""
        flags = (self.sampled, self.filtered, self.penalised, self.edited, self.constrained)
        return sum(1 << bit for bit, flag in enumerate(flags) if flag)


GREEDY = Kind()


@dataclass(frozen=True)
class Asked:
    """What the host must know of an engine's row. Attributes as those of SamplingParams, `top_k` at most V."""

    kind: Kind = GREEDY
    top_k: int = 0
    logprobs: int | None = None

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int, *, edited: bool) -> Asked:
        """What a request asks; `edited` says whether it has logit edits."""
        sampled = not params.greedy
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        kind = Kind(
            sampled=sampled,
            filtered=sampled and filtered,
            whole=sampled and params.top_p < 1 and params.top_k == 0,
            penalised=params.penalised,
            edited=edited,
            constrained=params.constrained,
        )
        return cls(kind, min(params.top_k, vocab_size), params.logprobs)


@dataclass(frozen=True)
class Part:
    """Rows of a batch that need the same work. Tensors are int64 ``[n]``.

    Attributes:
        kind: the work.
        num_sorted: see :func:`replayssm.engine.distribution.threshold`.
        batch: their places in the batch.
        rows: their rows in the tables.
        seen: their places among the counts of seen tokens; 0 for rows without.
        masks: their places among the batch's masks; 0 for rows without.
    """

    kind: Kind
    num_sorted: int
    batch: Tensor
    rows: Tensor
    seen: Tensor
    masks: Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of one batch, from :meth:`Sampler.rows`; of use as long as the same requests are in them.

    Attributes:
        size: B.
        parts: all that need more than an argmax; where one kernel draws for all rows, those with penalties.
        plain: whether some rows need no more.
        table: int32 ``[4, B]`` for that kernel, see :class:`replayssm.backends.triton.draw.Tables`; None without one,
            or where all rows are plain.
        num_masks: how many rows are constrained.
        scored: int64 ``[L]`` each, places in the batch of rows that want log-probabilities, cut like parts.
        wanted: for each place of the batch, how many of the likeliest tokens; None where none are wanted.
    """

    size: int
    parts: tuple[Part, ...]
    plain: bool
    table: Tensor | None
    num_masks: int
    scored: tuple[Tensor, ...]
    wanted: tuple[int | None, ...]
