"""Checks of verify windows: how long they are, which tokens count, what follows what, what was accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.step import Accepted
from replayssm.ops.checks import check_slots_on_host, check_tensor

#: The longest window, in tokens.
MAX_WINDOW = 16


def check_length(tokens: int, ring_rows: int | None = None) -> None:
    """Raise a ValueError unless a window of ``tokens`` is short enough, for the kernels and for the ring."""
    if not 1 <= tokens <= MAX_WINDOW:
        raise ValueError(f"the window has T = {tokens} tokens: from 1 to {MAX_WINDOW} are wanted")
    if ring_rows is not None and tokens > ring_rows:
        raise ValueError(
            f"the window has T = {tokens} tokens, the ring R = {ring_rows} rows: at most R tokens are wanted"
        )


def check_window(
    slots: Tensor, num_tokens: Tensor, parents: Tensor | None, batch: int, tokens: int, device: torch.device
) -> None:
    """Check which rows and tokens a window has."""
    check_tensor("slots", slots, (batch,), "[B]", (torch.int32,), device)
    if parents is not None:
        check_tensor("parents", parents, (batch, tokens), "[B, T]", (torch.int32,), device)
    check_tensor("num_tokens", num_tokens, (batch,), "[B]", (torch.int32,), device)


def all_tokens_of(window: Tensor) -> Tensor:
    """num_tokens where the rows of a window ``[B, T, ...]`` use all of it. (If it is none, the checks say so.)"""
    if not isinstance(window, Tensor) or window.dim() < 2:
        return torch.empty(0, dtype=torch.int32)
    return torch.full(window.shape[:1], window.shape[1], dtype=torch.int32, device=window.device)


def check_window_on_host(
    slots: Tensor, num_slots: int, num_tokens: Tensor, parents: Tensor | None, tokens: int
) -> None:
    """Where they can be read without waiting for a device: slots, counts, and parents that make a tree."""
    check_slots_on_host(slots, num_slots)
    if slots.device.type != "cpu":
        return
    live, counts = slots.tolist(), num_tokens.tolist()
    for row, (slot, count) in enumerate(zip(live, counts, strict=True)):
        if slot >= 0 and not 0 <= count <= tokens:
            raise ValueError(f"num_tokens[{row}] is {count}: a number from 0 to {tokens} is wanted")
    if parents is None:
        return
    for row, (slot, count, row_parents) in enumerate(zip(live, counts, parents.tolist(), strict=True)):
        for i, parent in enumerate(row_parents[:count] if slot >= 0 else ()):
            if not -1 <= parent < i:
                raise ValueError(
                    f"parents[{row}, {i}] is {parent}: an earlier token of the window, below {i}, or -1 is wanted"
                )


def check_accepted_on_host(accepted: Accepted, num_slots: int, longest: int) -> None:
    """Where they can be read without waiting for a device: as many accepted as there are, along a path."""
    slots, num_tokens, num_accepted, path = accepted
    check_window_on_host(slots, num_slots, num_tokens, None, longest)
    if slots.device.type != "cpu":
        return
    live, counts, lengths = slots.tolist(), num_tokens.tolist(), num_accepted.tolist()
    for row, (slot, count, length) in enumerate(zip(live, counts, lengths, strict=True)):
        if slot >= 0 and not 0 <= length <= count:
            raise ValueError(f"num_accepted[{row}] is {length}: a number from 0 to num_tokens = {count} is wanted")
    if path is None:
        return
    for row, (slot, count, length, nodes) in enumerate(zip(live, counts, lengths, path.tolist(), strict=True)):
        before = -1
        for i, node in enumerate(nodes[:length] if slot >= 0 else ()):
            if not before < node < count:
                raise ValueError(
                    f"path[{row}, {i}] is {node}: a token from {before + 1} to {count - 1} is wanted, "
                    "accepted tokens being in the window's order"
                )
            before = node
