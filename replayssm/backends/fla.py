"""Prefill by flash-linear-attention's kernels: on a GPU that it supports, for 16-bit activations.

They multiply in tf32 or less, so float32 activations, from which exact results are wanted, stay with PyTorch.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from replayssm.recurrence import gdn_log_decay, kda_log_decay, sigmoid

LARGEST_HEAD = 256  # d_k that its kernels take


def serves(v: Tensor, k: Tensor) -> bool:
    """Whether it runs a layer with such keys and values here."""
    return v.is_cuda and v.dtype != torch.float32 and k.shape[-1] <= LARGEST_HEAD and _is_installed()


@cache
def _is_installed() -> bool:
    return find_spec("fla") is not None


def gdn_prefill(
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
    initial_state: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """See :func:`replayssm.ops.gdn_prefill`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    g = gdn_log_decay(a.float(), A_log.float(), dt_bias.float())
    return _run(chunk_gated_delta_rule, q, k, v, g, b, beta_scale, scale, qk_l2norm, initial_state, cu_seqlens)


def kda_prefill(
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
    initial_state: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """See :func:`replayssm.ops.kda_prefill`."""
    from fla.ops.kda import chunk_kda

    g = kda_log_decay(a.float(), A_log.float(), dt_bias.float(), lower_bound)
    return _run(chunk_kda, q, k, v, g, b, beta_scale, scale, qk_l2norm, initial_state, cu_seqlens)


def _run(
    kernel: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    beta_scale: float,
    scale: float,
    qk_l2norm: bool,
    initial_state: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    assert callable(kernel)
    q, k, v, g, beta = (x.contiguous().unsqueeze(0) for x in (q, k, v, g, sigmoid(b.float()).mul_(beta_scale)))
    on_host = cu_seqlens.long().cpu()
    y, state = kernel(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=qk_l2norm,
        state_v_first=True,
        cu_seqlens=on_host.to(v.device, non_blocking=True),
        cu_seqlens_cpu=on_host,
    )
    return y.squeeze(0), state
