"""Rivals' decode steps of Gated DeltaNet and Kimi Delta Attention: how a workload's tensors become their arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.contenders import Prepared, Records
from replayssm.bench.rivals.common import Offers, Rival, behind_padding, launches, rows_of
from replayssm.bench.rivals.loading import load
from replayssm.bench.rivals.projects import FLA, SGLANG, VLLM_FORK
from replayssm.bench.workload import Workload

_SGLANG = "sglang.kernels.ops.attention"


def delta_arguments(workload: Workload) -> dict[str, Any]:
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


def delta_ring(records: Records, dtype: torch.dtype) -> dict[str, Tensor]:
    """Rings with normalised keys. The kernels take any dtype: 16-bit records are their faster choice."""
    u, k, g = records
    return {"d_cache": u.to(dtype), "k_cache": k.to(dtype), "g_cache": g}


def delta_records(ring: dict[str, Tensor], workload: Workload, first_slot: int = 0) -> Callable[[int, Tensor], Records]:
    u, k, g = (rows_of(ring[name], workload, first_slot) for name in ("d_cache", "k_cache", "g_cache"))
    return lambda call, rows: (u(call, rows), k(call, rows), g(call, rows))


#: Launches that are tried of a ring kernel: its own is one warp for tiles of 64 rows.
RING_LAUNCHES: dict[str, dict[str, int]] = {
    "its own": {},
    "num_warps 2": {"num_warps": 2},
    "block_v 32": {"block_v": 32},
}


def delta_steps(
    function: Callable[..., Any],
    workload: Workload,
    ring: dict[str, Tensor],
    shared: dict[str, Any],
    first_slot: int = 0,
) -> Prepared:
    out, cursors = shared["out"], workload.cursors()
    launch: dict[str, Any] = {}

    def step(call: int, slots: Tensor) -> Callable[[], Tensor]:
        own = {"ssm_state_indices": slots, **({"write_pos": cursors[call]} if ring else {})}

        def run() -> Tensor:
            function(**shared, **ring, **own, **launch)
            return out.squeeze(1)

        return run

    steps = [step(call, slots) for call, slots in enumerate(workload.slots() + first_slot)]
    state = rows_of(shared["initial_state"], workload, first_slot)
    if not ring:
        return Prepared(steps, state, None)
    return Prepared(steps, state, delta_records(ring, workload, first_slot), launches(launch, RING_LAUNCHES))


def _sglang_packed(folder: Path, workload: Workload) -> Prepared:
    module = load(SGLANG, folder, f"{_SGLANG}.fla.fused_recurrent")
    shared = delta_arguments(workload)
    if workload.kind == "gdn":
        return delta_steps(module.fused_recurrent_gated_delta_rule_packed_decode, workload, {}, shared)
    # Where its CUDA kernel can be had it would take that: the two are measured beside each other.
    vars(load(SGLANG, folder, f"{_SGLANG}.kda_packed_decode"))["covered"] = lambda *_: False
    return delta_steps(module.fused_recurrent_kda_packed_decode, workload, {}, shared | _flat_gates(shared))


def _flat_gates(shared: dict[str, Any]) -> dict[str, Tensor]:
    return {"a": shared["a"].flatten(1), "dt_bias": shared["dt_bias"].flatten()}


def _sglang_cuda(folder: Path, workload: Workload) -> Prepared:
    function = load(SGLANG, folder, f"{_SGLANG}.kda_packed_decode").kda_packed_decode
    shared = delta_arguments(workload)
    shared |= {**_flat_gates(shared), "num_q_heads": workload.spec.num_k_heads}
    del shared["use_qk_l2norm_in_kernel"]  # it always does
    return delta_steps(function, workload, {}, shared)


def _sglang_replay(folder: Path, workload: Workload) -> Prepared:
    name = f"{_SGLANG}.linear.fused_recurrent_linear_replayssm"
    function = load(SGLANG, folder, name).fused_recurrent_linear_replayssm_decode
    shared = delta_arguments(workload) | {"is_kda": workload.kind == "kda"}
    return delta_steps(function, workload, delta_ring(workload.records(), workload.activation_dtype), shared)


def _vllm_gdn_replay(folder: Path, workload: Workload) -> Prepared:
    name = "vllm.model_executor.layers.fla.ops.fused_recurrent_replayssm"
    function = load(VLLM_FORK, folder, name).fused_recurrent_gated_delta_rule_replayssm
    shared = delta_arguments(workload)
    shared["initial_state"] = behind_padding(shared["initial_state"])
    ring = delta_ring(workload.records(), workload.activation_dtype)
    ring = {name: behind_padding(tensor) for name, tensor in ring.items()}
    return delta_steps(function, workload, ring, shared, first_slot=1)


def _fla_arguments(workload: Workload) -> dict[str, Any]:
    """One token of each row, as sequences of length 1."""
    x, p = workload.inputs(), workload.parameters()
    return {
        **{name: x[name].unsqueeze(1) for name in ("q", "k", "v")},
        "g": x["a"].unsqueeze(1),
        "beta": x["b"].unsqueeze(1),
        **p,
        "scale": workload.spec.head_k_dim**-0.5,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }


def _fla_gdn(folder: Path, workload: Workload) -> Prepared:
    """It writes new states: those of a call are the next ones that it reads."""
    function = load(FLA, folder, "fla.ops.gated_delta_rule.fused_recurrent").fused_recurrent_gated_delta_rule_fwd
    shared = _fla_arguments(workload) | {"output_final_state": True, "state_v_first": True}
    states = list(workload.checkpoint().split(workload.batch))

    def step(call: int) -> Callable[[], Tensor]:
        def run() -> Tensor:
            y, states[call] = function(**shared, initial_state=states[call])
            return y.squeeze(1)

        return run

    return Prepared([step(call) for call in range(workload.calls)], lambda call, rows: states[call][rows], None)


def _fla_kda(folder: Path, workload: Workload) -> Prepared:
    """The form in which the state is a pool, written in place."""
    function = load(FLA, folder, "fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
    shared = _fla_arguments(workload) | {"inplace_final_state": True, "state_v_first": True}
    shared |= {"use_gate_in_kernel": True, "initial_state": workload.checkpoint()}
    shared["out"] = torch.full_like(shared["v"], float("nan"))

    def step(slots: Tensor) -> Tensor:
        y: Tensor = function(**shared, ssm_state_indices=slots)[0]
        return y.squeeze(1)

    steps = [partial(step, slots) for slots in workload.slots()]
    return Prepared(steps, rows_of(shared["initial_state"], workload), None)


def _has_float32_states(workload: Workload) -> bool:
    return workload.state_dtype == torch.float32


def _sglang_takes_cuda(workload: Workload) -> bool:
    """Else SGLang itself takes its Triton kernel."""
    return _has_float32_states(workload) and workload.batch >= 8


OFFERS: Offers = (
    (
        SGLANG,
        (
            Rival("sglang/replay", True, ("gdn", "kda"), _sglang_replay),
            Rival("sglang/packed", False, ("gdn", "kda"), _sglang_packed),
            Rival("sglang/cuda", False, ("kda",), _sglang_cuda, _sglang_takes_cuda),
        ),
    ),
    (VLLM_FORK, (Rival("vllm-fork/replay", True, ("gdn",), _vllm_gdn_replay),)),
    (
        FLA,
        (
            Rival("fla/recurrent", False, ("gdn",), _fla_gdn, _has_float32_states),
            Rival("fla/recurrent", False, ("kda",), _fla_kda),
        ),
    ),
)
