"""Chunk-parallel training forms of the three recurrences, put in place of transformers' functions of the same meaning.

transformers' own torch forms are made for prefill: they solve triangular systems and walk over chunks in a Python loop,
which is slow to train through. Here a chunk's unit-lower system is inverted by one small Triton kernel, and the states
between chunks come from one scan kernel, whose backward pass is the same scan run from the end. Both fall back to plain
torch where there is no GPU, which is how `--check` compares them with transformers' functions.

Every function is differentiable and computes in fp32 (matrix products may use tf32).
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU, no kernels: the torch forms below serve
    triton = None

CHUNK = 64
BLOCK = 16  # rows of the sub-blocks in which per-channel decays are multiplied out exactly

if triton is not None:

    @triton.jit
    def _unit_lower_inverse_kernel(lower_t, out, C: tl.constexpr):
        """One program inverts I + N by forward substitution; it reads N transposed."""
        base = tl.program_id(0).to(tl.int64) * C * C
        rows = tl.arange(0, C)[:, None]
        columns = tl.arange(0, C)[None, :]
        n_t = tl.load(lower_t + base + rows * C + columns)
        x = tl.where(rows == columns, 1.0, 0.0)
        for i in range(1, C):
            weights = tl.sum(tl.where(columns == i, n_t, 0.0), 1)  # N[i, :]
            update = tl.sum(weights[:, None] * x, 0)
            x = tl.where(rows == i, x - update[None, :], x)
        tl.store(out + base + rows * C + columns, x)

    @triton.jit
    def _chunk_scan_kernel(
        a, b, out, count, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, REVERSE: tl.constexpr
    ):
        """S ← A_c S + B_c over `count` chunks, storing S before each; reversed, with A_c transposed."""
        rows = tl.arange(0, DK)
        columns = tl.program_id(1) * BV + tl.arange(0, BV)
        state = tl.zeros([DK, BV], dtype=tl.float32)
        for i in range(count):
            chunk = count - 1 - i if REVERSE else i
            base = tl.program_id(0).to(tl.int64) * count + chunk
            tile = base * DK * DV + rows[:, None] * DV + columns[None, :]
            tl.store(out + tile, state)
            if REVERSE:
                matrix = tl.load(a + base * DK * DK + rows[None, :] * DK + rows[:, None])
            else:
                matrix = tl.load(a + base * DK * DK + rows[:, None] * DK + rows[None, :])
            state = tl.dot(matrix, state, input_precision="tf32x3") + tl.load(b + tile)


@torch.library.custom_op("replayssm_training::unit_lower_inverse", mutates_args=())
def unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + N)⁻¹ for strictly lower N [M, C, C], fp32."""
    if not lower.is_cuda:
        eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        inverse = torch.linalg.solve_triangular(lower + eye, eye.expand_as(lower), upper=False, unitriangular=True)
        return inverse.contiguous()
    transposed = lower.transpose(-1, -2).contiguous()
    out = torch.empty_like(transposed)
    _unit_lower_inverse_kernel[(lower.shape[0],)](transposed, out, C=lower.shape[-1], num_warps=4)
    return out


@unit_lower_inverse.register_fake
def _(lower: Tensor) -> Tensor:
    return torch.empty_like(lower, memory_format=torch.contiguous_format)


