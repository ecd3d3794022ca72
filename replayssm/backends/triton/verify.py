"""One verify window by replay, for both gates and both rules, as Triton kernels.

A program of the first kernel holds ``BLOCK_V`` rows of one value head's state. It goes once over the key channels,
``BLOCK_K`` at a time, and multiplies the window's q and k with the window's keys, the ring's keys and the checkpoint
(equation in :mod:`replayssm.backends.torch.verify`, same letters). Then it solves for the updates, token after token.
Where the ring is full it folds the committed records into its rows of the checkpoint, which it takes once more, from a
cache: within the first pass, the fold would keep registers that all other windows need.

The update vectors' rows of the ring belong to the program; keys and decays don't: other tiles, and other value heads
of the same key head, may still read the rows that a fold sets free. So a second kernel stores those, behind the first
one in the stream.

Products run on the matrix units. The checkpoint is their left side, and its rows are many; q and k are the right side,
as few columns as the window needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.step import Layer, Rules, Step, Window
from replayssm.backends.triton import decode
from replayssm.backends.triton.decode import fuses
from replayssm.backends.triton.gates import gate, sigmoid
from replayssm.recurrence import NORM_EPS

FOLD_COLUMNS = 16  # of the state, that a fold takes at a time


@triton.jit
def _high(x):
    """What tf32 holds of a float32, rounded: the rest fits into a second tf32."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, total, TF32: tl.constexpr, NARROW: tl.constexpr):
    """``total + a b`` to float32's precision, from as few products of the matrix units as that takes.

    They are added outside the matrix units, which cut what they add to a total instead of rounding it.
    """
    A_EXACT: tl.constexpr = a.dtype.primitive_bitwidth == 16
    B_EXACT: tl.constexpr = b.dtype.primitive_bitwidth == 16
    if NARROW and A_EXACT and a.dtype == b.dtype:
        return total + tl.dot(a, b)
    if NARROW and a.dtype == tl.bfloat16 and not B_EXACT:  # a float32 is the sum of three bfloat16
        first = b.to(tl.bfloat16)
        rest = b - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        return total + (tl.dot(a, first) + (tl.dot(a, second) + tl.dot(a, third)))
    if TF32:  # and the sum of two tf32; the product of the two small ones is left out
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        a_high = a if A_EXACT else _high(a)
        b_high = b if B_EXACT else _high(b)
        product = tl.dot(a_high, b_high, input_precision="tf32")
        if not A_EXACT:
            product += tl.dot(a - a_high, b_high, input_precision="tf32")
        if not B_EXACT:
            product += tl.dot(a_high, b - b_high, input_precision="tf32")
        return total + product
    return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _path(row, column, count, parents_at, TREE: tl.constexpr):
    """Whether the token of a row is on the path to the token of a column, which is included."""
    path = row[:, None] <= column[None, :]
    if TREE:
        node = tl.where(column < count, column, -1)
        path = row[:, None] == node[None, :]
        for _ in range(count):  # a parent is below its token, whatever was given, so that walks end
            parent = tl.load(parents_at + node, mask=node >= 0, other=-1)
            node = tl.maximum(tl.minimum(node - 1, parent), -1)
            path = path | (row[:, None] == node[None, :])
    return path & (row >= 0)[:, None] & (column < count)[None, :]


@triton.jit
def _decayed_keys(keys, g_at, record, cursor, dim_k, is_k, HEAD_K_DIM: tl.constexpr, TF32: tl.constexpr):
    """The ring's keys, each decayed by the records behind it, and the decay of the state before them all."""
    is_g = (record < cursor)[:, None] & is_k[None, :]
    g = tl.load(g_at + record[:, None] * HEAD_K_DIM + dim_k[None, :], mask=is_g, other=0.0)
    g = tl.maximum(g, -1e30)  # for the zeros of a sum as a product; its terms have one sign, so nothing cancels
    later = (record[None, :] > record[:, None]).to(tl.float32)
    if TF32:
        behind = tl.dot(later, _high(g), input_precision="tf32")
        behind += tl.dot(later, g - _high(g), input_precision="tf32")
    else:
        behind = tl.dot(later, g, input_precision="ieee")
    return keys.to(tl.float32) * tl.exp(behind), tl.exp(tl.sum(g, axis=0))


