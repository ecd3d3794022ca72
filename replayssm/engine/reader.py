"""From tokens on their way to the host to updates: first they are taken, then told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequence_
from typing import NamedTuple

from replayssm.engine.draft_length import Pace
from replayssm.engine.launch import Launched, Read
from replayssm.engine.outputs import TokenLogprobs, Update
from replayssm.engine.request import Phase, Request, Sequence
from replayssm.engine.stats import Tally
from replayssm.engine.text import TextPiece
from replayssm.errors import BROKEN_LOGITS


class _Taken(NamedTuple):
    """What a sequence has taken of what was read, for its update.

    Attributes:
        sequence: which may have ended with it.
        tokens: its own, up to its end.
        logprobs: one for each token that was read, or none.
        piece: their text, where that had to be made to know the end; else it is still to be made.
        problem: why it can't go on.
        first: whether these are the sample's first tokens.
    """

    sequence: Sequence
    tokens: list[int]
    logprobs: Sequence_[TokenLogprobs]
    piece: TextPiece | None
    problem: str | None
    first: bool


class Reader:
    """Reads what steps have drawn.

    Taking tokens is what the next step waits for. Their text is made when they are told, which may be while the device
    computes that step.

    Args:
        tally: counts.
        pace: hears what became of drafts; None where nobody wants to know.
        leave: ends a sequence whose last tokens were taken.
        discard: ends one that got no token: its logits may be broken, and nothing of them may be used any more.
        close: the last update of one of a request's samples is made.
    """

    def __init__(
        self,
        tally: Tally,
        pace: Pace | None,
        leave: Callable[[Sequence], None],
        discard: Callable[[Sequence], None],
        close: Callable[[Request], None],
    ) -> None:
        self.tally, self.pace, self.leave, self.discard, self.close = tally, pace, leave, discard, close
        self._untold: deque[_Taken] = deque()

    @property
    def has_more(self) -> bool:
        """Whether something was taken and isn't told."""
        return bool(self._untold)

    def take(self, launched: Sequence_[Launched]) -> None:
        """Wait for the tokens of a step, and append them to their sequences."""
        for drawn in launched:
            start = time.monotonic()
            drawn.synchronize()
            self.tally.waited_seconds += time.monotonic() - start
            reads = drawn.wait()
            self._note_drafts(reads)
            for read in reads:
                self._take(read)

    def tell(self) -> Iterator[Update]:
        """Updates of what was taken, each made when it is asked for."""
        while self._untold:
            update = self._update(self._untold[0])
            self._untold.popleft()
            yield update

    def forget(self) -> list[Sequence]:
        """What was taken gets no updates. Gives the sequences that have ended with it, and whose end nobody knows."""
        ended = [taken.sequence for taken in self._untold if taken.sequence.finished]
        self._untold.clear()
        return ended

    def _note_drafts(self, reads: list[Read]) -> None:
        """What became of a window's drafts."""
        drafted = [read.num_drafts for read in reads if read.num_drafts is not None]
        if not drafted:
            return
        accepted = [len(read.tokens) + read.broken - 1 for read in reads]
        self.tally.windows += sum(count > 0 for count in drafted)
        self.tally.drafted += sum(drafted)
        self.tally.accepted += sum(accepted)
        if self.pace is not None:
            self.pace.lengths.saw(drafted, accepted)

    def _take(self, read: Read) -> None:
        """Append the tokens of one sequence, and end it where they do."""
        sequence, tokens = read.sequence, read.tokens
        sequence.in_flight -= 1
        if sequence.phase is Phase.FINISHED:
            return  # it was, when this step was launched
        if read.num_drafts is not None:
            sequence.done += len(tokens)
        request, text = sequence.request, sequence.text
        before = len(sequence.tokens) - len(request.prompt)
        piece = text.append(tokens) if text.has_stops else None  # they may end it sooner
        if piece is None:
            count, ends = text.kept(tokens, before)
        else:
            count, ends = piece.num_tokens, piece.finish_reason is not None
        del tokens[count:]
        sequence.tokens += tokens
        self.tally.generated_tokens += count
        if request.first_token is None and tokens:
            request.first_token = time.monotonic()
        if sequence.constraint is not None:
            sequence.constraint.advance(tokens)
        problem = None if ends else _problem(read)
        self._untold.append(_Taken(sequence, tokens, read.logprobs, piece, problem, first=before == 0))
        if ends or problem is not None:
            end = self.discard if read.broken else self.leave
            end(sequence)
            self.tally.finished += request.finished

    def _update(self, taken: _Taken) -> Update:
        sequence, tokens, logprobs, piece, problem, first = taken
        request = sequence.request
        if piece is None:
            piece = sequence.text.append(tokens)
        text, _, reason, stop_reason = piece
        if problem is not None:
            text, reason = text + sequence.text.finish(), "error"
        if reason is not None:
            self.close(request)
        return Update(
            request.id,
            sequence.index,
            text,
            tuple(tokens),
            tuple(logprobs[: len(tokens)]) if logprobs else (),
            reason,
            stop_reason,
            problem,
            request.cached_tokens if first else None,
        )


def _problem(read: Read) -> str | None:
    """Why a sequence can't go on behind the tokens that were read."""
    constraint = read.sequence.constraint
    if constraint is None:
        return BROKEN_LOGITS if read.broken else None
    return (constraint.why_nothing_came() or BROKEN_LOGITS) if read.broken else constraint.error
