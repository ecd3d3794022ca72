"""Verify operators: a window of tokens, accepted and drafted, for each row of a batch.

A window holds T tokens. Row b uses the first ``num_tokens[b]``: later ones may hold anything. They are a chain, or a
tree by ``parents``: token i follows token ``parents[b, i]``, or the committed state where that is −1. Each token's
output is that of a decode along its own path, and its record goes into the ring. A row whose ring has no room
(``write_pos + num_tokens > R``) folds the committed records into its own checkpoint first, and its window's records
start at ring row 0; drafts never reach a checkpoint.

Cursors stay where they are. :func:`replayssm.ops.accept` for each layer, then :func:`replayssm.ops.commit` once, take
what was accepted; every verify wants a commit, be it of 0 tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from replayssm.backends.step import ABSENT, Rules, Step, Window
from replayssm.ops.checks import check_numbers
from replayssm.ops.dispatch import backend_module, register
from replayssm.ops.inputs import check_gdn, check_kda, check_mamba2, limits
from replayssm.ops.known import ShortWay, recall, remember, short_way
from replayssm.ops.layers import GATE, LAYERS, MAMBA2, NO_B, NO_BIAS, NO_D, NO_Z, scale_of
from replayssm.ops.windows import all_tokens_of, check_length, check_window, check_window_on_host

_STATE_SCHEMA = (
    "Tensor(a!) checkpoint, Tensor(b!) ring_u, Tensor(c!) ring_k, Tensor(d!) ring_g, Tensor write_pos, "
    "Tensor checkpoint_slot, Tensor slots, Tensor num_tokens, Tensor? parents, str backend"
)
_DELTA = f"float beta_scale, float scale, bool qk_l2norm, {_STATE_SCHEMA}"
_SCHEMAS = (
    f"gdn_verify({GATE}, {_DELTA}) -> Tensor",
    f"kda_verify({GATE}, float? lower_bound, {_DELTA}) -> Tensor",
    f"mamba2_verify({MAMBA2}, float dt_min, float dt_max, {_STATE_SCHEMA}) -> Tensor",
)
_CHAIN = ABSENT[17]


def gdn_verify(
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
    num_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    beta_scale: float = 1.0,
    scale: float | None = None,
    qk_l2norm: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Gated DeltaNet, a window of tokens; see :func:`replayssm.ops.gdn_decode` for the layer.

    Args:
        q, k: ``[B, T, H_k, d_k]``, raw, in the activation dtype. T is at most 16, and at most R.
        v: ``[B, T, H_v, d_v]``, same dtype.
        a, b: ``[B, T, H_v]``, projections before any activation.
        A_log, dt_bias: ``[H_v]``.
        checkpoint ... slots: see :mod:`replayssm.ops`.
        num_tokens: ``[B]`` int32, tokens that each row uses, 0 to T. None: all T, for which a tensor is made.
        parents: ``[B, T]`` int32, from −1 to i − 1 for token i; those of unused tokens may be anything. None: a chain.
        beta_scale ... backend: as for :func:`replayssm.ops.gdn_decode`.

    Returns:
        ``[B, T, H_v, d_v]`` in the dtype of v; zero for tokens that aren't used and in padding rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, a number is out of range, or T is too large.
    """
    num_tokens = all_tokens_of(v) if num_tokens is None else num_tokens
    state, window = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot), (slots, num_tokens, parents)
    rows = (slots, num_tokens, _CHAIN if parents is None else parents)
    tensors = (q, k, v, a, b, A_log, dt_bias, NO_D, NO_Z, *state, *rows)
    options = ("gdn_verify", backend, beta_scale, scale, qk_l2norm)
    known = recall(options, tensors)
    if known is None:
        check_gdn(q, k, v, a, b, A_log, dt_bias, state, "B, T")
        _check_rows(v, ring_u, *window)
        check_numbers(scale=scale_of(q, scale), beta_scale=beta_scale)
        rules = Rules(scale_of(q, scale), beta_scale, qk_l2norm)
        known = remember(options, tensors, backend, _short_way(tensors, rules))
    if known.run is not None:
        return known.run(*tensors)
    numbers = (beta_scale, scale_of(q, scale), qk_l2norm)
    return known.call(q, k, v, a, b, A_log, dt_bias, *numbers, *state, *window, known.backend)


