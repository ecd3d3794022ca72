"""Rows of the end-to-end result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayssm.bench.e2e import Options
    from replayssm.engine.engine import Engine
    from replayssm.loading import LoadedModel

FILLED, NO_PREFIX, SHARED_PREFIX = LOADS = ("filled", "no-prefix", "shared-prefix")
CONTENDERS = ("replay", "no-replay", "speculate", "transformers")

Row = dict[str, Any]


def new_row(loaded: LoadedModel, options: Options, contender: str, load: str, batch: int) -> Row:
    """A row without times.

    Tokens per second are of all rows together. ``ttft_ms`` and ``tpot_ms`` are the time to a request's first token and
    then per token, ``ttft_ratio`` the former over that of the engine without replay; ``step_ms`` is a decode step of
    the engine, ``forward_ms`` the model's part of it on the device, and ``host_ms`` what the host does in a step, most
    of it while the device computes.
    """
    ours = contender != "transformers"
    speculates = contender == "speculate"
    return {
        "suite": "e2e",
        "model": loaded.name,
        "contender": contender,
        "load": load,
        "batch": batch,
        "replay": contender != "no-replay" if ours else None,
        "speculate": ("set" if load == FILLED else "ngram") if speculates else None,
        "window": options.window if speculates else 1,
        "sampled": options.sampled and load == FILLED and ours,
        "state_dtype": options.state_dtype if ours else "float32",
        "ring_len": options.ring_len if ours and contender != "no-replay" else None,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "context": "copied" if load == FILLED else "computed",
        "backend": None if ours else "transformers",
        "graphs": None if ours else False,
        "tokens_per_s": None,
        "ttft_ms": None,
        "ttft_ratio": None,
        "tpot_ms": None,
        "step_ms": None,
        "forward_ms": None,
        "host_ms": None,
        "tokens_per_step": None,
        "cached_tokens": None,
    }


def setting(engine: Engine) -> Row:
    """What the engine chose by itself: a row's backend, and whether its steps are CUDA graphs."""
    return {"backend": engine.runner.pool.backend, "graphs": engine.runner.graphs is not None}


def milliseconds(seconds: float) -> float:
    """With four digits."""
    return float(f"{seconds * 1e3:.4g}")


def said(error: BaseException) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
