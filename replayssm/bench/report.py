"""Results as files and tables. Ratios first: how many times a rival's time is ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
#: Ours, best first: what rivals are compared with.
OURS = ("replayssm/cuda", "replayssm/triton", "replayssm/cpu", "replayssm/torch")
OP_NAMES = {"gdn_decode": "Gated DeltaNet", "kda_decode": "Kimi Delta Attention", "mamba2_decode": "Mamba-2"}
SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def write(result: dict[str, Any], path: Path) -> None:
    """One row on a line, so that two files can be compared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in result["rows"])
    path.write_text(f'{{"meta": {json.dumps(result["meta"])},\n "rows": [\n{lines}\n]}}\n')


class DecodeTable:
    """Cells of one operator's table, for a terminal and for a document alike.

    A line per state dtype, L and batch; contenders without a ring stand in the lines of every L.
    """

    def __init__(self, op: str, rows: list[Row]) -> None:
        rows = [row for row in rows if row["op"] == op]
        self.op = op
        self.rows = rows
        self.shape = rows[0]["shape"]
        names: list[str] = list(dict.fromkeys(row["contender"] for row in rows))
        self.ours = [name for name in OURS if name in names]
        self.rivals = [name for name in names if name not in OURS]
        self._at = {(r["contender"], r["batch"], r["state_dtype"], r["ring_len"]): r for r in rows}

    @property
    def title(self) -> str:
        return f"{OP_NAMES.get(self.op, self.op)}, {self.shape}"

    @property
    def header(self) -> list[str]:
        ratios = [f"× {name}" for name in self.rivals]
        times = [f"{name} µs" for name in (*self.ours, *self.rivals)]
        return ["state", "L", "B", *ratios, "roofline", *times]

    def lines(self) -> Iterator[list[str]]:
        """Rows of cells. A ratio above 1 says that ours takes less time; roofline is ours against the memory's."""
        keys = {(r["state_dtype"], r["ring_len"], r["batch"]) for r in self.rows if r["contender"] in self.ours}
        dtypes = list(dict.fromkeys(r["state_dtype"] for r in self.rows))
        for dtype, ring_len, batch in sorted(keys, key=lambda key: (dtypes.index(key[0]), *key[1:])):
            found = {name: self._find(name, batch, dtype, ring_len) for name in [*self.ours, *self.rivals]}
            best = self._best(found)
            ratios = [self._ratio(best, found[name]) for name in self.rivals]
            share = f"{best['roofline_us'] / best['us']:.2f}" if best else "–"
            times = [self._time(found[name]) for name in [*self.ours, *self.rivals]]
            yield [SHORT_DTYPES.get(str(dtype), str(dtype)), str(ring_len), str(batch), *ratios, share, *times]

    def _find(self, name: str, batch: int, dtype: str, ring_len: int) -> Row | None:
        return self._at.get((name, batch, dtype, ring_len), self._at.get((name, batch, dtype, None)))

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


def operators(rows: list[Row]) -> list[str]:
    """Operators in the order in which they were measured."""
    return list(dict.fromkeys(row["op"] for row in rows))


def failures(rows: list[Row]) -> Iterator[str]:
    """A line for each row without a time."""
    for row in rows:
        if "error" in row:
            ring = f" L={row['ring_len']}" if row["ring_len"] else ""
            yield f"{row['contender']} {row['op']} {row['state_dtype']} B={row['batch']}{ring}: {row['error']}"
