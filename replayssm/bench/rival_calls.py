"""Rivals' decode functions as contenders: how a workload's tensors become their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.bench import rivals
from replayssm.bench.contenders import Contender, Prepared, Records, Setting
from replayssm.bench.workload import Workload


@dataclass(frozen=True)
class Rival:
    """A function of another project."""

    name: str
    has_ring: bool
    kinds: tuple[str, ...]
    folder: Path
    prepare_from: Callable[[Path, Workload], Prepared]

    def takes(self, kind: str, state_dtype: torch.dtype) -> bool:  # noqa: ARG002
        return kind in self.kinds

    def prepare(self, workload: Workload) -> Prepared:
        return self.prepare_from(self.folder, workload)


Offers = Sequence[tuple[rivals.Project, tuple[Rival, ...]]]


def found_in(folder: Path | None, offers: Offers | None = None) -> tuple[list[Contender], list[str]]:
    """Contenders whose files are there, and for each project that is not a line on how to get it.

    Args:
        folder: of the rivals' files, or None.
        offers: the functions of each project; default: those that decode.
    """
    contenders: list[Contender] = []
    notes = []
    for project, functions in _DECODE if offers is None else offers:
        missing = project.files if folder is None else project.missing(folder)
        if folder is not None and not missing:
            contenders += [replace(rival, folder=folder) for rival in functions]
            continue
        what = "nothing" if len(missing) == len(project.files) else f"no {missing[0]}"
        where = "there is no folder" if folder is None else f"{what} in {folder}"
        notes.append(f"{project.name} ({project.version}) is not measured, {where}: {project.how}")
    return contenders, notes


def _rows_of(tensor: Tensor, workload: Workload, first_slot: int = 0) -> Callable[[int, Tensor], Tensor]:
    return lambda call, rows: tensor[first_slot + call * workload.batch + rows]


def _behind_padding(tensor: Tensor) -> Tensor:
    """The same slots, one further: where slot 0 marks a padding row, it is nobody's."""
    return torch.cat([torch.zeros_like(tensor[:1]), tensor])


def _delta_arguments(workload: Workload) -> dict[str, Any]:
    """What SGLang's and vLLM's functions for the delta rule share: q, k and v of a token side by side."""
    x, p = workload.inputs(), workload.parameters()
    spec = workload.spec
    return {
        "mixed_qkv": torch.cat([x[name].flatten(1) for name in ("q", "k", "v")], dim=1),
        "a": x["a"],
        "b": x["b"],
        "A_log": p["A_log"],
        "dt_bias": p["dt_bias"],
        "scale": spec.head_k_dim**-0.5,
        "initial_state": workload.checkpoint(),
        "out": x["v"].new_full((workload.batch, 1, spec.num_v_heads, spec.head_v_dim), float("nan")),
        "use_qk_l2norm_in_kernel": True,
    }


def _delta_ring(workload: Workload) -> dict[str, Tensor]:
    """Rings with normalised keys. The kernels take any dtype: 16-bit records are their faster choice."""
    u, k, g = workload.records()
    dtype = workload.activation_dtype
    return {"d_cache": u.to(dtype), "k_cache": k.to(dtype), "g_cache": g}


#: Launches that are tried beside a ring kernel's own, which is one warp for tiles of 64 rows.
RING_LAUNCHES: tuple[dict[str, int], ...] = ({"num_warps": 2}, {"block_v": 32})


def _delta(
    function: Callable[..., Any],
    workload: Workload,
    ring: dict[str, Tensor],
    shared: dict[str, Any],
    first_slot: int = 0,
) -> Prepared:
    out, cursors = shared["out"], workload.cursors()
    launch: dict[str, int] = {}

    @contextmanager
    def launched(arguments: dict[str, int]) -> Iterator[None]:
        launch.update(arguments)
        try:
            yield
        finally:
            launch.clear()

    def step(call: int, slots: Tensor) -> Callable[[], Tensor]:
        own = {"ssm_state_indices": slots, **({"write_pos": cursors[call]} if ring else {})}

        def run() -> Tensor:
            function(**shared, **ring, **own, **launch)
            return out.squeeze(1)

        return run

    def records(call: int, rows: Tensor) -> Records:
        slots = first_slot + call * workload.batch + rows
        u, k, g = (ring[name][slots] for name in ("d_cache", "k_cache", "g_cache"))
        return u, k, g

    steps = [step(call, slots) for call, slots in enumerate(workload.slots() + first_slot)]
    state = _rows_of(shared["initial_state"], workload, first_slot)
    if not ring:
        return Prepared(steps, state, None)
    tried = {", ".join(f"{name} {value}" for name, value in a.items()): partial(launched, a) for a in RING_LAUNCHES}
    return Prepared(steps, state, records, {"its own": nullcontext, **tried})


def _sglang_packed(folder: Path, workload: Workload) -> Prepared:
    module = rivals.load(rivals.SGLANG, folder, "sglang.kernels.ops.attention.fla.fused_recurrent")
    shared = _delta_arguments(workload)
    if workload.kind == "gdn":
        return _delta(module.fused_recurrent_gated_delta_rule_packed_decode, workload, {}, shared)
    shared |= {"a": shared["a"].flatten(1), "dt_bias": shared["dt_bias"].flatten()}
    return _delta(module.fused_recurrent_kda_packed_decode, workload, {}, shared)


