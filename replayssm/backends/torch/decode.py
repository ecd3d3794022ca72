"""One decode step by replay, for both gates and both rules.

The state is never rebuilt to answer a query. By linearity, for any vector x::

    S_h x = S_c (exp(G_h) x) + Σ_j ((exp(G_h − G_j) k_j)·x) u_j

so a step is one product of the checkpoint with the columns (q, k), the ring's dot products, and two weighted sums of
the u_j. Rows of the ring at or past the cursor are masked by selection and may hold NaN.

All sums have fixed lengths (the whole ring, the whole head), whatever the cursors of the other rows: the same row
gives the same bits in any batch. Columns are C = 2 for the delta rule, C = 1 for the additive rule. Value heads of
one key head stand side by side in one product with its columns.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.backends.step import Step
from replayssm.backends.torch.rows import Rows


class Terms(NamedTuple):
    """What one token of each row brings to the recurrence; of a window's, every shape has T behind B."""

    x: Tensor  # fp32 [B, H_k, C, d_k], the columns q and, for the delta rule, k; both normalised
    k: Tensor  # [B, H_k, d_k], as the ring keeps it
    v: Tensor  # fp32 [B, H_v, d_v]; for the additive rule the update u itself
    g: Tensor  # fp32 log decay, [B, H_v] or [B, H_v, d_k]
    beta: Tensor | None = None  # fp32 [B, H_v]; None: the additive rule
    k_norm: Tensor | None = None  # fp32 [B, H_k], the factor between the raw and the normalised k; None: 1

    def pick(self, rows: list[int]) -> Terms:
        """The same of some rows."""
        return Terms(*(None if t is None else t[rows] for t in self))  # type: ignore[arg-type]


class Inputs(NamedTuple):
    """Mamba-2's own inputs, where the ring keeps those: ``u = Δ x``, ``g = Δ A``."""

    x: Tensor  # [B, H, P]
    delta: Tensor  # fp32 [B, H]
    rate: Tensor  # fp32 [H], A


class Ring(NamedTuple):
    """The committed records of some rows."""

    u: Tensor  # fp32 [B, H_v, R, d_v], zero at and past the cursor
    k: Tensor  # fp32 [B, H_k, R, d_k], for a channel gate [B, H_v, R, d_k], anything at and past the cursor
    g: Tensor  # [B, H_v, R] or [B, H_v, R, d_k], zero at and past the cursor
    live: Tensor  # bool [B or 1, R], False at and past the cursor


def decode(terms: Terms, step: Step, inputs: Inputs | None = None) -> Tensor:
    """Advance each row by one token, without moving its cursor.

    Args:
        terms: of the token.
        step: state, slots and flush rule.
        inputs: what the ring keeps in place of u and g, or None.

    Returns:
        fp32 ``[B, H_v, d_v]``; zero in padding rows.
    """
    x, k, v, g, beta, k_norm = terms
    slots = step.slots.tolist()
    live = [i for i, slot in enumerate(slots) if slot >= 0]
    if len(live) < len(slots):
        out = v.new_zeros(v.shape)
        if live:
            if inputs is not None:
                inputs = Inputs(inputs.x[live], inputs.delta[live], inputs.rate)
            out[live] = decode(terms.pick(live), step.pick(live), inputs)
        return out
    if not slots:
        return v.new_zeros(v.shape)

    rows = Rows(slots, x.device)
    cursors, state = read_checkpoint(rows, step)
    rate = None if inputs is None else inputs.rate
    ring = read_ring(rows, cursors, step.ring_u, step.ring_k, step.ring_g, rate) if any(cursors) else None

    kept_k = k
    if g.dim() == 3 and x.shape[1] < v.shape[1]:  # value heads that decay a key differently can't share its products
        group = v.shape[1] // x.shape[1]
        x, k = x.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
        k_norm = None if k_norm is None else k_norm.repeat_interleave(group, dim=1)
    batch, num_k_heads, columns, head_k_dim = x.shape
    num_v_heads, head_v_dim = v.shape[1:]
    pairs, group = batch * num_k_heads, num_v_heads // num_k_heads

    decays = g.exp().unsqueeze(2) if ring is None else decays_with_token(ring.g, g)
    x = x.reshape(pairs, columns, head_k_dim)
    sx = product_with_state(x, state, decays, ring, num_k_heads)

    u = v.reshape(pairs, group, head_v_dim)
    if beta is not None:
        sq, sk = sx.unbind(2)
        u = (u - sk) * beta.reshape(pairs, group, 1)
        kq = (x[:, :1] * x[:, 1:]).sum(-1, keepdim=True)
    else:
        sq = sx[:, :, 0]
        kq = (x * k.reshape(pairs, 1, head_k_dim)).sum(-1, keepdim=True)
    y = torch.addcmul(sq, u, kq).view(v.shape)
    if k_norm is not None:
        u = u * k_norm.reshape(pairs, 1, 1)
    u = u.view(v.shape)
    kept_u, kept_g = (u, g) if inputs is None else inputs[:2]

    flush = flushing_rows(cursors, step.flush_period, step.force_flush)
    if not any(flush):
        append(rows, cursors, step, kept_u, kept_k, kept_g)
    elif all(flush):
        rows.write(step.checkpoint, flushed_state(state, decays, ring, u, k))
    else:
        keeping = [i for i, flushes in enumerate(flush) if not flushes]
        kept = Rows([slots[i] for i in keeping], x.device)
        append(kept, [cursors[i] for i in keeping], step, kept_u[keeping], kept_k[keeping], kept_g[keeping])
        flushing = [i for i, flushes in enumerate(flush) if flushes]
        flushed = Rows([slots[i] for i in flushing], x.device)
        if ring is not None:
            committed = [cursors[i] for i in flushing]
            ring = read_ring(flushed, committed, step.ring_u, step.ring_k, step.ring_g, rate)
        new = flushed_state(state[flushing], decays[flushing], ring, u[flushing], k[flushing])
        flushed.write(step.checkpoint, new)
    return y


