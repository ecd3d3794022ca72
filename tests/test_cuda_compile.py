"""The CUDA sources compile for three GPU generations without spills, and what is compiled is kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replayssm.backends.cuda import blocks, build, decode, launch, state, verify, windows
from replayssm.backends.step import Rules

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LARGE, MIDDLE, SMALL = 10**7, 10**5, 1000  # rows of states in a step
SM90 = {"multiprocessors": 132, "shared_limit": 227 * 1024}

#: channel gate, delta rule, d_v, d_k, value heads of a key head, value heads
SHAPES = {
    "gdn": (False, True, 128, 128, 2, 32),
    "kda": (True, True, 128, 128, 1, 32),
    "mamba2": (False, False, 64, 128, 16, 128),
    "gdn-64x64": (False, True, 64, 64, 3, 24),
    "mamba2-80x128": (False, False, 80, 128, 16, 128),
    "mamba2-64x256": (False, False, 64, 256, 48, 48),
}
NAMES = {F32: "float", BF16: "bf16", F16: "f16"}


def case(shape: str, state_dtype: torch.dtype, batch_rows: int, *, window: bool = False) -> dict[str, str]:
    """What decode.cu leaves open, for bfloat16 activations and the rings that go with them."""
    updates = BF16 if state_dtype == BF16 else F32
    layer = blocks.Shape(*SHAPES[shape], 16, state_dtype, updates, window)
    block = blocks.choose(layer, BF16, batch_rows, **SM90)
    assert block is not None
    types = {"C": NAMES[state_dtype], "X": "bf16", "U": NAMES[updates], "A": "bf16"}
    types |= {"B": "bf16" if layer.delta else "none", "RATE": "float", "BIAS": "float"}
    types |= {"D": "none" if layer.delta else "float", "Z": "none"}
    flags = 64 | (1 if layer.delta else 2) | (128 if window else 0)
    return decode.macros(layer, block, types | {"FLAGS": flags, "FORCE_BYTES": 0})


def window_case(shape: str, state_dtype: torch.dtype, batch_rows: int, tokens: int) -> dict[str, str]:
    """The same for verify.cu, with trees."""
    layer = blocks.Shape(*SHAPES[shape], ring_rows=16 + tokens - 1, state_dtype=state_dtype)
    cut = windows.choose(layer, tokens, BF16, batch_rows, **SM90)
    assert cut is not None
    types = {"C": NAMES[state_dtype], "X": "bf16", "U": "bf16" if state_dtype == BF16 else "float", "K": "bf16"}
    types |= {"A": "bf16", "B": "bf16" if layer.delta else "none", "RATE": "float", "BIAS": "float"}
    types |= {"D": "none" if layer.delta else "float", "Z": "none" if layer.delta else "bf16"}
    rules = Rules(l2_norm=layer.delta, softplus=not layer.delta)
    return verify.macros(layer, cut, types, rules, tree=True, aligned=True)


def compile_with_nvcc(
    macros: dict[str, str], architecture: str, folder: Path, files: tuple[str, ...] = build.DECODE
) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills."""
    source = folder / "decode.cu"
    source.write_text(build.source(files))
    target = f"-gencode=arch=compute_{architecture[3:]},code={architecture}"
    options = ["-cubin", "-std=c++17", "--resource-usage", *(f"-D{name}={value}" for name, value in macros.items())]
    command = ["nvcc", target, *options, "-o", str(folder / "decode.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    return int(registers[0]), sum(map(int, spilled))


def thorough(architecture: str, shape: str, state_dtype: torch.dtype, rows: int) -> object:
    """CI has time for one case of each: the large blocks that a GPU of today runs, and one for each GPU to come."""
    often = architecture == "sm_90a" and rows == LARGE and shape in ("gdn", "kda", "mamba2")
    often |= architecture != "sm_90a" and (shape, state_dtype, rows) == ("gdn", BF16, LARGE)
    name = f"{architecture}-{shape}-{NAMES[state_dtype]}-{'large' if rows == LARGE else 'small'}"
    marks = [] if often and state_dtype != F16 else [pytest.mark.thorough]
    return pytest.param(architecture, shape, state_dtype, rows, marks=marks, id=name)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
@pytest.mark.parametrize(
    ("architecture", "shape", "state_dtype", "rows"),
    [
        thorough(architecture, shape, state_dtype, rows)
        for architecture in ("sm_90a", "sm_100a", "sm_120a")
        for shape in SHAPES
        for state_dtype in (F32, BF16, F16)
        for rows in (LARGE, SMALL)
    ],
)
def test_kernels_compile_without_spills(
    architecture: str, shape: str, state_dtype: torch.dtype, rows: int, tmp_path: Path
) -> None:
    macros = case(shape, state_dtype, rows)
    registers, spilled = compile_with_nvcc(macros, architecture, tmp_path)
    print(f"\n{architecture} {shape} {state_dtype}: {registers} registers, {macros['CASE_ROWS']} rows")
    assert spilled == 0
    assert architecture != "sm_90a" or registers <= int(macros["CASE_REGISTERS"])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
@pytest.mark.parametrize(
    ("shape", "state_dtype", "rows"),
    [
        pytest.param(
            shape,
            state_dtype,
            rows,
            marks=[] if (shape, state_dtype, rows) == ("kda", BF16, MIDDLE) else [pytest.mark.thorough],
            id=f"{shape}-{NAMES[state_dtype]}-{name}",
        )
        for shape in SHAPES
        for state_dtype in (F32, BF16, F16)
        for name, rows in (("large", LARGE), ("middle", MIDDLE), ("small", SMALL))
    ],
)
def test_kernels_of_one_token_windows_compile_without_spills(
    shape: str, state_dtype: torch.dtype, rows: int, tmp_path: Path
) -> None:
    macros = case(shape, state_dtype, rows, window=True)
    registers, spilled = compile_with_nvcc(macros, "sm_90a", tmp_path)
    assert spilled == 0
    assert registers <= int(macros["CASE_REGISTERS"])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
@pytest.mark.parametrize(
    ("shape", "state_dtype"),
    [
        pytest.param(shape, dtype, marks=[] if (shape, dtype) == ("kda", F32) else [pytest.mark.thorough])
        for shape in SHAPES
        for dtype in (F32, BF16, F16)
    ],
)
@pytest.mark.parametrize("to_slots", [False, True])
def test_kernels_that_only_fold_compile_without_spills(
    shape: str, state_dtype: torch.dtype, to_slots: bool, tmp_path: Path
) -> None:
    layer = blocks.Shape(*SHAPES[shape], 16, state_dtype, BF16 if state_dtype == BF16 else F32, window=True)
    block = blocks.choose_fold(layer, BF16, LARGE, **SM90)
    assert block is not None
    macros = state.macros(layer, block, BF16, to_slots=to_slots)
    registers, spilled = compile_with_nvcc(macros, "sm_90a", tmp_path, build.FOLD)
    assert spilled == 0
    assert registers <= block.registers


def sometimes(architecture: str, shape: str, state_dtype: torch.dtype, rows: int, tokens: int) -> object:
    often = (shape, state_dtype, rows, tokens) in (("gdn", F32, LARGE, 4), ("kda", BF16, SMALL, 8))
    marks = [] if architecture == "sm_90a" and often else [pytest.mark.thorough]
    name = f"{architecture}-{shape}-{NAMES[state_dtype]}-{'large' if rows == LARGE else 'small'}-{tokens}"
    return pytest.param(architecture, shape, state_dtype, rows, tokens, marks=marks, id=name)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
@pytest.mark.parametrize(
    ("architecture", "shape", "state_dtype", "rows", "tokens"),
    [
        sometimes(architecture, shape, state_dtype, rows, tokens)
        for architecture in ("sm_90a", "sm_100a", "sm_120a")
        for shape in SHAPES
        for state_dtype in (F32, BF16, F16)
        for rows in (LARGE, SMALL)
        for tokens in (2, 4, 8, 16)
    ],
)
def test_verify_kernels_compile_without_spills(
    architecture: str, shape: str, state_dtype: torch.dtype, rows: int, tokens: int, tmp_path: Path
) -> None:
    macros = window_case(shape, state_dtype, rows, tokens)
    registers, spilled = compile_with_nvcc(macros, architecture, tmp_path, build.VERIFY)
    print(f"\n{architecture} {shape} {state_dtype}: {registers} registers, {macros['CASE_ROWS']} rows")
    assert spilled == 0
    assert architecture != "sm_90a" or registers <= int(macros["CASE_REGISTERS"])


def test_nvrtc_compiles_them_through_cuda_core() -> None:
    if build.missing_package():
        pytest.skip(build.missing_package())
    try:
        code = build.compile_source(case("gdn", F32, LARGE), "sm_90a")
    except build.BuildError as error:
        if "NotFound" in str(error):
            pytest.skip(f"no NVRTC: {error}")
        raise
    assert code.startswith(b"\x7fELF")
    assert b"replayssm_decode" in code


def test_source_that_does_not_compile_says_so_in_one_line() -> None:
    if build.missing_package():
        pytest.skip(build.missing_package())
    with pytest.raises(build.BuildError, match="^NVRTC can't compile the kernel for sm_90a: .*$") as error:
        build.compile_source({"CASE_CHANNEL": "maybe"}, "sm_90a")
    assert "\n" not in str(error.value)


# --- the cache

MACROS = {"CASE_ROWS": "128"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Architectures that were compiled for, with a compiler that gives its arguments' names, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[str] = []

    def fake(macros: dict[str, str], architecture: str, files: object) -> bytes:
        calls.append(architecture)
        return f"code of {macros} for {architecture}".encode()

    monkeypatch.setattr(build, "compile_source", fake)
    return calls


def test_what_was_compiled_once_is_taken_from_the_cache(compiled: list[str], tmp_path: Path) -> None:
    first = build.machine_code(MACROS, "sm_90a")
    assert build.machine_code(MACROS, "sm_90a") == first
    assert compiled == ["sm_90a"]
    (kept,) = (tmp_path / "replayssm").iterdir()
    assert kept.name == f"cuda-{build.fingerprint(MACROS, 'sm_90a')}.cubin"


@pytest.mark.parametrize("changed", ["source", "macros", "architecture"])
def test_source_options_and_architecture_decide_the_name(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.fingerprint(MACROS, "sm_90a")
    macros, architecture = MACROS, "sm_90a"
    if changed == "source":
        monkeypatch.setattr(build, "source", lambda *_: "another")
    elif changed == "macros":
        macros = {"CASE_ROWS": "64"}
    else:
        architecture = "sm_100a"
    assert build.fingerprint(macros, architecture) != before


def cut_short(kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:-1])


def empty(kept: Path) -> None:
    kept.write_bytes(b"")


def replaced(kept: Path) -> None:
    kept.write_bytes(b"\x7fELF" + bytes(200))


@pytest.mark.parametrize("spoil", [cut_short, empty, replaced])
def test_a_spoilt_file_is_compiled_again(spoil: Callable[[Path], None], compiled: list[str], tmp_path: Path) -> None:
    first = build.machine_code(MACROS, "sm_90a")
    (kept,) = (tmp_path / "replayssm").iterdir()
    whole = kept.read_bytes()
    spoil(kept)
    assert build.machine_code(MACROS, "sm_90a") == first
    assert kept.read_bytes() == whole
    assert len(compiled) == 2


def no_folder(cache: Path) -> None:
    cache.rmdir()
    cache.write_text("a file where a folder should be")


def read_only(cache: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("a superuser writes everywhere")
    cache.chmod(0o500)


def full(cache: Path) -> None:
    """As on a full disk: the file can be made, and not moved to its place."""
    (cache / "replayssm" / f"cuda-{build.fingerprint(MACROS, 'sm_90a')}.cubin").mkdir(parents=True)


@pytest.mark.parametrize("spoil", [no_folder, read_only, full])
def test_without_a_usable_cache_folder_each_process_compiles(
    spoil: Callable[[Path], None], compiled: list[str], tmp_path: Path
) -> None:
    spoil(tmp_path)
    first = build.machine_code(MACROS, "sm_90a")
    assert build.machine_code(MACROS, "sm_90a") == first
    assert len(compiled) == 2
    assert not list(tmp_path.glob("**/.building-*")) if tmp_path.is_dir() else True


def test_a_user_without_a_home_compiles_in_each_process(
    compiled: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.chdir(tmp_path)
    first = build.machine_code(MACROS, "sm_90a")
    assert build.machine_code(MACROS, "sm_90a") == first
    assert len(compiled) == 2
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_compiled_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[str] = []

    def refuse(macros: dict[str, str], architecture: str, files: object) -> bytes:
        tried.append(architecture)
        raise build.BuildError(f"no such thing as {architecture}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "compile_source", refuse)
    monkeypatch.setattr(build, "_refused", {})
    for architecture in ("sm_1", "sm_1", "sm_2", "sm_1"):
        with pytest.raises(build.BuildError, match=f"no such thing as {architecture}"):
            build.machine_code(MACROS, architecture)
    assert tried == ["sm_1", "sm_2"]


def test_without_cuda_core_the_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    assert build.missing_package() == "cuda-core is not installed, which compiles its kernels"


# --- a machine where a kernel can't be had


def test_a_kernel_that_cannot_be_compiled_is_told_once_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the triton backend on a GPU; here, emulated, by torch's."""
    emulated_cuda = pytest.importorskip("emulated_cuda")
    from oracle import Layer, relative_error

    from replayssm import ReplayPool

    emulated_cuda.install(monkeypatch)

    def kernel(*args: object) -> None:
        raise build.BuildError("NVRTC can't compile the kernel for sm_90a: out of order")

    monkeypatch.setattr(launch, "kernel", kernel)
    layer = Layer("gdn", 1, 1, 64, 64, backend="cuda")
    pool = ReplayPool([layer.spec], 1, ring_len=2, backend="cuda")
    slots = pool.slot_tensor(pool.alloc(1))
    state = layer.zero_state(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            inputs = layer.draw(1)
            y = layer.decode(inputs, **pool.state_args(0), slots=slots)
            pool.advance(slots)
            state, expected = layer.reference(inputs, state)
            assert relative_error(y, expected) < 1e-6
    (said,) = [str(warning.message) for warning in told]
    assert said.endswith("out of order. Decode steps run on the triton backend.")
    decode._plans.clear()
