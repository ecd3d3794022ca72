"""The order in which recurrent layers take the chunks of a prefill: those that continue another come after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from replayssm.engine.forward import Chunk
from replayssm.engine.transfer import to_device


class Wave(NamedTuple):
    """Chunks of different slots. All that isn't of a recurrent layer computes the waves as one.

    Attributes:
        tokens: where their tokens are in the forward.
        slot_index, slot_tensor: one for each chunk, int64 and int32 on the device.
        cu_seqlens: int32 on the host, where the chunks begin and end.
        follows: int64, places of the chunks in the wave before that they continue; None in the first wave.
        ended: slots whose last chunks these are.
        ended_rows: int64, their places in this wave; None where it has no others.
        kept: slots that keep a state, too.
        kept_index, kept_rows: int64, these slots and whose state they keep, by place in this wave.
    """

    tokens: slice
    slot_index: Tensor
    slot_tensor: Tensor
    cu_seqlens: Tensor
    follows: Tensor | None
    ended: list[int]
    ended_rows: Tensor | None
    kept: list[int]
    kept_index: Tensor
    kept_rows: Tensor


def waves_of(chunks: Sequence[Chunk], device: torch.device) -> list[Wave]:
    """The waves of some chunks.

    Raises:
        ValueError: a chunk isn't in the order that :meth:`replayssm.engine.runner.Runner.prefill` wants.
    """
    waves: list[list[Chunk]] = []
    done: dict[int, int] = {}  # how many chunks of each slot came so far
    for chunk in chunks:
        number = done[chunk.slot] = done.get(chunk.slot, 0) + 1
        if number < len(waves):
            raise ValueError(f"chunk {number} of slot {chunk.slot} comes behind a chunk {len(waves)} of another")
        if number > len(waves):
            waves.append([])
        waves[-1].append(chunk)
    found, begin = [], 0
    for number, wave in enumerate(waves):
        before = {chunk.slot: place for place, chunk in enumerate(waves[number - 1])} if number else None
        after = {chunk.slot for chunk in waves[number + 1]} if number + 1 < len(waves) else set()
        found.append(_wave(wave, begin, before, after, device))
        begin = found[-1].tokens.stop
    return found


def _wave(
    chunks: list[Chunk], begin: int, before: dict[int, int] | None, after: set[int], device: torch.device
) -> Wave:
    """Chunks whose tokens begin at a place; `before` has the wave before, `after` the slots of the wave after."""
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + len(chunk.tokens))
    slots = [chunk.slot for chunk in chunks]
    kept = [(chunk.keep, place) for place, chunk in enumerate(chunks) if chunk.keep is not None]
    columns = [slots, [before[slot] for slot in slots] if before is not None else slots]
    index, follows = to_device(columns, torch.int64, device).unbind()
    ended = [place for place, slot in enumerate(slots) if slot not in after]
    kept_index, kept_rows = to_device(kept, torch.int64, device).view(len(kept), 2).unbind(1)
    return Wave(
        tokens=slice(begin, begin + ends[-1]),
        slot_index=index,
        slot_tensor=index.int(),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32),
        follows=follows if before is not None else None,
        ended=[slots[place] for place in ended],
        ended_rows=to_device(ended, torch.int64, device) if len(ended) < len(slots) else None,
        kept=[slot for slot, _ in kept],
        kept_index=kept_index,
        kept_rows=kept_rows,
    )
