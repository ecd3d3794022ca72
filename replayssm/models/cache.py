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
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionLayer,
    StaticCache,
    StaticLayer,
)

from replayssm.models.adapters import Adapter
from replayssm.models.binding import MixerCache, binding_of
from replayssm.models.kernels import decode_kernels, verify_kernels
from replayssm.models.recording import Recording
from replayssm.ops.checks import check_count
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
    is_croppable = True

    def attach(self, cache: ReplayCache, index: int, adapter: Adapter) -> ReplayLayer:
        """Make this the `index`-th recurrent layer of `cache`."""
        self.cache, self.index, self.adapter = cache, index, adapter
        self.is_compileable = cache.room is not None  # transformers then masks what a fixed tensor has unused
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
        self.cache.begin(self.index, window.shape[-1])
        if self.index == self.cache.last_index:
            self.cache.seen += window.shape[-1]
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
        """Nothing to do here: the cache records for all layers."""

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to do here: the cache moves the cursor of all layers."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Nothing to do here: the cache moves the slots of all layers."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Nothing to do here: the cache moves the slots of all layers."""

    def _check_enabled(self) -> None:
        if binding_of(self.adapter.mixer) is None:
            raise ValueError("this ReplayCache belongs to a model that was disabled: enable the model again first")


class ReplayHybridLayer(ReplayLayer, LinearAttentionAndFullAttentionLayer):
    """A layer with a recurrent part and an attention part side by side (Falcon-H1, Zamba2)."""

    def activate_past_recording(self) -> None:
        """Nothing to do here: the cache records for all layers."""

    def crop(self, tokens_to_remove: int) -> None:
        """The attention part alone."""
        DynamicLayer.crop(self, tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """The attention part alone."""
        LinearAttentionAndFullAttentionLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The attention part alone."""
        LinearAttentionAndFullAttentionLayer.batch_select_indices(self, indices)


class ReplayFixedHybridLayer(ReplayLayer, LinearAttentionAndStaticFullAttentionLayer):
    """As ReplayHybridLayer, with keys and values in tensors of a fixed size."""

    def crop(self, tokens_to_remove: int) -> None:
        """The attention part alone."""
        StaticLayer.crop(self, tokens_to_remove)


_HYBRID = (ReplayHybridLayer, ReplayFixedHybridLayer)
_REPLACED = {
    LinearAttentionLayer: ReplayLayer,
    LinearAttentionAndFullAttentionLayer: ReplayHybridLayer,
    LinearAttentionAndStaticFullAttentionLayer: ReplayFixedHybridLayer,
}


class OpenWindow:
    """A window between :meth:`ReplayCache.verify` and :meth:`ReplayCache.commit`."""

    def __init__(self, num_tokens: Tensor, parents: Tensor | None) -> None:
        self.num_tokens = num_tokens
        self.parents = parents
        self.tokens = 0  # T, once a forward has run


def _kept(cached: Tensor, tokens: int, longest: int, path: Tensor | None) -> Tensor:
    """Keys or values ``[B, H, S, d]`` whose last ``tokens`` are a window: of those, the accepted ones."""
    before = cached.shape[-2] - tokens
    if path is None:
        return cached[..., : before + longest, :]
    index = path[:, :longest].long().clamp(0, tokens - 1)[:, None, :, None]
    window = cached[..., before:, :]
    accepted = window.gather(2, index.expand(-1, window.shape[1], -1, window.shape[3]))
    return torch.cat([cached[..., :before, :], accepted], dim=-2)


