"""Verify windows whose number of kept tokens is set, to measure what windows cost whatever a model's drafts are worth.

Everything is computed as with real drafts; only how many tokens of a window are kept doesn't follow from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from replayssm.engine.drafts import Drafts, Proposal
from replayssm.engine.drawn import Verified
from replayssm.engine.engine import Engine
from replayssm.engine.transfer import to_device


class SetDrafts(Drafts):
    """Proposes as many drafts as it may, the same token each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def join(self, row: int, tokens: Sequence[int]) -> None:
        """See :meth:`Drafts.join`."""

    def leave(self, row: int) -> None:
        """See :meth:`Drafts.leave`."""

    def update(self, rows: Sequence[int], hidden: Tensor | None, tokens: Tensor, ids: Sequence[Sequence[int]]) -> None:
        """See :meth:`Drafts.update`."""

    def propose(self, rows: Sequence[int], pages: Tensor, lengths: Tensor, limits: Sequence[int]) -> Proposal:  # noqa: ARG002
        """See :meth:`Drafts.propose`."""
        tokens = to_device([[0] * max(limits)] * len(limits), torch.int64, self.device)
        return Proposal(tokens.view(len(limits), max(limits)), list(limits))


def set_windows(engine: Engine, kept: int) -> None:
    """Let an engine keep so many tokens of every window.

    Args:
        engine: with speculation.
        kept: tokens, or all of a window that is shorter.
    """
    launcher = engine.launcher
    launcher.drafts = SetDrafts(engine.runner.pool.device)
    draw = launcher.sampler.verify_window

    def verify_window(*given: Any) -> Verified:
        verified, num_tokens = draw(*given), given[4]
        accepted = num_tokens.clamp(max=kept)
        last = verified.tokens.gather(1, (accepted.long() - 1).clamp_min(0)[:, None])[:, 0]
        return replace(verified, num_accepted=accepted, last=last)

    launcher.sampler.verify_window = verify_window  # type: ignore[assignment, method-assign]
