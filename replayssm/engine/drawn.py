"""What a sampler gives: tokens on the device, and their way to the host.

B rows of a batch, T tokens of a verify window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from replayssm.engine.logprobs import Logprobs, token_logprobs
from replayssm.engine.outputs import TokenLogprobs
from replayssm.engine.rows import Rows
from replayssm.engine.transfer import HostCopy
from replayssm.speculate.sampling import NO_TOKEN, told


@dataclass(frozen=True)
class Sampled:
    """One token for each row, on the device.

    Attributes:
        tokens: int64 ``[B]``.
        scores: floats ``[B]``, what each was taken for: finite, unless the logits were broken.
    """

    tokens: Tensor
    scores: Tensor
    logprobs: Logprobs | None
    rows: Rows

    def start_copy(self) -> SampledCopy:
        """Begin to copy it to the host."""
        return SampledCopy(HostCopy([self.tokens, self.scores, *(self.logprobs or ())]), self.rows)


@dataclass(frozen=True)
class SampledCopy:
    """Tokens on their way to the host."""

    copy: HostCopy
    rows: Rows

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Each row's token, or NO_TOKEN, and its log-probabilities where they were asked for."""
        tokens, scores, *logprobs = self.copy.wait()
        ids: list[int] = told(tokens, scores).tolist()
        found = _by_row(ids, Logprobs(*logprobs) if logprobs else None, self.rows)
        return ids, found


@dataclass(frozen=True)
class Verified:
    """What a verify window gives, on the device.

    Attributes:
        tokens: int64 ``[B, T]``; the first ``num_accepted`` of a row are its new tokens.
        scores: floats ``[B, T]``, as those of :class:`Sampled`.
        num_accepted: int32 ``[B]``: as many tokens of the window are kept, its first one counted.
        last: int64 ``[B]``, the last new token; anything for a row without tokens in its window.
        logprobs: one for each place of the window.
    """

    tokens: Tensor
    scores: Tensor
    num_accepted: Tensor
    last: Tensor
    logprobs: tuple[Logprobs, ...]
    rows: Rows

    def start_copy(self) -> VerifiedCopy:
        """Begin to copy it to the host."""
        logprobs = [part for place in self.logprobs for part in place]
        return VerifiedCopy(HostCopy([self.tokens, self.scores, self.num_accepted, *logprobs]), self.rows)


@dataclass(frozen=True)
class VerifiedCopy:
    """New tokens on their way to the host."""

    copy: HostCopy
    rows: Rows

    def wait(self) -> tuple[list[list[int]], list[list[TokenLogprobs]]]:
        """Each row's new tokens, up to the first NO_TOKEN, and their log-probabilities where they were asked for."""
        tokens, scores, num_accepted, *logprobs = self.copy.wait()
        ids, counts = told(tokens, scores).tolist(), num_accepted.tolist()
        counts = [_until_broken(row, count) for row, count in zip(ids, counts, strict=True)]
        found: list[list[TokenLogprobs]] = [[] for _ in ids]
        for place, parts in enumerate(zip(*[iter(logprobs)] * 3, strict=True)):
            for row, one in enumerate(_by_row([row[place] for row in ids], Logprobs(*parts), self.rows)):
                if one is not None and place < counts[row]:
                    found[row].append(one)
        return [row[:count] for row, count in zip(ids, counts, strict=True)], found


def _until_broken(ids: list[int], count: int) -> int:
    """How many of the first `count` are told: none behind a NO_TOKEN."""
    return ids.index(NO_TOKEN) + 1 if NO_TOKEN in ids[:count] else count


def _by_row(tokens: Sequence[int], logprobs: Logprobs | None, rows: Rows) -> list[TokenLogprobs | None]:
    """One for each row of the batch, None where none were asked for."""
    places = [place for place, count in enumerate(rows.wanted) if count is not None]
    found: list[TokenLogprobs | None] = [None] * len(tokens)
    if logprobs is not None:
        wanted = [count for count in rows.wanted if count is not None]
        for place, one in zip(places, token_logprobs([tokens[p] for p in places], wanted, logprobs), strict=True):
            found[place] = one
    return found
