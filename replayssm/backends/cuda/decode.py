"""One decode step with the kernels in CUDA C++: which kernel, its arguments, its launch.

Everything that follows from dtypes, shapes, strides and options is worked out once for each combination. A step then
packs the tensors' addresses and makes one launch on PyTorch's current stream; :func:`bind_decode` gives an operator
that part alone, for calls that look the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.backends.cuda import blocks, build, driver
from replayssm.backends.cuda.cuts import cut_of
from replayssm.backends.step import Layer, Rules, Step, counted_off

# As `Params` in config.cuh: addresses; then strides, scale to dt_max, flush_period, items, blocks.
_REST = Struct("@18i5f3i")
_PARAMS = Struct(f"@18Q{_REST.size}s")
_OUT = 9  # its place among the addresses
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", None: "none"}
_L2_NORM, _SOFTPLUS, _BOUNDED, _ROW_CURSORS, _NORMAL_KEYS, _INPUT_RECORDS, _ZERO_PADDING = (2**i for i in range(7))
_RECORDS = {"updates": 0, "normalised": _NORMAL_KEYS, "inputs": _INPUT_RECORDS}
_FLAG_BYTES = {None: 0, torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4}
_ALIGNMENT = 16  # bytes, of the bulk copies and vectors
_LARGEST_STRIDE = 2**31 - 1

_arguments = driver.Arguments()


class Plan(NamedTuple):
    """How to run a step of one look; without a launch, why there is none."""

    launch: driver.Launch | None
    blocks: int = 0
    rest: bytes = b""  # of the arguments, behind the addresses
    missing: str = ""


_plans: dict[Any, Plan] = {}

Run = Callable[..., Tensor]


def bind_decode(tensors: Sequence[Tensor], rules: Rules, flush_period: int) -> Run | None:
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
    device = layer.v.device

    def run(*given: Tensor) -> Tensor:
        out = torch.empty_like(given[2], memory_format=torch.contiguous_format)
        addresses = list(map(Tensor.data_ptr, given))
        addresses.insert(_OUT, out.data_ptr())
        if _is_aligned(addresses):
            _start(plan, addresses, device)
            return out
        layer, step = counted_off(given, flush_period)
        return _triton().decode_step(layer, rules, step)

    return run


def decode_step(layer: Layer, rules: Rules, step: Step) -> Tensor:
    """One token of any layer; on the triton backend where the kernels don't take these shapes, strides or this GPU."""
    v, out = layer.v, step.out
    if out is None or out.dtype != v.dtype:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if not step.zero_padding:
            out.zero_()
    plan = _plan(layer, rules, step)
    used = (*layer, out, *step[:7], step.force_flush)
    addresses = [0 if x is None else x.data_ptr() for x in used]
    if plan.launch is None or not _is_aligned(addresses):
        return _triton().decode_step(layer, rules, step)
    if v.shape[0]:
        _start(plan, addresses, v.device)
    return out


def _is_aligned(addresses: list[int]) -> bool:
    """Whether output, checkpoints and rings begin where bulk copies and vectors may."""
    return not (addresses[9] | addresses[10] | addresses[11] | addresses[12] | addresses[13]) % _ALIGNMENT


def _start(plan: Plan, addresses: list[int], device: torch.device) -> None:
    _PARAMS.pack_into(_arguments.bytes, 0, *addresses, plan.rest)
    assert plan.launch is not None
    if _is_current(device):
        plan.launch(plan.blocks, 1, _current_stream(device), _arguments)
        return
    with torch.cuda.device(device):
        plan.launch(plan.blocks, 1, _current_stream(device), _arguments)


def _plan(layer: Layer, rules: Rules, step: Step) -> Plan:
    look = _look(layer, rules, step)
    plan = _plans.get(look)
    if plan is None:
        plan = _plans[look] = _make_plan(layer, rules, step)
    return plan


def _look(layer: Layer, rules: Rules, step: Step) -> Any:
    """All that a plan follows from."""
    given = [rules, step.flush_period, step.records, step.zero_padding, layer.v.shape, layer.v.device]
    for x in (*layer, *step[:7], step.force_flush):
        given += (None,) if x is None else (x.dtype, x.stride())
    given.append(step.ring_k.shape)
    return tuple(given)


def _current_stream(device: torch.device) -> int:
    """Its handle. (`torch.cuda.current_stream` makes an object first: ten times as long.)"""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def _is_current(device: torch.device) -> bool:
    """Whether launches go to this device."""
    return torch._C._cuda_getDevice() == device.index


