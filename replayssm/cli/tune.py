"""`replayssm tune`: options, checks and printing; :mod:`replayssm.tuner` measures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.table import Table

from replayssm import bundled
from replayssm.cli.bench import MAX_BATCH
from replayssm.cli.lists import names, numbers
from replayssm.cli.measuring import check_output, progress, said, unwritable
from replayssm.errors import InputError
from replayssm.options import MAX_RING_LEN, STATE_DTYPES
from replayssm.tuned import Tuned, TunedLayer, own_file, save, unparse

if TYPE_CHECKING:
    from replayssm.tuner.search import Call, Options, Timer

BATCHES, QUICK_BATCHES = "1,8,32,64,128,256,512", "1,8,64,256"
RING_LENS, QUICK_RING_LENS = "1,2,4,8,16,32", "1,8,16"
REPLAYS, QUICK_REPLAYS = 20, 9


def tune(
    model: Annotated[
        str | None,
        typer.Option(
            help=f"Whose layers: a model folder, a config's JSON file, or {', '.join(bundled.names())}. "
            "[default: one layer of a released model of each kind]"
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help=f"Rows of a step. [default: {BATCHES}]")] = "",
    state_dtype: Annotated[str, typer.Option(help=f"Some of {', '.join(STATE_DTYPES)}.")] = "float32,bfloat16",
    dtype: Annotated[str, typer.Option(help=f"Of the model: one of {', '.join(STATE_DTYPES)}.")] = "bfloat16",
    ring_len: Annotated[str, typer.Option(help=f"L, to choose from. [default: {RING_LENS}]")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer batches, flush periods and repetitions.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="File for the result. [default: the user's own, in the cache folder]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's content and nothing else.")] = False,
) -> None:
    """Measure on this GPU which flush period and which launch settings are fastest.

    For a model's layers. The result is kept in a file, and used from then on by every decode step of such layers; no
    bit of what a step computes changes.
    """
    batches = numbers("batch", batch or (QUICK_BATCHES if quick else BATCHES), MAX_BATCH)
    ring_lens = numbers("ring-len", ring_len or (QUICK_RING_LENS if quick else RING_LENS), MAX_RING_LEN)
    state_dtypes = names("state-dtype", state_dtype, STATE_DTYPES)
    (activations,) = names("dtype", dtype, STATE_DTYPES, only_one=True)
    gpu = check_gpu()
    path = output or own_file(gpu)
    check_output(path)
    options = make_options(model, batches, state_dtypes, activations, ring_lens)
    tuned = measure(options, gpu, QUICK_REPLAYS if quick else REPLAYS)
    try:
        save(tuned, path)
    except OSError as error:
        raise unwritable(path, error) from error
    if as_json:
        typer.echo(json.dumps(json.loads(unparse(tuned))))
        return
    console = Console(highlight=False)
    console.width = max(console.width, 112)
    for layer in tuned.layers:
        show(layer, console)
    console.print(f"kept in {path}", soft_wrap=True)


def check_gpu() -> str:
    """The name of the GPU whose kernels have settings.

    Raises:
        InputError: there is none.
    """
    import torch

    from replayssm import ops

    missing = ops.unavailable_reason("cuda")
    if missing is not None:
        raise InputError(f"there is nothing to tune here, only the cuda backend's kernels have settings: {missing}")
    return torch.cuda.get_device_name()


def make_options(
    model: str | None,
    batches: tuple[int, ...],
    state_dtypes: tuple[str, ...],
    activations: str,
    ring_lens: tuple[int, ...],
) -> Options:
    """What is measured: layers that have kernels; of others a line says why they have none.

    Raises:
        InputError: the model has no other layers.
    """
    import torch

    from replayssm.bench.workload import SHAPES
    from replayssm.tuner.layers import layers_of, with_kernels
    from replayssm.tuner.search import Options

    layers = {kind: [spec] for kind, spec in SHAPES.items()} if model is None else layers_of(model)
    layers, notes = with_kernels(layers)
    for note in notes:
        said().print(note, style="dim", soft_wrap=True)
    if not layers:
        raise InputError(f"{model} has no layers that the cuda backend has kernels for: triton runs them, untuned")
    return Options(
        layers=layers,
        batches=batches,
        state_dtypes=tuple(getattr(torch, name) for name in state_dtypes),
        activation_dtype=getattr(torch, activations),
        ring_lens=ring_lens,
    )


def measure(options: Options, gpu: str, replays: int) -> Tuned:
    """Measure on the GPU, behind a progress bar, which says what was measured last."""
    from replayssm.ops.checks import dtype_name
    from replayssm.tuner.search import tune

    def described(call: Call) -> str:
        return f"{call.kind} {dtype_name(call.state_dtype)} L={call.ring_len} B={call.batch}"

    bar = progress(options.num_steps, "compiling", TimeRemainingColumn())
    with gpu_timer(replays) as (timer, made_with), bar as step_done:
        layers = tune(options, timer, lambda call: step_done(described(call)))
    return Tuned(gpu, made_with, layers)


@contextmanager
def gpu_timer(replays: int) -> Iterator[tuple[Timer, dict[str, str]]]:
    """What measures on the current GPU, and what it measures with: versions and the kernels' source."""
    import torch

    from replayssm.backends.cuda import build, launch
    from replayssm.bench.measure import environment
    from replayssm.tuner.ahead import Compilers
    from replayssm.tuner.measure import GpuTimer

    device = torch.device("cuda", torch.cuda.current_device())
    compilers = Compilers(launch.properties(device))
    about = {name: str(value) for name, value in environment(device).items()}
    try:
        yield GpuTimer(device, compilers, replays), about | {"kernels": build.fingerprint({}, "")}
    finally:
        compilers.close()


def show(layer: TunedLayer, console: Console) -> None:
    """What was measured of a layer, and chosen."""
    ring = layer.ring
    chosen = f"L = {ring.ring_len}" + (" (every step writes the state)" if ring.ring_len == 1 else "")
    console.print(f"{layer.shape}: {chosen}, updates in {ring.ring_dtype}; µs of a step", soft_wrap=True)
    table = Table("L, updates")
    for batch in ring.batches:
        table.add_column(f"B={batch}", justify="right")
    for name, times in ring.us.items():
        table.add_row(name, *(f"{us:.1f}" for us in times))
    cuts = {cut.batch: cut for cut in layer.cuts}
    table.add_section()
    table.add_row("best cut", *(_cell(cuts.get(batch), lambda cut: f"{cut.us:.1f}") for batch in ring.batches))
    table.add_row("its gain", *(_cell(cuts.get(batch), _gain) for batch in ring.batches))
    table.add_row("rows×warps/resident", *(_cell(cuts.get(batch), _block) for batch in ring.batches))
    console.print(table)


def _cell(cut: Any, said: Callable[[Any], str]) -> str:
    return "" if cut is None else said(cut)


def _gain(cut: Any) -> str:
    return f"{100 * (cut.us_untuned / cut.us - 1):.0f} %" if cut.block else "-"


def _block(cut: Any) -> str:
    if not cut.block:
        return "as chosen"
    return f"{cut.block.get('rows')}×{cut.block.get('warps')}/{cut.block.get('resident')}"
