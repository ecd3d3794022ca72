"""One verify window by replay, for both gates and both rules, as Triton kernels.

A program of the first kernel holds ``BLOCK_V`` rows of one value head's state. It goes once over the key channels,
``BLOCK_K`` at a time, and multiplies the window's q and k with the window's keys, the ring's keys and the checkpoint
(equation in :mod:`replayssm.backends.torch.verify`, same letters); where the ring is full it folds the committed
records into the piece of the checkpoint that it holds. Then it solves for the updates, token after token.

The update vectors' rows of the ring belong to the program; keys and decays don't: other tiles, and other value heads
of the same key head, may still read the rows that a fold sets free. So a second kernel stores those, behind the first
one in the stream.

Products run on the matrix units: a float32 is the sum of two tf32 numbers, the product of the two small ones is left
out. Whole rows of 128 channels at once would take all registers and spill.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.step import Step, Window
from replayssm.backends.triton import decode
from replayssm.backends.triton.decode import check_dense, fuses
from replayssm.backends.triton.gates import gate, sigmoid
from replayssm.recurrence import NORM_EPS

BLOCK_T = 16  # tokens of a window, and records that are read together


@triton.jit
def _high(x):
    """What tf32 holds of a float32, rounded: the rest fits into a second tf32."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, total, A_EXACT: tl.constexpr, B_EXACT: tl.constexpr, TF32: tl.constexpr):
    """``total + a b`` to float32's precision. EXACT: it came from 16 bits, so tf32 holds it, and a term is saved."""
    if TF32:  # added outside the matrix units, which cut what they add to a total instead of rounding it
        a_high = a if A_EXACT else _high(a)
        b_high = b if B_EXACT else _high(b)
        product = tl.dot(a_high, b_high, input_precision="tf32")
        if not A_EXACT:
            product += tl.dot(a - a_high, b_high, input_precision="tf32")
        if not B_EXACT:
            product += tl.dot(a_high, b - b_high, input_precision="tf32")
        return total + product
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _parent(node, parents_at, TREE: tl.constexpr):
    """The token that each of these follows, −1 for the committed state; below the token itself, so that walks end."""
    before = node - 1
    if TREE:
        before = tl.minimum(before, tl.load(parents_at + node, mask=node >= 0, other=-1))
    return tl.maximum(before, -1)


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
    EPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    # Widths known at compile time: what came from 16 bits is exact in tf32, and its products need a term less.
    X_EXACT: tl.constexpr = (k_ptr.dtype.element_ty.primitive_bitwidth == 16) and not CHANNEL_GATE  # else decayed
    S_EXACT: tl.constexpr = checkpoint_ptr.dtype.element_ty.primitive_bitwidth == 16
    U_EXACT: tl.constexpr = (ring_u_ptr.dtype.element_ty.primitive_bitwidth == 16) and CHANNEL_GATE

    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    k_head_index = head // GROUP
    dim_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, BLOCK_T)
    wide = token.to(tl.int64)[:, None]
    is_v = dim_v < HEAD_V_DIM
    y_at = y_ptr + ((row * tokens + token)[:, None] * NUM_V_HEADS + head) * HEAD_V_DIM + dim_v[None, :]
    is_y = (token < tokens)[:, None] & is_v[None, :]

    slot = tl.load(slots_ptr + row).to(tl.int64)
    count = tl.load(num_tokens_ptr + row)
    if (slot < 0) | (count <= 0):
        tl.store(y_at, tl.zeros([BLOCK_T, BLOCK_V], tl.float32).to(y_ptr.dtype.element_ty), mask=is_y)
        return
    cursor = tl.load(write_pos_ptr + slot)
    source = tl.load(checkpoint_slot_ptr + slot).to(tl.int64)
    folds = cursor + count > RING_ROWS

    state_at = checkpoint_ptr + source * checkpoint_stride + (head * HEAD_V_DIM + dim_v)[None, :] * HEAD_K_DIM
    to_own = (slot - source) * checkpoint_stride  # from there to the slot's own checkpoint
    ring_k_at = ring_k_ptr + slot * ring_k_stride + k_head_index * RING_ROWS * HEAD_K_DIM
    ring_u_at = ring_u_ptr + slot * ring_u_stride + head * RING_ROWS * HEAD_V_DIM
    used = token < count  # the other tokens are zeros in all that follows
    q_at = q_ptr + row * q_row + k_head_index * q_head
    k_at = k_ptr + row * k_row + k_head_index * k_head
    a_at = a_ptr + row * a_row + head * a_head
    rate = tl.load(rate_ptr + head).to(tl.float32)
    parents_at = parents_ptr + row * parents_row
    record = tl.arange(0, BLOCK_R)
    is_record = record < cursor
    follows = record + 1 < cursor
    records_at = ring_u_at + record[:, None] * HEAD_V_DIM + dim_v[None, :]
    is_update = is_record[:, None] & is_v[None, :]

    if not CHANNEL_GATE:
        # Decays of the records, summed from the newest back; then all tokens walk back along their paths together,
        # with γ_ij of each token j that they meet, and γ_i in the end.
        ring_g_at = ring_g_ptr + slot * ring_g_stride + head * RING_ROWS
        next_g = tl.load(ring_g_at + record + 1, mask=follows, other=0.0)
        after = tl.exp(tl.cumsum(next_g, axis=0, reverse=True))
        total = tl.exp(tl.sum(next_g, axis=0) + tl.load(ring_g_at, mask=cursor > 0, other=0.0))
        a = tl.load(a_at + token.to(tl.int64) * a_token, mask=used, other=0.0).to(tl.float32)
        if HAS_BIAS:
            a += tl.load(bias_ptr + head).to(tl.float32)
        g, delta = gate(a, rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
        behind = tl.zeros([BLOCK_T], tl.float32)
        between = tl.full([BLOCK_T, BLOCK_T], float("-inf"), tl.float32)
        node = tl.where(used, token, -1)
        for _ in range(count):
            met = node[:, None] == token[None, :]
            between = tl.where(met, behind[:, None], between)
            behind += tl.sum(tl.where(met, g[None, :], 0.0), axis=1)
            node = _parent(node, parents_at, TREE)
        between = tl.exp(between)
        decay = tl.exp(behind)

    # One pass over the key channels: products of q and k with the window's keys, the ring's, and the checkpoint.
    weight_q = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)  # [i, j]: e^γ_ij (k_j·q_i), 0 where j isn't on the path to i
    weight_k = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    score_q = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    score_k = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    sq = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    sk = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    squares_q = tl.zeros([BLOCK_T], tl.float32)
    squares_k = tl.zeros([BLOCK_T], tl.float32)
    for first in range(0, HEAD_K_DIM, BLOCK_K):
        dim_k = first + tl.arange(0, BLOCK_K)
        is_k = dim_k < HEAD_K_DIM
        is_tile = is_k[:, None] & is_v[None, :]
        state = tl.load(state_at + dim_k[:, None], mask=is_tile, other=0.0).to(tl.float32)
        is_key = is_record[:, None] & is_k[None, :]
        keys = tl.load(ring_k_at + record[:, None] * HEAD_K_DIM + dim_k[None, :], mask=is_key, other=0.0).to(tl.float32)
        is_x = used[:, None] & is_k[None, :]
        q = tl.load(q_at + wide * q_token + dim_k[None, :], mask=is_x, other=0.0).to(tl.float32)
        k = tl.load(k_at + wide * k_token + dim_k[None, :], mask=is_x, other=0.0).to(tl.float32)
        if L2_NORM:
            squares_q += tl.sum(q * q, axis=1)
            squares_k += tl.sum(k * k, axis=1)
        if CHANNEL_GATE:
            bias = tl.load(bias_ptr + head * HEAD_K_DIM + dim_k, mask=is_k, other=0.0).to(tl.float32)
            node = tl.where(used, token, -1)
            behind = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
            for _ in range(count):  # as above, per channel
                at = tl.maximum(node, 0).to(tl.int64)[:, None]
                is_node = (node >= 0)[:, None] & is_k[None, :]
                key = tl.load(k_at + at * k_token + dim_k[None, :], mask=is_node, other=0.0).to(tl.float32)
                key *= tl.exp(behind)
                a = tl.load(a_at + at * a_token + dim_k[None, :], mask=is_node, other=0.0).to(tl.float32)
                g, _delta = gate(a + bias[None, :], rate, lower_bound, dt_min, dt_max, DELTA_RULE, BOUNDED, SOFTPLUS)
                behind += tl.where(is_node, g, 0.0)
                met = node[:, None] == token[None, :]
                weight_q += tl.where(met, tl.sum(key * q, axis=1)[:, None], 0.0)
                if DELTA_RULE:
                    weight_k += tl.where(met, tl.sum(key * k, axis=1)[:, None], 0.0)
                node = _parent(node, parents_at, TREE)
            ring_g_at = ring_g_ptr + slot * ring_g_stride + head * RING_ROWS * HEAD_K_DIM + dim_k
            next_g = tl.load(
                ring_g_at[None, :] + (record + 1)[:, None] * HEAD_K_DIM,
                mask=follows[:, None] & is_k[None, :],
                other=0.0,
            )
            first_g = tl.load(ring_g_at, mask=dim_k < tl.where(cursor > 0, HEAD_K_DIM, 0), other=0.0)
            keys *= tl.exp(tl.cumsum(next_g, axis=0, reverse=True))
            total_k = tl.exp(tl.sum(next_g, axis=0) + first_g)
            decay_k = tl.exp(behind)
            q *= decay_k
            k *= decay_k
            score_q = _product(q, tl.trans(keys), score_q, False, False, TF32)
            score_k = _product(k, tl.trans(keys), score_k, False, False, TF32)
            sq = _product(q * total_k[None, :], state, sq, False, S_EXACT, TF32)
            sk = _product(k * total_k[None, :], state, sk, False, S_EXACT, TF32)
        else:
            weight_q = _product(q, tl.trans(k), weight_q, X_EXACT, X_EXACT, TF32)
            score_q = _product(q, tl.trans(keys), score_q, X_EXACT, X_EXACT, TF32)
            sq = _product(q, state, sq, X_EXACT, S_EXACT, TF32)
            if DELTA_RULE:
                weight_k = _product(k, tl.trans(k), weight_k, X_EXACT, X_EXACT, TF32)
                score_k = _product(k, tl.trans(keys), score_k, X_EXACT, X_EXACT, TF32)
                sk = _product(k, state, sk, X_EXACT, S_EXACT, TF32)
        if folds:  # the committed records, into the tile at hand
            updates = tl.load(records_at, mask=is_update, other=0.0).to(tl.float32)
            if CHANNEL_GATE:
                state *= total_k[:, None]
            else:
                state *= total
                updates *= after[:, None]
            state = _product(tl.trans(keys), updates, state, X_EXACT, U_EXACT, TF32)
            tl.store(state_at + to_own + dim_k[:, None], state.to(checkpoint_ptr.dtype.element_ty), mask=is_tile)

    records = tl.load(records_at, mask=is_update, other=0.0).to(tl.float32)
    if CHANNEL_GATE:
        sq = _product(score_q, records, sq, False, U_EXACT, TF32)
        sk = _product(score_k, records, sk, False, U_EXACT, TF32)
    else:
        records *= after[:, None]
        sq = _product(score_q, records, sq * total, False, False, TF32) * decay[:, None]
        weight_q = tl.where(between > 0.0, weight_q * between, 0.0)
        if DELTA_RULE:
            sk = _product(score_k, records, sk * total, False, False, TF32) * decay[:, None]
            weight_k = tl.where(between > 0.0, weight_k * between, 0.0)

    # Updates, as the ring keeps them (with the keys' norms), and outputs, token after token. A weight of 0 takes
    # nothing: what isn't on the path may have overflowed.
    is_u = used[:, None] & is_v[None, :]
    v_at = v_ptr + row * v_row + head * v_head + dim_v[None, :]
    v = tl.load(v_at + wide * v_token, mask=is_u, other=0.0).to(tl.float32)
    if DELTA_RULE:
        b_at = b_ptr + row * b_row + head * b_head + token.to(tl.int64) * b_token
        beta = beta_scale * sigmoid(tl.load(b_at, mask=used, other=0.0).to(tl.float32))
        if L2_NORM:
            k_norm = 1.0 / tl.sqrt_rn(squares_k + EPS)
            updates = (beta * k_norm)[:, None] * (v - k_norm[:, None] * sk)
            weight_k *= (beta * k_norm * k_norm)[:, None]
        else:
            updates = beta[:, None] * (v - sk)
            weight_k *= beta[:, None]
    else:
        updates = delta[:, None] * v
    for i in range(count):
        is_i = (token == i)[:, None]
        if DELTA_RULE:
            w = tl.sum(tl.where(is_i & (token < i)[None, :], weight_k, 0.0), axis=0)[:, None]
            taken = tl.sum(tl.where(w != 0.0, w * updates, 0.0), axis=0)
            updates = tl.where(is_i, updates - taken[None, :], updates)
        w = tl.sum(tl.where(is_i, weight_q, 0.0), axis=0)[:, None]
        added = tl.sum(tl.where(w != 0.0, w * updates, 0.0), axis=0)
        sq = tl.where(is_i, sq + added[None, :], sq)
    y = sq
    if DELTA_RULE:
        y *= scale
    if L2_NORM:
        y *= (1.0 / tl.sqrt_rn(squares_q + EPS))[:, None]
    if HAS_D:
        y += tl.load(d_ptr + head * d_head + dim_v * d_dim, mask=is_v, other=0.0).to(tl.float32)[None, :] * v
    if HAS_Z:
        z_at = z_ptr + row * z_row + head * z_head + dim_v[None, :] + wide * z_token
        z = tl.load(z_at, mask=is_u, other=0.0).to(tl.float32)
        y *= z * sigmoid(z)
    tl.store(y_at, tl.where(is_u, y, 0.0).to(y_ptr.dtype.element_ty), mask=is_y)

    if CLAMPED:
        updates = tl.clamp(updates, -65504.0, 65504.0)  # infinity in a record would stay for good
    start = cursor
    if folds:
        start = 0
        tl.debug_barrier()  # the records were read from the rows that the window's go to
    u_at = ring_u_at + (start + token)[:, None] * HEAD_V_DIM + dim_v[None, :]
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


