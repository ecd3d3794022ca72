"""Taking what was accepted of a verify window."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.backends.step import Accepted, Conv, Rings
from replayssm.backends.torch.rows import Rows
from replayssm.backends.torch.verify import folding_rows


def accept(rings: Rings, conv: Conv, write_pos: Tensor, accepted: Accepted) -> None:
    """See :func:`replayssm.ops.accept`."""
    slots, num_tokens, num_accepted, path = accepted
    conv_state, conv_window = conv
    lengths = num_accepted.tolist()
    paths = [list(range(n)) for n in lengths] if path is None else path.tolist()
    kept = {  # slot -> the window's accepted tokens; a row with none changes nothing
        slot: row[:n] for slot, row, n in zip(slots.tolist(), paths, lengths, strict=True) if slot >= 0 and n > 0
    }
    if not kept:
        return
    if path is not None:
        cursors = write_pos.tolist()
        counts = dict(zip(slots.tolist(), num_tokens.tolist(), strict=True))
        moves = []  # slot, from, to
        for slot, tokens in kept.items():
            (folds,) = folding_rows([cursors[slot]], [counts[slot]], rings[0].shape[2])
            base = 0 if folds else cursors[slot]
            moves += [(slot, base + token, base + i) for i, token in enumerate(tokens) if token != i]
        if moves:
            slot, source, target = torch.tensor(moves, device=slots.device).T
            for ring in rings:
                ring[slot, :, target] = ring[slot, :, source]  # all are read before any is written
    if conv_state is not None and conv_window is not None and conv_state.shape[2]:
        shift_inputs(conv_state, conv_window, kept)


def shift_inputs(conv_state: Tensor, conv_window: Tensor, kept: dict[int, list[int]]) -> None:
    """Keep the last inputs of the committed ones followed by the accepted ones, for each slot."""
    num_inputs = conv_state.shape[2]
    rows = Rows(list(kept), conv_state.device)
    places = [[*range(num_inputs), *(num_inputs + token for token in tokens)] for tokens in kept.values()]
    index = torch.tensor([line[-num_inputs:] for line in places], device=conv_state.device)
    inputs = torch.cat([rows.read(conv_state), rows.read(conv_window)], dim=2)
    rows.write(conv_state, inputs.gather(2, index.unsqueeze(1).expand(-1, inputs.shape[1], -1)))


def commit(
    write_pos: Tensor, checkpoint_slot: Tensor, counters: Tensor | None, accepted: Accepted, ring_rows: int
) -> None:
    """See :func:`replayssm.ops.commit`."""
    slots, num_tokens, num_accepted, _ = accepted
    host, counts = slots.tolist(), num_tokens.tolist()
    used = [i for i, (slot, count) in enumerate(zip(host, counts, strict=True)) if slot >= 0 and count > 0]
    if not used:
        return
    rows = Rows([host[i] for i in used], slots.device)
    counts, lengths = [counts[i] for i in used], num_accepted[used].tolist()
    cursors = rows.read(write_pos).tolist()
    folds = folding_rows(cursors, counts, ring_rows)
    moved = [n + (0 if fold else cursor) for cursor, fold, n in zip(cursors, folds, lengths, strict=True)]
    rows.write(write_pos, torch.tensor(moved, dtype=torch.int32, device=slots.device))
    if any(folds):
        folded = Rows([slot for slot, fold in zip(rows.slots, folds, strict=True) if fold], slots.device)
        folded.write(checkpoint_slot, folded.index.int())
    if counters is not None:
        counted = [[1, int(fold), *rest] for fold, *rest in zip(folds, cursors, counts, lengths, strict=True)]
        rows.write(counters, rows.read(counters) + torch.tensor(counted, device=slots.device))
