"""Rivals' decode steps of Mamba-2: how a workload's tensors become their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.contenders import Prepared, Records, Setting
from replayssm.bench.rivals.common import Offers, Rival, rows_of, tiles
from replayssm.bench.rivals.loading import Project, load
from replayssm.bench.rivals.projects import MAMBA, VLLM, VLLM_FORK
from replayssm.bench.workload import Workload

_OPS = "vllm.model_executor.layers.mamba.ops"
_REPLAY = "selective_state_update_replayssm_output_only"

#: Rows of a tile and warps that are tried, beside the project's own choice for this GPU.
STATELESS_TILES = ((4, 1), (8, 1), (16, 1), (16, 2), (32, 4))
FORK_TILES = ((8, 1), (32, 1), (32, 2))
#: Of vLLM's replay kernel also the columns at once, without and with a flush, and stages.
RELEASE_TILES = ((8, 1, 64, 128, 2), (16, 1, 128, 128, 2), (32, 1, 64, 64, 2), (32, 2, 128, 128, 2))


def mamba2_arguments(workload: Workload) -> dict[str, Any]:
    """Numbers that a head shares are expanded over its state with stride 0, as vLLM passes them."""
    x = workload.inputs()
    return {
        "state": workload.checkpoint(),
        "x": x["x"],
        "dt": x["dt"][..., None].expand(-1, -1, workload.spec.head_v_dim),
        "B": x["B"],
        "C": x["C"],
        **per_head(workload),
        "dt_softplus": True,
        "null_block_id": -1,
        "out": torch.full_like(x["x"], float("nan")),
    }


def per_head(workload: Workload) -> dict[str, Tensor]:
    """The parameters, expanded in the same way."""
    p, (_, d_v, d_k) = workload.parameters(), workload.spec.checkpoint_shape
    return {
        "A": p["A"][:, None, None].expand(-1, d_v, d_k),
        "D": p["D"][:, None].expand(-1, d_v),
        "dt_bias": p["dt_bias"][:, None].expand(-1, d_v),
    }


def mamba2_ring(workload: Workload) -> dict[str, Tensor]:
    """Records of x, B and Δ, which follows from the log decay Δ·A."""
    u, k, g = workload.records()
    sizes, dtype = g / workload.parameters()["A"][:, None], workload.activation_dtype
    return {"x_cache": (u / sizes[..., None]).to(dtype), "B_cache": k.to(dtype), "dt_cache": sizes}


def mamba2_records(ring: dict[str, Tensor], workload: Workload) -> Callable[[int, Tensor], Records]:
    rates = workload.parameters()["A"][:, None]

    def records(call: int, rows: Tensor) -> Records:
        slots = call * workload.batch + rows
        sizes = ring["dt_cache"][slots]
        return ring["x_cache"][slots].float() * sizes[..., None], ring["B_cache"][slots], sizes * rates

    return records


def _stateless(folder: Path, workload: Workload) -> Prepared:
    module = load(VLLM, folder, f"{_OPS}.mamba_ssm")
    shared = mamba2_arguments(workload)

    def step(slots: Tensor) -> Tensor:
        module.selective_state_update(**shared, state_batch_indices=slots)
        out: Tensor = shared["out"]
        return out

    settings = tiles(module.override_ssm_config, STATELESS_TILES)
    steps = [partial(step, slots) for slots in workload.slots()]
    return Prepared(steps, rows_of(shared["state"], workload), None, settings)


def _mamba_ssm(folder: Path, workload: Workload) -> Prepared:
    """Its launch is fixed by d_k, so there is nothing to choose."""
    function = load(MAMBA, folder, "mamba_ssm.ops.triton.selective_state_update").selective_state_update
    shared = mamba2_arguments(workload)
    for name in ("null_block_id", "out"):
        del shared[name]

    steps = [partial(function, **shared, state_batch_indices=slots) for slots in workload.slots()]
    return Prepared(steps, rows_of(shared["state"], workload), None)


def _fork_replay(folder: Path, workload: Workload) -> Prepared:
    config = load(VLLM_FORK, folder, f"{_OPS}.replayssm_config")
    settings = tiles(partial(config.override_replayssm_config, "mamba2_output_only"), FORK_TILES)
    return _replay(VLLM_FORK, folder, workload, settings)


def _release_replay(folder: Path, workload: Workload) -> Prepared:
    config = load(VLLM, folder, f"{_OPS}.replayssm_config")

    @contextmanager
    def pinned(tile: tuple[int, ...]) -> Iterator[None]:
        config._overrides["mamba2_output_only"] = tile
        try:
            yield
        finally:
            del config._overrides["mamba2_output_only"]

    tried: dict[str, Setting] = {
        f"rows {t[0]}, warps {t[1]}, columns {t[2]}": partial(pinned, t) for t in RELEASE_TILES
    }
    return _replay(VLLM, folder, workload, {"its own": nullcontext, **tried})


def _replay(project: Project, folder: Path, workload: Workload, settings: Mapping[str, Setting]) -> Prepared:
    function = getattr(load(project, folder, f"{_OPS}.{_REPLAY}"), _REPLAY)
    shared, cursors, ring_len = mamba2_arguments(workload), workload.cursors(), workload.ring_len
    flush = cursors == ring_len - 1
    ring = mamba2_ring(workload)
    scratch = torch.empty(workload.batch, workload.spec.num_k_heads, ring_len, device=workload.device)
    shared |= {**ring, "bc_pre": scratch, "max_cache_len": ring_len}

    def step(call: int, slots: Tensor) -> Callable[[], Tensor]:
        own = {"state_batch_indices": slots, "write_pos": cursors[call], "is_flush": flush[call]}

        def run() -> Tensor:
            function(**shared, **own)
            return shared["out"]

        return run

    steps = [step(call, slots) for call, slots in enumerate(workload.slots())]
    return Prepared(steps, rows_of(shared["state"], workload), mamba2_records(ring, workload), settings)


OFFERS: Offers = (
    (
        VLLM,
        (
            Rival("vllm/replay", True, ("mamba2",), _release_replay),
            Rival("vllm/stateless", False, ("mamba2",), _stateless),
        ),
    ),
    (VLLM_FORK, (Rival("vllm-fork/replay", True, ("mamba2",), _fork_replay),)),
    (MAMBA, (Rival("mamba/stateless", False, ("mamba2",), _mamba_ssm),)),
)
