"""Find, check and load model folders in transformers' format: safetensors only, no remote code, no network."""

from replayssm.loading.model import LoadedModel, load_config, load_model, quiet_libraries, use_fitting_threads

__all__ = ["LoadedModel", "load_config", "load_model", "quiet_libraries", "use_fitting_threads"]
