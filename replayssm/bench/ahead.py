"""Kernels compiled before they are measured, in several processes at once.

A kernel that is made at its first call is made by that call in whichever process, and kept in its compiler's folder;
so it is enough to make every contender's first call somewhere. Nothing is checked: what fails here fails again where
it is measured, and is reported there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children, get_context

import torch

from replayssm.bench.contenders import Contender
from replayssm.bench.measure import Entries
from replayssm.bench.workload import Workload

log = logging.getLogger(__name__)

#: What one process compiles in turn: calls that differ in their batch alone share most of their kernels.
Task = list[tuple[Workload, Contender]]
Key = tuple[object, ...]


def _key(workload: Workload, contender: Contender) -> Key:
    return workload.op, workload.state_dtype, workload.window, workload.ring_len, contender.name


def tasks_of(points: Iterable[Entries]) -> dict[Key, Task]:
    """The calls of all points, each once and with the fewest rows first, those with shared kernels together."""
    tasks: dict[Key, Task] = {}
    for entries in points:
        for workload, contender in entries:
            tasks.setdefault(_key(workload, contender), []).append((replace(workload, calls=1), contender))
    return {key: sorted(task, key=lambda entry: entry[0].batch) for key, task in tasks.items()}


def compile_ahead(points: Iterable[Entries], workers: int | None = None, seconds: float | None = None) -> set[Key]:
    """Make the first call of every contender of every point.

    Args:
        points: as they will be measured.
        workers: processes; default as many as this process may use cores.
        seconds: after which the processes are ended.

    Returns:
        What was not done by then, for :func:`without`.
    """
    tasks = tasks_of(points)
    workers = min(len(tasks), workers or len(os.sched_getaffinity(0)))
    if not tasks:
        return set()
    others = active_children()
    with ProcessPoolExecutor(workers, get_context("spawn"), _one_thread) as pool:
        calls = {pool.submit(first_calls, task): key for key, task in tasks.items()}
        late = wait(calls, seconds).not_done
        if late:
            for child in active_children():
                if child not in others:
                    child.terminate()
            pool.shutdown(cancel_futures=True)
    for call, key in calls.items():
        error = None if call in late else call.exception()
        if error is not None:  # of the processes, not of the calls: what those raise is told when they are measured
            log.warning("%s is not compiled ahead: %s", " ".join(map(str, key)), error)
    return {calls[call] for call in late}


def without(points: Iterable[Entries], late: Collection[Key]) -> Iterator[Entries]:
    """The points without those who were not compiled in time: a first call in their turn could take minutes."""
    for entries in points:
        yield [entry for entry in entries if _key(*entry) not in late]


def _one_thread() -> None:
    torch.set_num_threads(1)


def first_calls(task: Task) -> int:
    """The calls that went well."""
    done = 0
    for workload, contender in task:
        with suppress(Exception), torch.inference_mode():  # a wrong kernel is to be reported where it is measured
            _call(workload, contender)
            done += 1
        if workload.device.type == "cuda":
            torch.cuda.empty_cache()  # processes share the memory
    return done


def _call(workload: Workload, contender: Contender) -> None:
    prepared = contender.prepare(workload)
    for setting in prepared.settings.values():
        with setting():
            prepared.steps[0]()
    if workload.device.type == "cuda":
        torch.cuda.synchronize()
