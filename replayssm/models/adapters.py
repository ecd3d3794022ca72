"""How the tensors of a transformers mixer become the arguments of our operators.

One adapter per mixer family. It names the upstream class that it serves, states the shapes of its recurrence, and
runs one token, or a window of tokens: projections, causal convolution, recurrence, gate and output projection, with
the mixer's own submodules and weights. Prefill stays with transformers.

Names: B rows, T tokens of a window, D hidden size, C convolution channels, H_k and H_v key and value heads, d_k and
d_v their sizes. ``...`` is ``B`` for one token and ``B, T`` for a window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from replayssm.state import LayerSpec


class Kernels(NamedTuple):
    """The operators of one layer for one token or one window, bound to the layer's state and the rows' slots.

    ``conv`` takes the inputs ``[..., C]``, weight and bias, ``recurrence`` what else :mod:`replayssm.ops` wants from
    a layer: its projections, and by name its parameters.
    """

    conv: Callable[..., Tensor]
    recurrence: Callable[..., Tensor]


class Adapter(ABC):
    """One linear-attention layer of a model.

    Attributes:
        mixer: the transformers module whose weights and submodules are used.
        spec: shapes and kind of the recurrence.
        operator: ``"gdn"``, ``"kda"`` or ``"mamba2"``, whose operators in :mod:`replayssm.ops` run it.
        layer_idx: the layer's place in the model and in its cache.
        prefill_parameters: what the prefill operator gets beside the parameters of each step.
    """

    spec: LayerSpec
    operator: str

    def __init__(self, mixer: Any) -> None:
        activation = getattr(mixer, "activation", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(
                f"{type(mixer).__name__} has the convolution activation {activation!r}: replay supports 'silu'"
            )
        self.mixer = mixer
        self.layer_idx: int = mixer.layer_idx
        self.prefill_parameters: dict[str, Any] = {}

    @abstractmethod
    def run(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """The mixer's output for its input, both ``[..., D]``."""

    def conv(self, x: Tensor, kernels: Kernels) -> Tensor:
        """Causal convolution and silu, ``[..., C]``."""
        conv1d: nn.Conv1d = self.mixer.conv1d
        return kernels.conv(x, weight=conv1d.weight.squeeze(1), bias=conv1d.bias)

    def from_upstream(self, state: Tensor) -> Tensor:
        """The state as transformers keeps it, ``[B, H_v, d_k, d_v]``, as ours, ``[B, H_v, d_v, d_k]``."""
        return state.transpose(-1, -2)

    def to_upstream(self, state: Tensor) -> Tensor:
        """Our state ``[B, H_v, d_v, d_k]`` as transformers keeps it, ``[B, H_v, d_k, d_v]``."""
        return state.transpose(-1, -2)


class GatedDeltaNet(Adapter):
    """Gated DeltaNet as in ``Qwen3_5GatedDeltaNet``: the families differ in their projections only."""

    operator = "gdn"
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
        """``qkv [..., C]``, output gate ``z [..., H_v·d_v]``, ``a [..., H_v]`` and ``b [..., H_v]``, all raw."""
        mixer = self.mixer
        return mixer.in_proj_qkv(hidden), mixer.in_proj_z(hidden), mixer.in_proj_a(hidden), mixer.in_proj_b(hidden)

    def run(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """See :meth:`Adapter.run`."""
        mixer, spec, rows = self.mixer, self.spec, hidden.shape[:-1]
        qkv, z, a, b = self.project(hidden)
        q, k, v = self.conv(qkv, kernels).split(self.split, dim=-1)
        y = kernels.recurrence(
            q.view(*rows, spec.num_k_heads, spec.head_k_dim),
            k.view(*rows, spec.num_k_heads, spec.head_k_dim),
            v.view(*rows, spec.num_v_heads, spec.head_v_dim),
            a,
            b,
            A_log=mixer.A_log,
            dt_bias=mixer.dt_bias,
            beta_scale=self.beta_scale,
        )
        gated = getattr(mixer, self.norm)(y, z.unflatten(-1, (spec.num_v_heads, spec.head_v_dim)))
        return getattr(mixer, self.output)(gated.flatten(-2))


class Qwen3NextDeltaNet(GatedDeltaNet):
    """``Qwen3NextGatedDeltaNet``: q, k, v, z and b, a are interleaved per key head in two projections."""

    def __init__(self, mixer: Any) -> None:
        super().__init__(mixer)
        spec = self.spec
        group = spec.num_v_heads // spec.num_k_heads
        wide = group * spec.head_v_dim
        self.orders = [_parts_first(spec.num_k_heads, spec.head_k_dim, spec.head_k_dim, wide, wide)]
        self.orders.append(_parts_first(spec.num_k_heads, group, group))

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :meth:`GatedDeltaNet.project`."""
        spec = self.spec
        if self.orders[0].device != hidden.device:
            self.orders = [order.to(hidden.device) for order in self.orders]
        qkvz = self.mixer.in_proj_qkvz(hidden).index_select(-1, self.orders[0])
        qkv, z = qkvz.split((spec.conv_dim, spec.num_v_heads * spec.head_v_dim), dim=-1)
        b, a = self.mixer.in_proj_ba(hidden).index_select(-1, self.orders[1]).chunk(2, dim=-1)
        return qkv, z, a, b


def _parts_first(heads: int, *sizes: int) -> Tensor:
    """The order in which columns ``[heads, Σ sizes]`` become ``[heads, sizes[0]]``, ``[heads, sizes[1]]``, …"""
    return torch.cat([part.flatten() for part in torch.arange(heads * sum(sizes)).view(heads, -1).split(sizes, dim=-1)])


class OlmoDeltaNet(GatedDeltaNet):
    """``OlmoHybridGatedDeltaNet``: separate projections, and β up to 2 where eigenvalues may be negative."""

    norm = "o_norm"
    output = "o_proj"

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :meth:`GatedDeltaNet.project`."""
        mixer = self.mixer
        qkv = side_by_side(mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden))
        return qkv, mixer.g_proj(hidden), mixer.a_proj(hidden), mixer.b_proj(hidden)


