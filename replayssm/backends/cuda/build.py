"""The compiled kernels: built at first use by NVRTC, through cuda-core, and kept in the user's cache folder.

A file's name is a hash of what it is made from and for: source, options and architecture. It holds a checksum and the
machine code, is written beside its place and moved there in one step. Where the cache can't be written, a process
compiles what it needs for itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from replayssm.backends.cpu.build import BuildError
from replayssm.folders import cache_folder

# The files of each kernel, in the order in which they are put together.
COMMON = ("device.cuh", "rules.cuh", "layer.cuh")
DECODE = (*COMMON, "config.cuh", "gates.cuh", "items.cuh", "products.cuh", "flush.cuh", "decode.cu")
FOLD = (*COMMON, "config.cuh", "gates.cuh", "items.cuh", "flush.cuh", "state.cu")
VERIFY = (*COMMON, "window.cuh", "window_gates.cuh", "window_products.cuh", "fold.cuh", "verify.cu")
STANDARD = "c++17"

_refused: dict[str, str] = {}  # what could not be compiled in this process, and why: it isn't tried again

__all__ = ["BuildError", "compile_source", "machine_code", "missing_package", "source"]


@cache
def source(files: tuple[str, ...] = DECODE) -> str:
    """A kernel's source, as one text: what the compiler gets."""
    folder = Path(__file__).parent
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in files)


def missing_package() -> str | None:
    """None if the compiler's package is installed, else what to say."""
    try:
        found = find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        found = False
    return None if found else "cuda-core is not installed, which compiles its kernels"


def machine_code(macros: dict[str, str], architecture: str, files: tuple[str, ...] = DECODE) -> bytes:
    """A kernel as a cubin, from the cache or from the compiler.

    Args:
        macros: what the source leaves open.
        architecture: for instance ``"sm_90a"``.
        files: what it is made of.

    Raises:
        BuildError: it is not in the cache and can't be compiled.
    """
    name = fingerprint(macros, architecture, files)
    path = cache_folder() / f"cuda-{name}.cubin"
    kept = _read(path)
    if kept is not None:
        return kept
    if name in _refused:
        raise BuildError(_refused[name])
    try:
        code = compile_source(macros, architecture, files)
    except BuildError as error:
        _refused[name] = str(error)
        raise
    with contextlib.suppress(OSError):  # a cache that can't be written only costs time
        _write(path, code)
    return code


def fingerprint(macros: dict[str, str], architecture: str, files: tuple[str, ...] = DECODE) -> str:
    """A hash of what the machine code depends on."""
    parts = [source(files), STANDARD, architecture, *(f"{name}={value}" for name, value in sorted(macros.items()))]
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:20]


def compile_source(macros: dict[str, str], architecture: str, files: tuple[str, ...] = DECODE) -> bytes:
    """Compile with NVRTC.

    Raises:
        BuildError: cuda-core or NVRTC is missing, or the compiler refuses the source.
    """
    try:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # before its release 1.0
            from cuda.core.experimental import Program, ProgramOptions
        options = ProgramOptions(std=STANDARD, arch=architecture, define_macro=list(macros.items()))
        code = Program(source(files), "c++", options).compile("cubin").code
    except Exception as error:  # cuda-core's own kinds of errors differ between its releases
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise BuildError(f"NVRTC can't compile the kernel for {architecture}: {said[:400]}") from error
    return bytes(code)


def _read(path: Path) -> bytes | None:
    try:
        held = path.read_bytes()
    except OSError:
        return None
    checksum, code = held[:32], held[32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _write(path: Path, code: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-", suffix=".cubin")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
