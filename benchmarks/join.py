"""Join results of one suite that were measured in several runs on one machine.

Where two runs have the same row, the later file's counts. Each row's roofline is that of its own run's bandwidth; what
the runs were is kept in the result's meta, and tables say how many there were.

Usage: python -m benchmarks.join FIRST SECOND [...] --output FILE
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from replayssm.bench.report import write

SAME = ("suite", "gpu", "cpu", "driver", "torch", "triton")
POINT = ("op", "load", "contender", "batch", "state_dtype", "ring_len", "window", "shape", "prompt_tokens", "sampled")


class JoinError(ValueError):
    """The results are not of one machine and suite; the message is one line."""


def joined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """One result with the rows of all."""
    metas = [result["meta"] for result in results]
    for key in SAME:
        values = {str(meta.get(key)) for meta in metas}
        if len(values) > 1:
            raise JoinError(f"{key} differs: {' and '.join(sorted(values))}")
    rows = {tuple(row.get(key) for key in POINT): row for result in results for row in result["rows"]}
    rivals = {name: version for meta in metas for name, version in meta.get("rivals", {}).items()}
    measured = sum(meta.get("points_measured", 0) for meta in metas)
    about = {**metas[-1], "rivals": rivals, "points": measured, "points_measured": measured, "runs": metas}
    return {"meta": about, "rows": list(rows.values())}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        write(joined([json.loads(path.read_text()) for path in options.results]), options.output)
    except JoinError as error:
        print(f"benchmarks.join: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