@triton.jit
def _verify_kernel(
    # the layer's tensors, in the letters of the delta rule; Mamba-2: q = C, k = B, v = x, a = dt, rate = A
    q_ptr,
    k_ptr,
    v_ptr,
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    d_ptr,
    z_ptr,
    y_ptr,
    # the state of all slots
    checkpoint_ptr,
    ring_u_ptr,
    ring_k_ptr,
    ring_g_ptr,
    write_pos_ptr,
    checkpoint_slot_ptr,
    slots_ptr,
    num_tokens_ptr,
    parents_ptr,
    # numbers
    scale,
    beta_scale,
    lower_bound,
    dt_min,
    dt_max,
    tokens,
    # strides in elements: rows, tokens and heads of the inputs, slots of the state
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    a_row,
    a_token,
    a_head,
    b_row,
    b_token,
    b_head,
    z_row,
    z_token,
    z_head,
    d_head,
    d_dim,
    parents_row,
    checkpoint_stride,
    ring_u_stride,
    ring_k_stride,
    ring_g_stride,
    NUM_V_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_V_DIM: tl.constexpr,
    HEAD_K_DIM: tl.constexpr,
    RING_ROWS: tl.constexpr,
    CHANNEL_GATE: tl.constexpr,
    DELTA_RULE: tl.constexpr,
    BOUNDED: tl.constexpr,
    L2_NORM: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    TREE: tl.constexpr,
    CLAMPED: tl.constexpr,
    TF32: tl.constexpr,
    NARROW: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    FOLD_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    # Columns are what the state is multiplied with: the window's queries, and for the delta rule its keys behind them.
    QUERIES: tl.constexpr = BLOCK_T if DELTA_RULE else 0
    COLUMNS: tl.constexpr = QUERIES + BLOCK_T
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    k_head_index = head // GROUP
    dim_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_v = dim_v < HEAD_V_DIM
    column = tl.arange(0, COLUMNS)
    token = column % BLOCK_T
    wide = token.to(tl.int64)
    is_query = column < BLOCK_T
    is_update = column >= QUERIES
    y_at = y_ptr + ((row * tokens + token)[None, :] * NUM_V_HEADS + head) * HEAD_V_DIM + dim_v[:, None]
    is_y = (is_query & (token < tokens))[None, :] & is_v[:, None]

    slot = tl.load(slots_ptr + row).to(tl.int64)
    count = tl.load(num_tokens_ptr + row)
    if (slot < 0) | (count <= 0):
        tl.store(y_at, tl.zeros([BLOCK_V, COLUMNS], tl.float32).to(y_ptr.dtype.element_ty), mask=is_y)
        return
    cursor = tl.load(write_pos_ptr + slot)
    source = tl.load(checkpoint_slot_ptr + slot).to(tl.int64)
    folds = cursor + count > RING_ROWS

    state_at = checkpoint_ptr + source * checkpoint_stride + (head * HEAD_V_DIM + dim_v)[:, None] * HEAD_K_DIM
    to_own = (slot - source) * checkpoint_stride  # from there to the slot's own checkpoint
    ring_k_at = ring_k_ptr + slot * ring_k_stride + k_head_index * RING_ROWS * HEAD_K_DIM
    ring_u_at = ring_u_ptr + slot * ring_u_stride + head * RING_ROWS * HEAD_V_DIM
    used = token < count  # the other tokens are zeros in all that follows
    x_at = q_ptr + row * q_row + k_head_index * q_head + wide[:, None] * q_token
    k_at = k_ptr + row * k_row + k_head_index * k_head
    a_at = a_ptr + row * a_row + head * a_head
    rate = tl.load(rate_ptr + head).to(tl.float32)
    path = _path(tl.where(is_update, token, -1), token, count, parents_ptr + row * parents_row, TREE)
    record = tl.arange(0, BLOCK_R)
    is_record = record < cursor
    records_at = ring_u_at + record[None, :] * HEAD_V_DIM + dim_v[:, None]
    ring_g_at = ring_g_ptr + slot * ring_g_stride + head * RING_ROWS * (HEAD_K_DIM if CHANNEL_GATE else 1)

    if not CHANNEL_GATE:  # decays of the records, summed from the newest back, and of the window
        follows = record + 1 < cursor
        next_g = tl.load(ring_g_at + record + 1, mask=follows, other=0.0)
        after = tl.exp(tl.cumsum(next_g, axis=0, reverse=True))
        total = tl.exp(tl.sum(next_g, axis=0) + tl.load(ring_g_at, mask=cursor > 0, other=0.0))
        a = tl.load(a_at + wide * a_token, mask=used, other=0.0).to(tl.float32)
        if HAS_BIAS:
            a += tl.load(bias_ptr + head).to(tl.float32)
        g, delta = gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
        decay = tl.exp(tl.sum(tl.where(path, g[:, None], 0.0), axis=0))

    # One pass over the key channels: products of the columns with the window's keys, the ring's, and the checkpoint.
    weight = tl.zeros([COLUMNS, COLUMNS], tl.float32)  # [j, i]: k_j·x_i, of a channel gate e^γ_ij between them
    score = tl.zeros([BLOCK_R, COLUMNS], tl.float32)
    product = tl.zeros([BLOCK_V, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS, BLOCK_K], tl.float32)  # summed at last: see decode.fuses
    for first in tl.range(0, HEAD_K_DIM, BLOCK_K, num_stages=STAGES):
        dim_k = first + tl.arange(0, BLOCK_K)
        is_k = dim_k < HEAD_K_DIM
        state = tl.load(state_at + dim_k[None, :], mask=is_v[:, None] & is_k[None, :], other=0.0)
        is_key = is_record[:, None] & is_k[None, :]
        keys = tl.load(ring_k_at + record[:, None] * HEAD_K_DIM + dim_k[None, :], mask=is_key, other=0.0)
        x = tl.load(x_at + dim_k[None, :], mask=(used & is_query)[:, None] & is_k[None, :], other=0.0)
        is_new = (used & is_update)[:, None] & is_k[None, :]
        new_keys = tl.load(k_at + wide[:, None] * k_token + dim_k[None, :], mask=is_new, other=0.0)
        if DELTA_RULE:
            x = tl.where(is_query[:, None], x, new_keys)
            new_keys = x
        if L2_NORM:
            squares += x.to(tl.float32) * x.to(tl.float32)
        if CHANNEL_GATE:
            node = tl.arange(0, BLOCK_T)  # as column, but each token once
            bias = tl.load(bias_ptr + head * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
            is_a = (node < count)[:, None] & is_k[None, :]
            a = tl.load(a_at + node.to(tl.int64)[:, None] * a_token + dim_k[None, :], mask=is_a, other=0.0)
            a = a.to(tl.float32) + bias[None, :]
            g, _delta = gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
            behind = tl.zeros([COLUMNS, BLOCK_K], tl.float32)
            x = x.to(tl.float32)
            for back in range(count):  # what lies behind token j on the path to i
                j = count - 1 - back
                key = tl.load(k_at + j.to(tl.int64) * k_token + dim_k, mask=is_k, other=0.0).to(tl.float32)
                with_j = tl.sum(x * tl.exp(behind) * key[None, :], axis=1)
                weight = tl.where((column == j + QUERIES)[:, None] & path, weight + with_j[None, :], weight)
                g_j = tl.sum(tl.where((node == j)[:, None], g, 0.0), axis=0)
                if TREE:
                    on_path = tl.sum(((column == j + QUERIES)[:, None] & path).to(tl.int32), axis=0) > 0
                else:
                    on_path = token >= j
                behind += tl.where(on_path[:, None], g_j[None, :], 0.0)
            keys, total_k = _decayed_keys(keys, ring_g_at, record, cursor, dim_k, is_k, HEAD_K_DIM, TF32)
            x *= tl.exp(behind)
            score = _product(keys, tl.trans(x), score, TF32, NARROW)
            product = _product(state, tl.trans(x * total_k[None, :]), product, TF32, NARROW)
        else:
            weight = _product(new_keys, tl.trans(x), weight, TF32, NARROW)
            score = _product(keys, tl.trans(x), score, TF32, NARROW)
            product = _product(state, tl.trans(x), product, TF32, NARROW)

    records = tl.load(records_at, mask=is_record[None, :] & is_v[:, None], other=0.0)
    if CHANNEL_GATE:
        product = _product(records, score, product, TF32, NARROW)
    else:
        product = _product(records, score * after[:, None], product * total, TF32, NARROW) * decay[None, :]

    # Outputs and, as the ring keeps them (with the keys' norms), updates. The weights of what follows from an update
    # take the same factors.
    is_u = (used & is_update)[None, :] & is_v[:, None]
    v_at = v_ptr + row * v_row + head * v_head + dim_v[:, None] + wide[None, :] * v_token
    v = tl.load(v_at, mask=is_u, other=0.0).to(tl.float32)
    norm = tl.full([COLUMNS], 1.0, tl.float32)
    if L2_NORM:
        norm = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) + EPS)
    if DELTA_RULE:
        b = tl.load(b_ptr + row * b_row + head * b_head + wide * b_token, mask=used, other=0.0)
        factor = beta_scale * sigmoid(b.to(tl.float32)) * norm
        product = tl.where(is_query[None, :], product, factor[None, :] * (v - norm[None, :] * product))
        weight *= tl.where(is_query, -1.0, factor * norm)[None, :]
        updates = product
    else:
        weight = -weight
        updates = delta[None, :] * v
    # Token after token. A weight of 0 takes nothing: what isn't on the path may have overflowed.
    for j in range(count):
        is_j = column == j + QUERIES
        takes = is_query | (token > j)
        w = tl.sum(tl.where(is_j[:, None] & path & takes[None, :], weight, 0.0), axis=0)
        if not CHANNEL_GATE:
            w *= tl.exp(tl.sum(tl.where(path & (token > j)[:, None], g[:, None], 0.0), axis=0))
        update = tl.sum(tl.where(is_j[None, :], updates, 0.0), axis=1)
        product = tl.where((w != 0.0)[None, :], product - w[None, :] * update[:, None], product)
        if DELTA_RULE:
            updates = product
    y = product
    if DELTA_RULE:
        y *= scale * norm[None, :]
    if HAS_D:
        y += tl.load(d_ptr + head * d_head + dim_v * d_dim, mask=is_v, other=0.0).to(tl.float32)[:, None] * v
    if HAS_Z:
        z_at = z_ptr + row * z_row + head * z_head + dim_v[:, None] + wide[None, :] * z_token
        z = tl.load(z_at, mask=is_u, other=0.0).to(tl.float32)
        y *= z * sigmoid(z)
    tl.store(y_at, tl.where(used[None, :], y, 0.0).to(y_ptr.dtype.element_ty), mask=is_y)

    if folds:  # the committed records, into the rows at hand, which the caches still hold
        for first in range(0, HEAD_K_DIM, FOLD_K):
            dim_k = first + tl.arange(0, FOLD_K)
            is_k = dim_k < HEAD_K_DIM
            is_tile = is_v[:, None] & is_k[None, :]
            is_key = is_record[:, None] & is_k[None, :]
            keys = tl.load(ring_k_at + record[:, None] * HEAD_K_DIM + dim_k[None, :], mask=is_key, other=0.0)
            state = tl.load(state_at + dim_k[None, :], mask=is_tile, other=0.0).to(tl.float32)
            if CHANNEL_GATE:
                keys, total_k = _decayed_keys(keys, ring_g_at, record, cursor, dim_k, is_k, HEAD_K_DIM, TF32)
                state *= total_k[None, :]
            else:
                keys = keys.to(tl.float32) * after[:, None]
                state *= total
            state = _product(records, keys, state, TF32, NARROW)
            tl.store(state_at + to_own + dim_k[None, :], state.to(checkpoint_ptr.dtype.element_ty), mask=is_tile)
        tl.debug_barrier()  # the records were read

    if CLAMPED:
        updates = tl.clamp(updates, -65504.0, 65504.0)  # infinity in a record would stay for good
    u_at = ring_u_at + (tl.where(folds, 0, cursor) + token)[None, :] * HEAD_V_DIM + dim_v[:, None]
    tl.store(u_at, updates.to(ring_u_ptr.dtype.element_ty), mask=is_u)


