"""Which backend runs an operator, and the library that the operators are registered in."""

from __future__ import annotations

from types import ModuleType

import torch

from replayssm.backends import torch as torch_backend

BACKENDS = ("torch", "triton", "cuda")

#: Operators are defined here as ``torch.ops.replayssm.<name>``; each file of this folder adds its own.
LIBRARY = torch.library.Library("replayssm", "DEF")


def unavailable_reason(backend: str) -> str | None:
    """None if ``backend`` runs on this machine, otherwise why not."""
    if backend == "torch":
        return None
    if backend in ("triton", "cuda"):
        return f"this release of replayssm has no {backend} kernels"
    raise ValueError(f"backend {backend!r} is unknown: use 'auto', " + ", ".join(map(repr, BACKENDS)))


def resolve_backend(backend: str) -> str:
    """Turn ``"auto"`` into the backend that is used, or raise a ValueError if ``backend`` can't run here."""
    if backend in ("auto", "torch"):
        return "torch"
    reason = unavailable_reason(backend)
    if reason is not None:
        raise ValueError(f"backend {backend!r} is not available: {reason}; use 'auto' or 'torch'")
    return backend


def backend_module(backend: str) -> ModuleType:
    """The functions of a resolved backend; they bear the operators' names."""
    return {"torch": torch_backend}[backend]
