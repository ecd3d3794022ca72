"""What `enable` leaves on a model and on its mixers, and what it was asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from replayssm import ops
from replayssm.models.adapters import Adapter
from replayssm.models.fused import FusedModules
from replayssm.ops.checks import check_count
from replayssm.options import MAX_RING_LEN

if TYPE_CHECKING:
    from replayssm.models.cache import ReplayCache

ATTRIBUTE = "_replayssm"


@dataclass(frozen=True)
class Settings:
    """How an enabled model keeps its recurrent states; see :func:`replayssm.enable`."""

    ring_len: int
    state_dtype: torch.dtype
    ring_dtype: torch.dtype | str
    backend: str

    def __post_init__(self) -> None:
        check_count("ring_len", self.ring_len, 1)
        if self.ring_len > MAX_RING_LEN:
            raise ValueError(f"ring_len is {self.ring_len}: it must be from 1 to {MAX_RING_LEN}")
        if self.state_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"state_dtype is {self.state_dtype!r}: torch.float32, torch.bfloat16 or torch.float16 is wanted"
            )
        if not isinstance(self.ring_dtype, torch.dtype) and self.ring_dtype != "auto":
            raise ValueError(f"ring_dtype is {self.ring_dtype!r}: 'auto' or a torch.dtype is wanted")
        ops.resolve_backend(self.backend)

    def changed(self, **given: Any) -> Settings:
        """These settings with the values that aren't None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


class MixerCache:
    """A cache that runs the recurrent layers of an enabled model, which hand it what they are given."""

    def run(self, mixer: Any, hidden_states: Tensor) -> Tensor | None:
        """One layer's output ``[B, T, D]`` for its input; None to leave it to transformers' own code."""
        raise NotImplementedError


@dataclass
class MixerBinding:
    """On a mixer: the forward that the instance had of its own, if any, and one that a CPU can run, if needed.

    Attributes:
        served: whether an engine relies on it, so that it has to stay.
    """

    previous: Callable[..., Any] | None
    on_cpu: Callable[..., Any] | None
    served: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"served": False}  # no engine serves a copy


class ModelBinding:
    """On a model: its settings, its recurrent layers in order, and the last cache that `generate` used.

    Attributes:
        fused: forwards for its other modules, made by the first forward on a GPU.
    """

    def __init__(self, settings: Settings, adapters: list[Adapter], previous: Callable[..., Any] | None) -> None:
        self.settings = settings
        self.adapters = adapters
        self.previous = previous
        self.last_cache: ReplayCache | None = None
        self.fused: FusedModules | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The forwards are closures over the modules, and made again.
        return vars(self) | {"fused": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelBinding:
        # A copied model has copied mixers, which the old model's cache doesn't know.
        return ModelBinding(self.settings, *copy.deepcopy((self.adapters, self.previous), memo))


def binding_of(module: Any) -> Any:
    """The MixerBinding or ModelBinding that `enable` left on a module, or None."""
    return getattr(module, "__dict__", {}).get(ATTRIBUTE)
