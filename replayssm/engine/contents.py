"""What a slot and pages hold, as tensors by name: taken out, put in, looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def gather(runner: Any, slot: int, pages: Sequence[int]) -> dict[str, Tensor]:
    """The states of a slot and the content of pages, on the host.

    Names are ``states.<layer>`` ``[H_v, d_v, d_k]`` float32, ``convs.<layer>`` ``[C, W − 1]``, and ``pages.<name>``
    ``[number of pages, ...]``.
    """
    return {name: tensor.detach().cpu().contiguous() for name, tensor in _held(runner, slot, pages).items()}


def is_finite(runner: Any, slot: int, pages: Sequence[int]) -> bool:
    """Whether all numbers of a slot and of pages are finite. Waits for the device."""
    finite = [tensor.isfinite().all() for tensor in _held(runner, slot, pages).values()]
    return bool(torch.stack(finite).all())


def _held(runner: Any, slot: int, pages: Sequence[int]) -> dict[str, Tensor]:
    """What :func:`gather` gives, on the device."""
    pool = runner.pool
    tensors: dict[str, Tensor] = {}
    for layer in range(len(pool.layers)):
        tensors[f"states.{layer}"] = pool.read_state(layer, [slot])[0]
        tensors[f"convs.{layer}"] = pool.conv_state(layer)[slot]
    for name, tensor in runner.page_tensors().items():
        index = torch.tensor(list(pages), dtype=torch.long, device=tensor.device)
        tensors[f"pages.{name}"] = tensor.index_select(0, index)
    return tensors


def scatter(runner: Any, slot: int, pages: Sequence[int], tensors: dict[str, Tensor]) -> None:
    """Write what :func:`gather` gave into a live slot and some pages."""
    pool = runner.pool
    for layer in range(len(pool.layers)):
        pool.write_state(layer, [slot], tensors[f"states.{layer}"][None].to(pool.device))
        pool.conv_state(layer)[slot] = tensors[f"convs.{layer}"].to(pool.device)
    pool.reset_cursors([slot])
    for name, tensor in runner.page_tensors().items():
        index = torch.tensor(list(pages), dtype=torch.long, device=tensor.device)
        tensor.index_copy_(0, index, tensors[f"pages.{name}"].to(tensor.device))
