"""Prefill attention by FlashInfer, where it is installed.

Its wrappers want to know on the host how long the rows are. Of a prefill the host does; of a decode it would have to
wait for the device, so those, and what FlashInfer has no kernels for, stay with our own.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from replayssm.engine.attention import OnHost, Queries, TritonAttention

WORKSPACE = 128 * 2**20  # bytes, as its documentation recommends
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


def is_installed() -> bool:
    return find_spec("flashinfer") is not None


class FlashInferAttention(TritonAttention):
    """See :class:`PagedAttention`.

    Args:
        device: a GPU.
        page_size: tokens of a page.
    """

    def __init__(self, device: torch.device | str, page_size: int) -> None:
        super().__init__(device)
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.page_size = page_size
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(WORKSPACE, dtype=torch.uint8, device=device), "NHD"
        )
        self._planned: Any = None  # heads, sizes, scale and dtype that the wrapper is planned for

    def begin(self, queries: Queries) -> None:
        """See :meth:`PagedAttention.begin`."""
        super().begin(queries)
        self._planned = None

    def run(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """See :meth:`PagedAttention.run`."""
        assert self.queries is not None
        on_host = self.queries.on_host
        head_dim = keys.shape[3]
        fits = head_dim == values.shape[3] and head_dim in HEAD_DIMS and query.dtype in DTYPES
        if on_host is None or not fits or query.dtype != keys.dtype:
            return super().run(query, keys, values, scale)
        layer = (query.shape[1], keys.shape[2], head_dim, scale, query.dtype)
        if self._planned != layer:  # the layers of a model have the same, as a rule
            self._plan(on_host, query, keys, scale)
            self._planned = layer
        out: Tensor = self._wrapper.run(query.contiguous(), (keys, values))
        return out

    def _plan(self, rows: OnHost, query: Tensor, keys: Tensor, scale: float) -> None:
        totals = [before + count for before, count in zip(rows.lengths, rows.counts, strict=True)]
        used = [-(-total // self.page_size) for total in totals]
        pages = [page for own, n in zip(rows.pages, used, strict=True) for page in own[:n]]
        self._wrapper.plan(
            _int32([0, *accumulate(rows.counts)]),
            _int32([0, *accumulate(used)]),
            _int32(pages).to(query.device, non_blocking=True),
            _int32([total - (n - 1) * self.page_size for total, n in zip(totals, used, strict=True)]),
            query.shape[1],
            keys.shape[2],
            keys.shape[3],
            self.page_size,
            causal=True,
            sm_scale=scale,
            q_data_type=query.dtype,
            kv_data_type=keys.dtype,
        )


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
