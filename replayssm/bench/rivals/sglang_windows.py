"""SGLang's verify windows as contenders.

Of Gated DeltaNet, `replay`: each layer verifies in one launch; after acceptance another one, of all layers at once,
folds the rows whose ring could not hold two more windows, the window that was just accepted with them. Here a call is
both, the second for its layer alone, with a launch that puts the folded rows' cursors back to 0.

Of Kimi Delta Attention, `fold`: a layer verifies from the state and keeps the window's inputs; after acceptance the
state is read again and stepped through what was accepted. A call is both here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replayssm.bench.contenders import Prepared, Records
from replayssm.bench.rivals.common import Offers, Rival, all_accepted, launches, rows_of, window_starts
from replayssm.bench.rivals.delta import RING_LAUNCHES, delta_records, delta_ring
from replayssm.bench.rivals.loading import load
from replayssm.bench.rivals.projects import SGLANG
from replayssm.bench.workload import WindowWorkload, Workload, num_calls

_LINEAR = "sglang.kernels.ops.attention.linear"


@dataclass(frozen=True)
class ReservedWindows(WindowWorkload):
    """Windows in a ring of L rows with room kept for two of them: L/T − 1 windows are folded at once, then it is empty.

    Slot n stands at ``(n mod (L/T − 1)) T``.
    """

    @classmethod
    def of(cls, workload: Workload) -> ReservedWindows:
        assert isinstance(workload, WindowWorkload)
        given = vars(workload)
        phases = workload.ring_len // workload.tokens - 1
        return cls(**{**given, "calls": num_calls(workload.batch, [phases], 1, workload.calls)})

    @property
    def ring_rows(self) -> int:
        return self.ring_len

    @property
    def windows(self) -> int:
        """That are folded at once."""
        return self.ring_len // self.tokens - 1

    def flushes(self, cursors: Tensor) -> Tensor:
        return cursors == (self.windows - 1) * self.tokens

    def cursors(self) -> Tensor:
        numbers = torch.arange(self.num_slots, device=self.device)
        return (numbers % self.windows * self.tokens).int().view(self.calls, self.batch)

    def expected(
        self, rows: Tensor, checkpoint: Tensor, records: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The window in float64: outputs, and the state after its last token, which is what is folded."""
        return self._outputs_and_last_state(rows, checkpoint, records)


