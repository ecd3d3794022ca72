"""What a measurement leaves out and what it keeps: time limits, contenders, files cut short, digests of sources."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest
import torch
from rival_stubs import SMALL, small_bench

from benchmarks import source as commits
from replayssm.bench import decode, measure, report, source, verify
from replayssm.bench.check import first_step_errors
from replayssm.bench.contenders import Ours, chosen
from replayssm.bench.upstream import Upstream
from replayssm.bench.workload import Workload, num_calls
from replayssm.errors import InputError

CPU = torch.device("cpu")
SHARED = {"batches": (1,), "state_dtypes": (torch.float32,), "device": CPU, "replays": 2, "shapes": SMALL}


@pytest.fixture
def bench(monkeypatch, capfd):
    return small_bench(monkeypatch, capfd, after="--device cpu --batch 1 --replays 2")


# Time limits


def test_points_of_the_first_ring_length_come_first():
    options = decode.DecodeOptions(kinds=("gdn", "kda"), ring_lens=(4, 2), **SHARED)
    order = [(work.ring_len, work.kind) for ((work, _),) in decode.points(options, [Ours("torch")])]
    assert order == [(4, "gdn"), (4, "kda"), (2, "gdn"), (2, "kda")]


def test_all_layers_of_the_first_batch_come_first():
    options = decode.DecodeOptions(kinds=("gdn", "kda"), ring_lens=(4,), **{**SHARED, "batches": (8, 1)})
    order = [(work.batch, work.kind) for ((work, _),) in decode.points(options, [Ours("torch")])]
    assert order == [(8, "gdn"), (8, "kda"), (1, "gdn"), (1, "kda")]


def test_windows_of_the_first_length_come_first():
    options = verify.VerifyOptions(kinds=("gdn", "kda"), windows=(4, 1), **SHARED)
    points = list(verify.points(options, verify.contenders_of(options)[0]))
    assert [(entries[0][0].window, entries[0][0].kind) for entries in points] == [
        (4, "gdn"), (4, "kda"), (1, "gdn"), (1, "kda"),
    ]  # fmt: skip


def test_a_point_that_would_end_after_the_limit_is_not_begun(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)

    def points():
        for seconds in (4, 3, 4):
            yield [(Workload("gdn", SMALL["gdn"], 1, torch.float32, 4, torch.float32, CPU, 4), Slow(seconds, now))]

    options = decode.DecodeOptions(kinds=("gdn",), ring_lens=(4, 2, 1), seconds=10, **SHARED)
    result = measure.run(options, points())
    assert len(result["rows"]) == 2  # after 7 seconds another 4, the longest so far, would be too many
    assert result["meta"]["points_measured"] == 2
    assert result["meta"]["points"] == 3


class Slow(Ours):
    """Our step, which takes seconds to prepare on a clock of the test's."""

    def __init__(self, seconds: float, now: list[float]) -> None:
        super().__init__("torch")
        object.__setattr__(self, "takes_time", (seconds, now))

    def prepare(self, workload):
        seconds, now = self.takes_time
        now[0] += seconds
        return super().prepare(workload)


def test_the_command_says_how_much_was_measured(bench, tmp_path):
    file = tmp_path / "decode.json"
    limits = ("--time-limit", "1000", "--ring-len", "4,2", "--op", "gdn")
    code, _, err = bench("decode", *limits, "--output", str(file))
    assert code == 0
    assert "2 of 2 points measured" in err
    assert json.loads(file.read_text())["meta"]["points_measured"] == 2


def test_the_command_says_how_much_was_left_out(bench, monkeypatch):
    class Clock:
        """A minute for everything."""

        seconds = 0.0

        def monotonic(self) -> float:
            self.seconds += 60
            return self.seconds

    monkeypatch.setattr(measure, "time", Clock())
    code, _, err = bench("decode", "--time-limit", "150", "--ring-len", "4,2,1", "--op", "gdn")
    assert code == 0
    assert "1 of 3 points measured" in err
    assert "2 points left out: they don't fit --time-limit, 150 s\n" in err


def test_a_result_says_what_took_the_time(bench, tmp_path):
    file = tmp_path / "decode.json"
    code, _, err = bench("decode", "--ring-len", "2", "--op", "gdn", "--output", str(file))
    meta = json.loads(file.read_text())["meta"]
    assert code == 0
    assert set(meta["seconds_in"]) == {"preparing", "checking", "recording", "timing"}
    assert sum(meta["seconds_in"].values()) <= meta["seconds"] + 0.3
    assert "checking" in err


