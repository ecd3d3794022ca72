"""Calls that look like one which has passed the checks: they skip the checks, and all choices that were made for it.

What is looked at is what checks and choices see: of each tensor whether it is there, its type, shape, strides, dtype
and device, and the call's options. A look takes a twentieth of the checks' time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.backends.step import ABSENT
from replayssm.ops.dispatch import backend_module, resolve_backend

Looks = Callable[..., bool]
#: From a backend's module to :attr:`Known.run`.
ShortWay = Callable[[ModuleType], Callable[..., Any] | None]

_MOST = 1024  # kinds of calls that are remembered
_MOST_ALIKE = 8  # of them with the same options and first shape
_NEWEST_TRIED = (2, 14)  # releases of torch from here on have not been tried with _native_look


class Known(NamedTuple):
    """What is known of calls of one look."""

    backend: str
    looks_same: Looks
    run: Callable[..., Any] | None  # the backend's short way: takes the tensors, for callers whom nothing watches


_known: dict[Any, list[Known]] = {}


def recall(operator: str, tensors: Sequence[Tensor], options: tuple[Any, ...], backend: str) -> Known | None:
    """What is known of calls like this one; None if none has passed the checks.

    Args:
        operator: its name.
        tensors: of the call, in an order of the operator's own; one of ABSENT for None.
        options: everything else that the checks look at, or that decides how to run.
        backend: as the caller named it.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        alike = _known.get((operator, backend, tensors[0].shape, options), ())
    except (AttributeError, TypeError):  # not a tensor; an option that is of no use
        return None
    for known in alike:
        if known.looks_same(*tensors):
            return known
    return None


def remember(
    operator: str,
    tensors: Sequence[Tensor],
    options: tuple[Any, ...],
    backend: str,
    short_way: ShortWay = lambda _: None,
) -> Known:
    """Choose how a call that has passed the checks runs, and those that look like it.

    Args:
        operator, tensors, options, backend: as for :func:`recall`.
        short_way: see there.

    Raises:
        ValueError: the backend is unknown or can't run here.
    """
    chosen = resolve_backend(backend, tensors[0].device)
    if torch.compiler.is_compiling() or type(tensors[0]) is not Tensor:
        return Known(chosen, _never, None)
    known = Known(chosen, look_of(tensors), short_way(backend_module(chosen)))
    if len(_known) >= _MOST:
        _known.clear()
    alike = _known.setdefault((operator, backend, tensors[0].shape, options), [])
    alike.insert(0, known)
    del alike[_MOST_ALIKE:]
    return known


def forget() -> None:
    """Forget all calls: for tests that change what can run."""
    _known.clear()


def _never(*tensors: Tensor) -> bool:
    return False


def look_of(tensors: Sequence[Tensor]) -> Looks:
    """Tells of other tensors whether they look like these."""
    return (_native_look if _has_native_look() else _python_look)(tensors)


def _native_look(tensors: Sequence[Tensor]) -> Looks:
    """By what torch's compiler has for its own guards, in a fifth of the time that Python takes.

    It refuses calls with one tensor in two places; they are checked each time.
    """
    from torch._C._dynamo.guards import TensorGuards

    dims: dict[str, Any] = {
        "dynamic_dims_sizes": [list(x.shape) for x in tensors],
        "dynamic_dims_strides": [list(x.stride()) for x in tensors],
    }
    return TensorGuards(*tensors, **dims).check


def _python_look(tensors: Sequence[Tensor]) -> Looks:
    wanted = [(type(x), x.shape, x.stride(), x.dtype, x.device) for x in tensors]

    def looks_same(*given: Tensor) -> bool:
        try:
            return [(type(x), x.shape, x.stride(), x.dtype, x.device) for x in given] == wanted
        except AttributeError:
            return False

    return looks_same


@cache
def _has_native_look() -> bool:
    """Whether this release of torch has it; it is no public part of torch."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= _NEWEST_TRIED:
        return False
    x, none = torch.empty(2, 2), ABSENT[0]
    try:
        same = _native_look((x, none))
        others = ((x, ABSENT[1][None]), (x[:1], none), (x.T, none), (x.half(), none), (x.to("meta"), none))
        return same(torch.empty(2, 2), none) and not any(same(*other) for other in others)
    except (ImportError, AttributeError, TypeError):
        return False
