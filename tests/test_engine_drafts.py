"""Drafts for batches whose rows come and go: the same as for each sequence alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from speculation import CODE, KIMI, QWEN, model_of
from torch import Tensor

from replayssm import bundled
from replayssm.engine.drafts import NgramDrafts, Proposal
from replayssm.engine.forward import Chunk
from replayssm.engine.mtp import MtpDrafts
from replayssm.errors import InputError
from replayssm.loading import LoadedModel
from replayssm.speculate import NgramDrafter, Start

PAGE = 4
PAGES = torch.zeros(1, 1, dtype=torch.int32)
TEXTS = [list(CODE.encode()), list(b"class Settings:\n    def load(self, path):\n        return path\n"), [97, 98] * 40]


# n-grams.


def alone(text: list[int], limit: int) -> list[int]:
    """What the drafter of one batch says."""
    drafter, prompt = NgramDrafter(), torch.tensor([text[:-1]])
    first = torch.tensor(text[-1:])
    drafter.start(Start(prompt, prompt >= 0, prompt.tolist(), first, first.tolist(), None, 200))
    return drafter.propose(limit, 1, limit).tokens[0].tolist()


def test_ngram_drafts_are_those_of_each_text_alone_while_rows_come_and_go():
    dice, drafts = random.Random(1), NgramDrafts("cpu")
    there: dict[int, list[int]] = {}
    found = 0
    for _ in range(300):
        row = dice.randrange(6)
        if row in there and dice.random() < 0.2:
            drafts.leave(row)
            del there[row]
        elif row not in there:
            there[row] = [dice.randrange(5) for _ in range(dice.randrange(1, 20))]
            drafts.join(row, there[row])
        if not there:
            continue
        rows = dice.sample(sorted(there), dice.randint(1, len(there)))
        new = [[dice.randrange(5) for _ in range(dice.randrange(3))] for _ in rows]
        drafts.update(rows, None, torch.zeros(len(rows), 2), new)
        for one, tokens in zip(rows, new, strict=True):
            there[one] += tokens
        limits = [dice.randrange(5) for _ in rows]
        proposal = drafts.propose(rows, PAGES, torch.zeros(len(rows)), limits)
        expected = [alone(there[one], limit) if limit else [] for one, limit in zip(rows, limits, strict=True)]
        assert proposal.ids() == expected
        assert proposal.num_drafts == list(map(len, expected))
        assert proposal.tokens.shape == (len(rows), max(map(len, expected)))
        found += sum(map(bool, expected))
    assert found > 200


def test_a_row_that_left_hears_nothing():
    drafts = NgramDrafts("cpu")
    drafts.join(0, [1, 2, 1])
    drafts.leave(0)
    drafts.leave(0)
    drafts.update([0], None, torch.zeros(1, 1), [[2]])
    drafts.join(0, [3])
    assert drafts.propose([0], PAGES, torch.zeros(1), [3]).ids() == [[]]


def test_a_proposal_knows_how_many_drafts_each_row_has():
    proposal = Proposal(torch.tensor([[5, 6], [7, 0], [0, 0]]), [2, 1, 0])
    assert proposal.ids() == [[5, 6], [7], []]


# Multi-token prediction.


def loaded(name: str) -> LoadedModel:
    return LoadedModel(name, model_of(name), None, (256,), "cpu", "float32")


@cache
def known(number: int) -> tuple[Tensor, Tensor]:
    """Of a text: the model's hidden states, and the drafts of the forward that the head was trained with."""
    from training import model_card

    model, tokens = model_of(QWEN), torch.tensor([TEXTS[number]])
    with torch.no_grad():
        hidden = model.model(tokens).last_hidden_state[0]
        expected = model_card.drafts(model, model_card.load_predictor(model, bundled.path(QWEN)), tokens, depth=3)
    return hidden, expected[0]


@dataclass
class Running:
    """A text on its way through an engine: `done` tokens are computed, the next one is its last."""

    number: int
    row: int
    done: int
    pages: list[int] = field(default_factory=list)


