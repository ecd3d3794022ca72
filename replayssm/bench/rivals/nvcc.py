"""Rivals' CUDA kernels, compiled by nvcc at their first call, through apache-tvm-ffi, which they are made for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch


class CppArguments(tuple[str, ...]):
    """C++ template arguments: one by one they are parts of a name, as text they stand in source code."""

    def __str__(self) -> str:
        return ", ".join(self)


def cpp_arguments(*values: int | bool) -> CppArguments:
    """Values as C++ template arguments."""
    return CppArguments(str(value).lower() for value in values)


def load_jit(
    folder: Path,
    name: str,
    *_: str,
    cuda_files: Sequence[str],
    cuda_wrappers: Sequence[tuple[str, str]],
    extra_cuda_cflags: Sequence[str] = (),
) -> Any:
    """A module of compiled functions, as SGLang asks for them.

    Args:
        folder: holds the sources in ``csrc`` and their headers in ``include``.
        name: of the module.
        cuda_files: sources, headers with the kernels.
        cuda_wrappers: what each function of the module is called, and the C++ function that it is.
        extra_cuda_cflags: more options for nvcc.

    Raises:
        ModuleNotFoundError: apache-tvm-ffi is not installed.
    """
    includes = [f'#include "{folder / "csrc" / file}"' for file in cuda_files]
    exports = [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({function}, ({wrapped}));" for function, wrapped in cuda_wrappers]
    headers = ["#include <tvm/ffi/container/tensor.h>", "#include <tvm/ffi/function.h>"]
    source = folder / "built" / f"{name}.cu"
    write_if_different(source, "\n".join([*headers, *includes, "namespace sglang {", *exports, "}", ""]))
    major, minor = torch.cuda.get_device_capability()
    options = [f"-DSGL_CUDA_ARCH={major * 100 + minor * 10}", "-std=c++20", "--expt-relaxed-constexpr"]
    return Library(name, [source], [*options, *extra_cuda_cflags], [folder / "include"]).build_and_load()


class Library:
    """A library that is compiled beside its first source, or was: then it is loaded as it is.

    Args:
        name: of the library.
        sources: files.
        options: of nvcc.
        includes: folders of headers, which may hold what a compiler refuses in a program's own (FlashInfer's do).
    """

    def __init__(self, name: str, sources: Sequence[Path], options: Sequence[str], includes: Sequence[Path]) -> None:
        self._name = name
        self._sources = sources
        self._options = options
        self._includes = includes

    def build_and_load(self) -> Any:
        import tvm_ffi
        import tvm_ffi.cpp

        folder = self._sources[0].parent
        library = folder / f"{self._name}.so"
        if not library.is_file():
            major, minor = torch.cuda.get_device_capability()
            os.environ.setdefault("TVM_FFI_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
            tvm_ffi.cpp.build(
                self._name,
                sources=[str(source) for source in self._sources],
                extra_cuda_cflags=[*self._options, *(f"-isystem {path}" for path in self._includes)],
                build_directory=str(folder),
            )
        with suppress(OSError):  # FlashInfer's libraries call the driver, and aren't linked with it
            ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return tvm_ffi.load_module(str(library))


def write_if_different(path: Path, text: str) -> None:
    """Leave a file alone that says this already, so that what was made of it stays newer."""
    if path.is_file() and path.read_text() == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
