"""One decode step with the kernels in CUDA C++: which kernel, its arguments, its launch.

Everything that follows from dtypes, shapes, strides and options is worked out once for each combination. A step then
packs the tensors' addresses and makes one launch on PyTorch's current stream.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.backends.cuda import blocks, build, driver
from replayssm.backends.step import Step

# As `Params` in config.cuh: addresses; then strides, scale to dt_max, flush_period.
_ADDRESSES = Struct("@18Q")
_REST = Struct("@18i5fi")
_TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", None: "none"}
_L2_NORM, _SOFTPLUS, _BOUNDED, _ROW_CURSORS, _NORMAL_KEYS, _INPUT_RECORDS, _ZERO_PADDING = (2**i for i in range(7))
_RECORDS = {"updates": 0, "normalised": _NORMAL_KEYS, "inputs": _INPUT_RECORDS}
_FLAG_BYTES = {None: 0, torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4}
_ALIGNMENT = 16  # bytes, of the bulk copies and vectors
_MOST_ROWS = 65535  # of a batch: the grid's second dimension
_LARGEST_STRIDE = 2**31 - 1

_arguments = driver.Arguments()


class Layer(NamedTuple):
    """A layer's tensors in the letters of the delta rule; Mamba-2: q = C, k = B, v = x, a = dt, rate = A."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor | None
    rate: Tensor
    bias: Tensor | None
    D: Tensor | None = None
    z: Tensor | None = None


class Plan(NamedTuple):
    """How to run a step of one look; without a launch, why there is none."""

    launch: driver.Launch | None
    tiles: int = 0  # blocks of a row
    rest: bytes = b""  # of the arguments, behind the addresses
    missing: str = ""


_plans: dict[Any, Plan] = {}


def decode(layer: Layer, step: Step, flags: int, numbers: tuple[float, ...]) -> Tensor | None:
    """One step, or None where the kernels don't take these shapes, strides or this machine.

    Args:
        layer: see there.
        step: see :class:`replayssm.backends.step.Step`.
        flags: of config.cuh, those that say something about the layer.
        numbers: scale, beta_scale, lower_bound, dt_min, dt_max.
    """
    checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot, slots, _, forced, _, out, zeroed = step
    v = layer.v
    if out is None or out.dtype != v.dtype:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if not zeroed:
            out.zero_()
    look = _look(layer, step, flags, numbers)
    plan = _plans.get(look)
    if plan is None:
        plan = _plans[look] = _make_plan(layer, step, flags, numbers)
    addresses = (
        *(0 if x is None else x.data_ptr() for x in layer),
        *(out.data_ptr(), checkpoint.data_ptr(), ring_u.data_ptr(), ring_k.data_ptr(), ring_g.data_ptr()),
        *(write_pos.data_ptr(), 0 if checkpoint_slot is None else checkpoint_slot.data_ptr(), slots.data_ptr()),
        0 if forced is None else forced.data_ptr(),
    )
    if plan.launch is None or (addresses[9] | addresses[10] | addresses[11] | addresses[12]) % _ALIGNMENT:
        return None
    if v.shape[0]:
        given = _arguments.bytes
        _ADDRESSES.pack_into(given, 0, *addresses)
        given[_ADDRESSES.size : _ADDRESSES.size + _REST.size] = plan.rest
        plan.launch(plan.tiles, v.shape[0], _current_stream(v.device), _arguments)
    return out


def _look(layer: Layer, step: Step, flags: int, numbers: tuple[float, ...]) -> Any:
    """All that a plan follows from."""
    given = [flags, numbers, step.flush_period, step.records, step.zero_padding, layer.v.shape, layer.v.device]
    for x in (*layer, *step[:7], step.force_flush):
        given += (None,) if x is None else (x.dtype, x.stride())
    given.append(step.ring_k.shape)
    return tuple(given)


