"""Points of a measurement: contenders are checked, the right ones take turns, each has a row."""

from __future__ import annotations

import math
import platform
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, ClassVar

import torch

import replayssm
from replayssm.bench.check import LARGEST_ERROR, first_step_errors
from replayssm.bench.contenders import Contender, Prepared
from replayssm.bench.rivals.loading import Project
from replayssm.bench.rivals.projects import PROJECTS
from replayssm.bench.rows import said
from replayssm.bench.source import package_digest
from replayssm.bench.timing import Phases, Walk, make_room, read_bandwidth, recorded, time_in_turns
from replayssm.bench.workload import SHAPES, Workload, num_calls, shape_name
from replayssm.ops.checks import dtype_name
from replayssm.state import LayerSpec

#: Bytes of checkpoints in a walk: on a GPU well over its cache, of 50 MB on an H200.
WORKING_SET = {"cuda": 400e6, "cpu": 0.0}
TRIAL_REPLAYS = 5  # to choose among launch settings
RECENT = 5  # points whose longest says how long the next one may take

Row = dict[str, Any]
#: What takes part in one point: who, and in what.
Entries = Sequence[tuple[Workload, Contender]]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure: every combination of these.

    Args:
        kinds: of layers, keys of ``shapes``.
        batches: rows of a call.
        state_dtypes: of the checkpoint.
        device: where.
        replays: of each walk.
        rivals: folder of the rivals' files, or None.
        shapes: one layer of each kind.
        seconds: after which no point is begun that would probably end later; None for no limit.
    """

    suite: ClassVar[str]
    projects: ClassVar[tuple[Project, ...]] = PROJECTS
    kinds: tuple[str, ...]
    batches: tuple[int, ...]
    state_dtypes: tuple[torch.dtype, ...]
    device: torch.device
    replays: int = 30
    rivals: Path | None = None
    shapes: dict[str, LayerSpec] = field(default_factory=lambda: SHAPES)
    seconds: float | None = None

    @property
    def num_points(self) -> int:
        return len(self.kinds) * len(self.state_dtypes) * len(self.batches)

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def grid(self) -> Iterator[tuple[str, torch.dtype, int]]:
        """Batch by batch, so that a time limit cuts off batches, not layers."""
        for batch in self.batches:
            for kind in self.kinds:
                for state_dtype in self.state_dtypes:
                    yield kind, state_dtype, batch

    def calls(self, kind: str, state_dtype: torch.dtype, batch: int, phases: Sequence[int], least: int) -> int:
        """Calls of a walk that reads enough and holds every phase, at least ``least`` of them on a GPU."""
        state_bytes = math.prod(self.shapes[kind].checkpoint_shape) * state_dtype.itemsize * batch
        on_gpu = self.device.type == "cuda"
        return num_calls(
            batch, phases, state_bytes, max(WORKING_SET[self.device.type], (least if on_gpu else 1) * state_bytes)
        )


@dataclass
class Entrant:
    """A contender that is right, with its tensors and its walk."""

    row: Row
    workload: Workload
    prepared: Prepared
    walk: Walk


def run(
    options: Options, points: Iterable[Entries], on_point: Callable[[dict[str, Any]], None] = lambda _: None
) -> dict[str, Any]:
    """Measure all, and give the result as it is stored, ``meta`` and ``rows``; after each point to ``on_point``, too.

    A contender that is wrong, or fails, has a row with the error and without a time. Where time is short, the points
    that come last are left out: ``meta`` says how many were measured.
    """
    start = time.monotonic()
    bandwidth = read_bandwidth(options.device)
    rows: list[Row] = []
    about = meta(options, bandwidth)
    result = {"meta": about, "rows": rows}
    phases = Phases(options.device)
    recent = deque([0.0], maxlen=RECENT)  # the first points may have compiled something
    for done, entries in enumerate(points, 1):
        began = time.monotonic()
        if options.seconds is not None and began - start + max(recent) > options.seconds:
            break
        make_room(options.device)
        rows += measure(entries, options.replays, bandwidth, phases)
        recent.append(time.monotonic() - began)
        about |= {"points_measured": done, "seconds": round(time.monotonic() - start, 1)}
        about["seconds_in"] = phases.rounded()
        on_point(result)
    return result


def measure(entries: Entries, replays: int, bandwidth: float, phases: Phases | None = None) -> list[Row]:
    """Rows of all that takes part in one point: first each is checked, then they take turns."""
    rows, entrants = [], []
    phases = phases or Phases(entries[0][0].device if entries else torch.device("cpu"))
    with torch.inference_mode():
        for workload, contender in entries:
            row = _row(workload, contender, bandwidth)
            rows.append(row)
            entrant = _enter(workload, contender, row, phases)
            if entrant is not None:
                entrants.append(entrant)
        with phases("timing"):
            _time(entrants, replays)
    return rows


def _time(entrants: list[Entrant], replays: int) -> None:
    if not entrants:
        return
    try:
        times = time_in_turns([entrant.walk for entrant in entrants], replays, entrants[0].workload.device)
    except Exception as error:  # of one of them, and there is no telling whose: other points are still to be measured
        for entrant in entrants:
            entrant.row["error"] = said(error)
        return
    for entrant, seconds in zip(entrants, times, strict=True):
        entrant.row.update(_microseconds(seconds, entrant.workload.calls))


def _row(workload: Workload, contender: Contender, bandwidth: float) -> Row:
    return {
        "op": workload.op,
        "contender": contender.name,
        "batch": workload.batch,
        "state_dtype": dtype_name(workload.state_dtype),
        "ring_len": workload.ring_len if contender.has_ring else None,
        "window": workload.window,
        "shape": shape_name(workload.spec),
        "us": None,
        "us_p10": None,
        "us_p90": None,
        "roofline_us": round(workload.bytes_moved(contender.has_ring) / bandwidth * 1e6, 2),
    }


def _enter(workload: Workload, contender: Contender, row: Row, phases: Phases) -> Entrant | None:
    try:
        with phases("preparing"):
            prepared = contender.prepare(workload)
        with phases("checking"):
            output_error, state_error = first_step_errors(workload, prepared)
        row |= {"rel_err": _rounded(output_error), "state_rel_err": _rounded(state_error)}
        if not max(output_error, state_error) <= LARGEST_ERROR:
            row["error"] = f"wrong: outputs off by {output_error:.1e}, states by {state_error:.1e}"
            return None
        setting, walk = _best_setting(workload, prepared, phases)
    except Exception as error:  # whatever a rival's code may raise: the others are still to be measured
        row["error"] = said(error)
        return None
    if setting:
        row["setting"] = setting
    return Entrant(row, workload, prepared, walk)


def _best_setting(workload: Workload, prepared: Prepared, phases: Phases) -> tuple[str, Walk]:
    """The walk with the launch setting that is fastest in a short trial."""
    walks = {}
    for name, setting in prepared.settings.items():
        with setting(), phases("recording"):
            prepared.steps[0]()
            walks[name] = recorded(prepared.walk, workload.device)
    if len(walks) == 1:
        return next(iter(walks.items()))
    with phases("choosing"):
        times = time_in_turns(list(walks.values()), TRIAL_REPLAYS, workload.device, warm_up=1)
    trial = dict(zip(walks, times, strict=True))
    best = min(trial, key=lambda name: sorted(trial[name])[TRIAL_REPLAYS // 2])
    return best, walks[best]


def _microseconds(seconds: list[float], calls: int) -> dict[str, float]:
    each = [1e6 * s / calls for s in seconds]
    tenths = quantiles(each, n=10, method="inclusive") if len(each) > 1 else each * 9
    digits = partial(round, ndigits=2)
    return {"us": digits(tenths[4]), "us_p10": digits(tenths[0]), "us_p90": digits(tenths[8])}


def _rounded(error: float) -> float | None:
    """Two digits; None for NaN, which JSON lacks."""
    return float(f"{error:.1e}") if math.isfinite(error) else None


def meta(options: Options, bandwidth: float) -> dict[str, Any]:
    """Where, when and with what the numbers were taken."""
    folder = options.rivals
    beside = {}
    if folder is not None and options.device.type == "cuda":
        beside = {p.name: p.version_in(folder) for p in options.projects if not p.missing(folder)}
    return {
        "suite": options.suite,
        **environment(options.device),
        "read_tbps": round(bandwidth / 1e12, 3),
        "replays": options.replays,
        "rivals": beside,
        "points": options.num_points,
        "points_measured": 0,
    }


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, the versions and the day."""
    if device.type == "cuda":
        import triton

        where = {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "triton": triton.__version__}
    else:
        import transformers

        cpu = f"{platform.processor() or platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        where = {"cpu": cpu, "threads": torch.get_num_threads(), "transformers": transformers.__version__}
    return {
        **where,
        "torch": torch.__version__,
        "replayssm": replayssm.__version__,
        "commit": _said_by("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "source": package_digest(Path(replayssm.__file__).parent),
        "date": datetime.now(UTC).date().isoformat(),
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
