"""What every decode kernel gets beside the layer's own tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

#: Where a call's tensors are counted off, these stand for those that aren't there, each in its place; addresses are 0.
ABSENT = tuple(torch.empty(0, device="cpu") for _ in range(18))

#: What a record holds. ``"updates"``: ``(u, k, g)``, the key as it came, its norm factor in u. ``"normalised"``: the
#: normalised key, u without that factor. ``"inputs"``, for Mamba-2: ``(x, B, Δ)`` in place of ``(Δ x, B, Δ A)``.
Records = Literal["updates", "normalised", "inputs"]


#: Of all slots: ring_u, ring_k, ring_g; convolution states and windows, or None.
Rings = tuple[Tensor, Tensor, Tensor]
Conv = tuple[Tensor | None, Tensor | None]

#: Of all slots: checkpoint, ring_u, ring_k, ring_g, write_pos, checkpoint_slot, with which a :class:`Step` begins. Each
#: call of an operator makes one; a NamedTuple would take 0.2 µs longer.
State = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Layer(NamedTuple):
    """A layer's tensors for one token or a window, in the letters of the delta rule.

    Mamba-2: q = C, k = B, v = x, a = dt, rate = A. Shapes and dtypes: :mod:`replayssm.ops`; KDA's bias is ``[H, d_k]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor | None  # None: the additive rule
    rate: Tensor
    bias: Tensor | None
    D: Tensor | None = None
    z: Tensor | None = None

    @property
    def channel(self) -> bool:
        """Whether there is a decay for each key channel."""
        return self.a.dim() == self.v.dim()


class Rules(NamedTuple):
    """A layer's numbers."""

    scale: float = 1.0  # of q
    beta_scale: float = 1.0
    l2_norm: bool = False  # of q and k
    lower_bound: float | None = None  # of a channel gate
    softplus: bool = False  # of the time step
    dt_min: float = -math.inf
    dt_max: float = math.inf


class Step(NamedTuple):
    """State of all slots, and which rows step. Shapes and dtypes: :mod:`replayssm.ops`."""

    checkpoint: Tensor
    ring_u: Tensor
    ring_k: Tensor
    ring_g: Tensor
    write_pos: Tensor  # [N], or [B] where checkpoint_slot is None
    checkpoint_slot: Tensor | None  # None: each slot reads its own checkpoint
    slots: Tensor
    flush_period: int
    force_flush: Tensor | None
    records: Records = "updates"
    out: Tensor | None = None  # [B, H_v, d_v], contiguous, where a kernel that can may write the output
    zero_padding: bool = True  # False: padding rows of the output hold what out held, or anything

    def pick(self, rows: list[int]) -> Step:
        """The same step for some of the rows."""
        forced = None if self.force_flush is None else self.force_flush[rows]
        cursors = self.write_pos[rows] if self.checkpoint_slot is None else self.write_pos
        return self._replace(write_pos=cursors, slots=self.slots[rows], force_flush=forced)


def counted_off(tensors: Sequence[Tensor], flush_period: int) -> tuple[Layer, Step]:
    """An operator's tensors as a layer and a step: in their order, one of ABSENT for each that isn't there."""
    there = [None if x is absent else x for x, absent in zip(tensors, ABSENT, strict=False)]
    return Layer(*there[:9]), Step(*there[9:16], flush_period, there[16])  # type: ignore[arg-type, call-arg]


class Window(NamedTuple):
    """How many of a window's T tokens each row uses, and what each follows."""

    num_tokens: Tensor  # int32 [B], from 0 to T; later tokens hold anything and must not be used
    parents: Tensor | None  # int32 [B, T], parents[b, i] < i, -1: the committed state; None: a chain


class Accepted(NamedTuple):
    """What was accepted of each row's window; :func:`replayssm.ops.accept` says what the tensors hold."""

    slots: Tensor
    num_tokens: Tensor
    num_accepted: Tensor
    path: Tensor | None = None  # None: the first tokens
