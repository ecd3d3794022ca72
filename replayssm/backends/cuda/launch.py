"""What the CUDA kernels' launches share: what they take, how they are loaded, and how one is started."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import guards

from replayssm.backends.cuda import blocks, build, driver
from replayssm.backends.cuda.windows import Window
from replayssm.backends.step import Layer, Rules, Step

ALIGNMENT = 16  # bytes, of the bulk copies and vectors
FLAG_BYTES = {None: 0, torch.bool: 1, torch.uint8: 1, torch.int8: 1, torch.int32: 4}  # of a flag in force_flush
_LARGEST_STRIDE = 2**31 - 1
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", None: "none"}
_FILES = {"replayssm_decode": build.DECODE, "replayssm_fold": build.FOLD, "replayssm_verify": build.VERIFY}

Run = Callable[..., Tensor]
OUT = 9  # the output's place among the addresses, behind a layer's tensors

# A device's current stream, as a handle, and the current device's number; a torch for CPUs has neither.
# (`torch.cuda.current_stream` makes an object first: ten times as long.)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

_address = Tensor.data_ptr
_arguments = driver.Arguments()


class Plan(NamedTuple):
    """How to run a call of one look; without a launch, why there is none."""

    launch: driver.Launch | None
    blocks: int = 0
    rest: bytes = b""  # of the arguments, behind the addresses
    missing: str = ""


def start(plan: Plan, arguments: Struct, addresses: list[int], device: torch.device) -> None:
    """Launch on PyTorch's current stream of a device.

    Args:
        plan: it has a launch.
        arguments: how addresses and rest lie.
        addresses: of the tensors, 0 for those that aren't there.
        device: theirs.
    """
    arguments.pack_into(_arguments.bytes, 0, *addresses, plan.rest)
    assert plan.launch is not None
    if current_device() == device.index:
        plan.launch(plan.blocks, current_stream(device.index), _arguments)
        return
    with torch.cuda.device(device):
        plan.launch(plan.blocks, current_stream(device.index), _arguments)


def bind(plan: Plan, arguments: Struct, v: Tensor, are_aligned: Callable[[list[int]], bool], whole_way: Run) -> Run:
    """How calls of one look run that need no more checks: their addresses packed, and one launch.

    Args:
        plan: it has a launch.
        arguments: how addresses and rest lie.
        v: the third tensor of such a call; outputs are like it.
        are_aligned: whether the tensors, the output among them, begin where the kernel wants it.
        whole_way: takes calls whose tensors don't, and those on another GPU than the current one.
    """
    launch, blocks, rest, _ = plan
    assert launch is not None
    pack, index, output = arguments.pack_into, v.device.index, _output_like(v)

    def run(*given: Tensor) -> Tensor:
        out = output()
        addresses = list(map(_address, given))
        addresses.insert(OUT, _address(out))
        if current_device() != index or not are_aligned(addresses):
            return whole_way(*given)
        pack(_arguments.bytes, 0, *addresses, rest)
        launch(blocks, current_stream(index), _arguments)
        return out

    return run


def _output_like(v: Tensor) -> Callable[[], Tensor]:
    """Makes outputs for the look of v, on the current device.

    As programs that torch has compiled do, without its dispatcher: in half of the time.
    """
    like = torch.empty_like(v, memory_format=torch.contiguous_format)
    make = getattr(guards, f"_empty_strided_{v.device.type}", None)  # no public part of torch
    if make is None:
        return partial(torch.empty, like.shape, dtype=v.dtype, device=v.device)
    return partial(make, tuple(like.shape), like.stride(), v.dtype)


def are_aligned(addresses: list[int]) -> bool:
    """Whether output, checkpoints and rings, behind a layer's nine tensors, begin where bulk copies and vectors may."""
    return not (addresses[9] | addresses[10] | addresses[11] | addresses[12] | addresses[13]) % ALIGNMENT


def unsupported(layer: Layer, step: Step, strides: tuple[int, ...]) -> str | None:
    """None if the kernels take tensors that lie in memory as these do, else why not.

    Args:
        layer: see there.
        step: see there.
        strides: all that a kernel is given.
    """
    if step.ring_k.dtype != layer.k.dtype:
        return "the ring's keys have another dtype than the activations"
    lines = [layer.q, layer.k, layer.v, layer.z, layer.a if layer.channel else None]
    if any(x is not None and x.stride(-1) != 1 for x in lines):
        return "the elements of a head don't follow each other"
    whole = (layer.rate, layer.bias, step.write_pos, step.checkpoint_slot, step.slots, step.force_flush, step.out)
    if step.force_flush is not None and step.force_flush.dtype not in FLAG_BYTES:
        return f"force_flush has dtype {step.force_flush.dtype}"
    return unsupported_state((step.checkpoint, step.ring_u, step.ring_k, step.ring_g), whole, strides, layer.channel)


