"""Verify functions of vLLM and its fork as contenders: how a window's tensors become their arguments.

vLLM's own way to verify, `native`, writes the whole state after each token of a window, into a slot for each, and goes
on from the one of the last accepted token. The fork's replay kernels keep records in a ring of a power of two rows;
their rule folds a window's row when fewer than two windows fit into L + T records. With all tokens accepted and a T
that divides L these are the rows that our rule folds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.contenders import Prepared, Records, Setting
from replayssm.bench.rivals.common import Offers, Rival, all_accepted, grown, rows_of, tiles, window_starts
from replayssm.bench.rivals.delta import delta_records, delta_ring
from replayssm.bench.rivals.loading import load
from replayssm.bench.rivals.mamba2 import per_head
from replayssm.bench.rivals.projects import VLLM, VLLM_FORK
from replayssm.bench.workload import Workload

_FLA = "vllm.model_executor.layers.fla.ops"
_FLA_RELEASE = "vllm.third_party.flash_linear_attention.ops"
_MAMBA = "vllm.model_executor.layers.mamba.ops"

#: Rows of a tile and warps that are tried, beside the project's own choice.
NATIVE_TILES = ((8, 1), (16, 2))
REPLAY_TILES = ((32, 1),)


def _of_window(packed: Tensor, workload: Workload) -> Tensor:
    return packed.unflatten(0, workload.leading_shape)


def _slots_per_token(workload: Workload) -> tuple[Tensor, list[Tensor]]:
    """States behind slot 0, which is padding there, and for each call their slots ``[B, T]``."""
    count = workload.num_slots * workload.window
    states = workload.states(count + 1)
    numbers = torch.arange(1, count + 1, device=workload.device, dtype=torch.int32)
    by_call = numbers.view(workload.calls, workload.batch, workload.window)
    return states, [slots.clone() for slots in by_call]  # each aligned, as a caller's own tensor is


def _native(
    states: Tensor, slots: list[Tensor], verify: Callable[[Tensor], Tensor], settings: Mapping[str, Setting]
) -> Prepared:
    """A contender that starts from the state of the window's last slot, and ends there."""
    steps = [partial(verify, own) for own in slots]
    return Prepared(steps, lambda call, rows: states[slots[call][rows, -1]], None, settings)


def _gdn_native(folder: Path, workload: Workload) -> Prepared:
    module = load(VLLM, folder, f"{_FLA_RELEASE}.fused_sigmoid_gating")
    states, slots = _slots_per_token(workload)
    x, p = workload.inputs(), workload.parameters()
    shared = {name: x[name].flatten(0, 1)[None] for name in ("q", "k", "v")}
    shared |= {"a": x["a"].flatten(0, 1), "b": x["b"].flatten(0, 1), "A_log": p["A_log"], "dt_bias": p["dt_bias"]}
    accepted, starts = all_accepted(workload), window_starts(workload)

    def verify(own: Tensor) -> Tensor:
        y, _ = module.fused_sigmoid_gating_delta_rule_update(
            **shared,
            initial_state=states,
            cu_seqlens=starts,
            ssm_state_indices=own,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )
        return _of_window(y[0], workload)

    return _native(states, slots, verify, {"": nullcontext})


def _mamba2_native(folder: Path, workload: Workload) -> Prepared:
    module = load(VLLM, folder, f"{_MAMBA}.mamba_ssm")
    states, slots = _slots_per_token(workload)
    x = {name: t.flatten(0, 1) for name, t in workload.inputs().items()}
    d_v, out = workload.spec.head_v_dim, torch.full_like(x["x"], float("nan"))
    shared = {"x": x["x"], "dt": x["dt"][..., None].expand(-1, -1, d_v), "B": x["B"], "C": x["C"]}
    shared |= per_head(workload)
    accepted, starts = all_accepted(workload), window_starts(workload)

    def verify(own: Tensor) -> Tensor:
        module.selective_state_update(
            states,
            **shared,
            dt_softplus=True,
            state_batch_indices=own,
            out=out,
            num_accepted_tokens=accepted,
            cu_seqlens=starts,
        )
        return _of_window(out, workload)

    return _native(states, slots, verify, tiles(module.override_ssm_config, NATIVE_TILES))


def _ring_rows(workload: Workload) -> int:
    """Rows of the fork's ring: the next power of two that holds L + T."""
    return 1 << (workload.ring_len + workload.window - 1).bit_length()


def _cursors(workload: Workload) -> dict[str, Tensor]:
    """``write_pos``, and which slots fold."""
    cursors = workload.cursors().flatten()
    return {"write_pos": cursors, "is_flush": workload.flushes(cursors).to(torch.int8)}


def _replay_settings(config: Any, kernels: tuple[str, str], **shape: int) -> dict[str, Setting]:
    """Launch settings of the two kernels of a window: their own, and some with another tile in both."""

    @contextmanager
    def pinned(tile: tuple[int, int]) -> Iterator[None]:
        with ExitStack() as stack:
            for kernel in kernels:
                rest = config.get_replayssm_config(kernel, **shape)[2:]
                stack.enter_context(config.override_replayssm_config(kernel, (*tile, *rest)))
            yield

    return tiles(pinned, REPLAY_TILES)


