"""Copies between host and device that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from replayssm.state.transfer import send, to_device

__all__ = ["HostCopy", "send", "to_device"]


class HostCopy:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].device.type == "cuda":
            self._copies = [_pinned_copy(tensor) for tensor in tensors]
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            # On a CPU nothing is in flight; the tensor itself may be overwritten by the next step.
            self._copies = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Tensor]:
        """The tensors on the host, once what was queued before them has run."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def _pinned_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
