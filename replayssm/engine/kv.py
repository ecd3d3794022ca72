"""Keys and values of attention layers, in pages of some tokens each; any page may belong to any request.

Layers of multi-head latent attention keep their latents, as transformers' caches do: one head, whose values are the
first part of its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from replayssm.models.support import find_adapters
from replayssm.models.switch import cache_argument

UNSERVED = ("sliding", "chunked")  # kinds of attention that don't see all tokens


@dataclass(frozen=True)
class KeyValueSpec:
    """What one attention layer keeps of a token: a key and a value for each of its key heads.

    Attributes:
        num_heads: H.
        key_dim: size of a key.
        value_dim: size of a value.
        dtype: of both.
        latent: whether a value is the first part of its key, and isn't kept a second time.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    latent: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return self.num_heads * (self.key_dim + (0 if self.latent else self.value_dim)) * self.dtype.itemsize


class Pages:
    """The pages of all attention layers, and one more, where tokens go that are to leave no trace.

    Args:
        specs: the layers, by their index in the model.
        num_pages: how many there are.
        page_size: tokens of each.
        device: where they live.

    Attributes:
        keys: ``[num_pages + 1, page_size, H, key_dim]`` of each layer.
        values: ``[num_pages + 1, page_size, H, value_dim]`` of each layer.
        nowhere: number of the first place of the last page; places count tokens through all pages.
    """

    def __init__(
        self, specs: dict[int, KeyValueSpec], num_pages: int, page_size: int, device: torch.device | str
    ) -> None:
        self.specs = specs
        self.page_size = page_size
        self.num_pages = num_pages
        self.nowhere = num_pages * page_size
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for layer, spec in specs.items():
            shape = (num_pages + 1, page_size, spec.num_heads)
            # Zeros, because what is masked is multiplied by a zero weight.
            self.keys[layer] = keys = torch.zeros(*shape, spec.key_dim, dtype=spec.dtype, device=device)
            self.values[layer] = (
                keys[..., : spec.value_dim]
                if spec.latent
                else torch.zeros(*shape, spec.value_dim, dtype=spec.dtype, device=device)
            )

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep what a layer hands to its cache.

        Args:
            layer: its index in the model.
            places: int64 ``[N]``.
            keys, values: ``[N, H, …]``; for latents the latent and its rotary part.
        """
        if self.specs[layer].latent:
            self.keys[layer].flatten(0, 1).index_copy_(0, places, torch.cat([keys, values], dim=-1))
            return
        self.keys[layer].flatten(0, 1).index_copy_(0, places, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, places, values)

    def tensors(self) -> dict[str, Tensor]:
        """What pages hold, by stable names, the page first: ``[num_pages, page_size, H, …]``."""
        found = {}
        for layer, spec in self.specs.items():
            found[f"layers.{layer}.keys"] = self.keys[layer][: self.num_pages]
            if not spec.latent:
                found[f"layers.{layer}.values"] = self.values[layer][: self.num_pages]
        return found


class _Recorder(DynamicCache):
    """A cache of transformers that remembers what its attention layers hand to it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.seen[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def attention_layers(model: Any) -> dict[int, KeyValueSpec]:
    """What each attention layer of a model keeps, found by running one token.

    Raises:
        ValueError: the model has attention layers that don't see all tokens.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = [kind for kind in getattr(config, "layer_types", None) or [] if any(word in kind for word in UNSERVED)]
    if kinds:
        raise ValueError(f"the model has {kinds[0]} layers: attention that sees all tokens is wanted")
    recorder = _Recorder(config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with _passing_through([adapter.mixer for adapter in find_adapters(model)]):
        model(input_ids=token, use_cache=True, **{cache_argument(model.forward): recorder})
    latent = {module.layer_idx for module in latent_modules(model)}
    return {layer: _spec(*seen, latent=layer in latent) for layer, seen in sorted(recorder.seen.items())}


@contextmanager
def _passing_through(mixers: Sequence[Any]) -> Iterator[None]:
    """Let recurrent layers return their input: what attention layers keep has the same shapes."""
    own = [vars(mixer).get("forward") for mixer in mixers]
    for mixer in mixers:
        mixer.forward = lambda hidden_states, *_, **__: hidden_states
    try:
        yield
    finally:
        for mixer, forward in zip(mixers, own, strict=True):
            del mixer.forward
            if forward is not None:
                mixer.forward = forward


def latent_modules(model: Any) -> list[Any]:
    """Modules of multi-head latent attention, which expand latents to keys and values by a ``kv_b_proj``."""
    return [module for module in model.modules() if hasattr(module, "kv_b_proj") and hasattr(module, "kv_lora_rank")]


def _spec(keys: Tensor, values: Tensor, *, latent: bool) -> KeyValueSpec:
    heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    if latent:  # a latent and its rotary part
        return KeyValueSpec(1, key_dim + value_dim, key_dim, keys.dtype, latent=True)
    return KeyValueSpec(heads, key_dim, value_dim, keys.dtype)
