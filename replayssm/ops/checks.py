"""Argument checks shared by the operators. Each error names the argument, what was given and what is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.step import State

ACTIVATION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHECKPOINT_DTYPES = ACTIVATION_DTYPES


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_count(name: str, value: int, smallest: int, wanted: str = "") -> None:
    """Raise a ValueError unless ``value`` is a whole number that isn't too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ValueError(f"{name} is {value!r}: {wanted or f'a whole number of at least {smallest}'} is wanted")


def check_numbers(**given: float) -> None:
    """Check that options are numbers, which kernels are given as they are."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name} is {value!r}: a number is wanted")


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dims: str,
    dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES,
    device: torch.device | None = None,
) -> None:
    """Raise a ValueError unless ``tensor`` has the wanted shape, dtype and device."""
    if (
        isinstance(tensor, Tensor)
        and tensor.shape == shape
        and tensor.dtype in dtypes
        and (device is None or tensor.device == device)
    ):
        return
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: a tensor {dims} is wanted")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: {dims} = {list(shape)} is wanted")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(dtype_name(d) for d in dtypes)
        raise ValueError(f"{name} has dtype {dtype_name(tensor.dtype)}: {wanted} is wanted")
    raise ValueError(f"{name} is on {tensor.device}: {device} is wanted, where the other tensors are")


def check_activation(activation: str | None) -> str | None:
    """The activation by its one name; a ValueError for one that there isn't."""
    if activation not in ("silu", "swish", None):
        raise ValueError(f"activation is {activation!r}: 'silu', 'swish' or None is wanted")
    return "silu" if activation == "swish" else activation


def check_rank(name: str, tensor: Tensor, dims: str) -> None:
    """Raise a ValueError unless ``tensor`` has as many dimensions as ``dims`` names."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: a tensor {dims} is wanted")
    if tensor.dim() != dims.count(",") + 1:
        raise ValueError(f"{name} has shape {list(tensor.shape)}: {dims} is wanted")


def check_state(state: State, *, channel: bool, activation_dtype: torch.dtype | None = None) -> None:
    """Check that the state tensors fit together."""
    checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot = state
    check_rank("checkpoint", checkpoint, "[N, H_v, d_v, d_k]")
    check_rank("ring_k", ring_k, "[N, H_k, R, d_k]")
    n, h_v, d_v, d_k = checkpoint.shape
    h_k, r = ring_k.shape[1:3]
    device = checkpoint.device
    check_tensor("checkpoint", checkpoint, (n, h_v, d_v, d_k), "[N, H_v, d_v, d_k]", CHECKPOINT_DTYPES)
    k_dtypes = ACTIVATION_DTYPES if activation_dtype is None else (activation_dtype,)
    check_tensor("ring_k", ring_k, (n, h_k, r, d_k), "[N, H_k, R, d_k]", k_dtypes, device)
    u_dtypes = tuple(dict.fromkeys((torch.float32, ring_k.dtype)))
    check_tensor("ring_u", ring_u, (n, h_v, r, d_v), "[N, H_v, R, d_v]", u_dtypes, device)
    g_shape, g_dims = ((n, h_v, r, d_k), "[N, H_v, R, d_k]") if channel else ((n, h_v, r), "[N, H_v, R]")
    check_tensor("ring_g", ring_g, g_shape, g_dims, (torch.float32,), device)
    check_tensor("write_pos", write_pos, (n,), "[N]", (torch.int32,), device)
    check_tensor("checkpoint_slot", checkpoint_slot, (n,), "[N]", (torch.int32,), device)
    if r < 1:
        raise ValueError("ring_k has R = 0 rows: a ring of at least 1 row is wanted")
    if h_k < 1 or h_v % h_k:
        raise ValueError(f"checkpoint has {h_v} value heads, ring_k {h_k} key heads: H_v must be a multiple of H_k")


def check_conv(x: Tensor, dims: str, conv_state: Tensor, weight: Tensor, bias: Tensor | None, state_dims: str) -> None:
    """Check a convolution's inputs ``[..., C]``, its kept inputs and its weights; ``dims`` as the caller's docs say."""
    check_rank("x", x, dims)
    check_rank("weight", weight, "[C, W]")
    check_rank("conv_state", conv_state, state_dims)
    channels, width = weight.shape
    check_tensor("x", x, (*x.shape[:-1], channels), dims)
    state_shape = (conv_state.shape[0], channels, width - 1)
    check_tensor("conv_state", conv_state, state_shape, state_dims, (x.dtype,), x.device)
    check_tensor("weight", weight, (channels, width), "[C, W]", device=x.device)
    if bias is not None:
        check_tensor("bias", bias, (channels,), "[C]", device=x.device)


def check_rows(slots: Tensor, batch: int, force_flush: Tensor | None, device: torch.device) -> None:
    """Check the tensors that say which rows step, and which of them flush."""
    check_tensor("slots", slots, (batch,), "[B]", (torch.int32,), device)
    if force_flush is not None:
        check_tensor("force_flush", force_flush, (batch,), "[B]", (torch.bool, torch.int32), device)


def check_flush_period(flush_period: int, ring_k: Tensor) -> None:
    """Raise a ValueError unless rows flush before their ring is full."""
    ring_rows = ring_k.shape[2]
    if not isinstance(flush_period, int) or not 1 <= flush_period <= ring_rows:
        raise ValueError(
            f"flush_period is {flush_period}: a number from 1 to R = {ring_rows}, the ring's rows, is wanted"
        )


def check_slots_on_host(slots: Tensor, num_slots: int, name: str = "slots") -> None:
    """Where slots can be read without waiting for a device: each in range, none twice."""
    if slots.device.type != "cpu":
        return
    used = [s for s in slots.tolist() if s >= 0]
    if len(used) == 1 and used[0] < num_slots:
        return
    if used and max(used) >= num_slots:
        raise ValueError(
            f"{name} holds {max(used)}: numbers below N = {num_slots}, or negative for padding, are wanted"
        )
    if len(set(used)) < len(used):
        twice = next(s for s in used if used.count(s) > 1)
        raise ValueError(f"{name} holds {twice} more than once: each row of a batch needs a slot of its own")