@triton.jit
def _append_kernel(
    k_ptr,
    a_ptr,
    rate_ptr,
    bias_ptr,
    ring_k_ptr,
    ring_g_ptr,
    write_pos_ptr,
    slots_ptr,
    num_tokens_ptr,
    lower_bound,
    dt_min,
    dt_max,
    k_row,
    k_token,
    k_head,
    a_row,
    a_token,
    a_head,
    ring_k_stride,
    ring_g_stride,
    GROUP: tl.constexpr,
    HEAD_K_DIM: tl.constexpr,
    RING_ROWS: tl.constexpr,
    CHANNEL_GATE: tl.constexpr,
    DELTA_RULE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Keys and log decays of a window, for one row and value head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    count = tl.load(num_tokens_ptr + row)
    if (slot < 0) | (count <= 0):
        return
    cursor = tl.load(write_pos_ptr + slot)
    start = tl.where(cursor + count > RING_ROWS, 0, cursor)
    token = tl.arange(0, BLOCK_T)
    wide = token.to(tl.int64)
    dim_k = tl.arange(0, BLOCK_K)
    used = token < count
    is_k = dim_k < HEAD_K_DIM
    is_key = used[:, None] & is_k[None, :]
    record = start + token
    rate = tl.load(rate_ptr + head).to(tl.float32)
    a_at = a_ptr + row * a_row + head * a_head
    if CHANNEL_GATE:
        a = tl.load(a_at + wide[:, None] * a_token + dim_k[None, :], mask=is_key, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + head * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)[None, :]
        g, _ = gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
        g_at = ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + record)[:, None] * HEAD_K_DIM + dim_k[None, :]
        tl.store(g_at, g, mask=is_key)
    else:
        a = tl.load(a_at + wide * a_token, mask=used, other=0.0).to(tl.float32)
        if HAS_BIAS:
            a += tl.load(bias_ptr + head).to(tl.float32)
        g, _ = gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
        tl.store(ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + record, g, mask=used)
    if head % GROUP == 0:
        k_head_index = head // GROUP
        k_at = k_ptr + row * k_row + k_head_index * k_head + dim_k[None, :] + wide[:, None] * k_token
        key = tl.load(k_at, mask=is_key, other=0.0)
        ring_k_at = ring_k_ptr + slot * ring_k_stride + (k_head_index * RING_ROWS + record)[:, None] * HEAD_K_DIM
        tl.store(ring_k_at + dim_k[None, :], key, mask=is_key)


