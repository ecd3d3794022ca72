"""How a step is cut: as it was measured to be fastest on this GPU, or else as `blocks.choose` has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from replayssm import tuned
from replayssm.backends.cuda import blocks
from replayssm.backends.cuda.blocks import Block, Shape

_given: list[Block | None] = []  # by `cut_as`, the innermost last


@contextmanager
def cut_as(block: Block | None) -> Iterator[None]:
    """Steps that are planned inside are cut so, or with None by `choose`: to measure cuts.

    Plans are kept, so both ends of it are a place to forget them (:func:`replayssm.tuner.measure.cut_as`).
    """
    _given.append(block)
    try:
        yield
    finally:
        _given.pop()


def cut_of(
    shape: Shape, activations: torch.dtype, batch: int, gpu: str, multiprocessors: int, shared_limit: int
) -> Block | None:
    """The block for a step of ``batch`` rows; None if none fits a multiprocessor."""
    block = _given[-1] if _given else _measured(shape, activations, batch, gpu, shared_limit)
    if block is not None:
        return block
    rows = batch * shape.num_v_heads * shape.head_v_dim
    return blocks.choose(shape, activations, rows, multiprocessors, shared_limit)


def _measured(shape: Shape, activations: torch.dtype, batch: int, gpu: str, shared_limit: int) -> Block | None:
    """The block that was fastest; None if nothing was measured, or today's kernels would not be cut so."""
    found = tuned.layer_of(gpu, tuned_shape(shape, activations))
    cut = None if found is None else found[0].cut_for(batch)
    if cut is None or not cut.block:
        return None
    possible = blocks.candidates(shape, activations, shared_limit)
    return next((block for block in possible if _way(asdict(block)) == _way(cut.block)), None)


def _way(block: dict[str, int]) -> dict[str, int]:
    """A block's fields, but for how many of them stay on a multiprocessor: that depends on the ring's length, too."""
    return {**block, "resident": bool(block.get("resident"))}


def tuned_shape(shape: Shape, activations: torch.dtype) -> tuned.Shape:
    """The name under which a layer's settings are kept."""
    kind = "mamba2" if not shape.delta else "kda" if shape.channel else "gdn"
    return tuned.Shape(
        kind,
        shape.num_v_heads // shape.group,
        shape.num_v_heads,
        shape.head_k_dim,
        shape.head_v_dim,
        _name(shape.state_dtype),
        _name(activations),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