def unsupported_state(
    state: tuple[Tensor, ...], whole: tuple[Tensor | None, ...], strides: tuple[int, ...], channel: bool
) -> str | None:
    """None if the kernels take states that lie in memory as these do, else why not.

    Args:
        state: checkpoints and rings.
        whole: tensors that may have no gaps.
        strides: all that a kernel is given.
        channel: whether there is a decay for each key channel.
    """
    if not all(x[:1].is_contiguous() for x in state):
        return "a slot's elements don't follow each other"
    if any(x.stride(0) * x.element_size() % ALIGNMENT for x in (state if channel else state[:3])):
        return f"slots don't begin at multiples of {ALIGNMENT} bytes"
    if not all(x is None or x.is_contiguous() for x in whole):
        return "parameters, cursors, slots or outputs don't follow each other"
    return "a stride is too large" if max(strides) > _LARGEST_STRIDE else None


def strides_of(layer: Layer, step: Step, *more: int) -> tuple[int, ...]:
    """The strides that a kernel is given, of tokens and rows first; ``more`` before those of slots."""
    q, k, v, a, b, _, _, D, z = layer
    leading = v.dim() - 1
    given = [(0,) * leading if x is None else x.stride()[:leading] for x in (q, k, v, a, b, z)]
    skip = (0, 0) if D is None else (D.stride(0), 0 if D.dim() == 1 else D.stride(1))
    slots = (x.stride(0) for x in (step.checkpoint, step.ring_u, step.ring_k, step.ring_g))
    return (*(stride for strides in given for stride in strides), *skip, *more, *slots)


def shape_of(layer: Layer, step: Step) -> blocks.Shape:
    """What of a layer and its state decides which kernel runs."""
    return shape_of_state(layer.channel, layer.b is not None, step.checkpoint, step.ring_u, step.ring_k)


def shape_of_state(channel: bool, delta: bool, checkpoint: Tensor, ring_u: Tensor, ring_k: Tensor) -> blocks.Shape:
    """The same from the tensors of a layer's slots."""
    _, num_v_heads, head_v_dim, head_k_dim = checkpoint.shape
    num_k_heads, ring_rows = ring_k.shape[1:3]
    heads = (num_v_heads // num_k_heads, num_v_heads)
    return blocks.Shape(channel, delta, head_v_dim, head_k_dim, *heads, ring_rows, checkpoint.dtype, ring_u.dtype)


def types_of(layer: Layer, step: Step) -> dict[str, str]:
    """The types of the tensors, as the sources name both."""
    tensors = {"C": step.checkpoint, "X": layer.v, "U": step.ring_u, "A": layer.a, "B": layer.b}
    tensors |= {"RATE": layer.rate, "BIAS": layer.bias, "D": layer.D, "Z": layer.z}
    return {name: TYPES[None if x is None else x.dtype] for name, x in tensors.items()}


def numbers_of(rules: Rules) -> tuple[float, ...]:
    """A layer's numbers in the order of the kernels' arguments."""
    return rules.scale, rules.beta_scale, rules.lower_bound or 0.0, rules.dt_min, rules.dt_max


def looks_of(*tensors: Tensor | None) -> list[Any]:
    """What of tensors decides how to run, but for their shapes."""
    given: list[Any] = []
    for x in tensors:
        given += (None,) if x is None else (x.dtype, x.stride())
    return given


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


@cache
def kernel(
    macros: tuple[tuple[str, str], ...],
    cut: blocks.Block | Window,
    shape: blocks.Shape,
    activations: torch.dtype,
    device: torch.device,
    name: str,
) -> driver.Launch:
    """One kernel, compiled if need be, on one device.

    Raises:
        BuildError: it can't be had.
    """
    code = build.machine_code(dict(macros), properties(device).architecture, _FILES[name])
    return driver.load(code, name, device.index, cut.threads, cut.shared_bytes(shape, activations))


def planned(
    macros: dict[str, str],
    cut: blocks.Block | Window,
    shape: blocks.Shape,
    activations: torch.dtype,
    device: torch.device,
    name: str,
    count: int,
    rest: bytes,
    what: str,
) -> Plan:
    """How to launch a kernel; where it can't be had, a warning says ``what`` happens on the triton backend instead."""
    try:
        found = kernel(tuple(macros.items()), cut, shape, activations, device, name)
    except build.BuildError as error:
        warnings.warn(f"{error}. {what} on the triton backend.", RuntimeWarning, stacklevel=2)
        return Plan(None, missing=str(error))
    return Plan(found, count, rest)


def triton() -> Any:
    """The backend that takes what has no kernel here."""
    from replayssm.backends import triton

    return triton
