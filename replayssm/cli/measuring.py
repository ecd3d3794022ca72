"""What the commands under `bench` share: messages on standard error, and a run with a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

Result = dict[str, Any]


def said() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False)


def measured(
    run: Callable[[Callable[[Result], None]], Result],
    num_points: int,
    output: Path | None,
    described: Callable[[Result], str],
    timing: ProgressColumn,
) -> Result:
    """Run a suite behind a progress bar.

    Args:
        run: measures all points, calls what it is given with the result so far after each, and gives the whole result.
        num_points: how many there are.
        output: file that the result is written to after each point, so that what is measured is kept, whatever comes
            after it.
        described: says what a row, the last one measured, is of.
        timing: the bar's last column.
    """
    from replayssm.bench import report

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), timing)
    with Progress(*columns, console=said(), transient=True) as progress:
        task = progress.add_task("measuring", total=num_points)

        def advance(result: Result) -> None:
            if output is not None:
                report.write(result, output)
            last = described(result["rows"][-1]) if result["rows"] else "measuring"
            progress.update(task, advance=1, description=last)

        return run(advance)
