"""FlashInfer's functions as contenders: decode of GDN, decode of Mamba-2 with and without a ring, verify windows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.contenders import Prepared
from replayssm.bench.rivals.common import Offers, Rival, grown, launches, rows_of
from replayssm.bench.rivals.loading import load
from replayssm.bench.rivals.mamba2 import mamba2_arguments, mamba2_records, mamba2_ring, per_head
from replayssm.bench.rivals.projects import FLASHINFER
from replayssm.bench.workload import StepAsWindow, Workload

LONGEST_RING = 16
STATELESS = {name: {"algorithm": name} for name in ("auto", "simple", "vertical", "horizontal")}
REPLAY = {name: {"algorithm": name} for name in ("auto", "monolith", "two-kernel")}


def _gdn(folder: Path, workload: Workload) -> Prepared:
    """Its kernels are Hopper's at d_k = d_v = 128, chosen by dtype and batch."""
    function = load(FLASHINFER, folder, "flashinfer.gdn_decode").gated_delta_rule_decode_pretranspose
    x, p = workload.inputs(), workload.parameters()
    shared = {
        **{name: t.unsqueeze(1) for name, t in x.items()},
        **p,
        "state": None,
        "scale": workload.spec.head_k_dim**-0.5,
        "output": torch.full_like(x["v"].unsqueeze(1), float("nan")),
        "use_qk_l2norm": True,
        "initial_state": workload.checkpoint(),
        "backend": "flashinfer",
    }

    def step(slots: Tensor) -> Tensor:
        y: Tensor = function(**shared, initial_state_indices=slots)[0]
        return y.squeeze(1)

    steps = [partial(step, slots.clone()) for slots in workload.slots()]  # each aligned, as its kernels want them
    return Prepared(steps, rows_of(shared["initial_state"], workload), None)


def _stateless(folder: Path, workload: Workload) -> Prepared:
    maker = load(FLASHINFER, folder, "flashinfer.jit.mamba.selective_state_update")
    package = load(FLASHINFER, folder, "flashinfer.jit.mamba")
    vars(package).update({name: value for name, value in vars(maker).items() if name.startswith("gen_")})
    function = load(FLASHINFER, folder, "flashinfer.mamba.selective_state_update").selective_state_update
    shared, choice = mamba2_arguments(workload), dict[str, Any]()
    shared["pad_slot_id"] = shared.pop("null_block_id")
    d_v = workload.spec.head_v_dim
    shared["dt"] = workload.inputs()["dt"].float()[..., None].expand(-1, -1, d_v)  # of the dtype of D and dt_bias

    def step(slots: Tensor) -> Tensor:
        function(**shared, state_batch_indices=slots, **choice)
        out: Tensor = shared["out"]
        return out

    steps = [partial(step, slots) for slots in workload.slots()]
    return Prepared(steps, rows_of(shared["state"], workload), None, launches(choice, STATELESS))


def _replay(folder: Path, workload: Workload) -> Prepared:
    """A ring of L + T rows, whose committed records are folded if T more don't fit into L: the rows that ours folds."""
    module = load(FLASHINFER, folder, "flashinfer.mamba.checkpointing_ssu")
    x, spec, tokens = workload.inputs(), workload.spec, workload.window
    ring = {name: grown(t, workload.ring_len + tokens) for name, t in mamba2_ring(workload).items()}
    names = ("cb_scaled", "cumAdt_vec", "cb_old")
    scratch = module.allocate_checkpointing_ssu_scratch(
        workload.batch, spec.num_v_heads, tokens, workload.ring_len, workload.activation_dtype, workload.device
    )
    shared = {
        "state": workload.checkpoint(),
        **ring,
        "ring_start": torch.zeros(workload.num_slots, dtype=torch.int32, device=workload.device),
        "prev_num_accepted_tokens": workload.cursors().flatten(),
        "x": x["x"],
        "dt": x["dt"][..., None].expand(-1, -1, -1, spec.head_v_dim),
        "B": x["B"],
        "C": x["C"],
        **per_head(workload),
        "dt_softplus": True,
        "out": torch.full_like(x["x"], float("nan")),
        **dict(zip(names, scratch, strict=True)),
    }
    choice: dict[str, Any] = {}

    def step(slots: Tensor) -> Tensor:
        y: Tensor = module.checkpointing_ssu(**shared, state_batch_indices=slots, **choice)
        return y

    steps = [partial(step, slots) for slots in workload.slots()]
    state, records = rows_of(shared["state"], workload), mamba2_records(ring, workload)
    return Prepared(steps, state, records, launches(choice, REPLAY))


def _fits(workload: Workload) -> bool:
    return workload.ring_len <= LONGEST_RING


def _has_gdn_kernel(workload: Workload) -> bool:
    return workload.state_dtype in (torch.float32, torch.bfloat16)


STEPS: Offers = (
    (
        FLASHINFER,
        (
            Rival("flashinfer/replay", True, ("mamba2",), _replay, _fits, StepAsWindow.of),
            Rival("flashinfer/stateless", False, ("mamba2",), _stateless),
            Rival("flashinfer/stateless", False, ("gdn",), _gdn, _has_gdn_kernel),
        ),
    ),
)
WINDOWS: Offers = ((FLASHINFER, (Rival("flashinfer/replay", True, ("mamba2",), _replay, _fits),)),)
