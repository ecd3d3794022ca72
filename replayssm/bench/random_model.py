"""A model with random weights, from a transformers config alone: its steps take as long as with trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replayssm.errors import InputError, one_line
from replayssm.loading import LoadedModel, quiet_libraries
from replayssm.loading.architectures import check_architecture
from replayssm.loading.folder import read_json_object

SEED = 0


def read_config(path: Path) -> dict[str, Any]:
    """A config's values, of an architecture that replay serves.

    Raises:
        InputError: it isn't JSON, or of another architecture.
    """
    values = read_json_object(path)
    check_architecture(values)
    return values


def make_config(path: Path) -> Any:
    """transformers' configuration of a JSON file as transformers writes it.

    Raises:
        InputError: it isn't one of an architecture that replay serves.
    """
    model_type = read_config(path)["model_type"]
    with quiet_libraries():
        from transformers import CONFIG_MAPPING

        try:
            # Of the file, not of its values: in what transformers writes, an infinity is no number of JSON's.
            return CONFIG_MAPPING[model_type].from_json_file(path)
        except Exception as error:
            raise _no_model(path, error) from error


def random_model(path: Path, dtype: str, device: str) -> LoadedModel:
    """A model of a config's shape, made on the device.

    Args:
        path: of the config, a JSON file as transformers writes it.
        dtype: of the weights, by torch's name.
        device: "cpu" or "cuda".

    Raises:
        InputError: transformers can't make a model of it.
    """
    config = make_config(path)
    with quiet_libraries():
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(SEED)
        try:
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        except Exception as error:
            raise _no_model(path, error) from error
        vocab_size: int = model.get_output_embeddings().weight.shape[0]
        return LoadedModel(path.stem, model.eval(), _words(vocab_size), (), device, dtype)


def _no_model(path: Path, error: Exception) -> InputError:
    """Whatever a config makes transformers raise, the config is the cause."""
    return InputError(f"{path} gives no model: {type(error).__name__}: {one_line(error)}")


def _words(vocab_size: int) -> Any:
    """A tokenizer with a word for each token, so that making text costs what it costs."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"word{token}": token for token in range(vocab_size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="word0")))  # noqa: S106