def test_a_file_is_whole_whenever_the_writing_stops(tmp_path, monkeypatch):
    file = tmp_path / "decode.json"
    report.write({"meta": {}, "rows": [{"us": 1}]}, file)
    before = file.read_text()
    monkeypatch.setattr(type(file), "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.write({"meta": {}, "rows": [{"us": 2}]}, file)
    assert file.read_text() == before


# Contenders


def test_contenders_are_chosen_by_name_or_by_project():
    known = [Ours("torch"), Ours("cpu"), Upstream()]
    assert [c.name for c in chosen(known, ["replayssm"])] == ["replayssm/torch", "replayssm/cpu"]
    assert [c.name for c in chosen(known, ["transformers/torch", "replayssm/cpu"])] == [
        "replayssm/cpu", "transformers/torch",
    ]  # fmt: skip
    with pytest.raises(InputError, match="contender is 'sglang': here it must be one of replayssm/torch"):
        chosen(known, ["replayssm", "sglang"])


def test_the_command_measures_those_that_were_chosen(bench):
    code, out, _ = bench("decode", "--op", "gdn", "--ring-len", "2", "--contender", "replayssm/torch", "--json")
    assert code == 0
    assert {row["contender"] for row in json.loads(out)["rows"]} == {"replayssm/torch"}
    code, out, err = bench("verify", "--contender", "nobody")
    assert (code, out) == (2, "")
    assert "contender is 'nobody'" in err


@pytest.mark.parametrize("value", ["0", "soon", "1,2"])
def test_a_bad_time_limit_is_one_line(bench, value):
    code, out, err = bench("decode", "--time-limit", value)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "time-limit is" in err


# Checks


@pytest.mark.parametrize("kind", ["gdn", "kda", "mamba2"])
def test_records_that_were_never_written_may_hold_anything(kind):
    work = Workload(kind, SMALL[kind], 3, torch.float32, 4, torch.float32, CPU, num_calls(3, [4], 1, 1))
    prepared = Ours("torch").prepare(work)

    def records(call, rows):
        unwritten = torch.arange(4) >= work.cursors()[call][rows][:, None]
        return tuple(
            x.masked_fill(unwritten.view(len(rows), 1, 4, *[1] * (x.dim() - 3)), float("nan"))
            for x in prepared.records(call, rows)
        )

    assert max(first_step_errors(work, replace(prepared, records=records))) < 1e-6


def test_tenths_stay_within_what_was_measured():
    assert measure._microseconds([4e-6, 8e-6], calls=2) == {"us": 3.0, "us_p10": 2.2, "us_p90": 3.8}
    assert measure._microseconds([4e-6], calls=1) == {"us": 4.0, "us_p10": 4.0, "us_p90": 4.0}


# Sources


@pytest.fixture
def repository(tmp_path):
    """A repository with a package of two commits, and what git says in it."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *arguments], capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    package = tmp_path / "replayssm"
    (package / "kernels").mkdir(parents=True)
    for number in (1, 2):
        (package / "a.py").write_text(f"x = {number}\n")
        (package / "kernels" / "b.cu").write_text("// kernel\n")
        git("add", ".")
        git("commit", "-qm", str(number))
    return tmp_path


def test_a_digest_names_the_commit_with_these_sources(repository):
    package, history = repository / "replayssm", list(commits.commits(repository))
    assert source.package_digest(package) == history[0][1]
    (package / "data.json").write_text("{}")  # not a source
    assert source.package_digest(package) == history[0][1]
    (package / "a.py").write_text("x = 1\n")
    assert source.package_digest(package) == history[1][1]
    (package / "kernels" / "b.cu").rename(package / "b.cu")
    assert source.package_digest(package) not in dict(map(reversed, history))


def test_a_result_has_the_digest_of_what_was_measured(monkeypatch, capsys):
    digest = measure.environment(CPU)["source"]
    assert commits.main([]) == 0
    assert capsys.readouterr().out.strip() == digest
    monkeypatch.setattr(commits, "commits", lambda: iter([("abc1234", digest)]))
    assert commits.main([digest]) == 0
    assert commits.main([digest, "0" * 12]) == 1
    out, err = capsys.readouterr()
    assert out.count(f"{digest} is commit abc1234") == 2
    assert "000000000000 is no commit" in err
