"""Other projects' kernels, loaded from a folder of the user's; none of them is part of this package.

The folder holds a few files of each project under the paths that they have in it. The projects need not be installed:
their packages are stood in for by empty ones, and the few things that the files import by small ones.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True)
class Project:
    """A project whose kernels can be measured beside ours.

    Args:
        name: the folder's name, and the name of the package.
        version: what the adapters were written for.
        files: what is needed of it, paths from the folder that holds the package.
        how: how to get it, said where it is missing.
    """

    name: str
    version: str
    files: tuple[str, ...]
    how: str
    stand_ins: Callable[[], dict[str, dict[str, Any]]]

    def missing(self, folder: Path) -> list[str]:
        return [name for name in self.files if not (folder / name).is_file()]

    def version_in(self, folder: Path) -> str:
        """What the fetch noted, or that it is unknown."""
        note = folder / self.name / "VERSION"
        return note.read_text().strip() if note.is_file() else "unknown version"


def _sglang() -> dict[str, dict[str, Any]]:
    import triton.language as tl

    fla = "sglang.kernels.ops.attention.fla"
    return {
        f"{fla}.op": {"exp": tl.exp},
        f"{fla}.utils": {"input_guard": lambda function: function},
        # Its CUDA kernel for KDA is compiled at run time with tools of its own; the Triton one is what is left.
        "sglang.kernels.ops.attention.kda_packed_decode": {"covered": lambda *_: False},
    }


def _vllm() -> dict[str, dict[str, Any]]:
    import triton
    import triton.language as tl

    def device_name() -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"

    def quiet(*_: Any, **__: Any) -> None:
        pass

    platform = SimpleNamespace(
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
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
    }


SGLANG = Project(
    name="sglang",
    version="0.5.23",
    files=(
        "sglang/kernels/ops/attention/fla/fused_recurrent.py",
        "sglang/kernels/ops/attention/linear/fused_recurrent_linear_replayssm.py",
    ),
    how="python -m benchmarks.rivals sglang",
    stand_ins=_sglang,
)
_MAMBA = "vllm/model_executor/layers/mamba/ops"
_TUNED = "configs/selective_state_update/headdim=64,dstate=128,device_name=NVIDIA_H200,cache_dtype=float"
VLLM_FORK = Project(
    name="vllm",
    version="Johnny-Liou/ReplaySSM a848494",
    files=(
        f"{_MAMBA}/mamba_ssm.py",
        f"{_MAMBA}/triton_helpers.py",
        f"{_MAMBA}/replayssm_config.py",
        f"{_MAMBA}/selective_state_update_replayssm_output_only.py",
        f"{_MAMBA}/selective_state_update_replayssm_spec.py",
        f"{_MAMBA}/{_TUNED}16.json",
        f"{_MAMBA}/{_TUNED}32.json",
        "vllm/model_executor/layers/fla/ops/fused_recurrent_replayssm.py",
        "vllm/model_executor/layers/fla/ops/fused_sigmoid_gating.py",
        "vllm/model_executor/layers/fla/ops/gdn_replayssm_spec_decode.py",
    ),
    how="clone github.com/Johnny-Liou/ReplaySSM, then python -m benchmarks.rivals vllm --checkout ITS_FOLDER",
    stand_ins=_vllm,
)
PROJECTS = (SGLANG, VLLM_FORK)


class RivalError(RuntimeError):
    """A rival's files are not there or can't be used."""


def load(project: Project, folder: Path, module: str) -> ModuleType:
    """Import a module of a project from ``folder``.

    Raises:
        RivalError: the project itself is imported already, or a module does not import.
    """
    try:
        _stand_in(project, folder)
        return import_module(module)
    except (ImportError, AttributeError, OSError) as error:
        raise RivalError(f"{project.name} does not import from {folder}: {error}") from error


def _stand_in(project: Project, folder: Path) -> None:
    there = sys.modules.get(project.name)
    if there is not None and list(getattr(there, "__path__", [])) != [str(folder / project.name)]:
        raise RivalError(f"{project.name} is imported already, from elsewhere")
    packages = {parent for name in project.files for parent in Path(name).parents if parent != Path()}
    contents = {".".join(package.parts): folder / package for package in packages}
    small = project.stand_ins()
    for name in small:
        parts = name.split(".")
        for end in range(1, len(parts)):
            contents.setdefault(".".join(parts[:end]), folder.joinpath(*parts[:end]))
    for name in sorted(contents):
        _install(name, str(contents[name]), {})
    for name, values in small.items():
        _install(name, None, values)


def _install(name: str, path: str | None, values: dict[str, Any]) -> None:
    if name in sys.modules:
        return
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=path is not None)
    if path is not None:
        module.__path__ = [path]
    vars(module).update(values)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