def _inverse_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_backward(ctx: Any, grad: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    transposed = inverse.transpose(-1, -2)
    return -(transposed @ grad @ transposed).tril(-1)


unit_lower_inverse.register_autograd(_inverse_backward, setup_context=_inverse_context)


@torch.library.custom_op("replayssm_training::chunk_scan", mutates_args=())
def chunk_scan(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    """States before each chunk, S_0 = 0 and S_{c+1} = A_c S_c + B_c.

    a [M, n, dk, dk], b [M, n, dk, dv] → [M, n, dk, dv]. `reverse` runs from the last chunk to the first with A_cᵀ.
    """
    batch, count, dk, dv = b.shape
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(b)
    if b.is_cuda:
        tile = min(dv, 32)
        _chunk_scan_kernel[(batch, dv // tile)](a, b, out, count, DK=dk, DV=dv, BV=tile, REVERSE=reverse, num_warps=4)
        return out
    state = torch.zeros_like(b[:, 0])
    for chunk in reversed(range(count)) if reverse else range(count):
        out[:, chunk] = state
        state = (a[:, chunk].transpose(-1, -2) if reverse else a[:, chunk]) @ state + b[:, chunk]
    return out


@chunk_scan.register_fake
def _(a: Tensor, b: Tensor, reverse: bool) -> Tensor:
    return torch.empty_like(b, memory_format=torch.contiguous_format)


def _scan_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _scan_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    a, states = ctx.saved_tensors
    after = chunk_scan(a, grad, True)  # gradient of the state after each chunk
    return after @ states.transpose(-1, -2), after, None


chunk_scan.register_autograd(_scan_backward, setup_context=_scan_context)


def _chunks(x: Tensor) -> Tensor:
    """[B, T, H, …] → fp32 [B, H, n, C, …], zero-padded at the end of T."""
    x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % CHUNK))
    return x.transpose(1, 2).unflatten(2, (-1, CHUNK))


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    read: Tensor,
    kept: Tensor,
    total: Tensor,
    key_key: Tensor,
    query_key: Tensor,
    length: int,
) -> Tensor:
    """The delta rule over chunks, from its decayed products.

    read = exp(G), kept = exp(G_last − G), total = exp(G_last), each broadcastable to the keys [B, H, n, C, dk];
    key_key, query_key [B, H, n, C, C] hold the decayed products k_i·k_j and q_i·k_j for j ≤ i.
    """
    inverse = unit_lower_inverse((beta * key_key.tril(-1)).flatten(0, 2)).view_as(key_key)
    updates = inverse @ (beta * value)
    erased = inverse @ (beta * key * read)
    key_t = (key * kept).transpose(-1, -2)
    transition = torch.diag_embed(total.expand(*total.shape[:-2], 1, key.shape[-1]).squeeze(-2)) - key_t @ erased
    states = chunk_scan(transition.flatten(0, 1), (key_t @ updates).flatten(0, 1), False).unflatten(0, key.shape[:2])
    out = (query * read) @ states + query_key @ (updates - erased @ states)
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """GDN. query, key [B, T, H, dk], value [B, T, H, dv], g, beta [B, T, H] → ([B, T, H, dv], None)."""
    length, dtype, group = query.shape[1], query.dtype, value.shape[2] // query.shape[2]
    if group > 1:  # newer transformers leave the repetition of key heads to this function
        query, key = query.repeat_interleave(group, dim=2), key.repeat_interleave(group, dim=2)
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, g, beta = (_chunks(x) for x in (query, key, value, g.unsqueeze(-1), beta.unsqueeze(-1)))
        if use_qk_l2norm_in_kernel:
            query, key = _normalise(query), _normalise(key)
        query = query * query.shape[-1] ** -0.5
        gate = g.cumsum(-2)  # [B, H, n, C, 1]
        causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).tril()
        decay = (gate - gate.transpose(-1, -2)).masked_fill(~causal, float("-inf")).exp()
        key_t = key.transpose(-1, -2)
        last = gate[..., -1:, :]
        out = _delta_rule(
            query,
            key,
            value,
            beta,
            gate.exp(),
            (last - gate).exp(),
            last.exp(),
            (key @ key_t) * decay,
            (query @ key_t) * decay,
            length,
        )
    return out.to(dtype), None


