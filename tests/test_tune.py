"""`replayssm tune`: what it chooses of given times, writes and says. A timer that looks times up stands for the GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import emulated_cuda
import pytest
import torch

from replayssm import ops, tuned
from replayssm.backends.cuda import blocks, build, decode, launch
from replayssm.backends.cuda.blocks import Block
from replayssm.bench.workload import SHAPES
from replayssm.cli import run
from replayssm.cli import tune as command
from replayssm.state import LayerSpec
from replayssm.tuned import TunedLayer
from replayssm.tuner import ahead, layers, measure
from replayssm.tuner.search import Call, Options, tune

F32, BF16 = torch.float32, torch.bfloat16
GPU = "NVIDIA Test 100"
ABOUT = launch.Properties(132, 227 * 1024, "sm_90a", GPU)
CALL = Call("gdn", SHAPES["gdn"], 64, F32, BF16, 16, F32)
USUAL = ahead.usual_block(CALL, ABOUT)
assert USUAL is not None
CUTS = [replace(USUAL, rows=16, warps=2), replace(USUAL, rows=32, warps=2)]

Times = Callable[[Call, Block | None], float | None]


@dataclass
class Table:
    """A timer that looks times up."""

    times: Times
    measured: list[tuple[Call, Block | None]]

    def cuts(self, call: Call) -> list[Block]:
        return CUTS

    def expect(self, asked: object) -> None:
        pass

    def microseconds(self, call: Call, cuts: Sequence[Block | None]) -> list[float | None]:
        self.measured += [(call, block) for block in cuts]
        return [self.times(call, block) for block in cuts]


def tuned_layer(times: Times, batches: tuple[int, ...] = (1, 64), **options: object) -> TunedLayer:
    given = {"layers": {"gdn": [SHAPES["gdn"]]}, "state_dtypes": (F32,), "activation_dtype": BF16, "ring_lens": (8, 16)}
    (layer,) = tune(Options(batches=batches, **{**given, **options}), Table(times, []))
    return layer


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({8: (4.0, 40.0), 16: (5.0, 50.0)}, 8),
        ({8: (4.0, 40.0), 16: (4.05, 40.5)}, 16),
        ({1: (3.0, 70.0), 8: (4.0, 40.0)}, 8),
        ({1: (3.0, 41.0), 8: (4.0, 40.0)}, 1),
        ({8: (4.0, None), 32: (5.0, 50.0)}, 32),
        ({8: (None, None), 32: (None, None)}, 16),
    ],
    ids=["the fastest", "the usual one, if as fast", "over all batches", "every step", "what runs", "nothing runs"],
)
def test_the_flush_period_is_the_fastest_over_the_batches(
    times: dict[int, tuple[float | None, float | None]], chosen: int
) -> None:
    def time_of(call: Call, block: Block | None) -> float | None:
        return times[call.ring_len][(1, 64).index(call.batch)] if call.ring_len in times else 9.0

    assert tuned_layer(time_of, ring_lens=tuple(times)).ring.ring_len == chosen


def test_the_ring_keeps_the_dtype_that_accuracy_wants_and_the_other_is_told() -> None:
    ring = tuned_layer(lambda call, block: 1.0 if call.ring_dtype is BF16 else 2.0, ring_lens=(8, 16)).ring
    assert (ring.ring_len, ring.ring_dtype) == (16, "float32")
    assert ring.us == {"8 float32": [2.0, 2.0], "16 float32": [2.0, 2.0], "16 bfloat16": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ((10.0, 9.0, 8.0), 1),
        ((10.0, 9.7, 12.0), 0),
        ((10.0, 9.9, 12.0), None),
        ((10.0, None, 9.0), 1),
        ((10.0, None, None), None),
    ],
    ids=["the fastest", "a little faster", "within the noise", "one that fails", "all fail"],
)
def test_a_cut_is_chosen_if_it_is_clearly_faster(times: tuple[float | None, ...], chosen: int | None) -> None:
    layer = tuned_layer(lambda call, block: times[[None, *CUTS].index(block)], batches=(64,))
    (cut,) = layer.cuts
    assert cut.us_untuned == 10.0
    assert cut.us == (10.0 if chosen is None else times[chosen + 1])
    block = {} if chosen is None else {name: int(x) for name, x in vars(CUTS[chosen]).items()}
    assert cut.block == block


def test_cuts_are_measured_with_the_flush_period_that_was_chosen() -> None:
    timer = Table(lambda call, block: 1.0 if call.ring_len == 4 else 2.0, [])
    seen: list[Call] = []
    options = Options(
        layers={"gdn": [SHAPES["gdn"]], "kda": [SHAPES["kda"]]},
        batches=(1, 8),
        state_dtypes=(F32, BF16),
        activation_dtype=BF16,
        ring_lens=(4, 16),
    )
    assert len(tune(options, timer, seen.append)) == 4
    assert {call.ring_len for call, block in timer.measured if block is not None} == {4}
    assert len(seen) == options.num_steps


def test_a_step_that_cannot_be_measured_has_no_cut() -> None:
    assert tuned_layer(lambda call, block: None).cuts == ()


# --- kernels that are compiled ahead


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_what_is_compiled_ahead_is_what_a_step_asks_for(
    kind: str, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The macros of the kernel that the operator plans on the tensors that are measured."""
    from replayssm.bench.contenders import Ours
    from replayssm.bench.workload import Workload
    from replayssm.ops import dispatch

    asked: list[dict[str, str]] = []

    def kernel(macros: tuple[tuple[str, str], ...], *rest: object) -> None:
        asked.append(dict(macros))
        raise build.BuildError("that was all")

    monkeypatch.setattr(dispatch, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "properties", lambda device: ABOUT)
    monkeypatch.setattr(launch, "triton", lambda: __import__("replayssm.backends.torch").backends.torch)
    decode._plans.clear()
    call = Call(kind, SHAPES[kind], 1, state_dtype, BF16, 4, F32 if state_dtype is F32 else BF16)
    workload = Workload(kind, SHAPES[kind], 1, state_dtype, 4, BF16, torch.device("cpu"), 1)
    with pytest.warns(RuntimeWarning, match="that was all"):
        Ours("cuda").prepare(workload).steps[0]()
    decode._plans.clear()
    assert asked == [ahead.macros_of(call, None, ABOUT)]


