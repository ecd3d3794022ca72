"""The projects whose kernels can be measured: which files of each are needed, and what stands in for the rest of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from replayssm.bench.rivals import flashinfer_parts
from replayssm.bench.rivals.loading import Project
from replayssm.bench.rivals.nvcc import cpp_arguments, load_jit

StandIns = dict[str, dict[str, Any]]


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does nothing."""
    return function


def _capability() -> int:
    """90 for compute capability 9.0; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _sglang(package: Path) -> StandIns:
    import triton.language as tl

    fla = "sglang.kernels.ops.attention.fla"
    jit = {
        "cache_once": cache,
        "is_arch_support_pdl": lambda: _capability() >= 90,
        "load_jit": partial(load_jit, package / "kernels" / "jit"),
        "make_cpp_args": cpp_arguments,
    }
    return {
        f"{fla}.op": {"exp": tl.exp},
        f"{fla}.utils": {"input_guard": _same, "is_tf32_supported": True},
        "sglang.srt.utils": {
            "get_device_sm": _capability,
            "is_cuda": torch.cuda.is_available,
            "is_gfx95_supported": lambda: False,
            "is_hip": lambda: False,
            "is_sm90_supported": lambda: _capability() == 90,
        },
        "sglang.kernels.jit.utils": jit,
    }


def _vllm(package: Path) -> StandIns:
    import triton
    import triton.language as tl

    def device_name() -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def quiet(*_: Any, **__: Any) -> None:
        pass

    platform = SimpleNamespace(
        is_cpu=lambda: False,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
        is_device_capability_family=lambda family: torch.cuda.get_device_capability()[0] == family // 10,
        get_device_name=device_name,
    )
    log = logging.getLogger("replayssm.bench.vllm")
    logger = SimpleNamespace(info=log.info, warning=log.warning, info_once=quiet, warning_once=quiet)
    return {
        "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm._custom_ops": {},
        "vllm.logger": {"init_logger": lambda _: logger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"HAS_TRITON": True, "tl": tl, "triton": triton},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda: device_name().replace(" ", "_")},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
    }


def _mamba(package: Path) -> StandIns:
    if find_spec("einops") is not None:
        return {}
    return {"einops": {"rearrange": None, "repeat": None}}  # of its reference alone


def _fla(package: Path) -> StandIns:
    import triton.language as tl

    return {
        "fla.backends": {"dispatch": lambda _: _same},
        "fla.ops.utils.op": {"exp": tl.exp},
        "fla.utils": {"input_guard": _same, "IS_NVIDIA": torch.cuda.is_available() and torch.version.hip is None},
    }


_ATTENTION = "sglang/kernels/ops/attention"
SGLANG = Project(
    name="sglang",
    package="sglang",
    version="0.5.23",
    files=(
        f"{_ATTENTION}/fla/fused_recurrent.py",
        f"{_ATTENTION}/kda_packed_decode.py",
        f"{_ATTENTION}/linear/fused_recurrent_linear_replayssm.py",
        f"{_ATTENTION}/linear/fused_sigmoid_gating_recurrent.py",
        f"{_ATTENTION}/linear/gdn_replayssm_spec_decode.py",
        f"{_ATTENTION}/linear/kda_replayssm_spec_decode.py",
        "sglang/kernels/jit/csrc/attention/kda_packed_decode.cuh",
        "sglang/kernels/jit/include/",
    ),
    how="python -m benchmarks.rivals sglang",
    wheel="sglang",
    stand_ins=_sglang,
)
_OPS = "vllm/model_executor/layers/mamba/ops"
_TUNED = "configs/selective_state_update/headdim=64,dstate=128,device_name=NVIDIA_H200,cache_dtype=float"
VLLM_FORK = Project(
    name="vllm-fork",
    package="vllm",
    version="Johnny-Liou/ReplaySSM a848494",
    files=(
        f"{_OPS}/mamba_ssm.py",
        f"{_OPS}/triton_helpers.py",
        f"{_OPS}/replayssm_config.py",
        f"{_OPS}/selective_state_update_replayssm_output_only.py",
        f"{_OPS}/selective_state_update_replayssm_spec.py",
        f"{_OPS}/{_TUNED}16.json",
        f"{_OPS}/{_TUNED}32.json",
        "vllm/model_executor/layers/fla/ops/fused_recurrent_replayssm.py",
        "vllm/model_executor/layers/fla/ops/gdn_replayssm_spec_decode.py",
    ),
    how="clone github.com/Johnny-Liou/ReplaySSM, then python -m benchmarks.rivals vllm-fork --checkout ITS_FOLDER",
    stand_ins=_vllm,
)
VLLM = Project(
    name="vllm",
    package="vllm",
    version="0.33.0",
    files=(
        f"{_OPS}/mamba_ssm.py",
        f"{_OPS}/triton_helpers.py",
        f"{_OPS}/replayssm_config.py",
        f"{_OPS}/selective_state_update_replayssm_output_only.py",
        f"{_OPS}/{_TUNED}16.json",
        f"{_OPS}/{_TUNED}32.json",
        "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
    ),
    how="python -m benchmarks.rivals vllm",
    wheel="vllm",
    stand_ins=_vllm,
    within="vllm-release",
)
MAMBA = Project(
    name="mamba",
    package="mamba_ssm",
    version="state-spaces/mamba e9594ce",
    files=("mamba_ssm/ops/triton/selective_state_update.py", "mamba_ssm/ops/triton/softplus.py"),
    how="clone github.com/state-spaces/mamba, then python -m benchmarks.rivals mamba --checkout ITS_FOLDER",
    stand_ins=_mamba,
)
FLA = Project(
    name="fla",
    package="fla",
    version="0.6.0",
    files=(
        "fla/ops/gated_delta_rule/fused_recurrent.py",
        "fla/ops/kda/fused_recurrent.py",
        "fla/ops/utils/softplus.py",
    ),
    how="python -m benchmarks.rivals fla",
    wheel="fla-core",
    stand_ins=_fla,
)
_DATA = "flashinfer/data"
FLASHINFER = Project(
    name="flashinfer",
    package="flashinfer",
    version="0.7.2.post1",
    files=(
        "flashinfer/gdn_decode.py",
        "flashinfer/gdn_kernels/cute_dsl_cache_naming.py",
        "flashinfer/gdn_kernels/device_target.py",
        "flashinfer/gdn_kernels/dtype_compat.py",
        "flashinfer/gdn_kernels/gdn_decode_bf16_state.py",
        "flashinfer/gdn_kernels/gdn_decode_pretranspose.py",
        "flashinfer/mamba/checkpointing_ssu.py",
        "flashinfer/mamba/selective_state_update.py",
        "flashinfer/jit/mamba/checkpointing_ssu.py",
        "flashinfer/jit/mamba/selective_state_update.py",
        f"{_DATA}/csrc/checkpointing_ssu.cu",
        f"{_DATA}/csrc/checkpointing_ssu_customize_config.jinja",
        f"{_DATA}/csrc/checkpointing_ssu_jit_binding.cu",
        f"{_DATA}/csrc/checkpointing_ssu_kernel_inst.cu",
        f"{_DATA}/csrc/flashinfer_mamba_binding.cu",
        f"{_DATA}/csrc/selective_state_update.cu",
        f"{_DATA}/csrc/selective_state_update_customize_config.jinja",
        f"{_DATA}/csrc/selective_state_update_kernel_inst.cu",
        f"{_DATA}/csrc/tvm_ffi_utils.h",
        f"{_DATA}/include/flashinfer/",
        f"{_DATA}/cutlass/include/",
    ),
    how="python -m benchmarks.rivals flashinfer",
    stand_ins=flashinfer_parts.stand_ins,
    wheel="flashinfer-python",
)
PROJECTS = (SGLANG, VLLM, VLLM_FORK, MAMBA, FLA, FLASHINFER)