def window_tile(head_v_dim: int, delta: bool) -> tuple[int, int, int]:
    """Rows of the state in one program, the columns that it takes at a time, and its warps.

    Of nine choices measured on an H200, the fastest that spills on no GPU.
    """
    rows, columns, warps = (64, 16, 4) if delta else (32, 32, 2)
    return max(16, min(triton.next_power_of_2(head_v_dim), rows)), columns, warps


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
    if not batch or not tokens:
        return v.new_empty(v.shape)
    block_v, block_k, num_warps = window_tile(head_v_dim, b is not None)
    contract = fuses(head_v_dim, head_k_dim)
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
    }
    if tokens == 1:  # a decode step but for what a full ring does
        y = decode.launch(
            q[:, 0],
            k[:, 0],
            v[:, 0],
            a[:, 0],
            None if b is None else b[:, 0],
            rate,
            bias,
            step,
            D=D,
            z=None if z is None else z[:, 0],
            scale=scale,
            beta_scale=beta_scale,
            lower_bound=lower_bound,
            l2_norm=l2_norm,
            softplus=softplus,
            dt_limit=dt_limit,
            num_tokens=num_tokens,
        ).unsqueeze(1)
    else:
        y = torch.empty((batch, tokens, num_v_heads, head_v_dim), dtype=v.dtype, device=v.device)
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
            TF32=torch.version.hip is None,
            EPS=NORM_EPS,
            BLOCK_V=block_v,
            BLOCK_K=block_k,
            BLOCK_R=max(16, triton.next_power_of_2(step.ring_u.shape[2])),
            num_warps=num_warps,
            enable_fp_fusion=contract,
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
        BLOCK_K=triton.next_power_of_2(head_k_dim),
        num_warps=4,
        enable_fp_fusion=contract,
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
