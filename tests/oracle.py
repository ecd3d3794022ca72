"""Random layers and the float64 oracle that every operator is compared with.

A :class:`Layer` draws the projections of one token, calls the public operator on them, and steps the float64
recurrence on the same values, so that a test reads as: draw, step both, compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replayssm import ReplayPool, ops, recurrence
from replayssm.state import LayerSpec

KINDS = ("gdn", "kda", "kda_bounded", "mamba2")

#: (kind, H_k, H_v, d_k, d_v), by name: every head ratio and odd dimension of released models, with few heads.
SHAPES = {
    "gdn-128x128-ratio2": ("gdn", 2, 4, 128, 128),
    "gdn-128x128-ratio1": ("gdn", 2, 2, 128, 128),
    "gdn-64x64-ratio3": ("gdn", 2, 6, 64, 64),
    "gdn-32x32-ratio4": ("gdn", 1, 4, 32, 32),
    "gdn-16x16-ratio8": ("gdn", 1, 8, 16, 16),
    "gdn-olmo-96x192": ("gdn", 2, 2, 96, 192),
    "kda-128x128": ("kda", 2, 2, 128, 128),
    "kda-bounded-64x64": ("kda_bounded", 3, 3, 64, 64),
    "mamba2-64x128-groups2": ("mamba2", 2, 6, 128, 64),
    "mamba2-80x128-groups1": ("mamba2", 1, 4, 128, 80),
    "mamba2-64x256": ("mamba2", 1, 3, 256, 64),
    "mamba2-64x64-groups4": ("mamba2", 4, 4, 64, 64),
    "gdn-one-head-8x8": ("gdn", 1, 1, 8, 8),
    "gdn-odd-17x33": ("gdn", 1, 2, 17, 33),
}

LOWER_BOUND = -5.0


def relative_error(x: Tensor, reference: Tensor) -> float:
    """‖x − ref‖ / ‖ref‖; NaN if x holds one."""
    norm = reference.double().norm().item()
    return (x.double() - reference.double()).norm().item() / max(norm, 1e-30)


@dataclass
class Layer:
    """Fixed parameters of one random layer, and how to step it."""

    kind: str
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    dtype: torch.dtype = torch.float32
    seed: int = 0
    beta_scale: float = 1.0
    device: str = "cpu"
    backend: str = "auto"

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        h, d_k = self.num_v_heads, self.head_k_dim
        # Decays between 0.7 and 0.999 per token, as trained models have them.
        self.A_log = (torch.rand(h, generator=self.rng) * 2 - 2).to(self.device)
        bias_shape = (h, d_k) if self.kind.startswith("kda") else (h,)
        self.dt_bias = (torch.rand(bias_shape, generator=self.rng) * 3 - 4).to(self.device)
        self.D = torch.randn(h, generator=self.rng).to(self.device) if self.kind == "mamba2" else None

    @classmethod
    def named(cls, shape: str, **kwargs: Any) -> Layer:
        return cls(*SHAPES[shape], **kwargs)

    @property
    def spec(self) -> LayerSpec:
        gate = "channel" if self.kind.startswith("kda") else "head"
        rule = "additive" if self.kind == "mamba2" else "delta"
        return LayerSpec(gate, rule, self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)

    def draw(self, batch: int) -> dict[str, Tensor]:
        """Projections of one token for each row."""

        def normal(*shape: int) -> Tensor:
            return torch.randn(batch, *shape, generator=self.rng).to(self.dtype).to(self.device)

        h_k, h_v, d_k, d_v = self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim
        if self.kind == "mamba2":
            return {
                "x": normal(h_v, d_v),
                "dt": normal(h_v),
                "B": normal(h_k, d_k) * d_k**-0.5,
                "C": normal(h_k, d_k),
                "z": normal(h_v, d_v),
            }
        a = normal(h_v, d_k) if self.kind.startswith("kda") else normal(h_v)
        return {"q": normal(h_k, d_k), "k": normal(h_k, d_k), "v": normal(h_v, d_v), "a": a, "b": normal(h_v)}

    def draw_window(self, batch: int, tokens: int) -> dict[str, Tensor]:
        """Projections of a window of tokens for each row, ``[B, T, ...]``."""
        return {name: x.unflatten(0, (batch, tokens)) for name, x in self.draw(batch * tokens).items()}

    def decode(self, inputs: dict[str, Tensor], **state: Any) -> Tensor:
        """The operator under test, on one token."""
        return self._call("decode", inputs, state)

    def verify(self, inputs: dict[str, Tensor], **state: Any) -> Tensor:
        """The operator under test, on a window."""
        return self._call("verify", inputs, state)

    def prefill(self, inputs: dict[str, Tensor], **sequences: Any) -> tuple[Tensor, Tensor]:
        """The operator under test, on packed sequences; outputs and final states."""
        return self._call("prefill", inputs, sequences)

    def _call(self, step: str, inputs: dict[str, Tensor], state: dict[str, Any]) -> Any:
        operator = getattr(ops, f"{self.kind.partition('_')[0]}_{step}")
        if self.kind == "mamba2":
            return operator(**inputs, A=-self.A_log.exp(), D=self.D, dt_bias=self.dt_bias, **state)
        bound = {"lower_bound": LOWER_BOUND} if self.kind == "kda_bounded" else {}
        gate = {"A_log": self.A_log, "dt_bias": self.dt_bias, "beta_scale": self.beta_scale}
        return operator(**inputs, **gate, **bound, **state)

    def reference(
        self, inputs: dict[str, Tensor], state: Tensor, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """One step of the recurrence on the same values: new state and output, in ``dtype``."""
        x = {name: tensor.to(dtype) for name, tensor in inputs.items()}
        A_log, dt_bias = self.A_log.to(dtype), self.dt_bias.to(dtype)
        if self.kind == "mamba2":
            assert self.D is not None
            delta = recurrence.mamba2_time_step(x["dt"], dt_bias)
            u = delta[..., None] * x["x"]
            g = -delta * A_log.exp()
            state, y = recurrence.step(state, x["C"], x["B"], u, g, None, "additive")
            y = y + self.D.to(dtype)[:, None] * x["x"]
            return state, y * torch.nn.functional.silu(x["z"])
        if self.kind == "gdn":
            g = recurrence.gdn_log_decay(x["a"], A_log, dt_bias)
        else:
            bound = LOWER_BOUND if self.kind == "kda_bounded" else None
            g = recurrence.kda_log_decay(x["a"], A_log, dt_bias, bound)
        beta = torch.sigmoid(x["b"]) * self.beta_scale
        q = x["q"] * recurrence.inverse_norm(x["q"])[..., None] * self.head_k_dim**-0.5
        k = x["k"] * recurrence.inverse_norm(x["k"])[..., None]
        return recurrence.step(state, q, k, x["v"], g, beta, "delta")

    def reference_window(
        self, inputs: dict[str, Tensor], state: Tensor, parents: list[int], dtype: torch.dtype = torch.float64
    ) -> tuple[list[Tensor], Tensor]:
        """The recurrence along each token's path: states ``[B, ...]`` per token and outputs ``[B, T, ...]``.

        All rows have the same parents; −1 is the given state.
        """
        states, outputs = [], []
        for i, parent in enumerate(parents):
            token = {name: x[:, i] for name, x in inputs.items()}
            after, y = self.reference(token, state if parent < 0 else states[parent], dtype)
            states.append(after)
            outputs.append(y)
        return states, torch.stack(outputs, dim=1)

    def zero_state(self, batch: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(batch, self.num_v_heads, self.head_v_dim, self.head_k_dim, dtype=dtype, device=self.device)


def poison(pool: Any) -> None:
    """NaN in every byte of every slot, before anything is allocated."""
    for layer in range(len(pool.layers)):
        args = pool.fold_args(layer)
        for name in ("checkpoint", "ring_u", "ring_k", "ring_g"):
            args[name].fill_(float("nan"))
        pool.conv_state(layer).fill_(float("nan"))
        pool.conv_window(layer).fill_(float("nan"))


class Forked(NamedTuple):
    """What a program leaves that several backends run."""

    outputs: Tensor
    states: Tensor
    cursors: Tensor
    counters: dict[str, int]


def run_forks(layer: Layer, pool: ReplayPool) -> Forked:
    """Steps with padding, a snapshot, forks of it and of a slot, staggered flushes, a state written over another."""
    a, b = pool.alloc(2)
    outputs: list[Tensor] = []

    def step(*rows: int) -> None:
        slots = pool.slot_tensor(rows)
        outputs.append(layer.decode(layer.draw(len(rows)), **pool.state_args(0), slots=slots))
        pool.advance(slots)

    step(a)
    step(a, -1, b)
    kept = pool.snapshot(a)
    first, second = pool.fork(kept), pool.fork(b)
    for _ in range(4):
        step(second, a, first)
    pool.materialize(a, b)
    step(b, a)
    states = pool.read_state(0, [a, b, first, second, kept])
    return Forked(torch.cat(outputs), states, pool.write_pos[[a, b, first, second]], pool.counters())
