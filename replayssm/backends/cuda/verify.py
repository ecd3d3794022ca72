"""One verify window with the kernels in CUDA C++: which kernel, its arguments, its launch.

As in :mod:`replayssm.backends.cuda.decode`, all that follows from dtypes, shapes, strides and options is worked out
once for each combination; a window is then one launch. A window of one token runs in the decode kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from replayssm.backends.cuda import blocks, decode, launch, windows
from replayssm.backends.cuda.launch import Plan
from replayssm.backends.step import ABSENT, Layer, Rules, Step, Window, counted_off

# As `WindowParams` in window.cuh: addresses; then strides, scale to dt_max, tokens to blocks. Also as `Params` in
# config.cuh, of a window: it reads no flags, where parents lie here, and its rest is shorter.
_REST = Struct("@25i5f4i")
_PARAMS = Struct(f"@20Q{_REST.size}s")

_plans: dict[Any, Plan] = {}


class _Counters(NamedTuple):
    """For the checkpoints at an address, how many blocks of each slot's key heads have come."""

    numbers: Tensor  # zeros between launches
    storage: StorageWeakRef  # of the checkpoints: the counters go after them
    fewer: _Counters | None  # which had become too few: a CUDA graph may go on counting there


_arrivals: dict[int, _Counters] = {}


def bind_verify(tensors: Sequence[Tensor], rules: Rules) -> launch.Run | None:
    """How windows of one look run that need no more checks, as :func:`replayssm.backends.cuda.decode.bind_decode`."""
    layer, step, window = _counted_off(tensors)
    plan = _plan(layer, rules, step, window)
    if plan.launch is None or not layer.v.shape[0]:
        return None

    def whole_way(*given: Tensor) -> Tensor:
        layer, step, window = _counted_off(given[:-1])
        return verify_step(layer, rules, step, window)

    are_aligned = _are_aligned if _aligned(layer) else launch.are_aligned
    run, wanted = launch.bind(plan, _PARAMS, layer.v, are_aligned, whole_way), _counters_of(step)
    return lambda *given: run(*given, _arrivals_of(given[9], wanted))


def _counted_off(tensors: Sequence[Tensor]) -> tuple[Layer, Step, Window]:
    """An operator's tensors, in their order, one of ABSENT where there are no parents."""
    *others, num_tokens, parents = tensors
    layer, step = counted_off((*others, ABSENT[16]), others[10].shape[2])
    return layer, step, Window(num_tokens, None if parents is ABSENT[17] else parents)


def _are_aligned(addresses: list[int]) -> bool:
    """Whether q, k and v, too, begin where vectors may."""
    return launch.are_aligned(addresses) and not (addresses[0] | addresses[1] | addresses[2]) % launch.ALIGNMENT


def verify_step(layer: Layer, rules: Rules, step: Step, window: Window) -> Tensor:
    """A window of any layer; on the triton backend where the kernels don't take these shapes, strides or this GPU."""
    v = layer.v
    plan = _plan(layer, rules, step, window)
    if plan.launch is None:
        return launch.triton().verify_step(layer, rules, step, window)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    used = (*layer, out, *step[:7], *window, _arrivals_of(step.checkpoint, _counters_of(step)))
    addresses = [0 if x is None else x.data_ptr() for x in used]
    if not launch.are_aligned(addresses):
        return launch.triton().verify_step(layer, rules, step, window)
    if v.shape[0]:
        launch.start(plan, _PARAMS, addresses, v.device)
    return out


def _counters_of(step: Step) -> int:
    """How many: one for each slot's key heads."""
    return step.checkpoint.shape[0] * step.ring_k.shape[1]


def _arrivals_of(checkpoint: Tensor, wanted: int) -> Tensor:
    """The counters of these slots. (By address: launches on other slots may run at the same time.)"""
    found = _arrivals.get(checkpoint.data_ptr())
    if found is not None and found.numbers.numel() >= wanted and not found.storage.expired():
        return found.numbers
    for address in [address for address, kept in list(_arrivals.items()) if kept.storage.expired()]:
        _arrivals.pop(address, None)
    numbers = torch.zeros(wanted, dtype=torch.int32, device=checkpoint.device)
    if not _is_capturing(checkpoint.device):  # else they are the graph's own, and zeros only once it is replayed
        storage = StorageWeakRef(checkpoint.untyped_storage())
        _arrivals[checkpoint.data_ptr()] = _Counters(numbers, storage, _arrivals.get(checkpoint.data_ptr()))
    return numbers


def _is_capturing(device: torch.device) -> bool:
    """Whether what is launched on a device now becomes a part of a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _plan(layer: Layer, rules: Rules, step: Step, window: Window) -> Plan:
    aligned = _aligned(layer)
    tensors = launch.looks_of(*layer, *step[:7], *window)
    look = (rules, layer.v.shape, layer.v.device, step.ring_k.shape, aligned, *tensors)
    plan = _plans.get(look)
    if plan is None:
        if layer.v.shape[1] == 1:
            plan = _plan_of_one_token(layer, rules, step, window)
        else:
            plan = _make_plan(layer, rules, step, window, aligned)
        _plans[look] = plan
    return plan


def _plan_of_one_token(layer: Layer, rules: Rules, step: Step, window: Window) -> Plan:
    missing = _unsupported(layer, window)
    if missing is not None:
        return Plan(None, missing=missing)
    b, z = (None if x is None else x[:, 0] for x in (layer.b, layer.z))
    token = layer._replace(q=layer.q[:, 0], k=layer.k[:, 0], v=layer.v[:, 0], a=layer.a[:, 0], b=b, z=z)
    return decode.make_plan(token, rules, step, window=True)


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
    tiles = batch * num_v_heads * head_v_dim // cut.rows
    whole, count = cut.items(tiles, about.multiprocessors)
    rest = _REST.pack(*strides, *launch.numbers_of(rules), tokens, tiles, whole, count)
    what = "Verify windows run"
    return launch.planned(options, cut, shape, v.dtype, device, "replayssm_verify", count, rest, what)


def _aligned(layer: Layer) -> bool:
    """Whether q, k and v of every token and head begin where vectors may."""
    steps = (n * x.element_size() for x in (layer.q, layer.k, layer.v) for n in x.stride()[:3])
    return not any(n % launch.ALIGNMENT for n in (*steps, layer.q.data_ptr(), layer.k.data_ptr(), layer.v.data_ptr()))


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
        aligned: whether q, k and v lie at multiples of 16 bytes.
    """
    flags = {"CHANNEL": shape.channel, "DELTA": shape.delta, "L2_NORM": rules.l2_norm, "SOFTPLUS": rules.softplus}
    flags |= {"BOUNDED": rules.lower_bound is not None, "TREE": tree, "ALIGNED": aligned, "EAGER": cut.eager}
    flags |= {"STAYS": cut.per_multiprocessor > 0}
    numbers = {"GROUP": shape.group, "V_HEADS": shape.num_v_heads, "D_V": shape.head_v_dim, "D_K": shape.head_k_dim}
    numbers |= {"RING": shape.ring_rows, "TOKENS": cut.tokens, "ROWS": cut.rows, "WARPS": cut.warps}
    numbers |= {"SPAN": cut.span, "REGISTERS": cut.registers}
    values = types | {name: str(flag).lower() for name, flag in flags.items()} | numbers
    return {f"CASE_{name}": str(value) for name, value in values.items()}
