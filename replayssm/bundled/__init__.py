"""Small trained models shipped with the package, so that a fresh machine can generate text without a download."""

from __future__ import annotations

from pathlib import Path

_NAMES = ("qwen3_5-tiny", "kimi_linear-tiny", "granite_hybrid-tiny")


def names() -> list[str]:
    """Names of the bundled models, the default one first."""
    return list(_NAMES)


def path(name: str) -> Path:
    """Folder of a bundled model, as `from_pretrained` takes it."""
    if name not in _NAMES:
        raise ValueError(f"unknown bundled model {name!r}: wanted one of {', '.join(_NAMES)}")
    return Path(__file__).parent / name
