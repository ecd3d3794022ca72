"""FlashInfer's functions as contenders: decode of GDN, decode of Mamba-2 with and without a ring, verify windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.contenders import Prepared, Records
from replayssm.bench.rivals.common import Offers, Rival, rows_of
from replayssm.bench.rivals.loading import load
from replayssm.bench.rivals.mamba2 import mamba2_arguments
from replayssm.bench.rivals.projects import FLASHINFER
from replayssm.bench.workload import StepAsWindow, Workload

LONGEST_RING = 16
STATELESS = ("auto", "simple", "vertical", "horizontal")
REPLAY = ("auto", "monolith", "two-kernel")


def _of_choice(names: tuple[str, ...], choice: dict[str, str]) -> dict[str, Any]:
    """Launch settings that are an argument of the call."""

    @contextmanager
    def taken(name: str) -> Iterator[None]:
        choice["algorithm"] = name
        try:
            yield
        finally:
            choice.clear()

    return {name: partial(taken, name) for name in names}


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

    def step(slots: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            y, _ = function(**shared, initial_state_indices=slots)
            return y.squeeze(1)

        return run

    steps = [step(slots.clone()) for slots in workload.slots()]  # each aligned, as its kernels want them
    return Prepared(steps, rows_of(shared["initial_state"], workload), None)


def _stateless(folder: Path, workload: Workload) -> Prepared:
    maker = load(FLASHINFER, folder, "flashinfer.jit.mamba.selective_state_update")
    package = load(FLASHINFER, folder, "flashinfer.jit.mamba")
    vars(package).update({name: value for name, value in vars(maker).items() if name.startswith("gen_")})
    function = load(FLASHINFER, folder, "flashinfer.mamba.selective_state_update").selective_state_update
    shared, choice = mamba2_arguments(workload), dict[str, str]()
    shared["pad_slot_id"] = shared.pop("null_block_id")
    d_v = workload.spec.head_v_dim
    shared["dt"] = workload.inputs()["dt"].float()[..., None].expand(-1, -1, d_v)  # of the dtype of D and dt_bias

    def step(slots: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            function(**shared, state_batch_indices=slots, **choice)
            return shared["out"]

        return run

    steps = [step(slots) for slots in workload.slots()]
    return Prepared(steps, rows_of(shared["state"], workload), None, _of_choice(STATELESS, choice))


def _replay(folder: Path, workload: Workload) -> Prepared:
    """A ring of L + T rows, whose committed records are folded if T more don't fit into L: the rows that ours folds."""
    module = load(FLASHINFER, folder, "flashinfer.mamba.checkpointing_ssu")
    spec, tokens, dtype = workload.spec, workload.window, workload.activation_dtype
    heads, d_v, d_k = spec.checkpoint_shape
    x, p = workload.inputs(), workload.parameters()
    rates = p["A"][:, None]
    u, k, g = workload.records()
    sizes = g / rates  # Δ, from the log decay Δ·A
    ring = {"x_cache": u / sizes[..., None], "B_cache": k, "dt_cache": sizes}
    ring = {name: _with_rows(t, workload.ring_len + tokens) for name, t in ring.items()}
    ring |= {name: ring[name].to(dtype) for name in ("x_cache", "B_cache")}
    names = ("cb_scaled", "cumAdt_vec", "cb_old")
    scratch = module.allocate_checkpointing_ssu_scratch(
        workload.batch, heads, tokens, workload.ring_len, dtype, workload.device
    )
    shared = {
        "state": workload.checkpoint(),
        **ring,
        "ring_start": torch.zeros(workload.num_slots, dtype=torch.int32, device=workload.device),
        "prev_num_accepted_tokens": workload.cursors().flatten(),
        "x": x["x"],
        "dt": x["dt"][..., None].expand(-1, -1, -1, d_v),
        "A": p["A"][:, None, None].expand(-1, d_v, d_k),
        "B": x["B"],
        "C": x["C"],
        "D": p["D"][:, None].expand(-1, d_v),
        "dt_bias": p["dt_bias"][:, None].expand(-1, d_v),
        "dt_softplus": True,
        "out": torch.full_like(x["x"], float("nan")),
        **dict(zip(names, scratch, strict=True)),
    }
    choice: dict[str, str] = {}

    def step(slots: Tensor) -> Callable[[], Tensor]:
        return lambda: module.checkpointing_ssu(**shared, state_batch_indices=slots, **choice)

    def records(call: int, rows: Tensor) -> Records:
        slots = call * workload.batch + rows
        step_sizes = ring["dt_cache"][slots]
        return ring["x_cache"][slots] * step_sizes[..., None], ring["B_cache"][slots], step_sizes * rates

    steps = [step(slots) for slots in workload.slots()]
    return Prepared(steps, rows_of(shared["state"], workload), records, _of_choice(REPLAY, choice))


def _with_rows(ring: Tensor, rows: int) -> Tensor:
    """The ring ``[N, H, R, ...]`` with as many rows as are wanted, the new ones 0."""
    grown = ring.new_zeros(*ring.shape[:2], rows, *ring.shape[3:])
    grown[:, :, : ring.shape[2]] = ring
    return grown


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
