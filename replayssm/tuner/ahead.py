"""Kernels compiled before they are measured, on all cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

from replayssm.backends.cuda import blocks, build, decode, launch
from replayssm.backends.cuda.blocks import Block
from replayssm.tuner.search import Call


class Compilers:
    """Processes that compile; what fails there fails again where it is measured, and is dealt with there.

    Args:
        about: the GPU that kernels are for.
        workers: default as many as this process may use cores.
    """

    def __init__(self, about: launch.Properties, workers: int | None = None) -> None:
        self.about = about
        workers = workers or len(os.sched_getaffinity(0))
        self._pool = ProcessPoolExecutor(workers, get_context("spawn"))
        self._asked: set[tuple[tuple[str, str], ...]] = set()

    def compile(self, asked: Iterable[tuple[Call, Sequence[Block | None]]]) -> None:
        """Have the kernels of these calls and cuts in the cache folder."""
        wanted = {tuple(macros_of(call, block, self.about).items()) for call, cuts in asked for block in cuts}
        new = wanted - self._asked
        self._asked |= new
        wait([self._pool.submit(build.machine_code, dict(macros), self.about.architecture) for macros in new])

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def macros_of(call: Call, block: Block | None, about: launch.Properties) -> dict[str, str]:
    """What a kernel's source leaves open, for the tensors of :class:`replayssm.bench.workload.Workload`."""
    shape, activations = call.shape, call.activation_dtype
    block = block or usual_block(call, about)
    assert block is not None, "a layer with kernels has a cut"
    x, state, updates = (launch.TYPES[dtype] for dtype in (activations, call.state_dtype, call.ring_dtype))
    names: dict[str, Any] = {"C": state, "X": x, "U": updates, "A": x, "RATE": "float", "BIAS": "float"}
    names |= {"B": x if shape.delta else "none", "D": "none" if shape.delta else "float", "Z": "none"}
    flags = decode._ZERO_PADDING | (decode._L2_NORM if shape.delta else decode._SOFTPLUS)
    return decode.macros(shape, block, names | {"FLAGS": flags, "FORCE_BYTES": 0})


def usual_block(call: Call, about: launch.Properties) -> Block | None:
    """The cut that is chosen where none was measured."""
    rows = call.batch * call.spec.num_v_heads * call.spec.head_v_dim
    return blocks.choose(call.shape, call.activation_dtype, rows, about.multiprocessors, about.shared_bytes)