def test_cuts_worth_measuring_divide_the_layer_and_fit() -> None:
    for kind, spec in SHAPES.items():
        for state_dtype in (F32, BF16):
            shape = Call(kind, spec, 64, state_dtype, BF16, 16, F32).shape
            found = blocks.candidates(shape, BF16, ABOUT.shared_bytes)
            assert len(found) > 3
            assert len(set(found)) == len(found)
            assert all(block.fits(shape) for block in found)
            assert all(block.shared_bytes(shape, BF16) <= ABOUT.shared_bytes for block in found)


# --- the GPU's timer, on the emulated kernels


@pytest.mark.skipif(emulated_cuda.missing() is not None, reason=str(emulated_cuda.missing()))
def test_each_cut_that_is_right_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can't be compiled, for which another backend would step, has none, nor has one that the GPU refuses."""
    emulated_cuda.install(monkeypatch)
    monkeypatch.setattr(measure, "free_bytes", lambda device: 10**9)
    call = Call("gdn", LayerSpec("head", "delta", 1, 1, 64, 32), 1, F32, F32, 1, F32)
    about = launch.Properties(1, 227 * 1024, "cpu")
    usual = ahead.usual_block(call, about)
    assert usual is not None
    smaller, unknown, refused = (replace(usual, rows=rows, warps=2) for rows in (16, 32, 32))
    unknown, refused = replace(unknown, registers=1), replace(refused, registers=2)
    made: list[Block] = []

    def kernel(macros: tuple[tuple[str, str], ...], block: Block, *rest: object) -> object:
        made.append(block)
        if block == unknown:
            raise build.BuildError("no such cut")
        start = emulated_cuda.kernel(macros, block, *rest)

        def refuse(*given: object) -> None:
            raise RuntimeError("the driver can't start it")

        return refuse if block == refused else start

    monkeypatch.setattr(launch, "kernel", kernel)
    timer = measure.GpuTimer(torch.device("cpu"), SimpleNamespace(about=about), replays=2)
    with pytest.warns(RuntimeWarning, match="no such cut"):
        times = timer.microseconds(call, [None, smaller, unknown, refused])
    assert [us is not None for us in times] == [True, True, False, False]
    assert set(made) == {usual, smaller, unknown, refused}
    assert usual not in timer.cuts(call)
    assert timer.cuts(call)


