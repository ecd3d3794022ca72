"""The CUDA kernels on a CPU, built by the system's C++ compiler: they run where there is no GPU, slowly.

:func:`install` makes the operators' "cuda" backend take tensors of the CPU and run its kernels here. All of its Python
code runs as on a GPU, but for the compiler and the driver.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from replayssm.backends import cuda
from replayssm.backends import torch as torch_backend
from replayssm.backends.cuda import build, decode, driver, verify
from replayssm.backends.cuda.blocks import Block, Shape
from replayssm.backends.cuda.windows import Window
from replayssm.ops import dispatch, known

ENTRY = """
extern "C" void emulate(int tiles, int rows, const PARAMS* given, int shared_bytes) {
    static const PARAMS* params;
    static MEMORY<CASE>* shared;
    emulated::demand(sizeof(MEMORY<CASE>) == shared_bytes, "the shared memory has another size than was asked for");
    params = given;
    shared = static_cast<MEMORY<CASE>*>(std::aligned_alloc(128, sizeof(MEMORY<CASE>)));
    emulated::body = [] { RUN<CASE>(*params, *shared); };
    for (blockIdx.y = 0; blockIdx.y < rows; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < tiles; ++blockIdx.x) {
            std::memset(static_cast<void*>(shared), 0xff, sizeof(MEMORY<CASE>));  // NaN
            emulated::run_block(CASE::THREADS, blockIdx.x % 2);
        }
    }
    std::free(shared);
}
"""
DECODE = {"PARAMS": "Params", "MEMORY": "Memory", "CASE": "Case", "RUN": "decode"}
VERIFY = {"PARAMS": "WindowParams", "MEMORY": "WindowMemory", "CASE": "WindowCase", "RUN": "verify"}


def missing() -> str | None:
    """None if the emulation can be built here, else why not."""
    return None if shutil.which("g++") else "no C++ compiler"


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="replayssm-emulated-"))


@cache
def kernel(
    macros: tuple[tuple[str, str], ...], block: Block, shape: Shape, activations: torch.dtype, device: torch.device
) -> driver.Launch:
    """In place of :func:`replayssm.backends.cuda.decode.kernel`."""
    emulate = _built(macros, build.SOURCES, tuple(DECODE.items()))
    shared = block.shared_bytes(shape, activations)
    return lambda tiles, rows, stream, arguments: emulate(tiles, rows, arguments.buffer, shared)


@cache
def verify_kernel(
    macros: tuple[tuple[str, str], ...], cut: Window, shape: Shape, activations: torch.dtype, device: torch.device
) -> driver.Launch:
    """In place of :func:`replayssm.backends.cuda.verify.kernel`."""
    emulate = _built(macros, build.VERIFY, tuple(VERIFY.items()))
    shared = cut.shared_bytes(shape, activations)
    return lambda tiles, rows, stream, arguments: emulate(tiles, rows, arguments.buffer, shared)


def _built(
    macros: tuple[tuple[str, str], ...], files: tuple[str, ...], names: tuple[tuple[str, str], ...]
) -> Callable[..., None]:
    """The function that runs all blocks of a kernel."""
    header = Path(__file__).parent / "emulated_cuda.h"
    source = _folder() / f"{build.fingerprint(dict(macros), 'cpu', files)}.cpp"
    source.write_text(f'#include "{header}"\n{build.source(files)}\n{ENTRY}')
    library = source.with_suffix(".so")
    defines = [f"-D{name}={value}" for name, value in (*macros, *names)]
    options = ["-std=c++17", "-O1", "-mfma", "-w", "-shared", "-fPIC", *defines]
    subprocess.run(["g++", *options, source, "-o", library], check=True)
    return ctypes.CDLL(str(library)).emulate


def install(monkeypatch: pytest.MonkeyPatch, *, multiprocessors: int = 1) -> None:
    """Let "cuda" run here until the test ends; few multiprocessors: large blocks, many: small ones."""
    decode._plans.clear()
    verify._plans.clear()
    verify._arrivals.clear()
    known.forget()
    reason_of = dispatch.unavailable_reason

    def unavailable_reason(backend: str, device: object = None) -> str | None:
        return None if backend == "cuda" else reason_of(backend, device)

    monkeypatch.setattr(dispatch, "unavailable_reason", unavailable_reason)
    # What has no CUDA kernel runs on the torch backend here.
    monkeypatch.setattr(cuda, "__getattr__", lambda name: getattr(torch_backend, name))
    monkeypatch.setattr(decode, "_triton", lambda: torch_backend)
    about = decode.Properties(multiprocessors, 227 * 1024, "cpu")
    monkeypatch.setattr(decode, "properties", lambda device: about)
    monkeypatch.setattr(decode, "kernel", kernel)
    monkeypatch.setattr(decode, "_current_stream", lambda device: 0)
    monkeypatch.setattr(decode, "_is_current", lambda device: True)
    monkeypatch.setattr(verify, "kernel", verify_kernel)
