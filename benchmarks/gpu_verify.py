"""Verify windows on a GPU: microseconds per call of one layer, against one-token decodes of the same run.

Cursors are staggered over the ring, so that each call holds its share of folds, and stand still. A CUDA graph walks
several pools in turn, together beyond the L2 cache; the time is divided by the calls, the median of 24 replays.

Usage: python -m benchmarks.gpu_verify [--batch 8 32 128 256] [--tokens 1 4 8] --output FILE
"""

import argparse
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import triton

from replayssm import LayerSpec, ReplayPool, ops
from replayssm.bench.timing import read_bandwidth, recorded, time_in_turns
from replayssm.bench.workload import shape_name

SHAPES = {
    "gdn": LayerSpec("head", "delta", 16, 32, 128, 128),
    "kda": LayerSpec("channel", "delta", 32, 32, 128, 128),
    "mamba2": LayerSpec("head", "additive", 8, 128, 128, 64),
}
RING_LEN = 16
WORKING_SET = 400e6  # bytes of checkpoint that a graph walks
CUDA = torch.device("cuda")


class Layer:
    """One layer's pool, every slot at its own cursor, and a window for each."""

    def __init__(self, op: str, batch: int, state_dtype: torch.dtype, tokens: int) -> None:
        self.op, spec, rows = op, SHAPES[op], RING_LEN + tokens - 1
        dtypes: dict[str, Any] = {"state_dtype": state_dtype, "activation_dtype": torch.bfloat16}
        self.pool = ReplayPool([spec], batch, ring_len=RING_LEN, ring_capacity=rows, device=CUDA, **dtypes)
        self.slots = self.pool.slot_tensor(self.pool.alloc(batch))
        state = self.pool.fold_args(0)
        for name in ("checkpoint", "ring_u", "ring_k"):
            state[name].normal_()
        state["ring_g"].fill_(-0.05)
        self.pool.write_pos.copy_(torch.arange(batch) * tokens % (rows + 1 if tokens > 1 else RING_LEN))
        self.num_tokens = torch.full((batch,), tokens, dtype=torch.int32, device=CUDA)
        h_k, h_v, d_k, d_v = spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
        gate = (h_v, d_k) if op == "kda" else (h_v,)
        per_head = torch.zeros(h_v, device=CUDA)

        def new(*shape: int) -> torch.Tensor:
            return torch.randn(batch, tokens, *shape, device=CUDA, dtype=torch.bfloat16)

        if op == "mamba2":
            self.inputs: tuple[torch.Tensor, ...] = (new(h_v, d_v), new(h_v), new(h_k, d_k), new(h_k, d_k))
            self.parameters = {"A": per_head - 1, "D": per_head, "dt_bias": per_head}
        else:
            self.inputs = (new(h_k, d_k), new(h_k, d_k), new(h_v, d_v), new(*gate), new(h_v))
            self.parameters = {"A_log": per_head, "dt_bias": torch.zeros(gate, device=CUDA)}

    def verify(self) -> None:
        operator = getattr(ops, f"{self.op}_verify")
        where = {"slots": self.slots, "num_tokens": self.num_tokens}
        operator(*self.inputs, **self.parameters, **self.pool.verify_args(0), **where)

    def decode(self) -> None:
        operator = getattr(ops, f"{self.op}_decode")
        first = (x[:, 0] for x in self.inputs)
        operator(*first, **self.parameters, **self.pool.state_args(0), slots=self.slots)


def walk_of(layers: list[Layer], step: Callable[[Layer], None]) -> Callable[[], None]:
    def walk() -> None:
        for layer in layers:
            step(layer)

    walk()
    return recorded(walk, CUDA)


def measure(op: str, batch: int, state_dtype: torch.dtype, tokens: int) -> list[dict[str, Any]]:
    """A row for the window, and for T = 1 one for the decode."""
    spec = SHAPES[op]
    state_bytes = spec.num_v_heads * spec.head_v_dim * spec.head_k_dim * state_dtype.itemsize * batch
    layers = [Layer(op, batch, state_dtype, tokens) for _ in range(max(2, min(24, round(WORKING_SET / state_bytes))))]
    steps = {f"{op}_verify": Layer.verify} | ({f"{op}_decode": Layer.decode} if tokens == 1 else {})
    times = time_in_turns([walk_of(layers, step) for step in steps.values()], 24, CUDA)
    rows = []
    for name, seconds in zip(steps, times, strict=True):
        tenths = [x * 1e6 / len(layers) for x in quantiles(seconds, n=10)]
        row = {"op": name, "contender": "replayssm/triton", "batch": batch, "ring_len": RING_LEN, "window": tokens}
        row |= {"state_dtype": str(state_dtype).removeprefix("torch."), "shape": shape_name(spec)}
        rows.append(row | {"us": round(tenths[4], 2), "us_p10": round(tenths[0], 2), "us_p90": round(tenths[8], 2)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 32, 128, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for op in SHAPES:
        for state_dtype in (torch.float32, torch.bfloat16):
            for batch in options.batch:
                for tokens in options.tokens:
                    for row in measure(op, batch, state_dtype, tokens):
                        rows.append(row)
                        print(f"{row['op']:14} {row['state_dtype']:8} B={batch:<4} T={tokens:<3} {row['us']:8.1f} us")
    about = {"suite": "verify", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {"triton": triton.__version__, "date": datetime.now(UTC).date().isoformat()}
    about |= {"read_tbps": round(read_bandwidth(CUDA) / 1e12, 3)}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(f'{{"meta": {json.dumps(about)},\n "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
