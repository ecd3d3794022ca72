"""Prefill operators: whole prompts, or parts of them, packed one behind the other.

Sequence s has the tokens from ``cu_seqlens[s]`` up to ``cu_seqlens[s + 1]``, continues from its own initial state and
gives its final one. No slot, ring or cursor is involved. The layers' recurrences are PyTorch with every backend; with
any but ``"torch"`` they take flash-linear-attention where it is installed and serves the layer, see
:mod:`replayssm.backends.fla`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.backends import fla
from replayssm.backends.torch import prefill as torch_prefill
from replayssm.ops.checks import ACTIVATION_DTYPES, check_activation, check_conv, check_rank, check_tensor
from replayssm.ops.dispatch import backend_module, call, register, resolve_backend
from replayssm.ops.inputs import check_dt_limit, check_kda_gate, limits
from replayssm.ops.layers import GATE, LAYERS, MAMBA2, scale_of

_DELTA = "float beta_scale, float scale, bool qk_l2norm"
_ENDS = "Tensor initial_state, Tensor cu_seqlens, str backend) -> (Tensor, Tensor)"
_SCHEMAS = (
    f"gdn_prefill({GATE}, {_DELTA}, {_ENDS}",
    f"kda_prefill({GATE}, float? lower_bound, {_DELTA}, {_ENDS}",
    f"mamba2_prefill({MAMBA2}, float dt_min, float dt_max, {_ENDS}",
)


def gdn_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    beta_scale: float = 1.0,
    scale: float | None = None,
    qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet, packed sequences; see :func:`replayssm.ops.gdn_decode` for the layer.

    Args:
        q, k: ``[total, H_k, d_k]``, raw, in the activation dtype.
        v: ``[total, H_v, d_v]``, same dtype.
        a, b: ``[total, H_v]``, projections before any activation.
        A_log, dt_bias: ``[H_v]``.
        initial_state: ``[S, H_v, d_v, d_k]`` float32, the states that the sequences continue from.
        cu_seqlens: ``[S + 1]`` int32, from 0 to total, none smaller than the one before. On the CPU, or the call waits
            for the device.
        beta_scale, scale, qk_l2norm: as for :func:`replayssm.ops.gdn_decode`.
        backend: see :mod:`replayssm.ops.prefill`.

    Returns:
        Outputs ``[total, H_v, d_v]`` in the dtype of v, and final states ``[S, H_v, d_v, d_k]`` float32.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or the sequences don't cover the tokens.
    """
    _check_sequences(("q", "k", "v"), q, k, v, initial_state, cu_seqlens)
    _check_heads((("a", a), ("b", b)), (("A_log", A_log), ("dt_bias", dt_bias)), v)
    numbers = (beta_scale, scale_of(q, scale), qk_l2norm)
    ends = (initial_state, cu_seqlens, resolve_backend(backend, v.device))
    return call("gdn_prefill", q, k, v, a, b, A_log, dt_bias, *numbers, *ends)


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    lower_bound: float | None = None,
    beta_scale: float = 1.0,
    scale: float | None = None,
    qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention, packed sequences; see :func:`replayssm.ops.kda_decode` for the layer.

    Args:
        q, k, v, b: as for :func:`gdn_prefill`, with as many key heads as value heads.
        a: ``[total, H, d_k]``, projection before any activation.
        A_log ... lower_bound: as for :func:`replayssm.ops.kda_decode`.
        initial_state ... backend: as for :func:`gdn_prefill`.

    Returns:
        Outputs ``[total, H, d_v]`` in the dtype of v, and final states ``[S, H, d_v, d_k]`` float32.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or the sequences don't cover the tokens.
    """
    _check_sequences(("q", "k", "v"), q, k, v, initial_state, cu_seqlens)
    check_kda_gate(k, v, a, b, A_log, dt_bias, lower_bound, "total")
    numbers = (beta_scale, scale_of(q, scale), qk_l2norm)
    ends = (initial_state, cu_seqlens, resolve_backend(backend, v.device))
    return call("kda_prefill", q, k, v, a, b, A_log, dt_bias.view(k.shape[1:]), lower_bound, *numbers, *ends)


def mamba2_prefill(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    A: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Mamba-2, packed sequences; see :func:`replayssm.ops.mamba2_decode` for the layer.

    Args:
        x: ``[total, H, P]``, in the activation dtype.
        dt: ``[total, H]``, projection before bias and softplus.
        B, C: ``[total, G, N]``, same dtype as x.
        z: ``[total, H, P]`` or None; gate.
        A, D, dt_bias, dt_softplus, dt_limit: as for :func:`replayssm.ops.mamba2_decode`.
        initial_state ... backend: as for :func:`gdn_prefill`.

    Returns:
        Outputs ``[total, H, P]`` in the dtype of x, and final states ``[S, H, P, N]`` float32.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or the sequences don't cover the tokens.
    """
    _check_sequences(("C", "B", "x"), C, B, x, initial_state, cu_seqlens)
    given = [(name, t) for name, t in (("A", A), ("D", D), ("dt_bias", dt_bias)) if t is not None]
    _check_heads((("dt", dt),), given, x)
    if z is not None:
        check_tensor("z", z, x.shape, "[total, H, P]", device=x.device)
    check_dt_limit(dt_limit)
    inputs = (x, dt, B, C, A, D, z, dt_bias, dt_softplus, *limits(dt_limit))
    return call("mamba2_prefill", *inputs, initial_state, cu_seqlens, resolve_backend(backend, x.device))


