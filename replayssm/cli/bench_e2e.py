"""`replayssm bench e2e`: options, checks and printing; :mod:`replayssm.bench.e2e` measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TimeElapsedColumn

from replayssm.bench.rows import CONTENDERS, FILLED, LOADS, SHARED_PREFIX
from replayssm.cli.lists import names, numbers
from replayssm.cli.measuring import check_output, drawn, measured, said, shown
from replayssm.cli.values import NAMES
from replayssm.errors import InputError
from replayssm.loading.folder import CONFIG_FILE, WHOLE_FOLDER, check_model
from replayssm.options import BACKENDS, DEVICES, DTYPES, MAX_DRAFT, MAX_RING_LEN, STATE_DTYPES, LoadOptions

if TYPE_CHECKING:
    from replayssm.bench.e2e import Options
    from replayssm.loading import LoadedModel

MAX_ROWS = 1024
MAX_TOKENS = 100_000
MAX_SECONDS = 1_000_000


def e2e(
    model: Annotated[
        str, typer.Option(help=f"Model folder, a config's JSON file for random weights, or one of {', '.join(NAMES)}.")
    ] = NAMES[0],
    batch: Annotated[str, typer.Option(help="Rows of the filled load, e.g. 1,8,64. [default: by device]")] = "",
    requests: Annotated[str, typer.Option(metavar="INTEGER", help="Requests of the other loads.")] = "8",
    prompt_tokens: Annotated[
        str, typer.Option(metavar="INTEGER", help="Tokens of a prompt. [default: by device]")
    ] = "",
    context: Annotated[
        str, typer.Option(help="Tokens of the filled load's contexts, e.g. 1000,128. [default: prompt-tokens]")
    ] = "",
    new_tokens: Annotated[str, typer.Option(metavar="INTEGER", help="Tokens of an answer, or timed steps.")] = "64",
    ring_len: Annotated[str, typer.Option(metavar="INTEGER", help="L: a state is written once in L steps.")] = "16",
    num_draft: Annotated[str, typer.Option(metavar="INTEGER", help="Drafts of a verify window.")] = "3",
    kept: Annotated[
        str, typer.Option(metavar="INTEGER", help="Tokens that the filled load keeps of each window.")
    ] = "3",
    adapt: Annotated[
        bool,
        typer.Option("--adapt", help="No windows in the filled load either where that is faster."),
    ] = False,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Draw the filled load's tokens at temperature 1 with top-p 0.95.")
    ] = False,
    load: Annotated[str, typer.Option(help=f"all, or some of {', '.join(LOADS)}.")] = "all",
    contender: Annotated[str, typer.Option(help=f"all, or some of {', '.join(CONTENDERS)}.")] = "all",
    state_dtype: Annotated[str, typer.Option(help=f"Of the checkpoint: {', '.join(STATE_DTYPES)}.")] = "float32",
    backend: Annotated[str, typer.Option(help=f"Of the operators: {', '.join(BACKENDS)}.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"Of the model: {', '.join(DTYPES)}; auto goes by the device.")] = "auto",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "auto",
    rounds: Annotated[str, typer.Option(metavar="INTEGER", help="Turns of each contender.")] = "3",
    seconds: Annotated[
        str, typer.Option(metavar="INTEGER", help="Begin no point later than this. [default: no limit]")
    ] = "",
    output: Annotated[Path | None, typer.Option(help="Write the result to this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Time the engine with replay, without, with speculation, beside transformers' generate.

    Tokens per second, time to first token and time per output token. Exit with 1 if one of ours fails.
    """
    given = {
        "requests": _number("requests", requests, MAX_ROWS),
        "new_tokens": _number("new-tokens", new_tokens, MAX_TOKENS),
        "ring_len": _number("ring-len", ring_len, MAX_RING_LEN),
        "num_draft": _number("num-draft", num_draft, MAX_DRAFT),
        "kept": _number("kept", kept, MAX_DRAFT + 1),
        "rounds": _number("rounds", rounds, 100),
    }
    if given["kept"] > given["num_draft"] + 1:
        raise InputError(f"kept is {kept}: a window of {num_draft} drafts has {given['num_draft'] + 1} tokens")
    (operators,) = names("backend", backend, BACKENDS, only_one=True)
    (state,) = names("state-dtype", state_dtype, STATE_DTYPES, only_one=True)
    loads = LOADS if load == "all" else names("load", load, LOADS)
    contenders = CONTENDERS if contender == "all" else names("contender", contender, CONTENDERS)
    batches = numbers("batch", batch, MAX_ROWS) if batch else ()
    contexts = numbers("context", context, MAX_TOKENS) if context else ()
    limit = _number("seconds", seconds, MAX_SECONDS) if seconds else None
    prompts = _number("prompt-tokens", prompt_tokens, MAX_TOKENS) if prompt_tokens else None
    if contenders == ("transformers",) and loads == (SHARED_PREFIX,):
        raise InputError("load is shared-prefix and contender transformers: it has no prefix cache, so nothing is left")
    check_output(output)
    load_options = LoadOptions(dtype=dtype, device=device)
    most = _context_of(model)

    from replayssm.bench.e2e import Options
    from replayssm.loading import settled

    on_gpu = settled(load_options)[0] != "cpu"
    options = Options(
        loads=loads,
        contenders=contenders,
        state_dtype=state,
        backend=operators,
        adapt=adapt,
        sampled=sampled,
        contexts=contexts,
        seconds=limit,
        batches=batches or ((1, 8, 32, 64, 128, 256, 512) if on_gpu else (1, 4)),
        prompt_tokens=prompts or (1000 if on_gpu else 128),
        **given,
    )
    _check_context(model, most, options)
    loaded = _load(model, load_options)
    _report(_run(loaded, options, output), as_json)