class ReplayCache(MixerCache, DynamicCache):
    """The cache of an enabled model: `generate` makes one by itself, a direct call of the model takes one.

    Args:
        model: a model that :func:`replayssm.enable` was called on. The settings below default to those of the call.
        ring_len: L, a checkpoint is written once in L tokens.
        state_dtype: dtype of the checkpoints: torch.float32, torch.bfloat16 or torch.float16.
        ring_dtype: dtype of the update vectors in the ring, or "auto".
        backend: "auto", or one of `replayssm.ops.BACKENDS`.
        max_cache_len: tokens that the attention layers have room for, prompt included. Their keys and values then have
            fixed shapes and addresses, so that a decode step can be compiled, or captured in a CUDA graph. None: they
            grow.
        max_window: the longest window that :meth:`verify` will be asked for; 0 for none.

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
        max_cache_len: int | None = None,
        max_window: int = 0,
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
        if max_cache_len is not None:
            check_count("max_cache_len", max_cache_len, 1)
            if max_window:
                raise ValueError(
                    f"max_window is {max_window} and max_cache_len {max_cache_len}: windows need keys and values that "
                    "grow and shrink, give one of the two"
                )
        self.room = max_cache_len  # transformers has properties called max_cache_len
        self.max_window = max_window
        self.pool: ReplayPool | None = None
        self.recording: Recording | None = None
        self.window: OpenWindow | None = None
        self.seen = 0
        self._start()

    def run(self, mixer: Any, hidden_states: Tensor) -> Tensor | None:
        """One layer's output ``[B, T, D]`` by replay; None where transformers' prefill is wanted."""
        layer = self._layer_of(mixer)
        tokens = hidden_states.shape[1]
        if not layer.has_previous_state[0]:
            return None
        if self.window is not None:
            return self._verify(layer, hidden_states, self.window)
        if self.recording is not None:
            return self._record(layer, hidden_states) if tokens <= self.recording.capacity else None
        if tokens > 1:
            return None
        self._check_batch(hidden_states)
        self.begin(layer.index, tokens)
        with torch.no_grad():
            out = layer.adapter.run(hidden_states.squeeze(1), self._kernels[layer.index])
            if layer.index == self.last_index:
                self.require_pool().advance(self.slots)
                self.seen += 1
                self.midway = False
        return out.unsqueeze(1)

    def verify(self, num_tokens: Tensor, parents: Tensor | None = None) -> None:
        """The next forward of the model is a window, of which :meth:`commit` will take what is accepted.

        The caller gives the model a mask and positions that fit: see :class:`replayssm.speculate.ReplayVerifier`.

        Args:
            num_tokens: int32 ``[B]``, how many of the forward's T tokens each row uses.
            parents: int32 ``[B, T]``, for a tree: see :mod:`replayssm.ops.verify`.

        Raises:
            ValueError: the cache is empty, has no room for windows, or the last one wasn't committed.
        """
        self.require_pool()
        if not self.max_window:
            raise ValueError("verify() of a ReplayCache without windows: make it with max_window=T")
        if self.window is not None:
            raise ValueError("verify() of a ReplayCache whose last window wasn't committed: call commit() first")
        self.window = OpenWindow(num_tokens, parents)

    def commit(self, num_accepted: Tensor, longest: int, path: Tensor | None = None) -> None:
        """Keep the accepted tokens of the window, in every layer.

        Keys and values of attention layers keep ``longest`` places for the window in every row; those behind a row's
        own count are to be masked from then on.

        Args:
            num_accepted: int32 ``[B]``.
            longest: the largest of them.
            path: int32 ``[B, T]``, for a tree: the accepted tokens, see :func:`replayssm.ops.accept`.
        """
        window, pool = self.window, self.require_pool()
        if window is None or not window.tokens:
            raise ValueError("commit() of a ReplayCache without a window: call verify() and the model first")
        pool.commit(self.slots, num_tokens=window.num_tokens, num_accepted=num_accepted, path=path)
        for layer in self.layers:
            if not self._attends(layer):
                continue
            layer.keys = _kept(layer.keys, window.tokens, longest, path)
            layer.values = _kept(layer.values, window.tokens, longest, path)
        self.seen += longest
        self.window = None

    def _verify(self, layer: ReplayLayer, hidden_states: Tensor, window: OpenWindow) -> Tensor:
        self._check_batch(hidden_states)
        window.tokens = hidden_states.shape[1]
        self.begin(layer.index, window.tokens)
        kernels = verify_kernels(
            layer.adapter, layer.index, self.require_pool(), self.slots, window.num_tokens, window.parents
        )
        with torch.no_grad():
            out = layer.adapter.run(hidden_states, kernels)
        if layer.index == self.last_index:
            self.midway = False
        return out

    @staticmethod
    def _attends(layer: Any) -> bool:
        """Whether a layer holds keys and values."""
        own = not isinstance(layer, ReplayLayer) or isinstance(layer, _HYBRID)
        return own and getattr(layer, "keys", None) is not None

    def tail(self, mixer: Any, hidden_states: Tensor, mask: Tensor | None) -> int:
        """How many of the last tokens of a prefill go into the ring, so that they can be taken back."""
        if self.recording is None:
            return 0
        batch, tokens = hidden_states.shape[:2]
        shortest = tokens if mask is None or tuple(mask.shape) != (batch, tokens) else int(mask.sum(1).min())
        return self.recording.tail(tokens, shortest, first=not self._layer_of(mixer).has_previous_state[0])

    def run_tail(self, mixer: Any, hidden_states: Tensor) -> Tensor:
        """The tokens of :meth:`tail`, after the prefill of those before them."""
        return self._record(self._layer_of(mixer), hidden_states, after_prefill=True)

    def _record(self, layer: ReplayLayer, hidden_states: Tensor, *, after_prefill: bool = False) -> Tensor:
        recording = self.recording
        assert recording is not None
        self._check_batch(hidden_states)
        tokens = hidden_states.shape[1]
        if not after_prefill:
            self.begin(layer.index, tokens)
        if layer.index == 0:
            recording.start(tokens, after_prefill=after_prefill)
        self.midway = True
        with torch.no_grad():
            out = layer.adapter.run(hidden_states, recording.kernels(layer.index))
        if layer.index == self.last_index:
            recording.finish(tokens)
            self.seen += tokens
            self.midway = False
        return out

    def _layer_of(self, mixer: Any) -> ReplayLayer:
        layer: ReplayLayer = self.layers[mixer.layer_idx]
        if layer.adapter.mixer is not mixer:
            raise ValueError("this ReplayCache was made for another model: make one with ReplayCache(model)")
        return layer

    def _check_batch(self, hidden_states: Tensor) -> None:
        if hidden_states.shape[0] != len(self.rows):
            raise ValueError(f"a batch of {hidden_states.shape[0]} meets a ReplayCache of {len(self.rows)} rows")

    def begin(self, index: int, tokens: int) -> None:
        """A recurrent layer starts its part of a forward of so many tokens.

        Raises:
            ValueError: there is no room for them, or the forward before this one was interrupted (an exception,
                Ctrl-C), so that some layers hold its tokens and some don't.
        """
        if index == 0 and self.room is not None and not torch.compiler.is_compiling():
            self._check_room(self.room, tokens)
        if index == 0 and self.midway:
            raise ValueError(
                "the last forward with this ReplayCache was interrupted, its layers hold different tokens: "
                "reset() it or make a new one"
            )
        self.midway = True

    def _check_room(self, room: int, tokens: int) -> None:
        """On a GPU an attention layer that writes past its keys would end the process's use of it."""
        if self.seen + tokens > room:
            raise ValueError(
                f"max_cache_len is {room}: this ReplayCache holds {self.seen} tokens, and {tokens} more don't fit"
            )

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens in the cache; of a model without attention layers, too."""
        if all(isinstance(layer, ReplayLayer) and not isinstance(layer, _HYBRID) for layer in self.layers):
            return self.seen
        return super().get_seq_length(layer_idx)

    def activate_past_recording(self) -> None:
        """From here on, :meth:`crop` can take tokens back."""
        super().activate_past_recording()
        if self.recording is None:
            self.recording = Recording(self)
            if self.rows and self.require_pool().ring_capacity < self.recording.capacity:
                self._grow(list(range(len(self.rows))))  # the rings of a cache that didn't record are shorter

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row, given as a negative number, and commit those before them.

        Raises:
            ValueError: the cache doesn't record, or so many tokens can't be taken back.
        """
        tokens_to_remove = int(tokens_to_remove)  # a tensor in transformers 5.17
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): the number of tokens to take back is wanted, as -{tokens_to_remove}"
            )
        if self.recording is not None:
            self.recording.crop(-tokens_to_remove)
            self.seen += tokens_to_remove
        elif tokens_to_remove:
            raise ValueError(
                f"crop({tokens_to_remove}) of a ReplayCache that doesn't record: call activate_past_recording() "
                "before the tokens that are to be taken back"
            )
        for layer in self.layers:
            if self._attends(layer):
                layer.crop(tokens_to_remove)

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
        self._check_rows_may_change()
        super().batch_repeat_interleave(repeats)
        self._take_rows([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, a tensor of numbers or a mask."""
        self._check_rows_may_change()
        super().batch_select_indices(indices)
        if not self.rows:
            return
        self._take_rows(torch.arange(len(self.rows))[indices.cpu()].tolist())

    def _check_rows_may_change(self) -> None:
        if self.room is not None:
            raise ValueError("the rows of a ReplayCache with max_cache_len stay as they are: make one without it")

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayCache:
        # The copy serves the same model: adapters lead to its weights.
        memo.update({id(adapter): adapter for adapter in self.adapters})
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        if new.pool is not None:
            new._bind_kernels()
        return new

    def _start(self) -> None:
        """Empty layers, no rows."""
        self.midway = False  # in a forward, between the first recurrent layer and the last
        self.recording = None
        self.window = None
        self.seen = 0  # tokens, padding included
        super().__init__(config=self.config)
        if self.room is not None:
            self.layers[:] = StaticCache(config=self.config, max_cache_len=self.room).layers
        for index, adapter in enumerate(self.adapters):
            old = self.layers[adapter.layer_idx]
            new = _REPLACED[type(old)]
            layer = new(max_cache_len=self.room) if new is ReplayFixedHybridLayer else new()
            self.layers[adapter.layer_idx] = layer.attach(self, index, adapter)
        self._place([], torch.device("cpu"))

    def _take_rows(self, parents: Sequence[int]) -> None:
        if not self.rows or list(parents) == list(range(len(self.rows))):
            return
        pool = self.require_pool()
        if self.recording is not None:
            self.recording.commit()
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
        if self.recording is not None:
            self.recording.held = 0

    def _new_pool(self, num_slots: int, activation_dtype: torch.dtype, device: torch.device) -> ReplayPool:
        pool = self.pool
        # Room for L records and a window behind them: a fold comes every L accepted tokens.
        capacity = self.settings.ring_len + max(0, self.max_window - 1)
        if self.recording is not None:
            capacity = self.recording.capacity
        wanted = (num_slots, activation_dtype, device, capacity)
        if (
            pool is None
            or len(self.rows)
            or wanted != (pool.num_slots, pool.dtypes.activation, pool.device, pool.ring_capacity)
        ):
            pool = ReplayPool(
                [adapter.spec for adapter in self.adapters],
                num_slots,
                ring_len=self.settings.ring_len,
                ring_capacity=capacity,
                max_window=self.max_window,
                state_dtype=self.settings.state_dtype,
                activation_dtype=activation_dtype,
                ring_dtype=self.settings.ring_dtype,
                device=device,
                backend=self.settings.backend,
            )
            if self.room is not None:  # torch.compile then lets its CUDA graphs write to them
                for tensor in pool.tensors():
                    torch._dynamo.mark_static_address(tensor)
        self.pool = pool
        self._place(pool.alloc(num_slots), device)
        return pool

    def _bind_kernels(self) -> None:
        """The operators of one token, with their state and slots."""
        pool = self.require_pool()
        self._kernels = [decode_kernels(adapter, i, pool, self.slots) for i, adapter in enumerate(self.adapters)]

    def _place(self, rows: list[int], device: torch.device) -> None:
        self.rows = rows
        self.slots = torch.tensor(rows, dtype=torch.int32, device=device)
        self.slot_index = self.slots.long()
        if rows:
            self._bind_kernels()
