"""One verify window with the kernels in CUDA C++: which kernel, its arguments, its launch.

As in :mod:`replayssm.backends.cuda.decode`, all that follows from dtypes, shapes, strides and options is worked out
once for each combination; a window is then one launch.
"""

from __future__ import annotations

import warnings
from functools import cache
from struct import Struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm.backends.cuda import blocks, build, decode, driver, windows
from replayssm.backends.step import Layer, Step, Window

# As `WindowParams` in window.cuh: addresses; then strides, scale to dt_max, tokens to blocks.
_REST = Struct("@25i5f3i")
_PARAMS = Struct(f"@20Q{_REST.size}s")
_LARGEST_STRIDE = 2**31 - 1
_ALIGNMENT = 16  # bytes, of vectors

_arguments = driver.Arguments()


class Rules(NamedTuple):
    """A layer's options beside its tensors."""

    l2_norm: bool = False
    softplus: bool = False
    bounded: bool = False
    scale: float = 1.0
    beta_scale: float = 0.0
    lower_bound: float = 0.0
    dt_min: float = 0.0
    dt_max: float = 0.0


class Plan(NamedTuple):
    """How to run a window of one look; without a launch, there is no kernel for it."""

    launch: driver.Launch | None
    blocks: int = 0
    rest: bytes = b""  # of the arguments, behind the addresses


_plans: dict[Any, Plan] = {}
#: For the checkpoints at an address, how many blocks of each slot's key heads have come: zeros between launches.
_arrivals: dict[tuple[torch.device, int], Tensor] = {}


def verify(layer: Layer, step: Step, window: Window, rules: Rules) -> Tensor | None:
    """One window, or None where the kernels don't take these shapes, strides or this machine.

    Args:
        layer: see there; each tensor of tokens is ``[B, T, ...]``.
        step: see :class:`replayssm.backends.step.Step`.
        window: see :class:`replayssm.backends.step.Window`.
        rules: of the layer.
    """
    v = layer.v
    plan = _plan(layer, step, window, rules)
    if plan.launch is None:
        return None
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    used = (*layer, out, *step[:7], *window, _arrivals_of(step))
    addresses = [0 if x is None else x.data_ptr() for x in used]
    if not decode._is_aligned(addresses):
        return None
    if v.shape[0]:
        _start(plan, addresses, v.device)
    return out


def _start(plan: Plan, addresses: list[int], device: torch.device) -> None:
    _PARAMS.pack_into(_arguments.bytes, 0, *addresses, plan.rest)
    assert plan.launch is not None
    if decode._is_current(device):
        plan.launch(plan.blocks, 1, decode._current_stream(device), _arguments)
        return
    with torch.cuda.device(device):
        plan.launch(plan.blocks, 1, decode._current_stream(device), _arguments)


def _arrivals_of(step: Step) -> Tensor:
    """The counters of these slots. (By address: launches on other slots may run at the same time.)"""
    key = (step.checkpoint.device, step.checkpoint.data_ptr())
    wanted = step.checkpoint.shape[0] * step.ring_k.shape[1]
    found = _arrivals.get(key)
    if found is None or found.numel() < wanted:
        found = _arrivals[key] = torch.zeros(wanted, dtype=torch.int32, device=step.checkpoint.device)
    return found


def _plan(layer: Layer, step: Step, window: Window, rules: Rules) -> Plan:
    given: list[Any] = [rules, layer.v.shape, layer.v.device, step.ring_k.shape, _aligned(layer)]
    for x in (*layer, *step[:7], *window):
        given += (None,) if x is None else (x.dtype, x.stride())
    look = tuple(given)
    plan = _plans.get(look)
    if plan is None:
        plan = _plans[look] = _make_plan(layer, step, window, rules)
    return plan


