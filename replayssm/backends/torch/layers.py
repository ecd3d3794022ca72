"""From a layer's projections to the recurrence's inputs. Arguments: the public operators in :mod:`replayssm.ops`.

One token and a window differ in what runs the recurrence, and in the rows and tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from replayssm.backends.step import Layer, Rules, Step, Window
from replayssm.backends.torch.decode import Inputs
from replayssm.backends.torch.decode import decode as one_token
from replayssm.backends.torch.verify import used_rows, verify
from replayssm.recurrence import gdn_log_decay, inverse_norm, kda_log_decay, mamba2_time_step, sigmoid, silu


def decode_step(layer: Layer, rules: Rules, step: Step) -> Tensor:
    """One token of any layer."""
    q, k, v, a, b, rate, bias, _, _ = layer
    if b is None:
        return _additive_rule(layer, rules, step)
    assert bias is not None
    a, rate, bias = a.float(), rate.float(), bias.float()
    g = kda_log_decay(a, rate, bias, rules.lower_bound) if layer.channel else gdn_log_decay(a, rate, bias)
    recur, normalised = partial(one_token, step=step), step.records == "normalised"
    return _delta_rule(q, k, v, g, b, rules.beta_scale, rules.scale, rules.l2_norm, recur, normalised)


def gdn_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    beta_scale: float,
    scale: float,
    qk_l2norm: bool,
    step: Step,
    window: Window,
) -> Tensor:
    """Gated DeltaNet, a window."""

    def run(step: Step, window: Window, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        g = gdn_log_decay(a.float(), A_log.float(), dt_bias.float())
        recur = partial(verify, step=step, window=window)
        return _delta_rule(q, k, v, g, b, beta_scale, scale, qk_l2norm, recur)

    return _where_used(run, step, window, v, (q, k, v, a, b))


def kda_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    beta_scale: float,
    scale: float,
    qk_l2norm: bool,
    step: Step,
    window: Window,
) -> Tensor:
    """Kimi Delta Attention, a window."""

    def run(step: Step, window: Window, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        g = kda_log_decay(a.float(), A_log.float(), dt_bias.float(), lower_bound)
        recur = partial(verify, step=step, window=window)
        return _delta_rule(q, k, v, g, b, beta_scale, scale, qk_l2norm, recur)

    return _where_used(run, step, window, v, (q, k, v, a, b))


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    beta_scale: float,
    scale: float,
    qk_l2norm: bool,
    recur: Callable[..., Tensor],
    normalised_records: bool = False,
) -> Tensor:
    beta = sigmoid(b.float())
    if beta_scale != 1.0:
        beta.mul_(beta_scale)
    x = torch.stack([q, k], dim=-2).float()
    k_norm = None
    if qk_l2norm:
        norm = inverse_norm(x)
        x = x * norm.unsqueeze(-1)
        k_norm = norm[..., 1]
        if normalised_records:
            k, k_norm = x[..., 1, :], None
    y = recur("delta", x, k, v.float(), g, beta, k_norm)
    return y.mul_(scale).to(v.dtype)


def _additive_rule(layer: Layer, rules: Rules, step: Step) -> Tensor:
    C, B, x, dt, _, A, dt_bias, D, z = layer
    delta = time_step(dt, dt_bias, rules.softplus, rules.dt_min, rules.dt_max)
    x32 = x.float()
    rate = A.float()
    inputs = Inputs(x, delta, rate) if step.records == "inputs" else None
    q, u, g = C.float().unsqueeze(2), delta.unsqueeze(-1) * x32, delta * rate
    y = skip_and_gate(one_token("additive", q, B, u, g, None, None, step, inputs), x32, D, z)
    if D is not None or z is not None:
        y = torch.where((step.slots < 0)[:, None, None], 0, y)
    return y.to(x.dtype)


def mamba2_verify(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    step: Step,
    window: Window,
) -> Tensor:
    """Mamba-2, a window."""

    def run(step: Step, window: Window, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, z: Tensor | None = None) -> Tensor:
        delta = time_step(dt, dt_bias, dt_softplus, dt_min, dt_max)
        x32 = x.float()
        q, u, g = C.float().unsqueeze(-2), delta.unsqueeze(-1) * x32, delta * A.float()
        y = skip_and_gate(verify("additive", q, B, u, g, None, None, step, window), x32, D, z)
        return y.to(x.dtype)

    return _where_used(run, step, window, x, (x, dt, B, C) if z is None else (x, dt, B, C, z))


def time_step(dt: Tensor, dt_bias: Tensor | None, use_softplus: bool, smallest: float, largest: float) -> Tensor:
    """Δ in float32."""
    bias = None if dt_bias is None else dt_bias.float()
    return mamba2_time_step(dt.float(), bias, use_softplus=use_softplus, limit=(smallest, largest))


def skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """``(y + D x)·silu(z)``, in float32."""
    if D is not None:
        y = y + (D if D.dim() == 2 else D.unsqueeze(-1)).float() * x
    return y if z is None else y * silu(z.float())


def _where_used(
    run: Callable[..., Tensor], step: Step, window: Window, v: Tensor, inputs: tuple[Tensor, ...]
) -> Tensor:
    """``run(step, window, *inputs)`` on the rows that use any token, with zeros for the tokens that they don't use."""
    used = used_rows(step.slots, window, v.shape[1])
    if not used.rows:
        return v.new_zeros(v.shape)
    if len(used.rows) == len(v):
        return run(step, used.window, *map(used.pick, inputs)).contiguous()
    out = v.new_zeros(v.shape)
    out[used.rows] = run(step.pick(used.rows), used.window, *map(used.pick, inputs))
    return out
