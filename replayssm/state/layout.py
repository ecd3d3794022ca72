"""Shapes and bytes of one layer's state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from replayssm.ops.checks import check_count
from replayssm.recurrence import Gate, Rule


@dataclass(frozen=True)
class LayerSpec:
    """What the recurrent layers of one kind need, per slot.

    Mamba-2 reads it so: value heads are heads, key heads groups, ``head_v_dim`` is P and ``head_k_dim`` N.

    Args:
        gate: ``"head"`` or ``"channel"``.
        rule: ``"delta"`` or ``"additive"``.
        num_k_heads: H_k; divides H_v, and equals it for the channel gate.
        num_v_heads: H_v.
        head_k_dim: d_k.
        head_v_dim: d_v.
        conv_dim: channels of the causal convolution, 0 for none.
        conv_width: W, its kernel width; the state keeps W − 1 inputs.

    Raises:
        ValueError: a value is out of range.
    """

    gate: Gate
    rule: Rule
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_dim: int = 0
    conv_width: int = 4

    def __post_init__(self) -> None:
        if self.gate not in get_args(Gate):
            raise ValueError(f"gate is {self.gate!r}: 'head' or 'channel' is wanted")
        if self.rule not in get_args(Rule):
            raise ValueError(f"rule is {self.rule!r}: 'delta' or 'additive' is wanted")
        for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_width"):
            check_count(name, getattr(self, name), 1)
        check_count("conv_dim", self.conv_dim, 0)
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(f"num_v_heads is {self.num_v_heads}, num_k_heads {self.num_k_heads}: a multiple is wanted")
        if self.gate == "channel" and self.num_v_heads != self.num_k_heads:
            raise ValueError(
                f"num_v_heads is {self.num_v_heads}, num_k_heads {self.num_k_heads}: a channel gate wants them equal"
            )

    @property
    def checkpoint_shape(self) -> tuple[int, int, int]:
        return self.num_v_heads, self.head_v_dim, self.head_k_dim

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Shape of one log decay behind its head dimension."""
        return () if self.gate == "head" else (self.head_k_dim,)


@dataclass(frozen=True)
class StateDtypes:
    """Dtypes of a pool's tensors; log decays are always float32."""

    checkpoint: torch.dtype
    activation: torch.dtype
    ring_u: torch.dtype

    @classmethod
    def choose(cls, state: torch.dtype, activation: torch.dtype, ring: torch.dtype | str) -> StateDtypes:
        """Resolve ``ring="auto"``: bfloat16 beside bfloat16 checkpoints and activations, else float32.

        Updates must not be coarser than the checkpoint: bfloat16 updates of a float16 state have 2.4 times the error
        of updating it at every step. And float16 has no room for them: u holds the factor that normalises k, which
        is large where k is small.
        """
        wanted = (torch.float32, torch.bfloat16, torch.float16)
        for name, dtype in (("state_dtype", state), ("activation_dtype", activation)):
            if dtype not in wanted:
                raise ValueError(f"{name} is {dtype}: torch.float32, torch.bfloat16 or torch.float16 is wanted")
        if ring == "auto":
            ring = torch.bfloat16 if state == activation == torch.bfloat16 else torch.float32
        if ring not in (torch.float32, activation):
            own = "" if activation == torch.float32 else f" or {activation}, the activations',"
            raise ValueError(f"ring_dtype is {ring}: 'auto', torch.float32{own} is wanted")
        assert isinstance(ring, torch.dtype)
        return cls(state, activation, ring)


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer in one slot."""

    checkpoint: int
    record: int
    ring: int
    conv: int

    @property
    def total(self) -> int:
        return self.checkpoint + self.ring + self.conv


def layer_bytes(spec: LayerSpec, dtypes: StateDtypes, ring_capacity: int, max_window: int = 0) -> LayerBytes:
    """Bytes that one slot of one layer takes; ``conv`` holds the inputs of a window in flight, too."""
    record = (
        spec.num_v_heads * spec.head_v_dim * dtypes.ring_u.itemsize
        + spec.num_k_heads * spec.head_k_dim * dtypes.activation.itemsize
        + spec.num_v_heads * math.prod(spec.gate_shape) * torch.float32.itemsize
    )
    return LayerBytes(
        checkpoint=math.prod(spec.checkpoint_shape) * dtypes.checkpoint.itemsize,
        record=record,
        ring=record * ring_capacity,
        conv=spec.conv_dim * (spec.conv_width - 1 + max_window) * dtypes.activation.itemsize,
    )


@dataclass(frozen=True)
class LayerState:
    """One layer's tensors for all slots; shapes in :mod:`replayssm.ops`.

    ``conv`` is ``[N, C, W − 1]``, ``conv_window`` ``[N, C, T_max]``.
    """

    checkpoint: Tensor
    ring_u: Tensor
    ring_k: Tensor
    ring_g: Tensor
    conv: Tensor
    conv_window: Tensor

    @classmethod
    def empty(
        cls,
        spec: LayerSpec,
        num_slots: int,
        ring_capacity: int,
        max_window: int,
        dtypes: StateDtypes,
        device: torch.device,
    ) -> LayerState:
        """Uninitialised tensors: a slot is zeroed when it is handed out, its ring and its window never."""

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(num_slots, *shape, dtype=dtype, device=device)

        h_v, d_v, d_k = spec.checkpoint_shape
        return cls(
            checkpoint=new(h_v, d_v, d_k, dtype=dtypes.checkpoint),
            ring_u=new(h_v, ring_capacity, d_v, dtype=dtypes.ring_u),
            ring_k=new(spec.num_k_heads, ring_capacity, d_k, dtype=dtypes.activation),
            ring_g=new(h_v, ring_capacity, *spec.gate_shape, dtype=torch.float32),
            conv=new(spec.conv_dim, spec.conv_width - 1, dtype=dtypes.activation),
            conv_window=new(spec.conv_dim, max_window, dtype=dtypes.activation),
        )

    @property
    def per_slot(self) -> tuple[Tensor, ...]:
        """What a fork copies as it is: everything but the checkpoint, and the window, of which there is none then."""
        return self.ring_u, self.ring_k, self.ring_g, self.conv