def _prepare(folder: Path, workload: Workload) -> Prepared:
    module = load(SGLANG, folder, f"{_LINEAR}.gdn_replayssm_spec_decode")
    x, p, tokens = workload.inputs(), workload.parameters(), workload.window
    states, drawn = workload.checkpoint(), workload.records()
    ring = delta_ring(drawn, workload.activation_dtype)
    rest = _low_parts(workload, drawn, ring)
    cursors, cursors_after = _Cursors(workload, 0), _Cursors(workload, tokens)
    out = torch.full_like(x["v"].flatten(0, 1), float("nan"))
    launch: dict[str, Any] = {}
    shared = {
        **{name: x[name].flatten(0, 1) for name in ("q", "k", "v", "a", "b")},
        **p,
        "checkpoint_state": states,
        **ring,
        "rawv_cache": rest[0],
        "rawk_cache": rest[1],
        "beta_cache": None,
        "out": out,
        "query_start_loc": window_starts(workload),
        **cursors.arguments,
        "max_cache_len": workload.ring_len,
        "max_spec_len": tokens,
        "null_block_id": -1,
        "launch_mode": "verify",
    }
    of_one_layer = {name: tensor[None] for name, tensor in {"checkpoint_state": states, **ring}.items()}
    commit = {
        **of_one_layer,
        "d_residual_cache": None if rest[0] is None else rest[0][None],
        "k_residual_cache": None if rest[1] is None else rest[1][None],
        **cursors_after.arguments,
        "accept_lens": all_accepted(workload),
    }

    def step(call: int, slots: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            module.gdn_replayssm_spec_decode(**shared, **launch, ssm_state_indices=slots, replay_indices=slots)
            module.commit_gdn_replayssm_circular(**commit, state_batch_indices=slots, replay_indices=slots)
            if call == workload.calls - 1:
                cursors_after.restore()  # one copy a walk
            return out.unflatten(0, workload.leading_shape)

        return run

    high = delta_records(ring, workload)

    def records(call: int, rows: Tensor) -> Records:
        slots = call * workload.batch + rows
        u, k, g = high(call, rows)
        low_u, low_k = (0 if low is None else low[slots] for low in rest)
        return u.float() + low_u, k.float() + low_k, g

    steps = [step(call, slots.clone()) for call, slots in enumerate(workload.slots())]
    return Prepared(steps, rows_of(states, workload), records, launches(launch, RING_LAUNCHES))


def _low_parts(workload: Workload, drawn: Records, ring: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """What the ring's dtype leaves of updates and keys, which is kept beside 16-bit checkpoints."""
    if workload.state_dtype == torch.float32:
        return None, None
    (u, k, _), dtype = drawn, workload.activation_dtype
    return (u - ring["d_cache"]).to(dtype), (k - ring["k_cache"]).to(dtype)


class _Cursors:
    """Cursors, bases and flags of all slots, ``ahead`` tokens on. Restoring all three is one copy."""

    def __init__(self, workload: Workload, ahead: int) -> None:
        cursors = workload.cursors().flatten()
        flags = workload.flushes(cursors).to(torch.int8) if ahead else torch.zeros_like(cursors, dtype=torch.int8)
        parts = (cursors + ahead, torch.zeros_like(cursors), flags)
        self._held = torch.cat([part.view(torch.int8) for part in parts])
        self._saved = self._held.clone()
        count = len(cursors)
        position, base, flag = self._held.split([4 * count, 4 * count, count])
        self.arguments = {
            "write_pos": position.view(torch.int32),
            "cache_base": base.view(torch.int32),
            "is_flush": flag,
        }

    def restore(self) -> None:
        self._held.copy_(self._saved)


def _fold(folder: Path, workload: Workload) -> Prepared:
    """Its launches are fixed by the shape, so there is nothing to choose."""
    verify = load(SGLANG, folder, f"{_LINEAR}.fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update
    commit = load(SGLANG, folder, f"{_LINEAR}.kda_replayssm_spec_decode").commit_kda_replayssm_spec
    x, p, spec, tokens = workload.inputs(), workload.parameters(), workload.spec, workload.window
    states, slots = workload.checkpoint(), workload.num_slots
    raw_v = states.new_empty(slots, spec.num_v_heads, tokens, spec.head_v_dim, dtype=workload.activation_dtype)
    raw_k = states.new_empty(slots, spec.num_k_heads, tokens, spec.head_k_dim, dtype=workload.activation_dtype)
    gates = states.new_empty(slots, spec.num_v_heads, tokens, spec.head_k_dim, dtype=torch.float32)
    betas = states.new_empty(slots, spec.num_v_heads, tokens, dtype=torch.float32)
    shared = {
        **{name: x[name].flatten(0, 1)[None] for name in ("q", "k", "v")},
        **p,
        "a": x["a"].flatten(0, 1).flatten(1),
        "b": x["b"].flatten(0, 1),
        "softplus_beta": 1.0,
        "softplus_threshold": 20.0,
        "initial_state_source": states,
        "cu_seqlens": window_starts(workload),
        "use_qk_l2norm_in_kernel": True,
        "is_kda": True,
        "disable_state_update": True,
        "cache_ring": True,
        "replayssm_rawv": raw_v,
        "replayssm_rawk": raw_k,
        "replayssm_g": gates,
        "replayssm_beta": betas,
    }
    accepted = all_accepted(workload)
    sizes = {"max_cache_len": tokens, "num_k_heads": spec.num_k_heads, "null_block_id": -1}

    def step(own: Tensor) -> Tensor:
        y: Tensor = verify(**shared, initial_state_indices=own)
        commit(states, raw_v, raw_k, gates, betas, own, accepted, **sizes)
        return y[0].unflatten(0, workload.leading_shape)

    return Prepared([partial(step, own.clone()) for own in workload.slots()], rows_of(states, workload), None)


def _fits(workload: Workload) -> bool:
    return 2 * workload.window <= workload.ring_len and workload.ring_len.bit_count() == 1


OFFERS: Offers = (
    (
        SGLANG,
        (
            Rival("sglang/replay", True, ("gdn",), _prepare, _fits, ReservedWindows.of),
            Rival("sglang/fold", False, ("kda",), _fold),
        ),
    ),
)
