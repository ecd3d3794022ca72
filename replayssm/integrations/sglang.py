"""SGLang's call contract for decode with a ring: Gated DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.integrations.contract import INDEX_DTYPES, check_rows_on_host
from replayssm.ops.checks import check_rank, check_tensor
from replayssm.ops.rows import delta_decode_rows


def fused_recurrent_linear_replayssm_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    d_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    write_pos: Tensor,
    force_flush: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
    block_v: int | None = None,
    num_warps: int = 1,
    num_stages: int = 3,
    nk: int = 2,
    lower_bound: float | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token for each row, with the signature and the tensors of the function of this name in SGLang 0.5.23.

    A row flushes at ``write_pos = L − 1`` or where ``force_flush`` is not 0: its records and this token are folded
    into its state. Other rows append a record. The caller moves ``write_pos``.

    Args:
        mixed_qkv: ``[B, 2·H·K + HV·V]``: q, k and v of a token side by side, the last dimension contiguous.
        a: ``[B, HV]``, for KDA ``[B, HV, K]``.
        b: ``[B, HV]``; β = sigmoid(b) is kept in float32.
        A_log: ``[HV]``.
        dt_bias: ``[HV]``, for KDA ``[HV, K]``.
        scale: factor of q.
        initial_state: ``[slots, HV, V, K]``, updated in place on a flush; the slot stride is free.
        d_cache: ``[slots, HV, L, V]``, update vectors.
        k_cache: ``[slots, H, L, K]``, keys, normalised if the call normalises.
        g_cache: float32 ``[slots, HV, L]``, for KDA ``[slots, HV, L, K]``, log decays.
        out: ``[B, 1, HV, V]``, written; zero in padding rows.
        ssm_state_indices: int32 or int64 ``[B]``, negative for a padding row.
        write_pos: int32 ``[B]``, committed records of each row.
        force_flush: int32 ``[B]`` or None.
        use_qk_l2norm_in_kernel: divide q and k by their L2 norms.
        is_kda: one decay per key channel.
        block_v, num_warps, num_stages, nk: launch settings of SGLang's kernel, not used.
        lower_bound: KDA's bounded gate; not in SGLang's signature. None for the softplus gate.
        backend: not in SGLang's signature: one of :data:`replayssm.ops.BACKENDS`, or ``"auto"``.

    Returns:
        ``out`` and ``initial_state``.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or on a CPU a slot or cursor is out of range.
    """
    check_rank("mixed_qkv", mixed_qkv, "[B, 2*H*K + HV*V]")
    check_rank("initial_state", initial_state, "[slots, HV, V, K]")
    check_rank("k_cache", k_cache, "[slots, H, L, K]")
    batch, width = mixed_qkv.shape
    slots, h_v, d_v, d_k = initial_state.shape
    h_k, ring_len = k_cache.shape[1:3]
    device = initial_state.device
    if h_k < 1 or ring_len < 1 or h_v % h_k:
        raise ValueError(
            f"initial_state has HV = {h_v} heads, k_cache H = {h_k} and L = {ring_len}: HV a multiple of H, "
            "and L of at least 1, are wanted"
        )
    check_tensor("mixed_qkv", mixed_qkv, (batch, 2 * h_k * d_k + h_v * d_v), "[B, 2*H*K + HV*V]", device=device)
    if mixed_qkv.stride(-1) != 1:
        raise ValueError(f"mixed_qkv has strides {mixed_qkv.stride()}: a contiguous last dimension is wanted")
    channel, dims = ((d_k,), ", K]") if is_kda else ((), "]")
    check_tensor("a", a, (batch, h_v, *channel), "[B, HV" + dims, device=device)
    check_tensor("b", b, (batch, h_v), "[B, HV]", device=device)
    check_tensor("A_log", A_log, (h_v,), "[HV]", device=device)
    check_tensor("dt_bias", dt_bias, (h_v, *channel), "[HV" + dims, device=device)
    check_tensor("initial_state", initial_state, (slots, h_v, d_v, d_k), "[slots, HV, V, K]")
    check_tensor("d_cache", d_cache, (slots, h_v, ring_len, d_v), "[slots, HV, L, V]", device=device)
    check_tensor("k_cache", k_cache, (slots, h_k, ring_len, d_k), "[slots, H, L, K]", device=device)
    g_shape = (slots, h_v, ring_len, *channel)
    check_tensor("g_cache", g_cache, g_shape, "[slots, HV, L" + dims, (torch.float32,), device)
    check_tensor("out", out, (batch, 1, h_v, d_v), "[B, 1, HV, V]", device=device)
    check_tensor("ssm_state_indices", ssm_state_indices, (batch,), "[B]", INDEX_DTYPES, device)
    check_tensor("write_pos", write_pos, (batch,), "[B]", (torch.int32,), device)
    if force_flush is not None:
        check_tensor("force_flush", force_flush, (batch,), "[B]", (torch.int32, torch.bool), device)
        force_flush = force_flush.contiguous()
    if lower_bound is not None and not is_kda:
        raise ValueError(f"lower_bound is {lower_bound}, is_kda is False: only KDA has a bounded gate")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound is {lower_bound}: a negative number or None is wanted")
    check_rows_on_host("ssm_state_indices", ssm_state_indices, slots, write_pos, ring_len)

    q, k, v = mixed_qkv.split([h_k * d_k, h_k * d_k, h_v * d_v], dim=1)
    delta_decode_rows(
        q.unflatten(1, (h_k, d_k)),
        k.unflatten(1, (h_k, d_k)),
        v.unflatten(1, (h_v, d_v)),
        a,
        b,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel,
        checkpoint=initial_state,
        ring_u=d_cache,
        ring_k=k_cache,
        ring_g=g_cache,
        write_pos=write_pos.contiguous(),
        slots=ssm_state_indices.contiguous(),
        force_flush=force_flush,
        out=out.squeeze(1),
        backend=backend,
    )
    return out, initial_state


#: The older name of the same function.
fused_recurrent_gdn_replayssm_decode = fused_recurrent_linear_replayssm_decode
