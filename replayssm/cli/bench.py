"""`replayssm bench`: options, checks and printing; :mod:`replayssm.bench` measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from replayssm.errors import InputError
from replayssm.options import DEVICES, MAX_RING_LEN, STATE_DTYPES

if TYPE_CHECKING:
    from replayssm.bench.decode import DecodeOptions

KINDS = ("gdn", "kda", "mamba2")
DEFAULT_RIVALS = Path(".rivals")
MAX_BATCH = 4096
MAX_REPLAYS = 10_000

app = typer.Typer(help="Measure operators on this machine.", rich_markup_mode=None)


@app.callback()
def _bench() -> None:
    pass


@app.command()
def decode(
    op: Annotated[str, typer.Option(help=f"all, or some of {', '.join(KINDS)}.")] = "all",
    batch: Annotated[str, typer.Option(help="Rows of a call, e.g. 1,8,64. [default: by device]")] = "",
    state_dtype: Annotated[str, typer.Option(help=f"Some of {', '.join(STATE_DTYPES)}. [default: by device]")] = "",
    ring_len: Annotated[str, typer.Option(help="L, one or more.")] = "16",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "auto",
    rivals: Annotated[
        Path | None, typer.Option(help="Folder of other projects' kernels. [default: .rivals, if it is there]")
    ] = None,
    replays: Annotated[str, typer.Option(metavar="INTEGER", help="Walks that are timed.")] = "30",
    output: Annotated[Path | None, typer.Option(help="Write the result to this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Time one decode step of one layer, ours beside rivals.

    On a GPU beside SGLang's and vLLM's kernels, on a CPU beside transformers' own step. Exit with 1 if one of ours is
    wrong or fails.
    """
    kinds = KINDS if op == "all" else _names("op", op, KINDS)
    ring_lens = _numbers("ring-len", ring_len, MAX_RING_LEN)
    (count,) = _numbers("replays", replays, MAX_REPLAYS, only_one=True)
    batches = _numbers("batch", batch, MAX_BATCH) if batch else ()
    dtypes = _names("state-dtype", state_dtype, STATE_DTYPES) if state_dtype else ()
    _check_paths(rivals, output)
    if device not in DEVICES:
        raise InputError(f"device is {device!r}: it must be one of {', '.join(DEVICES)}")
    options = _options(kinds, batches, dtypes, ring_lens, device, count, rivals)

    from replayssm.bench import report
    from replayssm.bench.decode import contenders_of

    contenders, notes = contenders_of(options)
    said = Console(stderr=True, highlight=False)
    for note in notes:
        said.print(note, style="dim", soft_wrap=True)
    result = _run(options, contenders, output, said)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)
    failed = list(report.failures(result["rows"]))
    for line in failed:
        said.print(line, style="red", soft_wrap=True, markup=False)
    if any(line.startswith("replayssm/") for line in failed):
        raise typer.Exit(1)


def _options(
    kinds: tuple[str, ...],
    batches: tuple[int, ...],
    dtypes: tuple[str, ...],
    ring_lens: tuple[int, ...],
    device: str,
    replays: int,
    rivals: Path | None,
) -> DecodeOptions:
    import torch

    from replayssm.bench.decode import DecodeOptions

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise InputError("device is 'cuda', but torch sees no GPU: use cpu or auto")
    on_gpu = has_gpu and device != "cpu"
    folder = rivals if rivals is not None else DEFAULT_RIVALS if DEFAULT_RIVALS.is_dir() else None
    names = dtypes or (("float32", "bfloat16") if on_gpu else ("float32",))
    return DecodeOptions(
        kinds=kinds,
        batches=batches or ((1, 8, 32, 64, 128, 256, 512) if on_gpu else (1, 8)),
        state_dtypes=tuple(getattr(torch, name) for name in names),
        ring_lens=ring_lens,
        device=torch.device("cuda" if on_gpu else "cpu"),
        replays=replays,
        rivals=None if folder is None else folder.resolve(),
    )


def _run(options: DecodeOptions, contenders: Sequence[Any], output: Path | None, said: Console) -> dict[str, Any]:
    from replayssm.bench import report
    from replayssm.bench.decode import run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=said, transient=True) as progress:
        task = progress.add_task("measuring", total=options.num_points)

        def advance(result: dict[str, Any]) -> None:
            if output is not None:  # at once: what is measured is kept, whatever comes after it
                report.write(result, output)
            last = result["rows"][-1]
            progress.update(task, advance=1, description=f"{last['op']} {last['state_dtype']} B={last['batch']}")

        return run(options, list(contenders), advance)


def _print(result: dict[str, Any]) -> None:
    from replayssm.bench import report

    meta, rows = result["meta"], result["rows"]
    console = Console(highlight=False)
    console.width = max(console.width, 132)
    where = meta.get("gpu") or f"CPU ({meta['cpu']}, {meta['threads']} threads)"
    for op in report.operators(rows):
        table = report.DecodeTable(op, rows)
        drawn = Table(title=f"one step of one layer, {table.title}, {where}", title_justify="left")
        for name in table.header:
            drawn.add_column(name.replace("/", "\n"), justify="right")
        for cells in table.lines():
            drawn.add_row(*cells)
        console.print(drawn)
    console.print(
        f"× says how many times ours a rival's time is; roofline is ours against {meta['read_tbps']} TB/s, "
        "the read bandwidth of this run"
    )


def _check_paths(rivals: Path | None, output: Path | None) -> None:
    if rivals is not None and not rivals.is_dir():
        raise InputError(f"rivals is {str(rivals)!r}, which is not a folder: docs/benchmarks.md says how to fill one")
    if output is not None and output.is_dir():
        raise InputError(f"output is {str(output)!r}, which is a folder: a file is wanted")


def _split(name: str, text: str) -> list[str]:
    parts = [part for part in text.replace(",", " ").split() if part]
    if not parts:
        raise InputError(f"{name} is empty: values separated by commas are wanted")
    return list(dict.fromkeys(parts))


def _names(name: str, text: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    for part in (parts := _split(name, text)):
        if part not in choices:
            raise InputError(f"{name} is {part!r}: it must be one of {', '.join(choices)}")
    return tuple(parts)


def _numbers(name: str, text: str, most: int, only_one: bool = False) -> tuple[int, ...]:
    parts = _split(name, text)
    read: Callable[[str], bool] = lambda part: part.isascii() and part.isdigit() and 1 <= int(part) <= most  # noqa: E731
    for part in parts:
        if len(part) > 9 or not read(part):
            raise InputError(f"{name} is {part!r}: whole numbers from 1 to {most} are wanted")
    if only_one and len(parts) > 1:
        raise InputError(f"{name} is {text!r}: one number is wanted")
    return tuple(dict.fromkeys(int(part) for part in parts))
