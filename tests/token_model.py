"""A stand-in for the engine's runner whose model is a hash of the tokens that slots and pages really hold.

Its pool is a real :class:`ReplayPool` that also keeps, for each slot, the tokens that its checkpoint and its ring stand
for. A wrong slot, page, length or cursor, or a snapshot that holds a token more or less, changes the tokens that come.
"""

from __future__ import annotations

import math
import random
from functools import cache
from types import SimpleNamespace

import torch

from replayssm.engine.forward import Chunk, Forward
from replayssm.loading import LoadedModel
from replayssm.state import LayerSpec, ReplayPool

VOCAB = 61
EOS = 0
SLOT_BYTES, PAGE_BYTES = 10**7, 10**6  # so large that the rest doesn't matter
SPEC = LayerSpec("head", "additive", num_k_heads=1, num_v_heads=1, head_k_dim=1, head_v_dim=1)
_WRITTEN: list[tuple[int, ...]] = []  # tokens of the states that were read, for sessions


@cache
def _table() -> torch.Tensor:
    """Logits by hash: smooth enough that sampling has a choice, and without ties."""
    generator = torch.Generator().manual_seed(7)
    return 2.0 * torch.randn(4099, VOCAB, generator=generator)


def logits_of(tokens: tuple[int, ...], in_pages: tuple[int, ...] | None = None) -> torch.Tensor:
    """``[V]`` after these tokens. Two times in three the last one says what follows, so that texts have repetitions."""
    if in_pages is not None and in_pages != tokens:
        return _table()[hash((tokens, in_pages)) % 4099]
    key = hash(tokens)
    return _table()[key % 4099 if key % 3 == 0 else 1 + tokens[-1] % 4]


def greedy(tokens: list[int], count: int) -> list[int]:
    """What the model says, one token after the other, with nothing around it."""
    new: list[int] = []
    while len(new) < count and EOS not in new:
        new.append(int(logits_of((*tokens, *new)).argmax()))
    return new


class TokenPool(ReplayPool):
    """A pool that knows which tokens its states stand for.

    Attributes:
        poison: a token from which on states and logits are NaN; None for a sound model.
    """

    poison: int | None = None

    def __init__(self, num_slots: int, **settings: object) -> None:
        super().__init__([SPEC], num_slots, **settings)
        self.checkpoints: list[tuple[int, ...]] = [("never written",)] * num_slots
        self.rings = [["never written"] * self.ring_capacity for _ in range(num_slots)]

    def tokens(self, slot: int) -> tuple[int, ...]:
        """What the state at the slot's cursor stands for."""
        source = int(self.checkpoint_slot[slot])
        return self.checkpoints[source] + tuple(self.rings[slot][: int(self.write_pos[slot])])

    def alloc(self, count: int = 1, *, zero: bool = True) -> list[int]:
        slots = super().alloc(count, zero=zero)
        for slot in slots:
            self.checkpoints[slot] = () if zero else ("never written",)
        return slots

    def fork(self, src: int) -> int:
        dst = super().fork(src)
        if int(self.checkpoint_slot[dst]) == dst:
            self.checkpoints[dst] = self.checkpoints[int(self.checkpoint_slot[src])]
            self.rings[dst] = list(self.rings[src])
        return dst

    def _fold_into(self, src: int, dst: int) -> None:
        folded = self.tokens(src)
        super()._fold_into(src, dst)
        self.checkpoints[dst] = folded

    def read_state(self, layer: int, slots: list[int]) -> torch.Tensor:
        """A number that stands for the tokens."""
        _WRITTEN.append(self.tokens(slots[0]))
        number = math.nan if self.poison in _WRITTEN[-1] else float(len(_WRITTEN) - 1)
        return torch.full((1, *SPEC.checkpoint_shape), number)

    def write_state(self, layer: int, slots: list[int], state: torch.Tensor) -> None:
        self.checkpoints[slots[0]] = _WRITTEN[int(state)]

    def write_tokens(self, slot: int, tokens: tuple[int, ...]) -> None:
        """A prefill's final state."""
        self.checkpoints[slot] = tokens
        self.reset_cursors([slot])