class Engine:
    """Says to the drafts what an engine would, about texts that are known beforehand."""

    def __init__(self, num_pages: int = 80, max_window: int = 4) -> None:
        self.drafts = MtpDrafts(loaded(QWEN), PAGE, max_window)
        self.drafts.allocate(num_pages, max_rows=4)
        self.free = list(range(num_pages))
        self.dice = random.Random(7)
        self.dice.shuffle(self.free)
        # What memory held before: nothing of it may be seen.
        for kept in (*self.drafts._pages.keys.values(), *self.drafts._pages.values.values()):
            kept.fill_(50.0)

    def take_pages(self, running: Running, tokens: int) -> None:
        while len(running.pages) * PAGE < tokens:
            running.pages.append(self.free.pop())

    def join(self, running: Running, start: int = 0) -> None:
        """Prefill in chunks, and draw the next token."""
        text, hidden = TEXTS[running.number], known(running.number)[0]
        self.drafts.join(running.row, text[: running.done])
        self.take_pages(running, running.done)
        while start < running.done:
            end = min(running.done, start + self.dice.randint(1, 20))
            chunk = Chunk(0, running.pages, start, text[start:end])
            self.drafts.prefilled([running.row], [chunk], hidden[start:end])
            start = end
        self.update([running], [1], processed=0)

    def leave(self, running: Running) -> None:
        self.drafts.leave(running.row)
        self.free[:0] = running.pages
        running.pages = []

    def update(self, batch: list[Running], counts: list[int], processed: int = 1) -> None:
        """So many tokens were drawn in each row. After a decode step or a window as many were computed."""
        width = max(counts)
        tokens, states, ids = torch.full((len(batch), width), 96), [], []
        for place, (running, count) in enumerate(zip(batch, counts, strict=True)):
            text, hidden = TEXTS[running.number], known(running.number)[0]
            begin = running.done if processed else running.done - 1
            ids.append(text[begin + 1 : begin + 1 + count])
            tokens[place, :count] = torch.tensor(ids[-1])
            states.append(torch.cat([hidden[begin : begin + count], torch.full((width - count, hidden.shape[1]), 9.0)]))
            running.done += count * processed
        self.drafts.update([running.row for running in batch], torch.stack(states), tokens, ids)

    def propose(self, batch: list[Running], limits: list[int]) -> list[list[int]]:
        for running, limit in zip(batch, limits, strict=True):
            self.take_pages(running, running.done + 1 + limit)
        widest = max(len(running.pages) for running in batch)
        pages = torch.zeros(len(batch), widest, dtype=torch.int32)  # what a row doesn't have names page 0
        for place, running in enumerate(batch):
            pages[place, : len(running.pages)] = torch.tensor(running.pages)
        lengths = torch.tensor([running.done for running in batch], dtype=torch.int32)
        return self.drafts.propose([running.row for running in batch], pages, lengths, limits).ids()


def expected(running: Running, limit: int) -> list[int]:
    return known(running.number)[1][running.done - 1, :limit].tolist()


def test_mtp_drafts_are_those_of_each_text_alone_while_rows_come_and_go():
    engine = Engine()
    dice, running, compared = engine.dice, {}, 0
    for _ in range(60):
        row = dice.randrange(4)
        if row not in running:
            number = dice.randrange(len(TEXTS))
            running[row] = Running(number, row, dice.randint(1, 40))
            engine.join(running[row])
        batch = dice.sample(list(running.values()), dice.randint(1, len(running)))
        limits = [dice.randrange(4) for _ in batch]
        found = engine.propose(batch, limits)
        assert found == [expected(one, limit) for one, limit in zip(batch, limits, strict=True)]
        compared += sum(limits)
        # As many tokens come as if drafts had been right, whatever they were.
        engine.update(batch, [dice.randint(1, 1 + limit) for limit in limits])
        for one in batch:
            if one.done + 5 > len(TEXTS[one.number]) or dice.random() < 0.1:
                engine.leave(running.pop(one.row))
    assert compared > 100


def test_mtp_drafts_go_on_when_a_sequence_is_put_into_another_row_and_other_pages():
    engine = Engine()
    first = Running(0, 0, 20)
    engine.join(first)
    assert engine.propose([first], [3]) == [expected(first, 3)]
    engine.update([first], [4])
    engine.leave(first)
    again = Running(0, 2, first.done)
    engine.join(again)
    assert engine.propose([again], [3]) == [expected(again, 3)]


def test_a_prefill_in_chunks_leaves_what_a_whole_one_does():
    chunked, whole = Engine(), Engine()
    chunked.join(one := Running(0, 0, 60))
    whole.dice.randint = lambda low, high: 60
    whole.join(other := Running(0, 0, 60))
    for a, b in zip(held(chunked, one.pages), held(whole, other.pages), strict=True):
        assert torch.allclose(a.flatten(0, 1)[1:60], b.flatten(0, 1)[1:60], atol=1e-4)