def _make_plan(layer: Layer, rules: Rules, step: Step) -> Plan:
    missing = _unsupported(layer, step)
    if missing is not None:
        return Plan(None, missing=missing)
    v, a, checkpoint, device = layer.v, layer.a, step.checkpoint, layer.v.device
    _, num_v_heads, head_v_dim, head_k_dim = checkpoint.shape
    group, ring_rows = num_v_heads // step.ring_k.shape[1], step.ring_k.shape[2]
    gate_and_rule = (layer.channel, layer.b is not None)
    dtypes = (checkpoint.dtype, step.ring_u.dtype)
    shape = blocks.Shape(*gate_and_rule, head_v_dim, head_k_dim, group, num_v_heads, ring_rows, *dtypes)
    missing = shape.unsupported()
    if missing is not None:
        return Plan(None, missing=missing)
    about = properties(device)
    block = cut_of(shape, v.dtype, v.shape[0], about.name, about.multiprocessors, about.shared_bytes)
    if block is None:
        return Plan(None, missing="a multiprocessor's shared memory can't hold the ring")
    flags = _L2_NORM * rules.l2_norm | _SOFTPLUS * rules.softplus | _BOUNDED * (rules.lower_bound is not None)
    flags |= _RECORDS[step.records] | _ROW_CURSORS * (step.checkpoint_slot is None)
    flags |= _ZERO_PADDING * step.zero_padding
    options = {
        "FLAGS": flags,
        "FORCE_BYTES": _FLAG_BYTES[None if step.force_flush is None else step.force_flush.dtype],
    }
    types = {"C": checkpoint, "X": v, "U": step.ring_u, "A": a, "B": layer.b}
    types |= {"RATE": layer.rate, "BIAS": layer.bias, "D": layer.D, "Z": layer.z}
    names = {name: _TYPES[None if x is None else x.dtype] for name, x in types.items()}
    try:
        launch = kernel(tuple(macros(shape, block, names | options).items()), block, shape, v.dtype, device)
    except build.BuildError as error:
        warnings.warn(f"{error}. Decode steps run on the triton backend.", RuntimeWarning, stacklevel=2)
        return Plan(None, missing=str(error))
    items = v.shape[0] * num_v_heads * head_v_dim // block.rows
    count = block.count(items, about.multiprocessors)
    numbers = (rules.scale, rules.beta_scale, rules.lower_bound or 0.0, rules.dt_min, rules.dt_max)
    return Plan(launch, count, _REST.pack(*_strides(layer, step), *numbers, step.flush_period, items, count))


def _unsupported(layer: Layer, step: Step) -> str | None:
    """None if the kernels take tensors that lie in memory as these do, else why not."""
    state = (step.checkpoint, step.ring_u, step.ring_k, step.ring_g)
    if not all(x[:1].is_contiguous() for x in state):
        return "a slot's elements don't follow each other"
    if any(x.stride(0) * x.element_size() % _ALIGNMENT for x in (state if layer.channel else state[:3])):
        return f"slots don't begin at multiples of {_ALIGNMENT} bytes"
    if step.ring_k.dtype != layer.k.dtype:
        return "the ring's keys have another dtype than the activations"
    lines = [layer.q, layer.k, layer.v, layer.z, layer.a if layer.channel else None]
    if any(x is not None and x.stride(-1) != 1 for x in lines):
        return "the elements of a head don't follow each other"
    whole = (layer.rate, layer.bias, step.write_pos, step.checkpoint_slot, step.slots, step.force_flush, step.out)
    if not all(x is None or x.is_contiguous() for x in whole):
        return "parameters, cursors, slots or outputs don't follow each other"
    if step.force_flush is not None and step.force_flush.dtype not in _FLAG_BYTES:
        return f"force_flush has dtype {step.force_flush.dtype}"
    if max(_strides(layer, step)) > _LARGEST_STRIDE:
        return "a stride is too large"
    return None


def _strides(layer: Layer, step: Step) -> tuple[int, ...]:
    q, k, v, a, b, _, _, D, z = layer
    given = [tensor.stride()[:2] for tensor in (q, k, v, a)]
    given += [(0, 0) if tensor is None else tensor.stride()[:2] for tensor in (b, z)]
    skip = (0, 0) if D is None else (D.stride(0), 0 if D.dim() == 1 else D.stride(1))
    slots = (tensor.stride(0) for tensor in (step.checkpoint, step.ring_u, step.ring_k, step.ring_g))
    return (*(stride for pair in given for stride in pair), *skip, *slots)


class Properties(NamedTuple):
    """What of a GPU decides about kernels."""

    multiprocessors: int
    shared_bytes: int  # that one block may have
    architecture: str
    name: str = ""  # under which its measured settings are kept


@cache
def properties(device: torch.device) -> Properties:
    """Look at a GPU."""
    found = torch.cuda.get_device_properties(device)
    architecture = f"sm_{found.major}{found.minor}{'a' if found.minor == 0 and found.major >= 9 else ''}"
    return Properties(found.multi_processor_count, driver.most_shared_bytes(device.index), architecture, found.name)


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


@cache
def kernel(
    macros: tuple[tuple[str, str], ...],
    block: blocks.Block,
    shape: blocks.Shape,
    activations: torch.dtype,
    device: torch.device,
) -> driver.Launch:
    """One kernel, compiled if need be, on one device.

    Raises:
        BuildError: it can't be had.
    """
    code = build.machine_code(dict(macros), properties(device).architecture)
    shared = block.shared_bytes(shape, activations)
    return driver.load(code, "replayssm_decode", device.index, block.threads, shared)


def _triton() -> Any:
    from replayssm.backends import triton

    return triton
