"""The `replayssm` command: parses, calls, prints. Bad input exits with 2 and one line on stderr."""

import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.status import Status

import replayssm
from replayssm.cli import bench as bench_commands
from replayssm.cli.chat import chat
from replayssm.cli.early import check_backend, check_drafter
from replayssm.cli.serve import serve
from replayssm.cli.tune import tune
from replayssm.cli.values import INTEGER, MODEL, NAMES, NUMBER, with_option_names
from replayssm.errors import InputError, one_line
from replayssm.loading.folder import check_model
from replayssm.options import (
    DEVICES,
    DTYPES,
    RING_DTYPES,
    SPECULATE,
    STATE_DTYPES,
    GenerateOptions,
    LoadOptions,
    check_prompt,
)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what writing to a full disk, or past a quota, ends with

app = typer.Typer(
    help="Decode hybrid language models from a checkpoint and a short ring of recent updates.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"replayssm {replayssm.__version__}")
        raise typer.Exit


def _status(what: str) -> Status:
    """A spinner while something takes its time; shown on a terminal only."""
    return Console(stderr=True).status(f"{what} ...")


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Text to continue; - reads it from standard input.")],
    model: Annotated[str, MODEL] = NAMES[0],
    max_new_tokens: Annotated[int, typer.Option(**INTEGER, help="Stop after this many tokens.")] = 128,
    ring_len: Annotated[int, typer.Option(**INTEGER, help="L: the state is written once in L steps.")] = 16,
    state_dtype: Annotated[str, typer.Option(help=f"Of the checkpoint: {', '.join(STATE_DTYPES)}.")] = "float32",
    ring_dtype: Annotated[str, typer.Option(help=f"Of the update vectors: {', '.join(RING_DTYPES)}.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, cpu, torch, triton or cuda (Hopper and newer).")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"Of the model: {', '.join(DTYPES)}; auto on a CPU: float32.")] = "auto",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "auto",
    temperature: Annotated[float, typer.Option(**NUMBER, help="0 is greedy, above it samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(**NUMBER, help="Sample from the smallest set with this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(**INTEGER, help="Sample from the k most likely tokens; 0 takes all.")] = 0,
    seed: Annotated[int | None, typer.Option(**INTEGER, help="Makes sampling repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the chat template, the prompt as message.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-text token.")] = False,
    no_replay: Annotated[bool, typer.Option("--no-replay", help="Use transformers' own step instead.")] = False,
    speculate: Annotated[str | None, typer.Option(help=f"Draft tokens ahead by {', '.join(SPECULATE)}.")] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Model folder or bundled name, for --speculate draft.")
    ] = None,
    num_draft: Annotated[int, typer.Option(**INTEGER, help="Draft at most so many tokens ahead.")] = 3,
    tree: Annotated[int, typer.Option(**INTEGER, help="Candidates for each place of a draft; 1 is a chain.")] = 1,
    fixed_draft: Annotated[bool, typer.Option("--fixed-draft", help="Always draft --num-draft tokens.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it is generated.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Generate text with a model folder or a bundled model."""
    if stream and as_json:
        raise InputError("--stream and --json were both given: choose one")
    options = GenerateOptions(
        max_new_tokens=max_new_tokens,
        ring_len=ring_len,
        state_dtype=state_dtype,
        ring_dtype=ring_dtype,
        backend=backend,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        chat=chat,
        ignore_eos=ignore_eos,
        replay=not no_replay,
        speculate=speculate,
        draft_model=draft_model,
        num_draft=num_draft,
        tree=tree,
        fixed_draft=fixed_draft,
    )
    load_options = LoadOptions(dtype=dtype, device=device)
    if prompt == "-" and sys.stdin is None:
        raise InputError("the prompt is to be read from standard input, which is closed")
    text = sys.stdin.read() if prompt == "-" else prompt
    check_prompt(text)
    check_model(model)
    if draft_model is not None:
        check_model(draft_model, name="draft-model")

    if options.replay:
        check_backend(backend, device)
    check_drafter(model, speculate)

    from replayssm.cli.generate import check_request
    from replayssm.cli.generate import generate as run_generate
    from replayssm.loading import load_model, use_fitting_threads

    out = sys.stdout
    with _status(f"loading {model}"):
        tokenizer, tokens = check_request(model, text, options, load_options)
        loaded = load_model(model, load_options, tokenizer)
    use_fitting_threads(loaded)
    if stream and out is not None:
        result = run_generate(loaded, tokens, options, on_text=_writer(out))
    else:
        with _status(f"generating {max_new_tokens} tokens"):
            result = run_generate(loaded, tokens, options)
    if as_json:
        typer.echo(json.dumps(result.model_dump()))
        return
    typer.echo("" if stream else result.text)
    Console(stderr=True, highlight=False).print(
        f"{result.new_tokens} tokens in {result.seconds:.2f} s ({result.tokens_per_second:.1f} tokens/s)"
        f"{', ended by an end-of-text token' if result.finish_reason == 'stop' else ''}, "
        f"backend {result.backend}, {result.flushes} flushes, state written "
        f"{result.state_bytes_written:,} of {result.state_bytes_written_stepwise:,} bytes stepwise{_told(result)}",
        style="dim",
        soft_wrap=True,
    )


# Here, not above: the help lists commands in the order in which they come.
app.command()(serve)
app.command()(chat)


def _told(result: Any) -> str:
    """What speculation was worth, for the summary line."""
    told = result.speculation
    if told is None:
        return ""
    return f"; {told.tokens_per_step:.2f} tokens a step, of drafts {told.accepted} in {told.drafted} accepted"


def _console() -> Console:
    """Standard output, wide enough for the tables also where it isn't a terminal."""
    console = Console(highlight=False)
    console.width = max(console.width, 112)
    return console


def _writer(out: TextIO) -> Any:
    def write(text: str) -> None:
        out.write(text)
        out.flush()

    return write


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Say what runs on this machine and why.

    Exit with 1 if a needed part is missing or out of range.
    """
    from replayssm.cli.doctor import examine, render

    report = examine()
    if as_json:
        typer.echo(json.dumps(report.model_dump()))
    else:
        render(report, _console())
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def demo(
    max_new_tokens: Annotated[int, typer.Option(**INTEGER, help="Tokens for each model.")] = 256,
    ring_len: Annotated[int, typer.Option(**INTEGER, help="L: the state is written once in L steps.")] = 16,
) -> None:
    """Generate with and without replay.

    Each bundled model does both. Exit with 1 if any token differs.
    """
    options = GenerateOptions(max_new_tokens=max_new_tokens, ring_len=ring_len, ignore_eos=True)

    from replayssm.cli.demo import run_demo

    if not run_demo(options, _console()):
        raise typer.Exit(1)


app.command()(tune)
app.add_typer(bench_commands.app, name="bench")


def run(args: Sequence[str] | None = None) -> int:
    """Run the command with `args` (default: the process's own) and return its exit code."""
    args = list(sys.argv[1:] if args is None else args) or ["--help"]
    debug = os.environ.get("REPLAYSSM_DEBUG", "") not in ("", "0")
    try:
        code = typer.main.get_command(app).main(args=args, prog_name="replayssm", standalone_mode=False)
    except InputError as error:
        if debug:
            raise
        return _fail(2, "error", with_option_names(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (e.g. `| head`) has enough: say nothing, also not when Python flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL and not debug:
            return _fail(1, "error", f"what was to be written is lost: {error.strerror}")
        if hasattr(error, "format_message"):  # what typer says about unknown options and values that don't parse
            return _fail(2, "error", error.format_message())
        if debug:
            raise
        return _fail(1, "internal error (REPLAYSSM_DEBUG=1 shows where)", f"{type(error).__name__}: {one_line(error)}")
    return code if isinstance(code, int) else 0


def _fail(code: int, label: str, message: object) -> int:
    typer.echo(f"replayssm: {label}: {' '.join(str(message).split())}", err=True)
    return code


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what the terminal's encoding lacks is shown as ?
        sys.stdout.reconfigure(errors="replace")
    sys.exit(run())
