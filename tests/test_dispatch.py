"""The backend that "auto" takes on each machine, and what is said of one that can't run there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest
import torch

from replayssm import ReplayPool, ops
from replayssm.backends import cuda
from replayssm.ops import dispatch
from replayssm.state import LayerSpec

Machine = Callable[..., None]
ON_A_CPU = ("cpu", "torch")  # the first where there is a C compiler


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Pretend to be on a machine with these parts."""

    def forget() -> None:
        dispatch._look_for_triton.cache_clear()
        cuda.unavailable_reason.cache_clear()

    def pretend(
        *,
        gpu: bool,
        triton: bool = True,
        cuda_core: bool = False,
        capability: tuple[int, int] = (9, 0),
        hip: str | None = None,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(dispatch, "find_spec", lambda name: object() if triton else None)
        monkeypatch.setattr(cuda, "missing_package", lambda: None if cuda_core else "cuda-core is not installed")
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        forget()

    yield pretend
    forget()


@pytest.mark.parametrize("device", [None, "cuda", "cuda:1"])
def test_a_gpu_that_triton_supports(device: str | None, machine: Machine) -> None:
    for parts in ({}, {"capability": (8, 0)}, {"capability": (12, 0)}, {"capability": (0, 0), "hip": "7.1"}):
        machine(gpu=True, **parts)
        assert ops.resolve_backend("auto", device) == ops.resolve_backend("triton", device) == "triton"
        assert ops.resolve_backend("torch", device) == "torch"
        assert ops.resolve_backend("auto", "cpu") in ON_A_CPU


@pytest.mark.parametrize("device", [None, "cuda", "cuda:1"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_hopper_and_newer_gpus_have_kernels_of_their_own(
    device: str | None, capability: tuple[int, int], machine: Machine
) -> None:
    machine(gpu=True, cuda_core=True, capability=capability)
    assert ops.resolve_backend("auto", device) == ops.resolve_backend("cuda", device) == "cuda"
    assert ops.resolve_backend("triton", device) == "triton"
    assert ops.resolve_backend("auto", "cpu") in ON_A_CPU


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ({"gpu": True}, "cuda-core is not installed"),
        (
            {"gpu": True, "cuda_core": True, "capability": (8, 9)},
            "compute capability 8.9: cuda kernels are made for 9.0",
        ),
        ({"gpu": True, "cuda_core": True, "hip": "7.1"}, "its kernels are for NVIDIA's GPUs"),
    ],
)
def test_where_they_cannot_run_auto_is_triton(parts: dict[str, object], missing: str, machine: Machine) -> None:
    machine(**parts)
    assert ops.resolve_backend("auto", "cuda") == "triton"
    told = f"^backend 'cuda' is not available: .*{missing}.*; use 'auto', 'torch' or 'triton'$"
    with pytest.raises(ValueError, match=told):
        ops.resolve_backend("cuda", "cuda")


def test_they_need_triton_for_what_they_lack(machine: Machine) -> None:
    machine(gpu=True, cuda_core=True, triton=False)
    assert ops.resolve_backend("auto", "cuda") == "torch"
    with pytest.raises(ValueError, match="^backend 'cuda' is not available: triton is not installed; use"):
        ops.resolve_backend("cuda", "cuda")


@pytest.mark.parametrize(
    ("parts", "device", "missing"),
    [
        ({"gpu": False}, None, "triton needs a GPU"),
        ({"gpu": False}, "cpu", "triton needs a GPU"),
        ({"gpu": False}, "cuda", "torch sees no GPU"),
        ({"gpu": True}, "cpu", "triton needs a GPU"),
        ({"gpu": False, "triton": False}, None, "triton is not installed"),
        ({"gpu": True, "triton": False}, None, "triton is not installed"),
        ({"gpu": True, "triton": False}, "cuda", "triton is not installed"),
        ({"gpu": True, "capability": (7, 5)}, "cuda", "compute capability 7.5: triton kernels are made for 8.0"),
    ],
)
def test_without_it_auto_is_torch_and_triton_says_what_is_missing(
    parts: dict[str, object], device: str | None, missing: str, machine: Machine
) -> None:
    machine(**parts)
    assert ops.resolve_backend("auto", device) in (("torch",) if device == "cuda" else ON_A_CPU)
    others = [name for name in ON_A_CPU if ops.unavailable_reason(name, device) is None]
    use = "".join(f", '{name}'" for name in others[:-1]) + f" or '{others[-1]}'"
    with pytest.raises(ValueError, match=f"^backend 'triton' is not available: .*{missing}.*; use 'auto'{use}$"):
        ops.resolve_backend("triton", device)


def test_a_pool_falls_back_too_and_works(machine: Machine) -> None:
    machine(gpu=False, triton=False)
    spec = LayerSpec("head", "delta", 1, 1, 8, 8)
    pool = ReplayPool([spec], 1)
    assert pool.backend in ON_A_CPU
    assert not pool.read_state(0, pool.alloc(1)).any()
    with pytest.raises(ValueError, match="triton is not installed"):
        ReplayPool([spec], 1, backend="triton")


@pytest.mark.parametrize(("backend", "chosen"), [("auto", "cuda"), ("auto", "triton"), ("triton", "triton")])
def test_the_choice_can_be_compiled(backend: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a constant: torch.compile can't trace the look for a package."""
    missing = {True: lambda: find_spec("no_such_package"), False: lambda: f"no package: {find_spec('no_such_package')}"}
    monkeypatch.setattr(dispatch, "_look_for_triton", missing[True])
    monkeypatch.setattr(cuda, "unavailable_reason", missing[chosen == "cuda"])
    torch.compiler.reset()  # or it takes what it compiled for another choice
    compiled = torch.compile(lambda x: x + len(ops.resolve_backend(backend, "cuda")), fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == len(chosen)
