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
from replayssm.backends.cuda import build, decode, driver, launch, state, verify
from replayssm.backends.cuda.blocks import Block, Shape
from replayssm.backends.cuda.windows import Window
from replayssm.ops import dispatch, known


def missing() -> str | None:
    """None if the emulation can be built here, else why not."""
    return None if shutil.which("g++") else "no C++ compiler"


@cache
def _folder() -> Path:
    return Path(mkdtemp(prefix="replayssm-emulated-"))


@cache
def kernel(
    macros: tuple[tuple[str, str], ...],
    cut: Block | Window,
    shape: Shape,
    activations: torch.dtype,
    device: torch.device,
    name: str,
) -> driver.Launch:
    """In place of :func:`replayssm.backends.cuda.launch.kernel`."""
    header = Path(__file__).parent / "emulated_cuda.h"
    files = launch._FILES[name]
    source = _folder() / f"{build.fingerprint(dict(macros), 'cpu', files)}.cpp"
    source.write_text(f'#include "{header}"\n{build.source(files)}')
    library = source.with_suffix(".so")
    defines = [f"-D{macro}={value}" for macro, value in macros]
    options = ["-std=c++17", "-O1", "-mfma", "-w", "-shared", "-fPIC", *defines]
    subprocess.run(["g++", *options, source, "-o", library], check=True)
    run = getattr(ctypes.CDLL(str(library)), name)
    shared = cut.shared_bytes(shape, activations)
    return lambda blocks, stream, arguments: run(blocks, arguments.buffer, shared)


def install(monkeypatch: pytest.MonkeyPatch, *, multiprocessors: int = 1) -> None:
    """Let "cuda" run here until the test ends; few multiprocessors: large blocks, many: small ones."""
    decode._plans.clear()
    verify._plans.clear()
    state._plans.clear()
    verify._arrivals.clear()
    known.forget()
    reason_of = dispatch.unavailable_reason

    def unavailable_reason(backend: str, device: object = None) -> str | None:
        return None if backend == "cuda" else reason_of(backend, device)

    monkeypatch.setattr(dispatch, "unavailable_reason", unavailable_reason)
    # What has no CUDA kernel runs on the torch backend here.
    monkeypatch.setattr(cuda, "__getattr__", lambda name: getattr(torch_backend, name))
    monkeypatch.setattr(launch, "triton", lambda: torch_backend)
    about = launch.Properties(multiprocessors, 227 * 1024, "cpu")
    monkeypatch.setattr(launch, "properties", lambda device: about)
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "current_stream", lambda index: 0)
    monkeypatch.setattr(launch, "current_device", lambda: None)


def launches_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Numbers of the blocks that are launched of a kernel from now on."""
    launched: list[int] = []
    found = launch.kernel

    def counting(*args: object) -> object:
        start = found(*args)
        return (lambda count, *rest: (launched.append(count), start(count, *rest))) if args[-1] == name else start

    monkeypatch.setattr(launch, "kernel", counting)
    return launched
