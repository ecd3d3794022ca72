"""Folders and files of the user's."""

import os
import tempfile
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

    A device or a pipe is written to, and stays what it is; where a link leads, the file is written.

    Raises:
        OSError: it can't be written.
    """
    if is_special(path):
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Whether it is there and neither a file nor a folder: for root, a file in its place would end /dev/null."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_writable(path: Path) -> None:
    """Make the folder of a file to come, and try to write there.

    Raises:
        OSError: the file could not be written.
    """
    if is_special(path):
        return
    folder = path.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
