"""One verify window by replay, for both gates and both rules.

With P(i) the path from the committed state to token i, i included, and γ the log decays summed along it::

    y_i = e^{γ_i} S_h q_i + Σ_{j∈P(i)} e^{γ_ij} (k_j·q_i) u_j
    u_i = β_i (v_i − e^{γ_i} S_h k_i − Σ_{j∈P(i), j≠i} e^{γ_ij} (k_j·k_i) u_j)

where γ_ij sums over the path behind j up to and with i. S_h times all q and k of the window is one product with the
checkpoint, as in a decode; the u_i follow from a unit-lower system. Every exponent is a sum of log decays, so none is
above 0 and none overflows; no decay is divided by, and no sum is taken as a difference of two. For a channel gate
they multiply the keys and columns in place of the scores.

Tokens that a row doesn't use come as zeros, with −1 for parents (see :func:`used_rows`), and leave no record.
Sums have fixed lengths, as in a decode: the same row gives the same bits in any batch, for the same T.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.backends.step import Step, Window
from replayssm.backends.torch.decode import (
    Terms,
    decays_with_token,
    fold_rows,
    product_with_state,
    read_checkpoint,
    read_ring,
    storable,
)
from replayssm.backends.torch.rows import Rows


def verify(terms: Terms, step: Step, window: Window) -> Tensor:
    """Run a window of tokens for rows that each use some, without moving a cursor.

    Args:
        terms: of the window, ``[B, T, ...]``.
        step: state and slots.
        window: lengths and parents.

    Returns:
        fp32 ``[B, T, H_v, d_v]``.
    """
    x, k, v, g, beta, k_norm = terms
    rows = Rows(step.slots.tolist(), x.device)
    cursors, state = read_checkpoint(rows, step)
    ring = read_ring(rows, cursors, step.ring_u, step.ring_k, step.ring_g) if any(cursors) else None
    batch, tokens, num_k_heads, columns, head_k_dim = x.shape
    num_v_heads, head_v_dim = v.shape[2:]
    pairs, group = batch * num_k_heads, num_v_heads // num_k_heads
    channel = g.dim() == 4

    x = x.transpose(1, 2)  # [B, H_k, T, C, d_k]
    total, between, on_path = path_sums(g.transpose(1, 2), window.parents)
    total, between = total.exp(), between.exp()
    committed = torch.zeros_like(g[:, 0])  # no token follows the records yet
    decays = committed.exp().unsqueeze(2) if ring is None else decays_with_token(ring.g, committed)

    decayed = x * total.unsqueeze(3) if channel else x
    sx = product_with_state(decayed.reshape(pairs, tokens * columns, head_k_dim), state, decays, ring, num_k_heads)
    sx = sx.view(pairs, group, tokens, columns, head_v_dim)
    keys = (x[..., 1, :] if beta is not None else k.transpose(1, 2).float()).reshape(pairs, 1, tokens, head_k_dim)
    if channel:
        keys = (keys * between.flatten(0, 1)).flatten(0, 1)  # [pairs·T, T, d_k], the decays of each token's path
        scores = torch.bmm(x.reshape(-1, columns, head_k_dim), keys.mT).view(pairs, 1, tokens, columns, tokens)
    else:
        sx *= total.reshape(pairs, group, tokens, 1, 1)
        scores = torch.bmm(x.reshape(pairs, tokens * columns, head_k_dim), keys.squeeze(1).mT)
        scores = scores.view(pairs, 1, tokens, columns, tokens) * between.reshape(pairs, group, tokens, 1, tokens)
    path = on_path if len(on_path) == 1 else on_path.repeat_interleave(num_k_heads, dim=0)
    scores = torch.where(path[:, None, :, None], scores, 0)

    u = v.transpose(1, 2).reshape(pairs * group, tokens, head_v_dim)
    if beta is not None:
        rate = beta.transpose(1, 2).reshape(pairs * group, tokens, 1)
        u = (u - sx[..., 1, :].flatten(0, 1)).mul_(rate)
        u = solved(u, scores[..., 1, :].flatten(0, 1) * rate)
    y = sx[..., 0, :].flatten(0, 1) + torch.bmm(scores[..., 0, :].flatten(0, 1), u)

    counts = window.num_tokens.tolist()
    folds = folding_rows(cursors, counts, step.ring_u.shape[2])
    fold(rows, cursors, folds, step, state, decays)
    u = u.view(batch, num_k_heads, group, tokens, head_v_dim)
    if k_norm is not None:
        u = u * k_norm.transpose(1, 2)[:, :, None, :, None]
    u = storable(u.flatten(1, 2).transpose(1, 2), step.ring_u.dtype)
    starts = [0 if full else cursor for cursor, full in zip(cursors, folds, strict=True)]
    for records, values in ((step.ring_u, u), (step.ring_k, k), (step.ring_g, g)):
        rows.append_runs(records, starts, counts, values)
    return y.view(batch, num_v_heads, tokens, head_v_dim).transpose(1, 2)


def path_sums(g: Tensor, parents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Log decays summed along the path to each token.

    Args:
        g: log decays, ``[B, H, T]`` or ``[B, H, T, d_k]``.
        parents: ``[B, T]``, or None for a chain.

    Returns:
        γ_i ``[B, H, T(, d_k)]``, from the committed state on; γ_ij ``[B, H, T, T(, d_k)]``, 0 off the path; and
        whether j is on the path to i, bool ``[B or 1, T, T]``.
    """
    batch, heads, tokens, *rest = g.shape
    if parents is None:
        behind = _triangle(tokens, -1, g.device).view(tokens, tokens, *([1] * len(rest)))
        between = torch.where(behind, g.unsqueeze(3), 0).cumsum(2)
        return g.cumsum(2), between, _triangle(tokens, 0, g.device).unsqueeze(0)
    total = g.new_zeros(batch, heads, tokens + 1, *rest)
    between = g.new_zeros(batch, heads, tokens + 1, tokens, *rest)
    on_path = torch.zeros(batch, tokens + 1, tokens, dtype=torch.bool, device=g.device)
    lines = torch.arange(batch, device=g.device)
    for i in range(tokens):  # entry 0 is the committed state, entry i + 1 token i
        parent = parents[:, i] + 1
        known = on_path[lines, parent]
        on_path[:, i + 1] = known
        on_path[:, i + 1, i] = True
        total[:, :, i + 1] = total[lines, :, parent] + g[:, :, i]
        mask = known.view(batch, 1, tokens, *([1] * len(rest)))
        between[:, :, i + 1] = torch.where(mask, between[lines, :, parent] + g[:, :, i].unsqueeze(2), 0)
    return total[:, :, 1:], between[:, :, 1:], on_path[:, 1:]


