"""Calls that look like one which has passed the checks: they skip the checks, and all choices that were made for it.

What is looked at is what checks and choices see: of each tensor whether it is there, its type, shape, strides, dtype
and device, the call's options, and whether something watches: autograd, a mode, a transform. A look takes a twentieth
of the checks' time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.backends.step import ABSENT
from replayssm.ops.dispatch import (
    backend_module,
    function_of,
    functions_are_watched,
    is_watched,
    resolve_backend,
)

Looks = Callable[..., bool]
#: From a backend's module to :attr:`Known.run`.
ShortWay = Callable[[ModuleType], Callable[..., Any] | None]

_MOST = 1024  # kinds of calls that are remembered
_MOST_ALIKE = 64  # of them with the same options: batches of other sizes, mostly
_NEWEST_TRIED = (2, 14)  # releases of torch from here on have not been tried with _native_look


class Known(NamedTuple):
    """What is known of calls of one look."""

    backend: str
    call: Callable[..., Any]  # takes the operator's arguments
    run: Callable[..., Any] | None  # the backend's short way, if it has one and nothing watches: takes the tensors
    looks_same: Looks


#: By options, the last used first.
_known: dict[Any, tuple[Known, ...]] = {}


def recall(options: tuple[Any, ...], tensors: Sequence[Tensor]) -> Known | None:
    """What is known of calls like this one; None if none has passed the checks.

    Args:
        options: the operator's name, and all but tensors that the checks look at, or that decides how to run.
        tensors: of the call, in an order of the operator's own; one of ABSENT for None.
    """
    if torch.compiler.is_compiling():
        return None
    if torch._C._is_torch_function_mode_enabled():
        options = (functions_are_watched(), options)
    try:
        alike = _known.get(options, ())
        for known in alike:
            if known.looks_same(*tensors):
                if known is not alike[0]:
                    _known[options] = (known, *(other for other in alike if other is not known))
                return known
    except TypeError:  # an option that is of no use
        pass
    return None


def remember(
    options: tuple[Any, ...], tensors: Sequence[Tensor], backend: str, short_way: ShortWay = lambda _: None
) -> Known:
    """Choose how a call that has passed the checks runs, and those that look like it.

    Args:
        options, tensors: as for :func:`recall`.
        backend: as the caller named it.
        short_way: see there.

    Raises:
        ValueError: the backend is unknown or can't run here.
    """
    chosen, call = resolve_backend(backend, tensors[0].device), function_of(options[0], tensors)
    if torch.compiler.is_compiling() or type(tensors[0]) is not Tensor:
        return Known(chosen, call, None, _never)
    run = None if is_watched(tensors) else short_way(backend_module(chosen))
    if torch._C._is_torch_function_mode_enabled():
        options = (functions_are_watched(), options)
        run = run and _out_of_modes(run)
    known = Known(chosen, call, run, look_of(tensors))
    if len(_known) >= _MOST:
        _known.clear()
    _known[options] = (known, *_known.get(options, ())[: _MOST_ALIKE - 1])
    return known


def _out_of_modes(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, where a mode that has nothing to see would be asked about each of the tensors."""

    def unseen(*tensors: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return run(*tensors)

    return unseen


def short_way(name: str, check_on_host: Callable[..., None], tensors: Sequence[Tensor], *rules: Any) -> ShortWay:
    """A backend's function for calls of one look, if it has one.

    Args:
        name: of what makes it, from ``tensors`` and ``rules``.
        check_on_host: of what tensors hold, where that can be read without waiting for a device.
        tensors, rules: of one of the calls.
    """

    def of(backend: ModuleType) -> Callable[..., Any] | None:
        bind = getattr(backend, name, None)
        run: Callable[..., Any] | None = bind and bind(tensors, *rules)
        if run is None or tensors[0].device.type != "cpu":
            return run

        def checked(*given: Tensor) -> Any:
            check_on_host(*given)
            return run(*given)

        return checked

    return of


def forget() -> None:
    """Forget all calls: for tests that change what can run."""
    _known.clear()


def _never(*tensors: Tensor) -> bool:
    return False


def look_of(tensors: Sequence[Tensor]) -> Looks:
    """Tells of other tensors whether they look like these, to somebody who watches as now."""
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
    watched = is_watched(tensors)

    def looks_same(*given: Tensor) -> bool:
        try:
            same = [(type(x), x.shape, x.stride(), x.dtype, x.device) for x in given] == wanted
        except AttributeError:
            return False
        return same and is_watched(given) == watched

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