def kda_verify(
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
    num_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    scale: float | None = None,
    qk_l2norm: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Kimi Delta Attention, a window of tokens; see :func:`replayssm.ops.kda_decode` for the layer.

    Args:
        q, k, v, b: as for :func:`gdn_verify`, with as many key heads as value heads.
        a: ``[B, T, H, d_k]``, projection before any activation.
        A_log ... lower_bound: as for :func:`replayssm.ops.kda_decode`.
        checkpoint ... backend: as for :func:`gdn_verify`; ``ring_g`` is ``[N, H, R, d_k]``.

    Returns:
        ``[B, T, H, d_v]`` in the dtype of v; zero for tokens that aren't used and in padding rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, a number is out of range, or T is too large.
    """
    num_tokens = all_tokens_of(v) if num_tokens is None else num_tokens
    state, window = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot), (slots, num_tokens, parents)
    rows = (slots, num_tokens, _CHAIN if parents is None else parents)
    tensors = (q, k, v, a, b, A_log, dt_bias, NO_D, NO_Z, *state, *rows)
    options = ("kda_verify", backend, lower_bound, beta_scale, scale, qk_l2norm)
    known = recall(options, tensors)
    if known is None:
        check_kda(q, k, v, a, b, A_log, dt_bias, lower_bound, state, "B, T")
        _check_rows(v, ring_u, *window)
        check_numbers(scale=scale_of(q, scale), beta_scale=beta_scale)
        rules = Rules(scale_of(q, scale), beta_scale, qk_l2norm, lower_bound)
        known = remember(options, tensors, backend, _short_way(tensors, rules))
    if known.run is not None:
        return known.run(*tensors)
    bias, scale = dt_bias.view(k.shape[-2:]), scale_of(q, scale)
    inputs = (q, k, v, a, b, A_log, bias, lower_bound, beta_scale, scale, qk_l2norm)
    return known.call(*inputs, *state, *window, known.backend)


def mamba2_verify(
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
    num_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> Tensor:
    """Mamba-2, a window of tokens; see :func:`replayssm.ops.mamba2_decode` for the layer.

    Args:
        x: ``[B, T, H, P]``, in the activation dtype. T is at most 16, and at most R.
        dt: ``[B, T, H]``, projection before bias and softplus.
        B, C: ``[B, T, G, N]``, same dtype as x.
        z: ``[B, T, H, P]`` or None; gate.
        A, D, dt_bias, dt_softplus, dt_limit: as for :func:`replayssm.ops.mamba2_decode`.
        checkpoint ... backend: as for :func:`gdn_verify`.

    Returns:
        ``[B, T, H, P]`` in the dtype of x; zero for tokens that aren't used and in padding rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, a number is out of range, or T is too large.
    """
    num_tokens = all_tokens_of(x) if num_tokens is None else num_tokens
    state, window = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot), (slots, num_tokens, parents)
    rows = (slots, num_tokens, _CHAIN if parents is None else parents)
    optional = (NO_BIAS if dt_bias is None else dt_bias, NO_D if D is None else D, NO_Z if z is None else z)
    tensors = (C, B, x, dt, NO_B, A, *optional, *state, *rows)
    options = ("mamba2_verify", backend, dt_softplus, dt_limit)
    known = recall(options, tensors)
    if known is None:
        check_mamba2(x, dt, B, C, A, D, z, dt_bias, dt_limit, state, "B, T")
        _check_rows(x, ring_u, *window)
        dt_min, dt_max = limits(dt_limit)
        rules = Rules(softplus=dt_softplus, dt_min=dt_min, dt_max=dt_max)
        known = remember(options, tensors, backend, _short_way(tensors, rules))
    if known.run is not None:
        return known.run(*tensors)
    inputs = (x, dt, B, C, A, D, z, dt_bias, dt_softplus, *limits(dt_limit))
    return known.call(*inputs, *state, *window, known.backend)


def _check_rows(v: Tensor, ring_u: Tensor, slots: Tensor, num_tokens: Tensor, parents: Tensor | None) -> None:
    batch, tokens = v.shape[:2]
    check_length(tokens, ring_u.shape[2])
    check_window(slots, num_tokens, parents, batch, tokens, v.device)


def _short_way(tensors: tuple[Tensor, ...], rules: Rules) -> ShortWay:
    return short_way("bind_verify", _check_on_host, tensors, rules)


def _check_on_host(*tensors: Tensor) -> None:
    slots, num_tokens, parents = tensors[15:]
    parents_given = None if parents is _CHAIN else parents
    check_window_on_host(slots, tensors[9].shape[0], num_tokens, parents_given, tensors[2].shape[1])


def _register(schema: str) -> None:
    """Register the operator: the call goes to the chosen backend."""
    name = schema.partition("(")[0]
    values = 0 if name == "mamba2_verify" else 2
    layer_of = LAYERS[name.removesuffix("_verify")]

    def implementation(*args: Any) -> Tensor:
        *inputs, checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot = args[:-4]
        slots, num_tokens, parents, backend = args[-4:]
        check_window_on_host(slots, checkpoint.shape[0], num_tokens, parents, args[values].shape[1])
        period = ring_u.shape[2]
        step = Step(checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot, slots, period, None)
        return backend_module(backend).verify_step(*layer_of(*inputs), step, Window(num_tokens, parents))

    register(schema, implementation, lambda *args: args[values].new_empty(args[values].shape))


for _schema in _SCHEMAS:
    _register(_schema)
