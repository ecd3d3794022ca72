"""From a layer's projections to the recurrence's inputs. Arguments: the public operators in :mod:`replayssm.ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.step import Step
from replayssm.backends.torch.decode import Inputs, decode
from replayssm.recurrence import gdn_log_decay, inverse_norm, kda_log_decay, mamba2_time_step, sigmoid, silu


def gdn_decode(
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
) -> Tensor:
    """Gated DeltaNet."""
    g = gdn_log_decay(a.float(), A_log.float(), dt_bias.float())
    return _delta_rule(q, k, v, g, b, beta_scale, scale, qk_l2norm, step)


def kda_decode(
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
) -> Tensor:
    """Kimi Delta Attention."""
    g = kda_log_decay(a.float(), A_log.float(), dt_bias.float(), lower_bound)
    return _delta_rule(q, k, v, g, b, beta_scale, scale, qk_l2norm, step)


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    beta_scale: float,
    scale: float,
    qk_l2norm: bool,
    step: Step,
) -> Tensor:
    beta = sigmoid(b.float())
    if beta_scale != 1.0:
        beta.mul_(beta_scale)
    x = torch.stack([q, k], dim=2).float()
    k_norm = None
    if qk_l2norm:
        norm = inverse_norm(x)
        x = x * norm.unsqueeze(-1)
        k_norm = norm[:, :, 1]
        if step.records == "normalised":
            k, k_norm = x[:, :, 1], None
    y = decode("delta", x, k, v.float(), g, beta, k_norm, step)
    return y.mul_(scale).to(v.dtype)


def mamba2_decode(
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
) -> Tensor:
    """Mamba-2."""
    bias = None if dt_bias is None else dt_bias.float()
    delta = mamba2_time_step(dt.float(), bias, use_softplus=dt_softplus, limit=(dt_min, dt_max))
    x32 = x.float()
    rate = A.float()
    inputs = Inputs(x, delta, rate) if step.records == "inputs" else None
    q, u, g = C.float().unsqueeze(2), delta.unsqueeze(-1) * x32, delta * rate
    y = decode("additive", q, B, u, g, None, None, step, inputs)
    if D is not None:
        y = y + (D if D.dim() == 2 else D.unsqueeze(-1)).float() * x32
    if z is not None:
        y = y * silu(z.float())
    if D is not None or z is not None:
        y = torch.where((step.slots < 0)[:, None, None], 0, y)
    return y.to(x.dtype)