def causal_conv1d_prefill(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    activation: str | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution of packed sequences; see :func:`replayssm.ops.causal_conv1d_update`.

    Args:
        x: ``[total, C]``, the new inputs.
        conv_state: ``[S, C, W − 1]``, dtype of x; each sequence's last inputs from before, oldest first.
        weight: ``[C, W]``.
        bias: ``[C]`` or None.
        cu_seqlens: as for :func:`gdn_prefill`.
        activation: ``"silu"``, its synonym ``"swish"``, or None.
        backend: see :mod:`replayssm.ops`.

    Returns:
        ``[total, C]`` in the dtype of x, and each sequence's last W − 1 inputs, ``[S, C, W − 1]``.

    Raises:
        ValueError: a tensor has a wrong shape, dtype or device, or the activation is unknown.
    """
    check_conv(x, "[total, C]", conv_state, weight, bias, "[S, C, W-1]")
    _check_cuts(cu_seqlens, conv_state.shape[0], x)
    activation = check_activation(activation)
    rest = (cu_seqlens, activation, resolve_backend(backend, x.device))
    return call("causal_conv1d_prefill", x, conv_state, weight, bias, *rest)


def _check_sequences(
    names: tuple[str, str, str], q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor, cu_seqlens: Tensor
) -> None:
    """Check a layer's q, k and v (by their names there), and where its sequences begin and end."""
    check_rank(names[2], v, "[total, H_v, d_v]")
    check_rank(names[1], k, "[total, H_k, d_k]")
    total, h_v, d_v = v.shape
    h_k, d_k = k.shape[1:]
    check_tensor(names[2], v, (total, h_v, d_v), "[total, H_v, d_v]")
    for name, tensor in ((names[0], q), (names[1], k)):
        check_tensor(name, tensor, (total, h_k, d_k), "[total, H_k, d_k]", (v.dtype,), v.device)
    if h_k < 1 or h_v % h_k:
        raise ValueError(f"{names[2]} has {h_v} heads, {names[1]} {h_k}: H_v must be a multiple of H_k")
    check_rank("initial_state", initial_state, "[S, H_v, d_v, d_k]")
    sequences = initial_state.shape[0]
    shape = (sequences, h_v, d_v, d_k)
    check_tensor("initial_state", initial_state, shape, "[S, H_v, d_v, d_k]", (torch.float32,), v.device)
    _check_cuts(cu_seqlens, sequences, v)


def _check_heads(projections: tuple[tuple[str, Tensor], ...], parameters: Any, v: Tensor) -> None:
    """Check what has one number for each value head, of every token or once."""
    heads = tuple(v.shape[:2])
    for name, tensor in projections:
        check_tensor(name, tensor, heads, "[total, H_v]", ACTIVATION_DTYPES, v.device)
    for name, tensor in parameters:
        check_tensor(name, tensor, heads[1:], "[H_v]", device=v.device)


def _check_cuts(cu_seqlens: Tensor, sequences: int, x: Tensor) -> None:
    """Check cu_seqlens, and its values where that waits for no device."""
    device = x.device if isinstance(cu_seqlens, Tensor) and cu_seqlens.device.type != "cpu" else None
    check_tensor("cu_seqlens", cu_seqlens, (sequences + 1,), "[S+1]", (torch.int32,), device)
    if cu_seqlens.device.type != "cpu" or type(cu_seqlens) is not Tensor or torch.compiler.is_compiling():
        return
    cuts = cu_seqlens.tolist()
    if cuts[0] != 0 or cuts[-1] != x.shape[0] or cuts != sorted(cuts):
        raise ValueError(
            f"cu_seqlens is {cuts}: numbers from 0 to total = {x.shape[0]}, none below the one before, are wanted"
        )


def _register(schema: str) -> None:
    """Register the operator: the call goes to a backend."""
    name = schema.partition("(")[0]
    layer_of = LAYERS[name.removesuffix("_prefill")]
    values = 0 if name == "mamba2_prefill" else 2

    def implementation(*args: Any) -> tuple[Tensor, Tensor]:
        *inputs, initial_state, cu_seqlens, backend = args
        layer, rules = layer_of(*inputs)
        by_fla = backend != "torch" and layer.b is not None and fla.serves(layer.v, layer.k)
        return (fla if by_fla else torch_prefill).prefill(layer, rules, initial_state, cu_seqlens)

    def fake(*args: Any) -> tuple[Tensor, Tensor]:
        return args[values].new_empty(args[values].shape), args[-3].new_empty(args[-3].shape)

    register(schema, implementation, fake)


for _schema in _SCHEMAS:
    _register(_schema)

register(
    "causal_conv1d_prefill(Tensor x, Tensor conv_state, Tensor weight, Tensor? bias, Tensor cu_seqlens, "
    "str? activation, str backend) -> (Tensor, Tensor)",
    lambda *args: backend_module(args[-1]).causal_conv1d_prefill(*args[:-1]),
    lambda x, conv_state, *_: (x.new_empty(x.shape), conv_state.new_empty(conv_state.shape)),
)
