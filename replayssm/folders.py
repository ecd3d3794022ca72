"""Folders and files of the user's."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where compiled kernels and measured settings are kept; it need not be there, and may be of no use."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # by the XDG rules, a path that isn't is ignored
        return given / "replayssm"
    try:
        return Path("~/.cache").expanduser() / "replayssm"
    except RuntimeError:  # a user without a home, as in some containers: nothing can be kept
        return Path(os.devnull) / "replayssm"


def write_whole(path: Path, text: str) -> None:
    """Write a file, which takes the place of an older one once it is whole; its folder is made.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
