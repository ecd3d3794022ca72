"""Requests on a Runner, moved by hand: which slot and pages each has, and what it was given."""

from __future__ import annotations

from functools import cache

import torch
from families import VOCAB, build

from replayssm import bundled
from replayssm.engine.forward import Chunk, Forward
from replayssm.engine.runner import Runner
from replayssm.loading import LoadedModel, load_model
from replayssm.options import LoadOptions

PAGE = 4
LENGTHS = (11, 37, 3, 70)
NEW = 20


def loaded(name: str, device: str = "cpu") -> LoadedModel:
    """A bundled model in float32, or a tiny one of a family."""
    return _loaded(name, device)


@cache
def _loaded(name: str, device: str) -> LoadedModel:
    if name in bundled.names():
        return load_model(name, LoadOptions(dtype="float32", device=device))
    return LoadedModel(name, build(name), None, (), "cpu", "float32")


def prompt(length: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(1, vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@cache
def generated(name: str, length: int) -> list[int]:
    """What transformers' `generate` adds to a prompt, greedily."""
    ids = torch.tensor([prompt(length)])
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = loaded(name).model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return out[0, length:].tolist()


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Row:
    """One request: its text, and how much of it is in its slot and pages."""

    def __init__(self, slot: int, pages: list[int], text: list[int], done: int = 0) -> None:
        self.slot, self.pages, self.text, self.done = slot, pages, text, done
        self.sampled = 0

    @property
    def new(self) -> list[int]:
        return self.text[len(self.text) - self.sampled :]

    def add(self, token: int) -> None:
        self.text.append(token)
        self.sampled += 1


class Desk:
    """A runner, and a box of shuffled pages."""

    def __init__(self, name: str, *, num_slots: int = 8, device: str = "cpu", **settings: object) -> None:
        self.device = device
        sizes = {"num_pages": 160, "page_size": PAGE, "max_rows": 8, "max_pages_per_row": 40}
        self.runner = Runner(loaded(name, device), num_slots=num_slots, **{**sizes, **settings})
        self.free = torch.randperm(160, generator=torch.Generator().manual_seed(0)).tolist()

    def int32(self, values: object) -> torch.Tensor:
        return int32(values).to(self.device)

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    def row(self, length: int) -> Row:
        """A request that nothing was done for."""
        (slot,) = self.runner.pool.alloc(1)
        return Row(slot, self.pages(length + NEW), prompt(length))

    def pages(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // PAGE))]

    def fork(self, row: Row, snapshot: int, *, length: int, done: int) -> Row:
        """A request that starts with what a snapshot holds, and shares its pages."""
        shared = row.pages[: done // PAGE]
        slot = self.runner.pool.fork(snapshot)
        return Row(slot, shared + self.pages(length + NEW - done), prompt(length), done)

    def prefill(self, *parts: tuple[Row, int]) -> Forward:
        """Some tokens of each row, each with so many; a row whose text is done gets its next token."""
        chunks = [Chunk(row.slot, row.pages, row.done, row.text[row.done : row.done + n]) for row, n in parts]
        forward = self.runner.prefill(chunks)
        for (row, n), token in zip(parts, forward.logits.argmax(-1).tolist(), strict=True):
            row.done += n
            if row.done == len(row.text):
                row.add(token)
        return forward

    def start(self, *lengths: int) -> list[Row]:
        """Rows whose whole prompts are done in one forward."""
        rows = [self.row(length) for length in lengths]
        self.prefill(*((row, len(row.text)) for row in rows))
        return rows

    def decode(self, rows: list[Row | None], width: int | None = None) -> Forward:
        """One token for each; None is a padding row."""
        tokens = torch.tensor([row.text[-1] if row else 0 for row in rows], device=self.device)
        forward = self.runner.decode(*self.batch(rows, width), tokens)
        for row, token in zip(rows, forward.logits.argmax(-1).tolist(), strict=True):
            if row:
                row.done += 1
                row.add(token)
        return forward

    def verify(self, rows: list[Row], drafts: list[list[int] | None], length: int) -> None:
        """A window for each row, of its last token and drafts; None leaves it out. The drafts that are right stay."""
        counts = [0 if line is None else 1 + len(line) for line in drafts]
        windows = [[row.text[-1], *(line or [])] for row, line in zip(rows, drafts, strict=True)]
        tokens = torch.tensor([line + [10**6] * (length - len(line)) for line in windows], device=self.device)
        slots, table, lengths = self.batch(rows)
        chosen = self.runner.verify(slots, table, lengths, tokens, self.int32(counts)).logits.argmax(-1).tolist()
        accepted = []
        for row, line, found, count in zip(rows, windows, chosen, counts, strict=True):
            right = 1
            while right < count and line[right] == found[right - 1]:
                right += 1
            accepted.append(right if count else 0)
            for token in found[: accepted[-1]]:
                row.add(token)
            row.done += accepted[-1]
        self.runner.commit(slots, self.int32(counts), self.int32(accepted))

    def batch(
        self, rows: list[Row | None], width: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots, page table and lengths."""
        pages = [row.pages if row else [] for row in rows]
        width = max(map(len, pages)) if width is None else width
        table = self.int32([[*line, *[7] * (width - len(line))] for line in pages]).view(len(rows), width)
        return (
            self.int32([row.slot if row else -1 for row in rows]),
            table,
            self.int32([row.done if row else 99 for row in rows]),
        )
