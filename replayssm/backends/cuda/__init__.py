"""Kernels in CUDA C++ for Hopper GPUs and newer, compiled at first use.

What has no kernel here, other shapes among it, runs on the triton backend.
"""

from functools import cache
from typing import Any

import torch

from replayssm.backends.cuda.build import missing_package
from replayssm.backends.cuda.decode import bind_decode, decode_step
from replayssm.backends.cuda.state import materialize, read_state
from replayssm.backends.cuda.verify import bind_verify, verify_step

__all__ = [
    "bind_decode",
    "bind_verify",
    "decode_step",
    "materialize",
    "read_state",
    "unavailable_reason",
    "verify_step",
]

OLDEST_CAPABILITY = (9, 0)


@cache
def unavailable_reason() -> str | None:
    """None if the kernels run on this machine's GPU, else why not."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA's GPUs"
    if torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return f"the GPU has compute capability {major}.{minor}: cuda kernels are made for 9.0 and newer"
    return missing_package()


def __getattr__(name: str) -> Any:
    from replayssm.backends import triton

    return getattr(triton, name)
