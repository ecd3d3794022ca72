"""Decode kernels on a GPU: microseconds per call against the memory roofline.

A call is one layer's step. A CUDA graph walks several pools in turn, together beyond the L2 cache, with staggered
cursors, so that each step holds its share of flushes; the time is divided by the calls, the median of many replays.

Usage: python -m benchmarks.gpu_decode [--batch 1 8 32 64 128 256 512] [--ring-len 16] --output FILE
"""

import argparse
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import triton

from replayssm import LayerSpec, ReplayPool, ops

SHAPES = {
    "gdn": LayerSpec("head", "delta", 16, 32, 128, 128),
    "kda": LayerSpec("channel", "delta", 32, 32, 128, 128),
    "mamba2": LayerSpec("head", "additive", 8, 128, 128, 64),
}
WORKING_SET = 400e6  # bytes of checkpoint that a graph walks, well over the L2 cache


def read_bandwidth() -> float:
    """Bytes per second of a large reduction."""
    data = torch.ones(2**30, device="cuda")
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return data.nbytes / sorted(times)[len(times) // 2]


class Layer:
    """One layer's pool and inputs, every slot at its own cursor."""

    def __init__(self, op: str, batch: int, state_dtype: torch.dtype, ring_len: int) -> None:
        spec = SHAPES[op]
        self.op = op
        self.pool = ReplayPool(
            [spec],
            batch,
            ring_len=ring_len,
            state_dtype=state_dtype,
            activation_dtype=torch.bfloat16,
            device="cuda",
            backend="triton",
        )
        self.slots = self.pool.slot_tensor(self.pool.alloc(batch))
        for tensor in list(self.pool.fold_args(0).values())[:3]:
            tensor.normal_()
        self.pool.fold_args(0)["ring_g"].fill_(-0.05)
        self.pool.write_pos.copy_(torch.arange(batch) % ring_len)

        def new(*shape: int) -> torch.Tensor:
            return torch.randn(batch, *shape, device="cuda", dtype=torch.bfloat16)

        h_k, h_v, d_k, d_v = spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
        per_head = torch.zeros(h_v, device="cuda")
        if op == "mamba2":
            self.inputs = (new(h_v, d_v), new(h_v), new(h_k, d_k), new(h_k, d_k))
            self.parameters = {"A": per_head - 1, "D": per_head, "dt_bias": per_head}
        else:
            gate = (h_v, d_k) if op == "kda" else (h_v,)
            self.inputs = (new(h_k, d_k), new(h_k, d_k), new(h_v, d_v), new(*gate), new(h_v))
            self.parameters = {"A_log": per_head, "dt_bias": torch.zeros(gate, device="cuda")}

    def step(self) -> None:
        operator = getattr(ops, f"{self.op}_decode")
        operator(*self.inputs, **self.parameters, **self.pool.state_args(0), slots=self.slots)
        self.pool.advance(self.slots)

    def bytes_moved(self, ring_len: int) -> float:
        """Checkpoint read, its share of flushes written, records read on average, one appended."""
        size = self.pool.bytes_of(0)
        per_row = size.checkpoint * (1 + 1 / ring_len) + size.record * ((ring_len - 1) / 2 + (ring_len - 1) / ring_len)
        return per_row * len(self.slots)


def advance_only(layers: list[Layer]) -> None:
    for layer in layers:
        layer.pool.advance(layer.slots)


def microseconds(step: Any, calls: int, replays: int = 40) -> list[float]:
    """Time of one call in each replay of a graph with `calls` calls."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return times


def measure(op: str, batch: int, state_dtype: torch.dtype, ring_len: int, bandwidth: float) -> dict[str, Any]:
    spec = SHAPES[op]
    state_bytes = spec.num_v_heads * spec.head_v_dim * spec.head_k_dim * state_dtype.itemsize * batch
    layers = [Layer(op, batch, state_dtype, ring_len) for _ in range(max(2, min(24, round(WORKING_SET / state_bytes))))]

    def walk() -> None:
        for layer in layers:
            layer.step()

    # A model advances its cursors once for all layers: their time is measured and taken off.
    cursors = sorted(microseconds(lambda: advance_only(layers), len(layers)))
    moved = cursors[len(cursors) // 2]
    times = [t - moved for t in microseconds(walk, len(layers))]
    tenths = quantiles(times, n=10)
    return {
        "op": f"{op}_decode",
        "contender": "replayssm/triton",
        "batch": batch,
        "state_dtype": str(state_dtype).removeprefix("torch."),
        "ring_len": ring_len,
        "window": 1,
        "shape": f"k{spec.num_k_heads} v{spec.num_v_heads} {spec.head_v_dim}x{spec.head_k_dim}",
        "us": round(tenths[4], 2),
        "us_p10": round(tenths[0], 2),
        "us_p90": round(tenths[8], 2),
        "roofline_us": round(layers[0].bytes_moved(ring_len) / bandwidth * 1e6, 2),
        "advance_us": round(moved, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256, 512])
    parser.add_argument("--ring-len", type=int, nargs="+", default=[16])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    bandwidth = read_bandwidth()
    rows = []
    for op in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for ring_len in options.ring_len:
                for batch in options.batch:
                    row = measure(op, batch, dtype, ring_len, bandwidth)
                    rows.append(row)
                    name = f"{op:6} {row['state_dtype']:8} B={batch:<4} L={ring_len:<3}"
                    print(f"{name} {row['us']:8.1f} us  roofline/time {row['roofline_us'] / row['us']:.2f}", flush=True)
    git = subprocess.run(("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False)
    meta = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "read_tbps": round(bandwidth / 1e12, 3),
    }
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    options.output.write_text(f'{{"meta": {json.dumps(meta)},\n "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