def _make_plan(layer: Layer, step: Step, window: Window, rules: Rules) -> Plan:
    strides = _strides(layer, step, window)
    if not _takes(layer, step, window) or max(strides) > _LARGEST_STRIDE:
        return Plan(None)
    v, checkpoint, device = layer.v, step.checkpoint, layer.v.device
    batch, tokens, num_v_heads, head_v_dim = v.shape
    num_k_heads, ring_rows, head_k_dim = step.ring_k.shape[1:]
    gate_and_rule = (layer.a.dim() == 4, layer.b is not None)
    heads = (num_v_heads // num_k_heads, num_v_heads)
    shape = blocks.Shape(*gate_and_rule, head_v_dim, head_k_dim, *heads, ring_rows, checkpoint.dtype, step.ring_u.dtype)
    if shape.unsupported() is not None:
        return Plan(None)
    about = decode.properties(device)
    limits = (about.multiprocessors, about.shared_bytes)
    cut = windows.choose(shape, tokens, v.dtype, batch * num_v_heads * head_v_dim, *limits)
    if cut is None:
        return Plan(None)
    types = {"C": checkpoint, "X": v, "U": step.ring_u, "K": step.ring_k, "A": layer.a, "B": layer.b}
    types |= {"RATE": layer.rate, "BIAS": layer.bias, "D": layer.D, "Z": layer.z}
    names = {name: decode._TYPES[None if x is None else x.dtype] for name, x in types.items()}
    options = macros(shape, cut, names, rules, tree=window.parents is not None, aligned=_aligned(layer))
    try:
        launch = kernel(tuple(options.items()), cut, shape, v.dtype, device)
    except build.BuildError as error:
        warnings.warn(f"{error}. Verify windows run on the triton backend.", RuntimeWarning, stacklevel=2)
        return Plan(None)
    items = batch * num_v_heads * head_v_dim // cut.rows
    num_blocks = cut.blocks(items, about.multiprocessors)
    return Plan(launch, num_blocks, _REST.pack(*strides, *rules[3:], tokens, items, num_blocks))


def _aligned(layer: Layer) -> bool:
    """Whether q and k of every token and head begin at multiples of 16 bytes."""
    steps = (n * x.element_size() for x in (layer.q, layer.k) for n in x.stride()[:3])
    return not any(n % _ALIGNMENT for n in (*steps, layer.q.data_ptr(), layer.k.data_ptr()))


def _takes(layer: Layer, step: Step, window: Window) -> bool:
    """Whether there are kernels for tensors that lie in memory as these do."""
    b, z = (None if x is None else x[:, 0] for x in (layer.b, layer.z))
    q, k, v, a = (x[:, 0] for x in layer[:4])
    as_decode = Layer(q, k, v, a, b, layer.rate, layer.bias, layer.D, z)
    parents = window.parents
    dense = window.num_tokens.is_contiguous() and (parents is None or parents.stride(1) == 1)
    return dense and layer.v.shape[1] > 0 and decode._unsupported(as_decode, step) is None


def _strides(layer: Layer, step: Step, window: Window) -> tuple[int, ...]:
    q, k, v, a, b, _, _, D, z = layer
    given = [(0, 0, 0) if x is None else x.stride()[:3] for x in (q, k, v, a, b, z)]
    skip = (0, 0) if D is None else (D.stride(0), 0 if D.dim() == 1 else D.stride(1))
    parents = 0 if window.parents is None else window.parents.stride(0)
    slots = (x.stride(0) for x in (step.checkpoint, step.ring_u, step.ring_k, step.ring_g))
    return (*(stride for three in given for stride in three), *skip, parents, *slots)


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
    flags |= {"BOUNDED": rules.bounded, "TREE": tree, "ALIGNED": aligned, "EAGER": cut.eager}
    numbers = {"GROUP": shape.group, "V_HEADS": shape.num_v_heads, "D_V": shape.head_v_dim, "D_K": shape.head_k_dim}
    numbers |= {"RING": shape.ring_rows, "TOKENS": cut.tokens, "ROWS": cut.rows, "WARPS": cut.warps}
    numbers |= {"REGISTERS": cut.registers}
    values = types | {name: str(flag).lower() for name, flag in flags.items()} | numbers
    return {f"CASE_{name}": str(value) for name, value in values.items()}


@cache
def kernel(
    macros: tuple[tuple[str, str], ...],
    cut: windows.Window,
    shape: blocks.Shape,
    activations: torch.dtype,
    device: torch.device,
) -> driver.Launch:
    """One kernel, compiled if need be, on one device.

    Raises:
        BuildError: it can't be had.
    """
    code = build.machine_code(dict(macros), decode.properties(device).architecture, build.VERIFY)
    shared = cut.shared_bytes(shape, activations)
    return driver.load(code, "replayssm_verify", device.index, cut.threads, shared)


def gdn_verify(
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
    window: Window,
) -> Tensor:
    """Gated DeltaNet, a window; see :func:`replayssm.ops.gdn_verify`."""
    rules = Rules(l2_norm=qk_l2norm, scale=scale, beta_scale=beta_scale)
    y = verify(Layer(q, k, v, a, b, A_log, dt_bias), step, window, rules)
    if y is not None:
        return y
    return decode._triton().gdn_verify(q, k, v, a, b, A_log, dt_bias, beta_scale, scale, qk_l2norm, step, window)


def kda_verify(
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
    window: Window,
) -> Tensor:
    """Kimi Delta Attention, a window; see :func:`replayssm.ops.kda_verify`."""
    bound = {"bounded": lower_bound is not None, "lower_bound": lower_bound or 0.0}
    rules = Rules(l2_norm=qk_l2norm, scale=scale, beta_scale=beta_scale, **bound)  # type: ignore[arg-type]
    y = verify(Layer(q, k, v, a, b, A_log, dt_bias), step, window, rules)
    if y is not None:
        return y
    given = (q, k, v, a, b, A_log, dt_bias, lower_bound, beta_scale, scale, qk_l2norm)
    return decode._triton().kda_verify(*given, step, window)


def mamba2_verify(
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
    window: Window,
) -> Tensor:
    """Mamba-2, a window; see :func:`replayssm.ops.mamba2_verify`."""
    rules = Rules(softplus=dt_softplus, dt_min=dt_min, dt_max=dt_max)
    y = verify(Layer(C, B, x, dt, None, A, dt_bias, D, z), step, window, rules)
    if y is not None:
        return y
    return decode._triton().mamba2_verify(x, dt, B, C, A, D, z, dt_bias, dt_softplus, dt_min, dt_max, step, window)
