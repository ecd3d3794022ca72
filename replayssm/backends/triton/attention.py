"""Attention over pages, as Triton kernels: decode, verify windows and prefill alike.

A program takes some query lines of one row and one key head, a line being a token and one of the query heads that
share the key head, and walks over the row's keys. Where there are few programs the walk is split into parts; the
second kernel joins them. A row's parts have bounds that depend on its own length, so it gets the same bits beside any
other rows, for the same number of parts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lengths_ptr,
    first_ptr,
    num_tokens_ptr,
    y_ptr,
    maximum_ptr,
    sum_ptr,
    scale,  # times log2(e)
    table_row,
    q_token,
    q_head,
    k_page,
    k_token,
    k_head,
    v_page,
    v_token,
    v_head,
    total,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    LOW_DIM: tl.constexpr,
    HIGH_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Softmax over the keys of one part, for BLOCK_M lines; divided by its sum if there is but one part."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_k_heads = tl.num_programs(1)
    part = tl.program_id(2) % PARTS
    start = (tl.program_id(2) // PARTS) * BLOCK_M
    num_tokens = tl.load(num_tokens_ptr + row)
    if start >= num_tokens * GROUP:
        return
    before = tl.load(lengths_ptr + row)
    line = start + tl.arange(0, BLOCK_M)
    token = line // GROUP
    used = token < num_tokens
    place = (tl.load(first_ptr + row) + token).to(tl.int64)
    query_head = head * GROUP + line % GROUP
    q_at = q_ptr + place * q_token + query_head * q_head
    low = tl.arange(0, LOW_DIM)
    q_low = tl.load(q_at[:, None] + low[None, :], mask=used[:, None] & (low < KEY_DIM)[None, :], other=0.0)
    if HIGH_DIM > 0:
        high = LOW_DIM + tl.arange(0, HIGH_DIM)
        q_high = tl.load(q_at[:, None] + high[None, :], mask=used[:, None] & (high < KEY_DIM)[None, :], other=0.0)
    column = tl.arange(0, BLOCK_V)

    seen = before + tl.minimum(num_tokens, (start + BLOCK_M - 1) // GROUP + 1)  # by the last of the lines
    step = tl.cdiv(tl.cdiv(seen, BLOCK_N), PARTS) * BLOCK_N
    end = tl.minimum(seen, (part + 1) * step)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    y = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for n in range(part * step, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        inside = key < end
        page = tl.load(table_ptr + row * table_row + key // PAGE, mask=inside, other=0).to(tl.int64)
        k_at = k_ptr + page * k_page + (key % PAGE) * k_token + head * k_head
        k_low = tl.load(k_at[None, :] + low[:, None], mask=inside[None, :] & (low < KEY_DIM)[:, None], other=0.0)
        scores = tl.dot(q_low, k_low, input_precision="ieee")
        if HIGH_DIM > 0:
            k_high = tl.load(k_at[None, :] + high[:, None], mask=inside[None, :] & (high < KEY_DIM)[:, None], other=0.0)
            scores += tl.dot(q_high, k_high, input_precision="ieee")
        visible = inside[None, :] & (key[None, :] <= (before + token)[:, None])
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        against = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a line that sees none of these keys
        weights = tl.exp2(scores - against[:, None])
        kept = tl.exp2(maximum - against)
        weight_sum = weight_sum * kept + tl.sum(weights, 1)
        v_at = v_ptr + page * v_page + (key % PAGE) * v_token + head * v_head
        v = tl.load(v_at[:, None] + column[None, :], mask=inside[:, None] & (column < VALUE_DIM)[None, :], other=0.0)
        y = y * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        maximum = new_maximum

    if PARTS == 1:
        y = y / tl.where(used, weight_sum, 1.0)[:, None]
    else:
        place += part * total
        at = place * num_k_heads * GROUP + query_head
        tl.store(maximum_ptr + at, maximum, mask=used)
        tl.store(sum_ptr + at, weight_sum, mask=used)
    y_at = y_ptr + (place * num_k_heads * GROUP + query_head) * VALUE_DIM
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_at[:, None] + column[None, :], y, mask=used[:, None] & (column < VALUE_DIM)[None, :])


@triton.jit
def _join_kernel(
    parts_ptr,
    maximum_ptr,
    sum_ptr,
    first_ptr,
    num_tokens_ptr,
    y_ptr,
    total,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One token's query head: the weighted sum of its parts."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1)
    if token >= tl.load(num_tokens_ptr + row):
        return
    num_heads = tl.num_programs(2)
    at = (tl.load(first_ptr + row) + token).to(tl.int64) * num_heads + tl.program_id(2)
    step = num_heads.to(tl.int64) * total  # in this order: Triton makes a total of 1 a constant
    column = tl.arange(0, BLOCK_V)
    inside = column < VALUE_DIM
    maximum = tl.load(maximum_ptr + at)
    for part in tl.static_range(1, PARTS):
        maximum = tl.maximum(maximum, tl.load(maximum_ptr + part * step + at))
    y = tl.zeros([BLOCK_V], tl.float32)
    weight_sum = tl.zeros([], tl.float32)
    for part in tl.static_range(PARTS):
        weight = tl.exp2(tl.load(maximum_ptr + part * step + at) - maximum)
        weight_sum += weight * tl.load(sum_ptr + part * step + at)
        y += weight * tl.load(parts_ptr + (part * step + at) * VALUE_DIM + column, mask=inside, other=0.0)
    tl.store(y_ptr + at * VALUE_DIM + column, (y / weight_sum).to(y_ptr.dtype.element_ty), mask=inside)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    first: Tensor,
    num_tokens: Tensor,
    longest: int,
    scale: float,
    parts: int,
) -> Tensor:
    """Attention of new tokens to their rows' keys, which are in the pages already.

    Args:
        query: ``[N, H, d_k]``.
        keys, values: ``[pages, page_size, H_k, d_k]`` and ``[pages, page_size, H_k, d_v]``; H_k divides H.
        page_table: int32 ``[B, P]``.
        lengths, first, num_tokens: int32 ``[B]``; tokens before the new ones, place of the first new one among the N,
            and how many new ones count.
        longest: no row has more new tokens.
        scale: factor of the products of queries and keys.
        parts: into how many the walk over a row's keys is split.

    Returns:
        ``[N, H, d_v]``; zero for tokens that don't count.
    """
    num_heads, key_dim = query.shape[1:]
    page_size, num_k_heads, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    group, batch, total = num_heads // num_k_heads, len(lengths), len(query)
    query = query if query.stride(2) == 1 else query.contiguous()
    y = query.new_zeros(total, num_heads, value_dim)
    if not total or not batch:
        return y
    target, maximum, weight_sum = y, y, y
    if parts > 1:
        target = query.new_empty(parts, total, num_heads, value_dim, dtype=torch.float32)
        maximum, weight_sum = query.new_empty(2, parts, total, num_heads, dtype=torch.float32)
    lines = longest * group
    cut = tile(lines, key_dim, value_dim, query.element_size())
    block_v = max(16, triton.next_power_of_2(value_dim))
    _attention_kernel[(batch, num_k_heads, triton.cdiv(lines, cut.block_m) * parts)](
        query,
        keys,
        values,
        page_table,
        lengths,
        first,
        num_tokens,
        target,
        maximum,
        weight_sum,
        scale * math.log2(math.e),
        page_table.stride(0),
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        total,
        PAGE=page_size,
        GROUP=group,
        KEY_DIM=key_dim,
        LOW_DIM=cut.low,
        HIGH_DIM=cut.high,
        VALUE_DIM=value_dim,
        PARTS=parts,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_V=block_v,
        num_warps=cut.num_warps,
    )
    if parts > 1:
        _join_kernel[(batch, longest, num_heads)](
            target,
            maximum,
            weight_sum,
            first,
            num_tokens,
            y,
            total,
            VALUE_DIM=value_dim,
            PARTS=parts,
            BLOCK_V=block_v,
        )
    return y


class Tile(NamedTuple):
    """A key's parts, both powers of 2 (576 is 512 and 64), or one and 0; lines and keys of a program; its warps."""

    low: int
    high: int
    block_m: int
    block_n: int
    num_warps: int


def tile(lines: int, key_dim: int, value_dim: int, itemsize: int) -> Tile:
    """What one program takes of so many lines."""
    low = max(16, 2 ** (key_dim.bit_length() - 1))
    high = max(16, triton.next_power_of_2(key_dim - low)) if key_dim > low else 0
    wide = max(low + high, triton.next_power_of_2(value_dim)) * itemsize
    block_m = 32 if lines > 16 and wide <= 1024 else 16  # more of them spill registers on one GPU or another
    block_n = 32 if wide <= 1024 else 16
    return Tile(low, high, block_m, block_n, 4 if block_m == 16 and wide <= 1024 else 8)
