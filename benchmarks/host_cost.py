"""What one eager operator call costs the host: Python, checks, packing of arguments and the launch.

Usage: python -m benchmarks.host_cost [--op gdn,kda,mamba2] [--backend cuda,triton] [--calls 2000] [--output FILE]
       python -m benchmarks.host_cost --without-launch [--profile]

On a GPU it times calls one after another, several layers in turn, without waiting for the device; the batch is one
row, so that the device is faster than the host. With `--without-launch` it runs on a CPU: the cuda backend's code, on
tensors of the CPU, with a launch that does nothing. `--profile` prints where Python spends its time.

The first call of each layer is timed, too: with an empty cache folder (XDG_CACHE_HOME) it compiles, in the next process
it reads what was compiled.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from replayssm import ReplayPool, ops
from replayssm.backends.cuda import launch
from replayssm.bench.workload import SHAPES, Workload
from replayssm.ops import decode as decode_ops
from replayssm.ops import dispatch

NUM_LAYERS = 4
RING_LEN = 16
ROUNDS = 6
DTYPE = torch.bfloat16

Call = Callable[[], Any]


@contextmanager
def without_launch() -> Iterator[None]:
    """Let the cuda backend take tensors of a CPU, and do everything but the launch."""
    reason_of = dispatch.unavailable_reason

    def unavailable_reason(backend: str, device: object = None) -> str | None:
        return None if backend == "cuda" else reason_of(backend, device)

    about = launch.Properties(132, 227 * 1024, "sm_90a")
    stubs: tuple[tuple[Any, str, Any], ...] = (
        (dispatch, "unavailable_reason", unavailable_reason),
        (launch, "properties", lambda *_: about),
        (launch, "kernel", lambda *_: lambda *_: None),
        (launch, "current_stream", lambda *_: 0),
        (launch, "is_current", lambda *_: True),
        # Slots of a GPU aren't read; these are, as they lie on a CPU.
        (decode_ops, "check_slots_on_host", lambda *_: None),
    )
    with ExitStack() as stack:
        for place, name, stub in stubs:
            stack.enter_context(patch.object(place, name, stub))
        yield


def workload_of(kind: str, device: torch.device) -> Workload:
    """A step of one row."""
    return Workload(kind, SHAPES[kind], 1, torch.float32, RING_LEN, DTYPE, device, calls=1)


def calls_of(kind: str, backend: str, device: torch.device) -> list[Call]:
    """One call for each of several layers, with inputs that are new tensors each time, as a model's are."""
    pool = ReplayPool(
        [SHAPES[kind]] * NUM_LAYERS, 2, ring_len=RING_LEN, activation_dtype=DTYPE, device=device, backend=backend
    )
    slots = pool.slot_tensor(pool.alloc(1))
    operator = getattr(ops, f"{kind}_decode")
    workload = workload_of(kind, device)
    inputs, parameters = tuple(workload.inputs().values()), workload.parameters()  # in the operator's order
    views = [partial(operator, **parameters, **pool.state_args(layer), slots=slots) for layer in range(NUM_LAYERS)]
    return [lambda call=call: call(*(x[:] for x in inputs)) for call in views]  # type: ignore[misc]


def microseconds(calls: list[Call], count: int, device: torch.device) -> float:
    """Processor time of one call: of the fastest of several rounds."""
    times = []
    for _ in range(ROUNDS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.thread_time()
        for _ in range(count // len(calls)):
            for call in calls:
                call()
        times.append((time.thread_time() - start) / (count // len(calls) * len(calls)))
    return 1e6 * min(times)


def first_call(call: Call, device: torch.device) -> float:
    """Milliseconds: the kernel is compiled, or read from the cache."""
    start = time.perf_counter()
    with torch.inference_mode():
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - start), 1)


def measured(kind: str, backend: str, device: torch.device, count: int) -> dict[str, Any]:
    calls = calls_of(kind, backend, device)
    first = first_call(calls[0], device)
    inputs = tuple(workload_of(kind, device).inputs().values())
    views: list[Call] = [lambda: [x[:] for x in inputs]]
    with torch.inference_mode():
        taken = microseconds(calls, count, device) - microseconds(views, count, device)
    with torch.enable_grad():
        watched = microseconds(calls, count, device) - microseconds(views, count, device)
    about = {"op": f"{kind}_decode", "backend": backend, "first_call_ms": first}
    return about | {"us": round(taken, 2), "us_with_grad": round(watched, 2)}


def described(row: dict[str, Any]) -> str:
    watched, first = f"{row['us_with_grad']} µs where autograd looks on", f"first call {row['first_call_ms']} ms"
    return f"{row['op']} {row['backend']}: {row['us']} µs, {watched}, {first}"


def profile(kind: str, device: torch.device) -> None:
    calls = calls_of(kind, "cuda", device)
    profiler = cProfile.Profile()
    with torch.inference_mode():
        calls[0]()
        with profiler:
            for _ in range(5000):
                calls[0]()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="gdn,kda,mamba2")
    parser.add_argument("--backend", default="cuda,triton")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--without-launch", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device = torch.device("cpu") if given.without_launch else torch.device("cuda", 0)
    backends = ["cuda"] if given.without_launch else given.backend.split(",")
    rows = []
    with without_launch() if given.without_launch else ExitStack():
        for kind in given.op.split(","):
            for name in backends:
                rows.append(measured(kind, name, device, given.calls))
                print(described(rows[-1]), flush=True)
        if given.profile:
            profile(given.op.split(",")[0], device)
    if given.output is not None:
        given.output.write_text(json.dumps({"device": device.type, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
