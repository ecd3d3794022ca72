"""Drafts from a checkpoint's own multi-token prediction head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.speculate.drafter import Accepted, Draft, Drafter, Start, branch, candidates
from replayssm.speculate.keys_values import KeysValues
from replayssm.speculate.mtp_head import load_mtp_head
from replayssm.speculate.verifier import Verifier

ROOM = 16  # places behind the kept ones: no window is longer


class MtpDrafter(Drafter):
    """Runs the head on the target's hidden states, then on its own.

    The head's keys and values are kept for every token that the target processed, from the target's hidden state at it
    and the token after it. What a deeper draft adds is overwritten by the next update, so a rejection costs nothing.

    Args:
        model: the target, a transformers model; its embedding and ``lm_head`` are the head's too.
        folder: the model's folder.
        sample: with a sampled target, whether drafts are drawn from the head's distribution (accepted by rejection), or
            are its likeliest tokens (accepted where the target draws them). Drawing accepts more where the two agree.

    Raises:
        ValueError: no MTP head for this model, or not in this folder.
    """

    needs_hidden = True

    def __init__(self, model: Any, folder: str | Path, *, sample: bool = True) -> None:
        self.head = load_mtp_head(model, folder)
        self.embed = model.get_input_embeddings()
        self.lm_head = model.get_output_embeddings()
        self.vocab_size = self.lm_head.weight.shape[0]
        self.sample = sample

    def check(self, verifier: Verifier, num_drafts: int) -> None:
        """See :meth:`Drafter.check`."""
        super().check(verifier, num_drafts)
        if verifier.vocab_size != self.vocab_size:
            raise ValueError(
                f"the MTP head predicts {self.vocab_size} tokens, the target {verifier.vocab_size}: "
                "the head of the target's own checkpoint is wanted"
            )

    @torch.no_grad()
    def start(self, start: Start) -> None:
        """See :meth:`Drafter.start`."""
        assert start.hidden is not None, "check() was not called"
        batch, length = start.ids.shape
        self.sampling = start.sampling if self.sample else None
        self.generator = start.generator
        self.cache = KeysValues(batch, length + start.max_new_tokens + ROOM, start.ids.device)
        self.last = start.hidden.new_zeros(batch, start.hidden.shape[-1])
        # Left-aligned: a row's tokens from place 0 on, each with the token that follows it.
        count = start.mask.sum(1)
        places = torch.arange(length, device=start.ids.device) + (length - count)[:, None]
        following = torch.cat([start.ids[:, 1:], start.first[:, None]], dim=1)
        inside = places.clamp_max(length - 1)
        hidden = start.hidden.gather(1, inside[..., None].expand(-1, -1, start.hidden.shape[-1]))
        self._feed(following.gather(1, inside), hidden, count, length)

    @torch.no_grad()
    def update(self, accepted: Accepted) -> None:
        """See :meth:`Drafter.update`."""
        assert accepted.hidden is not None, "check() was not called"
        path = accepted.path.long()[..., None].expand(-1, -1, accepted.hidden.shape[-1])
        longest = max(len(ids) for ids in accepted.ids)
        self._feed(accepted.tokens, accepted.hidden.gather(1, path), accepted.num_tokens, longest)

    @torch.no_grad()
    def propose(self, num_drafts: int, width: int, max_tokens: int) -> Draft:
        """See :meth:`Drafter.propose`."""
        shape = branch(num_drafts, width, max_tokens)
        tokens: list[Tensor] = []
        probs: list[Tensor | None] = []
        hidden = self.last[:, None]
        for depth, count in enumerate(shape.widths):
            if depth:
                self.cache.offset = depth - 1
                hidden = self.head(self.embed(tokens[-1][:, :1]), hidden, self.cache)
            found, drawn_from = candidates(self.lm_head(hidden[:, 0]), count, self.sampling, self.generator)
            tokens.append(found)
            probs.append(drawn_from)
        parents = None
        if width > 1:
            parents = torch.tensor(shape.parents, dtype=torch.int32, device=hidden.device).expand(len(hidden), -1)
        return Draft(torch.cat(tokens, 1), parents, None, _joined(probs))

    def _feed(self, tokens: Tensor, hidden: Tensor, count: Tensor, longest: int) -> None:
        """Keep the keys of processed tokens, ``[B, n]``: their hidden states, and the tokens that follow them.

        No row has more than `longest` of them.
        """
        num_tokens = tokens.shape[1]
        valid = torch.arange(num_tokens, device=count.device) < count[:, None]
        tokens = torch.where(valid, tokens, 0)
        hidden = torch.where(valid[..., None], hidden, 0)
        self.cache.offset = 0
        out = self.head(self.embed(tokens), hidden, self.cache)
        self.cache.keep(count, longest)
        newest = (count.long() - 1).clamp_min(0)[:, None, None].expand(-1, 1, out.shape[-1])
        # A row without new tokens keeps the state that its next draft starts from.
        self.last = torch.where(count[:, None] > 0, out.gather(1, newest)[:, 0], self.last)


def _joined(probs: list[Tensor | None]) -> Tensor | None:
    given = [p for p in probs if p is not None]
    return torch.cat(given, 1) if given else None
