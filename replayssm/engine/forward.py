"""What goes into a model's forward and comes out of it; the engine, its runner and its drafts share these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Chunk(NamedTuple):
    """A part of one sequence's tokens, for a prefill.

    Attributes:
        slot: where its state is.
        pages: its pages in order; they have room for ``start + len(tokens)`` tokens.
        start: tokens that are in slot and pages already.
        tokens: those that follow.
        keep: a slot that keeps the state after them, too; None for none.
    """

    slot: int
    pages: Sequence[int]
    start: int
    tokens: Sequence[int]
    keep: int | None = None


class Forward(NamedTuple):
    """What a forward gives. B sequences, T tokens of a window, V vocabulary size, D hidden size.

    Attributes:
        logits: float32, by graphs of the model's dtype. Prefill ``[B, V]``, of each chunk's last token; decode
            ``[B, V]``; verify ``[B, T, V]``.
        hidden: after the final norm. Prefill ``[total tokens, D]``, chunk after chunk; decode ``[B, D]``; verify
            ``[B, T, D]``.
    """

    logits: Tensor
    hidden: Tensor
