"""Run the kernels under NVIDIA's compute-sanitizer: out-of-bounds accesses (memcheck) and races (racecheck).

`make test-sanitizer` runs it, on a GPU. Each check runs this file once more, with the name of what is to be launched:
a backend's kernels for one layer, or the convolution's; and, to show that the tool sees a backend's kernels at all, one
that reads behind its tensor (memcheck has to fail). Inputs are made on the CPU, and each tensor is an allocation of
its own, so that a step beyond it is noticed.

racecheck finds one thing that is no fault. Where a tile has fewer elements than a program has threads, Triton gives an
element to several of them, and in a sum they all write it to the same word of shared memory. So a write after a write
of the same value passes, and nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product, repeat
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
TOOL = "compute-sanitizer"
#: By backend: kind, H_k, H_v, d_k, d_v. Powers of two, other numbers, and more rows than one program takes.
SHAPES = {
    "triton": [
        ("gdn", 1, 2, 17, 33),
        ("gdn", 1, 3, 64, 64),
        ("kda", 2, 2, 20, 70),
        ("kda_bounded", 1, 1, 64, 64),
        ("mamba2", 1, 2, 36, 20),
        ("mamba2", 2, 4, 128, 64),
    ],
    "cuda": [("gdn", 1, 2, 128, 128), ("kda_bounded", 2, 2, 64, 64), ("mamba2", 1, 4, 64, 80)],
}
DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
#: The CUDA kernels cut a large batch otherwise, in blocks that take one tile after the other.
CUTS = {"triton": ["any"], "cuda": ["small", "large"]}
AT_ONCE = 16  # processes

PARTS = {
    f"{backend}-{i}": (backend, shape, dtypes, cut)
    for backend, shapes in SHAPES.items()
    for i, (shape, dtypes, cut) in enumerate(product(shapes, DTYPES, CUTS[backend]))
}


def launch_part(name: str) -> None:
    """Natural and forced flushes, padding rows, 16-bit tensors, windows: every kernel of a backend for one layer."""
    from oracle import Layer

    backend, shape, (dtype, state_dtype), cut = PARTS[name]
    if cut == "large":
        cut_as_a_large_batch()
    layer = Layer(*shape, dtype=dtype, device="cuda", backend=backend)
    run_layer(layer, state_dtype)
    run_rows_operator(layer, state_dtype)
    run_windows(layer, state_dtype)
    torch.cuda.synchronize()


def cut_as_a_large_batch() -> None:
    """Take any number of rows for many, and the GPU for one with a single multiprocessor."""
    from replayssm.backends.cuda import blocks, launch, windows

    for module in (blocks, windows):
        for name in ("FEW_ROWS", "SOME_ROWS", "MANY_ROWS"):
            if hasattr(module, name):
                setattr(module, name, 1)
    looked = launch.properties
    launch.properties = lambda device: looked(device)._replace(multiprocessors=1)


def launch_convolution() -> None:
    for width in (1, 2, 4):
        run_convolution(width)
    torch.cuda.synchronize()


def run_layer(layer, state_dtype: torch.dtype) -> None:
    from replayssm import ReplayPool

    settings = {"ring_len": 3, "state_dtype": state_dtype, "activation_dtype": layer.dtype, "backend": layer.backend}
    pool = ReplayPool([layer.spec], 4, device="cuda", **settings)
    rows = pool.alloc(3)
    for step in range(5):
        slots = pool.slot_tensor([rows[2], -1, rows[step % 2]])
        force = torch.tensor([step == 1, True, False], device="cuda") if step < 3 else None
        y = layer.decode(layer.draw(3), **pool.state_args(0), slots=slots, force_flush=force)
        pool.advance(slots, force)
        assert y.isfinite().all()
    pool.materialize(rows[2], rows[1])
    pool.snapshot(rows[0])
    assert pool.read_state(0, rows).isfinite().all()


def run_windows(layer, state_dtype: torch.dtype) -> None:
    """Chains and trees that fold, rows without tokens, padding; accepted records move and the cursors with them."""
    from replayssm import ReplayPool

    settings = {"ring_len": 6, "max_window": 4, "state_dtype": state_dtype, "activation_dtype": layer.dtype}
    pool = ReplayPool([layer.spec], 4, device="cuda", backend=layer.backend, **settings)
    rows = pool.alloc(3)
    slots = pool.slot_tensor([rows[2], -1, rows[1], rows[0]])
    tree = [torch.tensor([line] * 4, dtype=torch.int32).cuda() for line in ([-1, 0, 0, 2], [0, 2, 3, 3])]
    for parents, path in ((None, None), tuple(tree), (None, None), tuple(tree)):
        count, kept = (torch.tensor(line, dtype=torch.int32).cuda() for line in ([4, 4, 0, 3], [3, 4, 0, 1]))
        where = {"slots": slots, "num_tokens": count}
        y = layer.verify(layer.draw_window(4, 4), **pool.verify_args(0), **where, parents=parents)
        pool.commit(**where, num_accepted=kept, path=path)
        assert y.isfinite().all()


def run_rows_operator(layer, state_dtype: torch.dtype) -> None:
    from replayssm.ops.rows import delta_decode_rows, mamba2_decode_rows

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype).cuda()

    h_k, h_v, d_k, d_v = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    rings = (
        zeros(3, h_v, 3, d_v, dtype=layer.dtype),
        zeros(3, h_k, 3, d_k, dtype=layer.dtype),
        zeros(3, h_v, 3, *layer.spec.gate_shape),
    )
    common = {
        "checkpoint": zeros(3, h_v, d_v, d_k, dtype=state_dtype),
        "write_pos": torch.tensor([0, 1, 2], dtype=torch.int32).cuda(),
        "slots": torch.tensor([2, -1, 0], dtype=torch.int32).cuda(),
        "out": zeros(3, h_v, d_v, dtype=layer.dtype),
        "backend": layer.backend,
    }
    flush = torch.tensor([False, False, True]).cuda()
    x = layer.draw(3)
    if layer.kind == "mamba2":
        named = dict(zip(("ring_x", "ring_B", "ring_dt"), rings, strict=True)) | {"flush": flush}
        numbers = {"A": -layer.A_log.exp(), "D": layer.D, "dt_bias": layer.dt_bias, "dt_softplus": True}
        mamba2_decode_rows(**x, **numbers, **named, **common)
    else:
        named = dict(zip(("ring_u", "ring_k", "ring_g"), rings, strict=True)) | {"force_flush": flush}
        numbers = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "scale": 0.5, "qk_l2norm": True}
        delta_decode_rows(**x, **numbers, lower_bound=None, **named, **common)
    assert common["out"].isfinite().all()


def run_convolution(width: int) -> None:
    from replayssm import ops

    for dtype in (torch.float32, torch.bfloat16):
        x, weight, state = (torch.randn(s).to(dtype).cuda() for s in ((3, 300), (300, width), (3, 300, width - 1)))
        slots = torch.tensor([2, -1, 0], dtype=torch.int32).cuda()
        y = ops.causal_conv1d_update(x, state, weight, slots=slots, activation="silu", backend="triton")
        assert y.isfinite().all()
        cu_seqlens = torch.tensor([0, 1, 1, 3], dtype=torch.int32)
        y, _ = ops.causal_conv1d_prefill(x, state, weight, cu_seqlens=cu_seqlens, backend="triton")
        assert y.isfinite().all()
        window = torch.empty(3, 300, 4, dtype=dtype).cuda()
        x = torch.randn(3, 4, 300).to(dtype).cuda()
        count, kept, path = (
            torch.tensor(t, dtype=torch.int32).cuda() for t in ([4, 4, 3], [3, 4, 1], [[0, 2, 3, 3]] * 3)
        )
        parents = torch.tensor([[-1, 0, 0, 2]] * 3, dtype=torch.int32).cuda()
        where = {"slots": slots, "num_tokens": count}
        y = ops.causal_conv1d_verify(x, state, window, weight, None, **where, parents=parents, activation="silu")
        assert y.isfinite().all()
        rings = [torch.zeros(3, 2, 6, *rest).cuda() for rest in ((5,), (7,), ())]
        cursors = torch.zeros(3, dtype=torch.int32).cuda()
        kept_args = {"conv_state": state, "conv_window": window, "write_pos": cursors, "num_accepted": kept}
        ops.accept(*rings, **kept_args, **where, path=path, backend="triton")


def launch_planted_error(backend: str) -> None:
    """One decode step whose slot is beyond the pool."""
    from oracle import Layer

    from replayssm import ReplayPool

    layer = Layer("gdn", 1, 1, 64, 64, device="cuda", backend=backend)
    pool = ReplayPool([layer.spec], 1, ring_len=2, device="cuda", backend=backend)
    slots = torch.tensor([40000], dtype=torch.int32).cuda()
    layer.decode(layer.draw(1), **pool.state_args(0), slots=slots)
    torch.cuda.synchronize()


def run(what: str, tool: str | None) -> tuple[int, str]:
    """The exit code of what was launched in a process, under a tool or without, and what it wrote."""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    options = ["--racecheck-report", "hazard", "--print-limit", "0"] if tool == "racecheck" else []
    sanitizer = [] if tool is None else [TOOL, "--tool", tool, *options, "--error-exitcode", "1"]
    command = [*sanitizer, sys.executable, __file__, what]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def verdict(tool: str, what: str, code: int, output: str) -> tuple[bool, str]:
    """Whether a check went as it should, and what it found."""
    summary = next((line for line in output.splitlines()[::-1] if "SUMMARY" in line), "no summary").strip("= ")
    if what.startswith("planted"):
        return "Invalid __global__" in output, "a planted error is found"
    if tool != "racecheck" or code == 0:
        return code == 0, summary
    hazards = re.findall(r"Potential (\w+) hazard", output)
    values = re.findall(r"Current Value\s*:\s*(\S+?),\s*Incoming Value\s*:\s*(\S+)", output)
    same = len(values) == len(hazards) > 0 and all(old == new for old, new in values)
    found = f"{len(hazards)} hazards, {len(values)} with values, of which {sum(a == b for a, b in values)} are the same"
    return same and set(hazards) == {"WAW"}, f"{found}; {summary}"


def main() -> int:
    if not torch.cuda.is_available() or shutil.which(TOOL) is None:
        missing = "torch sees no GPU" if not torch.cuda.is_available() else f"{TOOL} is not on the PATH"
        print(f"make test-sanitizer: {missing} here", file=sys.stderr)
        return 1
    names = [*PARTS, "convolution"]
    planted = [("memcheck", f"planted-{backend}") for backend in SHAPES]
    checks = [*product(("memcheck", "racecheck"), names), *planted]
    failed = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        # Without a tool first: the checked runs then find the kernels in the caches.
        for name, (code, output) in zip(names, pool.map(run, names, repeat(None)), strict=True):
            if code:
                failed = 1
                print(f"FAILED {name} without a tool:\n{output[-4000:]}", flush=True)
        tools, whats = zip(*checks, strict=True)
        for (tool, what), (code, output) in zip(checks, pool.map(run, whats, tools), strict=True):
            good, found = verdict(tool, what, code, output)
            print(f"{'ok    ' if good else 'FAILED'} {tool} of {what}: {found}", flush=True)
            if not good:
                failed = 1
                print(output[-4000:])
    return failed


def launch(name: str) -> None:
    if name == "convolution":
        launch_convolution()
    elif name.startswith("planted-"):
        launch_planted_error(name.removeprefix("planted-"))
    else:
        launch_part(name)


if __name__ == "__main__":
    sys.exit(main() if len(sys.argv) == 1 else launch(sys.argv[1]))