def product_with_state(x: Tensor, state: Tensor, decays: Tensor, ring: Ring | None, num_k_heads: int) -> Tensor:
    """``S_c (exp(G_h) x) + Σ_j ((exp(G_h − G_j) k_j)·x) u_j`` for some columns x.

    Args:
        x: fp32 ``[B·H_k, C, d_k]``.
        state: fp32 ``[B, H_v, d_v, d_k]``.
        decays: of checkpoint and records, see :func:`decays_with_token`.
        ring: records, None if there are none.
        num_k_heads: H_k.

    Returns:
        fp32 ``[B·H_k, G, C, d_v]`` for the G value heads of each key head.
    """
    pairs, columns, head_k_dim = x.shape
    group, head_v_dim = state.shape[1] // num_k_heads, state.shape[2]
    channel = decays.dim() == 4
    if channel:
        total, after = decays[:, :, :1].flatten(0, 1), decays[:, :, 1:].flatten(0, 1)  # [pairs, 1 or R, d_k]
    else:
        per_head = decays.reshape(pairs, group, 1, -1)
        total, after = per_head[..., :1], per_head[..., 1:]  # [pairs, G, 1, 1 or R]

    sx = torch.bmm(x * total if channel else x, state.reshape(pairs, -1, head_k_dim).mT)
    sx = sx.view(pairs, columns, group, head_v_dim).transpose(1, 2)
    if not channel:
        sx *= total
    if ring is None:
        return sx
    ring_k = ring.k.reshape(pairs, -1, head_k_dim)
    scores = torch.bmm(x, (ring_k * after if channel else ring_k).mT).unsqueeze(1)
    written = ring.live if len(ring.live) == 1 else ring.live.repeat_interleave(num_k_heads, dim=0)
    scores = torch.where(written[:, None, None], scores if channel else scores * after, 0)
    sx += torch.bmm(scores.flatten(0, 1), ring.u.flatten(0, 1)).view(pairs, group, columns, head_v_dim)
    return sx


def flushing_rows(cursors: list[int], flush_period: int, force_flush: Tensor | None) -> list[bool]:
    """Which rows fold their records and the current token into the checkpoint."""
    flush = [cursor >= flush_period - 1 for cursor in cursors]
    if force_flush is None:
        return flush
    return [natural or bool(forced) for natural, forced in zip(flush, force_flush.tolist(), strict=True)]


def read_checkpoint(rows: Rows, step: Step) -> tuple[list[int], Tensor]:
    """Cursor of each row, and the checkpoints that they count from, fp32 ``[B, H_v, d_v, d_k]``; may be a view."""
    if step.checkpoint_slot is None:
        cursors, source = step.write_pos.tolist(), rows.slots
    else:
        cursors, source = rows.read(step.write_pos).tolist(), rows.read(step.checkpoint_slot).tolist()
    return cursors, (rows if source == rows.slots else Rows(source, rows.device)).read(step.checkpoint).float()


