"""Runs the model: prefill, decode and verify over slots and pages, with transformers' own modules.

The model is a transformers model whose recurrent layers and attention function are ours while a forward of the runner
runs. For the rest of the time, and after :meth:`Runner.close`, it is what it was.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from replayssm import models
from replayssm.engine import footprint
from replayssm.engine.attention import PagedAttention, Queries, TorchAttention, TritonAttention
from replayssm.engine.cache import ATTENTION, ATTRIBUTE, Decode, EngineCache, Prefill, Step, Verify
from replayssm.engine.forward import Chunk, Forward
from replayssm.engine.graphs import Graphs
from replayssm.engine.kv import Pages, attention_layers
from replayssm.engine.transfer import send, to_device
from replayssm.engine.waves import waves_of
from replayssm.engine.window import Window, find_window, places_of
from replayssm.errors import one_line
from replayssm.loading import LoadedModel
from replayssm.models.binding import binding_of
from replayssm.models.fused import FusedModules, fusions_for
from replayssm.models.support import find_adapters
from replayssm.models.switch import cache_argument, check_not_served, mark_served
from replayssm.ops import unavailable_reason
from replayssm.state import ReplayPool

logger = logging.getLogger(__name__)


class Runner:
    """A model with its slots and pages. What they take is known before one is made: :mod:`replayssm.engine.footprint`.

    Args:
        loaded: the model.
        num_slots: rows and snapshots of the pool.
        num_pages: of the attention layers; one more is made, which belongs to nobody.
        page_size: tokens of a page.
        max_rows: rows of the largest decode.
        max_pages_per_row: pages of the longest request.
        ring_len, ring_capacity, max_window, state_dtype, ring_dtype, backend: see :class:`replayssm.ReplayPool`.
        graphs: decode and verify by CUDA graphs, captured now.
        batch_invariant: run all decodes with max_rows rows, and prompts one by one, so that matrix products have the
            same sizes, and with them a request's outputs the same bits, whatever shares the batch.
        fused: which of :data:`replayssm.models.fused.FUSIONS` run; None: those that gain on this device.

    Attributes:
        pool: the slots. Whoever allocates and frees them is the caller.
        vocab_size: V of the logits.
        page_size: tokens of a page.
        graphs: None without.

    Raises:
        ValueError: the model isn't supported, is served by an engine, or a number is out of range.
    """

    bytes_per = staticmethod(footprint.bytes_per)
    bytes_fixed = staticmethod(footprint.bytes_fixed)

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_pages_per_row: int,
        ring_len: int = 16,
        ring_capacity: int | None = None,
        max_window: int = 0,
        state_dtype: torch.dtype = torch.float32,
        ring_dtype: torch.dtype | str = "auto",
        backend: str = "auto",
        graphs: bool = False,
        batch_invariant: bool = False,
        fused: Collection[str] | None = None,
    ) -> None:
        self.model: Any = loaded.model
        adapters = find_adapters(self.model)
        check_not_served(adapters)
        # What asks transformers' AttentionInterface for a function, which may take it from the model's configuration.
        self._asking = [m for m in self.model.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
        self._configs = list({id(module.config): module.config for module in (self.model, *self._asking)}.values())
        self.graphs: Graphs | None = None
        self._weights: list[Tensor] = []
        self.page_size = page_size
        self.max_rows = max_rows
        self.batch_invariant = batch_invariant
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        self.device: torch.device = self.model.device
        self._cache_argument = cache_argument(self.model.forward)
        self._takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        self.fused = FusedModules(self.model, fusions_for(self.device) if fused is None else fused)
        self.pool = ReplayPool(
            [adapter.spec for adapter in adapters],
            num_slots,
            ring_len=ring_len,
            ring_capacity=ring_capacity,
            max_window=max_window,
            state_dtype=state_dtype,
            activation_dtype=self.model.dtype,
            ring_dtype=ring_dtype,
            device=self.device,
            backend=backend,
        )
        self.pages = Pages(attention_layers(self.model), num_pages, page_size, self.device)
        attention = self._choose_attention()
        if graphs and isinstance(attention, TorchAttention):
            raise ValueError(f"graphs were asked for on {self.device}: they want a GPU with Triton")
        self.cache = EngineCache(adapters, self.pool, self.pages, attention)
        self._attach(ring_len)
        try:
            self.graphs = self._captured(max_pages_per_row) if graphs else None
        except BaseException:  # from the keyboard, for one
            self.close()
            raise

    def page_tensors(self) -> dict[str, Tensor]:
        """What pages hold, by stable names, the page first; empty for a model without attention."""
        return self.pages.tensors()

    def close(self) -> None:
        """Make the model what it was, and free the graphs."""
        self.graphs = None
        self._weights = []
        if self._free.alive:
            self._free()
            if self._enabled:
                models.disable(self.model)

    @torch.no_grad()
    def prefill(self, chunks: Sequence[Chunk]) -> Forward:
        """Run parts of prompts; each slot then holds all its tokens in its own checkpoint, with an empty ring.

        A slot may have records in its ring or read a snapshot's checkpoint before. Parts of one slot follow each other
        in one forward, with a state in between that another slot may keep: the first ones of all slots come first, then
        the second ones, and so on.

        Returns:
            Logits ``[B, V]`` of each chunk's last token, and hidden states ``[total tokens, D]``.
        """
        if self.batch_invariant and len(chunks) > 1:
            parts = [self.prefill([chunk]) for chunk in chunks]
            return Forward(torch.cat([part.logits for part in parts]), torch.cat([part.hidden for part in parts]))
        step, ids, positions, last = self._packed(chunks)
        logits, hidden = self._forward(step, ids, positions, logits_to_keep=last)
        self.pool.reset_cursors(list(dict.fromkeys(chunk.slot for chunk in chunks)))
        return Forward(logits[0].float(), hidden[0])

    @torch.no_grad()
    def decode(self, slots: Tensor, page_table: Tensor, lengths: Tensor, tokens: Tensor) -> Forward:
        """Append one token to each row, and advance the cursors.

        Args:
            slots: int32 ``[B]``, negative for a padding row.
            page_table: int32 ``[B, P]``, each row's pages in order.
            lengths: int32 ``[B]``, tokens that are there already.
            tokens: int64 ``[B]``.

        Returns:
            Logits ``[B, V]`` and hidden states ``[B, D]``. With graphs, the next step overwrites them.
        """
        if self.graphs is not None and self.graphs.takes(*page_table.shape):
            return self.graphs.decode(slots, page_table, lengths, tokens)
        rows = len(slots)
        logits, hidden = self.run_decode(*self._padded(slots, page_table, lengths, tokens))
        return Forward(logits[:rows].float(), hidden[:rows])

    @torch.no_grad()
    def verify(self, slots: Tensor, page_table: Tensor, lengths: Tensor, tokens: Tensor, num_tokens: Tensor) -> Forward:
        """Run a window of tokens for each row, of which :meth:`commit` keeps the first ones.

        Args:
            slots, page_table, lengths: as for :meth:`decode`; pages have room for the whole window.
            tokens: int64 ``[B, T]``, the last sampled token and drafts behind it.
            num_tokens: int32 ``[B]``, how many of them each row has; 0 leaves a row untouched.

        Returns:
            Logits ``[B, T, V]`` and hidden states ``[B, T, D]``, anything for tokens that a row doesn't have. With
            graphs, the next step overwrites them.
        """
        rows, length = tokens.shape
        if self.graphs is not None and self.graphs.takes(rows, page_table.shape[1], length):
            return self.graphs.verify(slots, page_table, lengths, tokens, num_tokens)
        logits, hidden = self.run_verify(*self._padded(slots, page_table, lengths, tokens, num_tokens))
        return Forward(logits[:rows].float(), hidden[:rows])

    @torch.no_grad()
    def commit(self, slots: Tensor, num_tokens: Tensor, num_accepted: Tensor) -> None:
        """Keep the first tokens of the last window.

        Keys and values of the others stay where they are; what comes next is written over them.

        Args:
            slots, num_tokens: as :meth:`verify` had them.
            num_accepted: int32 ``[B]``.
        """
        if self.graphs is not None and self.graphs.takes(len(slots)):
            self.graphs.commit(slots, num_tokens, num_accepted)
        else:
            self.run_commit(slots, num_tokens, num_accepted)

    def run_decode(self, slots: Tensor, page_table: Tensor, lengths: Tensor, tokens: Tensor) -> Forward:
        """As :meth:`decode`, with the model's logits; nothing here waits for the device or depends on the rows."""
        window, queries = self._window(slots, page_table, lengths, tokens[:, None], None)
        logits, hidden = self._forward(Decode(queries, window.places, slots), window.tokens, window.positions)
        self.pool.advance(slots)
        return Forward(logits[:, 0], hidden[:, 0])

    def run_verify(
        self, slots: Tensor, page_table: Tensor, lengths: Tensor, tokens: Tensor, num_tokens: Tensor
    ) -> Forward:
        """As :meth:`verify`, with the model's logits; nothing here waits for the device or depends on the rows."""
        window, queries = self._window(slots, page_table, lengths, tokens, num_tokens)
        step = Verify(queries, window.places, slots, window.num_tokens)
        return Forward(*self._forward(step, window.tokens, window.positions))

    def run_commit(self, slots: Tensor, num_tokens: Tensor, num_accepted: Tensor) -> None:
        """As :meth:`commit`."""
        self.pool.commit(slots, num_tokens, num_accepted)

    def _packed(self, chunks: Sequence[Chunk]) -> tuple[Prefill, Tensor, Tensor, Tensor]:
        """Chunks one behind the other: the step, ids and positions ``[1, N]``, and the chunks' last tokens ``[B]``."""
        counts = [len(chunk.tokens) for chunk in chunks]
        ends = list(accumulate(counts))
        waves = waves_of(chunks, self.device)
        ids = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        positions = torch.cat([chunk.start + torch.arange(n) for chunk, n in zip(chunks, counts, strict=True)])
        rows = torch.arange(len(chunks)).repeat_interleave(torch.tensor(counts))
        width = max(len(chunk.pages) for chunk in chunks)
        table = torch.tensor([[*chunk.pages, *[0] * (width - len(chunk.pages))] for chunk in chunks], dtype=torch.int32)
        table = table.view(len(chunks), width)
        places = places_of(table, rows, positions, self.page_size) if width else positions
        columns = [[chunk.start for chunk in chunks], [0, *ends[:-1]], counts, [end - 1 for end in ends]]

        ids, positions, places = send(torch.stack([ids, positions, places]), self.device)
        *_, last = of_rows = to_device(columns, torch.int64, self.device)
        lengths, first, num_tokens = of_rows[:3].int()
        queries = Queries(send(table, self.device), lengths, first, num_tokens, max(counts), ends[-1])
        return Prefill(queries, places, waves), ids[None], positions[None], last

    def _padded(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rows, the slots first, filled up to max_rows if all batches are to have the same size."""
        missing = self.max_rows - len(tensors[0]) if self.batch_invariant else 0
        if missing <= 0:
            return tensors
        fill = (-1, *[0] * (len(tensors) - 1))
        padded = (torch.cat([t, t.new_full((missing, *t.shape[1:]), x)]) for t, x in zip(tensors, fill, strict=True))
        return tuple(padded)

    def _window(
        self, slots: Tensor, page_table: Tensor, lengths: Tensor, tokens: Tensor, num_tokens: Tensor | None
    ) -> tuple[Window, Queries]:
        """Where T tokens of each row are, for the model and for attention."""
        window = find_window(
            slots,
            page_table,
            lengths,
            tokens,
            num_tokens,
            page_size=self.page_size,
            nowhere=self.pages.nowhere,
            fused="places" in self.fused.names,
        )
        batch, length = tokens.shape
        return window, Queries(page_table, lengths, window.first, window.num_tokens, length, batch * length)

    def _forward(self, step: Step, ids: Tensor, positions: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Logits and hidden states after the final norm, both as the model has them."""
        if self._takes_positions:
            arguments["position_ids"] = positions
        arguments[self._cache_argument] = self.cache
        captured: list[Tensor] = []
        hook = self.model.get_decoder().register_forward_hook(lambda *given: captured.append(given[-1][0]))
        try:
            with self._paged(), self.fused:
                self.cache.begin(step)
                logits = self.model(input_ids=ids, use_cache=True, **arguments).logits
        finally:
            hook.remove()
        return logits, captured[0]

    @contextmanager
    def _paged(self) -> Iterator[None]:
        """The model's attention layers use our function, which finds the cache in them."""
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = ATTENTION
        for module in self._asking:
            vars(module)[ATTRIBUTE] = self.cache
        try:
            yield
        finally:
            for module in self._asking:
                del vars(module)[ATTRIBUTE]
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation

    def _choose_attention(self) -> PagedAttention:
        """The fastest that runs here; of a batch-invariant runner, one that doesn't look at the batch."""
        if self.device.type != "cuda" or unavailable_reason("triton", self.device) is not None:
            return TorchAttention(self.page_size)
        return TritonAttention(self.device, self.max_rows if self.batch_invariant else 0)

    @torch.no_grad()
    def _captured(self, max_pages: int) -> Graphs | None:
        """The graphs, or None where the model's own code can't be captured."""
        # Graphs read weights where they lie now, even if another runner of the same weights moves them together.
        self._weights = [weight.data for weight in self.model.parameters()]
        try:
            return Graphs(
                self,
                max_rows=self.max_rows,
                max_window=self.pool.max_window,
                max_pages=max_pages,
                device=self.device,
                only_largest=self.batch_invariant,
            )
        except RuntimeError as error:
            told = "decoding without CUDA graphs, the model can't be captured: %s"
            logger.warning(told, one_line(error), extra={"event": "no_cuda_graphs"})
            return None

    def _attach(self, ring_len: int) -> None:
        """Lead the model's recurrent layers to our cache."""
        adapters = self.cache.adapters
        # Of a model that is enabled, a part may have been disabled alone.
        self._enabled = any(binding_of(module) is None for module in (self.model, *(a.mixer for a in adapters)))
        if self._enabled:
            models.enable(self.model, ring_len)
        mark_served(adapters, True)
        # A runner that is garbage frees the model, but leaves replay on: a `generate` may be under way.
        self._free = weakref.finalize(self, mark_served, adapters, False)
