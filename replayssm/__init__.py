"""ReplaySSM: decode hybrid language models from a checkpoint and a short ring of recent updates.

The public names are loaded when they are first used, so `import replayssm` imports neither torch nor transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from replayssm import ops
    from replayssm.engine import AsyncEngine, Engine, EngineOptions, SamplingParams
    from replayssm.models import ReplayCache, disable, enable
    from replayssm.options import LoadOptions
    from replayssm.state import LayerSpec, ReplayPool

__all__ = [
    "AsyncEngine",
    "Engine",
    "EngineOptions",
    "LayerSpec",
    "LoadOptions",
    "ReplayCache",
    "ReplayPool",
    "SamplingParams",
    "__version__",
    "disable",
    "enable",
    "ops",
]

_HOME = {
    "AsyncEngine": "replayssm.engine",
    "Engine": "replayssm.engine",
    "EngineOptions": "replayssm.engine",
    "LayerSpec": "replayssm.state",
    "LoadOptions": "replayssm.options",
    "ReplayCache": "replayssm.models",
    "ReplayPool": "replayssm.state",
    "SamplingParams": "replayssm.engine",
    "disable": "replayssm.models",
    "enable": "replayssm.models",
}


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("replayssm.ops")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'replayssm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
