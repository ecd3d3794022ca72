"""Which models replay can run."""

from __future__ import annotations

from typing import Any

from torch import nn

from replayssm.models.adapters import ADAPTERS, Adapter

SUPPORTED_MODELS = (
    "Qwen3-Next, Qwen3.5, Qwen3.5-MoE, OLMo-hybrid, Kimi-Linear, Bailing-hybrid (Ling), Mamba2, Nemotron-H, Bamba, "
    "Granite-MoE-hybrid, Falcon-H1 and Zamba2"
)


def find_adapters(model: Any) -> list[Adapter]:
    """An adapter for each recurrent layer of `model`, in the order in which a forward runs them.

    Raises:
        ValueError: the model isn't one of the supported architectures.
    """
    config: Any = getattr(model, "config", None)
    if not isinstance(model, nn.Module) or not hasattr(config, "get_text_config"):
        raise ValueError(f"a {type(model).__name__} was given: a transformers model is wanted")
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or []
    recurrent = [index for index, kind in enumerate(kinds) if kind in ("linear_attention", "hybrid")]
    known: list[Any] = [module for module in model.modules() if _adapter_class(module) is not None]
    mixers = sorted((m for m in known if m.layer_idx in recurrent), key=lambda m: m.layer_idx)
    if not mixers or [mixer.layer_idx for mixer in mixers] != recurrent:
        has = "no such layer" if not recurrent and not _other_mixers(model) else _other_mixers(model) or "other layers"
        raise ValueError(
            f"{type(model).__name__} is not supported, it has {has}: replay wants Gated DeltaNet, Kimi Delta Attention "
            f"or Mamba-2 layers, as in {SUPPORTED_MODELS}"
        )
    devices = {mixer.conv1d.weight.device for mixer in mixers}
    if len(devices) > 1:
        raise ValueError(f"the recurrent layers are on {', '.join(sorted(map(str, devices)))}: one device is wanted")
    return [_adapter_class(mixer)(mixer) for mixer in mixers]


def _adapter_class(module: nn.Module) -> Any:
    """The adapter for a module, found by the class in transformers that it is, or extends."""
    for cls in type(module).__mro__:
        if cls.__name__ in ADAPTERS and cls.__module__.startswith("transformers.models."):
            return ADAPTERS[cls.__name__]
    return None


def _other_mixers(model: nn.Module) -> str:
    """Names of recurrent layers of other kinds, for the error message."""
    names = {type(m).__name__ for m in model.modules() if hasattr(m, "conv1d") and _adapter_class(m) is None}
    return ", ".join(sorted(names)) and f"recurrent layers of the kind {', '.join(sorted(names))}"
