"""Whole sequences by replay in chunks, for both gates and both rules.

A sequence is cut into chunks of C tokens. With S_0 the state before a chunk, G_i the log decays summed from its first
token up to and with token i, and G_ij those behind token j up to and with i::

    u_i = β_i (v_i − S_0 e^{G_i} k_i − Σ_{j<i} e^{G_ij} (k_j·k_i) u_j)
    y_i = S_0 e^{G_i} q_i + Σ_{j≤i} e^{G_ij} (k_j·q_i) u_j
    S_C = S_0 e^{G_C} + Σ_j u_j (e^{G_Cj} k_j)ᵀ

u is linear in S_0: one unit-lower system gives ``u = û − w S_0ᵀ``. All but the products with S_0 runs for all chunks
of all sequences at once; only the states pass from chunk to chunk. As in a verify window every exponent is a sum of
log decays, so none overflows, no decay is divided by, and no sum is taken as a difference of two.

A sequence's chunks begin at its own first token and every product has the size of a chunk, so the same sequence gives
the same bits beside any others.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.backends.step import Layer, Rules
from replayssm.backends.torch.layers import input_gate, log_decay, skip_and_gate, time_step
from replayssm.recurrence import Rule, inverse_norm, silu

CHUNK = 64


def prefill(layer: Layer, rules: Rules, initial_state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed sequences of any layer; see :mod:`replayssm.ops.prefill`."""
    cuts = tuple(cu_seqlens.tolist())
    if layer.b is not None:
        return _delta_rule(layer, rules, initial_state, cuts)
    v = layer.v.float()
    delta = time_step(layer, rules)
    u, g = delta.unsqueeze(-1) * v, delta * layer.rate.float()
    y, state = chunked("additive", layer.q.float(), layer.k.float(), u, g, None, initial_state, cuts)
    return skip_and_gate(y, v, layer.D, layer.z).to(layer.v.dtype), state


