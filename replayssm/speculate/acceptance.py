"""Which drafts of a window are kept, and the token that follows them.

Two rules. *Matching*: a token is chosen for every place of the window from the target's logits alone (the likeliest
one, or one drawn from its distribution), and the window is followed as far as its drafts are the chosen tokens. It is
exact for greedy decoding, and, for drafts that were not drawn at random, for sampling as well: what comes out are the
target's own draws. *Rejection*: drafts that were drawn from a distribution q are kept with probability min(1, p/q);
after a rejection the target's distribution p becomes max(p − q, 0), renormalised, for the next sibling or the token
that follows. Either way the sampled distribution is the target's.

Names: B rows, T tokens of a window, V vocabulary size; window and path as in :mod:`replayssm.speculate.verifier`.
Everything stays on the device: nothing here waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.speculate.sampling import draw


class Acceptance(NamedTuple):
    """What is kept of a window.

    Attributes:
        num_accepted: ``[B]`` int32, tokens kept, the first of the window (which always is) counted. 0 for a row without
            tokens.
        path: ``[B, T]`` int32, their window indices in order; beyond ``num_accepted``, T − 1.
        next_token: ``[B]`` int64, the token that follows the last one kept: the bonus token where all drafts were
            right, else the corrected one. Anything for a row without tokens.
    """

    num_accepted: Tensor
    path: Tensor
    next_token: Tensor


def accept_greedy(logits: Tensor, tokens: Tensor, parents: Tensor | None, num_tokens: Tensor) -> Acceptance:
    """Keep the drafts that greedy decoding would have given.

    Args:
        logits: ``[B, T, V]`` of the target.
        tokens: ``[B, T]`` int64, the window.
        parents: ``[B, T]`` int32 window indices, or None for a chain.
        num_tokens: ``[B]`` int32, tokens of each row.
    """
    return follow(logits.argmax(-1), tokens, parents, num_tokens)


def accept_point_mass(
    probs: Tensor, tokens: Tensor, parents: Tensor | None, num_tokens: Tensor, generator: torch.Generator | None = None
) -> Acceptance:
    """Keep drafts that were not drawn at random (an n-gram, a likeliest token), leaving the distribution as it is.

    A draft is a point mass q: the rule of rejection keeps x with probability p(x), and else leaves p without x. Drawing
    from p and keeping the draft that was drawn is the same thing.

    Args:
        probs: fp32 ``[B, T, V]``, the target's probabilities after temperature, top-k and the like.
    """
    return follow(draw(probs, generator), tokens, parents, num_tokens)


def follow(chosen: Tensor, tokens: Tensor, parents: Tensor | None, num_tokens: Tensor) -> Acceptance:
    """Follow the window as far as its drafts are the chosen tokens.

    Args:
        chosen: ``[B, T]`` int64, the token chosen to follow each token of the window.
    """
    if parents is None:
        return _follow_chain(chosen, tokens, num_tokens)
    walk = _Walk(tokens, num_tokens)
    for i in range(1, tokens.shape[1]):
        right = tokens[:, i] == walk.at(chosen)
        walk.step(i, walk.is_child(i, parents) & right)
    return walk.end(walk.at(chosen))


def _follow_chain(chosen: Tensor, tokens: Tensor, num_tokens: Tensor) -> Acceptance:
    batch, length = tokens.shape
    places = torch.arange(length, dtype=torch.int32, device=tokens.device)
    right = (chosen[:, :-1] == tokens[:, 1:]) & (places[1:] < num_tokens[:, None])
    drafts = right.to(torch.int32).cumprod(1).sum(1)
    num_accepted = (drafts + 1).clamp_max(num_tokens).to(torch.int32)
    path = torch.where(places < num_accepted[:, None], places, length - 1)
    return Acceptance(num_accepted, path, chosen.gather(1, drafts[:, None])[:, 0])


def accept_rejection(
    probs: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    num_tokens: Tensor,
    generator: torch.Generator | None = None,
) -> Acceptance:
    """Keep drafts that were drawn at random, leaving the distribution as it is.

    Siblings are tried in the order of their indices, each against what the rejected ones left of p. They may be drawn
    independently, or without replacement if each one's q says so: q is the distribution it was drawn from, given the
    siblings before it.

    Args:
        probs: fp32 ``[B, T, V]``, the target's probabilities after temperature, top-k and the like.
        draft_probs: fp32 ``[B, T − 1, V]``, the distribution q from which token i + 1 was drawn.
        tokens, parents, num_tokens: as in :func:`accept_greedy`.
        generator: randomness on the tensors' device.
    """
    batch, length = tokens.shape
    walk = _Walk(tokens, num_tokens)
    chance = torch.rand(batch, length, device=probs.device, generator=generator)
    left = probs[:, 0]
    for i in range(1, length):
        q, token = draft_probs[:, i - 1], tokens[:, i, None]
        child = walk.is_child(i, parents)
        # x is kept where chance < p(x) / q(x)
        keep = child & (chance[:, i] * q.gather(1, token)[:, 0] < left.gather(1, token)[:, 0])
        left = torch.where((child & ~keep)[:, None], _residual(left, q), left)
        left = torch.where(keep[:, None], probs[:, i], left)
        walk.step(i, keep)
    return walk.end(draw(left, generator))


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p − q, 0), renormalised, ``[B, V]``; p itself where nothing is left of it, which rounding alone can cause."""
    rest = (p - q).clamp_min(0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest / mass, p)


class _Walk:
    """A path from the root of each row's tree, grown in the order of indices: children come after their parents."""

    def __init__(self, tokens: Tensor, num_tokens: Tensor) -> None:
        batch, length = tokens.shape
        self.num_tokens = num_tokens
        self.count = num_tokens.clamp_max(1).to(torch.int32)  # token 0 is always kept
        self.node = torch.zeros(batch, 1, dtype=torch.int64, device=tokens.device)
        self.path = torch.full((batch, length), length - 1, dtype=torch.int32, device=tokens.device)
        self.path[:, 0] = 0

    def at(self, values: Tensor) -> Tensor:
        """``[B, T] → [B]``: the value of each row's last node."""
        return values.gather(1, self.node)[:, 0]

    def is_child(self, i: int, parents: Tensor | None) -> Tensor:
        """``[B]``: whether token i follows the last node."""
        parent = i - 1 if parents is None else parents[:, i]
        return (self.node[:, 0] == parent) & (i < self.num_tokens)

    def step(self, i: int, keep: Tensor) -> None:
        """Rows that keep token i go there."""
        self.node = torch.where(keep[:, None], i, self.node)
        place = self.count.long().clamp_max(self.path.shape[1] - 1)[:, None]
        self.path.scatter_(1, place, torch.where(keep[:, None], i, self.path.gather(1, place)).to(torch.int32))
        self.count = self.count + keep.to(torch.int32)

    def end(self, next_token: Tensor) -> Acceptance:
        return Acceptance(self.count, self.path, next_token)
