"""Figures and targets of the documents: drawn from the results, the same each time, and worst points count."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import chart, join, plots, tables, targets
from replayssm.bench import report

ROOT = Path(__file__).resolve().parent.parent
META = {"gpu": "A GPU", "read_tbps": 4.0, "torch": "2.11", "date": "2026-11-30", "commit": "abc", "rivals": {}}
SVG = "{http://www.w3.org/2000/svg}"


def row(op: str, contender: str, batch: int, us: float | None, *, ring: int | None = 16, **more: object):
    shared = {"op": op, "contender": contender, "batch": batch, "ring_len": ring, "us": us, "window": 1}
    return {**shared, "state_dtype": "float32", "shape": "k2 v4 8x16", "roofline_us": 80.0, **more}


ROWS = [
    row("gdn_decode", "replayssm/cuda", 128, 100.0),
    row("gdn_decode", "replayssm/triton", 128, 80.0),
    row("gdn_decode", "sglang/replay", 128, 92.0),
    row("gdn_decode", "sglang/packed", 128, 160.0, ring=None, roofline_us=150.0),
    row("gdn_decode", "fla/recurrent", 128, 170.0, ring=None, roofline_us=150.0),
    row("gdn_decode", "replayssm/cuda", 256, 100.0),
    row("gdn_decode", "sglang/replay", 256, None, error="wrong: outputs off by 3"),
    row("gdn_decode", "sglang/packed", 256, 150.0, ring=None, roofline_us=150.0),
    row("gdn_decode", "replayssm/cuda", 256, 50.0, ring=8, roofline_us=40.0),
]


def target(what: str, state: str) -> targets.Target:
    (found,) = (t for t in targets.targets() if t.what == what and t.state == state)
    return found


# Targets


@pytest.mark.parametrize(
    ("what", "cells"),
    [
        ("Gated DeltaNet decode, B ≥ 128: roofline / time", ["≥ 0.90", "0.800", "B=256", "1.000", "1 of 2"]),
        ("Gated DeltaNet decode, B ≥ 128: × over SGLang's replay", ["≥ 1.12", "1.150", "B=128", "1.150", "all"]),
        ("Gated DeltaNet decode, B ≥ 128: × over no ring", ["≥ 1.85", "1.500", "B=256", "1.875", "1 of 2"]),
        ("Kimi Delta Attention decode, B ≥ 128: × over no ring", ["≥ 1.70", "–", "", "", "not measured"]),
    ],
)
def test_a_target_is_held_against_its_worst_point(what, cells):
    assert target(what, "fp32").line({"decode": ROWS}) == [what, "fp32", *cells]


def test_a_window_of_one_is_held_against_the_decode_step_beside_it():
    rows = [
        row("kda_verify", "replayssm/cuda", 8, 10.4),
        row("kda_decode", "replayssm/cuda", 8, 10.0),
        row("kda_verify", "replayssm/cuda", 1, 11.0),
        row("kda_decode", "replayssm/triton", 1, 10.0),
        row("kda_verify", "replayssm/cuda", 1, 30.0, window=4),
    ]
    line = target("Windows of 1: time / decode step's", "all").line({"verify": rows})
    assert line[2:] == ["≤ 1.05", "1.100", "kda fp32 B=1", "1.000", "1 of 2"]


def test_the_engine_is_held_at_its_longest_contexts():
    def rate(contender: str, batch: int, tokens: float, context: int = 1000):
        shared = {"load": "filled", "contender": contender, "batch": batch}
        return {**shared, "tokens_per_s": tokens, "prompt_tokens": context}

    rows = [
        rate("replay", 256, 130.0),
        rate("no-replay", 256, 100.0),
        rate("replay", 256, 900.0, context=100),
        rate("no-replay", 256, 100.0, context=100),
        rate("speculate", 32, 190.0),
        rate("replay", 32, 100.0),
    ]
    at_256 = target("Engine, B = 256: tokens/s with / without replay", "fp32").line({"e2e": rows})
    assert at_256[2:] == ["≥ 1.25", "1.300", "B=256", "–", "all"]
    windows = target("Engine, windows of 4, B ≤ 32: tokens/s / decode's", "fp32").line({"e2e": rows})
    assert windows[2:] == ["≥ 1.80", "1.900", "B=32", "–", "all"]


def test_a_marked_place_is_filled_with_the_targets_of_a_folder(tmp_path):
    report.write({"meta": META, "rows": ROWS}, tmp_path / "gpu" / "decode.json")
    text = tables.filled("<!-- targets: gpu -->\n<!-- end of table -->\n", tmp_path)
    assert "128: × over SGLang's replay | fp32 | ≥ 1.12 | 1.150 | B=128 | 1.150 | all |" in text
    assert text.count("A GPU, read bandwidth") == 1
    assert tables.filled(text, tmp_path) == text
    with pytest.raises(tables.TableError, match="there are no results in elsewhere"):
        tables.filled("<!-- targets: elsewhere -->\n<!-- end of table -->\n", tmp_path)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"commit": "abc1234", "source": "feedbeef0123"}, "commit abc1234"),
        ({"commit": "abc1234-dirty", "source": "feedbeef0123"}, "sources feedbeef0123"),
        ({"commit": "", "source": "feedbeef0123"}, "sources feedbeef0123"),
        ({"commit": ""}, "commit unknown"),
        ({"points": 9, "points_measured": 4}, "4 of 9 points; commit abc"),
        ({"points": 9, "points_measured": 9}, "2026-11-30; commit abc"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_table_says_what_was_measured(more, said):
    assert tables.origin({**META, **more}).endswith(f"{said}.*")


def test_results_of_several_runs_are_joined_and_the_later_row_counts(tmp_path):
    files = [tmp_path / f"{name}.json" for name in ("first", "second", "all")]
    later = [row("gdn_decode", "replayssm/cuda", 128, 90.0), row("kda_decode", "replayssm/cuda", 128, 70.0)]
    report.write({"meta": {**META, "suite": "decode", "points_measured": 2}, "rows": ROWS}, files[0])
    report.write({"meta": {**META, "suite": "decode", "points_measured": 1}, "rows": later}, files[1])
    assert join.main([str(files[0]), str(files[1]), "--output", str(files[2])]) == 0
    result = json.loads(files[2].read_text())
    assert result["rows"] == [later[0], *ROWS[1:], later[1]]
    assert "2 runs" in tables.origin(result["meta"])
    assert "of 3 points" not in tables.origin(result["meta"])


def test_results_of_two_machines_are_not_joined(tmp_path, capsys):
    files = [tmp_path / f"{name}.json" for name in ("first", "second")]
    for file, gpu in zip(files, ("A GPU", "another"), strict=True):
        report.write({"meta": {**META, "gpu": gpu}, "rows": ROWS}, file)
    assert join.main([*map(str, files), "--output", str(tmp_path / "all.json")]) == 1
    assert capsys.readouterr().err == "benchmarks.join: gpu differs: A GPU and another\n"


# Figures


def lines_of(svg: str) -> list[ET.Element]:
    return [path for path in ET.fromstring(svg).iter(f"{SVG}path") if path.get("fill") == "none"]


def words_of(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_a_figure_over_batch_has_a_line_for_each_contender():
    drawn = plots.figures({"meta": META, "rows": ROWS})
    assert set(drawn) == {"time.svg", "roofline.svg", "ring.svg", "traffic.svg"}
    words = words_of(drawn["time.svg"])
    assert {"Gated DeltaNet, fp32", "128", "256", "replayssm/cuda", "sglang/packed", "fla/recurrent"} <= set(words)
    assert len(lines_of(drawn["time.svg"])) == 2 * 5  # in the panel and in the legend
    dashed = [line for line in lines_of(drawn["time.svg"]) if line.get("stroke-dasharray")]
    assert len(dashed) == 2 * 2


def test_points_stand_where_their_numbers_say():
    axis = chart.linear("y", [1.0], 0.5)
    line = chart.Line("a", ((1.0, 0.0), (4.0, 1.0)), "#000000")
    panel = chart.Panel("p", chart.Axis("x", 1.0, 4.0, (1.0, 2.0, 4.0)), axis, [line])
    svg = ET.fromstring(chart.figure([panel], columns=1))
    (low, high) = [(float(c.get("cx")), float(c.get("cy"))) for c in svg.iter(f"{SVG}circle")]
    assert low == (chart.LEFT, chart.TOP + chart.PANEL_HEIGHT)
    assert high == (chart.LEFT + chart.PANEL_WIDTH, chart.TOP)


def test_speed_up_and_traffic_are_those_of_the_rows():
    rows = [row for row in ROWS if row["batch"] == 256]
    (line,) = plots._speed_up(rows, ("gdn_decode", "float32", 256))
    assert line.points == ((8, 3.0), (16, 1.5))
    ring, flat = plots._traffic(rows, ("gdn_decode", "float32", 256), META)
    assert ring.points == ((8, 40.0 * 4 / 256), (16, 80.0 * 4 / 256))
    assert flat.points == ((8, 150.0 * 4 / 256), (16, 150.0 * 4 / 256))


def test_a_result_without_times_is_refused():
    with pytest.raises(plots.PlotError, match="no decode step with a time"):
        plots.figures({"meta": META, "rows": [row("gdn_decode", "sglang/replay", 1, None)]})


def test_the_documents_figures_are_what_the_results_say(tmp_path, capsys):
    assert plots.main(["--check"]) == 0
    shown = [path.name for path in (ROOT / "docs" / "figures").iterdir()]
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"(figures/{name})" in text for name in shown)
    assert plots.main(["--into", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(shown)
    (tmp_path / "time.svg").write_text("<svg/>")
    assert plots.main(["--check", "--into", str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("out of date: time.svg\n")
    assert plots.main(["--result", "nowhere/decode"]) == 2


def test_every_operators_best_rival_has_a_colour_of_its_own():
    result = json.loads((ROOT / "benchmarks" / "results" / "nvidia-h200" / "decode.json").read_text())
    names = {row["contender"] for row in result["rows"]}
    assert names <= set(plots.COLOURS)
    assert len(set(plots.COLOURS.values())) >= len(plots.COLOURS) - 1