def append(rows: Rows, cursors: list[int], step: Step, u: Tensor, k: Tensor, g: Tensor) -> None:
    """Write one record at each row's cursor."""
    for ring, value in ((step.ring_u, storable(u, step.ring_u.dtype)), (step.ring_k, k), (step.ring_g, g)):
        rows.append(ring, cursors, value)


def storable(u: Tensor, dtype: torch.dtype) -> Tensor:
    """The update, clamped for float16: the norm factor of a tiny key may take it past the largest number."""
    if dtype != torch.float16:
        return u
    largest = torch.finfo(torch.float16).max
    return u.clamp(-largest, largest)


def flushed_state(state: Tensor, decays: Tensor, ring: Ring | None, u: Tensor, k: Tensor) -> Tensor:
    """Checkpoint, committed records and the current record (u, k) folded into one state."""
    batch, num_v_heads, head_v_dim, _ = state.shape
    new = fold_rows(state, decays, ring)
    outer = new.reshape(batch, k.shape[1], -1, head_v_dim, k.shape[2])
    u = u.view(batch, k.shape[1], -1, head_v_dim, 1)
    return outer.addcmul_(u, k.float()[:, :, None, None, :]).view_as(new)


def fold_rows(state: Tensor, decays: Tensor, ring: Ring | None) -> Tensor:
    """``S_c exp(G_h) + Σ_j u_j (k_j exp(G_h − G_j))ᵀ``, a new tensor.

    Args:
        state: fp32 ``[B, H_v, d_v, d_k]``.
        decays: of checkpoint and records, see :func:`decays_with_token`.
        ring: records, None if there are none.
    """
    channel = decays.dim() == 4
    total, after = decays[:, :, 0], decays[:, :, 1:]
    decay = total.unsqueeze(2) if channel else total[..., None, None]
    if ring is None:
        return state * decay
    batch, num_v_heads, count, head_v_dim = ring.u.shape
    num_k_heads = ring.k.shape[1]
    k = torch.where(ring.live[:, None, :, None], ring.k, 0)
    u = ring.u if channel else ring.u * after.unsqueeze(-1)
    u = u.reshape(batch, num_k_heads, -1, count, head_v_dim).mT.reshape(batch, num_k_heads, -1, count)
    new = (u @ (k * after if channel else k)).view_as(state)
    return new.addcmul_(state, decay)


def decays_with_token(ring_g: Tensor, g: Tensor) -> Tensor:
    """``exp`` of the summed log decays from each record on, the current token's included.

    The sums run from the newest back to the oldest: as differences of one running sum, a small decay behind a large
    one would lose its digits. Entry 0 is the checkpoint's decay, entry j + 1 the decay of record j.

    Args:
        ring_g: ``[B, H, R]`` or ``[B, H, R, d_k]``, zero at and past the cursor.
        g: ``[B, H]`` or ``[B, H, d_k]``.
    """
    return torch.cat([ring_g, g.unsqueeze(2)], dim=2).flip(2).cumsum(2).exp_().flip(2)


def read_ring(
    rows: Rows, cursors: list[int], ring_u: Tensor, ring_k: Tensor, ring_g: Tensor, rate: Tensor | None = None
) -> Ring:
    """The records of some rows, with zeros where a sum would else meet what was never written.

    With a rate (Mamba-2's A), ring_u keeps x and ring_g keeps Δ: they become ``u = Δ x`` and ``g = Δ A``.
    """
    uniform = cursors.count(cursors[0]) == len(cursors)
    prefixes = _prefixes(ring_u.shape[2], ring_u.device)
    live = prefixes[cursors[0]].unsqueeze(0) if uniform else prefixes[cursors]
    mask = live[:, None, :, None]
    u, k, g = (rows.read(ring) for ring in (ring_u, ring_k, ring_g))
    g = torch.where(mask if g.dim() == 4 else live[:, None], g, 0)
    u = torch.where(mask, u, 0).float()
    if rate is not None:
        u, g = u * g.unsqueeze(-1), g * rate.unsqueeze(-1)
    if g.dim() == 4 and k.shape[1] < u.shape[1]:
        k = k.repeat_interleave(u.shape[1] // k.shape[1], dim=1)
    return Ring(u, k.float(), g, live)


@cache
def _prefixes(capacity: int, device: torch.device) -> Tensor:
    """Bool ``[R + 1, R]``; row h is True below h."""
    return torch.ones(capacity + 1, capacity, dtype=torch.bool, device=device).tril(-1)
