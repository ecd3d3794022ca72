"""Prefill on a CPU where flash-linear-attention or another GPU package is installed.

transformers chooses a package's kernels when a modelling module is imported, if the package can be imported; on a CPU
they then fail ("0 active drivers"). Each such function wraps transformers' own PyTorch version of it, which a copy of
the mixer's forward can be given instead: the module and its other models keep what they have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any


@contextmanager
def on_a_cpu(mixers: Iterable[Any]) -> Iterator[None]:
    """Let mixers without replay run on a CPU, where GPU packages took the place of transformers' functions."""
    changed = []
    for mixer in mixers:
        forward = without_gpu_kernels(mixer)
        if forward is not None and "forward" not in vars(mixer):
            mixer.forward = partial(forward, mixer)
            changed.append(mixer)
    try:
        yield
    finally:
        for mixer in changed:
            del mixer.forward


def without_gpu_kernels(mixer: Any) -> Callable[..., Any] | None:
    """The forward of `mixer`'s class with transformers' PyTorch functions; None if it uses those anyway."""
    forward: Any = inspect.unwrap(type(mixer).forward)
    if not isinstance(forward, FunctionType):
        return None
    used = {name: forward.__globals__.get(name) for name in forward.__code__.co_names}
    replaced = {name: _torch_version(function) for name, function in used.items() if _is_replaced(function)}
    if not replaced:
        return None
    scope = {**forward.__globals__, **replaced}
    on_cpu = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
    on_cpu.__kwdefaults__ = forward.__kwdefaults__
    return on_cpu


def _is_replaced(function: Any) -> bool:
    """Whether transformers put another package's kernel in the place of its own function."""
    while hasattr(function, "__wrapped__"):
        if inspect.isfunction(function) and inspect.getclosurevars(function).nonlocals.get("is_new_implementation"):
            return True
        function = function.__wrapped__
    return False


def _torch_version(function: Any) -> Callable[..., Any]:
    """The function that `function` wraps; like the wrapper, it drops arguments that it doesn't know."""
    own: Any = inspect.unwrap(function)
    known = frozenset(inspect.signature(own).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call