def causal_conv1d_prefill(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """See :func:`replayssm.ops.causal_conv1d_prefill`."""
    kept = conv_state.shape[2]
    old, new, last = _conv_places(tuple(cu_seqlens.tolist()), kept, x.device)
    inputs = x.new_empty(old.numel() + len(x), x.shape[1])  # each sequence behind its W − 1 inputs from before
    inputs[old.flatten()] = conv_state.transpose(1, 2).flatten(0, 1)
    inputs[new] = x
    y = inputs[new].float() * weight[:, kept].float()
    for tap in range(kept):
        y += inputs[new - (kept - tap)].float() * weight[:, tap].float()
    if bias is not None:
        y += bias.float()
    return (silu(y) if activation == "silu" else y).to(x.dtype), inputs[last].transpose(1, 2).contiguous()


def _delta_rule(
    layer: Layer, rules: Rules, initial_state: Tensor, cu_seqlens: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    g, beta = log_decay(layer, rules), input_gate(layer, rules)
    q, k, v = layer.q.float(), layer.k.float(), layer.v
    if rules.l2_norm:
        q, k = (x * inverse_norm(x).unsqueeze(-1) for x in (q, k))
    y, state = chunked("delta", q, k, v.float(), g, beta, initial_state, cu_seqlens)
    return y.mul_(rules.scale).to(v.dtype), state


def chunked(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    initial_state: Tensor,
    cu_seqlens: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """The recurrence over packed sequences, in the dtype of its inputs.

    Args:
        rule: ``"delta"`` or ``"additive"``.
        q, k: ``[total, H_k, d_k]``, normalised and scaled as the layer wants them.
        v: ``[total, H_v, d_v]``; for the additive rule the update u itself.
        g: log decay, ``[total, H_v]`` or ``[total, H_v, d_k]``.
        beta: ``[total, H_v]``, or None for the additive rule.
        initial_state: ``[S, H_v, d_v, d_k]``.
        cu_seqlens: S + 1 numbers; sequence s has the tokens from ``cu_seqlens[s]`` up to ``cu_seqlens[s + 1]``.

    Returns:
        ``[total, H_v, d_v]`` and the states after each sequence's last token, ``[S, H_v, d_v, d_k]``.
    """
    if not v.shape[0]:
        return torch.zeros_like(v), initial_state.to(v.dtype, copy=True)
    order, counts, places, used, back = _chunks(cu_seqlens, v.device)
    channel, group = g.dim() == 3, v.shape[1] // k.shape[1]
    q, k, v, g = (_cut(x, places, used) for x in (q, k, v, g))  # [n, H, C, ...]
    if channel:  # value heads that decay a key differently can't share its products
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
        scores = channel_scores(_lines(rule, q, k), k, g)
    else:
        scores = head_scores(_lines(rule, q, k), k, g)
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    since_start, to_end = g.cumsum(2).exp(), _sums_behind(g).exp()
    total = since_start[:, :, -1].unsqueeze(2) if channel else since_start[:, :, -1, None, None]
    if not channel:
        since_start, to_end = since_start.unsqueeze(-1), to_end.unsqueeze(-1)

    u, w = v, None
    if rule == "delta":
        assert beta is not None
        rate = _cut(beta, places, used).unsqueeze(-1)
        right = torch.cat([v, k * since_start], dim=-1) * rate
        solved = torch.linalg.solve_triangular(scores[1] * rate, right, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    q_start, k_end = q * since_start, k * to_end

    state = initial_state[order].to(v.dtype)  # longest sequences first: those with a chunk at a step come first
    y, updates, first = torch.empty_like(v), torch.empty_like(v), 0
    for active in counts:
        step = slice(first, first + active)
        first += active
        before = state[:active]
        updates[step] = u[step] if w is None else u[step] - w[step] @ before.mT
        y[step] = q_start[step] @ before.mT
        state[:active] = before * total[step] + updates[step].mT @ k_end[step]
    y += scores[0] @ updates
    final = torch.empty_like(state)
    final[order] = state
    return y.transpose(1, 2).flatten(0, 1)[back], final


def _lines(rule: Rule, q: Tensor, k: Tensor) -> Tensor:
    """What meets the keys: q, and for the delta rule k."""
    return torch.stack([q, k]) if rule == "delta" else q.unsqueeze(0)


def head_scores(x: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """``e^{G_ij} (k_j·x_i)`` for one decay per head, zero for j > i.

    Args:
        x: ``[1 or 2, n, H_k, C, d_k]``, q, or q and k.
        k: ``[n, H_k, C, d_k]``.
        g: ``[n, H_v, C]``.

    Returns:
        ``[1 or 2, n, H_v, C, C]``.
    """
    tokens = g.shape[2]
    between = torch.where(_triangle(tokens, -1, g.device), g.unsqueeze(3), 0).cumsum(2).exp_()
    products = (x @ k.mT).repeat_interleave(g.shape[1] // k.shape[1], dim=2)
    return torch.where(_triangle(tokens, 0, g.device), products * between, 0)


def channel_scores(x: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """``Σ_d e^{G_ij} k_j x_i`` for one decay per key channel, zero for j > i.

    A decay from j to i is the product of the decays from j to a token between them and from there to i. Halving the
    chunk again and again gives each pair such a token, the last of the half that j is in: one product of matrices for
    each size of halves, and no ``[C, C, d_k]`` tensor.

    Args:
        x: ``[1 or 2, n, H, C, d_k]``, q, or q and k.
        k, g: ``[n, H, C, d_k]``.

    Returns:
        ``[1 or 2, n, H, C, C]``.
    """
    tokens = k.shape[2]
    scores = x.new_zeros(*x.shape[:-1], tokens)
    scores.diagonal(dim1=-2, dim2=-1).copy_((x * k).sum(-1))
    half = 1
    while half < tokens:
        pairs = tokens // (2 * half)
        parts = (pairs, 2, half)
        early_g, late_g = g.unflatten(2, parts).unbind(3)
        late = x.unflatten(3, parts).select(4, 1) * late_g.cumsum(3).exp()
        early = k.unflatten(2, parts).select(3, 0) * _sums_behind(early_g, 3).exp()
        blocks = scores.unflatten(4, parts).unflatten(3, parts)[:, :, :, :, 1, :, :, 0]
        blocks.diagonal(dim1=3, dim2=5).copy_((late @ early.mT).movedim(3, -1))
        half *= 2
    return scores


def _sums_behind(g: Tensor, dim: int = 2) -> Tensor:
    """Log decays summed behind each token up to the last."""
    behind = g.flip(dim).cumsum(dim).flip(dim)
    return torch.cat([behind.narrow(dim, 1, g.shape[dim] - 1), torch.zeros_like(g.narrow(dim, 0, 1))], dim=dim)


def _cut(x: Tensor, places: Tensor, used: Tensor) -> Tensor:
    """Packed tokens ``[total, H, ...]`` as chunks ``[n, H, C, ...]``; zero behind a sequence's end."""
    chunks = x[places]
    return torch.where(used.view(*used.shape, *([1] * (x.dim() - 1))), chunks, 0).transpose(1, 2).contiguous()


@cache
def _triangle(tokens: int, diagonal: int, device: torch.device) -> Tensor:
    """Bool ``[C, C]``, True for j ≤ i + diagonal."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril(diagonal)


class _Chunks(NamedTuple):
    """How sequences are cut: the first chunks of all, then the second ones, and so on."""

    order: Tensor  # int64 [S], the sequences by their number of chunks, most first
    counts: list[int]  # how many sequences have a first chunk, a second one, …; their sum is n
    places: Tensor  # int64 [n, C], each chunk's tokens among the packed ones; anything where not used
    used: Tensor  # bool [n, C], False behind a sequence's end
    back: Tensor  # int64 [total], where each packed token is among the n·C


@lru_cache(maxsize=8)  # the layers of one forward have the same
def _chunks(cu_seqlens: tuple[int, ...], device: torch.device) -> _Chunks:
    lengths = [end - start for start, end in pairwise(cu_seqlens)]
    order = sorted(range(len(lengths)), key=lambda s: -math.ceil(lengths[s] / CHUNK))
    bounds, counts, offset = [], [], 0
    while True:
        active = [s for s in order if lengths[s] > offset]
        if not active:
            break
        bounds += [(cu_seqlens[s] + offset, cu_seqlens[s + 1]) for s in active]
        counts.append(len(active))
        offset += CHUNK
    starts, ends = torch.tensor(bounds).unsqueeze(2).unbind(1)
    places = starts + torch.arange(CHUNK)
    used = places < ends
    back = torch.empty(cu_seqlens[-1], dtype=torch.long)
    back[places[used]] = used.flatten().nonzero().squeeze(1)
    places = torch.minimum(places, ends - 1)
    return _Chunks(torch.tensor(order).to(device), counts, *(t.to(device) for t in (places, used, back)))


@lru_cache(maxsize=8)
def _conv_places(cu_seqlens: tuple[int, ...], kept: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Places of a sequence's inputs from before ``[S, W − 1]``, of all new ones ``[total]``, and of its last ones."""
    before = torch.arange(len(cu_seqlens)).unsqueeze(1) * kept + torch.tensor(cu_seqlens).unsqueeze(1)
    places = before + torch.arange(kept)
    is_new = torch.ones(int(before[-1]), dtype=torch.bool)
    is_new[places[:-1].flatten()] = False
    found = (places[:-1], is_new.nonzero().squeeze(1), places[1:] - kept)
    old, new, last = (t.to(device) for t in found)
    return old, new, last