def test_a_row_without_new_tokens_has_no_drafts():
    engine = Engine()
    one = Running(0, 1, 20)
    engine.join(one)
    assert engine.propose([one], [2]) == [expected(one, 2)]
    assert engine.propose([one], [2]) == [[]]


def held(engine: Engine, pages: list[int]) -> list[Tensor]:
    return [kept[pages].clone() for kept in engine.drafts._pages.tensors().values()]


def test_pages_of_others_are_left_alone():
    engine = Engine()
    running = [Running(number, number, 10 + number) for number in range(3)]
    for one in running:
        engine.join(one)
    engine.free.remove(0)  # what tables are filled up with is another's page
    engine.take_pages(running[1], 60)
    before = held(engine, [0, *engine.free, *running[2].pages])
    assert engine.propose(running[:2], [1, 3]) == [expected(running[0], 1), expected(running[1], 3)]
    engine.update(running[:2], [1, 1])
    assert engine.propose(running[:2], [0, 0]) == [[], []]
    pages = [0, *engine.free, *running[2].pages]
    assert all(torch.equal(a, b) for a, b in zip(before, held(engine, pages), strict=True))


def test_pages_of_a_shared_prefix_are_read_and_never_written():
    engine = Engine()
    first = Running(0, 0, 40)
    engine.join(first)
    engine.propose([first], [3])
    shared = first.pages[:6]
    before = held(engine, shared)
    second = Running(0, 1, 40, pages=list(shared))
    engine.join(second, start=6 * PAGE)
    same = 0
    for _ in range(60):
        drafts = engine.propose([second], [1])[0]
        same += drafts == expected(second, 1)
        engine.update([second], [1])
    assert same > 50, "one hidden state is not known after a hit, which costs few drafts"
    assert all(torch.equal(a, b) for a, b in zip(before, held(engine, shared), strict=True))


def test_a_hit_knows_nothing_of_the_last_tenant_of_its_row():
    kept = []
    for tenant in (None, Running(1, 1, 30)):
        engine = Engine()
        engine.join(first := Running(0, 0, 40))
        engine.propose([first], [1])
        if tenant:
            engine.join(tenant)
            engine.leave(tenant)
        engine.join(second := Running(0, 1, 40, pages=first.pages[:6]), start=6 * PAGE)
        kept.append(torch.cat([part.flatten(0, 1)[:40] for part in held(engine, second.pages)]))
    assert torch.allclose(kept[0], kept[1], atol=1e-4)


@pytest.mark.parametrize("gap", [1, 10])
def test_drafts_go_on_behind_tokens_that_were_missed_and_never_look_at_their_places(gap):
    found = []
    for before in (50.0, -3.0):  # in the memory that nothing was written to
        engine, right = Engine(), 0
        for kept in (*engine.drafts._pages.keys.values(), *engine.drafts._pages.values.values()):
            kept.fill_(before)
        one, other = Running(0, 0, 20), Running(1, 1, 30)
        engine.join(one)
        engine.join(other)
        assert engine.propose([one, other], [3, 0]) == [expected(one, 3), []]
        engine.update([one], [2])
        engine.drafts.missed([0])
        assert engine.propose([one], [3]) == [[]]
        one.done += gap
        for _ in range(40):
            engine.update([one, other], [1, 0])
            drafts = engine.propose([one, other], [2, 0])[0]
            right += drafts[:1] == expected(one, 1)
            found.append(drafts)
        assert right > 25, "what lies far back costs few drafts"
        engine.update([other], [1])
        assert engine.propose([other], [2]) == [expected(other, 2)]
    assert found[:40] == found[40:]


def test_memory_is_what_it_says():
    engine = Engine(num_pages=10)
    pages = engine.drafts._pages.tensors()
    assert sum(kept.nbytes for kept in pages.values()) == 10 * engine.drafts.bytes_per_page
    rows = [engine.drafts._last, engine.drafts._hidden, engine.drafts._tokens, engine.drafts._since]
    assert sum(table.nbytes for table in rows) == 4 * engine.drafts.bytes_per_row


def test_a_model_without_a_head_is_refused():
    with pytest.raises(InputError, match="speculation with mtp: a kimi_linear model has no MTP head"):
        MtpDrafts(loaded(KIMI), PAGE, 4)
