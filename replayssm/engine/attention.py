"""Attention over pages: each new token of a row sees the row's tokens before it and itself.

What a row gets depends on its own tokens and their number alone: its keys are taken in as many pages as its own length
wants, so the products have the same sizes whatever the other rows are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.ops import MAX_WINDOW

MAX_PARTS = 16  # of a walk over a row's keys


class Queries(NamedTuple):
    """The new tokens of B rows, N in all, and where the keys of each row are.

    Attributes:
        page_table: int32 ``[B, P]``, the pages of each row in order; anything behind those that it needs.
        lengths: int32 ``[B]``, tokens before the new ones.
        first: int32 ``[B]``, place of a row's first new token among the N.
        num_tokens: int32 ``[B]``, new tokens of a row that count; 0 for a row without work.
        longest: the largest number of new tokens that a row may have, known on the host.
        total: N.
    """

    page_table: Tensor
    lengths: Tensor
    first: Tensor
    num_tokens: Tensor
    longest: int
    total: int


class PagedAttention(ABC):
    """One way to compute it. The keys and values of the new tokens are in the pages already."""

    @abstractmethod
    def begin(self, queries: Queries) -> None:
        """A forward begins; its attention layers all have these rows."""

    @abstractmethod
    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """One layer.

        Args:
            query: ``[N, H, d_k]``.
            keys: ``[pages, page_size, H_k, d_k]``; H_k divides H.
            values: ``[pages, page_size, H_k, d_v]``.
            scale: factor of the products of queries and keys.

        Returns:
            ``[N, H, d_v]``; anything finite for tokens that don't count.
        """


class _Group(NamedTuple):
    """Rows whose keys take the same number of pages, and which bring the same number of tokens."""

    tokens: Tensor  # int64 [b, T], places of their tokens among the N
    pages: Tensor  # int64 [b, n]
    written: Tensor  # bool [b, S, 1, 1], which of the pages' places hold a token
    visible: Tensor  # bool [b, T, S], which of them each new token sees


class TorchAttention(PagedAttention):
    """PyTorch's own attention over gathered pages. It reads the rows on the host: free on a CPU, a wait on a GPU.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.groups: list[_Group] = []

    def begin(self, queries: Queries) -> None:
        """See :meth:`PagedAttention.begin`."""
        alike: dict[tuple[int, int], list[int]] = {}
        lengths, counts, first = (t.tolist() for t in (queries.lengths, queries.num_tokens, queries.first))
        bounds = [*first[1:], queries.total]
        for row, count in enumerate(counts):
            if count:
                pages = some_pages(-(-(lengths[row] + count) // self.page_size))
                alike.setdefault((pages, bounds[row] - first[row]), []).append(row)
        self.groups = [self._group(queries, rows, *shape) for shape, rows in alike.items()]

    def _group(self, queries: Queries, rows: list[int], num_pages: int, num_tokens: int) -> _Group:
        device = queries.lengths.device
        index = torch.tensor(rows, device=device)
        first, before, count = (t[index].long() for t in (queries.first, queries.lengths, queries.num_tokens))
        table = queries.page_table[index, :num_pages].long()
        table = F.pad(table, (0, num_pages - table.shape[1]))
        new = torch.arange(num_tokens, device=device)
        places = torch.arange(num_pages * self.page_size, device=device)
        written = places < (before + count)[:, None]
        visible = (places <= (before[:, None] + new)[..., None]) & written[:, None]
        own = -(-(before + count) // self.page_size)
        table = torch.where(torch.arange(num_pages, device=device) < own[:, None], table, 0)
        return _Group(first[:, None] + new, table, written[..., None, None], visible)

    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """See :meth:`PagedAttention.run`."""
        out = query.new_zeros(*query.shape[:2], values.shape[-1])
        num_k_heads = keys.shape[2]
        for group in self.groups:
            # Query heads of one key head stand side by side, so that keys needn't be repeated.
            q = query[group.tokens].unflatten(2, (num_k_heads, -1)).permute(0, 2, 3, 1, 4)  # [b, H_k, G, T, d]
            # An earlier tenant may have left NaN, which a zero weight doesn't hide.
            k, v = (torch.where(group.written, x[group.pages].flatten(1, 2), 0).transpose(1, 2) for x in (keys, values))
            mask = group.visible.repeat(1, q.shape[2], 1).unsqueeze(1)
            y = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=mask, scale=scale)
            out[group.tokens] = y.unflatten(2, q.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return out


class TritonAttention(PagedAttention):
    """Our own kernels, which read the rows on the device and may be captured in a CUDA graph.

    Args:
        device: a GPU; elsewhere Triton's interpreter runs them, for tests.
        fixed_rows: if not 0, choose as for so many rows, whatever the number is.
    """

    def __init__(self, device: torch.device | str, fixed_rows: int = 0) -> None:
        self.fixed_rows = fixed_rows
        device = torch.device(device)
        on_gpu = device.type == "cuda"
        self.programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 8
        self.queries: Queries | None = None

    def begin(self, queries: Queries) -> None:
        """See :meth:`PagedAttention.begin`."""
        self.queries = queries

    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """See :meth:`PagedAttention.run`."""
        from replayssm.backends.triton.attention import paged_attention

        assert self.queries is not None
        table, lengths, first, num_tokens, longest, _ = self.queries
        rows = self.fixed_rows or len(lengths)
        parts = parts_of(rows * keys.shape[2], self.programs) if longest <= MAX_WINDOW else 1
        return paged_attention(query, keys, values, table, lengths, first, num_tokens, longest, scale, parts)


def parts_of(programs: int, wanted: int) -> int:
    """Into how many parts the walk over a row's keys is split to give enough programs: a power of 2."""
    parts = 1
    while parts < MAX_PARTS and programs * parts < wanted:
        parts *= 2
    return parts


def some_pages(needed: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, …: rows of about the same length share a call."""
    size = 1
    while size < needed:
        if size >= 2 and size * 3 // 2 >= needed:
            return size * 3 // 2
        size *= 2
    return size
