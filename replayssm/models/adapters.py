"""How the tensors of a transformers mixer become the arguments of one decode operator.

One adapter per mixer family. It names the upstream class that it serves, states the shapes of its recurrence, and
runs one token: projections, causal convolution, recurrence, gate and output projection, with the mixer's own
submodules and weights. Prefill stays with transformers.

Names: B rows, D hidden size, C convolution channels, H_k and H_v key and value heads, d_k and d_v their sizes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from replayssm import ops
from replayssm.state import LayerSpec


class Adapter(ABC):
    """One linear-attention layer of a model.

    Attributes:
        mixer: the transformers module whose weights and submodules are used.
        spec: shapes and kind of the recurrence.
        layer_idx: the layer's place in the model and in its cache.
    """

    spec: LayerSpec

    def __init__(self, mixer: Any) -> None:
        activation = getattr(mixer, "activation", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(
                f"{type(mixer).__name__} has the convolution activation {activation!r}: replay supports 'silu'"
            )
        self.mixer = mixer
        self.layer_idx: int = mixer.layer_idx

    @abstractmethod
    def decode(self, hidden: Tensor, conv_state: Tensor, state: Mapping[str, Any], slots: Tensor) -> Tensor:
        """One token: ``hidden [B, D]`` to the mixer's output ``[B, D]``.

        Args:
            hidden: the mixer's input.
            conv_state: ``[N, C, W-1]``, updated in place.
            state: the keyword arguments of the decode operators: the layer's tensors, flush_period and backend.
            slots: int32 ``[B]``.
        """

    def conv(self, x: Tensor, conv_state: Tensor, slots: Tensor, backend: str) -> Tensor:
        """Causal convolution and silu of one token, ``[B, C]``."""
        conv1d: nn.Conv1d = self.mixer.conv1d
        return ops.causal_conv1d_update(
            x, conv_state, conv1d.weight.squeeze(1), conv1d.bias, slots=slots, activation="silu", backend=backend
        )

    def from_upstream(self, state: Tensor) -> Tensor:
        """The state as transformers keeps it, ``[B, H_v, d_k, d_v]``, as ours, ``[B, H_v, d_v, d_k]``."""
        return state.transpose(-1, -2)

    def to_upstream(self, state: Tensor) -> Tensor:
        """Our state ``[B, H_v, d_v, d_k]`` as transformers keeps it, ``[B, H_v, d_k, d_v]``."""
        return state.transpose(-1, -2)


class GatedDeltaNet(Adapter):
    """Gated DeltaNet as in ``Qwen3_5GatedDeltaNet``: the families differ in their projections only."""

    norm = "norm"
    output = "out_proj"

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self.spec = LayerSpec(
            gate="head",
            rule="delta",
            num_k_heads=mixer.num_k_heads,
            num_v_heads=mixer.num_v_heads,
            head_k_dim=mixer.head_k_dim,
            head_v_dim=mixer.head_v_dim,
            conv_dim=mixer.conv_dim,
            conv_width=mixer.conv_kernel_size,
        )
        self.split = (mixer.key_dim, mixer.key_dim, mixer.value_dim)
        self.beta_scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``qkv [B, C]``, output gate ``z [B, H_v·d_v]``, ``a [B, H_v]`` and ``b [B, H_v]``, all raw."""
        mixer = self.mixer
        return mixer.in_proj_qkv(hidden), mixer.in_proj_z(hidden), mixer.in_proj_a(hidden), mixer.in_proj_b(hidden)

    def decode(self, hidden: Tensor, conv_state: Tensor, state: Mapping[str, Any], slots: Tensor) -> Tensor:
        """See :meth:`Adapter.decode`."""
        mixer, spec = self.mixer, self.spec
        qkv, z, a, b = self.project(hidden)
        q, k, v = self.conv(qkv, conv_state, slots, state["backend"]).split(self.split, dim=-1)
        y = ops.gdn_decode(
            q.view(-1, spec.num_k_heads, spec.head_k_dim),
            k.view(-1, spec.num_k_heads, spec.head_k_dim),
            v.view(-1, spec.num_v_heads, spec.head_v_dim),
            a,
            b,
            A_log=mixer.A_log,
            dt_bias=mixer.dt_bias,
            beta_scale=self.beta_scale,
            slots=slots,
            **state,
        )
        gated = getattr(mixer, self.norm)(y.flatten(0, 1), z.reshape(-1, spec.head_v_dim))
        return getattr(mixer, self.output)(gated.view(hidden.shape[0], -1))


class Qwen3NextDeltaNet(GatedDeltaNet):
    """``Qwen3NextGatedDeltaNet``: q, k, v, z and b, a are interleaved per key head in two projections."""

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :meth:`GatedDeltaNet.project`."""
        spec = self.spec
        group = spec.num_v_heads // spec.num_k_heads
        qkvz = self.mixer.in_proj_qkvz(hidden).unflatten(-1, (spec.num_k_heads, -1))
        wide = group * spec.head_v_dim
        q, k, v, z = qkvz.split((spec.head_k_dim, spec.head_k_dim, wide, wide), dim=-1)
        b, a = self.mixer.in_proj_ba(hidden).unflatten(-1, (spec.num_k_heads, 2 * group)).split(group, dim=-1)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
        return qkv, z.flatten(1), a.flatten(1), b.flatten(1)


class OlmoDeltaNet(GatedDeltaNet):
    """``OlmoHybridGatedDeltaNet``: separate projections, and β up to 2 where eigenvalues may be negative."""

    norm = "o_norm"
    output = "o_proj"

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :meth:`GatedDeltaNet.project`."""
        mixer = self.mixer
        qkv = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], dim=-1)
        return qkv, mixer.g_proj(hidden), mixer.a_proj(hidden), mixer.b_proj(hidden)


