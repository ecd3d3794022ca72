"""Calls that look like one which has passed the checks skip them; no other call does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import emulated_cuda
import pytest
import torch
from oracle import KINDS, Layer, relative_error
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from windows import TREES, Run, int32

from replayssm import ReplayPool, ops
from replayssm.backends.cuda import decode, launch, verify
from replayssm.backends.step import ABSENT
from replayssm.ops import known

NEEDS_EMULATION = pytest.mark.skipif(emulated_cuda.missing() is not None, reason=str(emulated_cuda.missing()))

LOOKS = {"native": known._native_look, "python": known._python_look}

OTHERS: dict[str, Callable[[torch.Tensor], object]] = {
    "another shape": lambda x: torch.cat([x, x]),
    "another rank": lambda x: x[None],
    "other strides": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "another dtype": lambda x: x.half(),
    "another device": lambda x: x.to("meta"),
    "a parameter": torch.nn.Parameter,
    "no tensor": lambda x: x.numpy(),
    "absent": lambda x: ABSENT[1],
}


@pytest.fixture(params=LOOKS)
def look_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., known.Looks]:
    monkeypatch.setattr(known, "_has_native_look", lambda: request.param == "native")
    return LOOKS[request.param]


@pytest.mark.parametrize("other", OTHERS)
def test_a_look_sees_every_difference(other: str, look_of: Callable[..., known.Looks]) -> None:
    x, y = torch.randn(3, 4), torch.randn(5)
    looks_same = look_of((x, y, ABSENT[2]))
    assert looks_same(torch.randn(3, 4), torch.randn(5), ABSENT[2])
    assert not looks_same(OTHERS[other](x), y, ABSENT[2])
    assert not looks_same(x, OTHERS[other](y), ABSENT[2])
    assert not looks_same(x, y, torch.randn(5))


def test_this_torch_has_the_fast_look() -> None:
    assert known._has_native_look()


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the cuda backend does from now on: "plan" and "launch"."""
    emulated_cuda.install(monkeypatch)
    done: list[str] = []
    kernel = launch.kernel

    def noted(what: str, function: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: (done.append(what), function(*args))[1]

    for module in (decode, verify):
        monkeypatch.setattr(module, "_plan", noted("plan", module._plan))
    monkeypatch.setattr(launch, "kernel", lambda *args: noted("launch", kernel(*args)))
    return done


def layer_and_pool(kind: str) -> tuple[Layer, ReplayPool]:
    layer = Layer(kind, 1, 1 if kind.startswith("kda") else 2, 64, 16, backend="cuda")
    return layer, ReplayPool([layer.spec] * 2, 2, ring_len=3, max_window=2, backend="cuda")


SOME_KINDS = [pytest.param(kind, marks=[] if kind in ("gdn", "mamba2") else pytest.mark.thorough) for kind in KINDS]


@NEEDS_EMULATION
@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.usefixtures("look_of")
def test_a_call_that_looks_the_same_is_a_launch_and_nothing_else(kind: str, done: list[str]) -> None:
    """With the same outputs and states, also for other tensors, and for a flag that comes and goes.

    So it is where autograd looks on and has no graph to build.
    """
    layer, pool = layer_and_pool(kind)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    states = [layer.zero_state(2) for _ in range(2)]
    for step in range(4):
        force = torch.tensor([False, True]) if step == 2 else None
        for index in range(2):
            done.clear()
            inputs = layer.draw(2)
            with torch.set_grad_enabled(index == 1):
                y = layer.decode(inputs, **pool.state_args(index), slots=slots, force_flush=force)
            states[index], expected = layer.reference(inputs, states[index])
            assert relative_error(y, expected) < 1e-6
            is_new = index == 0 and step in (0, 2)
            assert done == (["plan", "launch"] if is_new else ["launch"])
        pool.advance(slots, force)
    for index in range(2):
        assert relative_error(pool.read_state(index, rows), states[index]) < 1e-6


@NEEDS_EMULATION
@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_window_that_looks_the_same_is_a_launch_and_nothing_else(kind: str, tokens: int, done: list[str]) -> None:
    """Whether its tokens are counted or not, along a chain and a tree."""
    run = Run(layer_and_pool(kind)[0], ring=3)
    seen = []
    for step in range(4):
        for counts in (None, [tokens, tokens]):
            for tree in (TREES["chain"], TREES["random"]):
                done.clear()
                run.verify(tokens, counts, tree=tree)
                seen.append((step, list(done)))
                run.commit([[0]] * 2)
    assert [what for step, what in seen if step] == [["launch"]] * 12


@NEEDS_EMULATION
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_tensor_that_lies_elsewhere_in_memory_is_noticed(kind: str, done: list[str]) -> None:
    """One that begins where the kernels' copies can't looks the same; the other backend takes it."""
    layer, pool = layer_and_pool(kind)
    slots = pool.slot_tensor(pool.alloc(2))
    state = layer.zero_state(2)
    args = pool.state_args(0)
    moved = torch.zeros(args["checkpoint"].numel() + 1)[1:].view_as(args["checkpoint"])
    for checkpoint in (args["checkpoint"], moved):
        inputs = layer.draw(2)
        y = layer.decode(inputs, **{**args, "checkpoint": checkpoint}, slots=slots)
        assert relative_error(y, layer.reference(inputs, state)[1]) < 1e-6
    assert done.count("launch") == 1


@NEEDS_EMULATION
def test_inputs_of_a_window_that_lie_elsewhere_in_memory_are_noticed(done: list[str]) -> None:
    """A kernel that reads q and k in vectors isn't given those that begin between two."""
    layer, pool = layer_and_pool("gdn")
    slots = pool.slot_tensor(pool.alloc(2))
    for begin in (0, 1, 0, 1):
        inputs = layer.draw_window(2, 2)
        inputs["k"] = torch.cat([torch.zeros(begin), inputs["k"].flatten()])[begin:].view_as(inputs["k"])
        y = layer.verify(inputs, **pool.verify_args(0), slots=slots)
        assert relative_error(y, layer.reference_window(inputs, layer.zero_state(2), [-1, 0])[1]) < 1e-6
    assert done == ["plan", "launch", "plan", "launch", "launch", "plan", "launch"]


@NEEDS_EMULATION
def test_tensors_of_a_gpu_that_is_not_the_current_one_are_launched_there(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, pool = layer_and_pool("gdn")
    slots = pool.slot_tensor(pool.alloc(2))
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(chosen.append(device)))
    for current in (None, 1):
        monkeypatch.setattr(launch, "current_device", lambda current=current: current)
        inputs = layer.draw(2)
        y = layer.decode(inputs, **pool.state_args(0), slots=slots)
        assert relative_error(y, layer.reference(inputs, layer.zero_state(2))[1]) < 1e-6
    assert chosen == [slots.device]
    assert done.count("launch") == 2


class SeesFunctions(TorchFunctionMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class SeesOperators(TorchDispatchMode):
    """Notes what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@NEEDS_EMULATION
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.usefixtures("look_of")
def test_who_watches_sees_the_operator(window: int, done: list[str]) -> None:
    """Modes, tracers, transforms and a graph of autograd do, before and after a call that went the short way.

    Not so the mode of a default device: an operator makes its tensors where the others are.
    """
    layer, pool = layer_and_pool("gdn")
    slots, name = pool.slot_tensor(pool.alloc(2)), "gdn_verify" if window else "gdn_decode"
    inputs = layer.draw_window(2, window) if window else layer.draw(2)
    state = pool.verify_args(0) if window else pool.state_args(0)
    run = layer.verify if window else layer.decode

    def call(**changed: Tensor) -> Tensor:
        return run({**inputs, **changed}, **state, slots=slots)

    for _ in range(2):
        for mode in (SeesFunctions(), SeesOperators()):
            with mode:
                call()
            assert any(f"replayssm.{name}" in what or what == name for what in mode.seen), mode.seen
        graph = make_fx(lambda q: call(q=q))(inputs["q"])
        assert any(f"replayssm.{name}" in str(node.target) for node in graph.graph.nodes)
        with pytest.raises(RuntimeError, match=f"replayssm::{name}"):
            torch.func.vmap(lambda q, pairs: call(q=q))(torch.stack([inputs["q"]] * 2), torch.zeros(2))
        assert call(q=inputs["q"].clone().requires_grad_()).requires_grad
        with torch.no_grad():
            assert not call(q=inputs["q"].clone().requires_grad_()).requires_grad
        with torch.inference_mode():
            assert call().is_inference()
        for context in (nullcontext(), torch.device("cpu")):
            with context:
                call()
                done.clear()
                call()
            assert done == ["launch"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another dtype": ({"k": torch.zeros(2, 1, 64).half()}, "k has dtype float16: float32 is wanted"),
    "another shape": ({"q": torch.zeros(2, 1, 63)}, r"q has shape \[2, 1, 63\]"),
    "another batch": ({"a": torch.zeros(3, 2)}, r"a has shape \[3, 2\]"),
    "another device": ({"b": torch.zeros(2, 2, device="meta")}, "b is on meta: cpu is wanted"),
    "parameters of another layer": ({"A_log": torch.zeros(3)}, r"A_log has shape \[3\]"),
    "no tensor": ({"v": None}, "v is a NoneType"),
    "long slots": ({"slots": torch.zeros(2).long()}, "slots has dtype int64"),
    "slots twice": ({"slots": torch.zeros(2).int()}, "slots holds 0 more than once"),
    "flags of another batch": ({"force_flush": torch.zeros(3).bool()}, r"force_flush has shape \[3\]"),
    "a period of 3.0": ({"flush_period": 3.0}, "flush_period is 3.0"),
    "a longer period": ({"flush_period": 4}, "flush_period is 4"),
    "another backend": ({"backend": "tpu"}, "backend 'tpu' is unknown"),
}


@NEEDS_EMULATION
@pytest.mark.usefixtures("done", "look_of")
def test_a_wrong_call_is_refused_behind_a_right_one() -> None:
    layer, pool = layer_and_pool("gdn")
    args = {**layer.draw(2), "A_log": layer.A_log, "dt_bias": layer.dt_bias, **pool.state_args(0)}
    args["slots"] = pool.slot_tensor(pool.alloc(2))
    for change, message in BAD.values():
        ops.gdn_decode(**args)
        with pytest.raises(ValueError, match=message):
            ops.gdn_decode(**{**args, **change})


BAD_WINDOWS: dict[str, tuple[dict[str, Any], str]] = {
    "one token less": ({"k": torch.zeros(2, 1, 1, 64)}, r"k has shape \[2, 1, 1, 64\]"),
    "more tokens than T": ({"num_tokens": int32([3, 1])}, r"num_tokens\[0\] is 3: a number from 0 to 2"),
    "long counts": ({"num_tokens": torch.ones(2).long()}, "num_tokens has dtype int64"),
    "its own parent": ({"parents": int32([[-1, 1], [-1, 0]])}, r"parents\[0, 1\] is 1"),
    "slots twice": ({"slots": int32([0, 0])}, "slots holds 0 more than once"),
    "no tensor": ({"v": None}, "v is a NoneType"),
}


@NEEDS_EMULATION
@pytest.mark.usefixtures("done")
def test_a_wrong_window_is_refused_behind_a_right_one() -> None:
    layer, pool = layer_and_pool("gdn")
    args = {**layer.draw_window(2, 2), "A_log": layer.A_log, "dt_bias": layer.dt_bias, **pool.verify_args(0)}
    args["slots"] = pool.slot_tensor(pool.alloc(2))
    for rows in ({}, {"num_tokens": int32([2, 1])}, {"parents": int32([[-1, 0], [-1, -1]])}):
        ops.gdn_verify(**args, **rows)
    for change, message in BAD_WINDOWS.values():
        with pytest.raises(ValueError, match=message):
            ops.gdn_verify(**{**args, **change})


@pytest.mark.skipif(find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_the_short_way_of_triton_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the whole way, which it doesn't take: with flags that come and go, and tensors that don't lie densely."""
    from replayssm.backends import triton

    layer = Layer(kind, 1, 1 if kind.startswith("kda") else 2, 8, 8, backend="triton")
    pools = [ReplayPool([layer.spec], 3, ring_len=2, backend="triton") for _ in range(2)]
    slots = pools[0].slot_tensor(pools[0].alloc(2))
    pools[1].alloc(2)
    whole_way = triton.decode_step
    taken: list[int] = []
    monkeypatch.setattr(triton, "decode_step", lambda *args: (taken.append(len(args)), whole_way(*args))[1])
    for step in range(3):
        force = torch.tensor([False, True]) if step == 2 else None
        inputs = {name: torch.stack([x, x], dim=1)[:, 1] for name, x in layer.draw(2).items()}
        outputs = []
        for pool, watched in zip(pools, (True, False), strict=True):
            layer.A_log.requires_grad_(watched)
            outputs.append(layer.decode(inputs, **pool.state_args(0), slots=slots, force_flush=force))
            pool.advance(slots, force)
        assert torch.equal(*outputs)
    assert len(taken) == 3
    assert torch.equal(*(pool.read_state(0, [0, 1]) for pool in pools))
    with pytest.raises(ValueError, match="slots holds 0 more than once"):
        layer.decode(inputs, **pools[1].state_args(0), slots=torch.zeros_like(slots))
