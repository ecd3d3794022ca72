"""Forwards that can be taken back: transformers' assisted decoding on top of the ring.

transformers verifies drafts by a forward with all of them and `crop`s the cache by those it rejects. While a cache
records, every token is appended to the rings and nothing is folded; to take tokens back is to move the cursor. A call
of `crop` commits what is left, and is where records are folded once there are L of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from replayssm import ops
from replayssm.models.adapters import Kernels
from replayssm.ops import MAX_WINDOW

if TYPE_CHECKING:
    from replayssm.models.cache import ReplayCache

#: Ring rows beside the L that a cache has anyway: so many tokens can be taken back.
EXTRA_ROWS = 64


class Recording:
    """What a recording cache knows about the tokens in its rings; the same number in every row.

    Args:
        cache: the cache that records.

    Attributes:
        held: records in the ring.
        open: how many of them can be taken back; the newest.
    """

    def __init__(self, cache: ReplayCache) -> None:
        self.cache = cache
        self.held = 0
        self.open = 0
        self.inputs: dict[int, Tensor] = {}  # layer -> [B, C, W-1 + open], the convolution's inputs
        if cache.pool is not None and cache.rows:
            self.held = int(cache.pool.write_pos[cache.rows[0]])

    def tail(self, tokens: int, shortest: int, *, first: bool) -> int:
        """How many of a forward's last tokens go to the ring; those before them are prefill.

        Args:
            tokens: T of the forward.
            shortest: T without the padding of the most padded row.
            first: whether the cache is empty, so that something has to be prefilled.
        """
        return max(0, min(tokens - first, shortest - first, self.capacity))

    @property
    def capacity(self) -> int:
        """Ring rows of a cache that records."""
        return self.cache.settings.ring_len + EXTRA_ROWS

    def start(self, tokens: int, *, after_prefill: bool) -> None:
        """The first recurrent layer begins a forward of ``tokens`` recorded tokens."""
        pool = self.cache.require_pool()
        if after_prefill:
            self.held = self.open = 0
            self.inputs.clear()
        elif self.held + tokens > pool.ring_capacity:
            self.fold()
        self.cursors = torch.full_like(pool.write_pos, self.held)
        self.own = torch.arange(pool.num_slots, dtype=torch.int32, device=pool.device)

    def kernels(self, index: int) -> Kernels:
        """The operators of layer `index` for a window of any length."""
        return Kernels(partial(self._conv, index), partial(self._recurrence, index))

    def finish(self, tokens: int) -> None:
        """The last recurrent layer is done: the cursors move behind all the forward's tokens."""
        pool = self.cache.require_pool()
        self.held += tokens
        self.open += tokens
        pool.write_pos[self.cache.slot_index] = self.held

    def crop(self, tokens: int) -> None:
        """Take back the last ``tokens`` and commit the others.

        Raises:
            ValueError: so many can't be taken back.
        """
        if tokens > self.open:
            raise ValueError(
                f"crop of {tokens} tokens: this ReplayCache can take back {self.open}, those since the last crop "
                f"and at most {self.capacity}"
            )
        if not self.cache.rows:
            return
        pool = self.cache.require_pool()
        self.held -= tokens
        pool.write_pos[self.cache.slot_index] = self.held
        for index, inputs in self.inputs.items():
            keep = pool.layers[index].conv_width - 1
            end = inputs.shape[-1] - tokens
            pool.conv_state(index)[self.cache.slot_index] = inputs[..., end - keep : end]
        self.commit()
        if self.held >= pool.ring_len:
            self.fold()

    def commit(self) -> None:
        """What the rings hold can't be taken back any more."""
        self.open = 0
        self.inputs.clear()

    def fold(self) -> None:
        """Write all records into the checkpoints."""
        pool, rows = self.cache.require_pool(), self.cache.rows
        for slot in rows:
            pool.materialize(slot, slot)
        self.held = 0
        self.commit()

    def _conv(self, index: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Convolution and silu of a window ``[B, T, C]``, in float32; the inputs are kept for :meth:`crop`."""
        pool, slots = self.cache.require_pool(), self.cache.slot_index
        kept = pool.conv_state(index)[slots]
        window = torch.cat([kept, x.mT], dim=-1)
        bias = None if bias is None else bias.float()
        y = F.conv1d(window.float(), weight.unsqueeze(1).float(), bias, groups=weight.shape[0])
        before = self.inputs.get(index)
        self.inputs[index] = window if before is None else torch.cat([before, x.mT], dim=-1)
        pool.conv_state(index)[slots] = window[..., window.shape[-1] - kept.shape[-1] :]
        return F.silu(y).mT.to(x.dtype).contiguous()

    def _recurrence(self, index: int, *inputs: Tensor, **parameters: Any) -> Tensor:
        """The window's outputs ``[B, T, H_v, d_v]``, by windows that one call takes."""
        cache, pool = self.cache, self.cache.require_pool()
        operator = getattr(ops, f"{cache.adapters[index].operator}_verify")
        state = pool.fold_args(index) | {"checkpoint_slot": self.own}
        gate = parameters.pop("z", None)
        outs = []
        for start in range(0, inputs[0].shape[1], MAX_WINDOW):
            part = slice(start, start + MAX_WINDOW)
            if gate is not None:
                parameters["z"] = gate[:, part]
            state["write_pos"] = self.cursors + start
            window = [x[:, part] for x in inputs]
            outs.append(operator(*window, **parameters, **state, slots=cache.slots, backend=pool.backend))
        return torch.cat(outs, dim=1)
