"""The device's side of a step: forwards and draws, launched without waiting for what they give."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.engine.constraints import Constraints
from replayssm.engine.contents import scatter
from replayssm.engine.draft_length import DraftLength
from replayssm.engine.drafts import Drafts, Proposal
from replayssm.engine.drawn import Sampled, SampledCopy, VerifiedCopy
from replayssm.engine.forward import Chunk
from replayssm.engine.outputs import TokenLogprobs
from replayssm.engine.request import Sequence
from replayssm.engine.rows import Rows
from replayssm.engine.sampler import Sampler
from replayssm.engine.scheduler import Piece
from replayssm.engine.tables import Batch, RowTables
from replayssm.engine.transfer import to_device
from replayssm.speculate.sampling import NO_TOKEN


class Read(NamedTuple):
    """What the host read of one sequence.

    Attributes:
        sequence: which.
        tokens: its new ones.
        logprobs: one for each, and perhaps more behind them; or none.
        num_drafts: of a window, how many drafts it had.
        broken: whether the logits behind these tokens, as far as a constraint left them, gave none.
    """

    sequence: Sequence
    tokens: list[int]
    logprobs: Sequence_[TokenLogprobs]
    num_drafts: int | None
    broken: bool


@dataclass
class Launched:
    """Tokens that were drawn, on their way to the host.

    Attributes:
        sequences: that they are of.
        copy: one token for each sequence, or a window's.
        num_drafts: of each sequence's window; None for one token each.
        learn: tells the drafter what was drawn, once the host knows it.
    """

    sequences: list[Sequence]
    copy: SampledCopy | VerifiedCopy
    num_drafts: list[int] | None = None
    learn: Learn | None = None

    def synchronize(self) -> None:
        """Wait for the tokens."""
        self.copy.copy.wait()

    def wait(self) -> list[Read]:
        """The tokens, as soon as they are there."""
        if isinstance(self.copy, SampledCopy):
            found, scores = self.copy.wait()
            tokens = [[token] for token in found]
            logprobs: Sequence_[Sequence_[TokenLogprobs]] = [(score,) if score else () for score in scores]
        else:
            tokens, logprobs = self.copy.wait()
        broken = [ids[-1:] == [NO_TOKEN] for ids in tokens]
        tokens = [ids[:-1] if is_broken else ids for ids, is_broken in zip(tokens, broken, strict=True)]
        if self.learn is not None:
            # Running ahead, a row may be another sequence's by now.
            there = [sequence.row == row for sequence, row in zip(self.sequences, self.learn.rows, strict=True)]
            self.learn([ids if is_there else [] for ids, is_there in zip(tokens, there, strict=True)])
        drafts: Sequence_[int | None] = self.num_drafts or [None] * len(tokens)
        return [Read(*one) for one in zip(self.sequences, tokens, logprobs, drafts, broken, strict=True)]


class Learn(NamedTuple):
    """What :meth:`Drafts.update` wants to know besides the tokens on the host."""

    drafts: Drafts
    rows: list[int]
    hidden: Tensor  # [B, T, D]
    tokens: Tensor  # [B, T]

    def __call__(self, ids: list[list[int]]) -> None:
        self.drafts.update(self.rows, self.hidden, self.tokens, ids)


class Launcher:
    """Runs the model, and draws tokens from what it gives.

    Args:
        runner: the model.
        sampler: draws.
        tables: tokens and pages of each row.
        constraints: masks what may not come.
        drafts: None without speculation.
        lengths: chooses how many of them; None: as many as there may be.
        eos_token_ids: of the model.
    """

    def __init__(
        self,
        runner: Any,
        sampler: Sampler,
        tables: RowTables,
        constraints: Constraints,
        drafts: Drafts | None,
        lengths: DraftLength | None,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.runner = runner
        self.sampler = sampler
        self.tables = tables
        self.constraints = constraints
        self.drafts = drafts
        self.lengths = lengths
        self.eos_token_ids = eos_token_ids
        self._rows: Rows | None = None  # of the last batch that decoded
        self._rows_of: list[Sequence] = []

    def join(self, sequence: Sequence) -> None:
        """A sequence got a row."""
        request = sequence.request
        self.tables.join(sequence)
        if sequence.saved is not None:
            pages = sequence.pages[: -(-sequence.saved.done // self.runner.page_size)]
            scatter(self.runner, sequence.slot, pages, sequence.saved.tensors)
            sequence.saved = None
        self.sampler.join(
            sequence.row,
            request.params,
            seed=request.seed,
            index=sequence.index,
            prompt=request.prompt,
            output=sequence.tokens[len(request.prompt) :],
            eos_token_ids=self.eos_token_ids,
        )
        if self.drafts is not None:
            self.drafts.join(sequence.row, sequence.tokens)
        self._rows_of = []

    def leave(self, row: int) -> None:
        """A sequence gives its row back."""
        self.sampler.leave(row)
        if self.drafts is not None:
            self.drafts.leave(row)
        self._rows_of = []

    def wipe(self, pages: Sequence_[int]) -> None:
        """Free pages hold what is no number."""
        if self.drafts is not None and pages:
            self.drafts.wipe(pages)

    def prefill(self, pieces: Sequence_[Piece], *, ahead: bool = False) -> list[Launched]:
        """Compute pieces of prompts, and draw a token for each sequence whose last token is among them.

        Args:
            pieces: of sequences; those of one in their order, the first ones of all before the second ones.
            ahead: another step may be launched before these tokens are read.
        """
        chunks = [Chunk(s.slot, s.pages, start, s.tokens[start:end], keep) for s, start, end, keep, _ in pieces]
        logits, hidden = self.runner.prefill(chunks)
        if self.drafts is not None and self.drafts.needs_hidden:
            self.drafts.prefilled([piece.sequence.row for piece in pieces], chunks, hidden)
        last = [i for i, piece in enumerate(pieces) if piece.end == len(piece.sequence.tokens)]
        if not last:
            return []
        sequences = [pieces[i].sequence for i in last]
        positions = [len(sequence.tokens) for sequence in sequences]
        batch = self.tables.batch(sequences, [position - 1 for position in positions])
        ends = list(accumulate(len(chunk.tokens) for chunk in chunks))
        columns = [last, [ends[i] - 1 for i in last]]
        of_chunk, of_token = to_device(columns, torch.int64, self.tables.device).unbind()
        rows = self.sampler.rows([sequence.row for sequence in sequences])
        masks = self._masks(sequences)
        sampled = self.sampler.sample(logits.index_select(0, of_chunk), rows, batch.lengths + 1, masks)
        return [self._drawn(sequences, batch, sampled, hidden.index_select(0, of_token), ahead=ahead)]

    def decode(
        self, sequences: list[Sequence], windows: list[int], *, ahead: bool = False, drafting: bool = True
    ) -> Launched:
        """One more token for each sequence, or as many as its drafts turn out to be right.

        Args:
            sequences: whose last token isn't in their slots yet.
            windows: how many tokens each one's verify window may have, this last one counted.
            ahead: the next step may be launched before these tokens are read.
            drafting: whether there may be drafts; all tokens that were drawn before have been read then.
        """
        batch = self.tables.batch(sequences, [sequence.done for sequence in sequences])
        tokens = self.tables.tokens.index_select(0, batch.rows)
        if self.drafts is not None and not drafting:
            self.drafts.missed([sequence.row for sequence in sequences])
        elif self.drafts is not None:
            proposal = self._propose(self.drafts, sequences, batch, windows)
            if any(proposal.num_drafts):
                return self._verify(sequences, batch, torch.cat([tokens[:, None], proposal.tokens], 1), proposal)
        logits, hidden = self.runner.decode(batch.slots, batch.pages, batch.lengths, tokens)
        sampled = self.sampler.sample(logits, self._rows_for(sequences), batch.lengths + 1, self._masks(sequences))
        for sequence in sequences:
            sequence.done += 1
        return self._drawn(sequences, batch, sampled, hidden, ahead=ahead)

    def _propose(self, drafts: Drafts, sequences: list[Sequence], batch: Batch, windows: list[int]) -> Proposal:
        """As many drafts as are worth it. Of those that cost nothing, it is seen first how many there are."""
        limits = [window - 1 for window in windows]
        rows = [sequence.row for sequence in sequences]
        if self.lengths is not None and drafts.needs_hidden:
            longest = self.lengths.choose(limits)
            limits = [min(limit, longest) for limit in limits]
        proposal = drafts.propose(rows, batch.pages, batch.lengths, limits)
        if self.lengths is None or drafts.needs_hidden:
            return proposal
        return proposal.cut(self.lengths.choose(proposal.num_drafts))

    def _verify(self, sequences: list[Sequence], batch: Batch, tokens: Tensor, proposal: Proposal) -> Launched:
        counts = [1 + count for count in proposal.num_drafts]
        num_tokens = to_device(counts, torch.int32, self.tables.device)
        logits, hidden = self.runner.verify(batch.slots, batch.pages, batch.lengths, tokens, num_tokens)
        masks = self._window_masks(sequences, proposal, tokens.shape[1])
        verified = self.sampler.verify_window(
            logits, self._rows_for(sequences), batch.lengths + 1, tokens, num_tokens, masks
        )
        copy = verified.start_copy()  # what the host waits for comes first
        self.runner.commit(batch.slots, num_tokens, verified.num_accepted)
        self._note(sequences, batch, verified.last)
        learn = self._learn(sequences, hidden, verified.tokens)
        return Launched(sequences, copy, proposal.num_drafts, learn)

    def _drawn(
        self, sequences: list[Sequence], batch: Batch, sampled: Sampled, hidden: Tensor, *, ahead: bool
    ) -> Launched:
        """One token for each sequence; `hidden` is ``[B, D]``."""
        self._note(sequences, batch, sampled.tokens)
        if ahead and self.drafts is not None and self.drafts.needs_hidden:
            # When these tokens are read, the next step has put its hidden states in the place of theirs.
            self.drafts.missed([sequence.row for sequence in sequences])
            return Launched(sequences, sampled.start_copy())
        learn = self._learn(sequences, hidden[:, None], sampled.tokens[:, None])
        return Launched(sequences, sampled.start_copy(), learn=learn)

    def _learn(self, sequences: list[Sequence], hidden: Tensor, tokens: Tensor) -> Learn | None:
        if self.drafts is None:
            return None
        return Learn(self.drafts, [sequence.row for sequence in sequences], hidden, tokens)

    def _note(self, sequences: list[Sequence], batch: Batch, last: Tensor) -> None:
        """A token of each sequence is in flight, and that's where the next step finds it."""
        self.tables.tokens.index_copy_(0, batch.rows, last)
        for sequence in sequences:
            sequence.in_flight += 1

    def _rows_for(self, sequences: list[Sequence]) -> Rows:
        """The sampler's rows, which stay the same as long as the batch does."""
        if self._rows is None or self._rows_of != sequences:
            self._rows = self.sampler.rows([sequence.row for sequence in sequences])
            self._rows_of = sequences
        return self._rows

    def _masks(self, sequences: list[Sequence]) -> Tensor | None:
        """What may come, for the rows with a constraint in their order."""
        constraints = [s.constraint for s in sequences if s.constraint is not None]
        return self.constraints.masks(constraints, self.tables.device)

    def _window_masks(self, sequences: list[Sequence], proposal: Proposal, width: int) -> Tensor | None:
        """What may come at each place of a window, for the rows with a constraint in their order."""
        places = [place for place, sequence in enumerate(sequences) if sequence.constraint is not None]
        if not places:
            return None
        ids = proposal.ids()
        drafts = [ids[place][: proposal.num_drafts[place]] for place in places]
        constraints = [s.constraint for s in sequences if s.constraint is not None]
        return self.constraints.window_masks(constraints, drafts, width, self.tables.device)
