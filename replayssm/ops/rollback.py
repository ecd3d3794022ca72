"""Taking what was accepted of a verify window: each layer's records and inputs, then the cursors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.backends.step import ABSENT, Accepted
from replayssm.ops.checks import check_count, check_rank, check_tensor
from replayssm.ops.dispatch import backend_module, call, register, resolve_backend
from replayssm.ops.known import recall, remember
from replayssm.ops.windows import check_accepted_on_host


def accept(
    ring_u: Tensor,
    ring_k: Tensor,
    ring_g: Tensor,
    *,
    write_pos: Tensor,
    slots: Tensor,
    num_tokens: Tensor,
    num_accepted: Tensor,
    conv_state: Tensor | None = None,
    conv_window: Tensor | None = None,
    path: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Keep the accepted tokens of a window in one layer, after its verify and before :func:`commit`.

    Records of the path move together at the start of the window's ring rows. The convolution state becomes the last
    W − 1 of its inputs followed by the accepted ones. With no path and no convolution there is nothing to do.

    Args:
        ring_u, ring_k, ring_g, write_pos: see :mod:`replayssm.ops`; the rings are updated in place.
        slots, num_tokens: ``[B]`` int32, as the verify had them.
        num_accepted: ``[B]`` int32, from 0 to num_tokens.
        conv_state: ``[N, C, W − 1]``, updated in place, or None.
        conv_window: ``[N, C, T_max]``, from :func:`replayssm.ops.causal_conv1d_verify`, or None with conv_state.
        path: ``[B, T]`` int32, the accepted tokens by their places in the window, ascending; entries past
            num_accepted may be anything. None: the first num_accepted tokens, for every row.
        backend: see :mod:`replayssm.ops`.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or a count or a path is impossible.
    """
    conv = (conv_state, conv_window)
    there = [ABSENT[7 + i] if x is None else x for i, x in enumerate((*conv, path))]
    tensors = (ring_u, ring_k, ring_g, write_pos, slots, num_tokens, num_accepted, *there)
    options = ("accept", backend)
    known = recall(options, tensors)
    if known is None:
        num_slots = _check_rings(ring_u, ring_k, ring_g, write_pos)
        _check_counts(slots, num_tokens, num_accepted, ring_u.device)
        if path is not None:
            check_rank("path", path, "[B, T]")
            check_tensor("path", path, (slots.numel(), path.shape[1]), "[B, T]", (torch.int32,), ring_u.device)
        _check_conv(conv_state, conv_window, num_slots, ring_u.device)
        known = remember(options, tensors, backend)
    if path is None and conv_state is None:
        return
    known.call(ring_u, ring_k, ring_g, *conv, write_pos, slots, num_tokens, num_accepted, path, known.backend)


def _check_rings(ring_u: Tensor, ring_k: Tensor, ring_g: Tensor, write_pos: Tensor) -> int:
    """Check that they fit together; gives N."""
    check_rank("ring_u", ring_u, "[N, H_v, R, d_v]")
    check_rank("ring_k", ring_k, "[N, H_k, R, d_k]")
    num_slots, num_v_heads, ring_rows, _ = ring_u.shape
    num_k_heads, head_k_dim, device = ring_k.shape[1], ring_k.shape[3], ring_u.device
    check_tensor("ring_u", ring_u, tuple(ring_u.shape), "[N, H_v, R, d_v]")
    check_tensor("ring_k", ring_k, (num_slots, num_k_heads, ring_rows, head_k_dim), "[N, H_k, R, d_k]", device=device)
    g_shape, g_dims = (num_slots, num_v_heads, ring_rows), "[N, H_v, R]"
    if isinstance(ring_g, Tensor) and ring_g.dim() == 4:
        check_tensor("ring_g", ring_g, (*g_shape, head_k_dim), "[N, H_v, R, d_k]", (torch.float32,), device)
    else:
        check_tensor("ring_g", ring_g, g_shape, g_dims, (torch.float32,), device)
    check_tensor("write_pos", write_pos, (num_slots,), "[N]", (torch.int32,), device)
    return num_slots


