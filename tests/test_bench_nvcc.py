"""Rivals' CUDA kernels: compiled once, with what their projects compile them with, and loaded as they are after."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rival_stubs import files_in

from replayssm.bench.rivals import flashinfer_parts, loading, nvcc
from replayssm.bench.rivals.projects import FLASHINFER, SGLANG


@pytest.fixture
def builds(monkeypatch):
    """What was compiled, by a compiler that writes empty libraries."""
    done: list[dict[str, object]] = []

    def build(name: str, **options: object) -> None:
        done.append({"name": name, **options})
        (Path(str(options["build_directory"])) / f"{name}.so").touch()

    package, cpp = ModuleType("tvm_ffi"), ModuleType("tvm_ffi.cpp")
    package.cpp, cpp.build, package.load_module = cpp, build, lambda path: ("loaded", path)
    monkeypatch.setitem(sys.modules, "tvm_ffi", package)
    monkeypatch.setitem(sys.modules, "tvm_ffi.cpp", cpp)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TVM_FFI_CUDA_ARCH_LIST", raising=False)
    return done


@pytest.fixture
def folder(tmp_path):
    yield from files_in(tmp_path)


def test_a_kernel_is_compiled_for_this_gpu_at_its_first_call_alone(tmp_path, builds, monkeypatch):
    arguments = nvcc.cpp_arguments(8, True)
    wanted = {"cuda_files": ["a/kernel.cuh"], "cuda_wrappers": [("run", f"Kernel<{arguments}>::run")]}
    modules = [nvcc.load_jit(tmp_path, "kernel_8", *arguments, **wanted) for _ in range(2)]
    assert modules == [("loaded", str(tmp_path / "built" / "kernel_8.so"))] * 2
    (build,) = builds
    (source,) = build["sources"]
    text = Path(source).read_text()
    assert f'#include "{tmp_path}/csrc/a/kernel.cuh"' in text
    assert "TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, (Kernel<8, true>::run));" in text
    assert "-DSGL_CUDA_ARCH=900" in build["extra_cuda_cflags"]
    assert f"-isystem {tmp_path / 'include'}" in build["extra_cuda_cflags"]
    assert nvcc.os.environ["TVM_FFI_CUDA_ARCH_LIST"] == "9.0a"


def test_a_missing_compiler_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with pytest.raises(ModuleNotFoundError, match="tvm_ffi"):
        nvcc.load_jit(tmp_path, "kernel", cuda_files=[], cuda_wrappers=[])


def test_flashinfers_own_build_functions_find_its_sources(folder, builds):
    pytest.importorskip("triton")
    module = loading.load(FLASHINFER, folder, "flashinfer.jit.mamba.checkpointing_ssu")
    module.gen_checkpointing_ssu_module("some_kernel").build_and_load()
    (build,) = builds
    built, data = folder / "flashinfer" / "built" / "some_kernel", folder / "flashinfer" / "data"
    assert build["sources"] == [str(built / "kernel.cu")]
    includes = (built, data / "csrc", data / "include", data / "cutlass" / "include")
    assert build["extra_cuda_cflags"][-4:] == [f"-isystem {path}" for path in includes]
    assert {"-DMINE", "-use_fast_math", "-DFLASHINFER_ENABLE_BF16"} <= set(build["extra_cuda_cflags"])


def test_a_cute_kernel_is_the_library_that_is_there_or_what_its_compiler_makes(tmp_path, builds, monkeypatch):
    library = tmp_path / "decode_sm90" / "decode_sm90.so"
    library.parent.mkdir()
    library.touch()
    monkeypatch.setattr(sys.modules["tvm_ffi"], "load_module", lambda path: SimpleNamespace(kernel=path))
    assert flashinfer_parts._cute_kernel(tmp_path, "decode", "decode_sm90", pytest.fail) == str(library)
    library.unlink()
    monkeypatch.setattr(flashinfer_parts, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="nvidia-cutlass-dsl is not installed, and decode_sm90.so is not in"):
        flashinfer_parts._cute_kernel(tmp_path, "decode", "decode_sm90", pytest.fail)
    monkeypatch.setattr(flashinfer_parts, "find_spec", lambda name: name)
    assert flashinfer_parts._cute_kernel(tmp_path, "decode", "decode_sm90", lambda: "compiled") == "compiled"


def test_a_compilers_names_are_stood_in_for_only_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(flashinfer_parts, "find_spec", lambda name: None)
    assert "cutlass.cute" in flashinfer_parts.stand_ins(tmp_path)
    monkeypatch.setattr(flashinfer_parts, "find_spec", lambda name: name)
    assert "cutlass.cute" not in flashinfer_parts.stand_ins(tmp_path)


def test_sglangs_module_gets_what_it_asks_for(folder, builds):
    pytest.importorskip("triton")
    loading.load(SGLANG, folder, "sglang.kernels.ops.attention.kda_packed_decode")
    tools = sys.modules["sglang.kernels.jit.utils"]
    assert tools.is_arch_support_pdl()
    tools.load_jit("k", *tools.make_cpp_args(8), cuda_files=["k.cuh"], cuda_wrappers=[("run", "K<8>::run")])
    assert builds[0]["build_directory"] == str(folder / "sglang" / "kernels" / "jit" / "built")


def test_a_file_that_says_the_same_is_left_alone(tmp_path):
    file = tmp_path / "new" / "a.cu"
    nvcc.write_if_different(file, "one")
    before = file.stat().st_mtime_ns
    nvcc.write_if_different(file, "one")
    assert file.stat().st_mtime_ns == before
    nvcc.write_if_different(file, "two")
    assert file.read_text() == "two"
