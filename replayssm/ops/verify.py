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

from replayssm.backends.step import ABSENT, Step, Window
from replayssm.ops.dispatch import backend_module, call, register
from replayssm.ops.inputs import check_gdn, check_kda, check_mamba2, limits
from replayssm.ops.known import recall, remember
from replayssm.ops.layers import GATE, LAYERS, MAMBA2
from replayssm.ops.windows import all_tokens, check_length, check_window, check_window_on_host

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
    state, window = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot), (slots, num_tokens, parents)
    tensors = (q, k, v, a, b, A_log, dt_bias, ABSENT[7], ABSENT[8], *state, *_there(window))
    options = (beta_scale, scale, qk_l2norm)
    known = recall("gdn_verify", tensors, options, backend)
    if known is None:
        check_gdn(q, k, v, a, b, A_log, dt_bias, state, "B, T")
        _check_rows(v, ring_u, *window)
        known = remember("gdn_verify", tensors, options, backend)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    numbers = (beta_scale, scale, qk_l2norm)
    rows = _rows(v, *window)
    return call("gdn_verify", q, k, v, a, b, A_log, dt_bias, *numbers, *state, *rows, known.backend)


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
    state, window = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot), (slots, num_tokens, parents)
    tensors = (q, k, v, a, b, A_log, dt_bias, ABSENT[7], ABSENT[8], *state, *_there(window))
    options = (lower_bound, beta_scale, scale, qk_l2norm)
    known = recall("kda_verify", tensors, options, backend)
    if known is None:
        check_kda(q, k, v, a, b, A_log, dt_bias, lower_bound, state, "B, T")
        _check_rows(v, ring_u, *window)
        known = remember("kda_verify", tensors, options, backend)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = (q, k, v, a, b, A_log, dt_bias.view(k.shape[-2:]), lower_bound, beta_scale, scale, qk_l2norm)
    return call("kda_verify", *inputs, *state, *_rows(v, *window), known.backend)


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
    state, window = (checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot), (slots, num_tokens, parents)
    optional = (given if given is not None else ABSENT[6 + i] for i, given in enumerate((dt_bias, D, z)))
    tensors = (C, B, x, dt, ABSENT[4], A, *optional, *state, *_there(window))
    options = (dt_softplus, limits(dt_limit))
    known = recall("mamba2_verify", tensors, options, backend)
    if known is None:
        check_mamba2(x, dt, B, C, A, D, z, dt_bias, dt_limit, state, "B, T")
        _check_rows(x, ring_u, *window)
        known = remember("mamba2_verify", tensors, options, backend)
    inputs = (x, dt, B, C, A, D, z, dt_bias, dt_softplus, *limits(dt_limit))
    return call("mamba2_verify", *inputs, *state, *_rows(x, *window), known.backend)


def _there(window: tuple[Tensor, Tensor | None, Tensor | None]) -> tuple[Tensor, ...]:
    """Slots, num_tokens and parents, for :func:`recall`."""
    slots, num_tokens, parents = window
    return slots, ABSENT[16] if num_tokens is None else num_tokens, ABSENT[17] if parents is None else parents


def _check_rows(v: Tensor, ring_u: Tensor, slots: Tensor, num_tokens: Tensor | None, parents: Tensor | None) -> None:
    batch, tokens = v.shape[:2]
    check_length(tokens, ring_u.shape[2])
    check_window(slots, num_tokens, parents, batch, tokens, v.device)


def _rows(
    v: Tensor, slots: Tensor, num_tokens: Tensor | None, parents: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Slots, num_tokens and parents, as the operators take them."""
    return slots, all_tokens(v.shape[0], v.shape[1], v.device) if num_tokens is None else num_tokens, parents


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