class TokenRunner:
    """See the module. Arguments as those of :class:`replayssm.engine.runner.Runner`."""

    def __init__(
        self, loaded, *, num_slots, num_pages, page_size, max_rows, max_pages_per_row, ring_len, ring_capacity,
        max_window, state_dtype, ring_dtype, backend, graphs, batch_invariant,
    ):  # fmt: skip
        self.pool = TokenPool(
            num_slots,
            ring_len=ring_len,
            ring_capacity=ring_capacity,
            max_window=max_window,
            backend="torch",
        )
        self.vocab_size = VOCAB
        self.page_size = page_size
        self.max_rows, self.max_pages_per_row, self.max_window = max_rows, max_pages_per_row, max_window
        self.pages = torch.full((num_pages, page_size), -1)
        self.prefilled: list[Chunk] = []
        self.batches: list[int] = []
        self.closed = False

    @staticmethod
    def bytes_per(loaded, **settings):
        return SLOT_BYTES, PAGE_BYTES

    @staticmethod
    def bytes_fixed(loaded, **settings):
        return 0

    def prefill(self, chunks):
        assert chunks
        numbers = [sum(other.slot == chunk.slot for other in chunks[:i]) for i, chunk in enumerate(chunks)]
        assert numbers == sorted(numbers)
        logits = []
        for chunk in chunks:
            before = self.pool.tokens(chunk.slot)
            assert len(before) == chunk.start
            assert len(chunk.tokens) > 0
            assert len(chunk.pages) * self.page_size >= chunk.start + len(chunk.tokens)
            self._check_row(chunk.slot, chunk.pages)
            self._write(chunk.pages, chunk.start, chunk.tokens)
            tokens = (*before, *chunk.tokens)
            self.pool.write_tokens(chunk.slot, tokens)
            if chunk.keep is not None:
                self.pool.write_tokens(chunk.keep, tokens)
            logits.append(self._logits(tokens, chunk.pages))
        self.prefilled += chunks
        return Forward(torch.stack(logits), torch.zeros(sum(len(chunk.tokens) for chunk in chunks), 1))

    def decode(self, slots, page_table, lengths, tokens):
        self._check_batch(slots, page_table, lengths)
        logits = []
        for slot, pages, length, token in self._rows(slots, page_table, lengths, tokens):
            before = self.pool.tokens(slot)
            assert len(before) == length
            self._write(pages, length, [token])
            cursor = int(self.pool.write_pos[slot])
            if cursor >= self.pool.ring_len - 1:
                self.pool.checkpoints[slot] = (*before, token)
            else:
                self.pool.rings[slot][cursor] = token
            logits.append(self._logits((*before, token), pages))
        self.pool.advance(slots)
        self.batches.append(len(logits))
        return Forward(torch.stack(logits), torch.zeros(len(logits), 1))

    def verify(self, slots, page_table, lengths, tokens, num_tokens):
        self._check_batch(slots, page_table, lengths)
        width = tokens.shape[1]
        assert 2 <= width <= self.max_window
        logits = torch.full((len(slots), width, VOCAB), float("nan"))
        rows = self._rows(slots, page_table, lengths, tokens)
        for row, ((slot, pages, length, window), count) in enumerate(zip(rows, num_tokens.tolist(), strict=True)):
            if not count:
                continue
            before = self.pool.tokens(slot)
            assert len(before) == length
            window = window[:count]
            self._write(pages, length, window)
            cursor = int(self.pool.write_pos[slot])
            if cursor + count > self.pool.ring_capacity:
                self.pool.checkpoints[slot] = before
                cursor = 0
            self.pool.rings[slot][cursor : cursor + count] = window
            for place in range(count):
                held = (*before, *window[: place + 1])
                logits[row, place] = self._logits(held, pages)
        return Forward(logits, torch.zeros(*tokens.shape, 1))

    def commit(self, slots, num_tokens, num_accepted):
        self.pool.commit(slots, num_tokens, num_accepted)

    def page_tensors(self):
        return {"tokens": self.pages}

    def close(self):
        self.closed = True

    def _check_row(self, slot, pages):
        self.pool.slot_tensor([slot])
        assert len(set(pages)) == len(pages)
        assert len(pages) <= self.max_pages_per_row

    def _check_batch(self, slots, page_table, lengths):
        assert 1 <= len(slots) <= self.max_rows
        assert slots.dtype == page_table.dtype == lengths.dtype == torch.int32
        self.pool.slot_tensor(slots.tolist())

    @staticmethod
    def _rows(slots, page_table, lengths, tokens):
        return zip(slots.tolist(), page_table.tolist(), lengths.tolist(), tokens.tolist(), strict=True)

    def _logits(self, tokens, pages):
        logits = logits_of(tokens, self._read(pages, len(tokens)))
        return torch.full_like(logits, math.nan) if self.pool.poison in tokens else logits

    def _write(self, pages, start, tokens):
        for place, token in enumerate(tokens, start):
            self.pages[pages[place // self.page_size], place % self.page_size] = token

    def _read(self, pages, count):
        return tuple(self.pages[list(pages[: -(-count // self.page_size)])].flatten()[:count].tolist())


class Words:
    """A tokenizer whose tokens are words."""

    all_special_ids = (EOS,)
    eos_token_id = EOS

    def __call__(self, text, verbose=True):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, tokens, skip_special_tokens=True):
        return "".join(f" {token}" for token in tokens if not (skip_special_tokens and token == EOS))


def memory_for(rows: int, snapshots: int, pages: int) -> dict[str, float]:
    """Engine options that leave room for just so much."""
    wanted = (rows + snapshots) * SLOT_BYTES + (pages + 1) * PAGE_BYTES
    share = (snapshots + 0.5) * SLOT_BYTES / wanted if snapshots else 0
    return {"max_rows": rows, "memory_bytes": wanted, "snapshot_share": share}


def token_model(context: int = 512) -> LoadedModel:
    """A model of which the runner above needs nothing but the config."""
    config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=context, hidden_size=1, intermediate_size=1)
    config.get_text_config = lambda decoder: config
    config.to_dict = lambda: {"context": context}
    weights = [("table", _table())]
    model = SimpleNamespace(config=config, dtype=torch.float32, named_parameters=lambda: weights)
    return LoadedModel("tokens", model, Words(), (EOS,), "cpu", "float32")


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(length)]
