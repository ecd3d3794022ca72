"""The C functions as the operators call them: one call each, with all arguments in one packed structure.

Arguments: as in :mod:`replayssm.backends.torch.layers`, ``conv`` and ``state``.
"""

from __future__ import annotations

from struct import Struct

import torch
from torch import Tensor

from replayssm.backends.cpu.build import library
from replayssm.backends.step import Layer, Rules, Step

# In the order of `enum dtype` in numbers.h; flags may come in any dtype of one byte.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_CODES |= dict.fromkeys((torch.int8, torch.uint8), _CODES[torch.bool])
_RECORDS = {"updates": 0, "normalised": 1, "inputs": 2}

# As `tensor`, `step`, `convolution` and `move` in the C files. A tensor is 6 words: address, dtype, 4 strides.
_NO_TENSOR = (0,) * 6
_PADDING = tuple((0,) * (4 - rank) for rank in range(5))
_STEP = Struct(f"@{18 * 6 + 16}q5d")
_CONVOLUTION = Struct(f"@{6 * 6 + 4}q")
_MOVE = Struct(f"@{5 * 6 + 2}q")


def decode_step(layer: Layer, rules: Rules, step: Step) -> Tensor:
    """One token of any layer."""
    options = (layer.channel, layer.b is None, rules.lower_bound is not None, rules.l2_norm, rules.softplus)
    numbers = (rules.lower_bound or 0.0, rules.beta_scale, rules.scale, rules.dt_min, rules.dt_max)
    v, out = layer.v, step.out
    if out is None or out.dtype != v.dtype:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    num_slots, h_v, d_v, d_k = step.checkpoint.shape
    _, h_k, ring_rows, _ = step.ring_k.shape
    sizes = (v.shape[0], num_slots, h_k, h_v, ring_rows, d_v, d_k, step.flush_period)
    arguments = _STEP.pack(
        *_words(*layer, *step[:7], step.force_flush, out),
        *sizes,
        *options,
        _RECORDS[step.records],
        step.zero_padding,
        torch.get_num_threads(),
        *numbers,
    )
    failure = library().replayssm_decode(arguments)
    if failure:
        _raise(failure, step)
    return out


def _raise(failure: int, step: Step) -> None:
    """The failures of `enum result` in decode.c."""
    num_slots, ring_rows = step.checkpoint.shape[0], step.ring_k.shape[2]
    if failure == 1:
        raise MemoryError("no memory for a decode step's intermediate results")
    name, wanted = {
        2: ("slots", f"numbers below N = {num_slots}, or negative for padding, are wanted"),
        3: ("write_pos", f"numbers from 0 to R = {ring_rows} are wanted"),
        4: ("checkpoint_slot", f"slots from 0 to N - 1 = {num_slots - 1} are wanted"),
    }[failure]
    raise ValueError(f"{name} is out of range for a row of the batch: {wanted}")


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, activation: str | None
) -> Tensor:
    """See :func:`replayssm.ops.causal_conv1d_update`."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    tensors = _words(x, conv_state, weight, bias, slots, out)
    arguments = _CONVOLUTION.pack(*tensors, *x.shape, weight.shape[1], activation == "silu")
    if library().replayssm_convolve(arguments):
        raise MemoryError("no memory for a convolution's intermediate results")
    return out


def advance(
    write_pos: Tensor,
    checkpoint_slot: Tensor,
    counters: Tensor | None,
    slots: Tensor,
    flush_period: int,
    force_flush: Tensor | None,
) -> None:
    """See :func:`replayssm.ops.advance`."""
    tensors = _words(write_pos, checkpoint_slot, counters, slots, force_flush)
    library().replayssm_advance(_MOVE.pack(*tensors, slots.numel(), flush_period))


def _words(*tensors: Tensor | None) -> list[int]:
    words: list[int] = []
    for tensor in tensors:
        if tensor is None:
            words += _NO_TENSOR
        else:
            stride: tuple[int, ...] = tensor.stride()
            words += (tensor.data_ptr(), _CODES[tensor.dtype])
            words += stride
            words += _PADDING[len(stride)]
    return words
