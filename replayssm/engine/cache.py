"""What a transformers model meets as its cache while the engine runs it: slots of a pool, and pages.

Recurrent layers hand their inputs to :meth:`EngineCache.run`, prefill included. Attention layers hand their new keys
and values to :meth:`EngineCache.update`, which writes them into pages and gives them back as they came; then they ask
for an attention function by the name that the runner put into the model's configuration, and get
:func:`paged_attention`, which reads the pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from replayssm import ops
from replayssm.engine.attention import PagedAttention, Queries
from replayssm.engine.kv import Pages
from replayssm.engine.waves import Wave
from replayssm.models.adapters import Adapter, Kernels
from replayssm.models.binding import MixerCache
from replayssm.models.kernels import decode_kernels, verify_kernels
from replayssm.state import ReplayPool

ATTENTION = "replayssm_paged"
ATTRIBUTE = "_replayssm_engine"  # of an attention module, during a forward: the engine's cache


@dataclass(eq=False)
class Step(ABC):
    """One forward: what runs in its recurrent layers, and where its tokens' keys and queries are.

    Attributes:
        queries: the forward's tokens, for attention.
        places: int64 ``[N]``, where their keys and values go, see :class:`replayssm.engine.kv.Pages`.
    """

    queries: Queries
    places: Tensor

    @abstractmethod
    def run(self, index: int, adapter: Adapter, hidden: Tensor, pool: ReplayPool) -> Tensor:
        """The `index`-th recurrent layer's output for its input, both as the model has them."""


