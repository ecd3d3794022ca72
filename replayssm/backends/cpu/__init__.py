"""Kernels in C, built at first use: the default on a CPU that has a C compiler.

PyTorch does such a step in about ninety tensor operations, which at small shapes take longer than the arithmetic.
What has no kernel here runs on the torch backend.
"""

from typing import Any

from replayssm.backends import torch as _torch_backend
from replayssm.backends.cpu.build import unavailable_reason
from replayssm.backends.cpu.kernels import advance, causal_conv1d_update, decode_step

__all__ = [
    "advance",
    "causal_conv1d_update",
    "decode_step",
    "unavailable_reason",
]


def __getattr__(name: str) -> Any:
    return getattr(_torch_backend, name)
