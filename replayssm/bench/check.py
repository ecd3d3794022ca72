"""Is a contender right? Its first steps against float64, before it is timed."""

from __future__ import annotations

import torch
from torch import Tensor

from replayssm.bench.contenders import Prepared
from replayssm.bench.workload import Workload

#: A 16-bit output alone is off by 2e-3; arithmetic in 16-bit products by as much again. A wrong kernel by 0.1 and more.
LARGEST_ERROR = 2e-2
ROWS = 64  # of a batch, at least one per phase


def relative_error(x: Tensor, reference: Tensor) -> float:
    """``‖x − ref‖ / ‖ref‖``; NaN if x holds one."""
    return ((x.double() - reference).norm() / reference.norm()).item()


def first_step_errors(workload: Workload, prepared: Prepared) -> tuple[float, float]:
    """Largest relative errors of the outputs, and of the states that were written.

    Runs the first calls, as many as hold every phase.
    """
    calls = min(workload.calls, -(-workload.ring_len // workload.batch))
    rows = torch.arange(min(workload.batch, max(ROWS, workload.ring_len)), device=workload.device)
    outputs, states = [], []
    for call in range(calls):
        expected_y, expected_state, written = _expected(workload, prepared, call, rows)
        y = prepared.steps[call]()[rows]
        outputs.append((y.clone(), expected_y))
        if len(written):
            states.append((prepared.state(call, rows[written]).clone(), expected_state[written]))
    return _error(outputs), _error(states)


def _error(pairs: list[tuple[Tensor, Tensor]]) -> float:
    got, wanted = (torch.cat([pair[i].double() for pair in pairs]) for i in (0, 1))
    return relative_error(got, wanted)


def _expected(workload: Workload, prepared: Prepared, call: int, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and state in float64, and which of the rows write their state."""
    checkpoint = prepared.state(call, rows)
    if prepared.records is None:
        y, state = workload.expected(rows, checkpoint, None)
        return y, state, torch.arange(len(rows), device=rows.device)
    cursors = workload.cursors()[call][rows]
    u, k, g = prepared.records(call, rows)
    order, outputs, states = [], [], []
    for cursor in cursors.unique().tolist():
        same = (cursors == cursor).nonzero()[:, 0]
        committed = (u[same, :, :cursor], k[same, :, :cursor], g[same, :, :cursor])
        y, state = workload.expected(rows[same], checkpoint[same], committed)
        order.append(same)
        outputs.append(y)
        states.append(state)
    back = torch.cat(order).argsort()
    return torch.cat(outputs)[back], torch.cat(states)[back], workload.flushes(cursors).nonzero()[:, 0]
