"""Where measured settings lie: files of the package, and the user's own over them."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

from replayssm.folders import cache_folder, write_whole
from replayssm.tuned.settings import Shape, Tuned, TunedFileError, TunedLayer, parse, unparse


def shipped_file(gpu: str) -> Path:
    """Of the package, for a GPU with this name; it need not be there."""
    return Path(__file__).parent / f"{_slug(gpu)}.json"


def own_file(gpu: str) -> Path:
    """The user's own."""
    return cache_folder() / "tuned" / f"{_slug(gpu)}.json"


def _slug(gpu: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unnamed"


def read(path: Path, gpu: str) -> Tuned | None:
    """The settings in a file; None if it isn't there.

    Raises:
        TunedFileError: it can't be read, is no such file, or is another GPU's.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise TunedFileError(f"it can't be read ({type(error).__name__})") from error
    tuned = parse(text)
    if tuned.gpu != gpu:
        raise TunedFileError(f"it is for {tuned.gpu!r}, this is {gpu!r}")
    return tuned


@cache
def sources(gpu: str) -> tuple[tuple[Path, Tuned], ...]:
    """The files that hold for a GPU, the user's own last. A spoilt one is left out, with a warning."""
    found = []
    for path in (shipped_file(gpu), own_file(gpu)):
        try:
            tuned = read(path, gpu)
        except TunedFileError as error:
            warnings.warn(
                f"{path} is left out, it holds no tuned settings: {error}. `replayssm tune` makes it anew.",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        if tuned is not None:
            found.append((path, tuned))
    return tuple(found)


@cache
def _layers(gpu: str) -> dict[Shape, tuple[TunedLayer, Path]]:
    return {layer.shape: (layer, path) for path, tuned in sources(gpu) for layer in tuned.layers}


def layer_of(gpu: str, shape: Shape) -> tuple[TunedLayer, Path] | None:
    """What was measured of a layer on a GPU, and the file that says it; None if nothing was."""
    return _layers(gpu).get(shape)


def forget() -> None:
    """Read the files again when they are next wanted."""
    sources.cache_clear()
    _layers.cache_clear()


def save(tuned: Tuned, path: Path) -> None:
    """Write settings to a file, whole or not at all; layers that it has, and these don't, stay in it.

    Raises:
        OSError: it can't be written.
    """
    try:
        before = read(path, tuned.gpu)
    except TunedFileError:
        before = None
    new = {layer.shape for layer in tuned.layers}
    kept = () if before is None else tuple(layer for layer in before.layers if layer.shape not in new)
    write_whole(path, unparse(replace(tuned, layers=(*kept, *tuned.layers))))
    forget()
