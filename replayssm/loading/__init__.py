"""Find, check and load model folders in transformers' format: safetensors only, no remote code, no network."""

from replayssm.loading.model import (
    LoadedModel,
    context_of,
    load_config,
    load_model,
    load_tokenizer,
    quiet_libraries,
    settled,
    use_fitting_threads,
)

__all__ = [
    "LoadedModel",
    "context_of",
    "load_config",
    "load_model",
    "load_tokenizer",
    "quiet_libraries",
    "settled",
    "use_fitting_threads",
]
