"""A layer's operators, bound to its state in a pool and to the rows' slots."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from replayssm import ops
from replayssm.models.adapters import Adapter, Kernels
from replayssm.state import ReplayPool


def decode_kernels(adapter: Adapter, index: int, pool: ReplayPool, slots: Tensor) -> Kernels:
    """For one token of each row.

    Args:
        adapter: of the layer.
        index: the layer's number in the pool.
        pool: its state.
        slots: int32 ``[B]``.
    """
    conv = partial(
        ops.causal_conv1d_update,
        conv_state=pool.conv_state(index),
        slots=slots,
        activation="silu",
        backend=pool.backend,
    )
    operator = getattr(ops, f"{adapter.operator}_decode")
    return Kernels(conv, partial(operator, slots=slots, **pool.state_args(index)))


def verify_kernels(
    adapter: Adapter, index: int, pool: ReplayPool, slots: Tensor, num_tokens: Tensor, parents: Tensor | None = None
) -> Kernels:
    """For a verify window of each row.

    Args:
        adapter, index, pool, slots: as for :func:`decode_kernels`.
        num_tokens: int32 ``[B]``.
        parents: int32 ``[B, T]``, for a tree.
    """
    rows: dict[str, Any] = {"slots": slots, "num_tokens": num_tokens, "parents": parents}
    conv = partial(
        ops.causal_conv1d_verify,
        conv_state=pool.conv_state(index),
        conv_window=pool.conv_window(index),
        activation="silu",
        backend=pool.backend,
        **rows,
    )
    operator = getattr(ops, f"{adapter.operator}_verify")
    return Kernels(conv, partial(operator, **rows, **pool.verify_args(index)))
