"""Times of the CUDA decode kernels for every cut into blocks: what `choose` in backends/cuda/blocks.py is made from.

Usage: python -m benchmarks.gpu_blocks [--op gdn,kda,mamba2] [--state-dtype fp32,bf16] [--batch 8,64,256] [--replays 15]
       python -m benchmarks.gpu_blocks --compile

The first times every cut in turns, as `replayssm bench decode` does, each checked against float64 before. Time on a GPU
machine is dear: the second, on a machine with nvcc and without a GPU, compiles all its kernels into the cache (the
folder `replayssm` under XDG_CACHE_HOME), which the first then finds, if it is carried there.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import torch

from replayssm.backends.cuda import blocks, build, decode
from replayssm.backends.cuda.blocks import Block, Shape
from replayssm.bench.contenders import Ours, Prepared
from replayssm.bench.decode import LEAST_CALLS, DecodeOptions
from replayssm.bench.measure import Row, measure
from replayssm.bench.timing import read_bandwidth
from replayssm.bench.workload import SHAPES, Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RING_LEN = 16
ARCHITECTURE = "sm_90a"
MOST_SHARED = 227 * 1024
#: rows of a tile, warps, tiles of a block, of them at once, eager
CUTS = [
    *((rows, warps, tiles, min(tiles, 2), False) for rows in (64, 128) for warps in (2, 4) for tiles in (1, 2, 4, 8)),
    *((64, 4, 4, 3, False), (128, 4, 4, 3, False), (64, 2, 8, 3, False)),
    *((64, 4, 1, 1, True), (32, 4, 1, 1, True), (16, 2, 1, 1, True)),
]


@dataclass(frozen=True)
class Cut(Ours):
    """Our CUDA backend with a block of choice."""

    backend: str = "cuda"
    block: Block | None = None

    @property
    def name(self) -> str:
        assert self.block is not None
        eager = " eager" if self.block.eager else ""
        rows, warps, tiles, stages = self.block.rows, self.block.warps, self.block.tiles, self.block.stages
        return f"{rows} rows, {warps} warps, {tiles} tiles, {stages} at once{eager}"

    def prepare(self, workload: Workload) -> Prepared:
        prepared = super().prepare(workload)

        def with_block(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                with chosen(self.block):
                    return step()

            return run

        return replace(prepared, steps=[with_block(step) for step in prepared.steps])


@contextmanager
def chosen(block: Block | None):  # noqa: ANN201
    decode._plans.clear()
    with patch.object(blocks, "choose", lambda *_: block):
        yield
    decode._plans.clear()


def shape_of(kind: str, dtype: torch.dtype) -> Shape:
    spec = SHAPES[kind]
    rules, dims = (spec.gate == "channel", spec.rule == "delta"), (spec.head_v_dim, spec.head_k_dim)
    return Shape(*rules, *dims, spec.num_v_heads // spec.num_k_heads, spec.num_v_heads, RING_LEN, dtype)


def cuts_of(shape: Shape) -> list[Block]:
    """Those that divide this layer and fit a multiprocessor, with registers for as many blocks as its memory holds."""
    found = []
    for rows, warps, tiles, stages, eager in CUTS:
        block = Block(rows, warps, tiles, stages, 168 if tiles > 1 or warps < 4 else 104, eager)
        fits = block.fits(shape) and (not shape.channel or rows <= shape.head_v_dim)
        if fits and block.shared_bytes(shape, torch.bfloat16) <= MOST_SHARED:
            found.append(block)
    return found


def macros_of(shape: Shape, block: Block) -> dict[str, str]:
    """As the workload's tensors make them: activations in bfloat16, float32 parameters."""
    names = {torch.float32: "float", torch.bfloat16: "bf16"}
    types = {"C": names[shape.state_dtype], "X": "bf16", "U": names[shape.state_dtype], "K": "bf16", "A": "bf16"}
    types |= {"B": "bf16" if shape.delta else "none", "RATE": "float", "BIAS": "float"}
    types |= {"D": "none" if shape.delta else "float", "Z": "none"}
    return decode.macros(shape, block, types | {"FLAGS": 65 if shape.delta else 66, "FORCE_BYTES": 0})


def compile_with_nvcc(macros: dict[str, str], architecture: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, code = Path(folder) / "decode.cu", Path(folder) / "decode.cubin"
        source.write_text(build.source())
        target = f"-gencode=arch=compute_{architecture[3:]},code={architecture}"
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        subprocess.run(
            ["nvcc", target, "-cubin", f"-std={build.STANDARD}", "-o", code, source, *defines],
            check=True,
            capture_output=True,
        )
        return code.read_bytes()


def compile_all(layers: list[tuple[str, torch.dtype]]) -> None:
    wanted = [
        macros_of(shape, block) for shape in map(shape_of, *zip(*layers, strict=True)) for block in cuts_of(shape)
    ]
    with patch.object(build, "compile_source", compile_with_nvcc), ThreadPoolExecutor(2) as pool:
        sizes = [len(code) for code in pool.map(build.machine_code, wanted, [ARCHITECTURE] * len(wanted))]
    print(f"{len(sizes)} kernels in {build.cache_folder()}")


def line_of(rows: list[Row]) -> str:
    first, timed = rows[0], sorted((row["us"], row["contender"]) for row in rows if row["us"] is not None)
    head = f"{first['op']} {first['state_dtype']} B={first['batch']}: roofline {first['roofline_us']} µs"
    failed = [f"  failed: {row['contender']}: {row['error']}" for row in rows if row["us"] is None]
    return "\n".join([head, *(f"  {us:7.1f}  {name}" for us, name in timed), *failed])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", default="gdn,kda,mamba2")
    parser.add_argument("--state-dtype", default="fp32,bf16")
    parser.add_argument("--batch", default="1,8,64,256")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    kinds, dtypes = tuple(given.op.split(",")), tuple(DTYPES[name] for name in given.state_dtype.split(","))
    if given.compile:
        compile_all([(kind, dtype) for kind in kinds for dtype in dtypes])
        return
    device = torch.device("cuda", 0)
    bandwidth = read_bandwidth(device)
    options = DecodeOptions(
        kinds=kinds,
        batches=tuple(map(int, given.batch.split(","))),
        state_dtypes=dtypes,
        ring_lens=(RING_LEN,),
        device=device,
    )
    for kind, dtype, batch in options.grid():
        calls = options.calls(kind, dtype, batch, (RING_LEN,), LEAST_CALLS)
        workload = Workload(kind, SHAPES[kind], batch, dtype, RING_LEN, torch.bfloat16, device, calls)
        entries = [(workload, Cut(block=block)) for block in cuts_of(shape_of(kind, dtype))]
        print(line_of(measure(entries, given.replays, bandwidth)), flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
