"""`replayssm bench`: options, checks and printing; :mod:`replayssm.bench` measures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TimeRemainingColumn

from replayssm.cli.bench_e2e import MAX_SECONDS, e2e
from replayssm.cli.lists import names, numbers, texts
from replayssm.cli.measuring import check_output, drawn, measured, said, shown
from replayssm.errors import InputError
from replayssm.options import DEVICES, MAX_RING_LEN, STATE_DTYPES

if TYPE_CHECKING:
    from replayssm.bench.contenders import Contender
    from replayssm.bench.measure import Entries, Options

KINDS = ("gdn", "kda", "mamba2")
DEFAULT_RIVALS = Path(".rivals")
MAX_BATCH = 4096
MAX_WINDOW = 16
MAX_REPLAYS = 10_000
COMPILE_SHARE = 0.6  # of the time limit, at most

app = typer.Typer(help="Measure operators and the engine on this machine.", rich_markup_mode=None)
app.command()(e2e)


@app.callback()
def _bench() -> None:
    pass


Op = Annotated[str, typer.Option(help=f"all, or some of {', '.join(KINDS)}.")]
Batch = Annotated[str, typer.Option(help="Rows of a call, e.g. 1,8,64. [default: by device]")]
StateDtype = Annotated[str, typer.Option(help=f"Some of {', '.join(STATE_DTYPES)}. [default: by device]")]
Device = Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")]
Rivals = Annotated[
    Path | None, typer.Option(help="Folder of other projects' kernels. [default: .rivals, if it is there]")
]
Who = Annotated[str, typer.Option("--contender", help="all, or some, e.g. replayssm/cuda,sglang (all of SGLang's).")]
Seconds = Annotated[
    str,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="Of all, compiling included; what comes last is left out. [default: no limit]",
    ),
]
Replays = Annotated[str, typer.Option(metavar="INTEGER", help="Walks that are timed.")]
CompileFirst = Annotated[bool, typer.Option(help="On a GPU, compile in parallel before measuring.")]
Output = Annotated[Path | None, typer.Option(help="Write the result to this file, too.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@app.command()
def decode(
    op: Op = "all",
    batch: Batch = "",
    state_dtype: StateDtype = "",
    ring_len: Annotated[str, typer.Option(help="L, one or more.")] = "16",
    device: Device = "auto",
    rivals: Rivals = None,
    contender: Who = "all",
    replays: Replays = "30",
    time_limit: Seconds = "",
    compile_first: CompileFirst = True,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time one decode step of one layer, ours beside rivals.

    On a GPU beside SGLang's and vLLM's kernels, on a CPU beside transformers' own step. Exit with 1 if one of ours is
    wrong or fails.
    """
    ring_lens = numbers("ring-len", ring_len, MAX_RING_LEN)
    who = () if contender == "all" else texts("contender", contender)
    shared = _shared_options(op, batch, state_dtype, device, replays, time_limit, rivals, output)

    from replayssm.bench import decode as suite

    options = suite.DecodeOptions(**shared, ring_lens=ring_lens)
    contenders = _announced(*suite.contenders_of(options), who)
    _measure(options, lambda: suite.points(options, contenders), compile_first, output, as_json)