class KimiDeltaAttention(Adapter):
    """Kimi Delta Attention as in ``KimiLinearDeltaAttention``: one decay per key channel."""

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self.spec = LayerSpec(
            gate="channel",
            rule="delta",
            num_k_heads=mixer.num_heads,
            num_v_heads=mixer.num_heads,
            head_k_dim=mixer.head_dim,
            head_v_dim=mixer.head_dim,
            conv_dim=mixer.conv_dim,
            conv_width=mixer.conv_kernel_size,
        )
        gate = mixer.forget_gate
        self.lower_bound: float | None = gate.lower_bound if getattr(gate, "safe_gate", False) else None

    def gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Raw forget gate and raw output gate, both ``[B, H·d]``."""
        mixer = self.mixer
        forget = mixer.forget_gate
        return forget.f_b_proj(forget.f_a_proj(hidden)), mixer.g_b_proj(mixer.g_a_proj(hidden))

    def decode(self, hidden: Tensor, conv_state: Tensor, state: Mapping[str, Any], slots: Tensor) -> Tensor:
        """See :meth:`Adapter.decode`."""
        mixer, spec = self.mixer, self.spec
        heads = (-1, spec.num_v_heads, spec.head_v_dim)
        qkv = torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], dim=-1)
        q, k, v = (x.view(heads) for x in self.conv(qkv, conv_state, slots, state["backend"]).chunk(3, dim=-1))
        a, z = self.gates(hidden)
        y = ops.kda_decode(
            q,
            k,
            v,
            a.view(heads),
            mixer.b_proj(hidden),
            A_log=mixer.forget_gate.A_log.flatten(),
            dt_bias=mixer.forget_gate.dt_bias,
            lower_bound=self.lower_bound,
            slots=slots,
            **state,
        )
        return mixer.o_proj(mixer.o_norm(y, z.view(heads)).flatten(1))


class BailingDeltaAttention(KimiDeltaAttention):
    """``BailingHybridDeltaAttention`` (Ling): one matrix per gate, and a lower bound of the decay."""

    def gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`KimiDeltaAttention.gates`."""
        return self.mixer.forget_gate.f_proj(hidden), self.mixer.g_proj(hidden)


class Mamba2(Adapter):
    """Mamba-2 as in ``Mamba2Mixer``, ``NemotronHMamba2Mixer``, ``BambaMixer``, and their kin."""

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        self.spec = LayerSpec(
            gate="head",
            rule="additive",
            num_k_heads=mixer.n_groups,
            num_v_heads=mixer.num_heads,
            head_k_dim=mixer.ssm_state_size,
            head_v_dim=mixer.head_dim,
            conv_dim=mixer.conv_dim,
            conv_width=mixer.conv_kernel_size,
        )
        inner, groups = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
        self.split = (inner, mixer.conv_dim, mixer.num_heads)
        self.conv_split = (inner, groups, groups)

    def project(self, hidden: Tensor) -> Tensor:
        """The gate, x, B, C and dt of one token in one row, ``[B, inner + C + H]``."""
        return self.mixer.in_proj(hidden)

    def decode(self, hidden: Tensor, conv_state: Tensor, state: Mapping[str, Any], slots: Tensor) -> Tensor:
        """See :meth:`Adapter.decode`."""
        mixer, spec = self.mixer, self.spec
        z, xbc, dt = self.project(hidden).split(self.split, dim=-1)
        x, B, C = self.conv(xbc, conv_state, slots, state["backend"]).split(self.conv_split, dim=-1)
        heads = (-1, spec.num_v_heads, spec.head_v_dim)
        normed = not isinstance(mixer.norm, nn.Identity)
        # transformers applies time_step_limit in its chunked scan alone, never in its one-token step; to continue
        # its models as it does, no limit is given here.
        y = ops.mamba2_decode(
            x.view(heads),
            dt,
            B.view(-1, spec.num_k_heads, spec.head_k_dim),
            C.view(-1, spec.num_k_heads, spec.head_k_dim),
            A=-mixer.A_log.float().exp(),
            D=mixer.D,
            z=None if normed else z.view(heads),
            dt_bias=mixer.dt_bias,
            slots=slots,
            **state,
        ).flatten(1)
        if normed:
            y = mixer.norm(y, z)
        return mixer.out_proj(y.to(hidden.dtype))

    def from_upstream(self, state: Tensor) -> Tensor:
        """``[B, H, P, N]`` is our layout."""
        return state

    def to_upstream(self, state: Tensor) -> Tensor:
        """``[B, H, P, N]`` is our layout."""
        return state


class FalconH1Mamba2(Mamba2):
    """``FalconH1Mixer``: multipliers around the projection, and the gate inside the recurrence without a norm."""

    def project(self, hidden: Tensor) -> Tensor:
        """See :meth:`Mamba2.project`."""
        return self.mixer.in_proj(hidden * self.mixer.ssm_in_multiplier) * self.mixer.mup_vector.flatten()


# The class in transformers to the adapter that serves it.
ADAPTERS: Mapping[str, type[Adapter]] = {
    "Qwen3NextGatedDeltaNet": Qwen3NextDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "OlmoHybridGatedDeltaNet": OlmoDeltaNet,
    "KimiLinearDeltaAttention": KimiDeltaAttention,
    "BailingHybridDeltaAttention": BailingDeltaAttention,
    "Mamba2Mixer": Mamba2,
    "NemotronHMamba2Mixer": Mamba2,
    "BambaMixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "FalconH1Mixer": FalconH1Mamba2,
    "Zamba2MambaMixer": Mamba2,
}
