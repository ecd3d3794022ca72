"""Checks that the contracts share, for arguments that the operators don't have."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.ops.checks import check_slots_on_host

INDEX_DTYPES = (torch.int32, torch.int64)


def check_rows_on_host(name: str, slots: Tensor, num_slots: int, write_pos: Tensor, ring_len: int) -> None:
    """Where rows can be read without waiting for a device: slots in range, none twice, cursors inside the ring.

    Raises:
        ValueError: they are not.
    """
    if slots.device.type != "cpu" or torch.compiler.is_compiling():
        return
    check_slots_on_host(slots, num_slots, name)
    for slot, cursor in zip(slots.tolist(), write_pos.tolist(), strict=True):
        if slot >= 0 and not 0 <= cursor < ring_len:
            raise ValueError(f"write_pos holds {cursor}: numbers from 0 to L - 1 = {ring_len - 1} are wanted")