def _gdn_replay(folder: Path, workload: Workload) -> Prepared:
    module = load(VLLM_FORK, folder, f"{_FLA}.gdn_replayssm_spec_decode")
    config = load(VLLM_FORK, folder, f"{_MAMBA}.replayssm_config")
    x, p, tokens = workload.inputs(), workload.parameters(), workload.window
    states, ring = workload.checkpoint(), delta_ring(workload.records(), workload.activation_dtype)
    ring = {name: grown(t, _ring_rows(workload)) for name, t in ring.items()}
    mixed = torch.cat([x[name].flatten(2) for name in ("q", "k", "v")], dim=2).flatten(0, 1)
    out = torch.full_like(x["v"].flatten(0, 1), float("nan"))
    shared = {
        "mixed_qkv": mixed,
        "a": x["a"].flatten(0, 1),
        "b": x["b"].flatten(0, 1),
        "A_log": p["A_log"],
        "dt_bias": p["dt_bias"],
        "checkpoint_state": states,
        **ring,
        "out": out,
        "query_start_loc": window_starts(workload),
        **_cursors(workload),
        "cache_base": torch.zeros(workload.num_slots, device=workload.device, dtype=torch.int32),
        "max_cache_len": workload.ring_len + tokens,
        "max_spec_len": tokens,
        "null_block_id": -1,
    }

    def verify(slots: Tensor) -> Tensor:
        module.gdn_replayssm_spec_decode(**shared, ssm_state_indices=slots)
        return _of_window(out, workload)

    steps = [partial(verify, slots.clone()) for slots in workload.slots()]
    settings = _replay_settings(config, ("gdn_spec_verify", "gdn_spec_flush"), max_spec_len=tokens)
    return Prepared(steps, rows_of(states, workload), delta_records(ring, workload), settings)


def _mamba2_replay(folder: Path, workload: Workload) -> Prepared:
    name = "selective_state_update_replayssm_spec"
    function = getattr(load(VLLM_FORK, folder, f"{_MAMBA}.{name}"), name)
    config = load(VLLM_FORK, folder, f"{_MAMBA}.replayssm_config")
    spec, tokens, dtype = workload.spec, workload.window, workload.activation_dtype
    states, rows = workload.checkpoint(), _ring_rows(workload)
    x, parameters = workload.inputs(), workload.parameters()
    u, k, g = workload.records()
    sizes = g / parameters["A"][:, None]  # Δ, from the log decay Δ·A
    bias = parameters["dt_bias"][:, None]
    raw = grown(sizes.expm1().log() - bias, rows)  # it keeps Δ before bias and softplus
    by_row = torch.cat([(t.movedim(2, 1)).flatten(2) for t in (u / sizes[..., None], k)], dim=2).to(dtype)
    ring = by_row.new_zeros(workload.num_slots, rows, by_row.shape[2])
    ring[:, : by_row.shape[1]] = by_row
    out = torch.full_like(x["x"].flatten(0, 1), float("nan"))
    width, groups = spec.num_v_heads * spec.head_v_dim, spec.num_k_heads
    spec_rows = 1 << (tokens - 1).bit_length()
    shared = {
        "state_checkpoint": states,
        "post_conv_cache": ring,
        "dt_cache": raw,
        "conv_out": torch.cat([x[name].flatten(2) for name in ("x", "B", "C")], dim=2).flatten(0, 1),
        "dt_spec": x["dt"].flatten(0, 1),
        **_cursors(workload),
        "post_conv_state_pos": torch.zeros(workload.num_slots, device=workload.device, dtype=torch.int32),
        "query_start_loc": window_starts(workload),
        "max_cache_len": workload.ring_len + tokens,
        "max_spec_len": tokens,
        "d_inner": width,
        "ngroups": groups,
        "dstate": spec.head_k_dim,
        **per_head(workload),
        "out": out,
        "bc_pre": torch.empty(workload.batch, groups, rows, spec_rows, device=workload.device, dtype=dtype),
        "null_block_id": -1,
    }

    def verify(slots: Tensor) -> Tensor:
        function(**shared, state_batch_indices=slots)
        return _of_window(out, workload)

    def records(call: int, rows: Tensor) -> Records:
        slots = call * workload.batch + rows
        step_sizes = torch.nn.functional.softplus(raw[slots] + bias)
        x_ring, k_ring = ring[slots].split([width, groups * spec.head_k_dim], dim=2)
        u = x_ring.unflatten(2, (spec.num_v_heads, spec.head_v_dim)).movedim(1, 2).float() * step_sizes[..., None]
        k = k_ring.unflatten(2, (groups, spec.head_k_dim)).movedim(1, 2)
        return u, k, step_sizes * parameters["A"][:, None]

    steps = [partial(verify, slots.clone()) for slots in workload.slots()]
    shape = {"dstate": spec.head_k_dim, "base_block": workload.ring_len, "max_spec_len": tokens}
    settings = _replay_settings(config, ("mamba2_spec_verify", "mamba2_spec_flush"), **shape)
    return Prepared(steps, rows_of(states, workload), records, settings)


OFFERS: Offers = (
    (
        VLLM_FORK,
        (
            Rival("vllm-fork/replay", True, ("gdn",), _gdn_replay),
            Rival("vllm-fork/replay", True, ("mamba2",), _mamba2_replay),
        ),
    ),
    (
        VLLM,
        (
            Rival("vllm/native", False, ("gdn",), _gdn_native),
            Rival("vllm/native", False, ("mamba2",), _mamba2_native),
        ),
    ),
)
