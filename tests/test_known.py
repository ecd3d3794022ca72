"""Calls that look like one which has passed the checks skip them; no other call does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import emulated_cuda
import pytest
import torch
from oracle import KINDS, Layer, relative_error

from replayssm import ReplayPool
from replayssm.backends.cuda import decode, launch
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
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the cuda backend does from now on: "plan" and "start"."""
    emulated_cuda.install(monkeypatch)
    done: list[str] = []
    for place, name in ((decode, "_plan"), (launch, "start")):
        function = getattr(place, name)

        def noted(*args: object, name: str = name, function: Callable[..., object] = function) -> object:
            done.append(name.strip("_"))
            return function(*args)

        monkeypatch.setattr(place, name, noted)
    return done


def layer_and_pool(kind: str) -> tuple[Layer, ReplayPool]:
    layer = Layer(kind, 1, 1 if kind.startswith("kda") else 2, 64, 16, backend="cuda")
    return layer, ReplayPool([layer.spec] * 2, 2, ring_len=3, backend="cuda")


SOME_KINDS = [pytest.param(kind, marks=[] if kind in ("gdn", "mamba2") else pytest.mark.thorough) for kind in KINDS]


@NEEDS_EMULATION
@pytest.mark.parametrize("kind", SOME_KINDS)
@pytest.mark.usefixtures("look_of")
def test_a_call_that_looks_the_same_is_a_launch_and_nothing_else(kind: str, launches: list[str]) -> None:
    """With the same outputs and states, also for other tensors, and for a flag that comes and goes."""
    layer, pool = layer_and_pool(kind)
    rows = pool.alloc(2)
    slots = pool.slot_tensor(rows)
    states = [layer.zero_state(2) for _ in range(2)]
    with torch.no_grad():
        for step in range(4):
            force = torch.tensor([False, True]) if step == 2 else None
            for index in range(2):
                before = len(launches)
                inputs = layer.draw(2)
                y = layer.decode(inputs, **pool.state_args(index), slots=slots, force_flush=force)
                states[index], expected = layer.reference(inputs, states[index])
                assert relative_error(y, expected) < 1e-6
                is_new = index == 0 and step in (0, 2)
                assert launches[before:] == (["plan", "start"] if is_new else ["start"])
            pool.advance(slots, force)
        for index in range(2):
            assert relative_error(pool.read_state(index, rows), states[index]) < 1e-6


@NEEDS_EMULATION
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_a_tensor_that_lies_elsewhere_in_memory_is_noticed(kind: str, launches: list[str]) -> None:
    """One that begins where the kernels' copies can't looks the same; the other backend takes it."""
    layer, pool = layer_and_pool(kind)
    slots = pool.slot_tensor(pool.alloc(2))
    state = layer.zero_state(2)
    args = pool.state_args(0)
    moved = torch.zeros(args["checkpoint"].numel() + 1)[1:].view_as(args["checkpoint"])
    with torch.no_grad():
        for checkpoint in (args["checkpoint"], moved):
            inputs = layer.draw(2)
            y = layer.decode(inputs, **{**args, "checkpoint": checkpoint}, slots=slots)
            assert relative_error(y, layer.reference(inputs, state)[1]) < 1e-6
    assert launches == ["plan", "start"]


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
            with torch.set_grad_enabled(watched):
                outputs.append(layer.decode(inputs, **pool.state_args(0), slots=slots, force_flush=force))
            pool.advance(slots, force)
        assert torch.equal(*outputs)
    assert len(taken) == 3
    assert torch.equal(*(pool.read_state(0, [0, 1]) for pool in pools))
    with torch.no_grad(), pytest.raises(ValueError, match="slots holds 0 more than once"):
        layer.decode(inputs, **pools[1].state_args(0), slots=torch.zeros_like(slots))
