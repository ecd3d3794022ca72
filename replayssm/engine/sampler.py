"""Draw each row's next token on the device, as its request asks, whatever the rows beside it ask.

What a request asks lies in tables on the device, one row for each row of the engine. A greedy row costs an argmax. With
Triton one kernel draws for all rows; elsewhere the rows of a batch are put into parts that need the same work, so that
memory is taken only for what is asked, and a part is cut where its logits get too many. Nothing here waits for the
device.

Tokens on the device are always some of the vocabulary's. Beside each goes its score, which is finite unless the logits
were broken: that tells the host, and costs no launch.

B rows of a batch, V vocabulary size, T tokens of a verify window, n rows of a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from replayssm.engine.distribution import Filters, threshold
from replayssm.engine.drawn import Sampled, Verified
from replayssm.engine.edits import LogitEdits, edits_of
from replayssm.engine.logprobs import Logprobs, joined, model_logprobs
from replayssm.engine.params import SamplingParams
from replayssm.engine.penalties import Penalties, SeenTokens
from replayssm.engine.randomness import gumbel, stream_key, token_hashes
from replayssm.engine.rows import Asked, Kind, Part, Rows
from replayssm.engine.transfer import to_device
from replayssm.ops import unavailable_reason

MAX_LOGITS = 2**22  # of a part: 27 rows of a vocabulary of 151,936, and temporary memory of a few times 16 MiB
PENALISED = Kind(penalised=True)
BYTES_PER_LOGIT = 64  # at the most, with all temporary tensors of a part


class Sampler:
    """Draws the tokens of an engine's rows.

    Requests join and leave rows; between that, a step names the rows of its batch by :meth:`rows`.

    Args:
        vocab_size: V of the logits.
        device: where they are.
        max_rows: requests at once.
        fused: draw by one kernel; None: on a GPU with Triton.
    """

    def __init__(
        self, vocab_size: int, device: torch.device | str, max_rows: int, *, fused: bool | None = None
    ) -> None:
        self.vocab_size, self.device, self.max_rows = vocab_size, torch.device(device), max_rows
        if fused is None:
            fused = self.device.type == "cuda" and unavailable_reason("triton", self.device) is None
        self.fused = fused
        self._rows: dict[int, Asked] = {}
        self._hashes = token_hashes(vocab_size, self.device)
        # temperature, top_p, log of min_p, presence, frequency and repetition penalty
        self._numbers = torch.ones(max_rows, 6, device=self.device)
        # two numbers of the stream, top_k
        self._integers = torch.zeros(max_rows, 3, dtype=torch.int32, device=self.device)
        self._seen = SeenTokens(vocab_size, self.device)
        self._edits = LogitEdits(max_rows, self.device)
        self._bits = torch.arange(32, dtype=torch.int32, device=self.device)
        if self.fused and self.device.type == "cuda":  # compiled now, not when the first request wants it
            table = torch.zeros(4, 1, dtype=torch.int32, device=self.device)
            for dtype in (torch.float32, torch.bfloat16):
                nothing = torch.zeros(1, 1, vocab_size, dtype=dtype, device=self.device)
                self._draw_fused(nothing, table, table[0], None, count=True)

    @staticmethod
    def max_bytes(vocab_size: int, max_rows: int) -> int:
        """The most device memory it takes, whatever requests ask, temporary memory included."""
        logits = vocab_size * min(max_rows, _part_rows(vocab_size))
        held = 4 * vocab_size + SeenTokens.max_bytes(vocab_size, max_rows) + LogitEdits.max_bytes(max_rows)
        return held + BYTES_PER_LOGIT * logits

    def join(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        index: int = 0,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Put a sample of a request into a row.

        Args:
            row: from 0 to ``max_rows`` − 1.
            params: what it asks.
            seed: from :func:`replayssm.engine.randomness.draw_seed`, the same each time that it joins.
            index: which of the request's samples it is.
            prompt: the prompt's tokens.
            output: tokens that were drawn already, for a sample that was preempted.
            eos_token_ids: the model's.
        """
        self.leave(row)
        # A configuration may name an end of sequence that the model has no logit for.
        eos_token_ids = [token for token in eos_token_ids if token < self.vocab_size]
        edits = edits_of(params, len(prompt), eos_token_ids)
        asked = self._rows[row] = Asked.of(params, self.vocab_size, edited=bool(edits))
        log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        numbers = [params.temperature, params.top_p, log_min_p, *penalties]
        self._numbers[row].copy_(to_device(numbers, torch.float32, self.device))
        self._integers[row].copy_(to_device([*stream_key(seed, index), asked.top_k], torch.int32, self.device))
        if asked.kind.edited:
            self._edits.join(row, edits)
        if asked.kind.penalised:
            self._seen.join(row, prompt, output, self.max_rows)

    def leave(self, row: int) -> None:
        """Empty a row; one that is empty stays so."""
        self._rows.pop(row, None)
        self._seen.leave(row)

    def rows(self, rows: Sequence[int]) -> Rows:
        """The rows of a batch in its order; −1 is padding, for which any token comes."""
        asked = [self._rows[row] if row >= 0 else Asked() for row in rows]
        constrained = [place for place, one in enumerate(asked) if one.kind.constrained]
        masks = {place: number for number, place in enumerate(constrained)}
        more = sorted((place for place, one in enumerate(asked) if any(one.kind)), key=lambda p: asked[p].kind)
        if self.fused:
            penalised = [place for place in more if asked[place].kind.penalised]
            groups = [(PENALISED, penalised)] if penalised else []
        else:
            alike = groupby(more, key=lambda p: asked[p].kind)
            groups = [(kind, places) for kind, group in alike for places in self._cut(list(group))]
        parts = []
        for kind, places in groups:
            seen = [self._seen.place(rows[p]) if kind.penalised else 0 for p in places]
            columns = (places, [rows[p] for p in places], seen, [masks.get(p, 0) for p in places])
            num_sorted = self.vocab_size if kind.whole else max(asked[p].top_k for p in places)
            parts.append(Part(kind, num_sorted, *to_device(columns, torch.int64, self.device).unbind()))
        scored = self._cut([place for place, one in enumerate(asked) if one.logprobs is not None])
        return Rows(
            size=len(rows),
            parts=tuple(parts),
            plain=len(more) < len(rows),
            table=self._table(rows, asked, masks) if self.fused and more else None,
            num_masks=len(masks),
            scored=tuple(to_device(places, torch.int64, self.device) for places in scored),
            wanted=tuple(one.logprobs for one in asked),
        )

    @torch.no_grad()
    def sample(self, logits: Tensor, rows: Rows, positions: Tensor, masks: Tensor | None = None) -> Sampled:
        """Draw one token for each row.

        Args:
            logits: ``[B, V]``, of any floating dtype, left as they are.
            rows: of the batch.
            positions: ``[B]``, the place in the sequence that each token will have.
            masks: int32 ``[C, ⌈V/32⌉]``, a bit for each token that may come, for the constrained rows in their order.
        """
        self._check(logits[:, None], rows, None if masks is None else masks[:, None])
        tokens, scores = self._draw(logits, rows, positions, masks, count=True)
        return Sampled(tokens, scores, self._logprobs(logits, tokens, rows), rows)

    @torch.no_grad()
    def verify_window(
        self,
        logits: Tensor,
        rows: Rows,
        positions: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        masks: Tensor | None = None,
    ) -> Verified:
        """Draw the tokens that follow a window's tokens, as far as its drafts are what was drawn.

        Each place is drawn as without a window, so a request's tokens don't depend on what was drafted.

        Args:
            logits: ``[B, T, V]``, of any floating dtype, of the token that follows each token of the window.
            rows: of the batch.
            positions: ``[B]``, the place in the sequence of the token that follows the window's first one.
            tokens: int64 ``[B, T]``: the last token that was drawn before, then drafts.
            num_tokens: ``[B]`` int32, how many there are of both; a row may have none.
            masks: int32 ``[C, T, ⌈V/32⌉]``, for the constrained rows in their order.
        """
        self._check(logits, rows, masks)
        width = tokens.shape[1]
        inside = torch.arange(width, device=num_tokens.device) < num_tokens[:, None]
        drawn, scores = self._draw_window(logits, rows, positions, tokens, inside, masks)
        matches = (tokens[:, 1:] == drawn[:, :-1]) & inside[:, 1:]
        num_accepted = (1 + matches.int().cumprod(1).sum(1)).int() * inside[:, 0]
        last = drawn.gather(1, (num_accepted.long() - 1).clamp_min(0)[:, None])[:, 0]
        if rows.parts:
            for t in range(1, width):
                self._count(rows, tokens[:, t], inside[:, t] & (t >= num_accepted), times=-1)
            self._count(rows, last, inside[:, 0])
        places = [self._logprobs(logits[:, t], drawn[:, t], rows) for t in range(width)]
        logprobs = tuple(place for place in places if place is not None)
        return Verified(drawn, scores, num_accepted, last, logprobs, rows)

    def _draw_window(
        self, logits: Tensor, rows: Rows, positions: Tensor, tokens: Tensor, inside: Tensor, masks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``[B, T]``, what follows each token of a window, and its score."""
        if not rows.parts:
            if rows.table is None:
                return _likeliest(logits)
            return self._draw_fused(logits, rows.table, positions, masks, count=False)
        drawn, scores = tokens.new_empty(tokens.shape), logits.new_empty(tokens.shape, dtype=torch.float32)
        for t in range(tokens.shape[1]):
            # While place t is drawn, the drafts before it count as seen: where one of them fails, t is dropped.
            if t:
                self._count(rows, tokens[:, t], inside[:, t])
            mask = None if masks is None else masks[:, t]
            drawn[:, t], scores[:, t] = self._draw(logits[:, t], rows, positions + t, mask, count=False)
        return drawn, scores

    def _draw_fused(
        self, logits: Tensor, table: Tensor, positions: Tensor, masks: Tensor | None, *, count: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens and scores ``[B, T]``, by one kernel, of logits ``[B, T, V]``."""
        from replayssm.backends.triton.draw import Tables, draw

        tokens, values, ends = self._edits.tables
        masks = self._integers[None] if masks is None else masks  # nobody looks at them then
        tables = Tables(
            table, self._numbers, self._integers, self._hashes, self._seen.counts, tokens, values, ends, masks
        )
        return draw(logits, tables, positions, count=count)

    def _table(self, rows: Sequence[int], asked: Sequence[Asked], masks: dict[int, int]) -> Tensor:
        """What the kernel that draws must know of a batch; padding is a greedy row."""
        seen = [self._seen.place(row) if one.kind.penalised else 0 for row, one in zip(rows, asked, strict=True)]
        kinds = [one.kind.bits for one in asked]
        columns = ([max(row, 0) for row in rows], kinds, seen, [masks.get(place, 0) for place in range(len(rows))])
        return to_device(columns, torch.int32, self.device)

    def _draw(
        self, logits: Tensor, rows: Rows, positions: Tensor, masks: Tensor | None, *, count: bool
    ) -> tuple[Tensor, Tensor]:
        """Tokens and scores ``[B]``, of logits ``[B, V]``; counted, if so wanted, as seen."""
        if rows.table is not None:
            masks = None if masks is None else masks[:, None]
            drawn = self._draw_fused(logits[:, None], rows.table, positions, masks, count=count)
            return drawn[0][:, 0], drawn[1][:, 0]
        if rows.plain:
            tokens, scores = _likeliest(logits)
        else:
            tokens, scores = positions.new_empty(rows.size, dtype=torch.int64), logits.new_empty(rows.size)
        scores = scores.float() if rows.parts else scores
        for part in rows.parts:
            found = self._draw_part(logits, part, positions, masks)
            tokens.index_copy_(0, part.batch, found[0])
            scores.index_copy_(0, part.batch, found[1])
        if count:
            self._count(rows, tokens)
        return tokens, scores

    def _draw_part(self, logits: Tensor, part: Part, positions: Tensor, masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """``[n]``, the tokens and scores of a part, by PyTorch's own functions."""
        kind, scores = part.kind, logits.index_select(0, part.batch).float()
        positions = positions.index_select(0, part.batch)
        numbers = self._numbers.index_select(0, part.rows)
        if kind.penalised:
            self._seen.apply(scores, part.seen, Penalties(*numbers[:, 3:].unbind(1)))
        if kind.edited:
            self._edits.apply(scores, part.rows, positions)
        if kind.constrained:
            assert masks is not None
            scores.masked_fill_(self._forbidden(masks.index_select(0, part.masks)), -math.inf)
        if not kind.sampled:
            return _likeliest(scores)
        integers = self._integers.index_select(0, part.rows)
        temperature, top_p, log_min_p = numbers[:, :3].unbind(1)
        scores /= temperature[:, None]
        if kind.filtered:
            lowest = threshold(scores, Filters(integers[:, 2].long(), top_p, log_min_p), part.num_sorted)
            scores.masked_fill_(scores < lowest[:, None], -math.inf)
        scores += gumbel(self._hashes, integers[:, :2], positions)
        return _likeliest(scores)

    def _forbidden(self, masks: Tensor) -> Tensor:
        """``[n, V]`` bool of masks ``[n, ⌈V/32⌉]``."""
        bits = (masks[:, :, None] >> self._bits).bitwise_and_(1)
        return bits.view(len(masks), -1)[:, : self.vocab_size] == 0

    def _count(self, rows: Rows, tokens: Tensor, where: Tensor | None = None, times: int = 1) -> None:
        """Count tokens ``[B]`` as seen once more, or less, in rows with penalties: in all, or where a bool says it."""
        for part in rows.parts:
            if part.kind.penalised:
                amounts = torch.full_like(part.batch, times, dtype=torch.int32)
                if where is not None:
                    amounts *= where.index_select(0, part.batch)
                self._seen.add(part.seen, tokens.index_select(0, part.batch), amounts)

    def _logprobs(self, logits: Tensor, tokens: Tensor, rows: Rows) -> Logprobs | None:
        """Of the rows that want them, in the order of the batch."""
        if not rows.scored:
            return None
        return joined(
            [
                model_logprobs(logits.index_select(0, places).float(), tokens.index_select(0, places))
                for places in rows.scored
            ]
        )

    def _cut(self, places: list[int]) -> list[list[int]]:
        """In pieces of so many rows as may be worked on at once."""
        step = _part_rows(self.vocab_size)
        return [places[start : start + step] for start in range(0, len(places), step)]

    def _check(self, logits: Tensor, rows: Rows, masks: Tensor | None) -> None:
        """Of logits ``[B, T, V]`` and masks ``[C, T, W]``."""
        width = logits.shape[1]
        if logits.shape != (rows.size, width, self.vocab_size):
            wanted = (rows.size, self.vocab_size)
            raise ValueError(f"logits are {_without(1, logits)}: {wanted} is wanted for these rows")
        shape = None if masks is None else _without(1, masks)
        wanted_masks = (rows.num_masks, -(-self.vocab_size // 32)) if rows.num_masks else None
        if shape != wanted_masks:
            raise ValueError(f"masks are {shape}: {wanted_masks} is wanted for these rows")


def _likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row, the token with the largest score, and that score; NaN is larger than any."""
    largest, tokens = scores.max(-1)
    return tokens, largest


def _without(dim: int, tensor: Tensor) -> tuple[int, ...]:
    """A shape without one of its dimensions."""
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _part_rows(vocab_size: int) -> int:
    return max(1, MAX_LOGITS // vocab_size)
