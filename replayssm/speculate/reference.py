"""A verifier without any cache: every window runs the whole text again. Slow and simple, to judge the others by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from replayssm.speculate.verifier import Prefilled, Verified


class RecomputingVerifier:
    """Any transformers causal language model, whole sequences at a time.

    A tree's tokens run once per path. Sequences are padded on the right, which no token of a causal model sees.

    Args:
        model: the model; its dtype is the accuracy.
        max_window: see :class:`replayssm.speculate.verifier.Verifier`.
    """

    def __init__(self, model: Any, *, max_window: int = 16) -> None:
        self.model = model
        self.max_window = max_window
        self.gives_hidden = True
        self.head = model.get_output_embeddings()
        self.vocab_size: int = self.head.weight.shape[0]
        self.texts: list[list[int]] = []

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    def prefill(self, ids: Tensor, mask: Tensor) -> Prefilled:
        """See :meth:`Verifier.prefill`."""
        self.texts = [row[keep].tolist() for row, keep in zip(ids, mask.bool(), strict=True)]
        logits, hidden = self._run(self.texts)
        length = ids.shape[1]
        aligned = hidden.new_full((len(ids), length, hidden.shape[-1]), float("nan"))
        for row, text in enumerate(self.texts):
            aligned[row, length - len(text) :] = hidden[row, : len(text)]
        last = torch.stack([logits[row, len(text) - 1] for row, text in enumerate(self.texts)])
        return Prefilled(last, aligned)

    def verify(self, tokens: Tensor, parents: Tensor | None, num_tokens: Tensor) -> Verified:
        """See :meth:`Verifier.verify`."""
        batch, length = tokens.shape
        self.window = tokens.tolist()
        self.num_tokens = num_tokens.tolist()
        chain = [[i - 1 for i in range(length)]] * batch
        trees = chain if parents is None else parents.tolist()
        paths = [(row, path) for row in range(batch) for path in _paths_to_leaves(trees[row][: self.num_tokens[row]])]
        texts = [self.texts[row] + [self.window[row][i] for i in path] for row, path in paths]
        logits = torch.full((batch, length, self.vocab_size), float("nan"), device=self.device)
        hidden = torch.full((batch, length, self.head.weight.shape[1]), float("nan"), device=self.device)
        logits, hidden = logits.to(self.model.dtype), hidden.to(self.model.dtype)
        if texts:
            found, states = self._run(texts)
            for index, (row, path) in enumerate(paths):
                end = len(texts[index])
                logits[row, path] = found[index, end - len(path) : end]
                hidden[row, path] = states[index, end - len(path) : end]
        return Verified(logits, hidden)

    def commit(self, num_accepted: Tensor, path: Tensor | None) -> None:
        """See :meth:`Verifier.commit`."""
        for row, count in enumerate(num_accepted.tolist()):
            if not 0 <= count <= self.num_tokens[row]:
                raise ValueError(f"num_accepted[{row}] is {count}: the window has {self.num_tokens[row]} tokens")
            places = range(count) if path is None else path[row, :count].tolist()
            self.texts[row] += [self.window[row][i] for i in places]

    @torch.no_grad()
    def _run(self, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Logits ``[B, n, V]`` and hidden states ``[B, n, D]`` of whole texts."""
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=self.device)
        captured: list[Tensor] = []
        hook = self.head.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0]))
        try:
            logits = self.model(ids, use_cache=False).logits
        finally:
            hook.remove()
        return logits, captured[0]


def _paths_to_leaves(parents: list[int]) -> list[list[int]]:
    """Window indices from the root to each leaf."""
    leaves = [i for i in range(len(parents)) if i not in parents]
    found = []
    for leaf in leaves:
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        found.append(path[::-1])
    return found
