"""How many tokens to draft: as many as give the most tokens per second, and none where that is best.

What steps take is measured while the engine runs, for sizes of batches by themselves: a window that costs next to
nothing beside one row takes three steps' time beside a hundred. How often drafts are right is counted over all rows.
Whatever is chosen, the tokens that come are the same.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replayssm.speculate.adaptive import GivenCosts, MeasuredCosts, right_at

FIRST_GUESS = 0.7  # of the chance that a draft is right
WEIGHT = 0.1  # of each draft that was right or wrong
MARGIN = 1.02  # drafting must pay by so much, or noise would switch it on
PLAIN_STEPS = 4  # at first, and once in REFRESH steps with drafts, to know what a step without them takes
REFRESH = 256
LOOKS = 4  # steps in a row for which the drafter has nothing to say
TRIALS = 4  # drafts that must have been seen before it is judged again whether they pay
FIRST_WAIT, LONGEST_WAIT = 16, 512  # steps without drafts, twice as many each time that drafts don't pay
PRIOR = GivenCosts(per_token=0.15, per_draft=0.0)


@dataclass
class _Size:
    """What is known of batches of about one size.

    Attributes:
        costs: seconds of a step by the number of drafts.
        plain_left: steps without drafts, to measure them, before the first one with.
        skip: steps without drafts, since they didn't pay or to measure again.
        wait: how many there are the next time.
        trials: drafts that are to be seen, whether or not they seem to pay.
        looks: steps in a row for which there was nothing to draft.
        drafted: steps with drafts since those without were measured.
    """

    costs: MeasuredCosts = field(default_factory=lambda: MeasuredCosts(PRIOR))
    plain_left: int = PLAIN_STEPS
    skip: int = 0
    wait: int = FIRST_WAIT
    trials: int = 0
    looks: int = 0
    drafted: int = 0


class DraftLength:
    """Chooses the number of drafts of each step.

    For each step: :meth:`begin`; where it says so, :meth:`choose`, then :meth:`saw`; and :meth:`took`, if the step was
    one that tells something.

    Args:
        max_drafts: of a window.
    """

    def __init__(self, max_drafts: int) -> None:
        self._chance = [FIRST_GUESS] * max_drafts  # that the draft at a depth is right, once those before it are
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)

    def begin(self, rows: int) -> bool:
        """Whether a step of so many rows may have drafts."""
        size = self._size(rows)
        if size.plain_left:
            size.plain_left -= 1
            return False
        if size.skip:
            size.skip -= 1
            return False
        return True

    def choose(self, counts: Sequence[int]) -> int:
        """The number of drafts that each row may have, at most.

        Args:
            counts: how many there are, or could be, of each row.
        """
        size, longest = self._size(len(counts)), max(counts, default=0)
        if not longest:
            size.looks += 1
            if size.looks == LOOKS:
                self._stop(size)
            return 0
        size.looks = 0
        plain = len(counts) / size.costs.step(0) * MARGIN
        best = max(range(1, longest + 1), key=lambda k: (self._tokens(counts, k) / size.costs.step(k), -k))
        if self._tokens(counts, best) / size.costs.step(best) > plain:
            size.wait = FIRST_WAIT
            self._count(size)
            return best
        if size.trials > 0:
            return longest
        if sum(1 + count for count in counts) / size.costs.step(longest) <= plain:
            size.wait = LONGEST_WAIT  # not even drafts that are always right would pay
        self._stop(size)
        return 0

    def saw(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What became of a step's drafts: of each row, how many it had, and how many of them were right."""
        self._size(len(drafted)).trials -= sum(count > 0 for count in drafted)
        for depth, before in enumerate(self._chance, 1):
            right = right_at(depth, drafted, accepted)
            if right:
                kept = (1 - WEIGHT) ** len(right)
                share = sum(right) / len(right)
                self._chance[depth - 1] = kept * before + (1 - kept) * share

    def took(self, rows: int, num_drafts: int, seconds: float) -> None:
        """A step that did nothing but decode took so long; `num_drafts` is the most that a row had."""
        self._size(rows).costs.observe(num_drafts, seconds)

    def _size(self, rows: int) -> _Size:
        return self._sizes[_rounded(rows)]

    def _tokens(self, counts: Sequence[int], longest: int) -> float:
        """Tokens that a step is expected to give."""
        expected, chance = [1.0], 1.0
        for one in self._chance[:longest]:
            chance *= one
            expected.append(expected[-1] + chance)
        return sum(expected[min(count, longest)] for count in counts)

    def _stop(self, size: _Size) -> None:
        """No drafts for a while; then some, to see."""
        size.skip, size.wait = size.wait, min(2 * size.wait, LONGEST_WAIT)
        size.looks, size.trials = 0, TRIALS

    def _count(self, size: _Size) -> None:
        """A step has drafts. Once in a while some without are measured, since contexts grow."""
        size.drafted += 1
        if size.drafted == REFRESH:
            size.drafted, size.plain_left = 0, PLAIN_STEPS


class Pace:
    """Tells a :class:`DraftLength` what steps take.

    Args:
        lengths: who wants to know.
        clock: seconds.
    """

    def __init__(self, lengths: DraftLength, clock: Callable[[], float] = time.perf_counter) -> None:
        self.lengths, self.clock = lengths, clock
        self._began = 0.0
        self._last: float | None = None  # when the step before was done, of steps that are launched ahead

    def begin(self) -> None:
        """A step is about to be planned. Unless steps are launched ahead, nothing is in flight."""
        self._began = self.clock()

    def end(self, rows: int, num_drafts: int, *, ahead: bool, drafting: bool) -> None:
        """A step is done.

        Args:
            rows: that decoded; 0 if it did something else, too, which tells nothing.
            num_drafts: the most that a row had.
            ahead: it was launched before the tokens of the one before were read. The device is never idle then, and
                what counts is the time from one end to the next.
            drafting: it may have had drafts. Where there were none it is no measure: without, it would run ahead.
        """
        now = self.clock()
        since = self._last if ahead else self._began
        if rows and since is not None and drafting == bool(num_drafts):
            self.lengths.took(rows, num_drafts, now - since)
        self._last = now if ahead and rows else None


def _rounded(rows: int) -> int:
    """Up to 1, 2, 3, 4, 6, 8, 12, 16, 24, …"""
    shift = max(0, (rows - 1).bit_length() - 2)
    return -(-rows >> shift) << shift
