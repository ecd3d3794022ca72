"""The compiled kernels: built at first use by the system's C compiler, then kept in the user's cache folder.

The file's name is a hash of all that it is made from and for: sources, options, compiler and processor. A new one is
written beside its place and moved there in one step, so that processes may build at the same time. Where the cache
can't be written, or nothing in it may be executed, each process builds its own in a temporary folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from replayssm.folders import cache_folder

COMPILERS = ("cc", "gcc", "clang")
SOURCES = ("decode.c", "conv.c")
HEADERS = ("numbers.h",)
# No -ffast-math: it would reorder sums, and drop the handling of NaN.
OPTIONS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC", "-pthread")
NATIVE = ("-march=native",)
SECONDS = 120


class BuildError(Exception):
    """The kernels can't be had on this machine; the message says why in one line."""


@cache
def unavailable_reason() -> str | None:
    """None if the kernels can be had, else why not. Builds them if need be."""
    try:
        library()
    except BuildError as error:
        return str(error)
    return None


@cache
def library() -> ctypes.CDLL:
    """The kernels, loaded.

    Raises:
        BuildError: there is no compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError("it needs a C compiler, and none of " + ", ".join(COMPILERS) + " was found")
    path = cache_folder() / f"cpu-{fingerprint(compiler)}.so"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            compile_to(path, compiler)
        return ctypes.CDLL(str(path))
    except OSError:
        return _load_from_temporary_folder(compiler)


def fingerprint(compiler: str) -> str:
    """A hash of what the compiled file depends on."""
    folder = Path(__file__).parent
    parts = [(folder / name).read_bytes() for name in (*SOURCES, *HEADERS)]
    parts += [" ".join(OPTIONS + NATIVE).encode(), compiler.encode(), _version(compiler), _processor().encode()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def compile_to(path: Path, compiler: str) -> None:
    """Compile the sources into ``path``, which appears whole or not at all.

    Raises:
        BuildError: the compiler fails.
        OSError: the folder can't be written.
    """
    folder = Path(__file__).parent
    sources = [str(folder / name) for name in SOURCES]
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    try:
        # Not every compiler knows every processor.
        done = _run(compiler, *OPTIONS, *NATIVE, *sources, "-o", name, "-lm")
        if done.returncode:
            done = _run(compiler, *OPTIONS, *sources, "-o", name, "-lm")
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
            what = next((line for line in said if "error" in line.lower()), said[-1])
            raise BuildError(f"{compiler} failed with exit status {done.returncode}: {what.strip()}")
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _load_from_temporary_folder(compiler: str) -> ctypes.CDLL:
    try:
        with tempfile.TemporaryDirectory(prefix="replayssm-") as folder:  # a loaded library needs its file no more
            path = Path(folder) / "cpu.so"
            compile_to(path, compiler)
            return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"neither {cache_folder()} nor a temporary folder can hold its kernels: {error}") from error


def _version(compiler: str) -> bytes:
    done = _run(compiler, "--version")
    if done.returncode:
        raise BuildError(f"{compiler} --version failed with exit status {done.returncode}")
    return done.stdout


def _run(*command: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} was still running after {SECONDS} seconds") from None
    except OSError as error:
        raise BuildError(f"{command[0]} can't be run: {error.strerror or error}") from error


def _processor() -> str:
    """The processor's name and abilities, because kernels built for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "flags", "Features", "CPU part")
    found = dict.fromkeys(line for line in lines if line.startswith(wanted))
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *found])
