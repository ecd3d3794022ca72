"""Copies to the device that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list, or a list of equally long lists, as a tensor on the device; see :func:`send`."""
    return send(torch.tensor(values, dtype=dtype), device)


def send(held: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device.

    On a GPU it goes through pinned memory of its own, which PyTorch keeps until the copy is done: from pageable memory
    the host would wait, and from a buffer that is filled again it could overtake the device.
    """
    if device.type != "cuda":
        return held.to(device)
    return held.pin_memory().to(device, non_blocking=True)
