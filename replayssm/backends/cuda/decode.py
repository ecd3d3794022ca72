"""One decode step with the kernels in CUDA C++: which kernel, its arguments, its launch.

Everything that follows from shapes, dtypes and strides is worked out once for each combination. A step then packs
addresses and strides into one structure and makes one launch on PyTorch's current stream.
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

# As `Params` in decode.cu: addresses; strides; scale to dt_max; flush_period to flags; types and flag bytes.
_PARAMS = Struct("@18Q18q5f13i")
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16"}
_L2_NORM, _SOFTPLUS, _BOUNDED, _ROW_CURSORS, _NORMAL_KEYS, _INPUT_RECORDS, _ZERO_PADDING = (2**i for i in range(7))
_RECORDS = {"updates": 0, "normalised": _NORMAL_KEYS, "inputs": _INPUT_RECORDS}
_FLAG_DTYPES = {torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4}
_ALIGNMENT = 16  # bytes, of the bulk copies and of vectors of the ring's keys

_arguments = driver.Arguments()


class Plan(NamedTuple):
    """How to run a step of one look; without a launch, why there is none."""

    launch: driver.Launch | None
    tiles: int  # blocks of a row
    missing: str = ""


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


def decode(layer: Layer, step: Step, flags: int, numbers: tuple[float, ...]) -> Tensor | None:
    """One step, or None where the kernels don't take these shapes, strides or this machine.

    Args:
        layer: see there.
        step: see :class:`replayssm.backends.step.Step`.
        flags: of decode.cu, those that say something about the layer.
        numbers: scale, beta_scale, lower_bound, dt_min, dt_max.
    """
    q, k, v, a, b, rate, bias, D, z = layer
    checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot, slots, period, forced, records, out, zeroed = step
    plan = _plan(
        (
            *(v.shape, v.dtype, k.shape, b is None, a.dim(), v.device),
            *(checkpoint.dtype, checkpoint.stride(), ring_u.dtype, ring_u.stride()),
            *(ring_k.dtype, ring_k.shape[2], ring_k.stride(), ring_g.stride()),
        )
    )
    if plan.launch is None or (checkpoint.data_ptr() | ring_k.data_ptr()) % _ALIGNMENT:
        return None
    if out is None or out.dtype != v.dtype:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if not zeroed:
            out.zero_()
    if not v.shape[0]:
        return out
    q, k, v = _last_dim_contiguous(q), _last_dim_contiguous(k), _last_dim_contiguous(v)
    if a.dim() == 3:
        a = _last_dim_contiguous(a)
    if z is not None:
        z = _last_dim_contiguous(z)
    rate, write_pos, slots = rate.contiguous(), write_pos.contiguous(), slots.contiguous()
    cursors_of_rows = checkpoint_slot is None
    flags |= _RECORDS[records] | _ROW_CURSORS * cursors_of_rows | _ZERO_PADDING * zeroed
    if bias is not None:
        bias = bias.contiguous()
    if checkpoint_slot is not None:
        checkpoint_slot = checkpoint_slot.contiguous()
    if forced is not None:
        forced = (forced if forced.dtype in _FLAG_DTYPES else forced != 0).contiguous()
    stride = Tensor.stride
    _PARAMS.pack_into(
        _arguments.buffer,
        0,
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), a.data_ptr(), _address(b), rate.data_ptr()),
        *(_address(bias), _address(D), _address(z), out.data_ptr()),
        *(checkpoint.data_ptr(), ring_u.data_ptr(), ring_k.data_ptr(), ring_g.data_ptr()),
        *(write_pos.data_ptr(), _address(checkpoint_slot), slots.data_ptr(), _address(forced)),
        *(*stride(q)[:2], *stride(k)[:2], *stride(v)[:2], *stride(a)[:2], *_strides(b), *_strides(z)),
        *((0, 0) if D is None else (D.stride(0), 0 if D.dim() == 1 else D.stride(1))),
        *(checkpoint.stride(0), ring_u.stride(0), ring_k.stride(0), ring_g.stride(0)),
        *numbers,
        *(period, ring_k.shape[2], v.shape[1], v.shape[1] // k.shape[1], plan.tiles, flags),
        *(_TYPES[a.dtype], _type(b), _TYPES[rate.dtype], _type(bias), _type(D), _type(z)),
        0 if forced is None else _FLAG_DTYPES[forced.dtype],
    )
    plan.launch(v.shape[0] * plan.tiles, _current_stream(v.device.index), _arguments)
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _type(tensor: Tensor | None) -> int:
    return 0 if tensor is None else _TYPES[tensor.dtype]


def _strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()[:2]


def _last_dim_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@cache
def _plan(look: tuple[Any, ...]) -> Plan:
    """Choose and load the kernel for tensors of one look."""
    v_shape, activation, k_shape, additive, a_rank, device, *state = look
    state_dtype, checkpoint_stride, u_dtype, u_stride, k_dtype, ring_rows, k_stride, g_stride = state
    (batch, num_v_heads, head_v_dim), (_, num_k_heads, head_k_dim) = v_shape, k_shape
    channel, group = a_rank == 3, num_v_heads // num_k_heads
    shape = blocks.Shape(channel, not additive, head_v_dim, head_k_dim, group, ring_rows, state_dtype)
    gate = (head_k_dim,) if channel else ()
    dense = (
        (checkpoint_stride, (num_v_heads, head_v_dim, head_k_dim)),
        (u_stride, (num_v_heads, ring_rows, head_v_dim)),
        (k_stride, (num_k_heads, ring_rows, head_k_dim)),
        (g_stride, (num_v_heads, ring_rows, *gate)),
    )
    if not all(_is_dense(stride[1:], sizes) for stride, sizes in dense):
        return Plan(None, 0, "a slot's elements don't follow each other")
    if checkpoint_stride[0] * state_dtype.itemsize % _ALIGNMENT or k_stride[0] * k_dtype.itemsize % _ALIGNMENT:
        return Plan(None, 0, f"slots don't begin at multiples of {_ALIGNMENT} bytes")
    missing = shape.unsupported()
    if missing is not None:
        return Plan(None, 0, missing)
    about = properties(device)
    rows = batch * num_v_heads * head_v_dim
    block = blocks.choose(shape, rows, about.multiprocessors, about.shared_bytes)
    if block is None:
        return Plan(None, 0, "a multiprocessor's shared memory can't hold the ring's decays")
    names = tuple(_NAMES[dtype] for dtype in (state_dtype, activation, u_dtype, k_dtype))
    try:
        launch = kernel(shape, block, names, device)
    except build.BuildError as error:
        warnings.warn(f"{error}. Decode steps run on the triton backend.", RuntimeWarning, stacklevel=2)
        return Plan(None, 0, str(error))
    return Plan(launch, num_v_heads * head_v_dim // block.rows)


def _is_dense(stride: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    wanted = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return all(size == 1 or given == want for given, want, size in zip(stride, wanted, sizes, strict=True))


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


def macros(shape: blocks.Shape, block: blocks.Block, names: tuple[str, ...]) -> dict[str, str]:
    """What decode.cu leaves open.

    Args:
        shape: of the layer.
        block: how it is cut.
        names: C++'s, of the types of checkpoint, activations, ring_u and ring_k.
    """
    values = {
        "CHANNEL": str(shape.channel).lower(),
        "DELTA": str(shape.delta).lower(),
        **dict(zip("CXUK", names, strict=True)),
        "D_V": shape.head_v_dim,
        "D_K": shape.head_k_dim,
        "ROWS": block.rows,
        "WARPS": block.warps,
        "REGISTERS": block.registers,
        "FLUSH_PASSES": block.flush_passes,
        "EAGER": str(block.eager).lower(),
    }
    return {f"CASE_{name}": str(value) for name, value in values.items()}


@cache
def kernel(shape: blocks.Shape, block: blocks.Block, names: tuple[str, ...], device: torch.device) -> driver.Launch:
    """One kernel, compiled if need be, on one device.

    Raises:
        BuildError: it can't be had.
    """
    code = build.machine_code(macros(shape, block, names), properties(device).architecture)
    return driver.load(code, "replayssm_decode", device.index, block.threads, block.shared_bytes(shape))


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
