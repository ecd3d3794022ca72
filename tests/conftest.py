"""Fixtures that all tests share."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined: without a GPU, Triton's kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from replayssm.ops import dispatch, known  # after that, because torch.compile's parts, which it needs, import Triton

# A GPU machine runs `make test-gpu` with what it has; these files need more.
_NEEDS = {"test_programs.py": "hypothesis", "test_cli.py": "pydantic", "test_docs.py": "pydantic"}
_NEEDS |= dict.fromkeys((f"test_server{part}.py" for part in ("", "_limits", "_end", "_engine")), "openai")
collect_ignore = [file for file, package in _NEEDS.items() if find_spec(package) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def _nothing_is_known_yet() -> None:
    """Operators remember which backend they chose; tests pretend to be on other machines."""
    known.forget()


_NO_KERNELS = dispatch.unavailable_reason("cpu", "cpu")
NEEDS_COMPILER = [pytest.mark.skip(reason=_NO_KERNELS)] if _NO_KERNELS else []

_NO_CUDA_KERNELS = dispatch.unavailable_reason("cuda")
NEEDS_HOPPER = [pytest.mark.skip(reason=_NO_CUDA_KERNELS)] if _NO_CUDA_KERNELS else []


def _place(device: str, backend: str, *marks: pytest.MarkDecorator) -> object:
    return pytest.param({"device": device, "backend": backend}, marks=marks, id=f"{device}-{backend}")


@pytest.fixture(
    params=[
        _place("cpu", "cpu", *NEEDS_COMPILER),
        _place("cpu", "torch"),
        _place("cuda", "torch", pytest.mark.gpu),
        _place("cuda", "triton", pytest.mark.gpu),
        _place("cuda", "cuda", pytest.mark.gpu, *NEEDS_HOPPER),
    ]
)
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    """Device and backend: each pair that runs at full speed on this machine. test_triton.py has the interpreter."""
    return request.param


@pytest.fixture(params=[pytest.param("cpu", marks=NEEDS_COMPILER), "torch"])
def either_cpu_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What "auto" chooses for a CPU: with a C compiler, and without one."""
    if request.param == "torch":
        monkeypatch.setattr(dispatch, "_cpu_kernels", lambda: "this test is without them")
    return request.param
