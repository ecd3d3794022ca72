"""The product of one row with a weight: each weight is read once, and nothing else takes time.

Of four rows it took twice as long as the library's product, so it is for a single one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Cut(NamedTuple):
    """Outputs of a program, inputs that it takes at once, steps that are unrolled, and its warps."""

    outputs: int
    inputs: int
    unroll: int
    num_warps: int


@triton.jit
def _single_row_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_outputs,
    weight_row,
    NUM_INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < num_outputs
    inputs = tl.arange(0, INPUTS)
    weight_at = weight_ptr + output.to(tl.int64)[:, None] * weight_row + inputs[None, :]
    sums = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in tl.range(0, NUM_INPUTS, INPUTS, loop_unroll_factor=UNROLL):
        used = start + inputs < NUM_INPUTS
        weight = tl.load(weight_at + start, mask=inside[:, None] & used[None, :], other=0.0).to(tl.float32)
        sums += weight * tl.load(x_ptr + start + inputs, mask=used, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + output, tl.sum(sums, 1).to(y_ptr.dtype.element_ty), mask=inside)


def single_row(x: Tensor, weight: Tensor, cut: Cut | None = None) -> Tensor:
    """``x @ weight.T``, summed in float32.

    Args:
        x: ``[..., D]``, one row.
        weight: ``[N, D]``, dtype of x; the elements of a row follow each other.
        cut: instead of :func:`choose_cut`.

    Returns:
        ``[..., N]``.
    """
    num_outputs, num_inputs = weight.shape
    y = x.new_empty(*x.shape[:-1], num_outputs)
    cut = choose_cut(num_outputs) if cut is None else cut
    _single_row_kernel[(triton.cdiv(num_outputs, cut.outputs),)](
        x.contiguous(),
        weight,
        y,
        num_outputs,
        weight.stride(0),
        NUM_INPUTS=num_inputs,
        OUTPUTS=cut.outputs,
        INPUTS=cut.inputs,
        UNROLL=cut.unroll,
        num_warps=cut.num_warps,
    )
    return y


def choose_cut(num_outputs: int) -> Cut:
    """Enough programs for a GPU, and enough of a weight on its way in each."""
    return Cut(4 if num_outputs < 8192 else 8, 512, 4, 4)
