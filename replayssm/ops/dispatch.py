"""Which backend runs an operator, and the library that the operators are registered in."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from replayssm.backends import cpu as cpu_backend
from replayssm.backends import torch as torch_backend

BACKENDS = ("cpu", "torch", "triton", "cuda")
OLDEST_CAPABILITY = (8, 0)
_FASTEST_FIRST = {"cuda": ("cuda", "triton"), "cpu": ("cpu",)}  # by device

_LIBRARY = torch.library.Library("replayssm", "DEF")
_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
#: Of arguments that no one watches.
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), bool, int, float, str))


def register(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define ``torch.ops.replayssm.<name>``.

    Args:
        schema: torch's schema, with the mutated arguments marked.
        implementation: what runs, on tensors of any device.
        fake: returns an empty tensor of the right shape.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    # Without no_grad, a parameter's graph would hang on the pool's tensors and grow at each step.
    _LIBRARY.impl(name, torch.no_grad()(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"replayssm::{name}", fake, lib=_LIBRARY)
    _IMPLEMENTATIONS[name] = implementation


def call(name: str, *args: Any) -> Any:
    """Run an operator."""
    return function_of(name, args)(*args)


def function_of(name: str, args: Sequence[Any]) -> Callable[..., Any]:
    """What runs an operator on these arguments, or on others that are watched as much.

    That is torch's dispatcher where something wants to see the operator. Otherwise the implementation itself, which
    saves the time of about ten small tensor operations (27 µs measured on a CPU).
    """
    return getattr(torch.ops.replayssm, name) if is_watched(args) else _IMPLEMENTATIONS[name]


def is_watched(args: Sequence[Any]) -> bool:
    """Whether something wants to see an operator that gets these arguments.

    That may be a compiler, a mode, a transform of functions, a tracer, a tensor of another class, or autograd, if it
    has a graph to build.
    """
    return (
        torch.compiler.is_compiling()
        or functions_are_watched()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or not _PLAIN.issuperset(map(type, args))
        or (torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args))
    )


def functions_are_watched() -> bool:
    """Whether a mode sees what is called; that of `torch.set_default_device` has nothing to see in an operator."""
    if not torch._C._is_torch_function_mode_enabled():
        return False
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def unavailable_reason(backend: str, device: str | torch.device | None = None) -> str | None:
    """None if ``backend`` runs on this machine, otherwise why not.

    Args:
        backend: one of :data:`BACKENDS`.
        device: where the tensors are; default where the backend may run: a GPU if there is one, or a CPU for cpu.

    Raises:
        ValueError: the backend is unknown.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is unknown: use 'auto', " + ", ".join(map(repr, BACKENDS)))
    if backend == "torch":
        return None
    if backend == "cpu":
        on_cpu = device is None or torch.device(device).type == "cpu"
        return _cpu_kernels() if on_cpu else "its kernels are for tensors on a CPU"
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if backend == "cuda":
        on_gpu = torch.device(device).type == "cuda"
        # What it has no kernel for runs on triton.
        return _cuda_kernels() or (_triton_on_gpu() if on_gpu else "its kernels are for tensors on a GPU")
    if torch.device(device).type == "cuda":
        return _triton_on_gpu()
    if find_spec("triton") is None:
        return "triton is not installed"
    # Triton's own switch for its interpreter, which tests use.
    return None if os.environ.get("TRITON_INTERPRET") == "1" else "triton needs a GPU"


def _constant_to_compilers(look: Callable[[], str | None]) -> Callable[[], str | None]:
    """Let torch.compile take what `look` returns; it can't trace a look for packages and compilers.

    This is all that `torch.compiler.assume_constant_result` does, but for importing the compiler: one second, for
    everybody who imports the operators.
    """
    look._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return look


@_constant_to_compilers
def _cpu_kernels() -> str | None:
    return cpu_backend.unavailable_reason()


@_constant_to_compilers
def _cuda_kernels() -> str | None:
    reason: str | None = backend_module("cuda").unavailable_reason()
    return reason


@_constant_to_compilers
def _triton_on_gpu() -> str | None:
    return _look_for_triton()


@cache
def _look_for_triton() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is None and torch.cuda.get_device_capability() < OLDEST_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return f"the GPU has compute capability {major}.{minor}: triton kernels are made for 8.0 and newer"
    return None


def resolve_backend(backend: str, device: str | torch.device | None = None) -> str:
    """The backend that runs, on tensors of ``device`` (default: a GPU if there is one).

    ``"auto"`` is the first that runs: cuda, then triton on a GPU, cpu on a CPU, and torch. It follows from the machine
    and the device alone, never from a call's shapes: a row must have the same bits in any batch.

    Raises:
        ValueError: the backend is unknown or can't run here.
    """
    if backend == "torch":
        return backend
    if backend == "auto":
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        for best in _FASTEST_FIRST.get(torch.device(device).type, ()):
            if unavailable_reason(best, device) is None:
                return best
        return "torch"
    reason = unavailable_reason(backend, device)
    if reason is not None:
        here = [name for name in BACKENDS if unavailable_reason(name, device) is None]
        wanted = ", ".join(map(repr, ("auto", *here[:-1])))
        raise ValueError(f"backend {backend!r} is not available: {reason}; use {wanted} or {here[-1]!r}")
    return backend


@cache
def backend_module(backend: str) -> ModuleType:
    """The functions of a resolved backend; they bear the operators' names."""
    own = {"torch": torch_backend, "cpu": cpu_backend}.get(backend)
    return import_module(f"replayssm.backends.{backend}") if own is None else own