def _sglang_replay(folder: Path, workload: Workload) -> Prepared:
    name = "sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm"
    function = rivals.load(rivals.SGLANG, folder, name).fused_recurrent_linear_replayssm_decode
    shared = _delta_arguments(workload) | {"is_kda": workload.kind == "kda"}
    return _delta(function, workload, _delta_ring(workload), shared)


def _vllm_gdn_replay(folder: Path, workload: Workload) -> Prepared:
    name = "vllm.model_executor.layers.fla.ops.fused_recurrent_replayssm"
    function = rivals.load(rivals.VLLM_FORK, folder, name).fused_recurrent_gated_delta_rule_replayssm
    shared = _delta_arguments(workload)
    shared["initial_state"] = _behind_padding(shared["initial_state"])
    ring = {name: _behind_padding(tensor) for name, tensor in _delta_ring(workload).items()}
    return _delta(function, workload, ring, shared, first_slot=1)


def _mamba2_arguments(workload: Workload) -> dict[str, Any]:
    """Numbers that a head shares are expanded over its state with stride 0, as vLLM passes them."""
    x, p, spec = workload.inputs(), workload.parameters(), workload.spec
    p_dim, n_dim = spec.head_v_dim, spec.head_k_dim
    return {
        "state": workload.checkpoint(),
        "x": x["x"],
        "dt": x["dt"][..., None].expand(-1, -1, p_dim),
        "A": p["A"][:, None, None].expand(-1, p_dim, n_dim),
        "B": x["B"],
        "C": x["C"],
        "D": p["D"][:, None].expand(-1, p_dim),
        "dt_bias": p["dt_bias"][:, None].expand(-1, p_dim),
        "dt_softplus": True,
        "null_block_id": -1,
        "out": torch.full_like(x["x"], float("nan")),
    }


#: Rows of a tile and warps that are tried, beside the project's own choice for this GPU.
STATELESS_TILES = ((4, 1), (8, 1), (16, 1), (16, 2), (32, 4))
REPLAY_TILES = ((8, 1), (32, 1), (32, 2))


def tiles(override: Callable[[tuple[int, int]], Any], tiles: tuple[tuple[int, int], ...]) -> dict[str, Setting]:
    pinned: dict[str, Setting] = {f"rows {m}, warps {w}": partial(override, (m, w)) for m, w in tiles}
    return {"its own": nullcontext, **pinned}


def _vllm_stateless(folder: Path, workload: Workload) -> Prepared:
    module = rivals.load(rivals.VLLM_FORK, folder, "vllm.model_executor.layers.mamba.ops.mamba_ssm")
    shared = _mamba2_arguments(workload)

    def step(slots: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            module.selective_state_update(**shared, state_batch_indices=slots)
            return shared["out"]

        return run

    settings = tiles(module.override_ssm_config, STATELESS_TILES)
    steps = [step(slots) for slots in workload.slots()]
    return Prepared(steps, _rows_of(shared["state"], workload), None, settings)


def _vllm_mamba2_replay(folder: Path, workload: Workload) -> Prepared:
    ops, name = "vllm.model_executor.layers.mamba.ops", "selective_state_update_replayssm_output_only"
    function = getattr(rivals.load(rivals.VLLM_FORK, folder, f"{ops}.{name}"), name)
    config = rivals.load(rivals.VLLM_FORK, folder, f"{ops}.replayssm_config")
    shared, cursors, ring_len = _mamba2_arguments(workload), workload.cursors(), workload.ring_len
    flush = cursors == ring_len - 1
    u, k, g = workload.records()
    step_sizes = g / workload.parameters()["A"][:, None]  # Δ, from the log decay Δ·A
    dtype = workload.activation_dtype
    ring = {"x_cache": (u / step_sizes[..., None]).to(dtype), "dt_cache": step_sizes, "B_cache": k.to(dtype)}
    scratch = torch.empty(workload.batch, workload.spec.num_k_heads, ring_len, device=workload.device)
    shared |= {**ring, "bc_pre": scratch, "max_cache_len": ring_len}

    def step(call: int, slots: Tensor) -> Callable[[], Tensor]:
        own = {"state_batch_indices": slots, "write_pos": cursors[call], "is_flush": flush[call]}

        def run() -> Tensor:
            function(**shared, **own)
            return shared["out"]

        return run

    def records(call: int, rows: Tensor) -> Records:
        slots = call * workload.batch + rows
        sizes = ring["dt_cache"][slots]
        u = ring["x_cache"][slots].float() * sizes[..., None]
        return u, ring["B_cache"][slots], sizes * workload.parameters()["A"][:, None]

    steps = [step(call, slots) for call, slots in enumerate(workload.slots())]
    settings = tiles(partial(config.override_replayssm_config, "mamba2_output_only"), REPLAY_TILES)
    return Prepared(steps, _rows_of(shared["state"], workload), records, settings)


NOWHERE = Path()
_SGLANG = (
    Rival("sglang/replay", True, ("gdn", "kda"), NOWHERE, _sglang_replay),
    Rival("sglang/packed", False, ("gdn", "kda"), NOWHERE, _sglang_packed),
)
_VLLM = (
    Rival("vllm-fork/replay", True, ("gdn",), NOWHERE, _vllm_gdn_replay),
    Rival("vllm-fork/replay", True, ("mamba2",), NOWHERE, _vllm_mamba2_replay),
    Rival("vllm-fork/stateless", False, ("mamba2",), NOWHERE, _vllm_stateless),
)
_DECODE: Offers = ((rivals.SGLANG, _SGLANG), (rivals.VLLM_FORK, _VLLM))
