"""A transformers cache that keeps recurrent layers as checkpoint and ring.

Attention layers stay as transformers has them. The recurrent layers share one :class:`ReplayPool`, made at the first
prefill, when the batch size is known. A prefill runs transformers' own code, which reads and writes the states through
the layer objects here; one-token steps go straight to the adapters (see `switch.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from replayssm.models.adapters import Adapter
from replayssm.models.binding import binding_of
from replayssm.state import ReplayPool


class _ReadOnDemand:
    """``layer.conv_states`` or ``layer.recurrent_states`` as transformers indexes them; a tensor is made when read."""

    def __init__(self, layer: ReplayLayer, *, recurrent: bool) -> None:
        self.layer = layer
        self.recurrent = recurrent

    def __getitem__(self, state_idx: int) -> Tensor:
        return self.layer.read_recurrent() if self.recurrent else self.layer.read_conv()


class ReplayLayer(LinearAttentionLayer):
    """One recurrent layer of a :class:`ReplayCache`, as transformers' prefill sees it.

    The `is_*_initialized` flags of the base class stay False, so that its copying methods have nothing to do: the
    cache moves slots for all layers at once.
    """

    is_compileable = False
    is_croppable = False

    def attach(self, cache: ReplayCache, index: int, adapter: Adapter) -> ReplayLayer:
        """Make this the `index`-th recurrent layer of `cache`."""
        self.cache, self.index, self.adapter = cache, index, adapter
        self.conv_states = _ReadOnDemand(self, recurrent=False)
        self.recurrent_states = _ReadOnDemand(self, recurrent=True)
        return self

    def read_conv(self) -> Tensor:
        """The last inputs of the convolution, ``[B, C, W-1]``."""
        self._check_enabled()
        return self.cache.require_pool().conv_state(self.index)[self.cache.slot_index]

    def read_recurrent(self) -> Tensor:
        """The folded state at the current position, float32, in transformers' layout."""
        self._check_enabled()
        return self.adapter.to_upstream(self.cache.require_pool().read_state(self.index, self.cache.rows))

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Append a window's inputs ``[B, C, T]``; returns them behind the kept ones, if there are any."""
        window = conv_states
        pool = self.cache.pool_for(window)
        self.cache.begin(self.index)
        if self.has_previous_state[0]:
            window = torch.cat([self.read_conv(), window], dim=-1)
        self.has_previous_state[0] = True
        keep = self.adapter.spec.conv_width - 1
        kept = window[..., max(0, window.shape[-1] - keep) :]
        kept = torch.nn.functional.pad(kept, (keep - kept.shape[-1], 0))
        pool.conv_state(self.index)[self.cache.slot_index] = kept.detach()
        return window

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Store the state after a prefill as the checkpoint; the last layer's call clears the rings."""
        pool, rows = self.cache.require_pool(), self.cache.rows
        pool.write_state(self.index, rows, self.adapter.from_upstream(recurrent_states.detach()))
        if self.index == self.cache.last_index:
            pool.reset_cursors(rows)
            self.cache.midway = False
        return recurrent_states

    def activate_past_recording(self) -> None:
        """Refused: drafts can't be rolled back yet."""
        raise ValueError("ReplayCache cannot record drafts to roll them back: use it without an assistant model")

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, unless nothing is to be removed."""
        if tokens_to_remove:
            raise ValueError(f"crop({tokens_to_remove}) of a ReplayCache: its recurrent layers cannot drop tokens")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Nothing to do here: the cache moves the slots of all layers."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Nothing to do here: the cache moves the slots of all layers."""

    def _check_enabled(self) -> None:
        if binding_of(self.adapter.mixer) is None:
            raise ValueError("this ReplayCache belongs to a model that was disabled: enable the model again first")


