"""The CUDA kernels on a CPU, built by the system's C++ compiler: they run where there is no GPU, slowly.

:func:`install` makes the operators' "cuda" backend take tensors of the CPU and run its kernels here. All of its Python
code runs as on a GPU, but for the compiler and the driver.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from replayssm.backends import cuda
from replayssm.backends import torch as torch_backend
from replayssm.backends.cuda import build, decode, driver
from replayssm.backends.cuda.blocks import Block, Shape
from replayssm.ops import dispatch

ENTRY = """
extern "C" void emulate(int tiles, int rows, const Params* given, int shared_bytes) {
    static const Params* params;
    static Memory<Case>* shared;
    emulated::demand(sizeof(Memory<Case>) == shared_bytes, "the shared memory has another size than was asked for");
    params = given;
    shared = static_cast<Memory<Case>*>(std::aligned_alloc(128, sizeof(Memory<Case>)));
    emulated::body = [] { decode<Case>(*params, *shared); };
    for (blockIdx.y = 0; blockIdx.y < rows; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < tiles; ++blockIdx.x) {
            std::memset(static_cast<void*>(shared), 0xff, sizeof(Memory<Case>));  // NaN
            emulated::run_block(Case::THREADS, blockIdx.x % 2);
        }
    }
    std::free(shared);
}
"""


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
    name = build.fingerprint(dict(macros), "cpu")
    header = Path(__file__).parent / "emulated_cuda.h"
    source = _folder() / f"{name}.cpp"
    source.write_text(f'#include "{header}"\n{build.source()}\n{ENTRY}')
    library = source.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-mfma", "-w", "-shared", "-fPIC", *(f"-D{k}={v}" for k, v in macros)]
    subprocess.run(["g++", *options, source, "-o", library], check=True)
    emulate = ctypes.CDLL(str(library)).emulate
    shared = block.shared_bytes(shape, activations)
    return lambda tiles, rows, stream, arguments: emulate(tiles, rows, arguments.buffer, shared)


def install(monkeypatch: pytest.MonkeyPatch, *, multiprocessors: int = 1) -> None:
    """Let "cuda" run here until the test ends; few multiprocessors: large blocks, many: small ones."""
    decode._plans.clear()
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