@dataclass(eq=False)
class Prefill(Step):
    """Packed parts of prompts, ``[1, N, D]``; each continues its slot's state and leaves a new one.

    Attributes:
        waves: the parts; those of one continue those of the one before.
    """

    waves: Sequence[Wave]

    def run(self, index: int, adapter: Adapter, hidden: Tensor, pool: ReplayPool) -> Tensor:
        """See :meth:`Step.run`."""
        kernels = Kernels(partial(self._conv, index, pool), partial(self._recurrence, index, adapter, pool))
        return adapter.run(hidden.squeeze(0), kernels).unsqueeze(0)

    def _conv(self, index: int, pool: ReplayPool, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        state, outputs = pool.conv_state(index), []
        for wave in self.waves:
            y, last = ops.causal_conv1d_prefill(
                x[wave.tokens],
                state[wave.slot_index],
                weight,
                bias,
                cu_seqlens=wave.cu_seqlens,
                activation="silu",
                backend=pool.backend,
            )
            state[wave.slot_index] = last
            if wave.kept:
                state[wave.kept_index] = last[wave.kept_rows]
            outputs.append(y)
        return _joined(outputs)

    def _recurrence(self, index: int, adapter: Adapter, pool: ReplayPool, *inputs: Tensor, **parameters: Any) -> Tensor:
        prefill = getattr(ops, f"{adapter.operator}_prefill")
        arguments = pool.fold_args(index)
        outputs: list[Tensor] = []
        after: Tensor | None = None
        for wave in self.waves:
            if wave.follows is None or after is None:
                # Cursors move after the last layer, so each layer reads its state as the steps before have left it.
                before = ops.read_state(**arguments, slots=wave.slot_tensor, backend=pool.backend)
            else:  # as a checkpoint holds it, so that it makes no difference whether it was read from a snapshot
                before = after[wave.follows].to(arguments["checkpoint"].dtype).to(after.dtype)
            y, after = prefill(
                *(x[wave.tokens] for x in inputs),
                **_of_tokens(parameters, wave.tokens),
                **adapter.prefill_parameters,
                initial_state=before,
                cu_seqlens=wave.cu_seqlens,
                backend=pool.backend,
            )
            if wave.ended:
                ended = after if wave.ended_rows is None else after[wave.ended_rows]
                pool.write_state(index, wave.ended, ended)
            if wave.kept:
                pool.write_state(index, wave.kept, after[wave.kept_rows], kept=True)
            outputs.append(y)
        return _joined(outputs)


def _of_tokens(parameters: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """An operator's parameters for some of its tokens: the gate z is the only one that has a row for each."""
    z = parameters.get("z")
    return parameters if z is None else parameters | {"z": z[tokens]}


def _joined(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(eq=False)
class Decode(Step):
    """One token for each row, ``[B, 1, D]``.

    Attributes:
        slots: int32 ``[B]``.
    """

    slots: Tensor

    def run(self, index: int, adapter: Adapter, hidden: Tensor, pool: ReplayPool) -> Tensor:
        """See :meth:`Step.run`."""
        kernels = decode_kernels(adapter, index, pool, self.slots)
        return adapter.run(hidden.squeeze(1), kernels).unsqueeze(1)


@dataclass(eq=False)
class Verify(Step):
    """A window for each row, ``[B, T, D]``.

    Attributes:
        slots: int32 ``[B]``.
        num_tokens: int32 ``[B]``, tokens that each row uses.
    """

    slots: Tensor
    num_tokens: Tensor

    def run(self, index: int, adapter: Adapter, hidden: Tensor, pool: ReplayPool) -> Tensor:
        """See :meth:`Step.run`."""
        return adapter.run(hidden, verify_kernels(adapter, index, pool, self.slots, self.num_tokens))


class EngineCache(MixerCache, Cache):
    """The cache of all requests; :meth:`begin` says what the next forward is.

    Args:
        adapters: the model's recurrent layers, in the order of the pool's.
        pool: their states.
        pages: of the attention layers.
        attention: reads the pages.
    """

    def __init__(self, adapters: Sequence[Adapter], pool: ReplayPool, pages: Pages, attention: PagedAttention) -> None:
        super().__init__(layers=[])
        self.adapters = adapters
        self.pool = pool
        self.pages = pages
        self.attention = attention
        self._index = {adapter.layer_idx: index for index, adapter in enumerate(adapters)}
        self._step: Step | None = None
        self._layer = -1  # whose keys came last

    def begin(self, step: Step) -> None:
        """The next forward is `step`."""
        self._step = step
        if self.pages.specs:
            self.attention.begin(step.queries)

    def run(self, mixer: Any, hidden_states: Tensor) -> Tensor:
        """See :meth:`MixerCache.run`."""
        assert self._step is not None
        index = self._index[mixer.layer_idx]
        return self._step.run(index, self.adapters[index], hidden_states, self.pool)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep the new tokens' keys and values ``[…, H, T, d]`` of one layer; returns them as they are."""
        assert self._step is not None
        keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        self.pages.write(layer_idx, self._step.places, keys, values)
        self._layer = layer_idx
        return key_states, value_states

    def attend(self, module: Any, query: Tensor, scale: float) -> Tensor:
        """The attention of the layer whose keys came last, ``[…, T, H, d_v]`` for queries ``[…, H, T, d_k]``."""
        batch, _, tokens, _ = query.shape
        query = query.transpose(1, 2).flatten(0, 1)
        keys, values = self.pages.keys[self._layer], self.pages.values[self._layer]
        if not self.pages.specs[self._layer].latent:
            return self.attention.run(query, keys, values, scale).unflatten(0, (batch, tokens))
        query, to_values = absorbed(module, query)
        latents = self.attention.run(query, keys, values, scale)
        return torch.einsum("nhr,hvr->nhv", latents, to_values).unflatten(0, (batch, tokens))

    def get_seq_length(self, *_: Any) -> int:
        """Nothing that a model may rely on: positions are always given."""
        return 0


def absorbed(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """Queries that meet latents, of a layer that would expand the latents to meet its queries.

    A key is ``W_k c`` beside its rotary part and a value ``W_v c``, for the latent c of a token. So ``q·(W_k c) =
    (W_kᵀ q)·c``, and a weighted sum of values is W_v times that of the latents.

    Args:
        module: of multi-head latent attention.
        query: ``[N, H, d_nope + d_rotary]``.

    Returns:
        ``[N, H, rank + d_rotary]``, and W_v ``[H, d_v, rank]``.
    """
    nope, rank = module.qk_nope_head_dim, module.kv_lora_rank
    weight = module.kv_b_proj.weight.view(query.shape[1], -1, rank)
    to_keys, to_values = weight.split([nope, module.v_head_dim], dim=1)
    latent = torch.einsum("nhd,hdr->nhr", query[..., :nope], to_keys)
    return torch.cat([latent, query[..., nope:]], dim=-1), to_values


def paged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Stands in transformers' AttentionInterface; keys and values are in the pages already."""
    cache: EngineCache = vars(module)[ATTRIBUTE]
    return cache.attend(module, query, scaling), None


AttentionInterface.register(ATTENTION, paged_attention)
