"""Drafts copied from the text so far: where its last n tokens came before, what followed them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from replayssm.speculate.drafter import Accepted, Draft, Drafter, Start


class NgramDrafter(Drafter):
    """Looks the last tokens up in the prompt and the output.

    Longest match first, then the most recent occurrence. A continuation that reaches the end of the text goes on with
    itself, as in LZ77: a text of period 3 is drafted with that period. In a tree, up to `width` different continuations
    share their common beginnings.

    Args:
        max_ngram: the longest match looked for, in tokens.
        min_ngram: the shortest one that is drafted from.
        max_occurrences: how many occurrences of one n-gram are looked at for a tree, the latest first.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1, max_occurrences: int = 16) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram is {min_ngram}, max_ngram {max_ngram}: 1 ≤ min_ngram ≤ max_ngram is wanted")
        if max_occurrences < 1:
            raise ValueError(f"max_occurrences is {max_occurrences}: it must be at least 1")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.max_occurrences = max_occurrences
        self.texts: list[Text] = []

    def start(self, start: Start) -> None:
        """See :meth:`Drafter.start`."""
        self.device = start.ids.device
        self.texts = [Text(self.sizes, self.max_occurrences) for _ in start.prompts]
        for text, prompt, first in zip(self.texts, start.prompts, start.first_ids, strict=True):
            text.extend([*prompt, first])

    def update(self, accepted: Accepted) -> None:
        """See :meth:`Drafter.update`."""
        for text, ids in zip(self.texts, accepted.ids, strict=True):
            text.extend(ids)

    def propose(self, num_drafts: int, width: int, max_tokens: int) -> Draft:
        """See :meth:`Drafter.propose`."""
        rows = [_merged(text.continuations(num_drafts, width), max_tokens) for text in self.texts]
        longest = max(len(tokens) for tokens, _ in rows)

        def padded(row: list[int]) -> list[int]:
            return row + [0] * (longest - len(row))

        parents = None
        if width > 1:
            parents = torch.tensor([padded(p) for _, p in rows], dtype=torch.int32, device=self.device)
        return Draft(
            torch.tensor([padded(t) for t, _ in rows], dtype=torch.int64, device=self.device),
            parents,
            torch.tensor([len(t) for t, _ in rows], dtype=torch.int32, device=self.device),
        )


class Text:
    """One row's tokens, and where each n-gram in it ended, the latest last."""

    def __init__(self, sizes: range, max_occurrences: int) -> None:
        self.sizes = sizes
        self.max_occurrences = max_occurrences
        self.tokens: list[int] = []
        self.ends: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            # What ends before this token has a continuation from now on.
            end = len(self.tokens)
            for size in self.sizes:
                if size <= end:
                    places = self.ends[tuple(self.tokens[end - size : end])]
                    places.append(end)
                    if len(places) > self.max_occurrences:
                        del places[0]
            self.tokens.append(token)

    def continuations(self, length: int, width: int) -> list[list[int]]:
        """At most `width` different ones."""
        found: list[list[int]] = []
        for place in self._places():
            copied = [*self.tokens[place : place + length]]
            while len(copied) < length:
                copied.append(copied[len(copied) - (len(self.tokens) - place)])
            if copied not in found:
                found.append(copied)
                if len(found) == width:
                    break
        return found

    def _places(self) -> Iterator[int]:
        """Where the text's end came before: the longest match first, then the latest."""
        end = len(self.tokens)
        for size in self.sizes:
            if size <= end:
                yield from reversed(self.ends.get(tuple(self.tokens[end - size : end]), ()))


def _merged(continuations: list[list[int]], max_tokens: int) -> tuple[list[int], list[int]]:
    """Tokens and parents (window indices) of a tree that holds the continuations, the first ones where room is short.

    A chain's parents are 0, 1, 2, …
    """
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for continuation in continuations:
        node = 0
        for token in continuation:
            if (node, token) not in children:
                if len(tokens) == max_tokens:
                    break
                tokens.append(token)
                parents.append(node)
                children[node, token] = len(tokens)
            node = children[node, token]
    return tokens, parents
