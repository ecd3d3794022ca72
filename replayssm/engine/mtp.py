"""Drafts from a checkpoint's own multi-token prediction head, whose keys and values lie in the engine's pages.

The head turns the model's hidden state at one token and the embedding of the next one into a guess of the token after
that. What it keeps of the two lies at the place of the second, so that a place depends on the tokens up to it alone,
and pages that requests share hold the head's part too. At a sequence's first place there is nothing of use.

B rows of a batch, n tokens at once, P pages, S = P × page size places, H key heads, d head size, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from replayssm.engine.drafts import Drafts, Proposal
from replayssm.engine.forward import Chunk
from replayssm.engine.kv import KeyValueSpec, Pages
from replayssm.engine.transfer import to_device
from replayssm.errors import InputError, one_line
from replayssm.loading import LoadedModel
from replayssm.loading.folder import find_model
from replayssm.speculate.mtp_head import load_mtp_head


class MtpDrafts(Drafts):
    """Runs the head on the model's hidden states, and for deeper drafts on its own.

    Drafts are the head's likeliest tokens. A row whose prompt's beginning came from the prefix cache has no hidden
    state for the last token of it: zeros stand for it, at that one place. Memory for the head's logits, ``[B, V]`` in
    the model's dtype, is taken for a moment.

    Args:
        loaded: the model, with a head in its folder.
        page_size: tokens of a page.
        max_window: the longest verify window.

    Attributes:
        bytes_per_page: what it keeps beside each of the engine's pages.
        bytes_per_row: and for each row.

    Raises:
        InputError: the model has no such head.
    """

    needs_hidden = True

    def __init__(self, loaded: LoadedModel, page_size: int, max_window: int) -> None:
        try:
            self.head = load_mtp_head(loaded.model, find_model(loaded.name))
        except ValueError as error:
            raise InputError(f"speculation with mtp: {one_line(error)}") from error
        self.page_size, self.max_window = page_size, max_window
        self.device: torch.device = loaded.model.device
        self._embed = loaded.model.get_input_embeddings()
        self._lm_head = loaded.model.get_output_embeddings()
        self._dtype: torch.dtype = loaded.model.dtype
        self._hidden_size: int = self._embed.weight.shape[1]
        recorder = _Recorder(self.device)
        self._run(torch.zeros(1, 1, dtype=torch.int64, device=self.device), self._zeros(1, 1), recorder)
        self._specs = recorder.specs
        self.bytes_per_page = page_size * sum(spec.nbytes for spec in self._specs.values())
        self.bytes_per_row = (max_window + 1) * self._hidden_size * self._dtype.itemsize + (max_window + 1) * 8

    def allocate(self, num_pages: int, max_rows: int) -> None:
        """Take the memory, before anything else is called."""
        self._pages = Pages(self._specs, num_pages, self.page_size, self.device)
        self._last = self._zeros(max_rows)  # the hidden state of each row's last computed token
        # What was drawn since the head ran: tokens, and the hidden states before them.
        self._tokens = torch.zeros(max_rows, self.max_window, dtype=torch.int64, device=self.device)
        self._hidden = self._zeros(max_rows, self.max_window)
        self._waiting: dict[int, int] = {}  # how many of them, by row
        self._since = torch.ones(max_rows, dtype=torch.int64, device=self.device)  # the first place that it looks at
        self._missed: set[int] = set()  # rows whose last tokens it never heard of

    def join(self, row: int, tokens: Sequence[int]) -> None:  # noqa: ARG002
        """See :meth:`Drafts.join`."""
        self._last[row].zero_()
        self._since[row].fill_(1)
        self._waiting[row] = 0
        self._missed.discard(row)

    def leave(self, row: int) -> None:
        """See :meth:`Drafts.leave`."""
        self._waiting.pop(row, None)

    def missed(self, rows: Sequence[int]) -> None:
        """See :meth:`Drafts.missed`. A gap's places hold nothing, so what lies before it isn't looked at any more."""
        self._waiting.update(dict.fromkeys(rows, 0))
        self._missed.update(rows)

    def wipe(self, pages: Sequence[int]) -> None:
        """See :meth:`Drafts.wipe`."""
        index = to_device(list(pages), torch.int64, self.device)
        for kept in (*self._pages.keys.values(), *self._pages.values.values()):
            kept.index_fill_(0, index, 0)

    @torch.no_grad()
    def prefilled(self, rows: Sequence[int], chunks: Sequence[Chunk], hidden: Tensor) -> None:
        """See :meth:`Drafts.prefilled`."""
        begin, hidden = 0, hidden.to(self._dtype)
        for row, chunk in zip(rows, chunks, strict=True):
            count = len(chunk.tokens)
            states = hidden[begin : begin + count]
            begin += count
            # A chunk at a time: together they would be padded to the longest one and its pages.
            before = torch.cat([self._last[row, None], states[:-1]])[None]
            self._last[row].copy_(states[-1])
            tokens = to_device([list(chunk.tokens)], torch.int64, self.device)
            pages = to_device([list(chunk.pages)], torch.int64, self.device)
            places = torch.arange(chunk.start, chunk.start + count, device=self.device)[None]
            # What comes of the first token of a sequence, which nothing precedes, is never looked at.
            there = torch.ones_like(places, dtype=torch.bool)
            self._run(tokens, before, _Places(self._pages, pages, places, there, self._since[row, None]))

    def update(self, rows: Sequence[int], hidden: Tensor | None, tokens: Tensor, ids: Sequence[Sequence[int]]) -> None:
        """See :meth:`Drafts.update`."""
        assert hidden is not None, "drafts from hidden states"
        width = tokens.shape[1]
        table_rows = to_device(list(rows), torch.int64, self.device)
        self._tokens[:, :width].index_copy_(0, table_rows, tokens)
        self._hidden[:, :width].index_copy_(0, table_rows, hidden.to(self._dtype))
        for row, new in zip(rows, ids, strict=True):
            if row in self._waiting:
                self._waiting[row] = len(new)

    @torch.no_grad()
    def propose(self, rows: Sequence[int], pages: Tensor, lengths: Tensor, limits: Sequence[int]) -> Proposal:
        """See :meth:`Drafts.propose`."""
        counts = [self._waiting[row] for row in rows]
        num_drafts = [limit if count else 0 for count, limit in zip(counts, limits, strict=True)]
        pages, lengths = pages.long(), lengths.long()
        columns = to_device([list(rows), counts, num_drafts], torch.int64, self.device)
        table_rows, count, allowed = columns.unbind()
        self._begin_anew([row for row, count in zip(rows, counts, strict=True) if count], table_rows, lengths, count)
        since = self._since.index_select(0, table_rows)
        hidden = self._catch_up(table_rows, pages, lengths, count, max(counts), since)
        self._waiting.update(dict.fromkeys(rows, 0))
        drafts = [self._likeliest(hidden)] if any(num_drafts) else []
        for depth in range(1, max(num_drafts)):
            places = (lengths + depth)[:, None]
            cache = _Places(self._pages, pages, places, (depth < allowed)[:, None], since)
            hidden = self._run(drafts[-1][:, None], hidden[:, None], cache)[:, 0]
            drafts.append(self._likeliest(hidden))
        tokens = torch.stack(drafts, 1) if drafts else pages.new_zeros(len(rows), 0)
        return Proposal(tokens, num_drafts)

    def _begin_anew(self, heard: list[int], rows: Tensor, lengths: Tensor, count: Tensor) -> None:
        """Rows that missed something and now have heard of tokens look at what comes from these on."""
        gaps = self._missed.intersection(heard)
        if gaps:
            self._missed -= gaps
            of_gaps = torch.isin(rows, to_device(sorted(gaps), torch.int64, self.device))
            before = self._since.index_select(0, rows)
            self._since.index_copy_(0, rows, torch.where(of_gaps, lengths - count + 1, before))

    def _catch_up(
        self, rows: Tensor, pages: Tensor, lengths: Tensor, count: Tensor, most: int, since: Tensor
    ) -> Tensor:
        """Run the head on what was drawn since it ran, up to the last token; ``[B, D]``, what it makes of that one."""
        width = max(1, most)
        steps = torch.arange(width, device=self.device)
        places = lengths[:, None] - count[:, None] + 1 + steps
        there = steps < count[:, None]
        tokens = self._tokens[:, :width].index_select(0, rows)
        hidden = self._hidden[:, :width].index_select(0, rows)
        out = self._run(tokens, hidden, _Places(self._pages, pages, places, there, since))
        newest = (count - 1).clamp_min(0)[:, None, None].expand(-1, 1, out.shape[-1])
        return out.gather(1, newest)[:, 0]

    def _run(self, tokens: Tensor, hidden: Tensor, cache: Any) -> Tensor:
        out: Tensor = self.head(self._embed(tokens), hidden, cache)
        return out

    def _likeliest(self, hidden: Tensor) -> Tensor:
        best: Tensor = self._lm_head(hidden).argmax(-1)
        return best

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, self._hidden_size, dtype=self._dtype, device=self.device)


class _Places:
    """Stands where the head's layers expect their cache; see :class:`replayssm.speculate.keys_values.KeysValues`.

    Args:
        kept: keys and values of all pages.
        pages: int64 ``[B, P]``, of each row.
        places: int64 ``[B, n]``, where the tokens are in their sequences.
        there: bool ``[B, n]``: the others leave no trace.
        since: int64 ``[B]``: places before hold nothing of use. At least 1, as the first place never does.
    """

    def __init__(self, kept: Pages, pages: Tensor, places: Tensor, there: Tensor, since: Tensor) -> None:
        self._kept, self._pages, self._places, self._since = kept, pages, places, since
        size = kept.page_size
        page = pages.gather(1, (places // size).clamp(0, pages.shape[1] - 1))
        self._written = torch.where(there, page * size + places % size, kept.nowhere).flatten()

    def positions(self, num_tokens: int) -> Tensor:  # noqa: ARG002
        """``[B, n]``: the head's own, which count from the first token that has a place."""
        return (self._places - 1).clamp_min(0)

    def mask(self, num_tokens: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """``[B, 1, n, S]`` to be added to the scores: a token sees itself and what is of use before it."""
        seen = torch.arange(self._pages.shape[1] * self._kept.page_size, device=self._pages.device)
        hidden = (seen > self._places[:, None, :, None]) | (seen < self._since[:, None, None, None])
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, torch.finfo(dtype).min)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put ``[B, H, n, d]`` where they belong; returns all that the rows have, ``[B, H, S, d]``."""
        self._kept.write(layer, self._written, *(x.transpose(1, 2).flatten(0, 1) for x in (keys, values)))
        return self._read(self._kept.keys[layer]), self._read(self._kept.values[layer])

    def _read(self, kept: Tensor) -> Tensor:
        return kept[self._pages].flatten(1, 2).transpose(1, 2)


class _Recorder:
    """A cache for one token that notes what each layer hands to it."""

    def __init__(self, device: torch.device) -> None:
        self.specs: dict[int, KeyValueSpec] = {}
        self._device = device

    def positions(self, num_tokens: int) -> Tensor:
        return torch.zeros(1, num_tokens, dtype=torch.int64, device=self._device)

    def mask(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(1, 1, num_tokens, num_tokens, dtype=dtype, device=self._device)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.specs[layer] = KeyValueSpec(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        return keys, values
