"""Kernels in the place of a transformers model's many small ones, while the engine runs it.

A decode step of the model's own code launches more than a thousand kernels that take little longer than a launch. Here
some of its modules get forwards that launch one each, norms, gated norms, SwiGLU and rotary embeddings, and projections
of one input share one matrix product. What a module computes is found by running it: a forward of ours takes its place
only if it gives the same, within the rounding of the model's dtype.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from replayssm.models.fused.attention import fused_attention
from replayssm.models.fused.check import Forward
from replayssm.models.fused.linears import fused_linears
from replayssm.models.fused.norms import fused_norms
from replayssm.models.fused.rotary import fused_rotary
from replayssm.models.fused.stream import streamed_embedding
from replayssm.models.fused.swiglu import fused_swiglu
from replayssm.ops import unavailable_reason

logger = logging.getLogger(__name__)

_FINDERS = {
    "norms": fused_norms,
    "sums": streamed_embedding,
    "rotary": fused_rotary,
    "attention": fused_attention,  # in the place of rotary's forward
    "swiglu": fused_swiglu,
}
#: What can be fused; "places" are the engine's own kernels before a step's layers.
FUSIONS = (*_FINDERS, "linears", "single_row", "places")


def fusions_for(device: torch.device) -> tuple[str, ...]:
    """Those that gain, on a GPU with Triton; none elsewhere."""
    on_gpu = device.type == "cuda" and unavailable_reason("triton", device) is None
    return FUSIONS if on_gpu else ()


class FusedModules:
    """Forwards of a model's modules, in force inside a ``with`` block.

    Outside of one the modules are what they were, but that the weights of merged projections lie beside each other.

    Args:
        model: a transformers model.
        names: which of :data:`FUSIONS`.

    Attributes:
        names: of the fusions.
        forwards: modules and what their forward is inside.

    Raises:
        ValueError: a name is unknown.
    """

    def __init__(self, model: Any, names: Collection[str]) -> None:
        unknown = set(names) - set(FUSIONS)
        if unknown:
            raise ValueError(f"fused has {', '.join(sorted(unknown))}: some of {', '.join(FUSIONS)} are wanted")
        self.names = frozenset(names)
        self.forwards: dict[Any, Forward] = {}
        with torch.no_grad():
            for name, find in _FINDERS.items():
                if name in names:
                    self.forwards.update(find(model, model.dtype))
            # Last: checks run modules, of which projections are parts.
            chosen = {"merged": "linears" in names, "single_row": "single_row" in names}
            self.forwards.update(fused_linears(model, model.dtype, **chosen))
        kinds = Counter(type(module).__name__ for module in self.forwards)
        logger.debug("fused modules of %s: %s", type(model).__name__, dict(kinds))

    def __enter__(self) -> FusedModules:
        # Not by setattr, for which torch's modules look through their parameters and submodules.
        for module, forward in self.forwards.items():
            vars(module).setdefault("forward", forward)  # whoever gave it one meanwhile comes first
        return self

    def __exit__(self, *_: object) -> None:
        for module, forward in self.forwards.items():
            if vars(module).get("forward") is forward:
                del vars(module)["forward"]
