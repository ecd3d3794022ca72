"""Causal depthwise convolution, one token."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.torch.rows import Rows
from replayssm.recurrence import silu


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
    window = torch.cat([rows.read(conv_state), x.unsqueeze(-1)], dim=-1)
    y = (window.float() * weight.float()).sum(-1)
    if bias is not None:
        y += bias.float()
    rows.write(conv_state, window[..., 1:])
    return (silu(y) if activation == "silu" else y).to(x.dtype)
