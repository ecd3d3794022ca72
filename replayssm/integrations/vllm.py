"""vLLM's call contract for Mamba-2 decode with a ring."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.integrations.contract import INDEX_DTYPES, check_rows_on_host
from replayssm.ops.checks import check_rank, check_tensor
from replayssm.ops.rows import mamba2_decode_rows

NULL_BLOCK_ID = 0
FLAG_DTYPES = (torch.bool, torch.int8, torch.int32)


def selective_state_update_replayssm_output_only(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    x_cache: Tensor | None = None,
    dt_cache: Tensor | None = None,
    B_cache: Tensor | None = None,
    bc_pre: Tensor | None = None,
    write_pos: Tensor | None = None,
    is_flush: Tensor | None = None,
    max_cache_len: int = 16,
    state_batch_indices: Tensor | None = None,
    null_block_id: int = NULL_BLOCK_ID,
    out: Tensor | None = None,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
    *,
    backend: str = "auto",
) -> Tensor:
    """One token for each row, with the signature and the tensors of the function of this name in vLLM 0.33.0.

    Rows where ``is_flush`` is set fold their records and this token into their state; others append a record. The
    caller moves ``write_pos``. A tensor without its heads dimension, as vLLM allows, counts as one head.

    Args:
        state: ``[slots, H, P, N]``, updated in place on a flush; the slot stride is free.
        x: ``[B, H, P]``.
        dt: ``[B, H, P]``, one number per head, expanded (stride 0).
        A: ``[H, P, N]``, one number per head, expanded.
        B, C: ``[B, G, N]``.
        D: ``[H, P]`` or None.
        dt_bias: ``[H, P]``, one number per head, expanded, or None.
        z: ``[B, H, P]`` or None.
        dt_softplus: Δ = softplus(dt + dt_bias).
        x_cache: ``[slots, H, L, P]``.
        dt_cache: float32 ``[slots, H, L]``, the Δ of each record.
        B_cache: ``[slots, G, L, N]``.
        bc_pre: scratch of vLLM's kernel, not used.
        write_pos: int32, at least ``[B]``.
        is_flush: bool, int8 or int32, at least ``[B]``.
        max_cache_len: L.
        state_batch_indices: int32 or int64, at least ``[B]`` or ``[B, 1]``; None: row i uses slot i.
        null_block_id: the index that marks a padding row; its output is left alone.
        out: ``[B, H, P]``, written.
        enable_stochastic_rounding: not supported.
        cache_philox_rounds: not used.
        backend: not in vLLM's signature: one of :data:`replayssm.ops.BACKENDS`, or ``"auto"``.

    Returns:
        ``out``.

    Raises:
        ValueError: a tensor is missing or has a wrong shape, dtype or device, A, dt or dt_bias is not one number per
            head, stochastic rounding is asked for, or on a CPU a slot or cursor is out of range.
    """
    if enable_stochastic_rounding:
        raise ValueError("enable_stochastic_rounding is True: states are rounded to nearest, False is wanted")
    state, x, dt, A = _given("state", state), _given("x", x), _given("dt", dt), _given("A", A)
    B, C, out = _given("B", B), _given("C", C), _given("out", out)
    x_cache, dt_cache, B_cache = _given("x_cache", x_cache), _given("dt_cache", dt_cache), _given("B_cache", B_cache)
    write_pos, is_flush = _given("write_pos", write_pos), _given("is_flush", is_flush)
    has_heads = state.dim() > 3
    state = state.unsqueeze(1) if state.dim() == 3 else state
    A = A.unsqueeze(0) if A.dim() == 2 else A
    x, dt, B, C, out = (t.unsqueeze(1) if t.dim() == 2 else t for t in (x, dt, B, C, out))
    z = z.unsqueeze(1) if z is not None and z.dim() == 2 else z
    D, dt_bias = (t.unsqueeze(0) if t is not None and t.dim() == 1 else t for t in (D, dt_bias))

    check_rank("state", state, "[slots, H, P, N]")
    check_rank("x", x, "[B, H, P]")
    check_rank("B", B, "[B, G, N]")
    device = state.device
    num_slots, heads, head_dim, state_dim = state.shape
    batch, groups = x.shape[0], B.shape[1]
    if groups < 1 or heads % groups:
        raise ValueError(f"state has H = {heads} heads, B has G = {groups} groups: H must be a multiple of G")
    check_tensor("state", state, (num_slots, heads, head_dim, state_dim), "[slots, H, P, N]")
    for name, tensor in (("x", x), ("dt", dt), ("out", out), ("z", z)):
        if tensor is not None:
            check_tensor(name, tensor, (batch, heads, head_dim), "[B, H, P]", device=device)
    for name, tensor in (("B", B), ("C", C)):
        check_tensor(name, tensor, (batch, groups, state_dim), "[B, G, N]", device=device)
    check_tensor("A", A, (heads, head_dim, state_dim), "[H, P, N]", device=device)
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            check_tensor(name, tensor, (heads, head_dim), "[H, P]", device=device)
    if max_cache_len < 1:
        raise ValueError(f"max_cache_len is {max_cache_len}: a number of at least 1 is wanted")
    check_tensor("x_cache", x_cache, (num_slots, heads, max_cache_len, head_dim), "[slots, H, L, P]", device=device)
    check_tensor("dt_cache", dt_cache, (num_slots, heads, max_cache_len), "[slots, H, L]", (torch.float32,), device)
    check_tensor("B_cache", B_cache, (num_slots, groups, max_cache_len, state_dim), "[slots, G, L, N]", device=device)
    write_pos = _rows("write_pos", write_pos, batch, (torch.int32,), device)
    is_flush = _rows("is_flush", is_flush, batch, FLAG_DTYPES, device)
    if state_batch_indices is None:
        slots = torch.arange(batch, dtype=torch.int32, device=device)
    else:
        index = state_batch_indices[:, 0] if state_batch_indices.dim() == 2 else state_batch_indices
        index = _rows("state_batch_indices", index, batch, INDEX_DTYPES, device)
        slots = torch.where(index == null_block_id, -1, index)
    check_rows_on_host("state_batch_indices", slots, num_slots, write_pos, max_cache_len)

    mamba2_decode_rows(
        x,
        _one_per_head("dt", dt, 1),
        B,
        C,
        A=_one_per_head("A", A, 2),
        D=D,
        z=z,
        dt_bias=None if dt_bias is None else _one_per_head("dt_bias", dt_bias, 1),
        dt_softplus=dt_softplus,
        checkpoint=state,
        ring_x=x_cache,
        ring_B=B_cache,
        ring_dt=dt_cache,
        write_pos=write_pos,
        slots=slots,
        flush=is_flush,
        out=out,
        backend=backend,
    )
    return out if has_heads else out.squeeze(1)


def _given(name: str, tensor: Tensor | None) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}: a tensor is wanted")
    return tensor


def _rows(name: str, tensor: Tensor, batch: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> Tensor:
    """The first ``batch`` entries of a tensor that may be longer, as buffers of CUDA graphs are."""
    check_rank(name, tensor, "[B]")
    tensor = tensor[:batch]
    check_tensor(name, tensor, (batch,), "[B]", dtypes, device)
    return tensor.contiguous()


def _one_per_head(name: str, tensor: Tensor, expanded: int) -> Tensor:
    """The values behind dimensions that were expanded from one number per head."""
    for dim in range(-expanded, 0):
        if tensor.stride(dim) != 0 and tensor.shape[dim] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: one number per head, expanded, is wanted")
        tensor = tensor.narrow(dim, 0, 1)
    return tensor.squeeze(-1) if expanded == 1 else tensor.squeeze(-1).squeeze(-1)
