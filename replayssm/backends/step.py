"""What every decode kernel gets beside the layer's own tensors."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

#: What a record holds. ``"updates"``: ``(u, k, g)``, the key as it came, its norm factor in u. ``"normalised"``: the
#: normalised key, u without that factor. ``"inputs"``, for Mamba-2: ``(x, B, Δ)`` in place of ``(Δ x, B, Δ A)``.
Records = Literal["updates", "normalised", "inputs"]


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
    zero_padding: bool = True  # False: the kernel leaves padding rows of out alone

    def pick(self, rows: list[int]) -> Step:
        """The same step for some of the rows."""
        forced = None if self.force_flush is None else self.force_flush[rows]
        cursors = self.write_pos[rows] if self.checkpoint_slot is None else self.write_pos
        return self._replace(write_pos=cursors, slots=self.slots[rows], force_flush=forced)


class Window(NamedTuple):
    """How many of a window's T tokens each row uses, and what each follows."""

    num_tokens: Tensor  # int32 [B], from 0 to T; later tokens hold anything and must not be used
    parents: Tensor | None  # int32 [B, T], parents[b, i] < i, -1: the committed state; None: a chain
