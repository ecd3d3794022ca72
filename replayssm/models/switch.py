"""Switch replay on and off, on one model's own modules.

`enable` gives each recurrent mixer of the model a `forward` that takes one-token steps to the mixer's adapter and
everything else to the forward it had, and gives the model a `_prepare_cache_for_generation` that makes a ReplayCache
where transformers would make a DynamicCache. Both are attributes of the instances: no class, module or other model
changes, and `disable` deletes them. On a GPU, hooks of the model let its norms, rotary embeddings and MLPs run by fewer
kernels while it is given a ReplayCache.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from replayssm import ops
from replayssm.models.adapters import Adapter
from replayssm.models.binding import ATTRIBUTE, MixerBinding, MixerCache, ModelBinding, Settings, binding_of
from replayssm.models.cache import ReplayCache
from replayssm.models.fallback import without_gpu_kernels
from replayssm.models.fused import FusedModules, fusions_for
from replayssm.models.support import find_adapters
from replayssm.state import StateDtypes

Model = TypeVar("Model", bound=nn.Module)

_PREPARE = "_prepare_cache_for_generation"
_STATEFUL = "_is_stateful"
# What the cache argument of models and mixers is called: the first from transformers 5.24 on, the others before.
CACHE_ARGUMENTS = ("cache", "cache_params", "past_key_values")


def enable(
    model: Model,
    ring_len: int = 16,
    *,
    state_dtype: torch.dtype = torch.float32,
    ring_dtype: torch.dtype | str = "auto",
    backend: str = "auto",
) -> Model:
    """Let a transformers model decode through checkpoint and ring.

    Everything that the model is used for stays as it is: `generate`, beams, sampling, batches. Calling it again
    changes the settings. Caches made before keep theirs.

    Args:
        model: a loaded model of one of the supported architectures, any dtype.
        ring_len: L, a state is written once in L tokens; 1 writes it at every step.
        state_dtype: dtype of the checkpoints: torch.float32, torch.bfloat16 or torch.float16.
        ring_dtype: dtype of the update vectors in the ring: "auto", torch.float32 or the model's dtype.
        backend: "auto", or one of `replayssm.ops.BACKENDS`.

    Returns:
        The same model.

    Raises:
        ValueError: the architecture isn't supported, a setting is out of range, or an engine serves the model.
    """
    settings = Settings(ring_len, state_dtype, ring_dtype, backend)
    adapters = find_adapters(model)
    check_not_served(adapters)
    weight = adapters[0].mixer.conv1d.weight
    StateDtypes.choose(state_dtype, weight.dtype, ring_dtype)
    ops.resolve_backend(backend, weight.device)
    disable(model)
    for adapter in adapters:
        mixer = adapter.mixer
        _release(mixer)  # it may have been enabled as a part of another model
        on_cpu = without_gpu_kernels(mixer)
        setattr(mixer, ATTRIBUTE, MixerBinding(_override(mixer, "forward", _mixer_forward), on_cpu))
    previous = None
    if hasattr(model, _PREPARE):
        previous = _override(model, _PREPARE, _prepare_cache_for_generation)
    setattr(model, ATTRIBUTE, ModelBinding(settings, adapters, previous))
    if fusions_for(weight.device):
        model.register_forward_pre_hook(_begin_forward, with_kwargs=True)
        model.register_forward_hook(_end_forward, always_call=True)
    # "assisted generation is not supported with stateful models": with a ReplayCache it is.
    if getattr(model, _STATEFUL, False):
        setattr(model, _STATEFUL, False)
    return model


def disable(model: Model) -> Model:
    """Make a model what it was before :func:`enable`; a model without replay is left alone.

    Returns:
        The same model.

    Raises:
        ValueError: an engine serves the model.
    """
    binding = binding_of(model)
    if binding is not None:
        check_not_served(binding.adapters)
        for adapter in binding.adapters:
            _release(adapter.mixer)
        if _PREPARE in vars(model):
            _restore(model, _PREPARE, binding.previous)
        vars(model).pop(_STATEFUL, None)
        _remove_hooks(model)
        delattr(model, ATTRIBUTE)
    return model


def last_cache(model: nn.Module) -> ReplayCache | None:
    """The ReplayCache of the model's last `generate`, for its counters; None if there was none since `enable`.

    It is kept until the next `generate` or `disable`, keys and values of the attention layers included.
    """
    binding = binding_of(model)
    return None if binding is None else binding.last_cache


def cache_argument(forward: Callable[..., Any]) -> str:
    """What a model's or a layer's `forward` calls its cache."""
    arguments = inspect.signature(forward).parameters
    return next(name for name in CACHE_ARGUMENTS if name in arguments)


def mark_served(adapters: Iterable[Adapter], served: bool) -> None:
    """An engine begins or ends to serve a model; in between its layers stay as they are."""
    for adapter in adapters:
        binding_of(adapter.mixer).served = served


def check_not_served(adapters: Iterable[Adapter]) -> None:
    """Refuse a model that an engine serves.

    Raises:
        ValueError: one does.
    """
    if _is_served(adapters):
        gc.collect()  # an engine that nobody has any more may wait for that
    if _is_served(adapters):
        raise ValueError("the model is served by an engine: close that one first, or load the model again")


def _is_served(adapters: Iterable[Adapter]) -> bool:
    bindings = [binding_of(adapter.mixer) for adapter in adapters]
    return any(binding is not None and binding.served for binding in bindings)


def _mixer_forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of an enabled mixer: what its cache runs by replay, the rest upstream."""
    cache = args[0] if args else next((kwargs[name] for name in CACHE_ARGUMENTS if name in kwargs), None)
    if isinstance(cache, MixerCache):
        out = cache.run(self, hidden_states)
        if out is not None:
            return out
    if isinstance(cache, ReplayCache):
        tail = cache.tail(self, hidden_states, _mask(hidden_states, args, kwargs))
        if tail:
            head = hidden_states.shape[1] - tail
            args, kwargs = _cut(hidden_states, head, args, kwargs)
            first = _upstream(self, hidden_states[:, :head], *args, **kwargs)
            return torch.cat([first, cache.run_tail(self, hidden_states[:, head:])], dim=1)
    return _upstream(self, hidden_states, *args, **kwargs)


