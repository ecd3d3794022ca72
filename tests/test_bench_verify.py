"""`replayssm bench verify`: windows are checked token by token, walks are fair, rivals and decode stand beside ours."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rival_stubs import SMALL, files_in, small_bench

from benchmarks import tables
from replayssm.bench import ahead, decode, measure, report, verify
from replayssm.bench.check import first_step_errors
from replayssm.bench.contenders import Ours, OurWindows
from replayssm.bench.rivals import common
from replayssm.bench.rivals.sglang_windows import ReservedWindows
from replayssm.bench.workload import KINDS, SHAPES, WindowWorkload, num_calls

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def small(kind: str, tokens: int, batch: int = 3, state_dtype: torch.dtype = torch.float32) -> WindowWorkload:
    calls = num_calls(batch, [16 // tokens], 1, 1)
    return WindowWorkload(kind, SMALL[kind], batch, state_dtype, 16, torch.float32, CPU, calls, tokens)


def options(**more: object) -> verify.VerifyOptions:
    shared = {"kinds": ("gdn",), "batches": (2,), "state_dtypes": (torch.float32,), "windows": (1, 4), "device": CPU}
    return verify.VerifyOptions(**{**shared, "replays": 2, "shapes": SMALL, **more})


# Walks


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_cursors_are_those_of_accepted_windows_and_each_as_frequent(tokens, batch):
    work = small("gdn", tokens, batch)
    counts = Counter(work.cursors().flatten().tolist())
    cursor, visited = 0, set()
    for _ in range(5 * 16 // tokens):  # a chain of windows, all accepted, folding when there is no room
        cursor = tokens if cursor + tokens > work.ring_rows else cursor + tokens
        visited.add(cursor)
    assert set(counts) == visited
    assert len(set(counts.values())) == 1
    assert work.flushes(work.cursors()).sum() * 16 == work.num_slots * tokens


def test_bytes_of_a_window_are_checkpoint_folds_and_records():
    work = WindowWorkload("gdn", SHAPES["gdn"], 2, torch.float32, 16, torch.bfloat16, CPU, 8, 4)
    state, record = 32 * 128 * 128 * 4, 32 * 128 * 4 + 16 * 128 * 2 + 32 * 4
    assert work.bytes_moved(has_ring=True) == 2 * (state * 20 / 16 + record * ((4 + 8 + 12 + 16) / 4 + 4))
    assert work.bytes_moved(has_ring=False) == 2 * 5 * state


# Contenders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_our_windows_are_right(kind, tokens):
    work = small(kind, tokens)
    output_error, state_error = first_step_errors(work, OurWindows("torch").prepare(work))
    assert 0 < output_error < 1e-6
    assert 0 < state_error < 1e-6


class LastTokenDoubled(OurWindows):
    """Our window with the output of one token changed."""

    def prepare(self, workload):
        prepared = super().prepare(workload)

        def changed(step):
            y = step()
            y[:, -1] *= 2
            return y

        return replace(prepared, steps=[lambda step=step: changed(step) for step in prepared.steps])


class FoldUnseen(OurWindows):
    """Our window with a state in which nothing was written."""

    def prepare(self, workload):
        prepared = super().prepare(workload)
        before = workload.checkpoint()
        return replace(prepared, state=lambda call, rows: before[call * workload.batch + rows])


@pytest.mark.parametrize("contender", [LastTokenDoubled("torch"), FoldUnseen("torch")], ids=["token", "state"])
def test_a_wrong_window_is_reported_and_not_timed(contender):
    work = small("gdn", 4)
    wrong, right = measure.measure([(work, contender), (work, OurWindows("torch"))], 2, 1e9)
    assert wrong["us"] is None
    assert wrong["error"].startswith("wrong")
    assert right["us"] > 0


@pytest.fixture
def folder(tmp_path):
    yield from files_in(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rivals_get_the_window_in_their_own_terms(folder, kind, tokens, state_dtype):
    pytest.importorskip("triton")
    found, notes = common.found_in(folder, verify.RIVALS)
    assert notes == []
    options_ = options(kinds=(kind,), windows=(tokens,), state_dtypes=(state_dtype,), batches=(3,))
    (taking_part,) = verify.points(options_, found)
    names = {"gdn": ["vllm-fork/replay", "vllm/native", "sglang/replay"]}
    names["kda"] = ["sglang/fold"]
    names["mamba2"] = ["vllm-fork/replay", "vllm/native", "flashinfer/replay"]
    assert [contender.name for _, contender in taking_part] == names[kind]
    for work, contender in taking_part:
        prepared = contender.prepare(work)
        output_error, state_error = first_step_errors(work, prepared)
        rounds_between = state_dtype == torch.bfloat16 and not contender.has_ring and tokens > 1
        assert output_error < (1e-2 if rounds_between else 1e-6), contender.name
        assert state_error < (1e-6 if state_dtype == torch.float32 else 1e-2), contender.name
        for setting in prepared.settings.values():
            with setting():
                assert prepared.steps[0]().isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_sglangs_ring_keeps_room_for_two_windows(tokens):
    work = ReservedWindows.of(small("gdn", tokens))
    counts = Counter(work.cursors().flatten().tolist())
    cursor, visited = 0, set()
    for _ in range(40):  # a chain of windows, all accepted, folded when two more would not fit
        visited.add(cursor)
        cursor = 0 if cursor + tokens + 2 * tokens > 16 else cursor + tokens
    assert set(counts) == visited
    assert len(set(counts.values())) == 1
    assert work.flushes(work.cursors()).sum() * len(visited) == work.num_slots


def test_sglangs_cursors_stay_where_they_are_from_walk_to_walk(folder):
    pytest.importorskip("triton")
    (rival,) = (c for c in common.found_in(folder, verify.RIVALS)[0] if c.name == "sglang/replay")
    work = rival.own(small("gdn", 4))
    prepared = rival.prepare(work)
    everything = torch.arange(3)
    folded = []
    for _ in range(2):
        before = [prepared.state(call, everything).clone() for call in range(work.calls)]
        for step in prepared.steps:
            step()
        after = [prepared.state(call, everything) for call in range(work.calls)]
        folded.append((torch.cat(before) != torch.cat(after)).flatten(1).any(1).tolist())
    assert folded[0] == folded[1] == work.flushes(work.cursors().flatten()).tolist()


def test_a_fork_that_is_not_there_is_said_and_no_other_project_is_missed():
    contenders, notes = common.found_in(None, verify.RIVALS)
    assert contenders == []
    assert [note.partition(" ")[0] for note in notes] == ["vllm-fork", "vllm", "sglang", "flashinfer"]
    assert all("python -m benchmarks.rivals" in note for note in notes)


# Points


def test_decode_steps_take_turns_with_the_windows_of_the_first_length():
    contenders, _ = verify.contenders_of(options())
    rows = measure.run(options(), verify.points(options(), contenders))["rows"]
    windows = [(row["op"], row["window"]) for row in rows if row["contender"] == "replayssm/torch"]
    assert windows == [("gdn_verify", 1), ("gdn_decode", 1), ("gdn_verify", 4)]
    assert all(row["us"] > 0 for row in rows)


def test_a_backend_without_windows_of_its_own_is_not_measured_twice():
    contenders, _ = verify.contenders_of(options())
    assert [type(c) for c in contenders if c.name == "replayssm/cpu"] in ([], [Ours])  # its windows are torch's


def test_time_that_can_not_be_taken_is_an_error_of_its_point_alone(monkeypatch):
    times = measure.time_in_turns
    fails = iter([True, False])

    def sometimes(*args):
        if next(fails):
            raise RuntimeError("the GPU fell over")
        return times(*args)

    monkeypatch.setattr(measure, "time_in_turns", sometimes)
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e9)
    points = verify.points(options(), [OurWindows("torch")])
    first, second = measure.run(options(), points)["rows"]
    assert first["error"] == "RuntimeError: the GPU fell over"
    assert second["us"] > 0


def test_a_window_that_does_not_divide_the_ring_is_refused():
    with pytest.raises(ValueError, match="window is 3: it must divide ring-len, 16"):
        options(windows=(3,))


# Kernels ahead of time


@dataclass(frozen=True)
class Called:
    """Writes a file at each first call, in whichever process."""

    folder: Path
    name: str
    has_ring: bool = True

    def takes(self, workload):
        return True

    def prepare(self, workload):
        if self.name == "fails":
            raise RuntimeError("no such kernel")
        assert workload.calls == 1
        (self.folder / f"{self.name} T={workload.window} B={workload.batch}").touch()
        return OurWindows("torch").prepare(workload)


def test_first_calls_are_made_for_every_contender_length_and_batch(tmp_path):
    wanted = options(batches=(8, 1))
    points = list(verify.points(wanted, [Called(tmp_path, "fails"), Called(tmp_path, "good")]))
    tasks = list(ahead.tasks_of(points).values())
    assert [[work.batch for work, _ in task] for task in tasks] == [[1, 8]] * 4
    assert sorted(ahead.first_calls(task) for task in tasks) == [0, 0, 2, 2]
    assert {path.name for path in tmp_path.iterdir()} == {f"good T={t} B={b}" for t in (1, 4) for b in (1, 8)}


def test_other_processes_make_the_calls_and_who_cannot_be_sent_there_is_said(tmp_path, caplog):
    unsendable = Called(tmp_path, lambda: "a function without a name")
    points = verify.points(options(windows=(4,)), [Called(tmp_path, "good"), unsendable])
    assert ahead.compile_ahead(points, workers=1) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["good T=4 B=2"]
    assert caplog.text.count("is not compiled ahead") == 1


def test_every_contender_can_be_sent_to_another_process(folder):
    for suite, options_ in ((verify, options(batches=(8,), kinds=KINDS)), (decode, decode_options())):
        rivals = common.found_in(folder, suite.RIVALS)[0]
        points = list(suite.points(options_, [*suite.contenders_of(options_)[0], *rivals]))
        assert {contender.name for entries in points for _, contender in entries} >= {r.name for r in rivals}
        for task in ahead.tasks_of(points).values():
            assert pickle.loads(pickle.dumps(task)) == task


def decode_options() -> decode.DecodeOptions:
    shared = {"kinds": KINDS, "batches": (8,), "state_dtypes": (torch.float32,), "device": CPU, "shapes": SMALL}
    return decode.DecodeOptions(**shared, ring_lens=(4,))


def test_who_is_not_compiled_in_time_is_left_out(tmp_path):
    def points():
        return verify.points(options(windows=(4, 1)), [Called(tmp_path, "takes long"), Called(tmp_path, "good")])

    late = ahead.compile_ahead(points(), workers=2, seconds=0.01)
    assert len(late) == 4
    late = {key for key in late if "good" not in key}
    left = [[contender.name for _, contender in entries] for entries in ahead.without(points(), late)]
    assert left == [["good"], ["good"]]


# Tables

ROW = {"shape": "k2 v4 8x16", "state_dtype": "bfloat16", "roofline_us": 5.0, "batch": 8, "ring_len": 16, "window": 1}
ROWS = [
    {**ROW, "op": "gdn_decode", "contender": "replayssm/cuda", "us": 8.0},
    {**ROW, "op": "gdn_decode", "contender": "replayssm/triton", "us": 12.0},
    {**ROW, "op": "gdn_verify", "contender": "replayssm/triton", "us": 10.0},
    {**ROW, "op": "gdn_verify", "contender": "replayssm/triton", "us": 20.0, "window": 4},
    {**ROW, "op": "gdn_verify", "contender": "peer/native", "us": 60.0, "window": 4, "ring_len": None},
    {**ROW, "op": "gdn_verify", "contender": "peer/replay", "us": None, "window": 4, "error": "wrong: by 3"},
]


def test_a_windows_table_has_lengths_and_our_decode_step_beside_them():
    (table,) = report.tables(ROWS)
    assert table.header[:8] == ["state", "L", "T", "B", "× peer/native", "× peer/replay", "/ decode", "roofline"]
    assert list(table.lines()) == [
        ["bf16", "16", "1", "8", "–", "–", "1.25", "0.50", "10.0", "–", "–"],
        ["bf16", "16", "4", "8", "3.00", "–", "2.50", "0.25", "20.0", "60.0", "wrong"],
    ]
    assert list(report.failures(ROWS)) == ["peer/replay gdn_verify bfloat16 B=8 L=16 T=4: wrong: by 3"]


def test_a_table_of_one_length_keeps_the_decode_step(tmp_path):
    meta = {"gpu": "A GPU", "read_tbps": 4.5, "torch": "2.11", "date": "2026-11-30", "commit": "abc"}
    report.write({"meta": meta, "rows": ROWS}, tmp_path / "gpu" / "verify.json")
    text = tables.filled("<!-- table: gpu/verify window=4 -->\n<!-- end of table -->\n", tmp_path)
    assert "| bf16 | 16 | 4 | 8 | 3.00 | – | 2.50 | 0.25 | 20.0 | 60.0 | wrong |" in text
    assert text.count("| bf16 |") == 1


# The command


@pytest.fixture
def bench(monkeypatch, capfd):
    return small_bench(monkeypatch, capfd, before="verify --device cpu")


def test_the_command_prints_one_json_object(bench, tmp_path):
    file = tmp_path / "verify.json"
    code, out, _ = bench("--batch", "2", "--window", "2,4", "--replays", "2", "--json", "--output", str(file))
    result = json.loads(out)
    assert code == 0
    assert json.loads(file.read_text()) == result
    assert result["meta"]["suite"] == "verify"
    assert {r["op"] for r in result["rows"]} == {f"{kind}_{what}" for kind in KINDS for what in ("verify", "decode")}
    assert {r["window"] for r in result["rows"] if r["op"].endswith("verify")} == {2, 4}
    assert all(r["us"] > 0 and r["rel_err"] < 1e-6 for r in result["rows"])


def test_the_command_prints_a_table_for_each_layer(bench):
    code, out, _ = bench("--op", "gdn,kda", "--batch", "1", "--window", "4", "--replays", "2")
    assert code == 0
    assert out.count("one window of one layer") == 2
    assert "one step of one layer" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "3"], "window is '3': it must divide ring-len, 16"),
        (["--window", "17"], "window is '17': whole numbers from 1 to 16 are wanted"),
        (["--ring-len", "8,16"], "ring-len is '8,16': one number is wanted"),
        (["--rivals", "nowhere"], "rivals is 'nowhere', which is not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_line_and_exit_code_2(bench, arguments, message):
    code, out, err = bench(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_our_windows_are_right_and_timed_on_a_gpu(kind):
    dtypes = (torch.float32, torch.bfloat16)
    wanted = options(
        kinds=(kind,), batches=(1, 8), state_dtypes=dtypes, device=torch.device("cuda"), shapes=SHAPES, replays=3
    )
    contenders, _ = verify.contenders_of(wanted)
    rows = measure.run(wanted, verify.points(wanted, contenders))["rows"]
    assert all(row["us"] for row in rows), [row.get("error") for row in rows]
