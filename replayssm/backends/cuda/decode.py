"""One decode step with the kernels in CUDA C++: which kernel, its arguments, its launch.

Everything that follows from dtypes, shapes, strides and options is worked out once for each combination. A step then
packs the tensors' addresses and makes one launch on PyTorch's current stream; :func:`bind_decode` gives an operator
that part alone, for calls that look the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from replayssm.backends.cuda import blocks, launch
from replayssm.backends.cuda.cuts import cut_of
from replayssm.backends.cuda.launch import Plan
from replayssm.backends.step import Layer, Rules, Step, counted_off

# As `Params` in config.cuh: addresses, but for num_tokens and arrivals, which are a window's; then strides, scale to
# dt_max, flush_period, items, blocks.
_REST = Struct("@18i5f3i")
_PARAMS = Struct(f"@17Q8xQ8x{_REST.size}s")
# CASE_FLAGS there; the last two are those of folds, in state.py.
_L2_NORM, _SOFTPLUS, _BOUNDED, _ROW_CURSORS, _NORMAL_KEYS, _INPUT_RECORDS, _ZERO_PADDING = (2**i for i in range(7))
WINDOW, FOLD, TO_SLOTS = (2**i for i in range(7, 10))
_RECORDS = {"updates": 0, "normalised": _NORMAL_KEYS, "inputs": _INPUT_RECORDS}

_plans: dict[Any, Plan] = {}


def bind_decode(tensors: Sequence[Tensor], rules: Rules, flush_period: int) -> launch.Run | None:
    """How calls of one look run that need no more checks; None if they have no kernel.

    Args:
        tensors: of one of them: those of a layer, then of a step, ABSENT for what isn't there. The others' lie in
            memory as these do, but anywhere.
        rules: of the layer.
        flush_period: L.
    """
    layer, step = counted_off(tensors, flush_period)
    plan = _plan(layer, rules, step)
    if plan.launch is None or not layer.v.shape[0]:
        return None

    def whole_way(*given: Tensor) -> Tensor:
        layer, step = counted_off(given, flush_period)
        return decode_step(layer, rules, step)

    return launch.bind(plan, _PARAMS, layer.v, launch.are_aligned, whole_way)


def decode_step(layer: Layer, rules: Rules, step: Step) -> Tensor:
    """One token of any layer; on the triton backend where the kernels don't take these shapes, strides or this GPU."""
    v, out = layer.v, step.out
    if out is None or out.dtype != v.dtype:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    plan = _plan(layer, rules, step)
    used = (*layer, out, *step[:7], step.force_flush)
    addresses = [0 if x is None else x.data_ptr() for x in used]
    if plan.launch is None or not launch.are_aligned(addresses):
        return launch.triton().decode_step(layer, rules, step)
    if v.shape[0]:
        launch.start(plan, _PARAMS, addresses, v.device)
    return out


def _plan(layer: Layer, rules: Rules, step: Step) -> Plan:
    look = _look(layer, rules, step)
    plan = _plans.get(look)
    if plan is None:
        plan = _plans[look] = make_plan(layer, rules, step)
    return plan


def _look(layer: Layer, rules: Rules, step: Step) -> Any:
    """All that a plan follows from."""
    options = (rules, step.flush_period, step.records, step.zero_padding)
    tensors = launch.looks_of(*layer, *step[:7], step.force_flush)
    return (*options, layer.v.shape, layer.v.device, step.ring_k.shape, *tensors)


def make_plan(layer: Layer, rules: Rules, step: Step, *, window: bool = False) -> Plan:
    """How steps that look like this one run, or windows of one token.

    Args:
        layer: of one token.
        rules: of the layer.
        step: of a window, it has no flags.
        window: whether rows flush as a window's do.
    """
    strides = launch.strides_of(layer, step)
    shape = replace(launch.shape_of(layer, step), window=window)
    missing = launch.unsupported(layer, step, strides) or shape.unsupported()
    if missing is not None:
        return Plan(None, missing=missing)
    v, device = layer.v, layer.v.device
    about = launch.properties(device)
    block = cut_of(shape, v.dtype, v.shape[0], about.name, about.multiprocessors, about.shared_bytes)
    if block is None:
        return Plan(None, missing="a multiprocessor's shared memory can't hold the ring")
    flags = _L2_NORM * rules.l2_norm | _SOFTPLUS * rules.softplus | _BOUNDED * (rules.lower_bound is not None)
    flags |= _RECORDS[step.records] | _ROW_CURSORS * (step.checkpoint_slot is None)
    flags |= _ZERO_PADDING * step.zero_padding | WINDOW * window
    forced = launch.FLAG_BYTES[None if step.force_flush is None else step.force_flush.dtype]
    options = macros(shape, block, launch.types_of(layer, step) | {"FLAGS": flags, "FORCE_BYTES": forced})
    items = v.shape[0] * shape.num_v_heads * shape.head_v_dim // block.rows
    count = block.count(items, about.multiprocessors)
    rest = _REST.pack(*strides, *launch.numbers_of(rules), step.flush_period, items, count)
    what = "Verify windows of one token run" if window else "Decode steps run"
    return launch.planned(options, block, shape, v.dtype, device, "replayssm_decode", count, rest, what)


def macros(shape: blocks.Shape, block: blocks.Block, more: dict[str, Any]) -> dict[str, str]:
    """What `Case` in config.cuh is made of.

    Args:
        shape: of the layer.
        block: how it is cut.
        more: the types, FLAGS and FORCE_BYTES.
    """
    values = {
        "CHANNEL": str(shape.channel).lower(),
        "DELTA": str(shape.delta).lower(),
        **more,
        "GROUP": shape.group,
        "V_HEADS": shape.num_v_heads,
        "D_V": shape.head_v_dim,
        "D_K": shape.head_k_dim,
        "RING": shape.ring_rows,
        "ROWS": block.rows,
        "WARPS": block.warps,
        "REGISTERS": block.registers,
        "STAYS": str(block.resident > 0).lower(),
        "EAGER": str(block.eager).lower(),
    }
    return {f"CASE_{name}": str(value) for name, value in values.items()}