@cache
def _triangle(tokens: int, diagonal: int, device: torch.device) -> Tensor:
    """Bool ``[T, T]``, True for j ≤ i + diagonal."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril(diagonal)


def solved(u: Tensor, weights: Tensor) -> Tensor:
    """The u with ``u_i + Σ_{j<i} w_ij u_j = r_i``, token after token.

    Args:
        u: r, fp32 ``[M, T, d_v]``; overwritten.
        weights: fp32 ``[M, T, T]``; used below the diagonal.
    """
    for i in range(1, u.shape[1]):
        u[:, i : i + 1] -= torch.bmm(weights[:, i : i + 1, :i], u[:, :i])
    return u


def folding_rows(cursors: list[int], counts: list[int], ring_rows: int) -> list[bool]:
    """Which rows fold their committed records, because the ring has no room for the window behind them."""
    return [cursor + count > ring_rows for cursor, count in zip(cursors, counts, strict=True)]


def fold(rows: Rows, cursors: list[int], folds: list[bool], step: Step, state: Tensor, decays: Tensor) -> None:
    """Fold the committed records of some rows into their own checkpoints."""
    folding = [i for i, full in enumerate(folds) if full]
    if not folding:
        return
    folded = Rows([rows.slots[i] for i in folding], rows.device)
    ring = read_ring(folded, [cursors[i] for i in folding], step.ring_u, step.ring_k, step.ring_g)
    folded.write(step.checkpoint, fold_rows(state[folding], decays[folding], ring))


class Used(NamedTuple):
    """The rows of a batch that use any token, and which tokens they use."""

    rows: list[int]
    window: Window  # of these rows; parents of unused tokens are -1
    tokens: Tensor | None  # bool [rows, T], None where all are used

    def pick(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor ``[B, T, ...]``, zero where a token isn't used: it may hold NaN."""
        if len(self.rows) < len(tensor):
            tensor = tensor[self.rows]
        if self.tokens is None:
            return tensor
        return torch.where(self.tokens.view(*self.tokens.shape, *([1] * (tensor.dim() - 2))), tensor, 0)


def used_rows(slots: Tensor, window: Window, tokens: int) -> Used:
    """What a batch uses of a window of T tokens."""
    counts = window.num_tokens.tolist()
    rows = [i for i, (slot, count) in enumerate(zip(slots.tolist(), counts, strict=True)) if slot >= 0 and count > 0]
    if len(rows) < len(counts):
        window = Window(window.num_tokens[rows], None if window.parents is None else window.parents[rows])
    if all(counts[i] == tokens for i in rows):
        return Used(rows, window, None)
    used = torch.arange(tokens, device=slots.device) < window.num_tokens.unsqueeze(1)
    if window.parents is not None:
        window = window._replace(parents=torch.where(used, window.parents, -1))
    return Used(rows, window, used)
