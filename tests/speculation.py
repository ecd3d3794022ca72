"""What the tests of speculation share: bundled and toy models, prompts, drafters."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from replayssm import bundled
from replayssm.speculate import (
    Accepted,
    Draft,
    Drafter,
    ModelDrafter,
    MtpDrafter,
    NgramDrafter,
    Prefilled,
    RecomputingVerifier,
    Start,
    Verified,
    speculate,
)

QWEN, KIMI, GRANITE = bundled.names()
# Written for the tests, so in no training file.
CODE = '''\
def load(self, path):
    """Return the stored values, or the default values if there is no file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def save(self, path, values):
    """Write the values, '''
PROMPTS = [list(CODE.encode()), list(b"class Settings:\n"), list(b"import ")]


@cache
def model_of(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(bundled.path(name), dtype=torch.float32).eval()


class TableVerifier:
    """A toy model: the next token depends on the last one alone, by a table of probabilities [V, V]."""

    gives_hidden = False
    device = torch.device("cpu")

    def __init__(self, table: Tensor, max_window: int = 16) -> None:
        self.logits = table.log()
        self.vocab_size = len(table)
        self.max_window = max_window
        self.open = False

    def prefill(self, ids: Tensor, mask: Tensor) -> Prefilled:
        assert mask.any(1).all()
        self.open = False
        return Prefilled(self.logits[ids[:, -1]])

    def verify(self, tokens: Tensor, parents: Tensor | None, num_tokens: Tensor) -> Verified:
        assert not self.open, "verify without a commit"
        assert tokens.shape[1] <= self.max_window
        assert num_tokens.dtype == torch.int32
        if parents is not None:
            assert parents.dtype == torch.int32
            assert (parents < torch.arange(tokens.shape[1])).all()
        self.open, self.num_tokens = True, num_tokens
        logits = self.logits[tokens]
        unused = torch.arange(tokens.shape[1]) >= num_tokens[:, None]
        return Verified(logits.masked_fill(unused[..., None], float("nan")))

    def commit(self, num_accepted: Tensor, path: Tensor | None) -> None:
        assert self.open, "commit without a verify"
        assert ((num_accepted >= 0) & (num_accepted <= self.num_tokens)).all()
        self.open = False


class Scripted(Drafter):
    """Drafts given by a function of (row, tokens so far, depth)."""

    def __init__(self, guess: Any) -> None:
        self.guess = guess

    def start(self, start: Start) -> None:
        self.texts = [[*p, f] for p, f in zip(start.prompts, start.first_ids, strict=True)]
        self.prompts = [len(p) for p in start.prompts]

    def propose(self, num_drafts: int, width: int, max_tokens: int) -> Draft:
        rows = []
        for row, text in enumerate(self.texts):
            new = len(text) - self.prompts[row]
            rows.append([self.guess(row, new + depth) for depth in range(num_drafts)])
        return Draft(torch.tensor(rows))

    def update(self, accepted: Accepted) -> None:
        for text, ids in zip(self.texts, accepted.ids, strict=True):
            text += ids


NEW_TOKENS = {QWEN: 16, GRANITE: 16, KIMI: 5}  # Kimi-Linear's reference is slow


@cache
def plain(name: str) -> list[list[int]]:
    return speculate(RecomputingVerifier(model_of(name)), None, PROMPTS, max_new_tokens=NEW_TOKENS[name]).tokens


def drafter_of(kind: str, name: str) -> Drafter:
    if kind == "ngram":
        return NgramDrafter()
    if kind == "mtp":
        return MtpDrafter(model_of(name), bundled.path(name))
    # A model of another architecture, whose guesses are often wrong.
    return ModelDrafter(RecomputingVerifier(model_of(QWEN if name == GRANITE else GRANITE)))


ROWS = 20_000
VOCAB = 4
NEW = 4  # tokens whose joint distribution is counted; the first comes from the prefill


def tables() -> tuple[Tensor, Tensor]:
    """Target and draft model: alike, and not the same. The target never gives one of the tokens."""
    generator = torch.Generator().manual_seed(5)
    target = torch.rand(VOCAB, VOCAB, generator=generator) + 0.35
    draft = target + 0.8 * torch.rand(VOCAB, VOCAB, generator=generator)
    target[1, 3] = 0
    return target / target.sum(1, keepdim=True), draft / draft.sum(1, keepdim=True)


def counting_table(vocab: int = 7) -> Tensor:
    """Token t is followed by t + 1, round and round."""
    return torch.full((vocab, vocab), 1e-4) + torch.eye(vocab).roll(1, 1)
