"""Products of at most four rows with a weight: each weight is read once, and nothing else takes time.

A row's sum runs in the same order whatever the other rows are, so it has the same bits beside any.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from replayssm.backends.triton.pointwise import rows_of

MOST_ROWS = 4


class Cut(NamedTuple):
    """Outputs of a program, inputs that it takes at once, steps that are unrolled, and its warps."""

    outputs: int
    inputs: int
    unroll: int
    num_warps: int


@triton.jit
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_outputs,
    x_row,
    weight_row,
    NUM_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = output < num_outputs
    inputs = tl.arange(0, INPUTS)
    weight_at = weight_ptr + output.to(tl.int64)[:, None] * weight_row + inputs[None, :]
    first = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    second, third, fourth = first, first, first
    for start in tl.range(0, NUM_INPUTS, INPUTS, loop_unroll_factor=UNROLL):
        used = start + inputs < NUM_INPUTS
        weight = tl.load(weight_at + start, mask=inside[:, None] & used[None, :], other=0.0).to(tl.float32)
        at = x_ptr + start + inputs
        first += weight * tl.load(at, mask=used, other=0.0).to(tl.float32)[None, :]
        if ROWS > 1:
            second += weight * tl.load(at + x_row, mask=used, other=0.0).to(tl.float32)[None, :]
        if ROWS > 2:
            third += weight * tl.load(at + 2 * x_row, mask=used, other=0.0).to(tl.float32)[None, :]
        if ROWS > 3:
            fourth += weight * tl.load(at + 3 * x_row, mask=used, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + output
    y_type = y_ptr.dtype.element_ty
    tl.store(y_at, tl.sum(first, 1).to(y_type), mask=inside)
    if ROWS > 1:
        tl.store(y_at + num_outputs, tl.sum(second, 1).to(y_type), mask=inside)
    if ROWS > 2:
        tl.store(y_at + 2 * num_outputs, tl.sum(third, 1).to(y_type), mask=inside)
    if ROWS > 3:
        tl.store(y_at + 3 * num_outputs, tl.sum(fourth, 1).to(y_type), mask=inside)


def few_rows(x: Tensor, weight: Tensor, cut: Cut | None = None) -> Tensor:
    """``x @ weight.T``, summed in float32.

    Args:
        x: ``[..., D]``, at most :data:`MOST_ROWS` rows.
        weight: ``[N, D]``, dtype of x; the elements of a row follow each other.
        cut: instead of :func:`choose_cut`.

    Returns:
        ``[..., N]``.
    """
    num_outputs, num_inputs = weight.shape
    rows = rows_of(x)
    y = x.new_empty(*x.shape[:-1], num_outputs)
    cut = choose_cut(num_outputs, len(rows)) if cut is None else cut
    if len(rows):
        _few_rows_kernel[(triton.cdiv(num_outputs, cut.outputs),)](
            rows,
            weight,
            y,
            num_outputs,
            rows.stride(0),
            weight.stride(0),
            NUM_INPUTS=num_inputs,
            ROWS=len(rows),
            OUTPUTS=cut.outputs,
            INPUTS=cut.inputs,
            UNROLL=cut.unroll,
            num_warps=cut.num_warps,
        )
    return y


def choose_cut(num_outputs: int, rows: int) -> Cut:
    """Enough programs for a GPU, and enough of a weight on its way in each; more rows take more registers."""
    if rows > 1:
        return Cut(4, 512, 2, 4)
    return Cut(4 if num_outputs < 8192 else 8, 512, 4, 4)
