"""Where the new tokens of each row are: in their text, in the pages, and among all new tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Window(NamedTuple):
    """T tokens of each of B rows, of which the first may count.

    Attributes:
        num_tokens: int32 ``[B]``, tokens of each row that count; 0 for padding rows.
        first: int32 ``[B]``, place of a row's first token among all B·T.
        positions: int64 ``[B, T]``, places in the row's text; 0 for tokens that don't count.
        places: int64 ``[B·T]``, places in the pages; the page that is nobody's for tokens that don't count.
        tokens: int64 ``[B, T]``; 0 for tokens that don't count.
    """

    num_tokens: Tensor
    first: Tensor
    positions: Tensor
    places: Tensor
    tokens: Tensor


def find_window(
    slots: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    num_tokens: Tensor | None,
    *,
    page_size: int,
    nowhere: int,
    fused: bool,
) -> Window:
    """Work out where a step's tokens are; nothing here waits for the device.

    Args:
        slots: int32 ``[B]``, negative for a padding row.
        page_table: int32 ``[B, P]``; P is 0 for a model without attention.
        lengths: int32 ``[B]``, tokens before the new ones.
        tokens: int64 ``[B, T]``.
        num_tokens: int32 ``[B]``; None: one each.
        page_size: tokens of a page.
        nowhere: the first place of the page that is nobody's.
        fused: by one Triton kernel.
    """
    if fused:
        from replayssm.backends.triton.window import find_window as by_triton

        return Window(*by_triton(slots, page_table, lengths, tokens, num_tokens, page_size, nowhere))
    batch, length = tokens.shape
    there = slots >= 0
    counts = there.int() if num_tokens is None else torch.where(there, num_tokens, 0)
    steps = torch.arange(length, dtype=torch.int32, device=slots.device)
    used = steps < counts[:, None]
    positions = torch.where(used, lengths[:, None] + steps, 0).long()
    rows = torch.arange(batch, device=slots.device)
    places = positions
    if page_table.shape[1]:
        places = torch.where(used, places_of(page_table, rows[:, None], positions, page_size), nowhere)
    return Window(counts, rows.int() * length, positions, places.flatten(), torch.where(used, tokens, 0))


def places_of(page_table: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Places in the pages of tokens that are at some positions of some rows."""
    page = page_table[rows, positions // page_size]
    return page * page_size + positions % page_size
