"""Decode operators: one token for each row of a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.backends.step import ABSENT, Rules, Step
from replayssm.ops.checks import check_flush_period, check_numbers, check_rows, check_slots_on_host
from replayssm.ops.dispatch import backend_module, register
from replayssm.ops.inputs import check_gdn, check_kda, check_mamba2, limits
from replayssm.ops.known import ShortWay, recall, remember, short_way
from replayssm.ops.layers import GATE, LAYERS, MAMBA2, NO_B, NO_BIAS, NO_D, NO_Z, scale_of

_STATE_SCHEMA = (
    "Tensor(a!) checkpoint, Tensor(b!) ring_u, Tensor(c!) ring_k, Tensor(d!) ring_g, "
    "Tensor write_pos, Tensor checkpoint_slot, Tensor slots, int flush_period, Tensor? force_flush, str backend"
)
_DELTA = f"float beta_scale, float scale, bool qk_l2norm, {_STATE_SCHEMA}"
_SCHEMAS = (
    f"gdn_decode({GATE}, {_DELTA}) -> Tensor",
    f"kda_decode({GATE}, float? lower_bound, {_DELTA}) -> Tensor",
    f"mamba2_decode({MAMBA2}, float dt_min, float dt_max, {_STATE_SCHEMA}) -> Tensor",
)

_NOT_FORCED = ABSENT[16]


def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    checkpoint: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    slots: Tensor,
    flush_period: int,
    force_flush: Tensor | None = None,
    beta_scale: float = 1.0,
    scale: float | None = None,
    qk_l2norm: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Gated DeltaNet, one token (Yang et al., 2024).

    ``g = −exp(A_log)·softplus(a + dt_bias)``, ``β = beta_scale·sigmoid(b)``, both in float32;
    ``u = β (v − S_{t-1} e^g k)``; ``y = scale·S_t q``, with q and k divided by their L2 norms.

    Args:
        q, k: ``[B, H_k, d_k]``, raw, in the activation dtype (float32, bfloat16 or float16).
        v: ``[B, H_v, d_v]``, same dtype.
        a, b: ``[B, H_v]``, projections before any activation.
        A_log, dt_bias: ``[H_v]``.
        checkpoint ... slots: see :mod:`replayssm.ops`.
        flush_period: L; a row whose cursor is at L − 1 or past it folds its records and this token into the
            checkpoint. From 1 to R.
        force_flush: ``[B]`` bool or int32; True flushes a row now. None: none.
        beta_scale: 2.0 for models that allow negative eigenvalues (OLMo-hybrid).
        scale: factor of q, default ``d_k ** -0.5``.
        qk_l2norm: False if q and k come normalised.
        backend: ``"auto"``, ``"cpu"``, ``"torch"``, ``"triton"`` or ``"cuda"``.

    Returns:
        ``[B, H_v, d_v]`` in the dtype of v; zero in padding rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or a number is out of range.
    """
    state = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot)
    forced = _NOT_FORCED if force_flush is None else force_flush
    tensors = (q, k, v, a, b, A_log, dt_bias, NO_D, NO_Z, *state, slots, forced)
    options = ("gdn_decode", backend, beta_scale, scale, qk_l2norm, flush_period, type(flush_period))
    known = recall(options, tensors)
    if known is None:
        check_gdn(q, k, v, a, b, A_log, dt_bias, state, "B")
        check_rows(slots, v.shape[0], force_flush, v.device)
        check_flush_period(flush_period, ring_k)
        check_numbers(scale=scale_of(q, scale), beta_scale=beta_scale)
        rules = Rules(scale_of(q, scale), beta_scale, qk_l2norm)
        known = remember(options, tensors, backend, _short_way(tensors, rules, flush_period))
    if known.run is not None:
        return known.run(*tensors)
    numbers = (beta_scale, scale_of(q, scale), qk_l2norm)
    rows = (slots, flush_period, force_flush, known.backend)
    return known.call(q, k, v, a, b, A_log, dt_bias, *numbers, *state, *rows)


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    checkpoint: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    slots: Tensor,
    flush_period: int,
    force_flush: Tensor | None = None,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    scale: float | None = None,
    qk_l2norm: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Kimi Delta Attention, one token (Kimi Team, 2025): the delta rule with one decay per key channel.

    ``g = −exp(A_log)·softplus(a + dt_bias)``, or ``g = lower_bound·sigmoid(exp(A_log)·(a + dt_bias))`` if a lower
    bound is given.

    Args:
        q, k: ``[B, H, d_k]``, raw, in the activation dtype.
        v: ``[B, H, d_v]``, same dtype.
        a: ``[B, H, d_k]``, projection before any activation.
        b: ``[B, H]``, projection before the sigmoid.
        A_log: ``[H]``.
        dt_bias: ``[H, d_k]`` or ``[H·d_k]``.
        lower_bound: a negative number, or None for the softplus gate.
        checkpoint ... backend: as for :func:`gdn_decode`; ``ring_g`` is ``[N, H, R, d_k]``.

    Returns:
        ``[B, H, d_v]`` in the dtype of v; zero in padding rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or a number is out of range.
    """
    state = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot)
    forced = _NOT_FORCED if force_flush is None else force_flush
    tensors = (q, k, v, a, b, A_log, dt_bias, NO_D, NO_Z, *state, slots, forced)
    options = ("kda_decode", backend, lower_bound, beta_scale, scale, qk_l2norm, flush_period, type(flush_period))
    known = recall(options, tensors)
    if known is None:
        check_kda(q, k, v, a, b, A_log, dt_bias, lower_bound, state, "B")
        check_rows(slots, v.shape[0], force_flush, v.device)
        check_flush_period(flush_period, ring_k)
        check_numbers(scale=scale_of(q, scale), beta_scale=beta_scale)
        rules = Rules(scale_of(q, scale), beta_scale, qk_l2norm, lower_bound)
        known = remember(options, tensors, backend, _short_way(tensors, rules, flush_period))
    if known.run is not None:
        return known.run(*tensors)
    bias, scale = dt_bias.view(k.shape[1:]), scale_of(q, scale)
    inputs = (q, k, v, a, b, A_log, bias, lower_bound, beta_scale, scale, qk_l2norm)
    return known.call(*inputs, *state, slots, flush_period, force_flush, known.backend)


def mamba2_decode(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    A: Tensor,
    checkpoint: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    slots: Tensor,
    flush_period: int,
    force_flush: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> Tensor:
    """Mamba-2, one token (Dao and Gu, 2024): the additive rule.

    ``Δ = clamp(softplus(dt + dt_bias), *dt_limit)`` in float32, ``S_t = e^{ΔA} S_{t-1} + Δ x Bᵀ``,
    ``y = (S_t C + D x)·silu(z)``.

    Args:
        x: ``[B, H, P]``, in the activation dtype. H is H_v, P is d_v.
        dt: ``[B, H]``, projection before bias and softplus.
        B, C: ``[B, G, N]``, same dtype as x. G groups are H_k, N is d_k.
        A: ``[H]``, negative, ``−exp(A_log)``.
        D: ``[H]`` or None.
        z: ``[B, H, P]`` or None; gate.
        dt_bias: ``[H]`` or None.
        dt_softplus: False if dt needs no softplus.
        dt_limit: smallest and largest Δ; (0, ∞) sets none, so that without softplus a negative Δ stays.
        checkpoint ... backend: as for :func:`gdn_decode`.

    Returns:
        ``[B, H, P]`` in the dtype of x; zero in padding rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or a number is out of range.
    """
    state = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot)
    forced = _NOT_FORCED if force_flush is None else force_flush
    optional = (NO_BIAS if dt_bias is None else dt_bias, NO_D if D is None else D, NO_Z if z is None else z)
    tensors = (C, B, x, dt, NO_B, A, *optional, *state, slots, forced)
    options = ("mamba2_decode", backend, dt_softplus, dt_limit, flush_period, type(flush_period))
    known = recall(options, tensors)
    if known is None:
        check_mamba2(x, dt, B, C, A, D, z, dt_bias, dt_limit, state, "B")
        check_rows(slots, x.shape[0], force_flush, x.device)
        check_flush_period(flush_period, ring_k)
        dt_min, dt_max = limits(dt_limit)
        rules = Rules(softplus=dt_softplus, dt_min=dt_min, dt_max=dt_max)
        known = remember(options, tensors, backend, _short_way(tensors, rules, flush_period))
    if known.run is not None:
        return known.run(*tensors)
    inputs = (x, dt, B, C, A, D, z, dt_bias, dt_softplus, *limits(dt_limit))
    return known.call(*inputs, *state, slots, flush_period, force_flush, known.backend)


def _short_way(tensors: tuple[Tensor, ...], rules: Rules, flush_period: int) -> ShortWay:
    return short_way("bind_decode", _check_on_host, tensors, rules, flush_period)


def _check_on_host(*tensors: Tensor) -> None:
    check_slots_on_host(tensors[15], tensors[9].shape[0])


def _register(schema: str) -> None:
    """Register the operator: the call goes to the chosen backend."""
    name = schema.partition("(")[0]
    layer_of = LAYERS[name.removesuffix("_decode")]

    def implementation(*args: Any) -> Tensor:
        *inputs, checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot, slots, period, forced, backend = args
        check_slots_on_host(slots, checkpoint.shape[0])
        step = Step(checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot, slots, period, forced)
        return backend_module(backend).decode_step(*layer_of(*inputs), step)

    def fake(*args: Any) -> Tensor:
        like = args[0 if name == "mamba2_decode" else 2]
        return like.new_empty(like.shape)

    register(schema, implementation, fake)


for _schema in _SCHEMAS:
    _register(_schema)