def _current_stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _make_plan(layer: Layer, step: Step, flags: int, numbers: tuple[float, ...]) -> Plan:
    missing = _unsupported(layer, step)
    if missing is not None:
        return Plan(None, missing=missing)
    v, a, checkpoint, device = layer.v, layer.a, step.checkpoint, layer.v.device
    _, num_v_heads, head_v_dim, head_k_dim = checkpoint.shape
    group, ring_rows = num_v_heads // step.ring_k.shape[1], step.ring_k.shape[2]
    rules = (a.dim() == 3, layer.b is not None)
    shape = blocks.Shape(*rules, head_v_dim, head_k_dim, group, num_v_heads, ring_rows, checkpoint.dtype)
    missing = shape.unsupported()
    if missing is not None:
        return Plan(None, missing=missing)
    about = properties(device)
    rows = v.shape[0] * num_v_heads * head_v_dim
    block = blocks.choose(shape, v.dtype, rows, about.multiprocessors, about.shared_bytes)
    if block is None:
        return Plan(None, missing="a multiprocessor's shared memory can't hold the ring's decays")
    flags |= _RECORDS[step.records] | _ROW_CURSORS * (step.checkpoint_slot is None)
    flags |= _ZERO_PADDING * step.zero_padding
    options = {
        "FLAGS": flags,
        "FORCE_BYTES": _FLAG_BYTES[None if step.force_flush is None else step.force_flush.dtype],
    }
    types = {"C": checkpoint, "X": v, "U": step.ring_u, "K": step.ring_k, "A": a, "B": layer.b}
    types |= {"RATE": layer.rate, "BIAS": layer.bias, "D": layer.D, "Z": layer.z}
    names = {name: _TYPES[None if x is None else x.dtype] for name, x in types.items()}
    try:
        launch = kernel(tuple(macros(shape, block, names | options).items()), block, shape, v.dtype, device)
    except build.BuildError as error:
        warnings.warn(f"{error}. Decode steps run on the triton backend.", RuntimeWarning, stacklevel=2)
        return Plan(None, missing=str(error))
    rest = _REST.pack(*_strides(layer, step), *numbers, step.flush_period)
    return Plan(launch, num_v_heads * head_v_dim // block.span, rest)


def _unsupported(layer: Layer, step: Step) -> str | None:
    """None if the kernels take tensors that lie in memory as these do, else why not."""
    state = (step.checkpoint, step.ring_u, step.ring_k, step.ring_g)
    if not all(x[:1].is_contiguous() for x in state):
        return "a slot's elements don't follow each other"
    if any(x.stride(0) * x.element_size() % _ALIGNMENT for x in state[:3]):
        return f"slots don't begin at multiples of {_ALIGNMENT} bytes"
    lines = [layer.q, layer.k, layer.v, layer.z, layer.a if layer.a.dim() == 3 else None]
    if any(x is not None and x.stride(-1) != 1 for x in lines):
        return "the elements of a head don't follow each other"
    whole = (layer.rate, layer.bias, step.write_pos, step.checkpoint_slot, step.slots, step.force_flush, step.out)
    if not all(x is None or x.is_contiguous() for x in whole):
        return "parameters, cursors, slots or outputs don't follow each other"
    if step.force_flush is not None and step.force_flush.dtype not in _FLAG_BYTES:
        return f"force_flush has dtype {step.force_flush.dtype}"
    if layer.v.shape[0] > _MOST_ROWS or max(_strides(layer, step)) > _LARGEST_STRIDE:
        return "the batch or a stride is too large"
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


@cache
def properties(device: torch.device) -> Properties:
    """Look at a GPU."""
    found = torch.cuda.get_device_properties(device)
    architecture = f"sm_{found.major}{found.minor}{'a' if found.minor == 0 and found.major >= 9 else ''}"
    return Properties(found.multi_processor_count, driver.most_shared_bytes(device.index), architecture)


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
        "TILES": block.tiles,
        "STAGES": block.stages,
        "REGISTERS": block.registers,
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


def gdn_decode(
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
    step: Step,
) -> Tensor:
    """Gated DeltaNet, see :func:`replayssm.ops.gdn_decode`."""
    layer = Layer(q, k, v, a, b, A_log, dt_bias)
    y = decode(layer, step, _L2_NORM * qk_l2norm, (scale, beta_scale, 0.0, 0.0, 0.0))
    if y is not None:
        return y
    return _triton().gdn_decode(q, k, v, a, b, A_log, dt_bias, beta_scale, scale, qk_l2norm, step)


def kda_decode(
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
    step: Step,
) -> Tensor:
    """Kimi Delta Attention, see :func:`replayssm.ops.kda_decode`."""
    flags = _L2_NORM * qk_l2norm | _BOUNDED * (lower_bound is not None)
    y = decode(Layer(q, k, v, a, b, A_log, dt_bias), step, flags, (scale, beta_scale, lower_bound or 0.0, 0.0, 0.0))
    if y is not None:
        return y
    return _triton().kda_decode(q, k, v, a, b, A_log, dt_bias, lower_bound, beta_scale, scale, qk_l2norm, step)


def mamba2_decode(
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
    step: Step,
) -> Tensor:
    """Mamba-2, see :func:`replayssm.ops.mamba2_decode`."""
    layer = Layer(C, B, x, dt, None, A, dt_bias, D, z)
    unlimited = dt_min == 0.0 and dt_max == math.inf  # then a negative Δ, possible without softplus, stays
    numbers = (1.0, 0.0, 0.0, -math.inf if unlimited else dt_min, dt_max)
    y = decode(layer, step, _SOFTPLUS * dt_softplus, numbers)
    if y is not None:
        return y
    return _triton().mamba2_decode(x, dt, B, C, A, D, z, dt_bias, dt_softplus, dt_min, dt_max, step)


def _triton() -> Any:
    from replayssm.backends import triton

    return triton
