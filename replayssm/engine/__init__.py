"""Continuous batching: requests, scheduler, prefix cache, sampling, text.

Names are loaded when they are first used: options and parameters can be checked before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayssm.engine.async_engine import AsyncEngine, Stream
    from replayssm.engine.engine import Engine
    from replayssm.engine.errors import EngineClosed, QueueFull
    from replayssm.engine.options import EngineOptions
    from replayssm.engine.outputs import Completion, RequestOutput, TokenLogprobs, Update
    from replayssm.engine.params import SamplingParams
    from replayssm.engine.stats import EngineStats

_HOME = {
    "AsyncEngine": "async_engine",
    "Completion": "outputs",
    "Engine": "engine",
    "EngineClosed": "errors",
    "EngineOptions": "options",
    "EngineStats": "stats",
    "QueueFull": "errors",
    "RequestOutput": "outputs",
    "SamplingParams": "params",
    "Stream": "async_engine",
    "TokenLogprobs": "outputs",
    "Update": "outputs",
}

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineClosed",
    "EngineOptions",
    "EngineStats",
    "QueueFull",
    "RequestOutput",
    "SamplingParams",
    "Stream",
    "TokenLogprobs",
    "Update",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"replayssm.engine.{_HOME[name]}"), name)
    raise AttributeError(f"module 'replayssm.engine' has no attribute {name!r}")
