"""Checks of what a layer brings, for one token (``lead`` is ``"B"``) and for a window (``"B, T"``)."""

from __future__ import annotations

import math

from torch import Tensor

from replayssm.backends.step import State
from replayssm.ops.checks import ACTIVATION_DTYPES, check_rank, check_state, check_tensor

NO_LIMITS = (0.0, math.inf)  # the default of dt_limit
UNLIMITED = (-math.inf, math.inf)  # what kernels take for it


def check_gdn(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: State, lead: str
) -> None:
    """Check a Gated DeltaNet layer's projections, parameters and state."""
    _check_qkv(q, k, v, state, ("q", "k", "v"), (f"[{lead}, H_k, d_k]", f"[{lead}, H_v, d_v]"))
    heads, device = v.shape[:-1], v.device
    check_state(state, channel=False, activation_dtype=k.dtype)
    check_tensor("a", a, heads, f"[{lead}, H_v]", device=device)
    check_tensor("b", b, heads, f"[{lead}, H_v]", device=device)
    check_tensor("A_log", A_log, heads[-1:], "[H_v]", device=device)
    check_tensor("dt_bias", dt_bias, heads[-1:], "[H_v]", device=device)


def check_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: State,
    lead: str,
) -> None:
    """Check a Kimi Delta Attention layer's projections, parameters and state."""
    _check_qkv(q, k, v, state, ("q", "k", "v"), (f"[{lead}, H_k, d_k]", f"[{lead}, H_v, d_v]"))
    check_kda_gate(k, v, a, b, A_log, dt_bias, lower_bound, lead)
    check_state(state, channel=True, activation_dtype=k.dtype)


def check_kda_gate(
    k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None, lead: str
) -> None:
    """Check what decays and updates of a Kimi Delta Attention layer are made of; k and v were checked."""
    heads, device = k.shape[-2:-1], v.device
    if heads != v.shape[-2:-1]:
        raise ValueError(f"k has {heads[0]} heads, v has {v.shape[-2]}: KDA wants as many key heads as value heads")
    check_tensor("a", a, k.shape, f"[{lead}, H, d_k]", device=device)
    check_tensor("b", b, k.shape[:-1], f"[{lead}, H]", device=device)
    check_tensor("A_log", A_log, heads, "[H]", device=device)
    if isinstance(dt_bias, Tensor) and dt_bias.dim() == 1:
        check_tensor("dt_bias", dt_bias, (k.shape[-2] * k.shape[-1],), "[H * d_k]", device=device)
    else:
        check_tensor("dt_bias", dt_bias, k.shape[-2:], "[H, d_k]", device=device)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}: a negative number, or None for the softplus gate, is wanted")


def check_mamba2(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    state: State,
    lead: str,
) -> None:
    """Check a Mamba-2 layer's projections, parameters and state."""
    _check_qkv(C, B, x, state, ("C", "B", "x"), (f"[{lead}, G, N]", f"[{lead}, H, P]"))
    heads, device = x.shape[:-1], x.device
    check_state(state, channel=False, activation_dtype=x.dtype)
    check_tensor("dt", dt, heads, f"[{lead}, H]", device=device)
    check_tensor("A", A, heads[-1:], "[H]", device=device)
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            check_tensor(name, tensor, heads[-1:], "[H]", device=device)
    if z is not None:
        check_tensor("z", z, x.shape, f"[{lead}, H, P]", device=device)
    check_dt_limit(dt_limit)


def check_dt_limit(dt_limit: tuple[float, float]) -> None:
    """Check the smallest and largest time step of a Mamba-2 layer."""
    dt_min, dt_max = dt_limit if isinstance(dt_limit, tuple) and len(dt_limit) == 2 else (1.0, 0.0)
    if not 0 <= dt_min <= dt_max:
        raise ValueError(f"dt_limit is {dt_limit}: two numbers with 0 <= smallest <= largest are wanted")


def limits(dt_limit: tuple[float, float]) -> tuple[float, float]:
    """The smallest and largest time step as kernels take them: without limits, a negative Δ stays.

    There may be one where there is no softplus; so it is in the recurrence.
    """
    return UNLIMITED if dt_limit == NO_LIMITS else dt_limit


def _check_qkv(
    q: Tensor, k: Tensor, v: Tensor, state: State, names: tuple[str, str, str], dims: tuple[str, str]
) -> None:
    checkpoint, _, ring_k, *_ = state
    check_rank("checkpoint", checkpoint, "[N, H_v, d_v, d_k]")
    check_rank("ring_k", ring_k, "[N, H_k, R, d_k]")
    check_rank(names[2], v, dims[1])
    h_v, d_v, d_k = checkpoint.shape[1:]
    lead, device = v.shape[:-2], checkpoint.device
    check_tensor(names[2], v, (*lead, h_v, d_v), dims[1], ACTIVATION_DTYPES, device)
    for name, tensor in ((names[0], q), (names[1], k)):
        check_tensor(name, tensor, (*lead, ring_k.shape[1], d_k), dims[0], (v.dtype,), device)
