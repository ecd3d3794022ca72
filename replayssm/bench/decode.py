"""`replayssm bench decode`: one step of one layer, ours beside rivals."""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

import replayssm
from replayssm import ops
from replayssm.bench import rival_calls, rivals
from replayssm.bench.check import LARGEST_ERROR, first_step_errors
from replayssm.bench.contenders import Contender, Ours, Prepared
from replayssm.bench.timing import Walk, read_bandwidth, recorded, time_in_turns
from replayssm.bench.upstream import Upstream
from replayssm.bench.workload import SHAPES, Workload, num_calls, shape_name
from replayssm.state import LayerSpec, StateDtypes, layer_bytes

#: Bytes of checkpoints in a walk: on a GPU well over its cache, of 50 MB on an H200.
WORKING_SET = {"cuda": 400e6, "cpu": 0.0}
LEAST_CALLS = {"cuda": 4, "cpu": 1}  # of a walk, so that the launch of a graph is a small part of it
GPU_BACKENDS = ("cuda", "triton")
TRIAL_REPLAYS = 7  # to choose among launch settings


@dataclass(frozen=True)
class DecodeOptions:
    """What to measure: every combination of these.

    Args:
        kinds: of layers, keys of ``shapes``.
        batches: rows of a call.
        state_dtypes: of the checkpoint.
        ring_lens: L.
        device: where.
        replays: of each walk.
        rivals: folder of the rivals' files, or None.
        shapes: one layer of each kind.
    """

    kinds: tuple[str, ...]
    batches: tuple[int, ...]
    state_dtypes: tuple[torch.dtype, ...]
    ring_lens: tuple[int, ...]
    device: torch.device
    replays: int = 30
    rivals: Path | None = None
    shapes: dict[str, LayerSpec] = field(default_factory=lambda: SHAPES)

    @property
    def num_points(self) -> int:
        return len(self.kinds) * len(self.state_dtypes) * len(self.batches) * len(self.ring_lens)


@dataclass
class Entrant:
    """A contender that is right, with its tensors and its walk."""

    row: dict[str, Any]
    prepared: Prepared
    walk: Walk


def contenders_of(options: DecodeOptions) -> tuple[list[Contender], list[str]]:
    """Who takes part on this device, and a line for each project that can't."""
    on_gpu = options.device.type == "cuda"
    ours = [
        Ours(name)
        for name in ops.BACKENDS
        if (name in GPU_BACKENDS) == on_gpu and ops.unavailable_reason(name, options.device) is None
    ]
    if not on_gpu:
        return [*ours, Upstream()], []
    found, notes = rival_calls.found_in(options.rivals)
    return [*ours, *found], notes


