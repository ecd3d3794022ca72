"""Drafts from a smaller model with the same vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.speculate.drafter import Accepted, Draft, Drafter, Start, branch, candidates
from replayssm.speculate.verifier import Verifier


class ModelDrafter(Drafter):
    """Any model behind a :class:`Verifier`, run greedily or drawn from.

    A draft of K tokens takes K windows of the draft model. The first holds what was committed since the last draft, the
    next ones all drafts so far: where a step costs what its weights' traffic costs, that is the price of one token
    each, and nothing needs to be taken back. The last window waits uncommitted for the target's verdict; the drafts
    that were right are kept then.

    Args:
        verifier: the draft model's own, not the target's.
        sample: with a sampled target, whether drafts are drawn from the model's distribution (accepted by rejection),
            or are its likeliest tokens (accepted where the target draws them).
    """

    def __init__(self, verifier: Verifier, *, sample: bool = True) -> None:
        self.verifier = verifier
        self.sample = sample

    def check(self, verifier: Verifier, num_drafts: int) -> None:
        """See :meth:`Drafter.check`."""
        super().check(verifier, num_drafts)
        if verifier is self.verifier:
            raise ValueError("the draft model's verifier is the target's: it needs one of its own")
        if verifier.vocab_size != self.verifier.vocab_size:
            raise ValueError(
                f"the draft model has {self.verifier.vocab_size} tokens, the target {verifier.vocab_size}: "
                "a draft model with the target's vocabulary is wanted"
            )
        if num_drafts - 1 > self.verifier.max_window:
            raise ValueError(
                f"num_drafts is {num_drafts}: the draft model runs windows of at most {self.verifier.max_window} tokens"
            )

    def start(self, start: Start) -> None:
        """See :meth:`Drafter.start`."""
        self.sampling = start.sampling if self.sample else None
        self.generator = start.generator
        self.verifier.prefill(start.ids, start.mask)
        # Tokens that the draft model has not committed; of them, the last window holds the first `in_window`.
        self.pending = [[token] for token in start.first_ids]
        self.drafted: list[list[int]] | None = None

    def update(self, accepted: Accepted) -> None:
        """See :meth:`Drafter.update`."""
        self._commit_drafts(accepted.ids)
        for pending, ids in zip(self.pending, accepted.ids, strict=True):
            if not ids:
                pending.clear()  # finished: no more work for this row
            pending.extend(ids)

    def propose(self, num_drafts: int, width: int, max_tokens: int) -> Draft:
        """See :meth:`Drafter.propose`."""
        self._commit_drafts(None)
        shape = branch(num_drafts, width, max_tokens)
        active = torch.tensor([bool(p) for p in self.pending], device=self.verifier.device)
        logits = self._catch_up()
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        main: list[Tensor] = []
        for depth, count in enumerate(shape.widths):
            if depth:
                window = torch.cat(main, 1)
                if depth > 1:  # the window before was a shorter one of the same drafts
                    self.verifier.commit(torch.zeros_like(active, dtype=torch.int32), None)
                num_tokens = active.to(torch.int32) * depth
                logits = self.verifier.verify(window, None, num_tokens).logits[:, -1]
            logits = torch.where(active[:, None], logits, 0)
            found, drawn_from = candidates(logits, count, self.sampling, self.generator)
            main.append(found[:, :1])
            tokens.append(found)
            probs += [] if drawn_from is None else [drawn_from]
        if num_drafts > 1:
            self.drafted = torch.cat(main[:-1], 1).tolist()
        parents = None
        if width > 1:
            parents = torch.tensor(shape.parents, dtype=torch.int32, device=active.device).expand(len(active), -1)
        return Draft(torch.cat(tokens, 1), parents, None, torch.cat(probs, 1) if probs else None)

    def _catch_up(self) -> Tensor:
        """Commit all pending tokens; the logits ``[B, V]`` of what follows each row's last one."""
        logits: Tensor | None = None
        while logits is None or any(self.pending):
            parts = [pending[: self.verifier.max_window] for pending in self.pending]
            window, count = _padded(parts, self.verifier.device)
            out = self.verifier.verify(window, None, count).logits
            self.verifier.commit(count, None)
            newest = (count.long() - 1).clamp_min(0)[:, None, None].expand(-1, 1, out.shape[-1])
            latest = out.gather(1, newest)[:, 0]
            logits = latest if logits is None else torch.where(count[:, None] > 0, latest, logits)
            self.pending = [pending[len(part) :] for pending, part in zip(self.pending, parts, strict=True)]
        return logits

    def _commit_drafts(self, came: list[list[int]] | None) -> None:
        """Commit what the target kept of the window that waits, and take it off the tokens that came."""
        if self.drafted is None:
            return
        came = came or [[] for _ in self.drafted]
        kept = [_common_length(drafts, ids) for drafts, ids in zip(self.drafted, came, strict=True)]
        self.drafted = None
        self.verifier.commit(torch.tensor(kept, dtype=torch.int32, device=self.verifier.device), None)
        for ids, count in zip(came, kept, strict=True):
            del ids[:count]


def _common_length(a: list[int], b: list[int]) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def _padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows as ``[B, n]`` int64, padded with 0 on the right, and their lengths ``[B]`` int32."""
    longest = max(1, *(len(row) for row in rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    return tokens, torch.tensor([len(row) for row in rows], dtype=torch.int32, device=device)


def check_vocabularies(target: Any, draft: Any) -> None:
    """Refuse a draft model whose tokenizer numbers the tokens otherwise.

    Args:
        target, draft: transformers tokenizers.

    Raises:
        ValueError: the first token that differs.
    """
    wanted, given = target.get_vocab(), draft.get_vocab()
    if wanted == given:
        return
    differs = sorted(wanted.keys() ^ given.keys()) or sorted(name for name in wanted if wanted[name] != given[name])
    name = differs[0]
    raise ValueError(
        f"the draft model has another vocabulary than the target: token {name!r} is "
        f"{wanted.get(name, 'not there')} in the target's and {given.get(name, 'not there')} in the draft model's"
    )
