"""One decode step by replay, for both gates and both rules, as one Triton kernel.

A program holds ``BLOCK_V`` rows of one value head's state: it reads that tile of the checkpoint once, answers from it
(equation in :mod:`replayssm.backends.torch.decode`, same letters), and on a flush folds the records into the tile it
holds and writes it once. Slots, cursors and the flush decision are read on the device. All arithmetic is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.step import Step
from replayssm.recurrence import NORM_EPS


@triton.jit
def _softplus(x):
    # log(1 + e) = 2 atanh(e / (2 + e)), as a series: the hardware's logarithm loses a small e.
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 15.0
    for i in tl.static_range(7):
        series = series * s2 + 1.0 / (13.0 - 2.0 * i)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
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
    # numbers
    scale,
    beta_scale,
    lower_bound,
    dt_min,
    dt_max,
    flush_period,
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
    EPS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    tile = tl.program_id(2)
    k_head_index = head // GROUP
    dim_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    dim_k = tl.arange(0, BLOCK_K)
    is_v = dim_v < HEAD_V_DIM
    is_k = dim_k < HEAD_K_DIM
    y_at = y_ptr + (row * NUM_V_HEADS + head) * HEAD_V_DIM + dim_v

    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        if ZERO_PADDING:
            tl.store(y_at, tl.zeros([BLOCK_V], tl.float32).to(y_ptr.dtype.element_ty), mask=is_v)
        return
    if ROW_CURSORS:
        cursor = tl.load(write_pos_ptr + row)
        source = slot
    else:
        cursor = tl.load(write_pos_ptr + slot)
        source = tl.load(checkpoint_slot_ptr + slot).to(tl.int64)

    # The checkpoint tile first: everything below waits for memory anyway.
    tile_offset = (head * HEAD_V_DIM + dim_v)[:, None] * HEAD_K_DIM + dim_k[None, :]
    is_tile = is_v[:, None] & is_k[None, :]
    state = tl.load(checkpoint_ptr + source * checkpoint_stride + tile_offset, mask=is_tile, other=0.0).to(tl.float32)

    q = tl.load(q_ptr + row * q_row + k_head_index * q_head + dim_k, mask=is_k, other=0.0).to(tl.float32)
    k_raw = tl.load(k_ptr + row * k_row + k_head_index * k_head + dim_k, mask=is_k, other=0.0)
    k = k_raw.to(tl.float32)
    v = tl.load(v_ptr + row * v_row + head * v_head + dim_v, mask=is_v, other=0.0).to(tl.float32)

    # Gate: the log decay g of this token, one number or one per key channel.
    rate = tl.load(rate_ptr + head).to(tl.float32)
    if CHANNEL_GATE:
        a = tl.load(a_ptr + row * a_row + head * a_head + dim_k, mask=is_k, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + head * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
    else:
        a = tl.load(a_ptr + row * a_row + head * a_head).to(tl.float32)
        if HAS_BIAS:
            a += tl.load(bias_ptr + head).to(tl.float32)
    if DELTA_RULE:
        if BOUNDED:
            g = lower_bound * _sigmoid(tl.exp(rate) * a)
        else:
            g = -tl.exp(rate) * _softplus(a)
    else:
        if SOFTPLUS:
            a = _softplus(a)
        a = tl.minimum(tl.maximum(a, dt_min), dt_max)
        g = a * rate

    # The records' decays up to and with this token: sums from the newest back to the oldest.
    ring_row = tl.arange(0, BLOCK_R)
    is_record = ring_row < cursor
    follows = ring_row + 1 < cursor
    if CHANNEL_GATE:
        g_at = ring_g_ptr + slot * ring_g_stride + head * RING_ROWS * HEAD_K_DIM + dim_k[None, :]
        next_g = tl.load(g_at + (ring_row + 1)[:, None] * HEAD_K_DIM, mask=follows[:, None] & is_k[None, :], other=0.0)
        first_g = tl.load(
            ring_g_ptr + slot * ring_g_stride + head * RING_ROWS * HEAD_K_DIM + dim_k,
            mask=dim_k < tl.where(cursor > 0, HEAD_K_DIM, 0),
            other=0.0,
        )
        log_after = tl.cumsum(next_g, axis=0, reverse=True) + g[None, :]
        log_total = tl.sum(next_g, axis=0) + first_g + g
    else:
        g_at = ring_g_ptr + slot * ring_g_stride + head * RING_ROWS
        next_g = tl.load(g_at + ring_row + 1, mask=follows, other=0.0)
        first_g = tl.load(g_at, mask=cursor > 0, other=0.0)
        if INPUT_RECORDS:  # the ring keeps Δ, and g = Δ·A
            next_g *= rate
            first_g *= rate
        log_after = tl.cumsum(next_g, axis=0, reverse=True) + g
        log_total = tl.sum(next_g, axis=0) + first_g + g
    after = tl.exp(log_after)
    if INPUT_RECORDS:  # the ring keeps x, and u = Δ·x
        after *= tl.load(g_at + ring_row, mask=is_record, other=0.0)
    total = tl.exp(log_total)

    # Ring: scores of q and k with every record's key, then the weighted sums of the updates.
    ring_k_at = ring_k_ptr + slot * ring_k_stride + k_head_index * RING_ROWS * HEAD_K_DIM
    ring_keys = tl.load(
        ring_k_at + ring_row[:, None] * HEAD_K_DIM + dim_k[None, :],
        mask=is_record[:, None] & is_k[None, :],
        other=0.0,
    ).to(tl.float32)
    ring_u_at = ring_u_ptr + slot * ring_u_stride + head * RING_ROWS * HEAD_V_DIM
    ring_updates = tl.load(
        ring_u_at + ring_row[:, None] * HEAD_V_DIM + dim_v[None, :],
        mask=is_record[:, None] & is_v[None, :],
        other=0.0,
    ).to(tl.float32)
    if CHANNEL_GATE:
        ring_keys = ring_keys * after
        q_decayed = q * total
        sq = tl.sum(state * q_decayed[None, :], axis=1)
        score_q = tl.sum(ring_keys * q[None, :], axis=1)
    else:
        sq = tl.sum(state * q[None, :], axis=1) * total
        score_q = tl.sum(ring_keys * q[None, :], axis=1) * after
    sq += tl.sum(score_q[:, None] * ring_updates, axis=0)

    kq = tl.sum(k * q, axis=0)
    if DELTA_RULE:
        if CHANNEL_GATE:
            k_decayed = k * total
            sk = tl.sum(state * k_decayed[None, :], axis=1)
            score_k = tl.sum(ring_keys * k[None, :], axis=1)
        else:
            sk = tl.sum(state * k[None, :], axis=1) * total
            score_k = tl.sum(ring_keys * k[None, :], axis=1) * after
        sk += tl.sum(score_k[:, None] * ring_updates, axis=0)
        beta = beta_scale * _sigmoid(tl.load(b_ptr + row * b_row + head * b_head).to(tl.float32))
        if L2_NORM:
            k_norm = 1.0 / tl.sqrt_rn(tl.sum(k * k, axis=0) + EPS)
            q_norm = 1.0 / tl.sqrt_rn(tl.sum(q * q, axis=0) + EPS)
            u = (beta * k_norm) * (v - k_norm * sk)
            y = (sq + u * kq) * (q_norm * scale)
            if NORMAL_KEYS:  # the key's norm goes into the key, not into the update
                u = beta * (v - k_norm * sk)
                k *= k_norm
                k_raw = k
        else:
            u = beta * (v - sk)
            y = (sq + u * kq) * scale
    else:
        u = a * v
        y = sq + u * kq
        if HAS_D:
            y += tl.load(d_ptr + head * d_head + dim_v * d_dim, mask=is_v, other=0.0).to(tl.float32) * v
        if HAS_Z:
            z = tl.load(z_ptr + row * z_row + head * z_head + dim_v, mask=is_v, other=0.0).to(tl.float32)
            y *= z * _sigmoid(z)
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_v)

    flush = cursor >= flush_period - 1
    if FORCED:
        flush = flush | (tl.load(force_flush_ptr + row) != 0)
    if flush:
        if CHANNEL_GATE:
            state = state * total[None, :]
        else:
            state = state * total
        for j in range(cursor):
            is_j = ring_row == j
            key = tl.load(ring_k_at + j * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
            update = tl.load(ring_u_at + j * HEAD_V_DIM + dim_v, mask=is_v, other=0.0).to(tl.float32)
            if CHANNEL_GATE:
                key *= tl.sum(tl.where(is_j[:, None], after, 0.0), axis=0)
            else:
                update *= tl.sum(tl.where(is_j, after, 0.0), axis=0)
            state += update[:, None] * key[None, :]
        state += u[:, None] * k[None, :]
        own = checkpoint_ptr + slot * checkpoint_stride + tile_offset
        tl.store(own, state.to(checkpoint_ptr.dtype.element_ty), mask=is_tile)
    else:
        if INPUT_RECORDS:
            u = v
            g = a
        if ring_u_ptr.dtype.element_ty == tl.float16:
            u = tl.clamp(u, -65504.0, 65504.0)  # u holds the factor that normalises k: infinity would stay for good
        tl.store(ring_u_at + cursor * HEAD_V_DIM + dim_v, u.to(ring_u_ptr.dtype.element_ty), mask=is_v)
        if tile == 0:
            if CHANNEL_GATE:
                g_new = ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + cursor) * HEAD_K_DIM + dim_k
                tl.store(g_new, g, mask=is_k)
            else:
                tl.store(ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + cursor, g)
            if head % GROUP == 0:
                tl.store(ring_k_at + cursor * HEAD_K_DIM + dim_k, k_raw, mask=is_k)


def tile(head_v_dim: int, head_k_dim: int, channel: bool) -> tuple[int, int, int]:
    """Rows and columns of the state in one program, and its warps.

    Of ten choices measured on an H200 (16 to 64 rows, 1 to 8 warps, sums in the lanes or on the matrix units), 16 rows
    in one warp was the fastest for the head gate, by 1.2 to 1.4 over 32 rows in four. The channel gate's decays of a
    whole ring fill a warp's registers: 64 rows in four warps was its fastest.
    """
    rows, columns = triton.next_power_of_2(head_v_dim), triton.next_power_of_2(head_k_dim)
    if channel:
        return min(rows, 64), columns, 4
    return min(rows, 16), columns, max(1, columns // 128)


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


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    rate: Tensor,
    bias: Tensor | None,
    step: Step,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    scale: float = 1.0,
    beta_scale: float = 1.0,
    lower_bound: float | None = None,
    l2_norm: bool = False,
    softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Run the kernel on the tensors of any of the layers; the rule is the delta rule where b is given."""
    check_dense(checkpoint=step.checkpoint, ring_u=step.ring_u, ring_k=step.ring_k, ring_g=step.ring_g)
    checkpoint_slot = step.slots if step.checkpoint_slot is None else step.checkpoint_slot
    check_dense(write_pos=step.write_pos[None], checkpoint_slot=checkpoint_slot[None], slots=step.slots[None])
    batch, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[1:]
    q, k, v, z = (None if t is None else _last_dim_contiguous(t) for t in (q, k, v, z))  # type: ignore[assignment]
    assert q is not None
    assert k is not None
    assert v is not None
    rate, bias = (None if t is None else t.contiguous() for t in (rate, bias))  # type: ignore[assignment]
    channel = a.dim() == 3
    if channel:
        a = _last_dim_contiguous(a)
    y = step.out
    if y is None:
        y = torch.empty((batch, num_v_heads, head_v_dim), dtype=v.dtype, device=v.device)
    if not batch:
        return y
    block_v, block_k, num_warps = tile(head_v_dim, head_k_dim, channel)
    ring_rows = step.ring_u.shape[2]
    b_or_a = a if b is None else b
    z_or_v = v if z is None else z
    _decode_kernel[(batch, num_v_heads, triton.cdiv(head_v_dim, block_v))](
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
        checkpoint_slot,
        step.slots,
        step.slots if step.force_flush is None else step.force_flush,
        scale,
        beta_scale,
        0.0 if lower_bound is None else lower_bound,
        *dt_limit,
        step.flush_period,
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        *(a.stride(0), a.stride(1), b_or_a.stride(0), b_or_a.stride(1), z_or_v.stride(0), z_or_v.stride(1)),
        *(0 if D is None else D.stride(0), 0 if D is None or D.dim() == 1 else D.stride(1)),
        *(t.stride(0) for t in (step.checkpoint, step.ring_u, step.ring_k, step.ring_g)),
        NUM_V_HEADS=num_v_heads,
        GROUP=num_v_heads // num_k_heads,
        HEAD_V_DIM=head_v_dim,
        HEAD_K_DIM=head_k_dim,
        RING_ROWS=ring_rows,
        CHANNEL_GATE=channel,
        DELTA_RULE=b is not None,
        BOUNDED=lower_bound is not None,
        L2_NORM=l2_norm,
        SOFTPLUS=softplus,
        HAS_BIAS=bias is not None,
        HAS_D=D is not None,
        HAS_Z=z is not None,
        ROW_CURSORS=step.checkpoint_slot is None,
        NORMAL_KEYS=step.records == "normalised",
        INPUT_RECORDS=step.records == "inputs",
        ZERO_PADDING=step.zero_padding,
        FORCED=step.force_flush is not None,
        EPS=NORM_EPS,
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        BLOCK_R=triton.next_power_of_2(ring_rows),
        num_warps=num_warps,
    )
    return y


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def gdn_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    beta_scale: float,
    scale: float,
    qk_l2norm: bool,
    step: Step,
) -> Tensor:
    """Gated DeltaNet, see :func:`replayssm.ops.gdn_decode`."""
    numbers: dict[str, Any] = {"scale": scale, "beta_scale": beta_scale, "l2_norm": qk_l2norm}
    return _launch(q, k, v, a, b, A_log, dt_bias, step, **numbers)


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    beta_scale: float,
    scale: float,
    qk_l2norm: bool,
    step: Step,
) -> Tensor:
    """Kimi Delta Attention, see :func:`replayssm.ops.kda_decode`."""
    numbers: dict[str, Any] = {"scale": scale, "beta_scale": beta_scale, "l2_norm": qk_l2norm}
    return _launch(q, k, v, a, b, A_log, dt_bias, step, lower_bound=lower_bound, **numbers)


def mamba2_decode(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    step: Step,
) -> Tensor:
    """Mamba-2, see :func:`replayssm.ops.mamba2_decode`."""
    return _launch(C, B, x, dt, None, A, dt_bias, step, D=D, z=z, softplus=dt_softplus, dt_limit=(dt_min, dt_max))
