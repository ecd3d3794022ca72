"""Gates and the functions in them, for the decode and the verify kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    # log(1 + e) = 2 atanh(e / (2 + e)), as a series: the hardware's logarithm loses a small e.
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 15.0
    for i in tl.static_range(7):
        series = series * s2 + 1.0 / (13.0 - 2.0 * i)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def gate(
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
            g = lower_bound * sigmoid(tl.exp(rate) * a)
        else:
            g = -tl.exp(rate) * softplus(a)
    else:
        if SOFTPLUS:
            a = softplus(a)
        a = tl.minimum(tl.maximum(a, dt_min), dt_max)
        g = a * rate
    return g, a
