"""The model types that replay serves, so that a config.json can be judged before anything is loaded."""

from typing import Any

from replayssm.errors import InputError

FAMILIES: dict[str, tuple[str, ...]] = {
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3.5": ("qwen3_5", "qwen3_5_text"),
    "Qwen3.5-MoE": ("qwen3_5_moe", "qwen3_5_moe_text"),
    "OLMo-hybrid": ("olmo_hybrid",),
    "Kimi-Linear": ("kimi_linear",),
    "Bailing-hybrid (Ling)": ("bailing_hybrid",),
    "Mamba2": ("mamba2",),
    "Nemotron-H": ("nemotron_h",),
    "Bamba": ("bamba",),
    "Granite-MoE-hybrid": ("granitemoehybrid",),
    "Falcon-H1": ("falcon_h1",),
    "Zamba2": ("zamba2",),
}
MODEL_TYPES = frozenset(name for names in FAMILIES.values() for name in names)


def check_architecture(config: dict[str, Any]) -> None:
    """Refuse a model type that replay doesn't serve.

    Args:
        config: The content of a model's config.json.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise InputError(
            f"model type {model_type!r} is not supported: a model with Gated DeltaNet, Kimi Delta Attention or Mamba-2 "
            f"layers is wanted, one of {', '.join(sorted(MODEL_TYPES))}"
        )
