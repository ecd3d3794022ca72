"""Guesses of the next tokens, for batches whose rows come and go.

A row is one of the engine's, from `join` to `leave`. Whatever is drafted, the tokens that come are the same: drafts
that aren't what the sampler draws are dropped.

B rows of a batch, T tokens of a window, K drafts, P pages of the longest sequence in it, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.engine.forward import Chunk
from replayssm.engine.transfer import to_device
from replayssm.speculate.ngram import NgramDrafter, Text


class Proposal(NamedTuple):
    """Drafts that follow each row's last token.

    Attributes:
        tokens: int64 ``[B, K]`` on the device; any valid id where a row has fewer. K may be 0.
        num_drafts: how many each row has, known without asking the device.
    """

    tokens: Tensor
    num_drafts: list[int]

    def cut(self, longest: int) -> Proposal:
        """The same with so many drafts of each row at most."""
        if longest >= self.tokens.shape[1]:
            return self
        return Proposal(self.tokens[:, :longest], [min(count, longest) for count in self.num_drafts])

    def ids(self) -> list[list[int]]:
        """The drafts on the host. Waits for the device."""
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.num_drafts, strict=True)]


class Drafts(ABC):
    """Guesses tokens for the rows of an engine.

    For each row the order of calls is ``join (prefilled)* update (propose update)* leave``. The first update brings the
    token that the prefill gave. Every forward and every drawn token of the row is reported, with drafts or without; for
    some time :meth:`missed` may stand in the place of the two, or of the first.

    Attributes:
        needs_hidden: whether it wants the model's hidden states; else `prefilled` need not be called, and `update`
            takes None for them. Its drafts cost time on the device, so there is no use in more than are wanted.
    """

    needs_hidden = False

    def missed(self, rows: Sequence[int]) -> None:  # noqa: B027
        """What was drawn since the last `propose` will not be proposed from, or has no update at all.

        A drafter that wants hidden states forgets it; others have the tokens, and need do nothing.
        """

    def wipe(self, pages: Sequence[int]) -> None:  # noqa: B027
        """Of these pages nothing may be read until it is written again: NaN there would spoil what is masked, too."""

    @abstractmethod
    def join(self, row: int, tokens: Sequence[int]) -> None:
        """A sequence got a row.

        Args:
            row: the row.
            tokens: all of its tokens so far; those that are drawn from now on come by `update`.
        """

    @abstractmethod
    def leave(self, row: int) -> None:
        """A sequence gave its row back; one without a sequence stays so."""

    def prefilled(self, rows: Sequence[int], chunks: Sequence[Chunk], hidden: Tensor) -> None:  # noqa: B027
        """Chunks were computed.

        Args:
            rows: one for each chunk.
            chunks: as the runner got them.
            hidden: ``[sum of the chunks' lengths, D]``, as the runner gave them.
        """

    @abstractmethod
    def update(self, rows: Sequence[int], hidden: Tensor | None, tokens: Tensor, ids: Sequence[Sequence[int]]) -> None:
        """Tokens were drawn.

        Args:
            rows: of the batch.
            hidden: ``[B, T, D]`` of the tokens that they follow: the window's, of a decode step those of one token,
                after a prefill that of its last token.
            tokens: int64 ``[B, T]`` on the device; the first ``len(ids[b])`` of a row were drawn.
            ids: the same tokens on the host, and nothing else. A row may have none.
        """

    @abstractmethod
    def propose(self, rows: Sequence[int], pages: Tensor, lengths: Tensor, limits: Sequence[int]) -> Proposal:
        """Guess what follows each row's last token.

        Args:
            rows: of the batch.
            pages: int32 ``[B, P]``, with room for each row's last token and as many drafts as it may have.
            lengths: int32 ``[B]``, tokens that the model has computed: all but the last one.
            limits: so many drafts each row may have.
        """


class NgramDrafts(Drafts):
    """Looks the last tokens up in what came before, and proposes what followed them there.

    Args:
        device: where the drafts are wanted.
        settings: those of :class:`replayssm.speculate.NgramDrafter`.
    """

    def __init__(self, device: torch.device | str, **settings: int) -> None:
        self.device = torch.device(device)
        self._drafter = NgramDrafter(**settings)
        self._texts: dict[int, Text] = {}

    def join(self, row: int, tokens: Sequence[int]) -> None:
        """See :meth:`Drafts.join`."""
        text = self._texts[row] = Text(self._drafter.sizes, self._drafter.max_occurrences)
        text.extend(list(tokens))

    def leave(self, row: int) -> None:
        """See :meth:`Drafts.leave`."""
        self._texts.pop(row, None)

    def update(
        self,
        rows: Sequence[int],
        hidden: Tensor | None,  # noqa: ARG002
        tokens: Tensor,  # noqa: ARG002
        ids: Sequence[Sequence[int]],
    ) -> None:
        """See :meth:`Drafts.update`."""
        for row, new in zip(rows, ids, strict=True):
            if row in self._texts:
                self._texts[row].extend(list(new))

    def propose(
        self,
        rows: Sequence[int],
        pages: Tensor,  # noqa: ARG002
        lengths: Tensor,  # noqa: ARG002
        limits: Sequence[int],
    ) -> Proposal:
        """See :meth:`Drafts.propose`."""
        found = [self._continuation(row, limit) for row, limit in zip(rows, limits, strict=True)]
        longest = max(map(len, found))
        padded = [drafts + [0] * (longest - len(drafts)) for drafts in found]
        tokens = to_device(padded, torch.int64, self.device)
        return Proposal(tokens.view(len(found), longest), [len(drafts) for drafts in found])

    def _continuation(self, row: int, limit: int) -> list[int]:
        if limit < 1:
            return []
        return next(iter(self._texts[row].continuations(limit, 1)), [])