class WindowTiling(NamedTuple):
    """How the work of one row and value head is cut; the same for every batch, so that a row's bits are, too.

    Attributes:
        tokens: of the window, padded.
        rows: of the state, in one program.
        columns: of the state, at a time.
        num_warps: of a program.
        stages: of the loop over columns, whose loads run ahead.
    """

    tokens: int
    rows: int
    columns: int
    num_warps: int
    stages: int


def window_tiling(tokens: int, head_v_dim: int, ring_rows: int, channel: bool, state_bytes: int) -> WindowTiling:
    """The choice for a window's length and a layer's shape: for a ring of 16 rows the fastest measured on an H200.

    One warp, up to eight tokens: what a program computes stays in its lanes, and nothing waits at a barrier. A longer
    ring takes more registers, so fewer rows or columns keep it from spilling.
    """
    padded = max(4, triton.next_power_of_2(tokens))
    many_records = record_block(ring_rows) > 16
    if padded > 8:
        rows, columns, num_warps, stages = 64, 16, 4, 2
    elif channel:
        rows, columns, num_warps, stages = 32 if many_records else 64, 32, 1, 1
        if many_records or (padded > 4 and state_bytes > 2):
            columns = 16
    elif state_bytes > 2:
        rows, columns, num_warps, stages = 32 if many_records else 64, 32, 1, 3
    else:
        rows, columns, num_warps, stages = 64, 32 if many_records else 64, 1, 2 if many_records else 1
    return WindowTiling(padded, max(16, min(triton.next_power_of_2(head_v_dim), rows)), columns, num_warps, stages)


