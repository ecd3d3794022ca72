"""What stands in for the parts of FlashInfer that its recurrent functions import: checks, tuner and build systems."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from replayssm.bench.rivals.nvcc import Library, write_if_different

StandIns = dict[str, dict[str, Any]]

#: FlashInfer's own options for every kernel.
OPTIONS = ("-std=c++17", "-use_fast_math", "--expt-relaxed-constexpr", "-diag-suppress", "177")
DEFINITIONS = tuple(f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2"))
DEFINITIONS += ("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1")


class _Context:
    """Which GPU is compiled for: the library finds that out by itself."""

    def get_nvcc_flags_list(self, **_: Any) -> list[str]:
        return []


class _Unused:
    """A name of the compiler CuTe-DSL where it is not installed: mentioned by a module, of use only to compile it."""

    def __call__(self, *_: Any, **__: Any) -> _Unused:
        return self

    def __getitem__(self, _: Any) -> _Unused:
        return self

    def __getattr__(self, name: str) -> _Unused:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def _cute_kernel(built: Path, _: str, name: str, compile_it: Callable[[], Any], **__: Any) -> Any:
    """A CuTe-DSL kernel: a library that is there already, or what the compiler makes of it.

    Raises:
        ModuleNotFoundError: neither the library nor the compiler is there.
    """
    library = built / name / f"{name}.so"
    if library.is_file():
        import tvm_ffi

        return tvm_ffi.load_module(str(library)).kernel
    if find_spec("cutlass.base_dsl") is None:
        raise ModuleNotFoundError(f"nvidia-cutlass-dsl is not installed, and {library.name} is not in {built}")
    return compile_it()


class _Runner:
    """What its tuner's runners are made from: calling one runs it."""

    def __call__(self, inputs: Sequence[Any], **options: Any) -> Any:
        return self.forward(inputs, **options)

    def forward(self, inputs: Sequence[Any], **options: Any) -> Any:
        raise NotImplementedError


class _Tuner:
    """Takes what the function itself would choose: measuring its hundreds of launches is for a server's start."""

    @staticmethod
    def get() -> _Tuner:
        return _Tuner()

    def choose_one(self, _: str, runners: Sequence[Any], *__: Any) -> tuple[Any, int]:
        return runners[0], -1


def _decorator(*_: Any, **__: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda function: function


def _decorated(function: Callable[..., Any] | None = None, **_: Any) -> Callable[..., Any]:
    """With or without arguments."""
    return function if function is not None else _decorator()


def stand_ins(package: Path) -> StandIns:
    """Small modules by name, given the folder of the package."""
    data = package / "data"
    includes = [data / "csrc", data / "include", data / "cutlass" / "include"]

    def library(name: str, sources: Sequence[Path], extra_cuda_cflags: Sequence[str] = (), **_: Any) -> Library:
        here = Path(sources[0]).parent
        return Library(name, sources, [*OPTIONS, *DEFINITIONS, *extra_cuda_cflags], [here, *includes])

    unused = {"__getattr__": lambda _: _Unused()}
    cute = ("cutlass", "cutlass.cute", "cutlass.cute.nvgpu", "cutlass.cute.runtime")
    missing = dict.fromkeys(cute, unused) if find_spec("cutlass") is None else {}
    traces = ("gated_delta_rule_decode_trace", "gdn_mtp_trace", "gdn_replayssm_commit_trace")
    tuner = ("ConstraintSpec", "DynamicTensorSpec", "OptimizationProfile", "TuningConfig")
    initializers = ("autotuner_initializer_empty", "autotuner_initializer_ones")
    return {
        **missing,
        "flashinfer.api_logging": {"flashinfer_api": _decorated},
        "flashinfer.autotuner": {
            "AutoTuner": _Tuner,
            "TunableRunner": _Runner,
            **dict.fromkeys(tuner, SimpleNamespace),
            **dict.fromkeys(initializers),
        },
        "flashinfer.compilation_context": {"CompilationContext": _Context},
        "flashinfer.fused_moe.utils": {
            "get_hybrid_num_tokens_buckets": None,
            "map_to_hybrid_bucket_uncapped": None,
        },
        "flashinfer.jit.core": {
            "JitSpec": Library,
            "gen_jit_spec": library,
            "logger": logging.getLogger("replayssm.bench.flashinfer"),
        },
        "flashinfer.jit.cute_dsl_core": {
            "build_and_load_cute_dsl_kernel": partial(_cute_kernel, package / "built"),
        },
        "flashinfer.jit.env": {"FLASHINFER_CSRC_DIR": data / "csrc", "FLASHINFER_GEN_SRC_DIR": package / "built"},
        "flashinfer.jit.utils": {"write_if_different": write_if_different},
        "flashinfer.trace.templates.gdn": dict.fromkeys(traces),
        "flashinfer.trace.templates.mamba": {"selective_state_update_trace": None},
        "flashinfer.utils": {
            "get_compute_capability": torch.cuda.get_device_capability,
            "register_custom_op": _decorator,
            "register_fake_op": _decorator,
        },
    }
