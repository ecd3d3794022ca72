"""`replayssm bench`: contenders are checked before they are timed, walks are fair, tables say what was measured."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rival_stubs import SMALL, files_in, small_bench

from benchmarks import rivals as fetch
from benchmarks import tables
from replayssm.bench import decode, measure, report
from replayssm.bench.check import first_step_errors
from replayssm.bench.contenders import Ours, Prepared
from replayssm.bench.rivals import common, loading
from replayssm.bench.rivals.projects import PROJECTS, SGLANG, VLLM, VLLM_FORK
from replayssm.bench.timing import WARM_UP, Phases, time_in_turns
from replayssm.bench.upstream import Upstream
from replayssm.bench.workload import KINDS, SHAPES, Workload, num_calls

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def small(kind: str, batch: int = 3, ring_len: int = 4, state_dtype: torch.dtype = torch.float32) -> Workload:
    calls = num_calls(batch, [ring_len], 1, 1)
    return Workload(kind, SMALL[kind], batch, state_dtype, ring_len, torch.float32, CPU, calls)


def gpu_options(kinds, batches, state_dtypes):
    shared = {"kinds": kinds, "batches": batches, "state_dtypes": state_dtypes}
    return decode.DecodeOptions(**shared, ring_lens=(16,), device=torch.device("cuda"), replays=3)


def measure_at(workload, contenders):
    return measure.measure([(workload, contender) for contender in contenders], 3, 1e9)


# Walks


@pytest.mark.parametrize("batch", [1, 3, 8, 32, 512])
@pytest.mark.parametrize("ring_lens", [(1,), (16,), (16, 8, 32), (3, 5)])
def test_a_walk_has_as_many_rows_at_each_phase(batch, ring_lens):
    calls = num_calls(batch, ring_lens, state_bytes=7, working_set=100)
    assert calls * 7 >= 100
    for ring_len in ring_lens:
        cursors = Workload("gdn", SMALL["gdn"], batch, torch.float32, ring_len, torch.float32, CPU, calls).cursors()
        counts = Counter(cursors.flatten().tolist())
        assert counts == dict.fromkeys(range(ring_len), calls * batch // ring_len)


def test_a_gpu_walk_is_far_larger_than_the_cache():
    for kind in KINDS:
        for batch in (1, 512):
            options = gpu_options((kind,), (batch,), (torch.bfloat16,))
            ((workload, _),) = next(decode.points(options, [Ours("triton")]))
            heads, d_v, d_k = workload.spec.checkpoint_shape
            assert workload.num_slots * heads * d_v * d_k * 2 >= 400e6
            assert workload.calls >= 4


def test_bytes_of_a_call_are_checkpoint_flushes_and_records():
    work = Workload("gdn", SHAPES["gdn"], 2, torch.float32, 16, torch.bfloat16, CPU, 8)
    state, record = 32 * 128 * 128 * 4, 32 * 128 * 4 + 16 * 128 * 2 + 32 * 4
    assert work.bytes_moved(has_ring=True) == 2 * (state * 17 / 16 + record * (7.5 + 15 / 16))
    assert work.bytes_moved(has_ring=False) == 2 * 2 * state


# Contenders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_our_steps_and_transformers_are_right(kind, batch):
    for contender in (Ours("torch"), Upstream()):
        output_error, state_error = first_step_errors(small(kind, batch), contender.prepare(small(kind, batch)))
        assert 0 < output_error < 1e-6, contender.name
        assert 0 < state_error < 1e-6, contender.name


@dataclass(frozen=True)
class Spoiled:
    """Our step, with something wrong in what it leaves."""

    name: str
    spoil: object
    has_ring: bool = True

    def takes(self, workload):
        return True

    def prepare(self, workload):
        prepared = Ours("torch").prepare(workload)
        return replace(prepared, **self.spoil(prepared))


def half(y: torch.Tensor) -> torch.Tensor:
    return y * 0.5


def with_nan(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[-1, 0, 0] = float("nan")
    return y


def spoiled_outputs(change):
    return lambda prepared: {"steps": [lambda step=step: change(step()) for step in prepared.steps]}


def unwritten_state(prepared):
    before = {}

    def state(call, rows):
        key = (call, *rows.tolist())
        return before.setdefault(key, prepared.state(call, rows).clone())

    everything = torch.arange(3)
    for call in range(len(prepared.steps)):
        for row in everything.split(1):
            state(call, row)
        state(call, everything)
    return {"state": state}


@pytest.mark.parametrize(
    "contender",
    [
        Spoiled("wrong outputs", spoiled_outputs(half)),
        Spoiled("a NaN in the outputs", spoiled_outputs(with_nan)),
        Spoiled("no flush", unwritten_state),
    ],
    ids=lambda contender: contender.name,
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_contender_is_reported_and_not_timed(kind, contender):
    wrong, right = measure_at(small(kind), [contender, Ours("torch")])
    assert wrong["us"] is None
    assert wrong["error"].startswith("wrong")
    json.dumps(wrong, allow_nan=False)
    assert right["us"] > 0
    assert "error" not in right


def test_a_contender_that_raises_does_not_stop_the_others():
    def fail(_):
        raise RuntimeError("out of\nregisters")

    failed, right = measure_at(small("gdn"), [Spoiled("fails", fail), Ours("torch")])
    assert failed["error"] == "RuntimeError: out of registers"
    assert right["us_p10"] <= right["us"] <= right["us_p90"]


def test_a_contender_without_a_ring_is_measured_once_for_all_ring_lens():
    options = decode.DecodeOptions(
        kinds=("gdn",),
        batches=(2,),
        state_dtypes=(torch.float32,),
        ring_lens=(4, 2),
        device=CPU,
        replays=2,
        shapes=SMALL,
    )
    sizes = []
    points = decode.points(options, [Ours("torch"), Upstream()])
    result = measure.run(options, points, lambda result: sizes.append(len(result["rows"])))
    assert sizes == [2, 3]
    assert [(r["contender"], r["ring_len"]) for r in result["rows"]] == [
        ("replayssm/torch", 4), ("transformers/torch", None), ("replayssm/torch", 2),
    ]  # fmt: skip


# Time


def test_walks_take_turns():
    order = []
    times = time_in_turns([lambda: order.append("a"), lambda: order.append("b")], 4, CPU)
    assert order == ["a", "b"] * (4 + WARM_UP)
    assert [len(t) for t in times] == [4, 4]


def test_the_fastest_launch_setting_is_timed():
    tiles = []
    chosen = {"slow": 300_000, "fast": 10, "middle": 50_000}

    class Tile:
        def __init__(self, size):
            self.size = size

        def __enter__(self):
            tiles.append(self.size)

        def __exit__(self, *_):
            tiles.pop()

    sizes = iter(chosen.values())

    def record(walk, device):  # as a graph does: what the setting was is kept
        size = next(sizes)
        return lambda: sum(range(size))

    prepared = Prepared(
        [lambda: torch.zeros(1)], lambda *_: None, None, {n: lambda s=s: Tile(s) for n, s in chosen.items()}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "recorded", record)
        name, _ = measure._best_setting(small("gdn"), prepared, Phases(CPU))
    assert name == "fast"
    assert tiles == []


# Rivals


@pytest.fixture
def folder(tmp_path):
    yield from files_in(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rivals_get_the_workload_in_their_own_terms(folder, kind, state_dtype):
    pytest.importorskip("triton")
    found, notes = common.found_in(folder, decode.RIVALS)
    assert notes == []
    shared = {"kinds": (kind,), "batches": (8,), "state_dtypes": (state_dtype,), "device": CPU, "shapes": SMALL}
    (taking_part,) = decode.points(decode.DecodeOptions(**shared, ring_lens=(4,)), found)
    assert {contender.has_ring for _, contender in taking_part} == {True, False}
    for workload, contender in taking_part:
        assert workload.op == f"{kind}_decode"
        output_error, state_error = first_step_errors(workload, contender.prepare(workload))
        assert output_error < 1e-6, contender.name
        assert state_error < (1e-6 if state_dtype == torch.float32 else 4e-3), contender.name


def test_a_rivals_launch_settings_all_run(folder):
    pytest.importorskip("triton")
    for contender in common.found_in(folder, decode.RIVALS)[0]:
        workload = common.as_taken(contender, small(contender.kinds[0], batch=8))
        prepared = contender.prepare(workload)
        has_choice = contender.has_ring or (contender.kinds == ("mamba2",) and contender.name != "mamba/stateless")
        assert (len(prepared.settings) > 1) == has_choice
        for setting in prepared.settings.values():
            with setting():
                assert prepared.steps[0]().isfinite().all()


def test_a_rival_takes_what_its_project_would_give_it(folder):
    (cuda,) = (c for c in common.found_in(folder, decode.RIVALS)[0] if c.name == "sglang/cuda")
    assert cuda.takes(small("kda", batch=8))
    assert not cuda.takes(small("kda", batch=4))
    assert not cuda.takes(small("gdn", batch=8))
    assert not cuda.takes(small("kda", batch=8, state_dtype=torch.bfloat16))


def test_two_versions_of_a_package_are_loaded_beside_each_other(folder):
    pytest.importorskip("triton")
    name = "vllm.model_executor.layers.mamba.ops.replayssm_config"
    for project, number in ((VLLM, 1), (VLLM_FORK, 2)):
        path = folder / project.within / f"{name.replace('.', '/')}.py"
        path.write_text(f"NUMBER = {number}\ndef later():\n    from vllm import logger\n    return logger")
    one, two = loading.load(VLLM, folder, name), loading.load(VLLM_FORK, folder, name)
    assert (one.NUMBER, two.NUMBER) == (1, 2)
    assert loading.load(VLLM, folder, name) is one
    assert one.later().init_logger("x")
    assert loading.load(VLLM_FORK, folder, name) is two


def test_a_rival_that_is_not_there_is_said_with_how_to_get_it(folder, tmp_path):
    (folder / SGLANG.files[1]).unlink()
    found, (note,) = common.found_in(folder, decode.RIVALS)
    assert {contender.name.split("/")[0] for contender in found} == {"vllm", "vllm-fork", "mamba", "fla", "flashinfer"}
    assert SGLANG.files[1] in note
    assert "python -m benchmarks.rivals sglang" in note
    assert [len(x) for x in common.found_in(None, decode.RIVALS)] == [0, len(PROJECTS)]


def test_an_installed_project_is_not_shadowed(folder):
    pytest.importorskip("triton")
    sys.modules["sglang"] = type(sys)("sglang")
    with pytest.raises(loading.RivalError, match="imported already, from elsewhere"):
        loading.load(SGLANG, folder, "sglang.kernels")


def test_a_rivals_file_that_does_not_import_is_one_error(folder):
    pytest.importorskip("triton")
    (folder / SGLANG.files[0]).write_text("import a_package_that_is_not_there\n")
    packed = next(c for c in common.found_in(folder, decode.RIVALS)[0] if c.name == "sglang/packed")
    (row,) = measure_at(small("gdn"), [packed])
    assert "a_package_that_is_not_there" in row["error"]


def test_fetching_takes_the_files_from_a_wheel_and_from_a_checkout(folder, tmp_path, capsys):
    into = tmp_path / "into"
    for project in PROJECTS:
        if not project.wheel:
            source = ["--checkout", str(folder)]
        else:
            wheel = tmp_path / f"{project.package}-{project.version}-cp312-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for name in (*project.files, f"{project.package}/__init__.py"):
                    archive.writestr(f"{name}inside.h" if name.endswith("/") else name, "")
            source = ["--wheel", str(wheel)]
        assert fetch.main([project.name, *source, "--into", str(into)]) == 0
    assert common.found_in(into, decode.RIVALS)[1] == []
    assert SGLANG.version_in(into) == "0.5.23"
    assert (into / "sglang/kernels/jit/include/inside.h").is_file()
    assert not (into / "sglang" / "__init__.py").exists()


def test_what_nothing_can_be_fetched_from_is_named_with_what_is_wanted(tmp_path, capsys):
    renamed, nothing = tmp_path / "sglang.whl", tmp_path / "nothing"
    with zipfile.ZipFile(renamed, "w") as archive:
        for name in SGLANG.files:
            archive.writestr(f"{name}inside.h" if name.endswith("/") else name, "")
    whole = f"a whole file sglang-{SGLANG.version}-*.whl is wanted"
    for arguments, why in (
        (["vllm-fork", "--checkout", str(nothing)], f"checkout is '{nothing}', which is not a folder"),
        (["vllm-fork", "--checkout", str(tmp_path)], "a checkout of Johnny-Liou/ReplaySSM"),
        (["sglang", "--wheel", str(nothing)], f"wheel is '{nothing}', which is not a file"),
        (["sglang", "--wheel", __file__], f"wheel is '{__file__}': {whole}"),
        (["sglang", "--wheel", str(renamed)], f"wheel is '{renamed}': {whole}"),
    ):
        assert fetch.main([*arguments, "--into", str(tmp_path / "into")]) == 1
        assert why in capsys.readouterr().err


# Reports

ROW = {"op": "gdn_decode", "window": 1, "shape": "k2 v4 8x16", "state_dtype": "bfloat16", "roofline_us": 5.0}


def row(contender: str, ring_len: int | None, us: float | None, batch: int = 8, **more: object) -> dict[str, object]:
    return {**ROW, "contender": contender, "batch": batch, "ring_len": ring_len, "us": us, **more}


ROWS = [
    row("replayssm/cuda", 16, 10.0),
    row("replayssm/triton", 16, 20.0),
    row("peer/replay", 16, 15.0),
    row("peer/plain", None, 30.0),
    row("replayssm/cuda", 8, 12.0),
    row("replayssm/triton", 8, None, error="wrong: outputs off by 3"),
    row("peer/replay", 8, None, error="RuntimeError: out of registers"),
    row("peer/plain", None, None, batch=1),
]
META = {"gpu": "A GPU", "read_tbps": 4.5, "torch": "2.11", "date": "2026-11-30", "commit": "abc", "rivals": {}}


def test_a_table_has_ratios_first_and_our_fastest_counts():
    table = report.OperatorTable("gdn_decode", ROWS)
    assert table.header[:6] == ["state", "L", "B", "× peer/replay", "× peer/plain", "roofline"]
    assert table.header[6:] == ["replayssm/cuda µs", "replayssm/triton µs", "peer/replay µs", "peer/plain µs"]
    assert list(table.lines()) == [
        ["bf16", "8", "8", "–", "2.50", "0.42", "12.0", "wrong", "RuntimeError", "30.0"],
        ["bf16", "16", "8", "1.50", "3.00", "0.50", "10.0", "20.0", "15.0", "30.0"],
    ]
    assert len(list(report.failures(ROWS))) == 2


def test_a_table_without_ours_has_times_alone():
    table = report.OperatorTable("gdn_decode", [row for row in ROWS if "peer" in row["contender"]])
    assert table.header == ["state", "L", "B", "peer/replay µs", "peer/plain µs"]
    assert list(table.lines()) == [
        ["bf16", "–", "1", "–", "not timed"],
        ["bf16", "–", "8", "–", "30.0"],
        ["bf16", "8", "8", "RuntimeError", "30.0"],
        ["bf16", "16", "8", "15.0", "30.0"],
    ]


@pytest.fixture
def results(tmp_path):
    report.write({"meta": META, "rows": ROWS}, tmp_path / "gpu" / "decode.json")
    return tmp_path


def test_a_result_file_has_a_row_on_each_line(results):
    lines = (results / "gpu" / "decode.json").read_text().splitlines()
    assert len(lines) == len(ROWS) + 3
    assert json.loads("\n".join(lines)) == {"meta": META, "rows": ROWS}


def test_a_marked_place_is_filled_from_the_results(results):
    text = "before\n<!-- table: gpu/decode op=gdn_decode ring_len=16 -->\nold\n<!-- end of table -->\nafter\n"
    new = tables.filled(text, results)
    assert "| bf16 | 16 | 8 | 1.50 | 3.00 | 0.50 | 10.0 | 20.0 | 15.0 | 30.0 |" in new
    assert "A GPU, read bandwidth 4.5 TB/s" in new
    assert "old" not in new
    assert "| 8 | 8 |" not in new
    assert new.startswith("before\n")
    assert new.endswith("<!-- end of table -->\nafter\n")
    assert tables.filled(new, results) == new


@pytest.mark.parametrize("mark", ["cpu/decode", "gpu/decode op=kda_decode", "gpu/decode colour=red"])
def test_a_mark_without_results_is_refused(results, mark):
    with pytest.raises(tables.TableError, match="no"):
        tables.filled(f"<!-- table: {mark} -->\n<!-- end of table -->\n", results)


def test_the_documents_tables_are_what_the_results_say():
    assert tables.main(["--check"]) == 0
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(tables.PLACE.findall(text)) == text.count("<!-- table:") + text.count("<!-- targets:") >= 4


def test_a_number_changed_by_hand_is_found(tmp_path, capsys):
    document = tmp_path / "benchmarks.md"
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    document.write_text(text.replace("| fp32 | 16 |", "| fp32 | 16 | 9", 1))
    assert tables.main(["--check", str(document)]) == 1
    assert tables.main([str(document)]) == 0
    assert document.read_text() == text
    assert "out of date: benchmarks.md" in capsys.readouterr().out


# The command


@pytest.fixture
def bench(monkeypatch, capfd):
    return small_bench(monkeypatch, capfd, before="decode --device cpu")


def test_the_command_prints_one_json_object(bench, tmp_path):
    file = tmp_path / "new" / "decode.json"
    code, out, _ = bench("--batch", "1,3", "--ring-len", "4", "--replays", "3", "--json", "--output", str(file))
    result = json.loads(out)
    assert code == 0
    assert json.loads(file.read_text()) == result
    assert {r["op"] for r in result["rows"]} == {f"{kind}_decode" for kind in KINDS}
    assert {r["contender"] for r in result["rows"]} >= {"replayssm/torch", "transformers/torch"}
    assert all(r["us"] > 0 and r["rel_err"] < 1e-6 for r in result["rows"])
    documented = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"`{key}`" in documented for r in result["rows"] for key in r)


def test_the_command_prints_a_table_for_each_layer(bench):
    code, out, _ = bench("--op", "gdn,mamba2", "--batch", "2", "--ring-len", "2", "--replays", "2")
    assert code == 0
    assert out.count("one step of one layer") == 2
    assert "Kimi" not in out
    assert "× says how many times" in out
    assert "/ decode is" not in out


@pytest.mark.parametrize(("contender", "legend"), [("transformers", False), ("replayssm/torch", True)])
def test_a_legend_explains_columns_that_are_there(bench, contender, legend):
    few = ("--op", "gdn", "--batch", "1", "--ring-len", "2", "--replays", "2")
    code, out, _ = bench(*few, "--contender", contender)
    assert code == 0
    assert re.search(r"fp32 │ +(2|–) │ +1 │", out)
    assert "×" not in out
    assert ("roofline is ours" in out) == legend


def test_a_wrong_contender_of_ours_is_exit_code_1(bench, monkeypatch):
    monkeypatch.setattr(measure, "LARGEST_ERROR", 0.0)
    code, out, err = bench("--op", "gdn", "--batch", "1", "--ring-len", "2", "--replays", "2")
    assert code == 1
    assert "wrong" in out
    assert "replayssm/torch gdn_decode float32 B=1 L=2: wrong" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "rwkv"], "op is 'rwkv': it must be one of gdn, kda, mamba2"),
        (["--op", "gdn,all"], "op is 'all': it must be one of gdn, kda, mamba2"),
        (["--batch", "0"], "batch is '0': whole numbers from 1 to 4096 are wanted"),
        (["--batch", "1,two"], "batch is 'two': whole numbers from 1 to 4096 are wanted"),
        (["--batch", "9" * 5000], "batch is '9"),
        (["--batch", "²"], "batch is '²': whole numbers"),
        (["--batch", ","], "batch is empty: values separated by commas are wanted"),
        (["--ring-len", "4097"], "ring-len is '4097': whole numbers from 1 to 4096 are wanted"),
        (["--replays", "3,4"], "replays is '3,4': one number is wanted"),
        (["--state-dtype", "int8"], "state-dtype is 'int8': it must be one of float32, bfloat16, float16"),
        (["--device", "tpu"], "device is 'tpu': it must be one of auto, cpu, cuda"),
        (["--rivals", "nowhere"], "rivals is 'nowhere', which is not a folder: docs/benchmarks.md says how to fill"),
        (["--output", "."], "output is '.', which is a folder: a file is wanted"),
    ],
    ids=lambda value: " ".join(value)[:24] if isinstance(value, list) else "",
)
def test_bad_options_are_one_line_and_exit_code_2(bench, arguments, message):
    code, out, err = bench(*arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_said_in_one_line(bench):
    code, _, err = bench("--device", "cuda")
    assert (code, err) == (2, "replayssm: error: device is 'cuda', but torch sees no GPU: use cpu or auto\n")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_our_kernels_are_right_and_timed_on_a_gpu(kind):
    options = gpu_options((kind,), (1, 8), (torch.float32, torch.bfloat16))
    contenders, _ = decode.contenders_of(options)
    rows = measure.run(options, decode.points(options, contenders))["rows"]
    assert len(rows) == 4 * len(contenders)
    assert all(r["us"] > 0 for r in rows)
