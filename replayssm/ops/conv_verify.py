"""Causal convolution of a verify window."""

from __future__ import annotations

from torch import Tensor

from replayssm.backends.step import ABSENT, Window
from replayssm.ops.checks import check_activation, check_conv, check_rank, check_tensor
from replayssm.ops.dispatch import backend_module, register
from replayssm.ops.known import recall, remember
from replayssm.ops.windows import all_tokens_of, check_length, check_window, check_window_on_host


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
    num_tokens = all_tokens_of(x) if num_tokens is None else num_tokens
    optional = (ABSENT[4] if bias is None else bias, ABSENT[7] if parents is None else parents)
    tensors = (x, conv_state, conv_window, weight, *optional, slots, num_tokens)
    options = ("causal_conv1d_verify", backend)
    known = recall(options, tensors)
    if known is None:
        check_conv(x, "[B, T, C]", conv_state, weight, bias, "[N, C, W-1]")
        _check_room(x, conv_state, conv_window)
        check_window(slots, num_tokens, parents, x.shape[0], x.shape[1], x.device)
        known = remember(options, tensors, backend)
    rows = (slots, num_tokens, parents, check_activation(activation), known.backend)
    return known.call(x, conv_state, conv_window, weight, bias, *rows)


def _check_room(x: Tensor, conv_state: Tensor, conv_window: Tensor) -> None:
    check_rank("conv_window", conv_window, "[N, C, T_max]")
    tokens, room = x.shape[1], conv_window.shape[2]
    window_shape = (*conv_state.shape[:2], room)
    check_tensor("conv_window", conv_window, window_shape, "[N, C, T_max]", (x.dtype,), x.device)
    check_length(tokens)
    if tokens > room:
        raise ValueError(f"the window has T = {tokens} tokens: conv_window has room for T_max = {room}")


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
