"""Drafters: n-grams and a draft model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from speculation import (
    GRANITE,
    QWEN,
    TableVerifier,
    counting_table,
    tables,
)
from transformers import AutoTokenizer

from replayssm import bundled
from replayssm.speculate import (
    Accepted,
    Draft,
    ModelDrafter,
    NgramDrafter,
    Sampling,
    Start,
    check_vocabularies,
    speculate,
)
from replayssm.speculate.drafter import branch


def ngram_draft(text: list[int], num_drafts: int, width: int = 1, max_tokens: int = 15, **options: Any) -> Draft:
    drafter = NgramDrafter(**options)
    ids = torch.tensor([text[:-1]])
    drafter.start(
        Start(ids, torch.ones_like(ids).bool(), [text[:-1]], torch.tensor(text[-1:]), text[-1:], None, num_drafts)
    )
    return drafter.propose(num_drafts, width, max_tokens)


def drafts(draft: Draft) -> list[int]:
    return draft.tokens[0, : draft.num_drafts[0]].tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4], []),  # nothing came before
        ([1, 2], []),
        ([7, 1, 2, 9, 5, 2, 8, 6, 1, 2], [9, 5, 2]),  # the longer match, though 2 alone came later
        ([2, 4, 2, 5, 6, 2], [5, 6, 2]),  # the most recent of equals
        ([3, 1, 2, 1, 2], [1, 2, 1]),  # to the end of the text and on, with its period
        ([5, 5], [5, 5, 5]),
    ],
    ids=["none", "short", "longest", "recent", "period", "repeat"],
)
def test_ngram_drafts(text, expected):
    assert drafts(ngram_draft(text, 3)) == expected


def test_ngram_min_ngram_refuses_shorter_matches():
    text = [2, 5, 6, 1, 2]
    assert drafts(ngram_draft(text, 2, min_ngram=2)) == []
    assert drafts(ngram_draft(text, 2)) == [5, 6]


def test_ngram_tree_shares_common_beginnings_and_keeps_to_its_room():
    text = [1, 2, 3, 1, 2, 4, 1, 5, 6, 1]
    draft = ngram_draft(text, 2, width=3)
    # Latest first: 5 6, then 2 4, then 2 3, which begins like it.
    assert drafts(draft) == [5, 6, 2, 4, 3]
    assert draft.parents[0].tolist() == [0, 1, 0, 3, 3]
    cut = ngram_draft(text, 2, width=3, max_tokens=3)
    assert (drafts(cut), cut.parents[0].tolist()) == ([5, 6, 2], [0, 1, 0])
    assert drafts(ngram_draft(text, 2, width=1)) == [5, 6]


def test_ngram_drafts_from_the_output_as_well():
    drafter = NgramDrafter()
    ids = torch.tensor([[1, 2]])
    drafter.start(Start(ids, ids.bool(), [[1, 2]], torch.tensor([3]), [3], None, 9))
    new = torch.tensor([[4, 3]])
    drafter.update(Accepted(new, torch.tensor([2], dtype=torch.int32), torch.zeros(1, 2), [[4, 3]]))
    assert drafts(drafter.propose(2, 1, 15)) == [4, 3]


def test_rows_without_a_match_have_no_drafts_beside_rows_that_have():
    found = speculate(TableVerifier(counting_table()), NgramDrafter(), [[0, 1, 2, 0, 1], [5]], max_new_tokens=6)
    assert found.tokens == [[2, 3, 4, 5, 6, 0], [6, 0, 1, 2, 3, 4]]
    assert found.statistics.drafted_steps < found.statistics.row_steps


@pytest.mark.parametrize("options", [{"min_ngram": 0}, {"min_ngram": 3, "max_ngram": 2}, {"max_occurrences": 0}])
def test_ngram_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        NgramDrafter(**options)


@pytest.mark.parametrize(
    ("num_drafts", "width", "max_tokens", "parents", "widths"),
    [
        (3, 1, 3, [0, 1, 2], [1, 1, 1]),
        (2, 3, 6, [0, 0, 0, 1, 1, 1], [3, 3]),
        (3, 2, 4, [0, 0, 1, 3], [2, 1, 1]),
        (3, 2, 3, [0, 1, 2], [1, 1, 1]),
    ],
    ids=["chain", "tree", "cut", "no-room"],
)
def test_branch(num_drafts, width, max_tokens, parents, widths):
    shape = branch(num_drafts, width, max_tokens)
    assert (shape.parents, shape.widths) == (parents, widths)


def test_the_draft_model_itself_as_target_is_always_right():
    found = speculate(
        TableVerifier(counting_table()),
        ModelDrafter(TableVerifier(counting_table())),
        [[0], [3, 4]],
        max_new_tokens=16,
        num_drafts=4,
    )
    assert found.statistics.tokens_per_step == 5


def test_the_draft_model_processes_each_committed_token_once():
    class Recording(TableVerifier):
        def prefill(self, ids, mask):
            self.text = ids[0].tolist()
            return super().prefill(ids, mask)

        def verify(self, tokens, parents, num_tokens):
            self.window = tokens[0].tolist()
            return super().verify(tokens, parents, num_tokens)

        def commit(self, num_accepted, path):
            super().commit(num_accepted, path)
            self.text += self.window[: int(num_accepted[0])]

    table, other = tables()
    draft = Recording(other)
    drafter = ModelDrafter(draft)
    found = speculate(
        TableVerifier(table),
        drafter,
        [[1, 2, 0]],
        max_new_tokens=60,
        num_drafts=3,
        width=2,
        sampling=Sampling(),
        generator=torch.Generator().manual_seed(0),
    )
    whole = [1, 2, 0, *found.tokens[0]]
    assert draft.text == whole[: len(draft.text)]
    assert len(whole) - len(draft.text) <= 5
    assert 0 < found.statistics.accepted < found.statistics.drafted


def test_after_a_pause_the_draft_model_catches_up_in_windows_it_can_hold():
    draft = TableVerifier(counting_table(), max_window=4)
    drafter = ModelDrafter(draft)
    ids = torch.tensor([[0]])
    drafter.start(Start(ids, ids == 0, [[0]], torch.tensor([1]), [1], None, 40))
    for token in range(2, 20):
        new = torch.tensor([[token % 7]])
        drafter.update(Accepted(new, torch.ones(1, dtype=torch.int32), torch.zeros(1, 1), new.tolist()))
    assert drafter.propose(3, 1, 3).tokens[0].tolist() == [20 % 7, 21 % 7, 22 % 7]


def test_tokenizers_that_disagree_are_told_apart():
    class Tokenizer:
        def __init__(self, **vocab: int) -> None:
            self.get_vocab = lambda: vocab

    same = AutoTokenizer.from_pretrained(bundled.path(QWEN))
    check_vocabularies(same, AutoTokenizer.from_pretrained(bundled.path(GRANITE)))
    with pytest.raises(ValueError, match="token 'b' is 1 in the target's and 2 in the draft model's"):
        check_vocabularies(Tokenizer(a=0, b=1), Tokenizer(a=0, b=2))
    with pytest.raises(ValueError, match="token 'c' is not there in the target's"):
        check_vocabularies(Tokenizer(a=0), Tokenizer(a=0, c=1))
