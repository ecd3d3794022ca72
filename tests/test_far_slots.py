"""Slots and rows more than 2³¹ elements apart: the Triton kernels count in 64 bits.

Where 32 bits would lead, 2³² elements before the right place, there is memory as well, so that a kernel that counts in
32 bits gives wrong numbers instead of ending the process.
"""

# ruff: noqa: F811 - a fixture that is imported is named again by the tests that ask for it

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from far_memory import reserved
from oracle import KINDS, Layer, relative_error
from test_triton import place  # noqa: F401 - a fixture
from torch import Tensor

from replayssm import ops

pytest.importorskip("triton")

PAGE = 2**16
#: far slot, and elements between one slot and the next
FAR = {"a stride of 2^31": (1, 2**31 + 64), "a slot number of 2^15": (2**15 + 1, PAGE)}


@contextmanager
def memory_at(places: list[int], device: str) -> Iterator[Tensor]:
    """A tensor that can be used in a page from each of the places on; the first of them is 0."""
    before = 2**32 - min(place for place in places if place >= 2**31)
    wrapped = [before + place - 2**32 for place in places if place >= 2**31]
    used = [(at, PAGE) for at in [*wrapped, *(before + place for place in places)]]
    with reserved(before + max(places) + PAGE, used, device) as memory:
        yield memory[before:]


def pages(memory: Tensor, num_slots: int, stride: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Each slot's tensors side by side in a page, a page every ``stride`` elements."""
    views, offset = {}, 0
    for name, shape in shapes.items():
        inner = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        views[name] = memory[offset:].as_strided((num_slots, *shape), (stride, *inner))
        offset += math.prod(shape)
    assert offset < PAGE
    return views


@pytest.mark.parametrize("where", FAR)
@pytest.mark.parametrize("kind", KINDS)
def test_decode_read_and_materialize(kind: str, where: str, place: dict[str, str]) -> None:
    far, stride = FAR[where]
    layer = Layer(kind, 1, 1, 8, 8, **place)
    device, spec = layer.device, layer.spec
    shapes = {"checkpoint": (1, 8, 8), "ring_u": (1, 3, 8), "ring_k": (1, 3, 8), "ring_g": (1, 3, *spec.gate_shape)}
    with torch.no_grad(), memory_at([0, far * stride], device) as memory:
        state = pages(memory, far + 1, stride, shapes)
        cursors = {
            "write_pos": torch.zeros(far + 1, dtype=torch.int32, device=device),
            "checkpoint_slot": torch.arange(far + 1, dtype=torch.int32, device=device),
        }
        every = {**state, **cursors, "backend": "triton"}
        slots = torch.tensor([far, 0], dtype=torch.int32, device=device)
        exact = layer.zero_state(2)
        for _ in range(7):
            inputs = layer.draw(2)
            y = layer.decode(inputs, **every, slots=slots, flush_period=3)
            ops.advance(**cursors, slots=slots, flush_period=3, backend="triton")
            exact, expected = layer.reference(inputs, exact)
            assert relative_error(y, expected) < 1e-6
            assert relative_error(ops.read_state(**every, slots=slots), exact) < 1e-6
        assert cursors["write_pos"][[far, 0]].tolist() == [1, 1]
        ops.materialize(**every, src=slots[:1], dst=slots[1:])
        assert relative_error(state["checkpoint"][0], exact[0]) < 1e-6
        ops.materialize(**every, src=slots[:1], dst=slots[:1])
        assert relative_error(state["checkpoint"][far], exact[0]) < 1e-6


@pytest.mark.parametrize("where", [*FAR, "columns", "rows"])
def test_convolution(where: str, place: dict[str, str]) -> None:
    """Slots far apart; a state whose columns are 2³⁰ elements apart; inputs whose rows are far apart."""
    device = place["device"]
    rng = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=rng).to(device) for shape in ((2, 100), (100, 4)))
    far, stride = FAR.get(where, (1, 300))
    places = {"columns": [0, 2**30, 2**31], "rows": [0, 2**31]}.get(where, [0, far * stride])
    slots = torch.tensor([far, 0], dtype=torch.int32, device=device)
    with torch.no_grad(), memory_at(places, device) as memory:
        given, state = x, torch.zeros(2, 100, 3, device=device)
        if where == "rows":
            given = memory.as_strided((2, 100), (2**31, 1)).copy_(x)
        elif where == "columns":
            state = memory.as_strided((2, 100, 3), (100, 1, 2**30))
        else:
            state = memory.as_strided((far + 1, 100, 3), (stride, 3, 1))
        expected_state = torch.zeros(2, 100, 3, device=device)
        both = torch.arange(2, dtype=torch.int32, device=device)
        for _ in range(3):
            y = ops.causal_conv1d_update(given, state, weight, slots=slots, backend="triton")
            expected = ops.causal_conv1d_update(x, expected_state, weight, slots=both, backend="torch")
            assert relative_error(y, expected) < 1e-6
        assert torch.equal(torch.stack([state[far], state[0]]), expected_state)


def test_a_convolution_window_and_what_is_accepted_of_it(place: dict[str, str]) -> None:
    """A state and a window whose columns are 2³⁰ elements apart."""
    device = place["device"]
    rng = torch.Generator().manual_seed(1)
    x, weight, near = (torch.randn(*shape, generator=rng).to(device) for shape in ((1, 3, 100), (100, 4), (1, 100, 3)))
    slots, count, taken = (torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 3, 2))
    rings = [torch.zeros(1, 1, 4, 8, device=device), torch.zeros(1, 1, 4, 8, device=device)]
    rings.append(torch.zeros(1, 1, 4, device=device))
    with torch.no_grad(), memory_at([0, 2**30, 2**31], device) as memory:
        far = memory.as_strided((1, 100, 3), (100, 1, 2**30)).copy_(near)
        far_window = memory[1000:].as_strided((1, 100, 3), (100, 1, 2**30))
        window = torch.zeros(1, 100, 3, device=device)
        y = ops.causal_conv1d_verify(x, far, far_window, weight, slots=slots, num_tokens=count, backend="triton")
        expected = ops.causal_conv1d_verify(x, near, window, weight, slots=slots, num_tokens=count, backend="torch")
        assert relative_error(y, expected) < 1e-6
        assert torch.equal(far_window, window)
        numbers = {"write_pos": torch.zeros_like(slots), "slots": slots, "num_tokens": count, "num_accepted": taken}
        ops.accept(*rings, conv_state=far, conv_window=far_window, **numbers, backend="triton")
        ops.accept(*rings, conv_state=near, conv_window=window, **numbers, backend="torch")
        assert torch.equal(far, near)
