"""What `tune` and the commands under `bench` share: messages on standard error, a run with a progress bar, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table

from replayssm.errors import InputError, one_line
from replayssm.folders import check_writable

Result = dict[str, Any]


def said() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False)


def shown() -> Console:
    """Standard output, with room for a result's tables where it is no terminal."""
    console = Console(highlight=False)
    console.width = max(console.width, 132)
    return console


def drawn(title: str, header: Iterable[str], lines: Iterable[Iterable[str]]) -> Table:
    """A table of numbers."""
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="right")
    for cells in lines:
        table.add_row(*cells)
    return table


def check_output(output: Path | None) -> None:
    """Refuse a file that can't be written, before minutes are spent on what would go into it."""
    if output is None:
        return
    if output.is_dir():
        raise InputError(f"output is {str(output)!r}, which is a folder: a file is wanted")
    try:
        check_writable(output)
    except OSError as error:
        raise unwritable(output, error) from error


def unwritable(output: Path, error: OSError) -> InputError:
    why = error.strerror or one_line(error)
    return InputError(f"{output} can't be written ({why}): name another file with --output")


@contextmanager
def progress(steps: int, first: str, timing: ProgressColumn) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error.

    Args:
        steps: how many there are.
        first: what is said until one is done.
        timing: the bar's last column.

    Yields:
        What to call after each step, with what it was.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), timing)
    console = said()
    # Elsewhere than on a terminal nothing would be shown but an empty line.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=steps)
        yield lambda done: bar.update(task, advance=1, description=done)


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

    with progress(num_points, "measuring", timing) as step_done:

        def advance(result: Result) -> None:
            if output is not None:
                report.write(result, output)
            step_done(described(result["rows"][-1]) if result["rows"] else "measuring")

        return run(advance)
