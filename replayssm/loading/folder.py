"""Find a model's folder and check it before anything heavy is imported or loaded."""

import contextlib
import json
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from replayssm import bundled
from replayssm.errors import InputError, one_line
from replayssm.loading.architectures import check_architecture

PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
WHOLE_FOLDER = "a folder with config.json, safetensors and a tokenizer"
CONFIG_FILE = "a config's .json file"
PUBLISHED = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)  # owner and name: what other programs download


def check_model(model: str, wanted: str = WHOLE_FOLDER, *, name: str = "model") -> Path:
    """Find a model by name or folder and check it: files whole, architecture served. Nothing is loaded.

    Args:
        model: a bundled model's name, or a folder.
        wanted: what to ask for where it is neither.
        name: what it is called in messages.

    Returns:
        Its folder.

    Raises:
        InputError: one line that says what was given and what is wanted.
    """
    folder = find_model(model, wanted, name=name)
    check_architecture(read_config(folder))
    check_files(folder)
    return folder


def find_model(model: str, wanted: str = WHOLE_FOLDER, *, name: str = "model") -> Path:
    """The folder of a bundled model's name, or the folder itself; `wanted` and `name` as for :func:`check_model`.

    Raises:
        InputError: `model` is neither.
    """
    names = bundled.names()
    if model in names:
        return bundled.path(model)
    kind = "neither a folder nor a bundled model"
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # too long a name, an unknown user's home
        folder = Path(model).expanduser()
        if model and folder.is_dir():
            return folder
        if model and folder.is_file():
            kind = "a file"
    published = kind != "a file" and len(model) < 200 and PUBLISHED.fullmatch(model)
    hint = f"; a released model of that name comes by `hf download {model} --local-dir FOLDER`" if published else ""
    raise InputError(f"{name} {model!r} is {kind}: give {wanted}, or one of {', '.join(names)}{hint}")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a model folder's config.json."""
    config = _read_json_object(folder / "config.json", what="a transformers model folder")
    if not isinstance(config.get("model_type"), str):
        raise InputError(f"{folder / 'config.json'} has no model_type: a transformers config names its architecture")
    return config


def check_files(folder: Path) -> None:
    """Check that a model folder's weights and tokenizer files are there and whole.

    Only headers are read, so this takes milliseconds for weights of any size. Pickle weights are refused.
    """
    for file in _weight_files(folder):
        _check_safetensors(file)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"{folder} has no tokenizer: it needs {' or '.join(TOKENIZER_FILES)}")


def _weight_files(folder: Path) -> Iterable[Path]:
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json_object(index, what="sharded weights").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index} has no weight_map: it must map tensor names to safetensors files")
        if not all(isinstance(name, str) for name in weight_map.values()):
            raise InputError(f"{index} has a weight_map with values of other kinds than file names")
        shards = sorted(set(weight_map.values()))
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise InputError(f"{folder} lacks {len(missing)} of {len(shards)} weight files, the first is {missing[0]}")
        return [folder / name for name in shards]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickled:
        raise InputError(
            f"{folder} has pickle weights only ({pickled[0]}), which can run code when loaded: "
            "convert them to safetensors"
        )
    raise InputError(f"{folder} has no weights: it needs model.safetensors, or its index and shards")


def _read_json_object(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path.parent} has no {path.name}: {what} needs one")
    return read_json_object(path)


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        InputError: it can't be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not readable JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a JSON {type(value).__name__}, an object is wanted")
    return value


def _check_safetensors(path: Path) -> None:
    """Check a safetensors file's header against its size: 8 bytes of header length, the header (JSON), the tensors."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise InputError(f"{path} is cut off: {size} bytes, a safetensors file has at least 8")
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > size - 8:
                raise InputError(
                    f"{path} is cut off or not safetensors: its header wants {header_bytes} bytes, the file has {size}"
                )
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        wanted = 8 + header_bytes + max(ends, default=0)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is not a safetensors file: its header cannot be read ({one_line(error)})") from error
    if size < wanted:
        raise InputError(f"{path} is cut off: {size} bytes, its header lists {wanted}")
