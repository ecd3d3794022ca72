"""Which sources were measured: a digest of the package's files that git can work out for any commit, too."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

SUFFIXES = (".py", ".c", ".h", ".cu", ".cuh")
DIGITS = 12


def package_digest(folder: Path) -> str:
    """Digest of a package's source files as they are on disk.

    A commit alone says too little: what is measured may differ from it, on another machine or before it is committed.
    """
    files = (path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    return digest({path.relative_to(folder).as_posix(): blob_name(path.read_bytes()) for path in files})


def digest(blobs: Mapping[str, str]) -> str:
    """Digest of files, given git's names of their contents by path."""
    lines = (f"{blob} {path}\n" for path, blob in sorted(blobs.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:DIGITS]


def blob_name(content: bytes) -> str:
    """What git calls a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
