"""What rivals' functions have in common as contenders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.contenders import Contender, Prepared, Setting
from replayssm.bench.rivals.loading import Project
from replayssm.bench.workload import Workload


def _any(_: Workload) -> bool:
    return True


@dataclass(frozen=True)
class Rival:
    """A function of another project.

    Args:
        name: the project's and the function's.
        has_ring: whether it keeps records.
        kinds: of layers that it takes.
        prepare_from: makes its tensors, given the rivals' folder.
        accepts: whether it can make these steps of such a layer, or would be asked to.
        own: the workload as this function takes it, where its rule for folding is another than ours.
        folder: of the rivals' files.
    """

    name: str
    has_ring: bool
    kinds: tuple[str, ...]
    prepare_from: Callable[[Path, Workload], Prepared]
    accepts: Callable[[Workload], bool] = _any
    own: Callable[[Workload], Workload] | None = None
    folder: Path = Path()

    def takes(self, workload: Workload) -> bool:
        return workload.kind in self.kinds and self.accepts(workload)

    def prepare(self, workload: Workload) -> Prepared:
        return self.prepare_from(self.folder, workload)


def as_taken(contender: Contender, workload: Workload) -> Workload:
    """The workload with the contender's own rule for folding, if it has one."""
    own = contender.own if isinstance(contender, Rival) else None
    return workload if own is None else own(workload)


Offers = Sequence[tuple[Project, tuple[Rival, ...]]]


def found_in(folder: Path | None, offers: Offers) -> tuple[list[Contender], list[str]]:
    """Contenders whose files are there, and for each project that is not a line on how to get it.

    Args:
        folder: of the rivals' files, or None.
        offers: the functions of each project.
    """
    contenders: list[Contender] = []
    notes: dict[str, str] = {}
    for project, functions in offers:
        missing = project.files if folder is None else project.missing(folder)
        if folder is not None and not missing:
            contenders += [replace(rival, folder=folder) for rival in functions]
            continue
        what = "nothing" if len(missing) == len(project.files) else f"no {missing[0]}"
        where = "there is no folder" if folder is None else f"{what} in {folder}"
        notes[project.name] = f"{project.name} ({project.version}) is not measured, {where}: {project.how}"
    return contenders, list(notes.values())


def rows_of(tensor: Tensor, workload: Workload, first_slot: int = 0) -> Callable[[int, Tensor], Tensor]:
    return lambda call, rows: tensor[first_slot + call * workload.batch + rows]


def behind_padding(tensor: Tensor) -> Tensor:
    """The same slots, one further: where slot 0 marks a padding row, it is nobody's."""
    return torch.cat([torch.zeros_like(tensor[:1]), tensor])


def grown(ring: Tensor, rows: int) -> Tensor:
    """The ring ``[N, H, R, ...]`` with as many rows as are wanted, the new ones 0."""
    result = ring.new_zeros(*ring.shape[:2], rows, *ring.shape[3:])
    result[:, :, : ring.shape[2]] = ring
    return result


def window_starts(workload: Workload) -> Tensor:
    """``[B + 1]``, where each row's tokens begin in the packed inputs."""
    return torch.arange(workload.batch + 1, device=workload.device, dtype=torch.int32) * workload.window


def all_accepted(workload: Workload) -> Tensor:
    """``[B]``, how many tokens of each window are kept."""
    return torch.full((workload.batch,), workload.window, device=workload.device, dtype=torch.int32)


def launches(launch: dict[str, Any], tried: Mapping[str, dict[str, Any]]) -> dict[str, Setting]:
    """Launch settings that are arguments of the calls: those of the one that is tried stand in ``launch``."""

    @contextmanager
    def taken(arguments: dict[str, Any]) -> Iterator[None]:
        launch.update(arguments)
        try:
            yield
        finally:
            launch.clear()

    return {name: partial(taken, arguments) for name, arguments in tried.items()}


def tiles(override: Callable[[tuple[int, int]], Any], tiles: tuple[tuple[int, int], ...]) -> dict[str, Setting]:
    pinned: dict[str, Setting] = {f"rows {m}, warps {w}": partial(override, (m, w)) for m, w in tiles}
    return {"its own": nullcontext, **pinned}
