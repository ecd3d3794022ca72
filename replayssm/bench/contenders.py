"""Who is measured: a contender turns a workload into calls that can be checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from replayssm import ops
from replayssm.bench.workload import Workload
from replayssm.errors import InputError
from replayssm.state import ReplayPool

Records = tuple[Tensor, Tensor, Tensor]
Setting = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Prepared:
    """A contender's tensors for one workload, and what reads them.

    Args:
        steps: one function per call of the walk; gives the output, ``[B, H_v, d_v]`` or, of a window,
            ``[B, T, H_v, d_v]``.
        state: ``(call, rows)`` to what is stored as state of these rows, ``[R, H_v, d_v, d_k]``.
        records: ``(call, rows)`` to all ring rows ``(u, k, g)``, or None for a contender without a ring.
        settings: launch settings to choose from by time, each a context in which the calls are made.
    """

    steps: Sequence[Callable[[], Tensor]]
    state: Callable[[int, Tensor], Tensor]
    records: Callable[[int, Tensor], Records] | None
    settings: Mapping[str, Setting] = field(default_factory=lambda: {"": nullcontext})

    def walk(self) -> None:
        """All the calls."""
        for step in self.steps:
            step()


class Contender(Protocol):
    """One way to make a decode step, or to run a verify window."""

    @property
    def name(self) -> str: ...

    @property
    def has_ring(self) -> bool: ...

    def takes(self, workload: Workload) -> bool:
        """Whether it can make these steps."""
        ...

    def prepare(self, workload: Workload) -> Prepared: ...


def chosen(contenders: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """Those with these names; a name without its second part means all of a project.

    Raises:
        InputError: nobody has such a name.
    """
    for wanted in names:
        if not any(_is_called(contender, wanted) for contender in contenders):
            known = ", ".join(dict.fromkeys(contender.name for contender in contenders))
            raise InputError(f"contender is {wanted!r}: here it must be one of {known}")
    return [c for c in contenders if any(_is_called(c, name) for name in names)]


def _is_called(contender: Contender, name: str) -> bool:
    return name in (contender.name, contender.name.partition("/")[0])


@dataclass(frozen=True)
class Ours:
    """Our operators with one of the backends."""

    backend: str
    has_ring: bool = True
    ring_dtype: torch.dtype | str = "auto"

    @property
    def name(self) -> str:
        return f"replayssm/{self.backend}"

    def takes(self, workload: Workload) -> bool:  # noqa: ARG002
        return True

    def prepare(self, workload: Workload) -> Prepared:
        pool = ReplayPool(
            [workload.spec],
            workload.num_slots,
            ring_len=workload.ring_len,
            ring_capacity=workload.ring_rows,
            state_dtype=workload.state_dtype,
            activation_dtype=workload.activation_dtype,
            ring_dtype=self.ring_dtype,
            device=workload.device,
            backend=self.backend,
        )
        numbers = pool.alloc(workload.num_slots)
        held = pool.fold_args(0)
        held["checkpoint"].copy_(workload.checkpoint())
        for name, values in zip(("ring_u", "ring_k", "ring_g"), workload.records(), strict=True):
            held[name].copy_(values)
        pool.write_pos.copy_(workload.cursors().flatten())
        slots = torch.tensor(numbers, dtype=torch.int32, device=workload.device).view(workload.calls, workload.batch)
        batches = [own.clone() for own in slots]  # each aligned, as a caller's own tensor is
        operator = getattr(ops, workload.op)
        arguments = {**workload.inputs(), **workload.parameters(), **self._of_pool(workload, pool)}

        def step(slots: Tensor) -> Callable[[], Tensor]:
            return lambda: operator(**arguments, slots=slots)

        def records(call: int, rows: Tensor) -> Records:
            slots = batches[call][rows]
            return held["ring_u"][slots], held["ring_k"][slots], held["ring_g"][slots]

        return Prepared(
            [step(slots) for slots in batches], lambda call, rows: held["checkpoint"][batches[call][rows]], records
        )

    def _of_pool(self, workload: Workload, pool: ReplayPool) -> dict[str, Any]:  # noqa: ARG002
        return pool.state_args(0)


class OurWindows(Ours):
    """Our verify operators with one of the backends, every row with all its tokens."""

    def _of_pool(self, workload: Workload, pool: ReplayPool) -> dict[str, Any]:
        tokens = torch.full((workload.batch,), workload.window, dtype=torch.int32, device=workload.device)
        return {**pool.verify_args(0), "num_tokens": tokens}
