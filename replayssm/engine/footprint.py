"""Bytes that a runner will take, from its settings: nothing is allocated."""

from __future__ import annotations

from typing import Any

import torch

from replayssm.backends.torch.prefill import CHUNK
from replayssm.engine.attention import MAX_PARTS
from replayssm.engine.kv import attention_layers
from replayssm.loading import LoadedModel
from replayssm.models.support import find_adapters
from replayssm.state import ReplayPool


def bytes_per(
    loaded: LoadedModel,
    *,
    page_size: int,
    ring_len: int = 16,
    ring_capacity: int | None = None,
    max_window: int = 0,
    state_dtype: torch.dtype = torch.float32,
    ring_dtype: torch.dtype | str = "auto",
    **_: Any,
) -> tuple[int, int]:
    """Bytes of one slot and of one page; the settings are those of :class:`replayssm.engine.runner.Runner`."""
    pool = ReplayPool(
        [adapter.spec for adapter in find_adapters(loaded.model)],
        1,
        ring_len=ring_len,
        ring_capacity=ring_capacity,
        max_window=max_window,
        state_dtype=state_dtype,
        activation_dtype=loaded.model.dtype,
        ring_dtype=ring_dtype,
        device="meta",
        backend="torch",
    )
    token = sum(spec.nbytes for spec in attention_layers(loaded.model).values())
    return pool.bytes_per_slot, page_size * token


def bytes_fixed(
    loaded: LoadedModel, *, max_rows: int, max_step_tokens: int, max_window: int = 0, graphs: bool = False, **_: Any
) -> int:
    """Bytes that forwards take beside slots and pages: a generous estimate.

    Args:
        loaded: the model.
        max_rows: rows of the largest decode.
        max_step_tokens: tokens of the largest prefill.
        max_window, graphs: as for the runner.
    """
    config = loaded.model.config.get_text_config(decoder=True)
    itemsize, hidden = loaded.model.dtype.itemsize, config.hidden_size
    vocab = loaded.model.get_output_embeddings().weight.shape[0]
    outputs = max_rows * max(1, max_window)
    own, fixed = outputs * (vocab + hidden) * itemsize, outputs * (4 * vocab + hidden * itemsize)
    heads = getattr(config, "num_attention_heads", None) or 0
    values = max((spec.value_dim for spec in attention_layers(loaded.model).values()), default=0)
    attention = MAX_PARTS * outputs * heads * values * 4
    # Some tensors of all tokens, and those of a recurrent layer in float32.
    widest = max(getattr(config, "intermediate_size", None) or 0, 4 * hidden)
    specs = [adapter.spec for adapter in find_adapters(loaded.model)]
    recurrent = max(s.num_v_heads * (8 * s.head_k_dim + 6 * s.head_v_dim + 4 * CHUNK) * 4 for s in specs)
    step = max_step_tokens * (16 * widest * itemsize + recurrent)
    return own + fixed * (2 if graphs else 1) + max(step, attention)
