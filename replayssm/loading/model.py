"""Load a transformers model and its tokenizer from a folder."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from replayssm.errors import InputError, one_line
from replayssm.loading.folder import check_model
from replayssm.options import LoadOptions

T = TypeVar("T")

SMALL_MODEL = 20_000_000  # parameters
SAFE = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class LoadedModel:
    """A transformers model in eval mode with its tokenizer."""

    name: str
    model: Any
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str

    @property
    def max_context(self) -> int | None:
        """The tokens, prompt and answer together, that the model was made for; None: it sets no limit."""
        return context_of(self.model.config)


def load_model(name: str | Path, options: LoadOptions | None = None, tokenizer: Any = None) -> LoadedModel:
    """Load a bundled model or a folder in transformers' format.

    The folder is checked before torch or transformers are imported, so that bad input fails at once.

    Args:
        name: of the model, or its folder.
        options: how it is loaded.
        tokenizer: its own, from :func:`load_tokenizer`, where that was wanted before.

    Raises:
        InputError: one line that says what was given and what is wanted.
    """
    name = str(name)
    folder = check_model(name)

    with quiet_libraries():
        import torch
        import transformers

        device, dtype = settled(options or LoadOptions())
        if tokenizer is None:
            tokenizer = load_tokenizer(folder)
        model, info = _load(
            lambda: transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are told below; transformers points to a report that isn't shown
                output_loading_info=True,
                **SAFE,
            ),
            f"model in {folder}",
        )
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers fills these with random numbers and goes on.
        raise InputError(f"the weights in {folder} lack {len(missing)} tensors that config.json wants: {missing[0]}")
    _check_sizes(folder, info["mismatched_keys"])
    return LoadedModel(
        name=name,
        model=model.eval().to(device),
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        device=device,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def load_config(folder: Path) -> Any:
    """A model folder's transformers configuration.

    Raises:
        InputError: one line that says what is wrong with it.
    """
    import transformers

    return _load(lambda: transformers.AutoConfig.from_pretrained(folder, **SAFE), f"config in {folder}")


def load_tokenizer(folder: Path) -> Any:
    """A model folder's tokenizer.

    Raises:
        InputError: one line that says what is wrong with it.
    """
    import transformers

    load_config(folder)  # first: what is wrong with it would be told as the tokenizer's fault, which reads it too
    return _load(lambda: transformers.AutoTokenizer.from_pretrained(folder, **SAFE), f"tokenizer in {folder}")


def context_of(config: Any) -> int | None:
    """The tokens, prompt and answer together, that a model with this configuration was made for; None: no limit."""
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or None


def settled(options: LoadOptions) -> tuple[str, str]:
    """The device that a model is loaded to, and its dtype, "auto" where that is the checkpoint's own.

    Raises:
        InputError: there is no such device.
    """
    import torch

    device = _choose_device(options.device, cuda=torch.cuda.is_available())
    return device, options.dtype if options.dtype != "auto" or device != "cpu" else "float32"


def use_fitting_threads(loaded: LoadedModel) -> None:
    """Let torch use one thread for a model too small to gain from more; for the command line's own process.

    The bundled models run as fast with one thread as with two on an idle machine. On a busy one, threads that wait for
    each other at every small operation made them 20 times slower.
    """
    import torch

    if loaded.device == "cpu" and loaded.model.num_parameters() < SMALL_MODEL:
        torch.set_num_threads(1)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep stdout for results: libraries' warnings and progress bars are silenced, what they print goes to stderr."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers.logging.set_verbosity(verbosity)
            transformers.logging.enable_progress_bar()


def _choose_device(wanted: str, *, cuda: bool) -> str:
    if wanted == "cuda" and not cuda:
        raise InputError("device is 'cuda', but torch sees no GPU here: `replayssm doctor` says why")
    return wanted if wanted != "auto" else "cuda" if cuda else "cpu"


def _load(load: Callable[[], T], what: str) -> T:
    try:
        return load()
    except Exception as error:
        # Whatever a broken or foreign folder makes transformers raise, what the user gave is the cause.
        raise InputError(f"the {what} cannot be loaded: {type(error).__name__}: {one_line(error)}") from error


def _check_sizes(folder: Path, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse weights of other shapes than the configuration's: tensors by name, with the shapes found and wanted."""
    others = sorted((name, list(found), list(wanted)) for name, found, wanted in mismatched)
    if others:
        name, found, wanted = others[0]
        raise InputError(
            f"the weights in {folder} have {len(others)} tensors of other shapes than config.json wants, "
            f"the first is {name}: {found}, {wanted} is wanted"
        )


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    configured = model.generation_config.eos_token_id
    ids = [] if configured is None else configured if isinstance(configured, list) else [configured]
    if not all(isinstance(token, int) for token in ids):
        raise InputError(f"eos_token_id in the model's configuration is {configured!r}: token numbers are wanted")
    if not ids and tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id]
    return tuple(ids)