def _channel_products(query: Tensor, key: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_d x_i k_j exp(G_i − G_j) for x = key and x = query, j ≤ i, [B, H, n, C, C] each.

    No exponent is ever positive: within a block of 16 rows the decay is multiplied out per pair; against earlier blocks
    it is split at the last row before the block, exp(G_i − G_r)·exp(G_r − G_j) with j ≤ r < i.
    """
    both = torch.stack((key, query))
    rows = []
    causal = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=key.device).tril()
    for start in range(0, CHUNK, BLOCK):
        block = slice(start, start + BLOCK)
        gate_block = gate[..., block, :]
        pair = (gate_block.unsqueeze(-2) - gate_block.unsqueeze(-3)).masked_fill(~causal.unsqueeze(-1), float("-inf"))
        weighted = pair.exp() * key[..., block, :].unsqueeze(-3)
        parts = [(both[..., block, :].unsqueeze(-2) * weighted).sum(-1)]
        if start:
            split = gate[..., start - 1 : start, :]
            earlier = key[..., :start, :] * (split - gate[..., :start, :]).exp()
            left = both[..., block, :] * (gate_block - split).exp()
            parts.insert(0, left @ earlier.transpose(-1, -2))
        rows.append(F.pad(torch.cat(parts, -1), (0, CHUNK - start - BLOCK)))
    products = torch.cat(rows, -2)
    return products[0], products[1]


def chunk_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """KDA. query, key, g [B, T, H, dk], value [B, T, H, dv], beta [B, T, H] → ([B, T, H, dv], None)."""
    length, dtype = query.shape[1], query.dtype
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, g, beta = (_chunks(x) for x in (query, key, value, g, beta.unsqueeze(-1)))
        if use_qk_l2norm_in_kernel:
            query, key = _normalise(query), _normalise(key)
        query = query * query.shape[-1] ** -0.5
        gate = g.cumsum(-2)  # [B, H, n, C, dk]
        last = gate[..., -1:, :]
        key_key, query_key = _channel_products(query, key, gate)
        out = _delta_rule(
            query, key, value, beta, gate.exp(), (last - gate).exp(), last.exp(), key_key, query_key, length
        )
    return out.to(dtype), None


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,  # transformers' argument; CHUNK serves here
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    **_unused: Any,
) -> Tensor:
    """Mamba-2. hidden_states [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N] → [B, T, H, P]; no step limit."""
    length, dtype = hidden_states.shape[1], hidden_states.dtype
    with torch.autocast(hidden_states.device.type, enabled=False):
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        dt = F.softplus(dt) if dt_softplus else dt
        heads = hidden_states.shape[2] // B.shape[2]
        x = _chunks(hidden_states.float() * dt.unsqueeze(-1)).unflatten(1, (-1, heads))  # [B, G, h, n, C, P]
        gate = _chunks((dt * A.float()).unsqueeze(-1)).unflatten(1, (-1, heads)).cumsum(-2)  # [B, G, h, n, C, 1]
        write, read = _chunks(B).unsqueeze(2), _chunks(C).unsqueeze(2)  # [B, G, 1, n, C, N]
        causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
        decay = (gate - gate.transpose(-1, -2)).masked_fill(~causal, float("-inf")).exp()
        last = gate[..., -1:, :]  # [B, G, h, n, 1, 1]
        added = (x * (last - gate).exp()).transpose(-1, -2) @ write  # [B, G, h, n, P, N]
        total = last.squeeze(-1).squeeze(-1).cumsum(-1)  # [B, G, h, n]
        # S before chunk c is Σ_{j<c} exp(total_{c−1} − total_j) added_j
        count = total.shape[-1]
        before = F.pad(total, (1, -1))
        earlier = torch.ones(count, count, dtype=torch.bool, device=x.device).tril(-1)
        between = (before.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~earlier, float("-inf")).exp()
        states = (between @ added.flatten(-2)).view_as(added)
        out = ((read @ write.transpose(-1, -2)) * decay) @ x + (read @ states.transpose(-1, -2)) * gate.exp()
        out = out.flatten(1, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)
        if D is not None:
            out = out + D.float().unsqueeze(-1) * hidden_states.float()
    return out.to(dtype)


def causal_conv1d_fn(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_unused: Any
) -> Tensor:
    """Depthwise causal convolution by shifted sums: hidden_states [B, C, T], weight [C, W] → [B, C, T]."""
    x = hidden_states.transpose(1, 2)
    width, length = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    out = sum(padded[:, tap : tap + length] * weight[:, tap].to(x.dtype) for tap in range(width))
    if bias is not None:
        out = out + bias.to(x.dtype)
    if activation is not None:
        out = F.silu(out)
    return out.transpose(1, 2)


def causal_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Plain causal attention on contiguous tensors: query [B, H, T, d], key, value [B, Hkv, T, d] → [B, T, H, d]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    query, key, value = query.to(value.dtype).contiguous(), key.to(value.dtype).contiguous(), value.contiguous()
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def install(model: torch.nn.Module) -> None:
    """Put these functions in place of transformers' in the module that defines `model`'s class."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("training_causal", causal_attention)
    model.config._attn_implementation = "training_causal"

    module = sys.modules[type(model).__module__]
    replacements = {
        "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
        "chunk_kimi_delta_attention": chunk_kimi_delta_attention,
        "mamba2_chunk_scan": mamba2_chunk_scan,
        "causal_conv1d_fn": causal_conv1d_fn,
    }
    for name, function in replacements.items():
        if hasattr(module, name):
            setattr(module, name, function)
