"""One verify window with the kernels in CUDA C++: which kernel, its arguments, its launch.

As in :mod:`replayssm.backends.cuda.decode`, all that follows from dtypes, shapes, strides and options is worked out
once for each combination; a window is then one launch.
"""

from __future__ import annotations

import warnings
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from replayssm.backends.cuda import blocks, build, launch, windows
from replayssm.backends.cuda.launch import Plan
from replayssm.backends.step import Layer, Rules, Step, Window

# As `WindowParams` in window.cuh: addresses; then strides, scale to dt_max, tokens to blocks.
_REST = Struct("@25i5f3i")
_PARAMS = Struct(f"@20Q{_REST.size}s")

_plans: dict[Any, Plan] = {}
#: For the checkpoints at an address, how many blocks of each slot's key heads have come: zeros between launches.
_arrivals: dict[tuple[torch.device, int], Tensor] = {}


def verify_step(layer: Layer, rules: Rules, step: Step, window: Window) -> Tensor:
    """A window of any layer; on the triton backend where the kernels don't take these shapes, strides or this GPU."""
    v = layer.v
    plan = _plan(layer, rules, step, window)
    if plan.launch is None:
        return launch.triton().verify_step(layer, rules, step, window)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    used = (*layer, out, *step[:7], *window, _arrivals_of(step))
    addresses = [0 if x is None else x.data_ptr() for x in used]
    if not launch.are_aligned(addresses):
        return launch.triton().verify_step(layer, rules, step, window)
    if v.shape[0]:
        launch.start(plan, _PARAMS, addresses, v.device)
    return out


def _arrivals_of(step: Step) -> Tensor:
    """The counters of these slots. (By address: launches on other slots may run at the same time.)"""
    key = (step.checkpoint.device, step.checkpoint.data_ptr())
    wanted = step.checkpoint.shape[0] * step.ring_k.shape[1]
    found = _arrivals.get(key)
    if found is None or found.numel() < wanted:
        found = _arrivals[key] = torch.zeros(wanted, dtype=torch.int32, device=step.checkpoint.device)
    return found


def _plan(layer: Layer, rules: Rules, step: Step, window: Window) -> Plan:
    aligned = _aligned(layer)
    tensors = launch.looks_of(*layer, *step[:7], *window)
    look = (rules, layer.v.shape, layer.v.device, step.ring_k.shape, aligned, *tensors)
    plan = _plans.get(look)
    if plan is None:
        plan = _plans[look] = _make_plan(layer, rules, step, window, aligned)
    return plan


def _make_plan(layer: Layer, rules: Rules, step: Step, window: Window, aligned: bool) -> Plan:
    strides = launch.strides_of(layer, step, 0 if window.parents is None else window.parents.stride(0))
    shape = launch.shape_of(layer, step)
    missing = launch.unsupported(layer, step, strides) or shape.unsupported() or _unsupported(layer, window)
    if missing is not None:
        return Plan(None, missing=missing)
    v, device = layer.v, layer.v.device
    batch, tokens, num_v_heads, head_v_dim = v.shape
    about = launch.properties(device)
    limits = (about.multiprocessors, about.shared_bytes)
    cut = windows.choose(shape, tokens, v.dtype, batch * num_v_heads * head_v_dim, *limits)
    if cut is None:
        return Plan(None, missing="a multiprocessor's shared memory can't hold the window")
    types = launch.types_of(layer, step)
    options = macros(shape, cut, types, rules, tree=window.parents is not None, aligned=aligned)
    try:
        found = launch.kernel(tuple(options.items()), cut, shape, v.dtype, device, "replayssm_verify")
    except build.BuildError as error:
        warnings.warn(f"{error}. Verify windows run on the triton backend.", RuntimeWarning, stacklevel=2)
        return Plan(None, missing=str(error))
    items = batch * num_v_heads * head_v_dim // cut.rows
    num_blocks = cut.blocks(items, about.multiprocessors)
    return Plan(found, num_blocks, _REST.pack(*strides, *launch.numbers_of(rules), tokens, items, num_blocks))


def _aligned(layer: Layer) -> bool:
    """Whether q and k of every token and head begin where vectors may."""
    steps = (n * x.element_size() for x in (layer.q, layer.k) for n in x.stride()[:3])
    return not any(n % launch.ALIGNMENT for n in (*steps, layer.q.data_ptr(), layer.k.data_ptr()))


def _unsupported(layer: Layer, window: Window) -> str | None:
    """None if the kernels take a window of these, else why not."""
    if not layer.v.shape[1]:
        return "a window has no tokens"
    if not window.num_tokens.is_contiguous() or (window.parents is not None and window.parents.stride(1) != 1):
        return "num_tokens or a row's parents don't follow each other"
    return None


def macros(
    shape: blocks.Shape, cut: windows.Window, types: dict[str, str], rules: Rules, *, tree: bool, aligned: bool
) -> dict[str, str]:
    """What `WindowCase` in window.cuh is made of.

    Args:
        shape: of the layer.
        cut: into blocks.
        types: names of the tensors' types.
        rules: of the layer.
        tree: whether there are parents.
        aligned: whether q and k lie at multiples of 16 bytes.
    """
    flags = {"CHANNEL": shape.channel, "DELTA": shape.delta, "L2_NORM": rules.l2_norm, "SOFTPLUS": rules.softplus}
    flags |= {"BOUNDED": rules.lower_bound is not None, "TREE": tree, "ALIGNED": aligned, "EAGER": cut.eager}
    numbers = {"GROUP": shape.group, "V_HEADS": shape.num_v_heads, "D_V": shape.head_v_dim, "D_K": shape.head_k_dim}
    numbers |= {"RING": shape.ring_rows, "TOKENS": cut.tokens, "ROWS": cut.rows, "WARPS": cut.warps}
    numbers |= {"REGISTERS": cut.registers}
    values = types | {name: str(flag).lower() for name, flag in flags.items()} | numbers
    return {f"CASE_{name}": str(value) for name, value in values.items()}
