"""One decode step by replay, for both gates and both rules, as one Triton kernel.

A program holds ``BLOCK_V`` rows of one value head's state: it reads that tile of the checkpoint once, answers from it
(equation in :mod:`replayssm.backends.torch.decode`, same letters), and on a flush folds the records into the tile it
holds and writes it once. Slots, cursors and the flush decision are read on the device. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.step import Layer, Rules, Step, counted_off
from replayssm.backends.triton.gates import gate, sigmoid
from replayssm.recurrence import NORM_EPS


@triton.jit(do_not_specialize=["tiles"])
def _decode_kernel(
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
    force_flush_ptr,
    num_tokens_ptr,
    # numbers
    scale,
    beta_scale,
    lower_bound,
    dt_min,
    dt_max,
    flush_period,
    tiles,
    # strides in elements: rows and heads of the inputs, slots and heads of the state
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    a_row,
    a_head,
    b_row,
    b_head,
    z_row,
    z_head,
    d_head,
    d_dim,
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
    ROW_CURSORS: tl.constexpr,
    NORMAL_KEYS: tl.constexpr,
    INPUT_RECORDS: tl.constexpr,
    ZERO_PADDING: tl.constexpr,
    FORCED: tl.constexpr,
    WINDOW: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first_tile = tl.program_id(2) * tiles
    k_head_index = head // GROUP
    dim_k = tl.arange(0, BLOCK_K)
    is_k = dim_k < HEAD_K_DIM
    y_at = y_ptr + (row * NUM_V_HEADS + head) * HEAD_V_DIM

    slot = tl.load(slots_ptr + row).to(tl.int64)
    absent = slot < 0
    if WINDOW:
        absent = absent | (tl.load(num_tokens_ptr + row) <= 0)
    if absent:
        if ZERO_PADDING:
            for tile in range(first_tile, first_tile + tiles):
                dim_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                zero = tl.zeros([BLOCK_V], tl.float32).to(y_ptr.dtype.element_ty)
                tl.store(y_at + dim_v, zero, mask=dim_v < HEAD_V_DIM)
        return
    if ROW_CURSORS:
        cursor = tl.load(write_pos_ptr + row)
        source = slot
    else:
        cursor = tl.load(write_pos_ptr + slot)
        source = tl.load(checkpoint_slot_ptr + slot).to(tl.int64)
    if WINDOW:  # the committed records alone, when the token finds no room
        flush = cursor >= RING_ROWS
    else:
        flush = cursor >= flush_period - 1
    if FORCED:
        flush = flush | (tl.load(force_flush_ptr + row) != 0)

    q = tl.load(q_ptr + row * q_row + k_head_index * q_head + dim_k, mask=is_k, other=0.0).to(tl.float32)
    k_raw = tl.load(k_ptr + row * k_row + k_head_index * k_head + dim_k, mask=is_k, other=0.0)
    k = k_raw.to(tl.float32)

    # The log decay g of this token, one number or one per key channel.
    rate = tl.load(rate_ptr + head).to(tl.float32)
    if CHANNEL_GATE:
        a = tl.load(a_ptr + row * a_row + head * a_head + dim_k, mask=is_k, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + head * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
    else:
        a = tl.load(a_ptr + row * a_row + head * a_head).to(tl.float32)
        if HAS_BIAS:
            a += tl.load(bias_ptr + head).to(tl.float32)
    g, a = gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)

    # Scores of q and k with every record's key, once for all tiles; decays sum from the newest record back.
    ring_k_at = ring_k_ptr + slot * ring_k_stride + k_head_index * RING_ROWS * HEAD_K_DIM
    ring_u_at = ring_u_ptr + slot * ring_u_stride + head * RING_ROWS * HEAD_V_DIM
    part = tl.arange(0, BLOCK_R)
    number = tl.arange(0, CHUNKS)[:, None]
    scores_q = tl.zeros([CHUNKS, BLOCK_R], tl.float32)
    scores_k = tl.zeros([CHUNKS, BLOCK_R], tl.float32)
    if CHANNEL_GATE:  # of the committed records, and this token's g beside it
        behind = tl.zeros([BLOCK_K], tl.float32)
    else:
        behind = 0.0
    chunks = (cursor + BLOCK_R - 1) // BLOCK_R
    for back in range(chunks):
        chunk = chunks - 1 - back
        first = chunk * BLOCK_R
        is_record = first + part < cursor
        follows = (part + 1 < BLOCK_R) & (first + part + 1 < cursor)  # in this chunk
        is_key = is_record[:, None] & is_k[None, :]
        keys_at = ring_k_at + (first + part)[:, None] * HEAD_K_DIM + dim_k[None, :]
        keys = tl.load(keys_at, mask=is_key, other=0.0).to(tl.float32)
        if CHANNEL_GATE:
            g_at = ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + first) * HEAD_K_DIM + dim_k
            is_next = follows[:, None] & is_k[None, :]
            next_g = tl.load(g_at[None, :] + (part + 1)[:, None] * HEAD_K_DIM, mask=is_next, other=0.0)
            keys *= tl.exp(tl.cumsum(next_g, axis=0, reverse=True) + (behind + g)[None, :])
            behind += tl.sum(next_g, axis=0) + tl.load(g_at, mask=is_k, other=0.0)
            score_q = tl.sum(keys * q[None, :], axis=1)
            score_k = tl.sum(keys * k[None, :], axis=1)
        else:
            g_at = ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + first
            next_g = tl.load(g_at + part + 1, mask=follows, other=0.0)
            first_g = tl.load(g_at)
            if INPUT_RECORDS:  # the ring keeps Δ, and g = Δ·A; it keeps x, and u = Δ·x
                next_g *= rate
                first_g *= rate
            after = tl.exp(tl.cumsum(next_g, axis=0, reverse=True) + (behind + g))
            if INPUT_RECORDS:
                after *= tl.load(g_at + part, mask=is_record, other=0.0)
            behind += tl.sum(next_g, axis=0) + first_g
            score_q = tl.sum(keys * q[None, :], axis=1) * after
            score_k = tl.sum(keys * k[None, :], axis=1) * after
        scores_q = tl.where(number == chunk, score_q[None, :], scores_q)
        if DELTA_RULE:
            scores_k = tl.where(number == chunk, score_k[None, :], scores_k)
    scores_q = tl.reshape(scores_q, [CHUNKS * BLOCK_R])
    scores_k = tl.reshape(scores_k, [CHUNKS * BLOCK_R])
    past = behind
    total = tl.exp(past + g)
    if CHANNEL_GATE:
        q_state = q * total
        k_state = k * total
    else:
        q_state = q
        k_state = k
    kq = tl.sum(k * q, axis=0)
    k_norm = 1.0
    y_scale = scale
    if L2_NORM:
        k_norm = 1.0 / tl.sqrt_rn(tl.sum(k * k, axis=0) + EPS)
        y_scale = scale / tl.sqrt_rn(tl.sum(q * q, axis=0) + EPS)
    if DELTA_RULE:
        beta = beta_scale * sigmoid(tl.load(b_ptr + row * b_row + head * b_head).to(tl.float32))
    if NORMAL_KEYS:  # the key's norm goes into the key, not into the update
        k *= k_norm
        kq *= k_norm
        k_raw = k

    # One pass over the checkpoint.
    ring_row = tl.arange(0, CHUNKS * BLOCK_R)
    for tile in range(first_tile, first_tile + tiles):
        dim_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        is_v = dim_v < HEAD_V_DIM
        tile_offset = (head * HEAD_V_DIM + dim_v)[:, None] * HEAD_K_DIM + dim_k[None, :]
        is_tile = is_v[:, None] & is_k[None, :]
        state_at = checkpoint_ptr + source * checkpoint_stride + tile_offset
        state = tl.load(state_at, mask=is_tile, other=0.0).to(tl.float32)
        updates_at = ring_u_at + ring_row[:, None] * HEAD_V_DIM + dim_v[None, :]
        is_update = (ring_row < cursor)[:, None] & is_v[None, :]
        updates = tl.load(updates_at, mask=is_update, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + row * v_row + head * v_head + dim_v, mask=is_v, other=0.0).to(tl.float32)

        sq = tl.sum(state * q_state[None, :], axis=1)
        if not CHANNEL_GATE:
            sq *= total
        sq += tl.sum(scores_q[:, None] * updates, axis=0)
        if DELTA_RULE:
            sk = tl.sum(state * k_state[None, :], axis=1)
            if not CHANNEL_GATE:
                sk *= total
            sk += tl.sum(scores_k[:, None] * updates, axis=0)
            u = beta * (v - k_norm * sk)
            if not NORMAL_KEYS:
                u *= k_norm
            y = (sq + u * kq) * y_scale
        else:
            u = a * v
            y = sq + u * kq
            if HAS_D:
                y += tl.load(d_ptr + head * d_head + dim_v * d_dim, mask=is_v, other=0.0).to(tl.float32) * v
            if HAS_Z:
                z = tl.load(z_ptr + row * z_row + head * z_head + dim_v, mask=is_v, other=0.0).to(tl.float32)
                y *= z * sigmoid(z)
        tl.store(y_at + dim_v, y.to(y_ptr.dtype.element_ty), mask=is_v)

        if flush:
            if CHANNEL_GATE:
                behind = tl.zeros([BLOCK_K], tl.float32)
            else:
                behind = 0.0
            if not WINDOW:
                behind += g
            decay = tl.exp(past + behind)
            if CHANNEL_GATE:
                state *= decay[None, :]
            else:
                state *= decay
            if not WINDOW:
                state += u[:, None] * k[None, :]
            for back in range(cursor):
                j = cursor - 1 - back
                key = tl.load(ring_k_at + j * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
                update = tl.load(ring_u_at + j * HEAD_V_DIM + dim_v, mask=is_v, other=0.0).to(tl.float32)
                if CHANNEL_GATE:
                    g_at = ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + j) * HEAD_K_DIM + dim_k
                    key *= tl.exp(behind)
                    behind += tl.load(g_at, mask=is_k, other=0.0)
                else:
                    g_j = tl.load(ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + j)
                    update *= tl.exp(behind)
                    if INPUT_RECORDS:
                        update *= g_j
                        g_j *= rate
                    behind += g_j
                state += update[:, None] * key[None, :]
            own = checkpoint_ptr + slot * checkpoint_stride + tile_offset
            tl.store(own, state.to(checkpoint_ptr.dtype.element_ty), mask=is_tile)
        if WINDOW or not flush:
            if INPUT_RECORDS:
                u = v
            if ring_u_ptr.dtype.element_ty == tl.float16:
                u = tl.clamp(u, -65504.0, 65504.0)  # u holds the factor that normalises k: infinity would stay for good
            record = cursor
            if WINDOW and flush:
                record = cursor * 0
                tl.debug_barrier()  # it was read by the fold
            tl.store(ring_u_at + record * HEAD_V_DIM + dim_v, u.to(ring_u_ptr.dtype.element_ty), mask=is_v)

    if (not WINDOW) and (first_tile == 0) and (not flush):
        if CHANNEL_GATE:
            g_new = ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + cursor) * HEAD_K_DIM + dim_k
            tl.store(g_new, g, mask=is_k)
        else:
            if INPUT_RECORDS:
                g = a
            tl.store(ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + cursor, g)
        if head % GROUP == 0:
            tl.store(ring_k_at + cursor * HEAD_K_DIM + dim_k, k_raw, mask=is_k)


class Tiling(NamedTuple):
    """How the work of one row and value head is cut; the same for every batch, so that a row's bits are, too.

    Attributes:
        rows: of the state, at a time.
        columns: of the state, all of them.
        records: of the ring, at a time.
        num_warps: of a program.
    """

    rows: int
    columns: int
    records: int
    num_warps: int


def tiling(head_v_dim: int, head_k_dim: int, ring_rows: int, channel: bool, state_bytes: int) -> Tiling:
    """The choice for a layer's shape and the bytes of a state's element, of 20 measured on an H200.

    Few rows in one warp: sums stay in its lanes, and registers are left for many programs on a multiprocessor.
    """
    rows, columns = triton.next_power_of_2(head_v_dim), triton.next_power_of_2(head_k_dim)
    at_a_time = 16 if channel and state_bytes < 4 else 8
    records = min(triton.next_power_of_2(ring_rows), 4 if channel else 16)
    return Tiling(min(rows, at_a_time), columns, records, max(1, columns // 128))


def fuses(head_v_dim: int, head_k_dim: int) -> bool:
    """Whether a kernel may contract a product and a sum.

    Where a lane has a single product of a sum, contraction rounds it there and not in the other lanes, so that they
    end with different bits of one sum, and which of them is stored is then a race.
    """
    return head_k_dim >= 64 and head_k_dim % 8 == 0 and head_v_dim % 8 == 0


ENOUGH_PROGRAMS = 8192


def tiles_of_a_program(batch: int, num_v_heads: int, num_tiles: int) -> int:
    """How many tiles a program takes, one after the other: all of a head's if other programs fill the GPU."""
    return max(1, min(num_tiles, 8, batch * num_v_heads * num_tiles // ENOUGH_PROGRAMS))


def check_dense(**tensors: Tensor) -> None:
    """The kernels take any stride between slots; within one, elements must follow each other.

    Raises:
        ValueError: they don't.
    """
    for name, tensor in tensors.items():
        if not tensor[:1].is_contiguous():
            raise ValueError(
                f"{name} has strides {tensor.stride()}: the triton backend wants a slot's elements to follow each other"
            )


def decode_step(layer: Layer, rules: Rules, step: Step, num_tokens: Tensor | None = None) -> Tensor:
    """One token of any layer.

    With ``num_tokens [B]`` it is a verify window of one token, or none: a full ring is folded without the token, whose
    key and decay the caller stores.
    """
    layer = readable(layer, step)
    out = step.out
    if out is None:
        out = torch.empty_like(layer.v, memory_format=torch.contiguous_format)
    if not layer.v.shape[0]:
        return out
    q, k, v, a, b, rate, bias, D, z = layer
    checkpoint_slot = step.slots if step.checkpoint_slot is None else step.checkpoint_slot
    plan = _plan(layer, rules, step, window=num_tokens is not None)
    _decode_kernel[plan.grid](
        q,
        k,
        v,
        a,
        a if b is None else b,
        rate,
        rate if bias is None else bias,
        rate if D is None else D,
        v if z is None else z,
        out,
        *step[:5],
        checkpoint_slot,
        step.slots,
        step.slots if step.force_flush is None else step.force_flush,
        step.slots if num_tokens is None else num_tokens,
        *plan.numbers,
        **plan.constants,
    )
    return out


def bind_decode(tensors: Sequence[Tensor], rules: Rules, flush_period: int) -> Callable[..., Tensor] | None:
    """How calls of one look run that need no more checks; None for those whose tensors have to be copied first.

    Args:
        tensors: of one of them: those of a layer, then of a step, ABSENT for what isn't there.
        rules: of the layer.
        flush_period: L.
    """
    layer, step = counted_off(tensors, flush_period)
    if any(x is not y for x, y in zip(layer, readable(layer, step), strict=True)) or not layer.v.shape[0]:
        return None
    plan = _plan(layer, rules, step, window=False)
    has_b, has_bias, has_D, has_z, forced = (layer.b, layer.bias, layer.D, layer.z, step.force_flush)
    b_at, bias_at = 3 if has_b is None else 4, 5 if has_bias is None else 6
    D_at, z_at = 5 if has_D is None else 7, 2 if has_z is None else 8
    force_at = 15 if forced is None else 16
    start = _decode_kernel[plan.grid]

    def run(*given: Tensor) -> Tensor:
        out = torch.empty_like(given[2], memory_format=torch.contiguous_format)
        optional = (given[b_at], given[5], given[bias_at], given[D_at], given[z_at])
        slots = given[15]
        start(*given[:4], *optional, out, *given[9:16], given[force_at], slots, *plan.numbers, **plan.constants)
        return out

    return run


class _Plan(NamedTuple):
    """What of a launch follows from shapes, strides, dtypes and options."""

    grid: tuple[int, int, int]
    numbers: tuple[float, ...]
    constants: dict[str, Any]


def _plan(layer: Layer, rules: Rules, step: Step, *, window: bool) -> _Plan:
    q, k, v, a, b, _, bias, D, z = layer
    batch, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1:]
    ring_rows, channel = step.ring_u.shape[2], layer.channel
    cut = tiling(head_v_dim, head_k_dim, ring_rows, channel, step.checkpoint.element_size())
    tiles = tiles_of_a_program(batch, num_v_heads, triton.cdiv(head_v_dim, cut.rows))
    strided = (q, k, v, a, a if b is None else b, v if z is None else z)
    numbers = (
        *(rules.scale, rules.beta_scale, rules.lower_bound or 0.0, rules.dt_min, rules.dt_max),
        *(step.flush_period, tiles),
        *(stride for tensor in strided for stride in tensor.stride()[:2]),
        *(0 if D is None else D.stride(0), 0 if D is None or D.dim() == 1 else D.stride(1)),
        *(t.stride(0) for t in (step.checkpoint, step.ring_u, step.ring_k, step.ring_g)),
    )
    constants = {
        "NUM_V_HEADS": num_v_heads,
        "GROUP": num_v_heads // num_k_heads,
        "HEAD_V_DIM": head_v_dim,
        "HEAD_K_DIM": head_k_dim,
        "RING_ROWS": ring_rows,
        "CHANNEL_GATE": channel,
        "DELTA_RULE": b is not None,
        "BOUNDED": rules.lower_bound is not None,
        "L2_NORM": rules.l2_norm,
        "SOFTPLUS": rules.softplus,
        "HAS_BIAS": bias is not None,
        "HAS_D": D is not None,
        "HAS_Z": z is not None,
        "ROW_CURSORS": step.checkpoint_slot is None,
        "NORMAL_KEYS": step.records == "normalised",
        "INPUT_RECORDS": step.records == "inputs",
        "ZERO_PADDING": step.zero_padding,
        "FORCED": step.force_flush is not None,
        "WINDOW": window,
        "EPS": NORM_EPS,
        "BLOCK_V": cut.rows,
        "BLOCK_K": cut.columns,
        "BLOCK_R": cut.records,
        "CHUNKS": triton.cdiv(triton.next_power_of_2(ring_rows), cut.records),
        "num_warps": cut.num_warps,
        "enable_fp_fusion": fuses(head_v_dim, head_k_dim),
    }
    return _Plan((batch, num_v_heads, triton.cdiv(head_v_dim, cut.rows * tiles)), numbers, constants)


def readable(layer: Layer, step: Step) -> Layer:
    """The layer, with copies of those tensors that don't lie in memory as the kernels read them.

    Raises:
        ValueError: the state doesn't.
    """
    check_dense(checkpoint=step.checkpoint, ring_u=step.ring_u, ring_k=step.ring_k, ring_g=step.ring_g)
    checkpoint_slot = step.slots if step.checkpoint_slot is None else step.checkpoint_slot
    check_dense(write_pos=step.write_pos[None], checkpoint_slot=checkpoint_slot[None], slots=step.slots[None])
    q, k, v, a, b, rate, bias, D, z = layer
    q, k, v = map(_last_dim_contiguous, (q, k, v))
    a = _last_dim_contiguous(a) if layer.channel else a
    z = None if z is None else _last_dim_contiguous(z)
    return Layer(q, k, v, a, b, rate.contiguous(), None if bias is None else bias.contiguous(), D, z)


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
