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
extern "C" void emulate(int blocks, int threads, unsigned long long shared_bytes, const Params* given) {
    static const Params* params;
    static unsigned char* shared;
    params = given;
    shared = static_cast<unsigned char*>(std::aligned_alloc(128, (shared_bytes + 127) / 128 * 128));
    emulated::body = [] { decode<Case>(*params, shared); };
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        std::memset(shared, 0xff, shared_bytes);  // NaN
        emulated::run_block(threads, blockIdx.x % 2);
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
def kernel(shape: Shape, block: Block, names: tuple[str, ...], device: torch.device) -> driver.Launch:
    """In place of :func:`replayssm.backends.cuda.decode.kernel`."""
    macros = decode.macros(shape, block, names)
    name = build.fingerprint(macros, "cpu")
    header = Path(__file__).parent / "emulated_cuda.h"
    source = _folder() / f"{name}.cpp"
    source.write_text(f'#include "{header}"\n{build.source()}\n{ENTRY}')
    library = source.with_suffix(".so")
    options = ["-std=c++17", "-O1", "-mfma", "-w", "-shared", "-fPIC", *(f"-D{k}={v}" for k, v in macros.items())]
    subprocess.run(["g++", *options, source, "-o", library], check=True)
    emulate = ctypes.CDLL(str(library)).emulate
    shared = block.shared_bytes(shape)

    def launch(blocks: int, stream: int, arguments: driver.Arguments) -> None:
        emulate(blocks, block.threads, ctypes.c_uint64(shared), arguments.buffer)

    return launch


def install(monkeypatch: pytest.MonkeyPatch, *, multiprocessors: int = 1) -> None:
    """Let "cuda" run here until the test ends; few multiprocessors: large blocks, many: small ones."""
    decode._plan.cache_clear()
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
