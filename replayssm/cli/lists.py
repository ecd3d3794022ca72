"""Option values that are lists, separated by commas or spaces."""

from __future__ import annotations

from replayssm.errors import InputError


def names(name: str, text: str, choices: tuple[str, ...], only_one: bool = False) -> tuple[str, ...]:
    """Some of the choices, each once, in the order given."""
    for part in (parts := _split(name, text)):
        if part not in choices:
            raise InputError(f"{name} is {part!r}: it must be one of {', '.join(choices)}")
    if only_one and len(parts) > 1:
        raise InputError(f"{name} is {text!r}: one of {', '.join(choices)} is wanted")
    return tuple(parts)


def numbers(name: str, text: str, most: int, only_one: bool = False) -> tuple[int, ...]:
    """Whole numbers from 1 to `most`, each once, in the order given."""
    parts = _split(name, text)
    for part in parts:
        if len(part) > 9 or not (part.isascii() and part.isdigit() and 1 <= int(part) <= most):
            raise InputError(f"{name} is {part!r}: whole numbers from 1 to {most} are wanted")
    if only_one and len(parts) > 1:
        raise InputError(f"{name} is {text!r}: one number is wanted")
    return tuple(dict.fromkeys(int(part) for part in parts))


def texts(name: str, text: str) -> tuple[str, ...]:
    """Values that are checked later, each once, in the order given."""
    return tuple(_split(name, text))


def _split(name: str, text: str) -> list[str]:
    parts = [part for part in text.replace(",", " ").split() if part]
    if not parts:
        raise InputError(f"{name} is empty: values separated by commas are wanted")
    return list(dict.fromkeys(parts))