def _mask(hidden_states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The padding mask ``[B, T]`` among a mixer's arguments, if there is one."""
    given = (*args, *kwargs.values())
    return next((x for x in given if isinstance(x, Tensor) and x.shape == hidden_states.shape[:2]), None)


def _cut(
    hidden_states: Tensor, tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A mixer's arguments for the first tokens alone."""

    def cut(x: Any) -> Any:
        return x[:, :tokens] if isinstance(x, Tensor) and x.shape == hidden_states.shape[:2] else x

    return tuple(map(cut, args)), {name: cut(x) for name, x in kwargs.items()}


def _upstream(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The forward that the mixer had before `enable`."""
    binding: MixerBinding = vars(self)[ATTRIBUTE]
    if binding.previous is not None:
        return binding.previous(hidden_states, *args, **kwargs)
    if binding.on_cpu is not None and hidden_states.device.type == "cpu":
        return binding.on_cpu(self, hidden_states, *args, **kwargs)
    return type(self).forward(self, hidden_states, *args, **kwargs)


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """`generate` calls this to make its cache; a ReplayCache takes the place of a new DynamicCache."""
    binding: ModelBinding = vars(self)[ATTRIBUTE]
    binding.last_cache = None  # frees the last one before the next one grows
    wanted = generation_config.cache_implementation
    if wanted not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation is {wanted!r}: a model with replay decodes from its own cache, leave it out or None"
        )
    given = [model_kwargs.get(name) for name in CACHE_ARGUMENTS]
    prepare = binding.previous or MethodType(getattr(type(self), _PREPARE), self)
    result = prepare(generation_config, model_kwargs, *args, **kwargs)
    for name, before in zip(CACHE_ARGUMENTS, given, strict=True):
        cache = model_kwargs.get(name)
        if type(cache) is DynamicCache and cache is not before:
            model_kwargs[name] = cache = ReplayCache(self)
            if generation_config.is_assistant:  # its drafts will be taken back
                cache.activate_past_recording()
        if isinstance(cache, ReplayCache):
            binding.last_cache = cache
    return result


def _begin_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward that decodes or prefills through replay, without gradients, launches fewer kernels.

    What is compiled is left to the compiler, and projections and sums of layers to transformers' code: weights stay
    where they are, and whoever asks for hidden states gets tensors.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return
    binding: ModelBinding = vars(model)[ATTRIBUTE]
    if any(isinstance(kwargs.get(name), ReplayCache) for name in CACHE_ARGUMENTS):
        if binding.fused is None:
            device = binding.adapters[0].mixer.conv1d.weight.device
            binding.fused = FusedModules(model, {"norms", "rotary", "swiglu"}.intersection(fusions_for(device)))
        binding.fused.__enter__()


def _end_forward(model: Any, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    fused = vars(model)[ATTRIBUTE].fused
    if fused is not None:
        fused.__exit__()


def _remove_hooks(model: nn.Module) -> None:
    """By what they are: a copy of an enabled model has hooks of its own numbers, and nobody who keeps them."""
    _end_forward(model)  # of a forward that was interrupted
    for hooks, hook in ((model._forward_pre_hooks, _begin_forward), (model._forward_hooks, _end_forward)):
        for number in [number for number, other in hooks.items() if other is hook]:
            del hooks[number]
            model._forward_pre_hooks_with_kwargs.pop(number, None)
            model._forward_hooks_always_called.pop(number, None)


def _release(mixer: nn.Module) -> None:
    binding = binding_of(mixer)
    if binding is not None:
        _restore(mixer, "forward", binding.previous)
        delattr(mixer, ATTRIBUTE)


def _override(module: nn.Module, name: str, function: Any) -> Any:
    """Give `module` a method of its own; returns the one that it had of its own, if any."""
    previous = vars(module).get(name)
    setattr(module, name, partial(function, module))  # unlike a bound method of a name that its class lacks, picklable
    return previous


def _restore(module: nn.Module, name: str, previous: Any) -> None:
    if previous is None:
        delattr(module, name)
    else:
        setattr(module, name, previous)
