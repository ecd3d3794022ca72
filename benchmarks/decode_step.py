"""One decode step of one layer at released models' shapes: replay (averaged over a flush period) against transformers.

Usage: python -m benchmarks.decode_step [--batch 1 4] [--threads 1] [--seconds 1.0]
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from replayssm import LayerSpec, ReplayPool, ops

Step = Callable[[], Any]
Steps = tuple[Step, Step]


@dataclass(frozen=True)
class Shape:
    """A released model's recurrent layer."""

    name: str
    kind: str
    spec: LayerSpec


SHAPES = (
    Shape("Qwen3.5-35B-A3B", "gdn", LayerSpec("head", "delta", 16, 32, 128, 128)),
    Shape("OLMo-hybrid", "gdn", LayerSpec("head", "delta", 30, 30, 96, 192)),
    Shape("Kimi-Linear-48B-A3B", "kda", LayerSpec("channel", "delta", 32, 32, 128, 128)),
    Shape("Nemotron-3-Nano-30B", "mamba2", LayerSpec("head", "additive", 8, 64, 128, 64)),
    Shape("Falcon-H1-1.5B", "mamba2", LayerSpec("head", "additive", 1, 48, 256, 64)),
)


def gdn_steps(spec: LayerSpec, batch: int, pool: ReplayPool, slots: torch.Tensor) -> Steps:
    """Transformers' step and replay's, on the same inputs."""
    h_k, h_v = spec.num_k_heads, spec.num_v_heads
    q, k = torch.randn(2, batch, h_k, spec.head_k_dim)
    v, a, b = torch.randn(batch, h_v, spec.head_v_dim), torch.randn(batch, h_v), torch.randn(batch, h_v)
    A_log, dt_bias = torch.zeros(h_v), torch.zeros(h_v)
    state = torch.zeros(batch, h_v, spec.head_k_dim, spec.head_v_dim)

    def upstream() -> Any:
        g = -A_log.exp() * F.softplus(a + dt_bias)
        wide_q, wide_k = (x.repeat_interleave(h_v // h_k, dim=1).unsqueeze(1) for x in (q, k))
        args = (wide_q, wide_k, v.unsqueeze(1), g.unsqueeze(1), b.sigmoid().unsqueeze(1))
        return torch_recurrent_gated_delta_rule(*args, state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def replay() -> Any:
        return ops.gdn_decode(q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, slots=slots, **pool.state_args(0))

    return upstream, replay


def kda_steps(spec: LayerSpec, batch: int, pool: ReplayPool, slots: torch.Tensor) -> Steps:
    """Transformers' step and replay's, on the same inputs."""
    heads, d_k = spec.num_v_heads, spec.head_k_dim
    q, k, a = torch.randn(3, batch, heads, d_k)
    v, b = torch.randn(batch, heads, spec.head_v_dim), torch.randn(batch, heads)
    A_log, dt_bias = torch.zeros(heads), torch.zeros(heads, d_k)
    state = torch.zeros(batch, heads, d_k, spec.head_v_dim)

    def upstream() -> Any:
        g = -A_log.exp()[:, None] * F.softplus(a + dt_bias)
        args = (x.unsqueeze(1) for x in (q, k, v, g, b.sigmoid()))
        return recurrent_kimi_delta_attention(*args, state, output_final_state=True, use_qk_l2norm_in_kernel=True)

    def replay() -> Any:
        return ops.kda_decode(q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, slots=slots, **pool.state_args(0))

    return upstream, replay


def mamba2_steps(spec: LayerSpec, batch: int, pool: ReplayPool, slots: torch.Tensor) -> Steps:
    """Transformers' step and replay's, on the same inputs."""
    heads, groups, n = spec.num_v_heads, spec.num_k_heads, spec.head_k_dim
    x, dt = torch.randn(batch, heads, spec.head_v_dim), torch.randn(batch, heads)
    B, C = torch.randn(2, batch, groups, n)
    A, D, dt_bias = -torch.ones(heads), torch.ones(heads), torch.zeros(heads)
    state = torch.zeros(batch, heads, spec.head_v_dim, n)

    # Expanded over the head's channels, as Mamba2Mixer does.
    wide = [t[..., None].expand(*t.shape, spec.head_v_dim) for t in (dt, D, dt_bias)]
    wide_A = A[:, None, None].expand(-1, spec.head_v_dim, n)

    def upstream() -> Any:
        args = (state, x, wide[0], wide_A, B, C, wide[1])
        return mamba2_selective_state_update(*args, z=None, dt_bias=wide[2], dt_softplus=True)

    def replay() -> Any:
        return ops.mamba2_decode(x, dt, B, C, A=A, D=D, dt_bias=dt_bias, slots=slots, **pool.state_args(0))

    return upstream, replay


STEPS = {"gdn": gdn_steps, "kda": kda_steps, "mamba2": mamba2_steps}


def milliseconds(step: Step, seconds: float) -> float:
    """Mean time of one call, over about `seconds` after a warm-up."""
    for _ in range(3):
        step()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        step()
        calls += 1
    return (time.perf_counter() - start) / calls * 1e3


def measure(shape: Shape, batch: int, ring_len: int, seconds: float) -> dict[str, Any]:
    """One row of the table."""
    pool = ReplayPool([shape.spec], batch, ring_len=ring_len)
    slots = pool.slot_tensor(pool.alloc(batch))
    upstream, replay = STEPS[shape.kind](shape.spec, batch, pool, slots)

    def replay_and_advance() -> None:
        replay()
        pool.advance(slots)

    with torch.inference_mode():
        theirs, ours = milliseconds(upstream, seconds), milliseconds(replay_and_advance, seconds)
    return {
        "model": shape.name,
        "kind": shape.kind,
        "batch": batch,
        "ring_len": ring_len,
        "transformers_ms": round(theirs, 3),
        "replay_ms": round(ours, 3),
        "speedup": round(theirs / ours, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--ring-len", type=int, nargs="+", default=[16])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    rows = [
        measure(shape, batch, ring_len, options.seconds)
        for shape in SHAPES
        for batch in options.batch
        for ring_len in options.ring_len
    ]
    if options.json:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table(*rows[0], title=f"one decode step on a CPU, float32, {options.threads} threads")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
