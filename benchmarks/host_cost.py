"""What one eager operator call costs the host: Python, checks, packing of arguments and the launch.

Usage: python -m benchmarks.host_cost [--op gdn,kda,mamba2] [--backend cuda,triton] [--windows 1,4] [--calls 800]
       python -m benchmarks.host_cost --without-launch [--profile]

On a GPU it times each call by itself, several layers in turn, with inputs that are new tensors each time, as a model's
are; the median counts. All kernels were called before. The batch is one row, and every few calls the device is
waited for, so that the host never waits for room in the queue. With `--without-launch` it runs on a CPU: the cuda
backend's code, on tensors of the CPU, with a launch that does nothing. `--profile` prints where Python spends its time.

The first call of each kernel is timed, too: with an empty cache folder (XDG_CACHE_HOME) it compiles, in the next
process it reads what was compiled.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from replayssm import ReplayPool, ops
from replayssm.backends.cuda import launch
from replayssm.bench.workload import SHAPES, WindowWorkload, Workload
from replayssm.ops import decode as decode_ops
from replayssm.ops import dispatch
from replayssm.ops import verify as verify_ops

NUM_LAYERS = 4
RING_LEN = 16
QUEUED = 64  # calls between waits; a stream takes about a thousand
WARM_UP = 200
DTYPE = torch.bfloat16

#: How a call is watched: "grad" outside of `torch.no_grad`, with tensors that want no gradients; "grad of parameters"
#: with parameters that do, as in a model that may be trained.
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
    "grad of parameters": torch.enable_grad,
}

Call = Callable[..., Tensor]


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
        (launch, "current_stream", lambda _: 0),
        (launch, "current_device", lambda: None),
        # Slots of a GPU aren't read; these are, as they lie on a CPU.
        (decode_ops, "check_slots_on_host", lambda *_: None),
        (verify_ops, "check_window_on_host", lambda *_: None),
    )
    with ExitStack() as stack:
        for place, name, stub in stubs:
            stack.enter_context(patch.object(place, name, stub))
        yield


def workload_of(kind: str, tokens: int, device: torch.device) -> Workload:
    """A step of one row; a window of ``tokens`` tokens, if there are any."""
    about = (kind, SHAPES[kind], 1, torch.float32, RING_LEN, DTYPE, device)
    return WindowWorkload(*about, calls=1, tokens=tokens) if tokens else Workload(*about, calls=1)


def calls_of(workload: Workload, backend: str, *, trained: bool) -> list[Call]:
    """One for each of several layers, of the inputs."""
    tokens = workload.window if isinstance(workload, WindowWorkload) else 0
    device = workload.device
    pool = ReplayPool(
        [workload.spec] * NUM_LAYERS,
        2,
        ring_len=RING_LEN,
        ring_capacity=workload.ring_rows,
        max_window=tokens,
        activation_dtype=DTYPE,
        device=device,
        backend=backend,
    )
    operator = getattr(ops, workload.op)
    rows = {"slots": pool.slot_tensor(pool.alloc(1))}
    if tokens:
        rows["num_tokens"] = torch.full((1,), tokens, dtype=torch.int32, device=device)
    parameters = {name: x.requires_grad_(trained) for name, x in workload.parameters().items()}
    args_of = pool.verify_args if tokens else pool.state_args
    return [partial(operator, **parameters, **rows, **args_of(layer)) for layer in range(NUM_LAYERS)]


def microseconds(calls: list[Call], inputs: tuple[Tensor, ...], count: int) -> tuple[float, float]:
    """Of one call: the median, and the tenth part of the calls that had the least."""
    times = []
    for number in range(WARM_UP + count):
        if number % QUEUED == 0 and inputs[0].is_cuda:
            torch.cuda.synchronize()
        call, views = calls[number % len(calls)], [x[:] for x in inputs]
        start = time.perf_counter_ns()
        y = call(*views)  # and the output before is freed
        times.append(time.perf_counter_ns() - start)
    del y
    taken = statistics.quantiles(times[WARM_UP:], n=10)
    return round(taken[4] / 1e3, 2), round(taken[0] / 1e3, 2)


def first_call(call: Call, inputs: tuple[Tensor, ...]) -> float:
    """Milliseconds: the kernel is compiled, or read from the cache."""
    start = time.perf_counter()
    with torch.inference_mode():
        call(*inputs)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measured(kind: str, tokens: int, backend: str, device: torch.device, count: int) -> dict[str, Any]:
    """Times of one operator."""
    workload = workload_of(kind, tokens, device)
    inputs = tuple(workload.inputs().values())  # in the operator's order
    row: dict[str, Any] = {"op": workload.op, "window": workload.window, "backend": backend}
    for mode, context in MODES.items():
        calls = calls_of(workload, backend, trained=mode == "grad of parameters")
        row.setdefault("first_call_ms", round(first_call(calls[0], inputs), 1))
        with context():
            row[mode], row[f"{mode}, p10"] = microseconds(calls, inputs, count)
    return row


def described(row: dict[str, Any]) -> str:
    """A line of the table."""
    window = f" T={row['window']}" if row["op"].endswith("verify") else ""
    times = "".join(f"{row[mode]:12.2f} {row[f'{mode}, p10']:7.2f}" for mode in MODES)
    return f"{row['op'] + window} {row['backend']}".ljust(26) + times + f"{row['first_call_ms']:18}"


def profile(kind: str, device: torch.device) -> None:
    """Print where a decode step spends its time."""
    workload = workload_of(kind, 0, device)
    call, inputs = calls_of(workload, "cuda", trained=False)[0], tuple(workload.inputs().values())
    profiler = cProfile.Profile()
    with torch.inference_mode():
        call(*inputs)
        with profiler:
            for _ in range(5000):
                call(*inputs)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", default="gdn,kda,mamba2")
    parser.add_argument("--backend", default="cuda,triton")
    parser.add_argument("--windows", default="1,4", help="tokens of the verify windows")
    parser.add_argument("--calls", type=int, default=800)
    parser.add_argument("--without-launch", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    device = torch.device("cpu") if given.without_launch else torch.device("cuda", 0)
    backends = ["cuda"] if given.without_launch else given.backend.split(",")
    rows = []
    print(f"{'µs of the host, and p10':26}" + "".join(f"{mode:>20}" for mode in MODES) + f"{'first call, ms':>18}")
    with without_launch() if given.without_launch else nullcontext():
        for backend in backends:
            for kind in given.op.split(","):
                for tokens in (0, *map(int, filter(None, given.windows.split(",")))):
                    row = measured(kind, tokens, backend, device, given.calls)
                    rows.append(row)
                    print(described(row), flush=True)
        if given.profile:
            profile(given.op.split(",")[0], device)
    if given.output is not None:
        given.output.write_text(json.dumps({"device": device.type, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