def record_block(ring_rows: int) -> int:
    """Records that a program reads together: all of the ring, and no fewer than the matrix units take."""
    return max(16, triton.next_power_of_2(ring_rows))


def _evenly_placed(x: Tensor) -> Tensor:
    """x, or a copy where its tokens and heads don't begin at such addresses as those of a copy.

    The kernel adds the channels of a head as its lanes hold them, which follows from what the compiler knows of strides
    and addresses: it asks whether they are multiples of 16.
    """
    even = x.shape[-1] % 16 == 0 and not any(step % 16 for step in _steps(x))
    if x.data_ptr() % 16 == 0 and (even or x.is_contiguous()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _steps(x: Tensor) -> list[int]:
    """Its first three strides; 0 where they are of no use."""
    return [step if n > 1 else 0 for n, step in zip(x.shape[:3], x.stride()[:3], strict=True)]


def verify_step(layer: Layer, rules: Rules, step: Step, window: Window) -> Tensor:
    """A window of any layer."""
    assert step.checkpoint_slot is not None
    layer = decode.readable(layer, step)
    _, _, v, a, b, rate, bias, D, z = layer
    q, k = _evenly_placed(layer.q), _evenly_placed(layer.k)
    batch, tokens, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[2:]
    channel = layer.channel
    a = _evenly_placed(a) if channel else a
    num_tokens = window.num_tokens.contiguous()
    parents = window.parents if window.parents is None or window.parents.stride(1) == 1 else window.parents.contiguous()
    if not batch or not tokens:
        return v.new_empty(v.shape)
    cut = window_tiling(tokens, head_v_dim, step.ring_u.shape[2], channel, step.checkpoint.element_size())
    contract, padded = fuses(head_v_dim, head_k_dim), triton.next_power_of_2(head_k_dim)
    b_or_a = a if b is None else b
    z_or_v = v if z is None else z
    bounds = (rules.lower_bound or 0.0, rules.dt_min, rules.dt_max)
    flags: dict[str, Any] = {
        "GROUP": num_v_heads // num_k_heads,
        "HEAD_K_DIM": head_k_dim,
        "RING_ROWS": step.ring_u.shape[2],
        "CHANNEL_GATE": channel,
        "DELTA_RULE": b is not None,
        "BOUNDED": rules.lower_bound is not None,
        "SOFTPLUS": rules.softplus,
        "HAS_BIAS": bias is not None,
        "BLOCK_T": cut.tokens,
    }
    if tokens == 1:  # a decode step but for what a full ring does
        b, z = (None if x is None else x[:, 0] for x in (b, z))
        token = Layer(q[:, 0], k[:, 0], v[:, 0], a[:, 0], b, rate, bias, D, z)
        y = decode.decode_step(token, rules, step, num_tokens).unsqueeze(1)
    else:
        y = torch.empty((batch, tokens, num_v_heads, head_v_dim), dtype=v.dtype, device=v.device)
        _verify_kernel[(batch, num_v_heads, triton.cdiv(head_v_dim, cut.rows))](
            q,
            k,
            v,
            a,
            b_or_a,
            rate,
            rate if bias is None else bias,
            rate if D is None else D,
            z_or_v,
            y,
            step.checkpoint,
            step.ring_u,
            step.ring_k,
            step.ring_g,
            step.write_pos,
            step.checkpoint_slot,
            step.slots,
            num_tokens,
            num_tokens if parents is None else parents,
            rules.scale,
            rules.beta_scale,
            *bounds,
            tokens,
            *_steps(q),
            *_steps(k),
            *v.stride()[:3],
            *a.stride()[:3],
            *b_or_a.stride()[:3],
            *z_or_v.stride()[:3],
            *(0 if D is None else D.stride(0), 0 if D is None or D.dim() == 1 else D.stride(1)),
            0 if parents is None else parents.stride(0),
            *(t.stride(0) for t in (step.checkpoint, step.ring_u, step.ring_k, step.ring_g)),
            NUM_V_HEADS=num_v_heads,
            HEAD_V_DIM=head_v_dim,
            L2_NORM=rules.l2_norm,
            HAS_D=D is not None,
            HAS_Z=z is not None,
            TREE=parents is not None,
            CLAMPED=step.ring_u.dtype == torch.float16,
            TF32=torch.version.hip is None,
            NARROW=k.is_cuda,
            EPS=NORM_EPS,
            BLOCK_V=cut.rows,
            BLOCK_K=cut.columns,
            BLOCK_R=record_block(step.ring_u.shape[2]),
            FOLD_K=FOLD_COLUMNS,
            STAGES=cut.stages,
            num_warps=cut.num_warps,
            enable_fp_fusion=contract and not channel,
            **flags,
        )
    _append_kernel[(batch, num_v_heads)](
        k,
        a,
        rate,
        rate if bias is None else bias,
        step.ring_k,
        step.ring_g,
        step.write_pos,
        step.slots,
        num_tokens,
        *bounds,
        *k.stride()[:3],
        *a.stride()[:3],
        step.ring_k.stride(0),
        step.ring_g.stride(0),
        BLOCK_K=padded,
        num_warps=max(1, min(4, cut.tokens * padded // 512)),
        enable_fp_fusion=contract,
        **flags,
    )
    return y
