"""Draw the figures of the documents from the stored results.

Usage: python -m benchmarks.plots [--check] [--result nvidia-h200/decode]

    time.svg      microseconds of a decode step over batch
    roofline.svg  the least time that memory allows over a contender's time, over batch
    ring.svg      how many times the fastest step without a ring takes ours, over L
    traffic.svg   bytes of a row's step that can't be avoided, over L
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.chart import Axis, Line, Panel, figure, linear, logarithmic
from benchmarks.stored import RESULTS, ROOT, bring_up_to_date
from replayssm.bench.report import LAYER_NAMES, OURS, SHORT_DTYPES

FIGURES = ROOT / "docs" / "figures"
RING_LEN = 16  # of the figures over batch
BATCH = 256  # of the figures over L
COLOURS = {
    "replayssm/cuda": "#d62728",
    "replayssm/triton": "#ff9896",
    "sglang/replay": "#1f77b4",
    "sglang/packed": "#6baed6",
    "sglang/cuda": "#08306b",
    "vllm/replay": "#2ca02c",
    "vllm/stateless": "#98df8a",
    "vllm-fork/replay": "#006d2c",
    "vllm-fork/stateless": "#98df8a",
    "mamba/stateless": "#9467bd",
    "fla/recurrent": "#8c564b",
    "flashinfer/replay": "#e6ab02",
    "flashinfer/stateless": "#a6761d",
}
OTHER = "#7f7f7f"
DTYPE_COLOURS = {"float32": "#1f77b4", "bfloat16": "#d62728", "float16": "#2ca02c"}

Row = dict[str, Any]


class PlotError(ValueError):
    """The result can't be drawn; the message is one line."""


def figures(result: dict[str, Any]) -> dict[str, str]:
    """File names and contents."""
    rows = [row for row in result["rows"] if row["op"].endswith("_decode") and row["us"]]
    if not rows:
        raise PlotError("there is no decode step with a time")
    return {
        "time.svg": _over_batch(rows, lambda row: row["us"], "µs", _time_axis),
        "roofline.svg": _over_batch(rows, _roofline_ratio, "roofline / time", _share_axis),
        "ring.svg": _over_ring(rows, _speed_up, "× over no ring"),
        "traffic.svg": _over_ring(rows, lambda rows, at: _traffic(rows, at, result["meta"]), "MB"),
    }


# Over batch


def _over_batch(
    rows: list[Row], value: Callable[[Row], float], label: str, axis: Callable[[str, Iterable[float]], Axis]
) -> str:
    """A panel for each dtype and layer, with a line for each contender."""
    rows = [row for row in rows if row["ring_len"] in (None, RING_LEN)]
    batches = sorted({row["batch"] for row in rows})
    x, y = logarithmic("rows", batches, batches), axis(label, map(value, rows))
    panels = []
    for dtype in _in_order(rows, "state_dtype"):
        for op in _in_order(rows, "op"):
            here = [row for row in rows if (row["state_dtype"], row["op"]) == (dtype, op)]
            lines = [_contender_line(name, here, value) for name in _in_order(here, "contender")]
            panels.append(Panel(f"{_layer(op)}, {SHORT_DTYPES[dtype]}", x, y, lines))
    return figure(panels, columns=len(_in_order(rows, "op")))


def _contender_line(name: str, rows: list[Row], value: Callable[[Row], float]) -> Line:
    points = sorted((row["batch"], value(row)) for row in rows if row["contender"] == name)
    keeps_ring = any(row["ring_len"] for row in rows if row["contender"] == name)
    width = 2.5 if name in OURS else 1.5
    return Line(name, tuple(points), COLOURS.get(name, OTHER), width, dashed=not keeps_ring)


def _time_axis(label: str, values: Iterable[float]) -> Axis:
    return logarithmic(label, values)


def _share_axis(label: str, values: Iterable[float]) -> Axis:
    return linear(label, [1.0, *values], 0.2)


def _roofline_ratio(row: Row) -> float:
    ratio: float = row["roofline_us"] / row["us"]
    return ratio


# Over L

Place = tuple[str, str, int]  # operator, state dtype, batch


def _over_ring(rows: list[Row], points: Callable[[list[Row], Place], list[Line]], label: str) -> str:
    """A panel for each layer, with the lines of each dtype."""
    batch = BATCH if any(row["batch"] == BATCH for row in rows) else max(row["batch"] for row in rows)
    lengths = sorted({row["ring_len"] for row in rows if row["ring_len"]})
    dtypes = _in_order(rows, "state_dtype")
    lines = {
        op: [line for dtype in dtypes for line in points(rows, (op, dtype, batch))] for op in _in_order(rows, "op")
    }
    x = logarithmic("L", lengths, lengths)
    highest = max((y for drawn in lines.values() for line in drawn for _, y in line.points), default=1.0)
    y = linear(label, [highest], 0.5 if highest < 3 else 1.0 if highest < 8 else 2.0)
    panels = [Panel(f"{_layer(op)}, {batch} rows", x, y, drawn) for op, drawn in lines.items()]
    return figure(panels, columns=len(panels))


def _speed_up(rows: list[Row], place: Place) -> list[Line]:
    stateless = [row["us"] for row in _at(rows, place) if row["ring_len"] is None]
    ours: dict[int, float] = {}
    for row in _at(rows, place):
        if row["contender"] in OURS:
            ours[row["ring_len"]] = min(row["us"], ours.get(row["ring_len"], row["us"]))
    if not stateless or not ours:
        return []
    points = tuple((length, min(stateless) / us) for length, us in sorted(ours.items()))
    return [Line(SHORT_DTYPES[place[1]], points, DTYPE_COLOURS[place[1]])]


def _traffic(rows: list[Row], place: Place, meta: dict[str, Any]) -> list[Line]:
    """Megabytes of one row: those of a ring by L, and of no ring the same at every L."""
    op, dtype, batch = place

    def megabytes(row: Row) -> float:
        return float(row["roofline_us"] * meta["read_tbps"] / batch)  # µs · TB/s are MB

    with_ring = {row["ring_len"]: megabytes(row) for row in _at(rows, place) if row["contender"] in OURS}
    without = [megabytes(row) for row in _at(rows, place) if row["ring_len"] is None]
    name, colour = SHORT_DTYPES[dtype], DTYPE_COLOURS[dtype]
    lines = [Line(name, tuple(sorted(with_ring.items())), colour)] if with_ring else []
    if without and with_ring:
        flat = tuple((length, without[0]) for length in sorted(with_ring))
        lines.append(Line(f"{name}, no ring", flat, colour, dashed=True))
    return lines


def _at(rows: list[Row], place: Place) -> list[Row]:
    return [row for row in rows if (row["op"], row["state_dtype"], row["batch"]) == place]


def _in_order(rows: list[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _layer(op: str) -> str:
    return LAYER_NAMES[op.removesuffix("_decode")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if a figure is out of date")
    parser.add_argument("--result", default="nvidia-h200/decode", help="file in benchmarks/results, without .json")
    parser.add_argument("--into", type=Path, default=FIGURES, help="folder of the figures, default docs/figures")
    options = parser.parse_args(arguments)
    path = RESULTS / f"{options.result}.json"
    try:
        if not path.is_file():
            raise PlotError(f"there is no {path.name} in {path.parent.name}")
        drawn = figures(json.loads(path.read_text()))
    except PlotError as error:
        print(f"benchmarks.plots: {error}", file=sys.stderr)
        return 2
    files = [(options.into / name, text) for name, text in drawn.items()]
    return bring_up_to_date(files, check=options.check, done="drawn")


if __name__ == "__main__":
    sys.exit(main())
