"""What a drafter is: something that guesses the next tokens of each row, and hears which tokens came.

Names: B rows, P prompt tokens with padding, T tokens of a window, V vocabulary size, D hidden size. A drafter keeps its
own state per batch; rows keep their places from `start` on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.speculate.sampling import Sampling, draw
from replayssm.speculate.verifier import Verifier


class Start(NamedTuple):
    """A batch begins: its prompts were processed and each row's first token is chosen.

    Attributes:
        ids: ``[B, P]`` int64, the prompts, padded on the left.
        mask: ``[B, P]`` bool, False at padding.
        prompts: the same prompts on the host, without padding.
        first: ``[B]`` int64, the first new token of each row: committed, and not processed by the target yet.
        first_ids: the same on the host.
        hidden: ``[B, P, D]``, see :class:`replayssm.speculate.verifier.Prefilled`.
        max_new_tokens: no row gets more tokens than this.
        sampling: how the target's tokens are drawn; None for greedy decoding.
        generator: randomness on the device.
    """

    ids: Tensor
    mask: Tensor
    prompts: list[list[int]]
    first: Tensor
    first_ids: list[int]
    hidden: Tensor | None
    max_new_tokens: int
    sampling: Sampling | None = None
    generator: torch.Generator | None = None


class Draft(NamedTuple):
    """Guesses of what follows each row's last committed token. n is the number of drafts, at most.

    Attributes:
        tokens: ``[B, n]`` int64; any valid id where a row has fewer.
        parents: ``[B, n]`` int32, window indices: 0 is the last committed token, i + 1 is ``tokens[:, i]``, and a
            parent comes before its children. None for a chain.
        num_drafts: ``[B]`` int32, drafts of each row; None where all have n.
        probs: fp32 ``[B, n, V]``, the distribution that each token was drawn from given the siblings before it; None
            where tokens were not drawn at random.
    """

    tokens: Tensor
    parents: Tensor | None = None
    num_drafts: Tensor | None = None
    probs: Tensor | None = None


class Accepted(NamedTuple):
    """What a step gave. Rows that finished, or had no work, have 0 tokens.

    Attributes:
        tokens: ``[B, T]`` int64, the newly committed tokens: the accepted drafts and the token that follows them.
        num_tokens: ``[B]`` int32 of them. As many tokens were processed by the target in this step: the last committed
            token of the step before, and the accepted drafts.
        path: ``[B, T]`` int32, window indices of the processed ones, in order.
        ids: the new tokens on the host.
        hidden: ``[B, T, D]`` of the window, or None.
    """

    tokens: Tensor
    num_tokens: Tensor
    path: Tensor
    ids: list[list[int]]
    hidden: Tensor | None = None


class Drafter(ABC):
    """Guesses tokens. One drafter serves one batch at a time.

    Attributes:
        needs_hidden: whether it wants the target's hidden states.
    """

    needs_hidden = False

    def check(self, verifier: Verifier, num_drafts: int) -> None:  # noqa: ARG002
        """Refuse a target that this drafter can't draft for, or so many drafts, before anything runs.

        Raises:
            ValueError: one line that says what doesn't fit.
        """
        if self.needs_hidden and not verifier.gives_hidden:
            raise ValueError(
                f"{type(self).__name__} drafts from hidden states: it needs a verifier whose gives_hidden is True"
            )

    @abstractmethod
    def start(self, start: Start) -> None:
        """A new batch."""

    @abstractmethod
    def propose(self, num_drafts: int, width: int, max_tokens: int) -> Draft:
        """Guess the next tokens.

        Args:
            num_drafts: how many tokens deep, at least 1.
            width: 1 for a chain, else the number of candidates per place of a tree.
            max_tokens: at most so many drafts in all, at least ``num_drafts``.
        """

    @abstractmethod
    def update(self, accepted: Accepted) -> None:
        """Tokens came, from a window with this drafter's drafts or without any."""


class Shape(NamedTuple):
    """A tree with one long branch: at each depth several candidates, of which the first one is drafted on.

    Attributes:
        parents: window index of each draft's parent.
        widths: candidates at each depth.
    """

    parents: list[int]
    widths: list[int]


def branch(num_drafts: int, width: int, max_tokens: int) -> Shape:
    """The tree of drafters that go one token deeper at a time; extra candidates go to the first tokens first."""
    spare = max_tokens - num_drafts
    widths, parents, parent = [], [], 0
    for _ in range(num_drafts):
        extra = min(width - 1, spare)
        spare -= extra
        widths.append(1 + extra)
        parents += [parent] * (1 + extra)
        parent = len(parents) - extra  # window index of the first candidate
    return Shape(parents, widths)


def candidates(
    logits: Tensor, width: int, sampling: Sampling | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """Guesses from a drafter's logits ``[B, V]``: tokens ``[B, width]``, and what they were drawn from.

    Without sampling, the likeliest tokens and None. With it, tokens drawn without replacement and the fp32 distribution
    ``[B, width, V]`` of each one given those before it.
    """
    if sampling is None:
        return logits.topk(width, dim=-1).indices, None
    probs = sampling.probabilities(logits)
    tokens, drawn_from = [], []
    taken = torch.zeros_like(probs, dtype=torch.bool)
    for _ in range(width):
        rest = probs.masked_fill(taken, 0)
        mass = rest.sum(-1, keepdim=True)
        # Nothing left to draw from (top-k 1, say): the likeliest other token, for certain.
        other = logits.masked_fill(taken, float("-inf")).argmax(-1, keepdim=True)
        certain = torch.zeros_like(probs).scatter_(1, other, 1.0)
        rest = torch.where(mass > 0, rest / mass, certain)
        token = draw(rest, generator)[:, None]
        tokens.append(token)
        drawn_from.append(rest)
        taken = taken.scatter(1, token, value=True)
    return torch.cat(tokens, dim=1), torch.stack(drawn_from, dim=1)
