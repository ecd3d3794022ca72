"""transformers' own decode steps in PyTorch, what replay replaces on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm.bench.contenders import Prepared
from replayssm.bench.workload import Workload


@dataclass(frozen=True)
class Upstream:
    """Reads and writes a float32 state at every token, each call its own."""

    name: str = "transformers/torch"
    has_ring: bool = False

    def takes(self, workload: Workload) -> bool:
        return workload.state_dtype == torch.float32

    def prepare(self, workload: Workload) -> Prepared:
        import transformers

        transformers.logging.set_verbosity_error()  # it warns of packages that would make it faster on a GPU
        states = list(workload.checkpoint().split(workload.batch))
        make = {"gdn": _gdn, "kda": _kda, "mamba2": _mamba2}[workload.kind]
        transposed = workload.kind != "mamba2"  # the delta rule's states are [.., d_k, d_v] there
        if transposed:
            states = [state.transpose(-1, -2).contiguous() for state in states]
        step_on = make(workload)

        def step(call: int) -> Callable[[], Tensor]:
            def run() -> Tensor:
                y, states[call] = step_on(states[call])
                return y

            return run

        def state(call: int, rows: Tensor) -> Tensor:
            kept = states[call][rows]
            return kept.transpose(-1, -2) if transposed else kept

        return Prepared([step(call) for call in range(workload.calls)], state, None)


StepOn = Callable[[Tensor], tuple[Tensor, Tensor]]


def _gdn(workload: Workload) -> StepOn:
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule as upstream

    x, p, group = workload.inputs(), workload.parameters(), workload.spec.num_v_heads // workload.spec.num_k_heads

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        g = -p["A_log"].exp() * F.softplus(x["a"].float() + p["dt_bias"])
        q, k = (x[name].repeat_interleave(group, dim=1) for name in ("q", "k"))
        args = (t.unsqueeze(1) for t in (q, k, x["v"], g, x["b"].sigmoid()))
        y, state = upstream(*args, state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return y.squeeze(1), state

    return run


def _kda(workload: Workload) -> StepOn:
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention as upstream

    x, p = workload.inputs(), workload.parameters()

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        g = -p["A_log"].exp()[:, None] * F.softplus(x["a"].float() + p["dt_bias"])
        args = (t.unsqueeze(1) for t in (x["q"], x["k"], x["v"], g, x["b"].sigmoid()))
        y, state = upstream(*args, state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return y.squeeze(1), state

    return run


def _mamba2(workload: Workload) -> StepOn:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update as upstream

    x, p, spec = workload.inputs(), workload.parameters(), workload.spec
    # Expanded over the head's channels, as Mamba2Mixer does.
    dt, D, dt_bias = (t[..., None].expand(*t.shape, spec.head_v_dim) for t in (x["dt"], p["D"], p["dt_bias"]))
    A = p["A"][:, None, None].expand(-1, spec.head_v_dim, spec.head_k_dim)

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        return upstream(state, x["x"], dt, A, x["B"], x["C"], D, z=None, dt_bias=dt_bias, dt_softplus=True), state

    return run
