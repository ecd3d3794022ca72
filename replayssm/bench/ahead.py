"""Kernels compiled before they are measured, in several processes at once.

A kernel that is made at its first call is made by that call in whichever process, and kept in its compiler's folder;
so it is enough to make every contender's first call somewhere. Nothing is checked: what fails here fails again where
it is measured, and is reported there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context

import torch

from replayssm.bench.contenders import Contender
from replayssm.bench.measure import Entries
from replayssm.bench.workload import Workload

#: What one process compiles in turn: calls that differ in their batch alone share most of their kernels.
Task = list[tuple[Workload, Contender]]


def tasks_of(points: Iterable[Entries]) -> list[Task]:
    """The calls of all points, each once and with the fewest rows first, those with shared kernels together."""
    tasks: dict[tuple[object, ...], Task] = {}
    for entries in points:
        for workload, contender in entries:
            key = (workload.op, workload.state_dtype, workload.window, workload.ring_len, contender.name)
            tasks.setdefault(key, []).append((replace(workload, calls=1), contender))
    return [sorted(task, key=lambda entry: entry[0].batch) for task in tasks.values()]


def compile_ahead(points: Iterable[Entries], workers: int | None = None) -> None:
    """Make the first call of every contender of every point.

    Args:
        points: as they will be measured.
        workers: processes; default as many as this process may use cores.
    """
    tasks = tasks_of(points)
    workers = min(len(tasks), workers or len(os.sched_getaffinity(0)))
    if not tasks:
        return
    with suppress(BrokenProcessPool), ProcessPoolExecutor(workers, get_context("spawn"), _one_thread) as pool:
        list(pool.map(first_calls, tasks))


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
