"""Where the new tokens of each row of a step are, as one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _window_kernel(
    slots_ptr,
    table_ptr,
    lengths_ptr,
    tokens_ptr,
    given_ptr,
    num_tokens_ptr,
    first_ptr,
    positions_ptr,
    places_ptr,
    ids_ptr,
    length,
    table_row,
    tokens_row,
    nowhere,
    PAGE: tl.constexpr,
    GIVEN: tl.constexpr,
    HAS_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    count = tl.load(given_ptr + row) if GIVEN else 1
    count = tl.where(tl.load(slots_ptr + row) >= 0, count, 0)
    tl.store(num_tokens_ptr + row, count)
    tl.store(first_ptr + row, row * length)
    token = tl.arange(0, BLOCK)
    inside, used = token < length, (token < length) & (token < count)
    position = tl.where(used, tl.load(lengths_ptr + row) + token, 0)
    place = position.to(tl.int64)
    at = row64 * length + token
    tl.store(positions_ptr + at, place, mask=inside)
    if HAS_PAGES:
        page = tl.load(table_ptr + row64 * table_row + position // PAGE, mask=used, other=0).to(tl.int64)
        place = tl.where(used, page * PAGE + position % PAGE, nowhere)
    tl.store(places_ptr + at, place, mask=inside)
    ids = tl.load(tokens_ptr + row64 * tokens_row + token, mask=used, other=0)
    tl.store(ids_ptr + at, ids, mask=inside)


def find_window(
    slots: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    num_tokens: Tensor | None,
    page_size: int,
    nowhere: int,
) -> tuple[Tensor, ...]:
    """See :func:`replayssm.engine.window.find_window`; the parts of its Window."""
    batch, length = tokens.shape
    counts, first = slots.new_empty(2, batch, dtype=torch.int32)
    positions, places, ids = slots.new_empty(3, batch, length, dtype=torch.int64)
    if batch:
        pages = page_table.shape[1] > 0
        tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
        num_tokens = slots if num_tokens is None else num_tokens  # then it isn't read
        _window_kernel[(batch,)](
            slots,
            page_table if pages else slots,
            lengths,
            tokens,
            num_tokens,
            counts,
            first,
            positions,
            places,
            ids,
            length,
            page_table.stride(0),
            tokens.stride(0),
            nowhere,
            PAGE=page_size,
            GIVEN=num_tokens is not slots,
            HAS_PAGES=pages,
            BLOCK=triton.next_power_of_2(length),
            num_warps=1,
        )
    return counts, first, positions, places.view(-1), ids
