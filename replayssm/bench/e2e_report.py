"""Tables of the end-to-end result, for a terminal and for a document alike. Ratios first."""

from __future__ import annotations

from collections.abc import Iterator

from replayssm.bench.rows import CONTENDERS, FILLED, LOADS, Row

BESIDE = ("no-replay", "transformers")  # the ratios are to these
TITLES = {
    FILLED: "decode steps behind contexts of {prompt_tokens} tokens",
    "no-prefix": "requests of {prompt_tokens} tokens each and {new_tokens} new ones",
    "shared-prefix": "requests of {prompt_tokens} tokens, three quarters of them shared, and {new_tokens} new ones",
}
FILLED_COLUMNS = {"step ms": "step_ms", "model ms": "forward_ms", "host ms": "host_ms"}
SERVED_COLUMNS = {"TTFT ms": "ttft_ms", "TPOT ms": "tpot_ms"}


class LoadTable:
    """Cells of the table of one load and context, a line for each batch and contender."""

    def __init__(self, load: str, rows: list[Row]) -> None:
        self._rows = rows
        self._at = {(row["contender"], row["batch"]): row for row in self._rows}
        self._beside = [name for name in BESIDE if any(row["contender"] == name for row in self._rows)]
        self._columns = FILLED_COLUMNS if load == FILLED else SERVED_COLUMNS
        self._has_first = load != FILLED and "no-replay" in self._beside
        first = self._rows[0]
        self.title = f"{first['model']}, {TITLES[load].format(**first)}"

    @property
    def header(self) -> list[str]:
        first = ["TTFT / no-replay"] if self._has_first else []
        ratios = [f"× {name}" for name in self._beside]
        return ["B", "contender", "L", "state", *ratios, "tokens/s", *self._columns, *first]

    def lines(self) -> Iterator[list[str]]:
        """Rows of cells. A ratio above 1 says that this line makes more tokens per second."""
        order = {name: place for place, name in enumerate(CONTENDERS)}
        for row in sorted(self._rows, key=lambda row: (row["batch"], order[row["contender"]])):
            ratios = [self._ratio(row, name, "tokens_per_s", 2) for name in self._beside]
            first = [self._first(row)] if self._has_first else []
            setting = ["–" if row["ring_len"] is None else str(row["ring_len"]), row["state_dtype"]]
            rate = f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else _problem(row)
            times = ["–" if row.get(name) is None else f"{row[name]:.2f}" for name in self._columns.values()]
            yield [str(row["batch"]), _name(row), *setting, *ratios, rate, *times, *first]

    def _first(self, row: Row) -> str:
        """Of the turns in pairs, where they had some."""
        ratio = row.get("ttft_ratio")
        return self._ratio(row, "no-replay", "ttft_ms", 3) if ratio is None else f"{ratio:.3f}"

    def _ratio(self, row: Row, name: str, column: str, digits: int) -> str:
        other = self._at.get((name, row["batch"]))
        if other is None or other is row or not (row[column] and other[column]):
            return "–"
        return f"{row[column] / other[column]:.{digits}f}"


def _name(row: Row) -> str:
    """The contender; of a speculating one also its window, and how many tokens a step gave."""
    if row["speculate"] is None:
        return str(row["contender"])
    kept = row["tokens_per_step"]
    return f"{row['contender']} {row['speculate']}, T={row['window']}" + (f", {kept} kept" if kept else "")


def _problem(row: Row) -> str:
    return str(row.get("error", "–")).partition(":")[0]


def tables(rows: list[Row]) -> list[LoadTable]:
    """One for each load and context."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (LOADS.index(row["load"]), -row["prompt_tokens"])):
        groups.setdefault((row["load"], row["prompt_tokens"]), []).append(row)
    return [LoadTable(load, group) for (load, _), group in groups.items()]


def failures(rows: list[Row]) -> Iterator[str]:
    """A line for each row that failed."""
    for row in rows:
        if "error" in row:
            yield f"{row['contender']} {row['load']} B={row['batch']}: {row['error']}"
