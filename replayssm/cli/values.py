"""Option values that typer parses, with messages in this project's form."""

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


NAMES = bundled.names()
MODEL = typer.Option(help=f"Model folder, or one of {', '.join(NAMES)}.")
INTEGER: dict[str, Any] = {"parser": _integer, "metavar": "INTEGER"}
NUMBER: dict[str, Any] = {"parser": _number, "metavar": "NUMBER"}
SIZE: dict[str, Any] = {"parser": _size, "metavar": "SIZE"}
