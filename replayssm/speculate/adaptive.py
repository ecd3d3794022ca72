"""How many tokens to draft: from what was accepted so far, and from what drafts and windows cost.

With a_d the chance that the draft at depth d is accepted once all before it are, K drafts give

    E(K) = 1 + a_1 + a_1 a_2 + … + a_1 ⋯ a_K

tokens a step, at the cost of K drafts and a window of K + 1 tokens. The K with the most tokens per cost is taken, and 0
where no K beats plain decoding. Everything here is arithmetic on the host: the same observations give the same
choices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Protocol


class Costs(Protocol):
    """What a step costs, in any one unit."""

    def step(self, num_drafts: int) -> float:
        """Proposing so many tokens and verifying them; 0 is a plain decode step."""
        ...


class GivenCosts:
    """Costs that are known beforehand, linear in the number of drafts. The unit is a plain decode step.

    Args:
        per_token: what each further token of a window adds.
        per_draft: what proposing each token costs.
    """

    def __init__(self, per_token: float = 0.05, per_draft: float = 0.05) -> None:
        for name, value in (("per_token", per_token), ("per_draft", per_draft)):
            if value < 0:
                raise ValueError(f"{name} is {value}: a cost is at least 0")
        self.per_token, self.per_draft = per_token, per_draft

    def step(self, num_drafts: int) -> float:
        """See :meth:`Costs.step`."""
        return 1 + (self.per_token + self.per_draft) * num_drafts


class MeasuredCosts:
    """Costs from measured seconds, the median of the last few steps of each draft length.

    A median, because a step now and then takes many times as long: a caller paused, another process had the processor.
    The first step of a length is not counted: it may hold a warm-up. A length that was not seen lies on the line
    between the next shorter and the next longer one that were; beyond them, it is to its neighbour as in the prior.

    Args:
        prior: relative costs before anything was measured.
        last: how many steps of a length count.
    """

    def __init__(self, prior: Costs | None = None, last: int = 5) -> None:
        if last < 1:
            raise ValueError(f"last is {last}: at least one step is wanted")
        self.prior: Costs = prior or GivenCosts()
        self.last = last
        self._taken: dict[int, deque[float]] = {}  # empty behind the first step
        self._seconds: dict[int, float] = {}

    def observe(self, num_drafts: int, seconds: float) -> None:
        """One step took so long, proposal included."""
        taken = self._taken.get(num_drafts)
        if taken is None:
            self._taken[num_drafts] = deque(maxlen=self.last)
            return
        taken.append(seconds)
        self._seconds[num_drafts] = median(taken)

    def step(self, num_drafts: int) -> float:
        """See :meth:`Costs.step`."""
        seen = self._seconds
        if not seen:
            return self.prior.step(num_drafts)
        shorter = max((k for k in seen if k <= num_drafts), default=None)
        longer = min((k for k in seen if k >= num_drafts), default=None)
        if shorter is not None and longer is not None:
            share = (num_drafts - shorter) / max(1, longer - shorter)
            return seen[shorter] + share * (seen[longer] - seen[shorter])
        nearest = shorter if longer is None else longer
        assert nearest is not None, "a length that was seen is shorter, longer or the same"
        return seen[nearest] * self.prior.step(num_drafts) / self.prior.step(nearest)


class AdaptiveLength:
    """Picks the draft length of each step of a batch.

    Acceptance is averaged per depth, over the rows of a step and exponentially over steps. A depth that was never
    reached is taken to be accepted like the one before it. Where a drafter has nothing to say for some rows of a batch
    (n-grams), the others' tokens must pay for all; a step without any draft says nothing. When plain decoding is best,
    speculation is off for `probe_after` steps, then one step drafts again to see whether it pays by now; each probe
    that fails doubles the wait, up to `longest_wait`.

    Args:
        max_drafts: K_max.
        costs: see :class:`GivenCosts` and :class:`MeasuredCosts`.
        weight: of a new step's acceptance.
        first_guess: acceptance before anything was seen.
        probe_after, longest_wait: steps without drafts.
        probe_drafts: drafts of a probe.
    """

    def __init__(
        self,
        max_drafts: int,
        costs: Costs | None = None,
        *,
        weight: float = 0.1,
        first_guess: float = 0.7,
        probe_after: int = 16,
        longest_wait: int = 256,
        probe_drafts: int = 2,
    ) -> None:
        if max_drafts < 1:
            raise ValueError(f"max_drafts is {max_drafts}: it must be at least 1")
        if not 0 < first_guess < 1:
            raise ValueError(f"first_guess is {first_guess}: a chance between 0 and 1 is wanted")
        if not 1 <= probe_after <= longest_wait:
            raise ValueError(
                f"probe_after is {probe_after}, longest_wait {longest_wait}: 1 ≤ probe_after ≤ longest_wait is wanted"
            )
        _check_weight(weight)
        self.max_drafts = max_drafts
        self.costs: Costs = costs or GivenCosts()
        self.weight = weight
        self.first_guess = first_guess
        self.probe_after, self.longest_wait = probe_after, longest_wait
        self.probe_drafts = max(1, min(probe_drafts, max_drafts))
        self._accepted: list[float | None] = [None] * max_drafts
        self._share = 1.0  # of the rows that had drafts, where any had
        self._wait = probe_after
        self._idle = 0

    def acceptance(self, depth: int) -> float:
        """a_d: the chance that the draft at a depth from 1 is accepted, once those before it are."""
        seen = [a for a in self._accepted[:depth] if a is not None]
        return seen[-1] if seen else self.first_guess

    def expected_tokens(self, num_drafts: int) -> float:
        """E(K)."""
        total, chance = 1.0, 1.0
        for depth in range(1, num_drafts + 1):
            chance *= self.acceptance(depth)
            total += self._share * chance
        return total

    def rate(self, num_drafts: int) -> float:
        """Expected tokens per cost."""
        return self.expected_tokens(num_drafts) / self.costs.step(num_drafts)

    def choose(self) -> int:
        """The number of drafts of the next step, 0 to `max_drafts`."""
        best = max(range(self.max_drafts + 1), key=lambda k: (self.rate(k), -k))
        if best:
            self._wait, self._idle = self.probe_after, 0
            return best
        if self._idle < self._wait:
            self._idle += 1
            return 0
        self._idle = 0
        self._wait = min(2 * self._wait, self.longest_wait)
        return self.probe_drafts

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What became of a step's drafts, in the rows that had work.

        Args:
            drafted: how deep each row's drafts went; 0 for a row without any.
            accepted: how many of them were accepted in each row.
        """
        if any(drafted):
            self._share += self.weight * (sum(d > 0 for d in drafted) / len(drafted) - self._share)
        for depth in range(1, self.max_drafts + 1):
            right = right_at(depth, drafted, accepted)
            if not right:
                continue
            share = sum(right) / len(right)
            before = self._accepted[depth - 1]
            before = self.acceptance(depth) if before is None else before
            self._accepted[depth - 1] = before + self.weight * (share - before)


def right_at(depth: int, drafted: Sequence[int], accepted: Sequence[int]) -> list[bool]:
    """Whether the drafts at a depth were right, of those rows whose drafts reach it and were right so far."""
    return [a >= depth for d, a in zip(drafted, accepted, strict=True) if d >= depth and a >= depth - 1]


def _check_weight(weight: float) -> None:
    if not 0 < weight <= 1:
        raise ValueError(f"weight is {weight}: it must be above 0 and at most 1")
