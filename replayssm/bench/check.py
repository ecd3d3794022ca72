"""Is a contender right? Its first steps against float64, before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.bench.contenders import Prepared, Records
from replayssm.bench.workload import Workload

#: A 16-bit output alone is off by 2e-3; arithmetic in 16-bit products by as much again. A wrong kernel by 0.1 and more.
LARGEST_ERROR = 2e-2
ROWS = 64  # of a batch, at least one per phase


def relative_error(x: Tensor, reference: Tensor) -> float:
    """``‖x − ref‖ / ‖ref‖``; NaN if x holds one."""
    return ((x.double() - reference).norm() / reference.norm()).item()


def first_step_errors(workload: Workload, prepared: Prepared) -> tuple[float, float]:
    """Largest relative errors of the outputs, and of the states that were written.

    Runs the first calls, as many as hold every phase. What they must give is worked out for all of them at once.
    """
    calls = range(min(workload.calls, -(-workload.ring_len // workload.batch)))
    rows = torch.arange(min(workload.batch, max(ROWS, workload.ring_len)), device=workload.device)
    checkpoint = torch.cat([prepared.state(call, rows) for call in calls])
    cursors = workload.cursors()[: len(calls), rows].flatten()
    records = None if prepared.records is None else _committed([prepared.records(c, rows) for c in calls], cursors)
    wanted_y, wanted_state = workload.expected(rows.repeat(len(calls)), checkpoint, records)
    y = torch.cat([prepared.steps[call]()[rows] for call in calls])
    state = torch.cat([prepared.state(call, rows) for call in calls])
    if records is not None:
        written = workload.flushes(cursors)
        state, wanted_state = state[written], wanted_state[written]
    return relative_error(y, wanted_y), relative_error(state, wanted_state)


def _committed(calls: list[Records], cursors: Tensor) -> Records:
    """Records of all rows, those at or past a row's cursor set to nothing: they may hold anything."""
    u, k, g = (torch.cat(parts) for parts in zip(*calls, strict=True))
    behind = torch.arange(u.shape[2], device=u.device) < cursors[:, None]

    def kept(x: Tensor) -> Tensor:
        return x.where(behind.view(len(x), 1, -1, *[1] * (x.dim() - 3)), 0)

    return kept(u), kept(k), kept(g)