class KimiDeltaAttention(Adapter):
    """Kimi Delta Attention as in ``KimiLinearDeltaAttention``: one decay per key channel."""

    operator = "kda"

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
        """Raw forget gate and raw output gate, both ``[..., H·d]``."""
        mixer = self.mixer
        forget = mixer.forget_gate
        return forget.f_b_proj(forget.f_a_proj(hidden)), mixer.g_b_proj(mixer.g_a_proj(hidden))

    def run(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """See :meth:`Adapter.run`."""
        mixer, spec = self.mixer, self.spec
        heads = (*hidden.shape[:-1], spec.num_v_heads, spec.head_v_dim)
        qkv = side_by_side(mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden))
        q, k, v = (x.view(heads) for x in self.conv(qkv, kernels).chunk(3, dim=-1))
        a, z = self.gates(hidden)
        y = kernels.recurrence(
            q,
            k,
            v,
            a.view(heads),
            mixer.b_proj(hidden),
            A_log=mixer.forget_gate.A_log.flatten(),
            dt_bias=mixer.forget_gate.dt_bias,
            lower_bound=self.lower_bound,
        )
        return mixer.o_proj(mixer.o_norm(y, z.view(heads)).flatten(-2))


class BailingDeltaAttention(KimiDeltaAttention):
    """``BailingHybridDeltaAttention`` (Ling): one matrix per gate, and a lower bound of the decay."""

    def gates(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`KimiDeltaAttention.gates`."""
        return self.mixer.forget_gate.f_proj(hidden), self.mixer.g_proj(hidden)


class Mamba2(Adapter):
    """Mamba-2 as in ``Mamba2Mixer``, ``NemotronHMamba2Mixer``, ``BambaMixer``, and their kin."""

    operator = "mamba2"

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
        # transformers applies time_step_limit in its chunked scan alone, never in its one-token step; to continue its
        # models as it does, a prefill has the limit and a step has none.
        limit = getattr(mixer, "time_step_limit", None)
        self.prefill_parameters = {} if limit is None else {"dt_limit": tuple(limit)}

    def project(self, hidden: Tensor) -> Tensor:
        """The gate, x, B, C and dt of each token side by side, ``[..., inner + C + H]``."""
        return self.mixer.in_proj(hidden)

    def run(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """See :meth:`Adapter.run`."""
        mixer, spec, rows = self.mixer, self.spec, hidden.shape[:-1]
        z, xbc, dt = self.project(hidden).split(self.split, dim=-1)
        x, B, C = self.conv(xbc, kernels).split(self.conv_split, dim=-1)
        heads = (*rows, spec.num_v_heads, spec.head_v_dim)
        normed = not isinstance(mixer.norm, nn.Identity)
        y = kernels.recurrence(
            x.view(heads),
            dt,
            B.view(*rows, spec.num_k_heads, spec.head_k_dim),
            C.view(*rows, spec.num_k_heads, spec.head_k_dim),
            A=-mixer.A_log.float().exp(),
            D=mixer.D,
            z=None if normed else z.view(heads),
            dt_bias=mixer.dt_bias,
        ).flatten(-2)
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


def side_by_side(*parts: Tensor) -> Tensor:
    """Parts ``[..., D_i]`` as one ``[..., Σ D_i]``; of parts of one product that lie so already, no copy."""
    if torch.compiler.is_compiling():  # which sees no storage
        return torch.cat(parts, dim=-1)
    first, at = parts[0], parts[0].storage_offset()
    for part in parts:
        together = part._base is not None and part._base is first._base and part.stride() == first.stride()
        if not together or part.storage_offset() != at:
            return torch.cat(parts, dim=-1)
        at += part.shape[-1]
    width = sum(part.shape[-1] for part in parts)
    return first.as_strided((*first.shape[:-1], width), first.stride(), first.storage_offset())


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
