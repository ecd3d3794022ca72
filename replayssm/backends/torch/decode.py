"""One decode step by replay, for both gates and both rules.

The state is never rebuilt to answer a query. By linearity, for any vector x::

    S_h x = S_c (exp(G_h) x) + Σ_j ((exp(G_h − G_j) k_j)·x) u_j

so a step is one product of the checkpoint with the columns (q, k), the ring's dot products, and two weighted sums of
the u_j. Rows of the ring at or past the cursor are masked by selection and may hold NaN.

All sums have fixed lengths (the whole ring, the whole head), whatever the cursors of the other rows: the same row
gives the same bits in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.step import Step
from replayssm.backends.torch.rows import Rows
from replayssm.recurrence import Rule, replayed_decays


def decode(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    q_factor: Tensor | None,
    k_factor: Tensor | None,
    step: Step,
) -> Tensor:
    """Advance each row by one token, without moving its cursor.

    Args:
        rule: ``"delta"`` or ``"additive"``.
        q, k: ``[B, H_k, d_k]``, raw, in the activation dtype.
        v: fp32 ``[B, H_v, d_v]``; for the additive rule the update u itself.
        g: fp32 log decay, ``[B, H_v]`` or ``[B, H_v, d_k]``.
        beta: fp32 ``[B, H_v]``, or None for the additive rule.
        q_factor, k_factor: fp32 ``[B, H_k]``, what q and k are multiplied with (norm, scale); None for 1.
        step: state, slots and flush rule.

    Returns:
        fp32 ``[B, H_v, d_v]``; zero in padding rows.
    """
    host_slots = step.slots.tolist()
    live = [i for i, slot in enumerate(host_slots) if slot >= 0]
    if len(live) < len(host_slots):
        out = v.new_zeros(v.shape)
        if live:
            beta, q_factor, k_factor = (None if x is None else x[live] for x in (beta, q_factor, k_factor))
            out[live] = decode(rule, q[live], k[live], v[live], g[live], beta, q_factor, k_factor, step.pick(live))
        return out
    if not host_slots:
        return v.new_zeros(v.shape)

    rows = Rows(host_slots, q.device)
    cursors = rows.read(step.write_pos).tolist()
    source = Rows(rows.read(step.checkpoint_slot).tolist(), q.device)
    flush = [h >= step.flush_period - 1 for h in cursors]
    if step.force_flush is not None:
        flush = [natural or bool(forced) for natural, forced in zip(flush, step.force_flush.tolist(), strict=True)]

    state = source.read(step.checkpoint).float()
    ring = read_ring(rows, cursors, step.ring_u, step.ring_k, step.ring_g) if any(cursors) else None
    batch, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1:]
    group = num_v_heads // num_k_heads
    channel = g.dim() == 3

    # The columns that the state is multiplied with: q, and for the delta rule k.
    x = torch.stack([q, k], dim=2).float() if rule == "delta" else q.float().unsqueeze(2)
    if ring is None:
        total, after = g.exp(), None
    else:
        total, after = replayed_decays(torch.cat([ring[2], g.unsqueeze(2)], dim=2))
        after = after[:, :, :-1]

    # S_c x: value heads of one key head share its columns.
    columns = x * total.unsqueeze(2) if channel else x
    by_key_head = state.reshape(batch, num_k_heads, group * head_v_dim, head_k_dim)
    sx = (columns @ by_key_head.transpose(-1, -2)).reshape(batch, num_k_heads, -1, group, head_v_dim)
    sx = sx.transpose(2, 3).reshape(batch, num_v_heads, -1, head_v_dim)
    if not channel:
        sx = sx * total[..., None, None]

    if ring is not None:
        u_ring, k_ring, _ = ring
        assert after is not None
        scores = x @ (k_ring * after if channel else k_ring).transpose(-1, -2)
        if not channel:
            scores = _to_value_heads(scores, group) * after.unsqueeze(2)
        sx = sx + scores @ u_ring

    kq = (x[:, :, 0] * k.float()).sum(-1)
    u = v
    if rule == "delta":
        assert beta is not None
        sk = sx[:, :, 1]
        if k_factor is None:
            u = beta.unsqueeze(-1) * (v - sk)
        else:
            norm = _to_value_heads(k_factor, group).unsqueeze(-1)
            u = (norm * beta.unsqueeze(-1)) * (v - norm * sk)
    y = sx[:, :, 0] + u * _to_value_heads(kq, group).unsqueeze(-1)
    if q_factor is not None:
        y = y * _to_value_heads(q_factor, group).unsqueeze(-1)

    flushing = [i for i, f in enumerate(flush) if f]
    keeping = [i for i, f in enumerate(flush) if not f]
    if keeping:
        keep = rows if not flushing else Rows([host_slots[i] for i in keeping], q.device)
        positions = [cursors[i] for i in keeping]
        for target, value in ((step.ring_u, u), (step.ring_k, k), (step.ring_g, g)):
            keep.append(target, positions, value if not flushing else value[keeping])
    if flushing:
        records = (u.unsqueeze(2), k.float().unsqueeze(2), torch.ones_like(g).unsqueeze(2))
        if ring is not None:
            assert after is not None
            records = (
                torch.cat([ring[0], records[0]], dim=2),
                torch.cat([ring[1], records[1]], dim=2),
                torch.cat([after, records[2]], dim=2),
            )
        target_rows = rows
        if keeping:
            records = tuple(r[flushing] for r in records)  # type: ignore[assignment]
            state, total = state[flushing], total[flushing]
            target_rows = Rows([host_slots[i] for i in flushing], q.device)
        target_rows.write(step.checkpoint, replay(state, total, *records))
    return y


def replay(state: Tensor, total: Tensor, u: Tensor, k: Tensor, after: Tensor) -> Tensor:
    """``S_c exp(G_h) + Σ_j u_j (k_j exp(G_h − G_j))ᵀ``.

    Args:
        state: fp32 ``[B, H_v, d_v, d_k]``.
        total: ``exp(G_h)``, ``[B, H_v]`` or ``[B, H_v, d_k]``.
        u: fp32 ``[B, H_v, h, d_v]``.
        k: fp32 ``[B, H_k, h, d_k]``.
        after: ``exp(G_h − G_j)``, ``[B, H_v, h]`` or ``[B, H_v, h, d_k]``.
    """
    batch, num_v_heads, count, head_v_dim = u.shape
    num_k_heads = k.shape[1]
    channel = after.dim() == 4
    if not channel:
        u = u * after.unsqueeze(-1)
    by_key_head = u.reshape(batch, num_k_heads, -1, count, head_v_dim).transpose(-1, -2)
    by_key_head = by_key_head.reshape(batch, num_k_heads, -1, count)
    new = (by_key_head @ (k * after if channel else k)).view_as(state)
    return new.addcmul_(state, total.unsqueeze(2) if channel else total[..., None, None])


def read_ring(
    rows: Rows, cursors: list[int], ring_u: Tensor, ring_k: Tensor, ring_g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rings in fp32, with zeros (no update, no decay) at and past each cursor."""
    cursor = torch.tensor(cursors, device=ring_u.device)
    live = torch.arange(ring_u.shape[2], device=ring_u.device) < cursor[:, None]
    mask = live[:, None, :, None]
    u, k = (torch.where(mask, rows.read(r), 0).float() for r in (ring_u, ring_k))
    g = torch.where(mask if ring_g.dim() == 4 else live[:, None], rows.read(ring_g), 0)
    return u, k, g


def _to_value_heads(x: Tensor, group: int) -> Tensor:
    """Repeat ``[B, H_k, ...]`` to ``[B, H_v, ...]``."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)
