"""Write the tables of the documents from the stored results, so that no number is typed by hand.

A document marks a table's place by two comments; what stands between them is replaced::

    <!-- table: nvidia-h200/decode op=gdn_decode ring_len=16 -->
    <!-- end of table -->

The first word names a file in benchmarks/results, the others keep the rows that have these values. `targets:` in place
of `table:` asks for the targets beside what the files of a folder say.

Usage: python -m benchmarks.tables [--check] [DOCUMENT ...]
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.stored import RESULTS, ROOT, bring_up_to_date
from replayssm.bench import e2e_report, report

PLACE = re.compile(r"(<!-- (table|targets): (\S+)((?: \w+=\S+)*) -->\n).*?(<!-- end of table -->)", re.DOTALL)


class TableError(ValueError):
    """A mark asks for what the results don't hold; the message is one line."""


def kept(rows: list[dict[str, Any]], wanted: dict[str, str]) -> list[dict[str, Any]]:
    """Rows with these values.

    A contender without a ring has no L and stays for every L; a decode step stays beside windows of every T.
    """

    def fits(row: dict[str, Any], key: str, value: str) -> bool:
        stays = key == "window" and row.get("op", "").endswith("_decode")
        return stays or str(row[key]) == value or (key == "ring_len" and row[key] is None)

    for key in wanted:
        if rows and key not in rows[0]:
            raise TableError(f"rows have no {key}")
    return [row for row in rows if all(fits(row, key, value) for key, value in wanted.items())]


def markdown(name: str, wanted: dict[str, str], results: Path = RESULTS) -> str:
    """The tables of one result, each with its operator as heading line, and where the numbers come from."""
    path = results / f"{name}.json"
    if not path.is_file():
        raise TableError(f"there is no {path.name} in {path.parent.name}")
    result = json.loads(path.read_text())
    rows = kept(result["rows"], wanted)
    if not rows:
        raise TableError(f"{name} has no rows with {' '.join(f'{k}={v}' for k, v in wanted.items())}")
    parts = []
    made: Sequence[Any] = (e2e_report if result["meta"].get("suite") == "e2e" else report).tables(rows)
    parts += [f"{table.title}:\n\n{_grid(table.header, table.lines(), '--:')}" for table in made]
    return "\n\n".join(parts) + f"\n\n{origin(result['meta'])}\n"


def target_table(name: str, results: Path = RESULTS) -> str:
    """Targets beside the values of all the suites that a folder has."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((results / name).glob("*.json"))}
    if not found:
        raise TableError(f"there are no results in {name}")
    lines = targets.lines({suite: result["rows"] for suite, result in found.items()})
    origins = (origin(result["meta"]) for suite, result in found.items() if suite in targets.SUITES)
    return "\n\n".join([_grid(targets.HEADER, lines, "---"), *origins]) + "\n"


def _grid(header: Sequence[str], lines: Iterable[Sequence[str]], alignment: str) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, [alignment] * len(header), *lines])


def origin(meta: dict[str, Any]) -> str:
    """One line on where the numbers come from."""
    where = meta.get("gpu") or f"{meta['cpu']}, {meta['threads']} threads"
    versions = [f"{name} {meta[name]}" for name in ("torch", "triton", "transformers") if meta.get(name)]
    beside = [f"{name} {version}" for key in ("rivals", "packages") for name, version in meta.get(key, {}).items()]
    parts = [where, f"read bandwidth {meta['read_tbps']} TB/s", *versions, *beside, meta["date"]]
    if len(runs := meta.get("runs", [])) > 1:
        parts.append(f"{len(runs)} runs")
    if meta.get("points_measured", 0) < meta.get("points", 0):
        parts.append(f"{meta['points_measured']} of {meta['points']} points")
    return f"*{', '.join(parts)}; {_sources(meta)}.*"


def _sources(meta: dict[str, Any]) -> str:
    """The commit, and the digest of the sources where they were not the commit's own."""
    commit = meta.get("commit") or "unknown"
    if "source" not in meta or not (commit == "unknown" or commit.endswith("-dirty")):
        return f"commit {commit}"
    return f"sources {meta['source']}"


def filled(text: str, results: Path = RESULTS) -> str:
    """A document with its tables as the results have them now."""

    def table(match: re.Match[str]) -> str:
        mark, kind, name, rest, end = match.groups()
        if kind == "targets":
            return f"{mark}{target_table(name, results)}{end}"
        wanted = dict(pair.split("=", 1) for pair in rest.split())
        return f"{mark}{markdown(name, wanted, results)}{end}"

    return PLACE.sub(table, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit with 1 if a table is out of date")
    parser.add_argument("documents", nargs="*", type=Path, help="default: all of docs/ and the README")
    options = parser.parse_args(arguments)
    files = []
    for path in options.documents or [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        try:
            files.append((path, filled(path.read_text())))
        except TableError as error:
            print(f"benchmarks.tables: {path.name}: {error}", file=sys.stderr)
            return 2
    return bring_up_to_date(files, check=options.check, done="written")


if __name__ == "__main__":
    sys.exit(main())
