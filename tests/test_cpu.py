"""The C kernels: how they are built and kept, their numbers, and what they refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import NEEDS_COMPILER
from oracle import KINDS, Layer, poison, relative_error
from torch import Tensor

from replayssm import ReplayPool, ops
from replayssm.backends import cpu
from replayssm.backends import torch as torch_backend
from replayssm.backends.cpu import build
from replayssm.cli import doctor
from replayssm.ops.dispatch import backend_module

pytestmark = NEEDS_COMPILER
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


# --- the build


def forget() -> None:
    build.library.cache_clear()
    build.unavailable_reason.cache_clear()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """As in a new process with an empty cache folder, which it gives."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path / "replayssm"
    forget()


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where something was built."""
    built: list[Path] = []
    compile_to = build.compile_to
    monkeypatch.setattr(build, "compile_to", lambda path, compiler: (built.append(path), compile_to(path, compiler)))
    return built


def works() -> bool:
    x = torch.randn(1, 3)
    return torch.equal(
        cpu.causal_conv1d_update(x, torch.zeros(1, 3, 0), torch.ones(3, 1), None, torch.zeros(1).int(), None), x
    )


def test_a_second_process_loads_what_the_first_has_built(fresh: Path, builds: list[Path]) -> None:
    assert works()
    (kept,) = fresh.iterdir()
    forget()
    assert works()
    assert builds == [kept]


@pytest.mark.parametrize("changed", ["SOURCES", "OPTIONS", "compiler", "processor"])
def test_what_the_kernels_are_made_of_decides_their_name(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.fingerprint("cc")
    if changed == "processor":
        monkeypatch.setattr(build, "_processor", lambda: "another")
    elif changed == "compiler":
        monkeypatch.setattr(build, "_version", lambda compiler: b"another")
    else:
        monkeypatch.setattr(build, changed, getattr(build, changed)[:-1])
    assert build.fingerprint("cc") != before


def no_folder(fresh: Path) -> None:
    fresh.parent.rmdir()
    fresh.parent.write_text("a file where a folder should be")


def read_only(fresh: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("a superuser writes everywhere")
    fresh.parent.chmod(0o500)


def not_loadable(fresh: Path) -> None:
    fresh.mkdir()
    (fresh / f"cpu-{build.fingerprint(str(build.shutil.which('cc') or build.shutil.which('gcc')))}.so").write_text(
        "not a library"
    )


@pytest.mark.parametrize("spoil", [no_folder, read_only, not_loadable])
def test_without_a_usable_cache_folder_each_process_builds_its_own(
    spoil: Callable[[Path], None], fresh: Path, builds: list[Path]
) -> None:
    spoil(fresh)
    assert works()
    assert not builds[-1].is_relative_to(fresh)
    assert not builds[-1].exists()


def test_processes_may_build_at_the_same_time(tmp_path: Path) -> None:
    code = f"import runpy; runpy.run_path({build.__file__!r})['library']().replayssm_decode; print('loaded')"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in started] == ["loaded\n"] * 3
    assert [path.suffix for path in (tmp_path / "replayssm").iterdir()] == [".so"]
    assert not list((tmp_path / "replayssm").glob(".*"))


def no_compiler(tmp_path: Path) -> None:
    """An empty PATH."""


def failing_compiler(tmp_path: Path) -> None:
    compiler = tmp_path / "bin" / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit\necho 'cc: error: out of order' >&2\nexit 3\n")
    compiler.chmod(0o755)


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (no_compiler, "it needs a C compiler, and none of cc, gcc, clang was found"),
        (failing_compiler, "cc failed with exit status 3: cc: error: out of order"),
    ],
)
def test_without_a_working_compiler_auto_is_torch_and_cpu_says_why(
    machine: Callable[[Path], None], said: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    machine(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    layer = Layer("gdn", 1, 1, 8, 8)
    pool = ReplayPool([layer.spec], 1)
    assert pool.backend == ops.resolve_backend("auto", "cpu") == "torch"
    slots = pool.slot_tensor(pool.alloc(1))
    assert layer.decode(layer.draw(1), **pool.state_args(0), slots=slots).isfinite().all()
    with pytest.raises(ValueError, match="^backend 'cpu' is not available: .*; use 'auto' or 'torch'$") as error:
        ReplayPool([layer.spec], 1, backend="cpu")
    assert said in str(error.value)
    (told,) = [backend for backend in doctor.examine().backends if backend.name == "cpu"]
    assert not told.available
    assert said in told.reason


def test_tensors_of_a_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match="backend 'cpu' is not available: its kernels are for tensors on a CPU"):
        ops.resolve_backend("cpu", "cuda")


def test_what_has_no_kernel_here_runs_on_the_torch_backend() -> None:
    module = backend_module("cpu")
    for name in torch_backend.__all__:
        assert callable(getattr(module, name))
    assert module.materialize is torch_backend.materialize
    assert module.decode_step is not torch_backend.decode_step


# --- numbers


def same(x: Tensor, y: Tensor) -> bool:
    """Equal, with any NaN for a NaN."""
    return bool(((x == y) | x.isnan() & y.isnan()).all())


def scaled(x: Tensor, D: Tensor) -> Tensor:
    """``D x`` of Mamba-2 with C = 0, for heads of one number."""
    heads = x.shape[1]
    zero = torch.zeros(1, 1, 1, dtype=x.dtype)
    one = torch.ones(1, heads)
    state = torch.zeros(1, heads, 1, 1)
    pool = {"checkpoint": state, "ring_u": state.clone(), "ring_k": torch.zeros(1, 1, 1, 1, dtype=x.dtype)}
    cursors = {
        "write_pos": torch.zeros(1).int(),
        "checkpoint_slot": torch.zeros(1).int(),
        "slots": torch.zeros(1).int(),
    }
    rows = {"ring_g": torch.zeros(1, heads, 1), **cursors}
    call = {"A": -torch.ones(heads), "D": D, "dt_softplus": False, "flush_period": 1, "backend": "cpu"}
    return ops.mamba2_decode(x, one, zero, zero, **call, **pool, **rows)[0, :, 0]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_16_bit_number_is_read_as_it_is(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    weight = torch.ones(x.numel(), 1)
    state = torch.zeros(1, x.numel(), 0, dtype=dtype)
    slots = torch.zeros(1, dtype=torch.int32)
    assert same(ops.causal_conv1d_update(x[None], state, weight, slots=slots, backend="cpu")[0], x)
    one = torch.ones(1, x.numel(), 1, dtype=F32)
    assert same(scaled(one, x), x.float())


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_numbers_are_rounded_to_16_bits_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """To nearest, ties to even: all float32 with few digits behind those that are kept, and a million others."""
    rng = torch.Generator().manual_seed(0)
    some = torch.randint(-(2**31), 2**31, (1_000_000,), generator=rng).int().view(F32)
    kept = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    near = torch.cat([kept + offset for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x3000)]).view(
        F32
    )
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(F16).float()
    between = (halves[1:] + halves[:-1]) / 2
    number = torch.cat([some, near, halves, between, torch.tensor([65519.996, 65520.0, -65520.0])])
    one = torch.ones(1, number.numel(), 1, dtype=dtype)
    y = scaled(one, number)
    assert y.dtype == dtype
    assert same(y, number.to(dtype))


def test_gates_are_exact_over_the_whole_range() -> None:
    """``g = −softplus(a)``, the bounded gate and silu, to a few units in the last place, and NaN stays NaN."""
    a = torch.cat([torch.linspace(-100, 100, 40_001), torch.linspace(-1e-3, 1e-3, 101), torch.tensor([-1e30, 1e30])])
    a = torch.nn.functional.pad(a, (0, -a.numel() % 4), value=float("nan"))
    spec = Layer("kda", 1, 1, a.numel(), 1).spec
    none = {"A_log": torch.zeros(1), "dt_bias": torch.zeros(1, a.numel())}
    q, v, b = torch.ones(1, 1, a.numel()), torch.ones(1, 1, 1), torch.zeros(1, 1)
    exact = a.double()
    for bound, wanted in ((None, -torch.nn.functional.softplus(exact, threshold=1e9)), (-5.0, -5 * exact.sigmoid())):
        pool = ReplayPool([spec], 1, backend="cpu")
        slots = pool.slot_tensor(pool.alloc(1))
        ops.kda_decode(q, q, v, a.view(1, 1, -1), b, **none, lower_bound=bound, **pool.state_args(0), slots=slots)
        g = pool.fold_args(0)["ring_g"][0, 0, 0]
        assert same(g.isnan(), a.isnan())
        normal = wanted.abs() > 1e-37
        assert ((g - wanted).abs() / wanted.abs())[normal].max() < 4e-7
        assert g[~normal & ~a.isnan()].abs().max() < 2e-37
    weight, state, slots = torch.ones(a.numel(), 1), torch.zeros(1, a.numel(), 0), torch.zeros(1, dtype=torch.int32)
    y = ops.causal_conv1d_update(a[None], state, weight, slots=slots, activation="silu", backend="cpu")[0]
    wanted = exact * exact.sigmoid()
    assert same(y.isnan(), a.isnan())
    normal = wanted.abs() > 1e-36
    assert ((y - wanted).abs() / wanted.abs())[normal].max() < 4e-7


@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 5), (15, 2), (16, 3), (17, 17), (31, 4), (33, 7), (65, 6), (130, 9)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_any_size_of_head(kind: str, sizes: tuple[int, int]) -> None:
    layer = Layer(kind, 1, 1 if kind.startswith("kda") else 3, *sizes, backend="cpu")
    pool = ReplayPool([layer.spec], 2, ring_len=3, backend="cpu")
    poison(pool)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    state = layer.zero_state(2)
    for _ in range(8):
        inputs = layer.draw(2)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        pool.advance(slots)
        state, expected = layer.reference(inputs, state)
        assert (y - expected).norm() < 1e-6 * (expected.norm() + state.norm())
        assert relative_error(pool.read_state(0, rows), state) < 1e-6


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_the_number_of_threads_changes_no_bit(kind: str, threads: Callable[[int], None]) -> None:
    """Four threads' worth of work, with flushing and padding rows among the others."""
    layer = Layer(kind, 2 if kind != "kda" else 32, 32, 128, 128, backend="cpu")
    steps = [layer.draw(5) for _ in range(4)]

    def run(count: int) -> list[Tensor]:
        threads(count)
        pool = ReplayPool([layer.spec], 5, ring_len=3, backend="cpu")
        poison(pool)
        rows = pool.alloc(4)
        pool.write_pos[rows[0]] = 2
        for name in ("ring_u", "ring_k", "ring_g"):
            pool.fold_args(0)[name][rows[0], :, :2] = -0.1
        slots = pool.slot_tensor([*rows[:2], -1, *rows[2:]])
        out = []
        for inputs in steps:
            out.append(layer.decode(inputs, **pool.state_args(0), slots=slots))
            pool.advance(slots)
        return [*out, pool.fold_args(0)["checkpoint"][rows], pool.read_state(0, rows)]

    alone = run(1)
    for count in (2, 3, 7):
        assert all(torch.equal(x, y) for x, y in zip(run(count), alone, strict=True))


# --- what it refuses


@pytest.mark.parametrize(
    ("cursor", "value", "message"),
    [
        ("write_pos", -1, "write_pos is out of range for a row of the batch: numbers from 0 to R = 4 are wanted"),
        ("write_pos", 5, "write_pos is out of range"),
        ("checkpoint_slot", -1, "checkpoint_slot is out of range for a row of the batch: slots from 0 to N - 1 = 2"),
        ("checkpoint_slot", 3, "checkpoint_slot is out of range"),
    ],
)
def test_a_cursor_out_of_range_is_refused_and_nothing_is_written(cursor: str, value: int, message: str) -> None:
    """Memory behind a tensor is nobody's to read or write."""
    layer = Layer("gdn", 1, 1, 8, 8, backend="cpu")
    pool = ReplayPool([layer.spec], 3, ring_len=4, backend="cpu")
    poison(pool)
    slots = pool.slot_tensor(pool.alloc(2))
    getattr(pool, cursor)[1] = value
    with pytest.raises(ValueError, match=message):
        layer.decode(layer.draw(2), **pool.state_args(0), slots=slots)
    assert all(pool.fold_args(0)[name].isnan().all() for name in ("ring_u", "ring_k", "ring_g"))
