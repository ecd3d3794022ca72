"""Decode operators for callers that own slots, cursors and rings; :mod:`replayssm.integrations` is built of them.

They differ from :mod:`replayssm.ops.decode` in what the caller brings: ``write_pos`` is ``[B]``, one cursor for each
row; every slot reads its own checkpoint; the output goes into the caller's tensor; and a ring holds the records that
the caller's project defines (:data:`replayssm.backends.step.Records`). The kernels are the same. Callers check the
arguments, because they know their names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.backends.step import Layer, Records, Rules, Step
from replayssm.ops.dispatch import backend_module, call, register, resolve_backend
from replayssm.ops.inputs import UNLIMITED
from replayssm.ops.layers import mamba2

_DELTA = (
    "delta_decode_rows(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
    "float? lower_bound, float scale, bool qk_l2norm, Tensor(a!) checkpoint, Tensor(b!) ring_u, Tensor(c!) ring_k, "
    "Tensor(d!) ring_g, Tensor write_pos, Tensor slots, Tensor? force_flush, Tensor(e!) out, str backend) -> ()"
)
_MAMBA2 = (
    "mamba2_decode_rows(Tensor x, Tensor dt, Tensor B, Tensor C, Tensor A, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "bool dt_softplus, Tensor(a!) checkpoint, Tensor(b!) ring_x, Tensor(c!) ring_B, Tensor(d!) ring_dt, "
    "Tensor write_pos, Tensor slots, Tensor flush, Tensor(e!) out, str backend) -> ()"
)


def delta_decode_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float,
    qk_l2norm: bool,
    checkpoint: Tensor,
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    write_pos: Tensor,
    slots: Tensor,
    force_flush: Tensor | None,
    out: Tensor,
    backend: str,
) -> None:
    """One token of Gated DeltaNet (a ``[B, H_v]``) or Kimi Delta Attention (a ``[B, H_v, d_k]``).

    A record is ``(u, k, g)`` with the normalised key. A row flushes if it is forced, or if its cursor is at R − 1.
    Padding rows of ``out`` are zeroed.
    """
    inputs = (q, k, v, a, b, A_log, dt_bias, lower_bound, scale, qk_l2norm)
    state = (checkpoint, ring_u, ring_k, ring_g, write_pos, slots, force_flush)
    call("delta_decode_rows", *inputs, *state, out, resolve_backend(backend, checkpoint.device))


def mamba2_decode_rows(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    A: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    checkpoint: Tensor,
    ring_x: Tensor,
    ring_B: Tensor,
    ring_dt: Tensor,
    write_pos: Tensor,
    slots: Tensor,
    flush: Tensor,
    out: Tensor,
    backend: str,
) -> None:
    """One token of Mamba-2; a record is ``(x, B, Δ)``, and D may be ``[H]`` or ``[H, P]``.

    A row flushes where ``flush`` says so, and where its ring is full. Padding rows of ``out`` are left alone.
    """
    inputs = (x, dt, B, C, A, D, z, dt_bias, dt_softplus)
    state = (checkpoint, ring_x, ring_B, ring_dt, write_pos, slots, flush)
    call("mamba2_decode_rows", *inputs, *state, out, resolve_backend(backend, checkpoint.device))


def _run(layer: Layer, rules: Rules, state: tuple[Any, ...], period: int, records: Records, zero_padding: bool) -> None:
    checkpoint, ring_u, ring_k, ring_g, write_pos, slots, flush, out, backend = state
    target = out if out.is_contiguous() else None
    step = Step(checkpoint, ring_u, ring_k, ring_g, write_pos, None, slots, period, flush)
    step = step._replace(records=records, out=target, zero_padding=zero_padding)
    y = backend_module(backend).decode_step(layer, rules, step)
    if y is target:
        return
    out.copy_(y if zero_padding else torch.where((slots < 0)[:, None, None], out, y))


def _delta(*args: Any) -> None:
    q, k, v, a, b, A_log, dt_bias, lower_bound, scale, qk_l2norm, *state = args
    rules = Rules(scale, l2_norm=qk_l2norm, lower_bound=lower_bound if a.dim() == 3 else None)
    layer = Layer(q, k, v, a, b, A_log, dt_bias)
    _run(layer, rules, tuple(state), state[1].shape[2], "normalised", zero_padding=True)


def _mamba2(*args: Any) -> None:
    inputs, state = (*args[:9], *UNLIMITED), args[9:]
    period = state[1].shape[2] + 1  # natural flushes are the caller's to decide
    _run(*mamba2(*inputs), state, period, "inputs", zero_padding=False)


register(_DELTA, _delta, lambda *_: None)
register(_MAMBA2, _mamba2, lambda *_: None)
