"""What every contender of one measurement works on: the same numbers, the same cursors, the same walk over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm import recurrence
from replayssm.state import LayerSpec

KINDS = ("gdn", "kda", "mamba2")

#: One layer of a released model of each kind: Qwen3.5-35B-A3B, Kimi-Linear-48B-A3B, Nemotron-3-Super-120B.
SHAPES = {
    "gdn": LayerSpec("head", "delta", 16, 32, 128, 128),
    "kda": LayerSpec("channel", "delta", 32, 32, 128, 128),
    "mamba2": LayerSpec("head", "additive", 8, 128, 128, 64),
}


def shape_name(spec: LayerSpec) -> str:
    """For instance ``k16 v32 128x128``: key heads, value heads, d_v × d_k."""
    return f"k{spec.num_k_heads} v{spec.num_v_heads} {spec.head_v_dim}x{spec.head_k_dim}"


def num_calls(batch: int, ring_lens: Sequence[int], state_bytes: int, working_set: float) -> int:
    """Calls of one walk: enough to read ``working_set`` bytes, and such that rows stand evenly over all phases.

    Rows of all calls are numbered through, row n stands at ``n mod L``; so ``calls · batch`` is a multiple of each L.
    """
    fair = math.lcm(*(ring_len // math.gcd(batch, ring_len) for ring_len in ring_lens))
    return fair * math.ceil(max(1, working_set / state_bytes) / fair)


@dataclass(frozen=True)
class Workload:
    """A walk of ``calls`` calls, each a step of ``batch`` rows with slots of its own: N = calls · batch slots.

    Slot n stands at cursor ``n mod L``. Inputs and outputs are shared by the calls, because in a model they come from
    the layer before and are in the cache. The seed is fixed: each contender gets the same numbers.
    """

    kind: str
    spec: LayerSpec
    batch: int
    state_dtype: torch.dtype
    ring_len: int
    activation_dtype: torch.dtype
    device: torch.device
    calls: int

    @property
    def num_slots(self) -> int:
        return self.calls * self.batch

    def cursors(self) -> Tensor:
        """``[calls, B]`` int32."""
        numbers = torch.arange(self.num_slots, device=self.device)
        return (numbers % self.ring_len).int().view(self.calls, self.batch)

    def slots(self) -> Tensor:
        """``[calls, B]`` int32."""
        return torch.arange(self.num_slots, device=self.device, dtype=torch.int32).view(self.calls, self.batch)

    def inputs(self) -> dict[str, Tensor]:
        """Projections of one token for each row, named as the operators name them."""
        spec, rng = self.spec, self._generator(1)

        def new(*shape: int) -> Tensor:
            x = torch.randn(self.batch, *shape, device=self.device, generator=rng)
            return x.to(self.activation_dtype)

        h_k, h_v, d_k, d_v = spec.num_k_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
        if self.kind == "mamba2":
            return {"x": new(h_v, d_v), "dt": new(h_v), "B": new(h_k, d_k) * d_k**-0.5, "C": new(h_k, d_k)}
        gate = (h_v, d_k) if self.kind == "kda" else (h_v,)
        return {"q": new(h_k, d_k), "k": new(h_k, d_k), "v": new(h_v, d_v), "a": new(*gate), "b": new(h_v)}

    def parameters(self) -> dict[str, Tensor]:
        """Float32 parameters of the layer. Time steps and log decays are about 0.05, as trained models have them."""
        h_v, d_k = self.spec.num_v_heads, self.spec.head_k_dim
        rates = torch.linspace(0.5, 1.5, h_v, device=self.device)
        bias = torch.full((h_v, d_k) if self.kind == "kda" else (h_v,), -3.0, device=self.device)
        if self.kind == "mamba2":
            return {"A": -rates, "D": rates.flip(0), "dt_bias": bias}
        return {"A_log": rates.log(), "dt_bias": bias}

    def checkpoint(self) -> Tensor:
        """``[N, H_v, d_v, d_k]`` in the state's dtype."""
        shape = (self.num_slots, *self.spec.checkpoint_shape)
        new = torch.empty(shape, device=self.device, dtype=self.state_dtype)
        return new.normal_(generator=self._generator(2))

    def records(self) -> tuple[Tensor, Tensor, Tensor]:
        """Float32 records of all L ring rows: u ``[N, H_v, L, d_v]``, unit keys ``[N, H_k, L, d_k]``, log decays."""
        spec, rows, rng = self.spec, (self.num_slots, self.ring_len), self._generator(3)

        def new(heads: int, *dims: int) -> Tensor:
            return torch.empty(rows[0], heads, rows[1], *dims, device=self.device)

        u = new(spec.num_v_heads, spec.head_v_dim).normal_(std=0.3, generator=rng)
        k = new(spec.num_k_heads, spec.head_k_dim).normal_(std=spec.head_k_dim**-0.5, generator=rng)
        g = new(spec.num_v_heads, *spec.gate_shape).uniform_(-0.1, -0.02, generator=rng)
        return u, k, g

    def expected(
        self, rows: Tensor, checkpoint: Tensor, records: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The step in float64 from what a contender holds before it: output ``[R, H_v, d_v]`` and the state after.

        Args:
            rows: ``[R]``, rows of a batch.
            checkpoint: ``[R, H_v, d_v, d_k]``.
            records: the committed records ``(u, k, g)`` of these rows, or None where there is no ring.
        """
        inputs = {name: x[rows].double() for name, x in self.inputs().items()}
        parameters = {name: x.double() for name, x in self.parameters().items()}
        state = checkpoint.double()
        if records is not None:
            u, k, g = (x.double() for x in records)
            state = recurrence.fold(state, u, k, g)
        if self.kind == "mamba2":
            delta = recurrence.mamba2_time_step(inputs["dt"], parameters["dt_bias"])
            update, decay = delta[..., None] * inputs["x"], delta * parameters["A"]
            state, y = recurrence.step(state, inputs["C"], inputs["B"], update, decay, None, "additive")
            return y + parameters["D"][:, None] * inputs["x"], state
        log_decay = recurrence.kda_log_decay if self.kind == "kda" else recurrence.gdn_log_decay
        g = log_decay(inputs["a"], parameters["A_log"], parameters["dt_bias"])
        q, k = (inputs[name] * recurrence.inverse_norm(inputs[name])[..., None] for name in ("q", "k"))
        q = q * self.spec.head_k_dim**-0.5
        state, y = recurrence.step(state, q, k, inputs["v"], g, inputs["b"].sigmoid(), "delta")
        return y, state

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)