@app.command()
def verify(
    op: Op = "all",
    batch: Batch = "",
    state_dtype: StateDtype = "",
    window: Annotated[str, typer.Option(help="T, tokens of a window, one or more.")] = "1,2,4,8",
    ring_len: Annotated[str, typer.Option(metavar="INTEGER", help="L, a multiple of each T.")] = "16",
    device: Device = "auto",
    rivals: Rivals = None,
    contender: Who = "all",
    replays: Replays = "30",
    time_limit: Seconds = "",
    compile_first: CompileFirst = True,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Time a verify window of one layer, ours beside rivals and beside our decode step.

    On a GPU the rivals are other projects' kernels. Exit with 1 if one of ours is wrong or fails.
    """
    windows = numbers("window", window, MAX_WINDOW)
    (length,) = numbers("ring-len", ring_len, MAX_RING_LEN, only_one=True)
    for tokens in windows:
        if length % tokens:
            raise InputError(f"window is {str(tokens)!r}: it must divide ring-len, {length}")
    who = () if contender == "all" else texts("contender", contender)
    shared = _shared_options(op, batch, state_dtype, device, replays, time_limit, rivals, output)

    from replayssm.bench import verify as suite

    options = suite.VerifyOptions(**shared, windows=windows, ring_len=length)
    contenders = _announced(*suite.contenders_of(options), who)
    _measure(options, lambda: suite.points(options, contenders), compile_first, output, as_json)


def _shared_options(
    op: str,
    batch: str,
    state_dtype: str,
    device: str,
    replays: str,
    time_limit: str,
    rivals: Path | None,
    output: Path | None,
) -> dict[str, Any]:
    """What the suites have in common, checked before torch is loaded; the device chooses what is not given."""
    kinds = KINDS if op == "all" else names("op", op, KINDS)
    (count,) = numbers("replays", replays, MAX_REPLAYS, only_one=True)
    limit = numbers("time-limit", time_limit, MAX_SECONDS, only_one=True)[0] if time_limit else None
    batches = numbers("batch", batch, MAX_BATCH) if batch else ()
    dtypes = names("state-dtype", state_dtype, STATE_DTYPES) if state_dtype else ()
    _check_paths(rivals, output)
    if device not in DEVICES:
        raise InputError(f"device is {device!r}: it must be one of {', '.join(DEVICES)}")

    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise InputError("device is 'cuda', but torch sees no GPU: use cpu or auto")
    on_gpu = has_gpu and device != "cpu"
    folder = rivals if rivals is not None else DEFAULT_RIVALS if DEFAULT_RIVALS.is_dir() else None
    state_dtypes = dtypes or (("float32", "bfloat16") if on_gpu else ("float32",))
    return {
        "kinds": kinds,
        "batches": batches or ((1, 8, 32, 64, 128, 256, 512) if on_gpu else (1, 8)),
        "state_dtypes": tuple(getattr(torch, name) for name in state_dtypes),
        "device": torch.device("cuda" if on_gpu else "cpu"),
        "replays": count,
        "rivals": None if folder is None else folder.resolve(),
        "seconds": limit,
    }


def _announced(contenders: list[Contender], notes: list[str], who: tuple[str, ...]) -> list[Contender]:
    from replayssm.bench.contenders import chosen

    taking_part = chosen(contenders, who) if who else contenders
    for note in notes:
        said().print(note, style="dim", soft_wrap=True)
    return taking_part


def _measure(
    options: Options, points: Callable[[], Iterable[Entries]], compiles: bool, output: Path | None, as_json: bool
) -> None:
    """Run a suite and print what came of it. Exits with 1 if one of ours is wrong or fails."""
    from replayssm.bench import report
    from replayssm.bench.ahead import compile_ahead, without

    planned, limit, took = points(), options.seconds, 0.0
    if compiles and options.device.type == "cuda":
        start = time.perf_counter()
        with said().status("compiling"):
            late = compile_ahead(points(), seconds=limit and limit * COMPILE_SHARE)
        took = time.perf_counter() - start
        said().print(f"compiled in {took:.0f} s", style="dim")
        for what in sorted(" ".join(map(str, key)) for key in late):
            said().print(f"not compiled in time, and left out: {what}", style="dim", soft_wrap=True)
        options = replace(options, seconds=limit and max(1, limit - took))
        planned = without(planned, late)
    result = _run(options, planned, output)
    meta = result["meta"]
    phases = ", ".join(f"{name} {seconds:.0f}" for name, seconds in meta.get("seconds_in", {}).items())
    done = f"{meta['points_measured']} of {meta['points']} points measured in {meta.get('seconds', 0):.0f} s"
    said().print(f"{done} ({phases})", style="dim", soft_wrap=True)
    left = meta["points"] - meta["points_measured"]
    if left:
        compiled = f", of which compiling took {took:.0f}" if took else ""
        said().print(f"{left} points left out: they don't fit --time-limit, {limit} s{compiled}", soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)
    failed = list(report.failures(result["rows"]))
    for line in failed:
        said().print(line, style="red", soft_wrap=True, markup=False)
    if any(line.startswith("replayssm/") for line in failed):
        raise typer.Exit(1)


def _run(options: Options, points: Iterable[Entries], output: Path | None) -> dict[str, Any]:
    from replayssm.bench.measure import run

    def described(row: dict[str, Any]) -> str:
        return f"{row['op']} {row['state_dtype']} B={row['batch']}"

    return measured(
        lambda advance: run(options, points, advance), options.num_points, output, described, TimeRemainingColumn()
    )


def _print(result: dict[str, Any]) -> None:
    from replayssm.bench import report

    meta, rows = result["meta"], result["rows"]
    console = shown()
    where = meta.get("gpu") or f"CPU ({meta['cpu']}, {meta['threads']} threads)"
    tables = report.tables(rows)
    for table in tables:
        what = "one window of one layer" if table.has_windows else "one step of one layer"
        header = [name.replace("/", "\n") for name in table.header]
        console.print(drawn(f"{what}, {table.title}, {where}", header, table.lines()))
    legend = {
        "×": "× says how many times ours a rival's time is",
        "roofline": f"roofline is ours against {meta['read_tbps']} TB/s, the read bandwidth of this run",
        "/": "/ decode is a window's time over that of our decode step",
    }
    columns = {name.partition(" ")[0] for table in tables for name in table.header}
    told = [text for begins, text in legend.items() if begins in columns]
    if told:
        console.print("; ".join(told))


def _check_paths(rivals: Path | None, output: Path | None) -> None:
    if rivals is not None and not rivals.is_dir():
        raise InputError(f"rivals is {str(rivals)!r}, which is not a folder: docs/benchmarks.md says how to fill one")
    check_output(output)
