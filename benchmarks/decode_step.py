"""One decode step of one layer at released models' shapes, on a CPU: replay against transformers' own step.

The two take turns call by call, so that both see the same machine. Replay's calls run through whole flush periods.

Usage: python -m benchmarks.decode_step [--batch 1 8] [--threads 1] [--periods 8] [--output FILE]
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.progress import track
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
    Shape("qwen3_5-tiny", "gdn", LayerSpec("head", "delta", 2, 4, 64, 64)),
    Shape("kimi_linear-tiny", "kda", LayerSpec("channel", "delta", 4, 4, 64, 64)),
    Shape("granite_hybrid-tiny", "mamba2", LayerSpec("head", "additive", 2, 6, 64, 64)),
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


def timed(step: Step) -> float:
    """Microseconds of one call."""
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e6


def measure(shape: Shape, batch: int, ring_len: int, periods: int) -> list[dict[str, Any]]:
    """One row for transformers and one for replay. A layer's share of moving the cursors is in replay's time."""
    pool = ReplayPool([shape.spec], batch, ring_len=ring_len)
    slots = pool.slot_tensor(pool.alloc(batch))
    upstream, replay = STEPS[shape.kind](shape.spec, batch, pool, slots)

    def replay_and_advance() -> None:
        replay()
        pool.advance(slots)

    with torch.inference_mode():
        for step in (upstream, replay_and_advance):
            for _ in range(ring_len):
                step()
        times = [(timed(upstream), timed(replay_and_advance)) for _ in range(periods * ring_len)]
    spec = shape.spec
    rows = []
    for contender, microseconds in zip(
        ("transformers/torch", f"replayssm/{pool.backend}"), zip(*times, strict=True), strict=True
    ):
        tenths = quantiles(microseconds, n=10)
        rows.append(
            {
                "op": f"{shape.kind}_decode",
                "contender": contender,
                "model": shape.name,
                "shape": f"k{spec.num_k_heads} v{spec.num_v_heads} {spec.head_v_dim}x{spec.head_k_dim}",
                "batch": batch,
                "state_dtype": "float32",
                "ring_len": ring_len,
                "window": 1,
                "us": round(tenths[4], 1),
                "us_mean": round(sum(microseconds) / len(microseconds), 1),
                "us_p10": round(tenths[0], 1),
                "us_p90": round(tenths[8], 1),
            }
        )
    return rows


def meta(threads: int) -> dict[str, Any]:
    """Where and with what the numbers were taken."""
    command = ("git", "rev-parse", "--short", "HEAD")
    git = subprocess.run(command, capture_output=True, text=True, check=False)
    return {
        "cpu": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--ring-len", type=int, nargs="+", default=[16])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--periods", type=int, default=8, help="flush periods for each measurement")
    parser.add_argument("--output", type=Path, help="write the results to this JSON file, too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    rows: list[dict[str, Any]] = []
    table = Table(
        *("model", "shape", "batch", "L", "transformers µs", "replay µs", "speed-up", "speed-up of means"),
        title=f"one decode step of one layer, CPU, float32 state, {options.threads} threads",
    )
    for shape in track(SHAPES, console=Console(stderr=True), transient=True):
        for batch in options.batch:
            for ring_len in options.ring_len:
                theirs, ours = pair = measure(shape, batch, ring_len, options.periods)
                rows += pair
                ratios = (f"{theirs[key] / ours[key]:.2f}" for key in ("us", "us_mean"))
                table.add_row(
                    shape.name, ours["shape"], str(batch), str(ring_len), f"{theirs['us']}", f"{ours['us']}", *ratios
                )
    Console(width=120).print(table)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        options.output.write_text(f'{{"meta": {json.dumps(meta(options.threads))},\n "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
