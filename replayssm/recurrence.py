"""The mathematics: one recurrence, two gates, two rules.

Per value head, with state ``S`` of shape ``[d_v, d_k]``::

    S_t = S_{t-1} D_t + u_t k_tᵀ          y_t = S_t q_t

* gate ``"head"``:    ``D_t = exp(g_t) I``, one log decay ``g_t`` for the whole head (Gated DeltaNet, Mamba-2);
* gate ``"channel"``: ``D_t = Diag(exp(g_t))``, one log decay per key channel (Kimi Delta Attention);
* rule ``"delta"``:    ``u_t = β_t (v_t − S_{t-1} D_t k_t)``;
* rule ``"additive"``: ``u_t = v_t`` (Mamba-2: ``v = Δ x``, ``k = B``, ``q = C``).

After ``h`` records ``(u_j, k_j, g_j)`` behind a checkpoint ``S_c``, with ``G_j = g_1 + … + g_j``::

    S_h = S_c exp(G_h) + Σ_j u_j (k_j exp(G_h − G_j))ᵀ

Everything here is plain PyTorch that works in any floating dtype. In float64 it is the reference that every backend
is measured against. Sources: Yang et al., "Gated Delta Networks" (2024); Kimi Team, "Kimi Linear" (2025);
Dao and Gu, "Transformers are SSMs" (2024).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Gate = Literal["head", "channel"]
Rule = Literal["delta", "additive"]

NORM_EPS = 1e-6


# torch's own softplus and sigmoid round an element by its place in the array: vector lanes and the scalar tail differ
# in the last bit. Built from exp and log1p, which don't, a row has the same bits in any batch. In place, because at
# batch 1 the allocations would cost as much as the arithmetic.


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x)) = max(x, 0) + log(1 + exp(−|x|))``."""
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0))


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(−x))``."""
    return x.neg().exp_().add_(1).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """``x · sigmoid(x)``."""
    return x / x.neg().exp_().add_(1)


def gdn_log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Log decay of Gated DeltaNet, ``g = −exp(A_log)·softplus(a + dt_bias)``.

    Args:
        a: raw projection, ``[..., H_v]``.
        A_log: ``[H_v]``.
        dt_bias: ``[H_v]``.
    """
    return -A_log.exp() * softplus(a + dt_bias)


def kda_log_decay(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None) -> Tensor:
    """Log decay of Kimi Delta Attention, per key channel.

    Softplus gate: ``g = −exp(A_log)·softplus(a + dt_bias)``. Bounded gate, where the model has a lower bound:
    ``g = lower_bound · sigmoid(exp(A_log)·(a + dt_bias))``.

    Args:
        a: raw projection, ``[..., H, d_k]``.
        A_log: ``[H]``.
        dt_bias: ``[H, d_k]``.
        lower_bound: a negative number, or None for the softplus gate.
    """
    rate = A_log.exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate * softplus(a + dt_bias)
    return lower_bound * sigmoid(rate * (a + dt_bias))


def mamba2_time_step(
    dt: Tensor, dt_bias: Tensor | None, *, use_softplus: bool = True, limit: tuple[float, float] = (0.0, float("inf"))
) -> Tensor:
    """Time step of Mamba-2, ``Δ = clamp(softplus(dt + dt_bias), *limit)``; the log decay is ``Δ·A``.

    Args:
        dt: raw projection, ``[..., H]``.
        dt_bias: ``[H]`` or None.
        use_softplus: False leaves out the softplus.
        limit: smallest and largest time step.
    """
    if dt_bias is not None:
        dt = dt + dt_bias
    if use_softplus:
        dt = softplus(dt)
    return dt if limit == (0.0, float("inf")) else dt.clamp(*limit)


def inverse_norm(x: Tensor) -> Tensor:
    """``1 / sqrt(Σ x² + 1e-6)`` over the last dimension, which is dropped."""
    return x.square().sum(-1).add_(NORM_EPS).rsqrt_()


def step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, rule: Rule
) -> tuple[Tensor, Tensor]:
    """One step of the recurrence.

    Args:
        state: ``[B, H_v, d_v, d_k]``.
        q, k: ``[B, H_k, d_k]``, normalised and scaled as the layer wants them.
        v: ``[B, H_v, d_v]``.
        g: log decay, ``[B, H_v]`` (head gate) or ``[B, H_v, d_k]`` (channel gate).
        beta: ``[B, H_v]`` for the delta rule, None for the additive rule.
        rule: ``"delta"`` or ``"additive"``.

    Returns:
        The new state ``[B, H_v, d_v, d_k]`` and the output ``[B, H_v, d_v]``.
    """
    group = state.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    decay = g.exp()
    state = state * (decay[..., None, None] if g.dim() == 2 else decay[..., None, :])
    if rule == "delta":
        assert beta is not None
        v = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", state, k))
    state = state + v[..., :, None] * k[..., None, :]
    return state, torch.einsum("bhvk,bhk->bhv", state, q)


def replayed_decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Decay of the checkpoint and of each record, after all records in ``g``.

    The sums run from the newest record back to the oldest. Taken as differences of one running sum, ``G_h − G_j``
    would lose the digits of a small decay behind a large one.

    Args:
        g: log decays, oldest first, ``[B, H, h]`` or ``[B, H, h, d_k]``, ``h ≥ 1``.

    Returns:
        ``exp(G_h)``: ``[B, H]`` or ``[B, H, d_k]``; and ``exp(G_h − G_j)``, of the shape of ``g``.
    """
    behind = g.flip(2).cumsum(2).flip(2)
    after = torch.cat([behind[:, :, 1:], torch.zeros_like(behind[:, :, :1])], dim=2)
    return behind[:, :, 0].exp(), after.exp()


def fold(state: Tensor, u: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The state after replaying records, ``S_c exp(G_h) + Σ_j u_j (k_j exp(G_h − G_j))ᵀ``.

    Args:
        state: checkpoint, ``[B, H_v, d_v, d_k]``.
        u: ``[B, H_v, h, d_v]``.
        k: ``[B, H_k, h, d_k]``.
        g: ``[B, H_v, h]`` (head gate) or ``[B, H_v, h, d_k]`` (channel gate).

    Returns:
        ``[B, H_v, d_v, d_k]``.
    """
    if u.shape[2] == 0:
        return state
    total, after = replayed_decays(g)
    k = k.repeat_interleave(u.shape[1] // k.shape[1], dim=1)
    if g.dim() == 3:
        return state * total[..., None, None] + (u * after[..., None]).transpose(-1, -2) @ k
    return state * total[..., None, :] + u.transpose(-1, -2) @ (k * after)
