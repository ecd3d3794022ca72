"""Layers as the backends take them, from the operators' arguments in the order of their schemas."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from replayssm.backends.step import ABSENT, Layer, Rules

# How schemas begin: the tensors of gdn and kda, and what mamba2 takes up to its limits.
GATE = "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias"
MAMBA2 = "Tensor x, Tensor dt, Tensor B, Tensor C, Tensor A, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus"


# Where a call's tensors are counted off, for those that a layer hasn't or the caller doesn't give.
NO_B, NO_BIAS, NO_D, NO_Z = (ABSENT[i] for i in (4, 6, 7, 8))


def gdn(
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
) -> tuple[Layer, Rules]:
    """Gated DeltaNet."""
    return Layer(q, k, v, a, b, A_log, dt_bias), Rules(scale, beta_scale, qk_l2norm)


def kda(
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
) -> tuple[Layer, Rules]:
    """Kimi Delta Attention."""
    return Layer(q, k, v, a, b, A_log, dt_bias), Rules(scale, beta_scale, qk_l2norm, lower_bound)


def mamba2(
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
) -> tuple[Layer, Rules]:
    """Mamba-2."""
    return Layer(C, B, x, dt, None, A, dt_bias, D, z), Rules(softplus=dt_softplus, dt_min=dt_min, dt_max=dt_max)


def scale_of(q: Tensor, scale: float | None) -> float:
    """The factor of q: ``d_k ** -0.5`` where the caller names none."""
    return q.shape[-1] ** -0.5 if scale is None else scale


LAYERS: dict[str, Callable[..., tuple[Layer, Rules]]] = {"gdn": gdn, "kda": kda, "mamba2": mamba2}