def run(
    options: DecodeOptions,
    contenders: list[Contender],
    on_point: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure all, and give the result as it is stored, ``meta`` and ``rows``; after each point to ``on_point``, too.

    A contender that is wrong, or fails, has a row with the error and without a time.
    """
    bandwidth = read_bandwidth(options.device)
    rows: list[dict[str, Any]] = []
    result = {"meta": meta(options, bandwidth), "rows": rows}
    for kind, state_dtype, batch in _grid(options):
        for ring_len in options.ring_lens:
            taking_part = [
                contender
                for contender in contenders
                if contender.takes(kind, state_dtype) and (contender.has_ring or ring_len == options.ring_lens[0])
            ]
            workload = _workload(options, kind, state_dtype, batch, ring_len)
            rows += measure(workload, taking_part, options.replays, bandwidth)
            on_point(result)
    return result


def _grid(options: DecodeOptions) -> Iterator[tuple[str, torch.dtype, int]]:
    for kind in options.kinds:
        for state_dtype in options.state_dtypes:
            for batch in options.batches:
                yield kind, state_dtype, batch


def _workload(options: DecodeOptions, kind: str, state_dtype: torch.dtype, batch: int, ring_len: int) -> Workload:
    spec, device = options.shapes[kind], options.device
    activations = torch.bfloat16 if device.type == "cuda" else torch.float32
    state_bytes = math.prod(spec.checkpoint_shape) * state_dtype.itemsize * batch
    working_set = max(WORKING_SET[device.type], LEAST_CALLS[device.type] * state_bytes)
    calls = num_calls(batch, options.ring_lens, state_bytes, working_set)
    return Workload(kind, spec, batch, state_dtype, ring_len, activations, device, calls)


def measure(workload: Workload, contenders: list[Contender], replays: int, bandwidth: float) -> list[dict[str, Any]]:
    """Rows of all contenders at one point: first each is checked, then they take turns."""
    rows, entrants = [], []
    with torch.inference_mode():
        for contender in contenders:
            row = _row(workload, contender, bandwidth)
            rows.append(row)
            entrant = _enter(workload, contender, row)
            if entrant is not None:
                entrants.append(entrant)
        times = time_in_turns([entrant.walk for entrant in entrants], replays, workload.device)
    for entrant, seconds in zip(entrants, times, strict=True):
        entrant.row.update(_microseconds(seconds, workload.calls))
    return rows


def _row(workload: Workload, contender: Contender, bandwidth: float) -> dict[str, Any]:
    return {
        "op": f"{workload.kind}_decode",
        "contender": contender.name,
        "batch": workload.batch,
        "state_dtype": str(workload.state_dtype).removeprefix("torch."),
        "ring_len": workload.ring_len if contender.has_ring else None,
        "window": 1,
        "shape": shape_name(workload.spec),
        "us": None,
        "us_p10": None,
        "us_p90": None,
        "roofline_us": round(bytes_moved(workload, contender.has_ring) / bandwidth * 1e6, 2),
    }


def bytes_moved(workload: Workload, has_ring: bool) -> float:
    """Bytes that a call can't avoid.

    With a ring: the checkpoint read, its share of flushes written, records read on average, one appended; the records
    as our rings hold them. Without: the state read and written.
    """
    dtypes = StateDtypes.choose(workload.state_dtype, workload.activation_dtype, "auto")
    size, ring_len = layer_bytes(workload.spec, dtypes, workload.ring_len), workload.ring_len
    if not has_ring:
        return workload.batch * 2.0 * size.checkpoint
    records = (ring_len - 1) / 2 + (ring_len - 1) / ring_len
    return workload.batch * (size.checkpoint * (1 + 1 / ring_len) + size.record * records)


def _enter(workload: Workload, contender: Contender, row: dict[str, Any]) -> Entrant | None:
    try:
        prepared = contender.prepare(workload)
        output_error, state_error = first_step_errors(workload, prepared)
        row |= {"rel_err": _rounded(output_error), "state_rel_err": _rounded(state_error)}
        if not max(output_error, state_error) <= LARGEST_ERROR:
            row["error"] = f"wrong: outputs off by {output_error:.1e}, states by {state_error:.1e}"
            return None
        setting, walk = _best_setting(workload, prepared)
    except Exception as error:  # whatever a rival's code may raise: the others are still to be measured
        row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return None
    if setting:
        row["setting"] = setting
    return Entrant(row, prepared, walk)


def _best_setting(workload: Workload, prepared: Prepared) -> tuple[str, Walk]:
    """The walk with the launch setting that is fastest in a short trial."""

    def once() -> None:
        for step in prepared.steps:
            step()

    walks = {}
    for name, setting in prepared.settings.items():
        with setting():
            prepared.steps[0]()
            walks[name] = recorded(once, workload.device)
    if len(walks) == 1:
        return next(iter(walks.items()))
    trial = dict(zip(walks, time_in_turns(list(walks.values()), TRIAL_REPLAYS, workload.device), strict=True))
    best = min(trial, key=lambda name: sorted(trial[name])[TRIAL_REPLAYS // 2])
    return best, walks[best]


def _microseconds(seconds: list[float], calls: int) -> dict[str, float]:
    each = [1e6 * s / calls for s in seconds]
    tenths = quantiles(each, n=10) if len(each) > 1 else each * 9
    digits = partial(round, ndigits=2)
    return {"us": digits(tenths[4]), "us_p10": digits(tenths[0]), "us_p90": digits(tenths[8])}


def _rounded(error: float) -> float | None:
    """Two digits; None for NaN, which JSON lacks."""
    return float(f"{error:.1e}") if math.isfinite(error) else None


def meta(options: DecodeOptions, bandwidth: float) -> dict[str, Any]:
    """Where, when and with what the numbers were taken."""
    if options.device.type == "cuda":
        import triton

        where = {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "triton": triton.__version__}
    else:
        import transformers

        cpu = f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        where = {"cpu": cpu, "threads": torch.get_num_threads(), "transformers": transformers.__version__}
    folder = options.rivals
    beside = {}
    if folder is not None and options.device.type == "cuda":
        beside = {p.name: p.version_in(folder) for p in rivals.PROJECTS if not p.missing(folder)}
    return {
        "suite": "decode",
        **where,
        "torch": torch.__version__,
        "replayssm": replayssm.__version__,
        "commit": _said_by("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "date": datetime.now(UTC).date().isoformat(),
        "read_tbps": round(bandwidth / 1e12, 3),
        "replays": options.replays,
        "rivals": beside,
    }


def _driver() -> str:
    return _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def _said_by(program: str, *arguments: str) -> str:
    """First words of a program's output, or nothing where it isn't there."""
    path = shutil.which(program)
    if path is None:
        return ""
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip() if done.returncode == 0 else ""
