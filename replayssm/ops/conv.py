"""Causal convolution operator."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.step import ABSENT
from replayssm.ops.checks import check_activation, check_conv, check_slots_on_host, check_tensor
from replayssm.ops.dispatch import backend_module, register
from replayssm.ops.known import recall, remember


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    slots: Tensor,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Depthwise causal convolution, one token; the state then holds the last W − 1 inputs, oldest first.

    ``y = act(bias + Σ_w weight[:, w] · input_{t−W+1+w})``, summed in float32.

    Args:
        x: ``[B, C]``, the new inputs.
        conv_state: ``[N, C, W − 1]``, dtype of x; updated in place. Strides are free.
        weight: ``[C, W]``.
        bias: ``[C]`` or None.
        slots: ``[B]`` int32, negative for a padding row.
        activation: ``"silu"``, its synonym ``"swish"``, or None.
        backend: ``"auto"``, ``"cpu"``, ``"torch"``, ``"triton"`` or ``"cuda"``.

    Returns:
        ``[B, C]`` in the dtype of x; zero in padding rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or the activation is unknown.
    """
    tensors = (x, conv_state, weight, ABSENT[3] if bias is None else bias, slots)
    options = ("causal_conv1d_update", backend)
    known = recall(options, tensors)
    if known is None:
        check_conv(x, "[B, C]", conv_state, weight, bias, "[N, C, W-1]")
        check_tensor("slots", slots, (x.shape[0],), "[B]", (torch.int32,), x.device)
        known = remember(options, tensors, backend)
    activation = check_activation(activation)
    return known.call(x, conv_state, weight, bias, slots, activation, known.backend)


def _implementation(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    activation: str | None,
    backend: str,
) -> Tensor:
    check_slots_on_host(slots, conv_state.shape[0])
    return backend_module(backend).causal_conv1d_update(x, conv_state, weight, bias, slots, activation)


register(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor slots, "
    "str? activation, str backend) -> Tensor",
    _implementation,
    lambda x, *_: x.new_empty(x.shape),
)
