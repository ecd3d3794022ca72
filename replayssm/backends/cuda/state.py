"""Slots' states with their records folded in, by the kernel in CUDA C++: which kernel, its arguments, its launch."""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from replayssm.backends.cuda import blocks, decode, launch
from replayssm.backends.cuda.launch import Plan
from replayssm.backends.step import State

# As `Params` in config.cuh: output, checkpoint and rings, cursors, slots and, where a window has its lengths, targets;
# then the strides of slots. The rest is a token's.
_REST = Struct("@56x4i32x")
_PARAMS = Struct(f"@72x9Q16x{_REST.size}s")

_plans: dict[Any, Plan] = {}


def read_state(state: State, slots: Tensor) -> Tensor:
    """See :func:`replayssm.ops.read_state`."""
    out = torch.empty((slots.numel(), *state[0].shape[1:]), dtype=torch.float32, device=slots.device)
    if _fold(state, slots, None, out):
        return out
    found: Tensor = launch.triton().read_state(state, slots)
    return found


def materialize(state: State, src: Tensor, dst: Tensor) -> None:
    """See :func:`replayssm.ops.materialize`; of one slot."""
    if not _fold(state, src, dst, state[0]):
        launch.triton().materialize(state, src, dst)


def _fold(state: State, slots: Tensor, targets: Tensor | None, out: Tensor) -> bool:
    """Whether the kernel takes these tensors; then it has been launched."""
    plan = _plan(state, slots, targets)
    used = (out, *state, slots, targets)
    addresses = [0 if x is None else x.data_ptr() for x in used]
    if plan.launch is None or any(address % launch.ALIGNMENT for address in addresses[:5]):
        return False
    if slots.numel():
        launch.start(plan, _PARAMS, addresses, out.device)
    return True


def _plan(state: State, slots: Tensor, targets: Tensor | None) -> Plan:
    checkpoint, ring_u, ring_k = state[:3]
    tensors = launch.looks_of(*state, slots, targets)
    look = (slots.shape, checkpoint.shape[1:], checkpoint.device, ring_u.shape, ring_k.shape, *tensors)
    plan = _plans.get(look)
    if plan is None:
        plan = _plans[look] = _make_plan(state, slots, targets)
    return plan


def _make_plan(state: State, slots: Tensor, targets: Tensor | None) -> Plan:
    checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot = state
    # A variant of the windows of one token, whose shared memory it has.
    shape = replace(launch.shape_of_state(ring_g.dim() == 4, True, checkpoint, ring_u, ring_k), window=True)
    strides = tuple(x.stride(0) for x in state[:4])
    whole = (write_pos, checkpoint_slot, slots, *([] if targets is None else [targets]))
    missing = launch.unsupported_state(state[:4], whole, strides, shape.channel) or shape.unsupported()
    if missing is not None:
        return Plan(None, missing=missing)
    device, keys = checkpoint.device, ring_k.dtype
    about = launch.properties(device)
    rows = slots.numel() * shape.num_v_heads * shape.head_v_dim
    block = blocks.choose_fold(shape, keys, rows, about.multiprocessors, about.shared_bytes)
    if block is None:
        return Plan(None, missing="a multiprocessor's shared memory can't hold the ring")
    options = macros(shape, block, keys, to_slots=targets is not None)
    count, rest = rows // block.rows, _REST.pack(*strides)
    what = "States are folded"
    return launch.planned(options, block, shape, keys, device, "replayssm_fold", count, rest, what)


def macros(shape: blocks.Shape, block: blocks.Block, keys: torch.dtype, *, to_slots: bool) -> dict[str, str]:
    """What `Case` in config.cuh is made of.

    Args:
        shape: of the layer.
        block: how it is cut.
        keys: dtype of the ring's.
        to_slots: whether states go into checkpoints, not out as float32.
    """
    types = dict.fromkeys(("A", "B", "RATE", "BIAS", "D", "Z"), "none")
    types |= {name: launch.TYPES[x] for name, x in (("C", shape.state_dtype), ("X", keys), ("U", shape.update_dtype))}
    flags = decode.WINDOW | decode.FOLD | decode.TO_SLOTS * to_slots
    return decode.macros(shape, block, types | {"FLAGS": flags, "FORCE_BYTES": 0})
