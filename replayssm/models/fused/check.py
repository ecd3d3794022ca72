"""Whether a forward of ours may take the place of a module's own: both are run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]
Found = TypeVar("Found")


def own_forward(module: nn.Module) -> Forward | None:
    """The forward of the module's class; None if somebody gave the module another, as accelerate does."""
    return None if "forward" in vars(module) else module.forward


def agree(ours: Callable[[], Sequence[Tensor]], own: Callable[[], Sequence[Tensor]]) -> bool:
    """Whether both give tensors of the same shapes and dtypes, equal within two roundings; failing is not agreeing."""
    try:
        pairs = list(zip(ours(), own(), strict=True))
    except Exception:  # whatever a module doesn't take
        return False
    return all(_close(a, b) for a, b in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bound = max(2 * torch.finfo(a.dtype).eps, 1e-5)
    difference = (a.double() - b.double()).norm()
    return bool(difference <= bound * b.double().norm())  # False if there is a NaN


def kind(module: nn.Module) -> Hashable:
    """Modules of one kind compute the same with different weights, so that one check does for all."""
    parts = tuple((type(part), _numbers(part)) for part in module.modules())
    return parts, tuple((name, weight.shape, weight.dtype) for name, weight in module.named_parameters())


def by_kind(modules: Iterable[nn.Module], check: Callable[[nn.Module], Found]) -> Iterator[tuple[nn.Module, Found]]:
    """Modules with what a check found of their kind, without those of a kind of which it found nothing."""
    found: dict[Hashable, Found] = {}
    for module in modules:
        key = kind(module)
        if key not in found:
            found[key] = check(module)
        if found[key]:
            yield module, found[key]


def _numbers(module: nn.Module) -> Hashable:
    numbers = (item for item in vars(module).items() if isinstance(item[1], (bool, int, float, str)))
    return tuple(sorted(item for item in numbers if item[0] != "layer_idx"))


def draw(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers whose size grows along the last dimension, so that norms of parts of it differ.

    The first line is small enough for an epsilon to show.
    """
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator) * torch.linspace(1, 3, shape[-1])
    x.view(-1, shape[-1])[0] *= 1e-3
    return x.to(device, dtype)
