"""Causal convolution of a verify window."""

from __future__ import annotations

from torch import Tensor

from replayssm.backends.step import Window
from replayssm.ops.checks import check_activation, check_rank, check_tensor
from replayssm.ops.dispatch import backend_module, call, register, resolve_backend
from replayssm.ops.windows import all_tokens, check_length, check_window, check_window_on_host


def causal_conv1d_verify(
    x: Tensor,
    conv_state: Tensor,
    conv_window: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    slots: Tensor,
    num_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    activation: str | None = None,
    backend: str = "auto",
) -> Tensor:
    """Depthwise causal convolution of a window; the taps follow each token's ancestors, then the committed inputs.

    The inputs of the tokens in use go into ``conv_window``, where :func:`replayssm.ops.accept` finds those that were
    accepted; ``conv_state`` stays as it is.

    Args:
        x: ``[B, T, C]``, the window's inputs. T is at most 16, and at most T_max.
        conv_state: ``[N, C, W − 1]``, dtype of x; the last committed inputs, oldest first. Strides are free.
        conv_window: ``[N, C, T_max]``, dtype of x; updated in place. Strides are free.
        weight: ``[C, W]``.
        bias: ``[C]`` or None.
        slots, num_tokens, parents: as for :func:`replayssm.ops.gdn_verify`.
        activation: ``"silu"``, its synonym ``"swish"``, or None.
        backend: ``"auto"``, ``"cpu"``, ``"torch"``, ``"triton"`` or ``"cuda"``.

    Returns:
        ``[B, T, C]`` in the dtype of x; zero for tokens that aren't used and in padding rows.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, the activation is unknown, or T is too large.
    """
    check_rank("x", x, "[B, T, C]")
    check_rank("weight", weight, "[C, W]")
    check_rank("conv_state", conv_state, "[N, C, W-1]")
    check_rank("conv_window", conv_window, "[N, C, T_max]")
    batch, tokens = x.shape[:2]
    channels, width = weight.shape
    num_slots, room = conv_state.shape[0], conv_window.shape[2]
    check_tensor("x", x, (batch, tokens, channels), "[B, T, C]")
    check_tensor("conv_state", conv_state, (num_slots, channels, width - 1), "[N, C, W-1]", (x.dtype,), x.device)
    check_tensor("conv_window", conv_window, (num_slots, channels, room), "[N, C, T_max]", (x.dtype,), x.device)
    check_tensor("weight", weight, (channels, width), "[C, W]", device=x.device)
    if bias is not None:
        check_tensor("bias", bias, (channels,), "[C]", device=x.device)
    check_length(tokens)
    if tokens > room:
        raise ValueError(f"the window has T = {tokens} tokens: conv_window has room for T_max = {room}")
    check_window(slots, num_tokens, parents, batch, tokens, x.device)
    num_tokens = all_tokens(batch, tokens, x.device) if num_tokens is None else num_tokens
    activation = check_activation(activation)
    rows = (slots, num_tokens, parents, activation, resolve_backend(backend, x.device))
    return call("causal_conv1d_verify", x, conv_state, conv_window, weight, bias, *rows)


def _implementation(
    x: Tensor,
    conv_state: Tensor,
    conv_window: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: Tensor,
    num_tokens: Tensor,
    parents: Tensor | None,
    activation: str | None,
    backend: str,
) -> Tensor:
    check_window_on_host(slots, conv_state.shape[0], num_tokens, parents, x.shape[1])
    run = backend_module(backend).causal_conv1d_verify
    return run(x, conv_state, conv_window, weight, bias, slots, activation, Window(num_tokens, parents))


register(
    "causal_conv1d_verify(Tensor x, Tensor conv_state, Tensor(a!) conv_window, Tensor weight, Tensor? bias, "
    "Tensor slots, Tensor num_tokens, Tensor? parents, str? activation, str backend) -> Tensor",
    _implementation,
    lambda x, *_: x.new_empty(x.shape),
)
