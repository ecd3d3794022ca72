"""From a layer's projections to the recurrence's inputs. Arguments: the public operators in :mod:`replayssm.ops`.

One token and a window differ in what runs the recurrence, and in the rows and tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from replayssm.backends.step import Layer, Rules, Step, Window
from replayssm.backends.torch.decode import Inputs, Terms
from replayssm.backends.torch.decode import decode as one_token
from replayssm.backends.torch.verify import used_rows, verify
from replayssm.recurrence import gdn_log_decay, inverse_norm, kda_log_decay, mamba2_time_step, sigmoid, silu


def decode_step(layer: Layer, rules: Rules, step: Step) -> Tensor:
    """One token of any layer."""
    if layer.b is not None:
        return _delta_rule(layer, rules, partial(one_token, step=step), normalised_records=step.records == "normalised")
    delta, rate = time_step(layer, rules), layer.rate.float()
    inputs = Inputs(layer.v, delta, rate) if step.records == "inputs" else None
    y = _additive_rule(layer, delta, rate, partial(one_token, step=step, inputs=inputs))
    if layer.D is not None or layer.z is not None:
        y = torch.where((step.slots < 0)[:, None, None], 0, y)
    return y.to(layer.v.dtype)


def verify_step(layer: Layer, rules: Rules, step: Step, window: Window) -> Tensor:
    """A window of any layer: the rows that use any token, with zeros for the tokens that they don't use."""
    v = layer.v
    used = used_rows(step.slots, window, v.shape[1])
    if not used.rows:
        return v.new_zeros(v.shape)
    tokens = {name: getattr(layer, name) for name in ("q", "k", "v", "a", "b", "z")}
    layer = layer._replace(**{name: used.pick(x) for name, x in tokens.items() if x is not None})
    if len(used.rows) == len(v):
        return _window(layer, rules, step, used.window).contiguous()
    out = v.new_zeros(v.shape)
    out[used.rows] = _window(layer, rules, step.pick(used.rows), used.window)
    return out


def _window(layer: Layer, rules: Rules, step: Step, window: Window) -> Tensor:
    recur = partial(verify, step=step, window=window)
    if layer.b is not None:
        return _delta_rule(layer, rules, recur)
    return _additive_rule(layer, time_step(layer, rules), layer.rate.float(), recur).to(layer.v.dtype)


def _delta_rule(
    layer: Layer, rules: Rules, recur: Callable[..., Tensor], *, normalised_records: bool = False
) -> Tensor:
    q, k, v = layer[:3]
    g, beta = log_decay(layer, rules), input_gate(layer, rules)
    x = torch.stack([q, k], dim=-2).float()
    k_norm = None
    if rules.l2_norm:
        norm = inverse_norm(x)
        x = x * norm.unsqueeze(-1)
        k_norm = norm[..., 1]
        if normalised_records:
            k, k_norm = x[..., 1, :], None
    y = recur(Terms(x, k, v.float(), g, beta, k_norm))
    return y.mul_(rules.scale).to(v.dtype)


def _additive_rule(layer: Layer, delta: Tensor, rate: Tensor, recur: Callable[..., Tensor]) -> Tensor:
    """In float32; Δ and A are the caller's, who may store them."""
    x = layer.v.float()
    y = recur(Terms(layer.q.float().unsqueeze(-2), layer.k, delta.unsqueeze(-1) * x, delta * rate))
    return skip_and_gate(y, x, layer.D, layer.z)


def log_decay(layer: Layer, rules: Rules) -> Tensor:
    """Of the delta rule's layers, in float32."""
    assert layer.bias is not None
    a, rate, bias = layer.a.float(), layer.rate.float(), layer.bias.float()
    return kda_log_decay(a, rate, bias, rules.lower_bound) if layer.channel else gdn_log_decay(a, rate, bias)


def input_gate(layer: Layer, rules: Rules) -> Tensor:
    """β of the delta rule's layers, in float32."""
    assert layer.b is not None
    beta = sigmoid(layer.b.float())
    return beta if rules.beta_scale == 1.0 else beta.mul_(rules.beta_scale)


def time_step(layer: Layer, rules: Rules) -> Tensor:
    """Δ of Mamba-2, in float32."""
    bias = None if layer.bias is None else layer.bias.float()
    limits = (rules.dt_min, rules.dt_max)
    return mamba2_time_step(layer.a.float(), bias, use_softplus=rules.softplus, limit=limits)


def skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """``(y + D x)·silu(z)``, in float32."""
    if D is not None:
        y = y + (D if D.dim() == 2 else D.unsqueeze(-1)).float() * x
    return y if z is None else y * silu(z.float())