def commit(
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    slots: Tensor,
    *,
    num_tokens: Tensor,
    num_accepted: Tensor,
    ring_rows: int,
    counters: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Move the cursors past the accepted tokens, after a verify and its :func:`accept` of all layers.

    ``folded = write_pos + num_tokens > R``, as the verify operators decided;
    ``write_pos = (0 if folded else write_pos) + num_accepted``. A slot that folded reads its own checkpoint from now
    on. Rows with num_tokens = 0 are left alone.

    Args:
        write_pos, checkpoint_slot: ``[N]`` int32, updated in place.
        slots, num_tokens: ``[B]`` int32, as the verify had them.
        num_accepted: ``[B]`` int32, from 0 to num_tokens.
        ring_rows: R.
        counters: int64 ``[N, 5]`` or None; windows, folds, records read, tokens and accepted tokens are added.
        backend: see :mod:`replayssm.ops`.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or a count is impossible.
    """
    check_rank("write_pos", write_pos, "[N]")
    device, slot_count = write_pos.device, tuple(write_pos.shape[:1])
    check_tensor("write_pos", write_pos, slot_count, "[N]", (torch.int32,))
    check_tensor("checkpoint_slot", checkpoint_slot, slot_count, "[N]", (torch.int32,), device)
    _check_counts(slots, num_tokens, num_accepted, device)
    if counters is not None:
        check_tensor("counters", counters, (*slot_count, 5), "[N, 5]", (torch.int64,), device)
    check_count("ring_rows", ring_rows, 1)
    rows = (slots, num_tokens, num_accepted, ring_rows)
    call("commit", write_pos, checkpoint_slot, counters, *rows, resolve_backend(backend, device))


def _check_counts(slots: Tensor, num_tokens: Tensor, num_accepted: Tensor, device: torch.device) -> None:
    check_rank("slots", slots, "[B]")
    batch = (slots.numel(),)
    for name, tensor in (("slots", slots), ("num_tokens", num_tokens), ("num_accepted", num_accepted)):
        check_tensor(name, tensor, batch, "[B]", (torch.int32,), device)


def _check_conv(conv_state: Tensor | None, conv_window: Tensor | None, num_slots: int, device: torch.device) -> None:
    if conv_state is None and conv_window is None:
        return
    for name, tensor, dims in (
        ("conv_state", conv_state, "[N, C, W-1]"),
        ("conv_window", conv_window, "[N, C, T_max]"),
    ):
        if tensor is None:
            raise ValueError(f"{name} is None: conv_state and conv_window are wanted, both or neither")
        check_rank(name, tensor, dims)
    assert conv_state is not None
    assert conv_window is not None
    channels, kept = conv_state.shape[1:]
    check_tensor("conv_state", conv_state, (num_slots, channels, kept), "[N, C, W-1]", device=device)
    window_shape = (num_slots, channels, conv_window.shape[2])
    check_tensor("conv_window", conv_window, window_shape, "[N, C, T_max]", (conv_state.dtype,), device)


def _accept(*args: Any) -> None:
    *rings, conv_state, conv_window, write_pos, slots, num_tokens, num_accepted, path, backend = args
    accepted = Accepted(slots, num_tokens, num_accepted, path)
    longest: int = rings[0].shape[2]
    if conv_window is not None:
        longest = min(longest, conv_window.shape[2])
    if path is not None:
        longest = min(longest, path.shape[1])
    check_accepted_on_host(accepted, write_pos.shape[0], longest)
    backend_module(backend).accept(tuple(rings), (conv_state, conv_window), write_pos, accepted)


def _commit(*args: Any) -> None:
    write_pos, checkpoint_slot, counters, slots, num_tokens, num_accepted, ring_rows, backend = args
    accepted = Accepted(slots, num_tokens, num_accepted)
    check_accepted_on_host(accepted, write_pos.shape[0], ring_rows)
    backend_module(backend).commit(write_pos, checkpoint_slot, counters, accepted, ring_rows)


register(
    "accept(Tensor(a!) ring_u, Tensor(b!) ring_k, Tensor(c!) ring_g, Tensor(d!)? conv_state, Tensor? conv_window, "
    "Tensor write_pos, Tensor slots, Tensor num_tokens, Tensor num_accepted, Tensor? path, str backend) -> ()",
    _accept,
    lambda *_: None,
)
register(
    "commit(Tensor(a!) write_pos, Tensor(b!) checkpoint_slot, Tensor(c!)? counters, Tensor slots, Tensor num_tokens, "
    "Tensor num_accepted, int ring_rows, str backend) -> ()",
    _commit,
    lambda *_: None,
)
