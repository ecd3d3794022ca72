"""What every contender of one measurement works on: the same numbers, the same cursors, the same walk over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replayssm import recurrence
from replayssm.state import LayerBytes, LayerSpec, StateDtypes, layer_bytes

KINDS = ("gdn", "kda", "mamba2")

#: One layer of a released model of each kind: Qwen3.5-35B-A3B, Kimi-Linear-48B-A3B, Nemotron-3-Super-120B.
SHAPES = {
    "gdn": LayerSpec("head", "delta", 16, 32, 128, 128),
    "kda": LayerSpec("channel", "delta", 32, 32, 128, 128),
    "mamba2": LayerSpec("head", "additive", 8, 128, 128, 64),
}

#: Slots whose numbers are drawn, the others repeat them: drawing gigabytes takes longer than copying them. A prime, so
#: that no batch, call or phase of the flush falls on the same ones again.
DRAWN = 67


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

    @property
    def op(self) -> str:
        """The operator that is measured."""
        return f"{self.kind}_decode"

    @property
    def window(self) -> int:
        """Tokens of a row in one call."""
        return 1

    @property
    def ring_rows(self) -> int:
        return self.ring_len

    @property
    def leading_shape(self) -> tuple[int, ...]:
        """What stands before the heads in the inputs."""
        return (self.batch,)

    def flushes(self, cursors: Tensor) -> Tensor:
        """Whether a row at such a cursor writes its state."""
        return cursors == self.ring_len - 1

    def bytes_moved(self, has_ring: bool) -> float:
        """Bytes that a call can't avoid.

        With a ring: the checkpoint read, its share of flushes written, records read on average, one appended; the
        records as our rings hold them. Without: the state read and written.
        """
        size, ring_len = self._slot_bytes(), self.ring_len
        if not has_ring:
            return self.batch * 2.0 * size.checkpoint
        records = (ring_len - 1) / 2 + (ring_len - 1) / ring_len
        return self.batch * (size.checkpoint * (1 + 1 / ring_len) + size.record * records)

    def _slot_bytes(self) -> LayerBytes:
        dtypes = StateDtypes.choose(self.state_dtype, self.activation_dtype, "auto")
        return layer_bytes(self.spec, dtypes, self.ring_rows)

    def cursors(self) -> Tensor:
        """``[calls, B]`` int32."""
        numbers = torch.arange(self.num_slots, device=self.device)
        return (numbers % self.ring_len).int().view(self.calls, self.batch)

    def slots(self) -> Tensor:
        """``[calls, B]`` int32."""
        return torch.arange(self.num_slots, device=self.device, dtype=torch.int32).view(self.calls, self.batch)

    def inputs(self) -> dict[str, Tensor]:
        """Projections of each row's tokens, named as the operators name them."""
        spec, rng = self.spec, self._generator(1)

        def new(*shape: int) -> Tensor:
            x = torch.randn(*self.leading_shape, *shape, device=self.device, generator=rng)
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
        return self.states(self.num_slots)

    def states(self, count: int) -> Tensor:
        """``[count, H_v, d_v, d_k]`` in the state's dtype."""
        drawn = torch.empty(DRAWN, *self.spec.checkpoint_shape, device=self.device, dtype=self.state_dtype)
        return _repeated(drawn.normal_(generator=self._generator(2)), count)

    def records(self) -> tuple[Tensor, Tensor, Tensor]:
        """Float32 records of all R ring rows: u ``[N, H_v, R, d_v]``, unit keys ``[N, H_k, R, d_k]``, log decays."""
        spec, rng = self.spec, self._generator(3)

        def new(heads: int, *dims: int) -> Tensor:
            return torch.empty(DRAWN, heads, self.ring_rows, *dims, device=self.device)

        u = new(spec.num_v_heads, spec.head_v_dim).normal_(std=0.3, generator=rng)
        k = new(spec.num_k_heads, spec.head_k_dim).normal_(std=spec.head_k_dim**-0.5, generator=rng)
        g = new(spec.num_v_heads, *spec.gate_shape).uniform_(-0.1, -0.02, generator=rng)
        return _repeated(u, self.num_slots), _repeated(k, self.num_slots), _repeated(g, self.num_slots)

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
        return self._step(_folded(checkpoint, records), inputs)

    def _step(self, state: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """One token of each row: output and state."""
        parameters = {name: x.double() for name, x in self.parameters().items()}
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


@dataclass(frozen=True)
class WindowWorkload(Workload):
    """The same walk in verify windows of ``tokens`` tokens, a divisor of L, all of which were accepted before.

    Rings have R = L + T − 1 rows, so a window folds once L records are committed. Slot n stands at cursor
    ``(n mod L/T + 1) T``: those are the cursors that a chain of accepted windows comes to, T/L of them fold.
    """

    tokens: int

    @property
    def op(self) -> str:
        return f"{self.kind}_verify"

    @property
    def window(self) -> int:
        return self.tokens

    @property
    def ring_rows(self) -> int:
        return self.ring_len + self.tokens - 1

    @property
    def leading_shape(self) -> tuple[int, ...]:
        return (self.batch, self.tokens)

    def flushes(self, cursors: Tensor) -> Tensor:
        return cursors + self.tokens > self.ring_rows

    def cursors(self) -> Tensor:
        numbers = torch.arange(self.num_slots, device=self.device)
        return ((numbers % (self.ring_len // self.tokens) + 1) * self.tokens).int().view(self.calls, self.batch)

    def bytes_moved(self, has_ring: bool) -> float:
        """Bytes that a call can't avoid.

        With a ring: the checkpoint read, its share of folds written, records read on average, T appended. Without:
        the state read once and written after each token, because any of them may be the last that is accepted.
        """
        size, ring_len, tokens = self._slot_bytes(), self.ring_len, self.tokens
        if not has_ring:
            return self.batch * (1.0 + tokens) * size.checkpoint
        records = (ring_len + tokens) / 2 + tokens
        return self.batch * (size.checkpoint * (1 + tokens / ring_len) + size.record * records)

    def expected(
        self, rows: Tensor, checkpoint: Tensor, records: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """The window in float64: outputs ``[R, T, H_v, d_v]``, and the state that is written.

        That is the folded checkpoint where there are records, else the state after the last token.
        """
        outputs, last = self._outputs_and_last_state(rows, checkpoint, records)
        return outputs, last if records is None else _folded(checkpoint, records)

    def _outputs_and_last_state(
        self, rows: Tensor, checkpoint: Tensor, records: tuple[Tensor, Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        inputs = {name: x[rows].double() for name, x in self.inputs().items()}
        state = _folded(checkpoint, records)
        outputs = []
        for token in range(self.tokens):
            y, state = self._step(state, {name: x[:, token] for name, x in inputs.items()})
            outputs.append(y)
        return torch.stack(outputs, dim=1), state


class StepAsWindow(WindowWorkload):
    """A decode step of a contender that folds as windows do: before the token, L records at a time."""

    @classmethod
    def of(cls, step: Workload) -> StepAsWindow:
        return cls(**vars(step), tokens=1)

    @property
    def op(self) -> str:
        return f"{self.kind}_decode"


def _repeated(drawn: Tensor, count: int) -> Tensor:
    return drawn[torch.arange(count, device=drawn.device) % len(drawn)]


def _folded(checkpoint: Tensor, records: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    """The committed state in float64."""
    state = checkpoint.double()
    if records is None:
        return state
    u, k, g = (x.double() for x in records)
    return recurrence.fold(state, u, k, g)