def _is_config(model: str) -> bool:
    return Path(model).suffix == ".json" and Path(model).is_file()


def _context_of(model: str) -> int | None:
    """The tokens that a model was made for, prompt and answer together; None: no limit. Checks the model."""
    if _is_config(model):
        from replayssm.bench.random_model import make_config

        config = make_config(Path(model))  # which reads the file before it imports anything heavy
    else:
        folder = check_model(model, f"{WHOLE_FOLDER}, {CONFIG_FILE}")

        from replayssm.loading import load_config, quiet_libraries

        with quiet_libraries():
            config = load_config(folder)

    from replayssm.loading import context_of

    return context_of(config)


def _load(model: str, options: LoadOptions) -> LoadedModel:
    """The model with its weights, or with random ones."""
    with said().status(f"loading {model} ..."):
        from replayssm.bench.random_model import random_model
        from replayssm.loading import load_model, settled, use_fitting_threads

        if _is_config(model):
            device, dtype = settled(options)
            loaded = random_model(Path(model), "bfloat16" if dtype == "auto" else dtype, device)
        else:
            loaded = load_model(model, options)
    use_fitting_threads(loaded)
    return loaded


def _check_context(model: str, most: int | None, options: Options) -> None:
    """Refuse what the model wasn't made for."""
    if most is not None and options.most_tokens > most:
        given = f"prompt-tokens is {options.prompt_tokens}, new-tokens {options.new_tokens}"
        if options.contexts:
            given += f", context {max(options.contexts)}"
        steps = ", with the filled load's steps" if FILLED in options.loads else ""
        raise InputError(f"{given}: {options.most_tokens} tokens{steps}, and {model} was made for {most}")


def _run(loaded: LoadedModel, options: Options, output: Path | None) -> dict[str, Any]:
    from replayssm.bench.e2e import run

    return measured(
        lambda advance: run(loaded, options, advance),
        options.num_points,
        output,
        lambda row: f"{row['load']} B={row['batch']}",
        TimeElapsedColumn(),
    )


def _report(result: dict[str, Any], as_json: bool) -> None:
    from replayssm.bench import e2e_report

    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(result)
    failed = list(e2e_report.failures(result["rows"]))
    for line in failed:
        said().print(line, style="red", soft_wrap=True, markup=False)
    if any(not line.startswith("transformers ") for line in failed):
        raise typer.Exit(1)


def _print(result: dict[str, Any]) -> None:
    from replayssm.bench import e2e_report

    console = shown()
    tables = e2e_report.tables(result["rows"])
    for table in tables:
        console.print(drawn(table.title, table.header, table.lines()))
    if any(name.startswith("×") for table in tables for name in table.header):
        console.print("× says how many times the tokens per second of another a line makes")


def _number(name: str, text: str, most: int) -> int:
    (number,) = numbers(name, text, most, only_one=True)
    return number
