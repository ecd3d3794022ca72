"""Results as files and tables. Ratios first: how many times a rival's time is ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replayssm.folders import write_whole

Row = dict[str, Any]
Point = tuple[int, str, int | None]  # batch, state dtype, L, which contenders without a ring don't have
Key = tuple[int, str, int | None, int]  # and T
#: Ours, best first: what rivals are compared with.
OURS = ("replayssm/cuda", "replayssm/triton", "replayssm/cpu", "replayssm/torch")
LAYER_NAMES = {"gdn": "Gated DeltaNet", "kda": "Kimi Delta Attention", "mamba2": "Mamba-2"}
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def write(result: dict[str, Any], path: Path) -> None:
    """One row on a line, so that two files can be compared."""
    lines = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    # A run that is stopped while it writes leaves a whole file.
    write_whole(path, f'{{"meta": {json.dumps(result["meta"])},\n "rows": [\n{lines}\n]}}\n')


class OperatorTable:
    """Cells of one operator's table, for a terminal and for a document alike.

    A line per state dtype, L, T (of verify windows) and batch; contenders without a ring stand in the lines of every L.
    Windows stand beside decode steps of the same run, if it has any. Without any of ours there is nothing to compare
    with, and times stand alone.
    """

    def __init__(self, op: str, rows: list[Row]) -> None:
        self.kind, _, what = op.rpartition("_")
        self.has_windows = what == "verify"
        self._decode_us: dict[Point, float] = {}
        for row in rows:
            if self.has_windows and row["op"] == f"{self.kind}_decode" and row["us"]:
                point = _point(row)
                self._decode_us[point] = min(row["us"], self._decode_us.get(point, row["us"]))
        rows = [row for row in rows if row["op"] == op]
        self.op = op
        self.rows = rows
        self.shape = rows[0]["shape"]
        names: list[str] = list(dict.fromkeys(row["contender"] for row in rows))
        self.ours = [name for name in OURS if name in names]
        self.rivals = [name for name in names if name not in OURS]
        self._at: dict[tuple[object, ...], Row] = {(r["contender"], *_point(r), r["window"]): r for r in rows}

    @property
    def title(self) -> str:
        return f"{LAYER_NAMES.get(self.kind, self.op)}, {self.shape}"

    @property
    def header(self) -> list[str]:
        times = [f"{name} µs" for name in (*self.ours, *self.rivals)]
        tokens = ["T"] if self.has_windows else []
        decode = ["/ decode"] if self._decode_us else []
        compared = [*(f"× {name}" for name in self.rivals), *decode, "roofline"] if self.ours else []
        return ["state", "L", *tokens, "B", *compared, *times]

    def lines(self) -> Iterator[list[str]]:
        """Rows of cells. A ratio above 1 says that ours takes less time; roofline is ours against the memory's."""
        keys = {(*_point(r), r["window"]) for r in self.rows if r["contender"] in (self.ours or self.rivals)}
        dtypes = list(dict.fromkeys(r["state_dtype"] for r in self.rows))
        for key in sorted(keys, key=lambda key: (dtypes.index(key[1]), key[2] or 0, key[3], key[0])):
            batch, dtype, ring_len, window = key
            found = {name: self._find(name, key) for name in [*self.ours, *self.rivals]}
            times = [self._time(found[name]) for name in [*self.ours, *self.rivals]]
            tokens = [str(window)] if self.has_windows else []
            where = [SHORT_DTYPES.get(dtype, dtype), "–" if ring_len is None else str(ring_len), *tokens, str(batch)]
            yield [*where, *(self._compared(found, key) if self.ours else []), *times]

    def _compared(self, found: dict[str, Row | None], key: Key) -> list[str]:
        """Cells that set the best of ours beside others."""
        best = self._best(found)
        ratios = [self._ratio(best, found[name]) for name in self.rivals]
        decode = [self._per_decode(best, key[:3])] if self._decode_us else []
        share = f"{best['roofline_us'] / best['us']:.2f}" if best and "roofline_us" in best else "–"
        return [*ratios, *decode, share]

    def _find(self, name: str, key: Key) -> Row | None:
        batch, dtype, _, window = key
        return self._at.get((name, *key), self._at.get((name, batch, dtype, None, window)))

    def _per_decode(self, best: Row | None, point: Point) -> str:
        """How many times our fastest decode step a window takes."""
        decode = self._decode_us.get(point)
        return f"{best['us'] / decode:.2f}" if best and decode else "–"

    def _best(self, found: dict[str, Row | None]) -> Row | None:
        timed = [row for name in self.ours if (row := found[name]) is not None and row["us"]]
        return min(timed, key=lambda row: float(row["us"]), default=None)

    @staticmethod
    def _ratio(ours: Row | None, theirs: Row | None) -> str:
        return f"{theirs['us'] / ours['us']:.2f}" if ours and theirs and theirs["us"] else "–"

    @staticmethod
    def _time(row: Row | None) -> str:
        if row is None:
            return "–"
        return f"{row['us']:.1f}" if row["us"] else str(row.get("error", "not timed")).partition(":")[0]


def _point(row: Row) -> Point:
    return row["batch"], row["state_dtype"], row["ring_len"]


def tables(rows: list[Row]) -> list[OperatorTable]:
    """One for each operator, in the order of the rows. Decode steps beside windows are in the windows' table."""
    names = list(dict.fromkeys(row["op"] for row in rows))
    beside = {name.replace("_verify", "_decode") for name in names if name.endswith("_verify")}
    return [OperatorTable(name, rows) for name in names if name not in beside]


def failures(rows: list[Row]) -> Iterator[str]:
    """A line for each row without a time."""
    for row in rows:
        if "error" in row:
            ring = f" L={row['ring_len']}" if row["ring_len"] else ""
            tokens = f" T={row['window']}" if row["window"] > 1 else ""
            yield f"{row['contender']} {row['op']} {row['state_dtype']} B={row['batch']}{ring}{tokens}: {row['error']}"
