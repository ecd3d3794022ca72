"""Causal depthwise convolution, of one token and of a window."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.step import Window
from replayssm.backends.torch.rows import Rows
from replayssm.backends.torch.verify import used_rows
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


def causal_conv1d_verify(
    x: Tensor,
    conv_state: Tensor,
    conv_window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    activation: str | None,
    window: Window,
) -> Tensor:
    """See :func:`replayssm.ops.causal_conv1d_verify`."""
    out = x.new_zeros(x.shape)
    used = used_rows(slots, window, x.shape[1])
    if not used.rows:
        return out
    rows = Rows(slots[used.rows].tolist(), x.device)
    new = used.pick(x)
    inputs = torch.cat([rows.read(conv_state), new.transpose(1, 2)], dim=2)
    y = (tapped(inputs, weight.shape[1], used.window.parents).float() * weight.float()[:, None]).sum(-1)
    if bias is not None:
        y += bias.float()[:, None]
    y = (silu(y) if activation == "silu" else y).transpose(1, 2).to(x.dtype)
    out[used.rows] = y if used.tokens is None else torch.where(used.tokens.unsqueeze(-1), y, 0)
    # As [N, 1, T_max, C]: a ring of one head.
    ring = conv_window.transpose(1, 2).unsqueeze(1)
    rows.append_runs(ring, [0] * len(used.rows), used.window.num_tokens.tolist(), new.unsqueeze(2))
    return out


def tapped(inputs: Tensor, width: int, parents: Tensor | None) -> Tensor:
    """The inputs under the W taps of each token of a window, oldest first.

    Args:
        inputs: ``[B, C, W − 1 + T]``, the committed ones and the window's.
        width: W.
        parents: ``[B, T]``, or None for a chain.

    Returns:
        ``[B, C, T, W]``.
    """
    if parents is None:
        return inputs.unfold(2, width, 1).contiguous()
    (batch, tokens), kept = parents.shape, width - 1
    lines = torch.arange(batch, device=inputs.device)
    # Places of the W inputs that end with the committed state (the first of them is never used), then with each token.
    ends = torch.empty(batch, tokens + 1, width, dtype=torch.long, device=inputs.device)
    ends[:, 0] = torch.arange(-1, kept, device=inputs.device)
    for i in range(tokens):
        ends[:, i + 1, :kept] = ends[lines, parents[:, i] + 1, 1:]
        ends[:, i + 1, kept] = kept + i
    places = ends[:, 1:].flatten(1).unsqueeze(1).expand(-1, inputs.shape[1], -1)
    return inputs.gather(2, places).unflatten(2, (tokens, width))
