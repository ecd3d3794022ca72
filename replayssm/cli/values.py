"""Option values that typer parses, with messages in this project's form and with the options' names."""

import re
from typing import Any

import typer

from replayssm import bundled


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} was given, a whole number is wanted") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} was given, a number is wanted") from None


def _size(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(f"{text!r} was given, bytes are wanted, for example 512M or 8GiB")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


#: Parameters of the engine that have options; those of two words and more, which Python writes otherwise.
PARAMETERS = {
    name: name.replace("_", "-")
    for name in (
        "batch_invariant", "fixed_draft", "max_context", "max_rows", "max_step_tokens", "max_tokens", "num_draft",
        "ring_dtype", "ring_len", "state_dtype", "top_k", "top_p",
    )
} | {"memory_bytes": "memory", "replay=False": "no-replay"}  # fmt: skip
#: A text of somebody's, which stays as it is; or a parameter where something is said of it, which is no folder then.
_NAMED = re.compile(rf"(?<!\w)'[^']*'|(?<![\w./'-])(?:{'|'.join(PARAMETERS)})(?= (?:is|=|allows|were) )")


def with_option_names(message: object) -> str:
    """A message of the engine's, which names its parameters as Python does, with the names of their options."""
    return _NAMED.sub(lambda found: PARAMETERS.get(found[0], found[0]), str(message))


NAMES = bundled.names()
MODEL = typer.Option(help=f"Model folder, or one of {', '.join(NAMES)}.")
INTEGER: dict[str, Any] = {"parser": _integer, "metavar": "INTEGER"}
NUMBER: dict[str, Any] = {"parser": _number, "metavar": "NUMBER"}
SIZE: dict[str, Any] = {"parser": _size, "metavar": "SIZE"}