class ReplayHybridLayer(ReplayLayer, LinearAttentionAndFullAttentionLayer):
    """A layer with a recurrent part and an attention part side by side (Falcon-H1, Zamba2)."""

    def crop(self, tokens_to_remove: int) -> None:
        """See :meth:`ReplayLayer.crop`."""
        ReplayLayer.crop(self, tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """The attention part alone."""
        LinearAttentionAndFullAttentionLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The attention part alone."""
        LinearAttentionAndFullAttentionLayer.batch_select_indices(self, indices)


_REPLACED = {LinearAttentionLayer: ReplayLayer, LinearAttentionAndFullAttentionLayer: ReplayHybridLayer}


class ReplayCache(DynamicCache):
    """The cache of an enabled model: `generate` makes one by itself, a direct call of the model takes one.

    Args:
        model: a model that :func:`replayssm.enable` was called on. The settings below default to those of the call.
        ring_len: L, a checkpoint is written once in L tokens.
        state_dtype: dtype of the checkpoints: torch.float32, torch.bfloat16 or torch.float16.
        ring_dtype: dtype of the update vectors in the ring, or "auto".
        backend: "auto", or one of `replayssm.ops.BACKENDS`.

    Attributes:
        pool: the :class:`ReplayPool`; None before the first prefill.
        slots: int32 ``[B]``, the slot of each row.

    Raises:
        ValueError: the model isn't enabled, or a setting is out of range.
    """

    def __init__(
        self,
        model: Any,
        ring_len: int | None = None,
        *,
        state_dtype: torch.dtype | None = None,
        ring_dtype: torch.dtype | str | None = None,
        backend: str | None = None,
    ) -> None:
        binding = binding_of(model)
        if binding is None:
            raise ValueError(f"ReplayCache was given a {type(model).__name__} without replay: call enable(model) first")
        self.config = model.config.get_text_config(decoder=True)
        self.settings = binding.settings.changed(
            ring_len=ring_len, state_dtype=state_dtype, ring_dtype=ring_dtype, backend=backend
        )
        self.adapters = binding.adapters
        self.last_index = len(self.adapters) - 1
        self.pool: ReplayPool | None = None
        self._start()

    def decode(self, mixer: Any, hidden_states: Tensor) -> Tensor | None:
        """One token of one layer, ``[B, 1, D]``; None if the layer has no state yet and wants a prefill."""
        layer: ReplayLayer = self.layers[mixer.layer_idx]
        if layer.adapter.mixer is not mixer:
            raise ValueError("this ReplayCache was made for another model: make one with ReplayCache(model)")
        if not layer.has_previous_state[0]:
            return None
        if hidden_states.shape[0] != len(self.rows):
            raise ValueError(f"a batch of {hidden_states.shape[0]} meets a ReplayCache of {len(self.rows)} rows")
        self.begin(layer.index)
        conv_state, state = self._arguments[layer.index]
        with torch.no_grad():
            out = layer.adapter.decode(hidden_states.squeeze(1), conv_state, state, self.slots)
            if layer.index == self.last_index:
                self.require_pool().advance(self.slots)
                self.midway = False
        return out.unsqueeze(1)

    def begin(self, index: int) -> None:
        """A recurrent layer starts its part of a forward.

        Raises:
            ValueError: the forward before this one was interrupted (an exception, Ctrl-C), so that some layers hold
                its tokens and some don't.
        """
        if index == 0 and self.midway:
            raise ValueError(
                "the last forward with this ReplayCache was interrupted, its layers hold different tokens: "
                "reset() it or make a new one"
            )
        self.midway = True

    def pool_for(self, window: Tensor) -> ReplayPool:
        """The pool, made now if ``window [B, C, T]`` is the first input that this cache sees."""
        if not self.rows:
            self._new_pool(window.shape[0], window.dtype, window.device)
        if window.shape[0] != len(self.rows):
            raise ValueError(f"a batch of {window.shape[0]} meets a ReplayCache of {len(self.rows)} rows")
        return self.require_pool()

    def require_pool(self) -> ReplayPool:
        """The pool, after the first prefill."""
        if self.pool is None:
            raise ValueError("this ReplayCache is empty: run a prompt through the model first")
        return self.pool

    def reset(self) -> None:
        """Forget everything; the next prefill may have another batch size."""
        if self.pool is not None and self.rows:
            self.pool.free(self.rows)
        self._start()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue row ``beam_idx[i]`` in row i. A parent with one child keeps its slot, more children fork it."""
        super().reorder_cache(beam_idx)
        self._take_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        self._take_rows([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, a tensor of numbers or a mask."""
        super().batch_select_indices(indices)
        if not self.rows:
            return
        self._take_rows(torch.arange(len(self.rows))[indices.cpu()].tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayCache:
        # The copy serves the same model: adapters lead to its weights.
        memo.update({id(adapter): adapter for adapter in self.adapters})
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        if new.pool is not None:
            new._bind_arguments()
        return new

    def _start(self) -> None:
        """Empty layers, no rows."""
        self.midway = False  # in a forward, between the first recurrent layer and the last
        super().__init__(config=self.config)
        for index, adapter in enumerate(self.adapters):
            old = self.layers[adapter.layer_idx]
            self.layers[adapter.layer_idx] = _REPLACED[type(old)]().attach(self, index, adapter)
        self._place([], torch.device("cpu"))

    def _take_rows(self, parents: Sequence[int]) -> None:
        if not self.rows or list(parents) == list(range(len(self.rows))):
            return
        pool = self.require_pool()
        if len(parents) > pool.num_slots:
            self._grow(parents)
            return
        pool.free([slot for row, slot in enumerate(self.rows) if row not in set(parents)])
        rows: list[int] = []
        for parent in parents:
            slot = self.rows[parent]
            rows.append(slot if slot not in rows else pool.fork(slot))
        self._place(rows, self.slots.device)

    def _grow(self, parents: Sequence[int]) -> None:
        """Move to a larger pool; rings are folded on the way."""
        old, old_rows, old_index = self.require_pool(), self.rows, self.slot_index
        pool = self._new_pool(len(parents), old.dtypes.activation, old.device)
        for index in range(len(self.adapters)):
            pool.write_state(index, self.rows, old.read_state(index, old_rows)[parents])
            pool.conv_state(index)[self.slot_index] = old.conv_state(index)[old_index][parents]

    def _new_pool(self, num_slots: int, activation_dtype: torch.dtype, device: torch.device) -> ReplayPool:
        pool = self.pool
        wanted = (num_slots, activation_dtype, device)
        if pool is None or (pool.num_slots, pool.dtypes.activation, pool.device) != wanted or len(self.rows):
            pool = ReplayPool(
                [adapter.spec for adapter in self.adapters],
                num_slots,
                ring_len=self.settings.ring_len,
                state_dtype=self.settings.state_dtype,
                activation_dtype=activation_dtype,
                ring_dtype=self.settings.ring_dtype,
                device=device,
                backend=self.settings.backend,
            )
        self.pool = pool
        self._bind_arguments()
        self._place(pool.alloc(num_slots), device)
        return pool

    def _bind_arguments(self) -> None:
        pool = self.require_pool()
        self._arguments = [(pool.conv_state(i), pool.state_args(i)) for i in range(len(self.adapters))]

    def _place(self, rows: list[int], device: torch.device) -> None:
        self.rows = rows
        self.slots = torch.tensor(rows, dtype=torch.int32, device=device)
        self.slot_index = self.slots.long()
