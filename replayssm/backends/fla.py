"""Prefill by flash-linear-attention's kernels: on a GPU that it supports, for 16-bit activations.

They multiply in tf32 or less, so float32 activations, from which exact results are wanted, stay with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from replayssm.backends.step import Layer, Rules
from replayssm.backends.torch.layers import input_gate, log_decay

LARGEST_HEAD = 256  # d_k that its kernels take


def serves(v: Tensor, k: Tensor) -> bool:
    """Whether it runs a layer of the delta rule with such keys and values here."""
    return v.is_cuda and v.dtype != torch.float32 and k.shape[-1] <= LARGEST_HEAD and _is_installed()


@cache
def _is_installed() -> bool:
    return find_spec("fla") is not None


def prefill(layer: Layer, rules: Rules, initial_state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed sequences of a layer with the delta rule; see :mod:`replayssm.ops.prefill`."""
    kernel = _kernel(channel=layer.channel)
    gates = (log_decay(layer, rules), input_gate(layer, rules))
    q, k, v, g, beta = (x.contiguous().unsqueeze(0) for x in (*layer[:3], *gates))
    on_device, on_host = _cuts(tuple(cu_seqlens.tolist()), v.device)
    y, state = kernel(
        q,
        k,
        v,
        g,
        beta,
        scale=rules.scale,
        initial_state=initial_state.contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=rules.l2_norm,
        state_v_first=True,
        cu_seqlens=on_device,
        cu_seqlens_cpu=on_host,
    )
    return y.squeeze(0), state


@lru_cache(maxsize=8)  # for the layers of one forward the same tensors, by which it knows what it has computed of them
def _cuts(cu_seqlens: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Int64, on the device and on the host."""
    on_host = torch.tensor(cu_seqlens, device="cpu")  # whatever torch's default device is
    return on_host.to(device), on_host


def _kernel(*, channel: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    if channel:
        from fla.ops.kda import chunk_kda as kernel
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as kernel
    found: Callable[..., tuple[Tensor, Tensor]] = kernel
    return found
