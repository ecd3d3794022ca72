"""Files that commands write: refused before the work if they can't be, whole when there, devices left as they are."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from replayssm import cli
from replayssm.cli import bench, bench_e2e
from replayssm.cli.measuring import progress
from replayssm.folders import check_writable, write_whole


@pytest.mark.parametrize("command", [("decode",), ("verify",), ("e2e",)], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("output", "part"), [(".", "which is a folder"), ("pyproject.toml/x.json", "can't be written")]
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(command, output, part, monkeypatch, capfd):
    def work(*_, **__):
        raise AssertionError("work was begun")

    monkeypatch.setattr(bench, "_measure", work)
    monkeypatch.setattr(bench_e2e, "_load", work)
    assert cli.run(["bench", *command, "--output", output]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert part in err


def test_trying_whether_a_file_can_be_written_makes_its_folder_and_leaves_nothing_in_it(tmp_path):
    check_writable(tmp_path / "new" / "result.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    """As /dev/null does: with root's rights, a file could take its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    check_writable(pipe)
    reader.start()
    write_whole(pipe, "result")
    reader.join(timeout=10)
    assert read == ["result"]
    assert pipe.is_fifo()


def test_a_link_stays_and_the_file_that_it_names_is_written(tmp_path):
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    link.symlink_to(target)
    write_whole(link, "first")
    write_whole(link, "second")
    assert link.is_symlink()
    assert target.read_text() == "second"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["elsewhere", "link", "target"]


def test_a_progress_bar_is_for_terminals(capfd):
    with progress(2, "first", timing=bench.TimeRemainingColumn()) as step_done:
        step_done("one")
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device here is always full")
def test_a_full_disk_is_one_line():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "replayssm", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "replayssm: error: what was to be written is lost: No space left on device\n"
