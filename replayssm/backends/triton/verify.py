"""One verify window by replay, for both gates and both rules, as Triton kernels.

A program of the first kernel holds ``BLOCK_V`` rows of one value head's state. It reads that tile of the checkpoint
once and runs the window's tokens one after the other against it (equation in :mod:`replayssm.backends.torch.verify`,
same letters); where the ring is full it then folds the committed records into the tile that it holds. The update
vectors' rows of the ring belong to the program; keys and decays don't: other tiles, and other value heads of the same
key head, may still read the rows that a fold sets free. So a second kernel stores those, behind the first one in the
stream.

Matrix products of all tokens at once were tried in place of the loop: with 16 tokens by 128 channels they take all
registers and spill, in exact float32 and in three tf32 terms alike.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.step import Step, Window
from replayssm.backends.triton.decode import _sigmoid, _softplus, check_dense
from replayssm.recurrence import NORM_EPS

BLOCK_T = 16  # tokens of a window, and records that are read together


@triton.jit
def _gate(
    a,
    rate,
    lower_bound,
    dt_min,
    dt_max,
    DELTA_RULE: tl.constexpr,
    BOUNDED: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """Log decay g, and for Mamba-2 the time step Δ (else a itself), of a projection that has its bias."""
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
    return g, a


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
    EPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    k_head_index = head // GROUP
    dim_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    dim_k = tl.arange(0, BLOCK_K)
    token = tl.arange(0, BLOCK_T)
    is_v = dim_v < HEAD_V_DIM
    is_k = dim_k < HEAD_K_DIM
    y_at = y_ptr + ((row * tokens + token)[:, None] * NUM_V_HEADS + head) * HEAD_V_DIM + dim_v[None, :]
    is_y = (token < tokens)[:, None] & is_v[None, :]

    slot = tl.load(slots_ptr + row).to(tl.int64)
    count = tl.load(num_tokens_ptr + row)
    if (slot < 0) | (count <= 0):
        tl.store(y_at, tl.zeros([BLOCK_T, BLOCK_V], tl.float32).to(y_ptr.dtype.element_ty), mask=is_y)
        return
    cursor = tl.load(write_pos_ptr + slot)
    source = tl.load(checkpoint_slot_ptr + slot).to(tl.int64)
    tile_offset = (head * HEAD_V_DIM + dim_v)[:, None] * HEAD_K_DIM + dim_k[None, :]
    is_tile = is_v[:, None] & is_k[None, :]
    state = tl.load(checkpoint_ptr + source * checkpoint_stride + tile_offset, mask=is_tile, other=0.0).to(tl.float32)

    rate = tl.load(rate_ptr + head).to(tl.float32)
    a_at = a_ptr + row * a_row + head * a_head
    q_at = q_ptr + row * q_row + k_head_index * q_head + dim_k
    k_at = k_ptr + row * k_row + k_head_index * k_head + dim_k
    v_at = v_ptr + row * v_row + head * v_head + dim_v
    ring_k_at = ring_k_ptr + slot * ring_k_stride + k_head_index * RING_ROWS * HEAD_K_DIM
    ring_u_at = ring_u_ptr + slot * ring_u_stride + head * RING_ROWS * HEAD_V_DIM
    chunks = (cursor + BLOCK_T - 1) // BLOCK_T
    updates = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)  # as the ring keeps them: with the keys' norms
    for i in range(count):
        q = tl.load(q_at + i * q_token, mask=is_k, other=0.0).to(tl.float32)
        k = tl.load(k_at + i * k_token, mask=is_k, other=0.0).to(tl.float32)
        v = tl.load(v_at + i * v_token, mask=is_v, other=0.0).to(tl.float32)

        # The token's own decay; then its path, back to the committed state, with the decays behind each token.
        if CHANNEL_GATE:
            a = tl.load(a_at + i * a_token + dim_k, mask=is_k, other=0.0).to(tl.float32)
            a += tl.load(bias_ptr + head * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
        else:
            a = tl.load(a_at + i * a_token).to(tl.float32)
            if HAS_BIAS:
                a += tl.load(bias_ptr + head).to(tl.float32)
        behind, delta = _gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
        sq = tl.zeros([BLOCK_V], tl.float32)
        sk = tl.zeros([BLOCK_V], tl.float32)
        if TREE:  # below the token itself, whatever it says: a walk has to end
            node = tl.minimum(tl.load(parents_ptr + row * parents_row + i), i - 1)
        else:
            node = i - 1
        while node >= 0:
            key = tl.load(k_at + node * k_token, mask=is_k, other=0.0).to(tl.float32)
            update = tl.sum(tl.where((token == node)[:, None], updates, 0.0), axis=0)
            if CHANNEL_GATE:
                key *= tl.exp(behind)
                a = tl.load(a_at + node * a_token + dim_k, mask=is_k, other=0.0).to(tl.float32)
                a += tl.load(bias_ptr + head * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
            else:
                update *= tl.exp(behind)
                a = tl.load(a_at + node * a_token).to(tl.float32)
                if HAS_BIAS:
                    a += tl.load(bias_ptr + head).to(tl.float32)
            sq += tl.sum(key * q, axis=0) * update
            if DELTA_RULE:
                sk += tl.sum(key * k, axis=0) * update
            g, _ = _gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
            behind += g
            if TREE:
                node = tl.minimum(tl.load(parents_ptr + row * parents_row + node), node - 1)
            else:
                node = node - 1

        # The committed state's part: the checkpoint, then the ring, whose decays sum from its newest record back.
        if CHANNEL_GATE:
            total = behind
        else:
            total = behind + tl.zeros([BLOCK_K], tl.float32)
        for chunk in range(chunks):
            first = (chunks - 1 - chunk) * BLOCK_T
            end = tl.minimum(cursor, first + BLOCK_T)
            record = first + token
            is_record = record < end
            follows = record + 1 < end
            keys = tl.load(
                ring_k_at + record[:, None] * HEAD_K_DIM + dim_k[None, :],
                mask=is_record[:, None] & is_k[None, :],
                other=0.0,
            ).to(tl.float32)
            if CHANNEL_GATE:
                g_at = ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + first) * HEAD_K_DIM + dim_k
                next_g = tl.load(
                    g_at[None, :] + (token + 1)[:, None] * HEAD_K_DIM, mask=follows[:, None] & is_k[None, :], other=0.0
                )
                keys *= tl.exp(tl.cumsum(next_g, axis=0, reverse=True) + total[None, :])
                total += tl.sum(next_g, axis=0) + tl.load(g_at, mask=is_k, other=0.0)
                score_q = tl.sum(keys * q[None, :], axis=1)
                score_k = tl.sum(keys * k[None, :], axis=1)
            else:
                g_at = ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + first
                next_g = tl.load(g_at + token + 1, mask=follows, other=0.0)
                decay = tl.exp(tl.cumsum(next_g, axis=0, reverse=True) + behind)
                behind += tl.sum(next_g, axis=0) + tl.load(g_at)
                score_q = tl.sum(keys * q[None, :], axis=1) * decay
                score_k = tl.sum(keys * k[None, :], axis=1) * decay
            records = tl.load(
                ring_u_at + record[:, None] * HEAD_V_DIM + dim_v[None, :],
                mask=is_record[:, None] & is_v[None, :],
                other=0.0,
            ).to(tl.float32)
            sq += tl.sum(score_q[:, None] * records, axis=0)
            if DELTA_RULE:
                sk += tl.sum(score_k[:, None] * records, axis=0)
        if CHANNEL_GATE:
            decay_k = tl.exp(total)
            sq += tl.sum(state * (q * decay_k)[None, :], axis=1)
            if DELTA_RULE:
                sk += tl.sum(state * (k * decay_k)[None, :], axis=1)
        else:
            decay_s = tl.exp(behind)
            sq += tl.sum(state * q[None, :], axis=1) * decay_s
            if DELTA_RULE:
                sk += tl.sum(state * k[None, :], axis=1) * decay_s

        # The token's own update.
        if DELTA_RULE:
            k_norm = 1.0
            y_scale = scale
            if L2_NORM:
                k_norm = 1.0 / tl.sqrt_rn(tl.sum(k * k, axis=0) + EPS)
                y_scale = scale / tl.sqrt_rn(tl.sum(q * q, axis=0) + EPS)
            beta = beta_scale * _sigmoid(tl.load(b_ptr + row * b_row + i * b_token + head * b_head).to(tl.float32))
            u = (beta * k_norm) * (v - k_norm * sk)
        else:
            y_scale = 1.0
            u = delta * v
        if CLAMPED:
            u = tl.clamp(u, -65504.0, 65504.0)  # u holds the factor that normalises k: infinity would stay for good
        updates = tl.where((token == i)[:, None], u[None, :], updates)
        y = (sq + tl.sum(k * q, axis=0) * u) * y_scale
        if HAS_D:
            y += tl.load(d_ptr + head * d_head + dim_v * d_dim, mask=is_v, other=0.0).to(tl.float32) * v
        if HAS_Z:
            z_at = z_ptr + row * z_row + i * z_token + head * z_head + dim_v
            z = tl.load(z_at, mask=is_v, other=0.0).to(tl.float32)
            y *= z * _sigmoid(z)
        y_i = y_ptr + ((row * tokens + i) * NUM_V_HEADS + head) * HEAD_V_DIM + dim_v
        tl.store(y_i, y.to(y_ptr.dtype.element_ty), mask=is_v)
    tl.store(
        y_at, tl.zeros([BLOCK_T, BLOCK_V], tl.float32).to(y_ptr.dtype.element_ty), mask=is_y & (token >= count)[:, None]
    )

    start = cursor
    if cursor + count > RING_ROWS:  # fold the committed records, newest first
        start = 0
        if CHANNEL_GATE:
            behind = tl.zeros([BLOCK_K], tl.float32)
        else:
            behind = 0.0
        added = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
        for back in range(cursor):
            j = cursor - 1 - back
            key = tl.load(ring_k_at + j * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
            update = tl.load(ring_u_at + j * HEAD_V_DIM + dim_v, mask=is_v, other=0.0).to(tl.float32)
            if CHANNEL_GATE:
                key *= tl.exp(behind)
                behind += tl.load(
                    ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + j) * HEAD_K_DIM + dim_k,
                    mask=is_k,
                    other=0.0,
                )
            else:
                update *= tl.exp(behind)
                behind += tl.load(ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + j)
            added += update[:, None] * key[None, :]
        if CHANNEL_GATE:
            state = state * tl.exp(behind)[None, :] + added
        else:
            state = state * tl.exp(behind) + added
        own = checkpoint_ptr + slot * checkpoint_stride + tile_offset
        tl.store(own, state.to(checkpoint_ptr.dtype.element_ty), mask=is_tile)
        tl.debug_barrier()  # the records were read from the rows that the window's go to
    u_at = ring_u_at + (start + token)[:, None] * HEAD_V_DIM + dim_v[None, :]
    is_u = (token < count)[:, None] & is_v[None, :]
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
    dim_k = tl.arange(0, BLOCK_K)
    used = token < count
    is_k = dim_k < HEAD_K_DIM
    is_key = used[:, None] & is_k[None, :]
    record = start + token
    rate = tl.load(rate_ptr + head).to(tl.float32)
    a_at = a_ptr + row * a_row + head * a_head
    if CHANNEL_GATE:
        a = tl.load(a_at + token[:, None] * a_token + dim_k[None, :], mask=is_key, other=0.0).to(tl.float32)
        a += tl.load(bias_ptr + head * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)[None, :]
        g, _ = _gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
        g_at = ring_g_ptr + slot * ring_g_stride + (head * RING_ROWS + record)[:, None] * HEAD_K_DIM + dim_k[None, :]
        tl.store(g_at, g, mask=is_key)
    else:
        a = tl.load(a_at + token * a_token, mask=used, other=0.0).to(tl.float32)
        if HAS_BIAS:
            a += tl.load(bias_ptr + head).to(tl.float32)
        g, _ = _gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
        tl.store(ring_g_ptr + slot * ring_g_stride + head * RING_ROWS + record, g, mask=used)
    if head % GROUP == 0:
        k_head_index = head // GROUP
        k_at = k_ptr + row * k_row + k_head_index * k_head + dim_k[None, :] + token[:, None] * k_token
        key = tl.load(k_at, mask=is_key, other=0.0)
        ring_k_at = ring_k_ptr + slot * ring_k_stride + (k_head_index * RING_ROWS + record)[:, None] * HEAD_K_DIM
        tl.store(ring_k_at + dim_k[None, :], key, mask=is_key)


def window_tile(head_v_dim: int, head_k_dim: int, channel: bool) -> tuple[int, int, int]:
    """Rows and columns of the state in one program, and its warps: the largest that compile without spills."""
    rows, columns = triton.next_power_of_2(head_v_dim), triton.next_power_of_2(head_k_dim)
    return min(rows, 32), columns, max(1, columns // (16 if channel else 32))


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    rate: Tensor,
    bias: Tensor | None,
    step: Step,
    window: Window,
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
    """Run the kernels on the tensors of any of the layers; the rule is the delta rule where b is given."""
    assert step.checkpoint_slot is not None
    check_dense(checkpoint=step.checkpoint, ring_u=step.ring_u, ring_k=step.ring_k, ring_g=step.ring_g)
    vectors = {"write_pos": step.write_pos, "checkpoint_slot": step.checkpoint_slot, "slots": step.slots}
    check_dense(**{name: tensor[None] for name, tensor in vectors.items()})
    batch, tokens, num_v_heads, head_v_dim = v.shape
    num_k_heads, head_k_dim = k.shape[2:]
    channel = a.dim() == 4
    q, k, v, z, a = (  # type: ignore[assignment]
        t if t is None or t.stride(-1) == 1 or (t is a and not channel) else t.contiguous() for t in (q, k, v, z, a)
    )
    rate, bias = (None if t is None else t.contiguous() for t in (rate, bias))  # type: ignore[assignment]
    num_tokens = window.num_tokens.contiguous()
    parents = window.parents if window.parents is None or window.parents.stride(1) == 1 else window.parents.contiguous()
    y = torch.empty((batch, tokens, num_v_heads, head_v_dim), dtype=v.dtype, device=v.device)
    if not batch:
        return y
    block_v, block_k, num_warps = window_tile(head_v_dim, head_k_dim, channel)
    b_or_a = a if b is None else b
    z_or_v = v if z is None else z
    bound = 0.0 if lower_bound is None else lower_bound
    flags: dict[str, Any] = {
        "GROUP": num_v_heads // num_k_heads,
        "HEAD_K_DIM": head_k_dim,
        "RING_ROWS": step.ring_u.shape[2],
        "CHANNEL_GATE": channel,
        "DELTA_RULE": b is not None,
        "BOUNDED": lower_bound is not None,
        "SOFTPLUS": softplus,
        "HAS_BIAS": bias is not None,
        "BLOCK_T": BLOCK_T,
        "BLOCK_K": block_k,
    }
    _verify_kernel[(batch, num_v_heads, triton.cdiv(head_v_dim, block_v))](
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
        scale,
        beta_scale,
        bound,
        *dt_limit,
        tokens,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *a.stride()[:3],
        *b_or_a.stride()[:3],
        *z_or_v.stride()[:3],
        *(0 if D is None else D.stride(0), 0 if D is None or D.dim() == 1 else D.stride(1)),
        0 if parents is None else parents.stride(0),
        *(t.stride(0) for t in (step.checkpoint, step.ring_u, step.ring_k, step.ring_g)),
        NUM_V_HEADS=num_v_heads,
        HEAD_V_DIM=head_v_dim,
        L2_NORM=l2_norm,
        HAS_D=D is not None,
        HAS_Z=z is not None,
        TREE=parents is not None,
        CLAMPED=step.ring_u.dtype == torch.float16,
        EPS=NORM_EPS,
        BLOCK_V=block_v,
        num_warps=num_warps,
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
        bound,
        *dt_limit,
        *k.stride()[:3],
        *a.stride()[:3],
        step.ring_k.stride(0),
        step.ring_g.stride(0),
        num_warps=4,
        **flags,
    )
    return y


def gdn_verify(
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
    window: Window,
) -> Tensor:
    """Gated DeltaNet, a window; see :func:`replayssm.ops.gdn_verify`."""
    numbers: dict[str, Any] = {"scale": scale, "beta_scale": beta_scale, "l2_norm": qk_l2norm}
    return _launch(q, k, v, a, b, A_log, dt_bias, step, window, **numbers)


def kda_verify(
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
    window: Window,
) -> Tensor:
    """Kimi Delta Attention, a window; see :func:`replayssm.ops.kda_verify`."""
    numbers: dict[str, Any] = {"scale": scale, "beta_scale": beta_scale, "l2_norm": qk_l2norm}
    return _launch(q, k, v, a, b, A_log, dt_bias, step, window, lower_bound=lower_bound, **numbers)


def mamba2_verify(
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
    window: Window,
) -> Tensor:
    """Mamba-2, a window; see :func:`replayssm.ops.mamba2_verify`."""
    limit = (dt_min, dt_max)
    return _launch(C, B, x, dt, None, A, dt_bias, step, window, D=D, z=z, softplus=dt_softplus, dt_limit=limit)
