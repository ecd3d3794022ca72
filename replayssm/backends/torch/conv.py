"""Causal depthwise convolution, one token."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from replayssm.backends.torch.rows import Rows


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, activation: str | None
) -> Tensor:
    """See :func:`replayssm.ops.causal_conv1d_update`."""
    host = slots.tolist()
    live = [i for i, slot in enumerate(host) if slot >= 0]
    if len(live) < len(host):
        out = x.new_zeros(x.shape)
        if live:
            out[live] = causal_conv1d_update(x[live], conv_state, weight, bias, slots[live], activation)
        return out
    if not host:
        return x.new_zeros(x.shape)
    rows = Rows(host, x.device)
    past = rows.read(conv_state)
    width = weight.shape[1]
    y = x.float() * weight[:, -1].float()
    if width > 1:
        y += (past.float() * weight[:, :-1].float()).sum(-1)
    if bias is not None:
        y += bias.float()
    if width > 2:
        past = past[..., 1:].clone()
        rows.write(conv_state[..., :-1], past)
    if width > 1:
        rows.write(conv_state[..., -1], x)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype)
