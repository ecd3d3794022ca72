"""What `make demo` shows: text, speed and state traffic of the bundled models, with and without replay."""

from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from replayssm import bundled
from replayssm.cli.generate import GenerateResult, generate
from replayssm.loading import load_model, use_fitting_threads
from replayssm.options import GenerateOptions

PROMPT = "The Python standard library "


def run_demo(options: GenerateOptions, console: Console) -> bool:
    """Generate with each bundled model twice and print both runs side by side.

    Returns:
        Whether replay gave the tokens of step-by-step decoding for every model.
    """
    table = Table(title=f"{options.max_new_tokens} greedy tokens, L={options.ring_len}, float32")
    table.add_column("model")
    for column in ("path", "decode tokens/s", "flushes", "state bytes written", "of stepwise", "tokens"):
        table.add_column(column, justify="left" if column == "path" else "right")

    equal = True
    for name in bundled.names():
        loaded = load_model(name)
        use_fitting_threads(loaded)
        for replay in (False, True):  # the first steps of a process are slower
            generate(loaded, PROMPT, replace(options, replay=replay, max_new_tokens=4))
        stepwise = generate(loaded, PROMPT, replace(options, replay=False))
        replayed = generate(loaded, PROMPT, options)
        same = replayed.token_ids == stepwise.token_ids
        equal &= same
        console.rule(f"{name} writes", align="left")
        console.print(f"[bold]{escape(PROMPT)}[/bold]{escape(replayed.text)}\n")
        _add_row(table, stepwise, "transformers", "")
        _add_row(table, replayed, f"replay, {replayed.backend}", "equal" if same else "DIFFERENT")
    console.print(table)
    if equal:
        console.print("The tokens with replay equal those of step-by-step decoding.")
    else:
        console.print("FAILED: the tokens with replay differ from those of step-by-step decoding.")
    return equal


def _add_row(table: Table, result: GenerateResult, path: str, verdict: str) -> None:
    share = result.state_bytes_written / result.state_bytes_written_stepwise
    table.add_row(
        result.model,
        path,
        f"{result.decode_tokens_per_second:.0f}",
        str(result.flushes),
        f"{result.state_bytes_written:,}",
        f"{share:.1%}",
        verdict,
    )