# --- layers of a model


def test_a_models_layers_are_found_from_its_config_alone(tmp_path: Path) -> None:
    assert layers.layers_of("qwen3_5-tiny") == {"gdn": [LayerSpec("head", "delta", 2, 4, 64, 64)]}
    assert layers.layers_of("granite_hybrid-tiny") == {"mamba2": [LayerSpec("head", "additive", 1, 6, 128, 64)]}
    config = Path(__file__).parent.parent / "benchmarks" / "configs" / "qwen3_5-4b.json"
    assert layers.layers_of(str(config)) == {"gdn": [SHAPES["gdn"]]}


def test_layers_without_kernels_are_left_out() -> None:
    odd = LayerSpec("head", "delta", 1, 1, 96, 192)
    found, notes = layers.with_kernels({"gdn": [odd, SHAPES["gdn"]], "mamba2": [replace(odd, rule="additive")]})
    assert found == {"gdn": [SHAPES["gdn"]]}
    assert notes[0] == "gdn k1 v1 192x96 is left out: d_k is 96: its kernels are for 64, 128, 256"
    assert len(notes) == 2


# --- the command


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Table]:
    """One with a GPU that the table's times are of."""
    timer = Table(lambda call, block: {CUTS[0]: 8.0, CUTS[1]: 9.0}.get(block, 10.0), [])

    @contextmanager
    def gpu_timer(replays: int) -> Iterator[tuple[Table, dict[str, str]]]:
        yield timer, {"torch": "2.11"}

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "check_gpu", lambda: GPU)
    monkeypatch.setattr(command, "gpu_timer", gpu_timer)
    tuned.forget()
    yield timer
    tuned.forget()


def test_the_result_is_kept_for_the_next_process(machine: Table, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--batch", "8,64", "--state-dtype", "bfloat16", "--ring-len", "8,16"]) == 0
    out = capsys.readouterr().out
    assert "gdn k16 v32 128x128 bfloat16: L = 16, updates in bfloat16" in out
    assert f"{CUTS[0].rows}×{CUTS[0].warps}" in out
    assert "25 %" in out
    assert str(tuned.own_file(GPU)) in out.replace("\n", "")
    found = tuned.layer_of(GPU, tuned.Shape("gdn", 16, 32, 128, 128, "bfloat16", "bfloat16"))
    assert found is not None
    assert [(cut.batch, cut.us, cut.us_untuned) for cut in found[0].cuts] == [(8, 8.0, 10.0), (64, 8.0, 10.0)]


def test_json_is_the_file_and_nothing_else(machine: Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "measured.json"
    assert run(["tune", "--quick", "--json", "--model", "kimi_linear-tiny", "--output", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())
    (first, _) = tuned.parse(path.read_text()).layers
    assert str(first.shape) == "kda k4 v4 64x64 float32"
    assert {call.batch for call, _ in machine.measured} == {1, 8, 64, 256}


def test_without_such_a_gpu_it_says_why_there_is_nothing_to_tune(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "unavailable_reason", lambda backend: "torch sees no GPU")
    assert run(["tune"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("replayssm: error: there is nothing to tune here")
    assert said.endswith("kernels have settings: torch sees no GPU\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "batch is '0': whole numbers from 1 to 4096"),
        (["--state-dtype", "int8"], "state-dtype is 'int8': it must be one of"),
        (["--dtype", "float32,bfloat16"], "dtype is 'float32,bfloat16': one of float32"),
        (["--ring-len", "x"], "ring-len is 'x': whole numbers"),
        (["--model", "no-such-model"], "a bundled model: give a folder with config.json, a config's .json file, or"),
        (["--output", "."], "output is '.', which is a folder"),
        (["--output", "pyproject.toml/tuned.json"], "can't be written"),
    ],
)
def test_bad_options_are_told_before_anything_is_measured(
    options: list[str], message: str, machine: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", *options]) == 2
    assert message in capsys.readouterr().err
    assert machine.measured == []
