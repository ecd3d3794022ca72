"""The target model of speculation, through checkpoint and ring: nothing is copied for a draft, nothing undone."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from replayssm.models import ReplayCache
from replayssm.models.switch import cache_argument
from replayssm.ops import MAX_WINDOW
from replayssm.speculate.verifier import Prefilled, Verified

# What models call their kinds of layers when they look up a mask.
ATTENTION = ("full_attention", "attention", "hybrid")
RECURRENT = ("linear_attention", "mamba", "mamba2")


class ReplayVerifier:
    """A transformers model with replay enabled, and the states of one batch.

    Attention layers keep as many places for a window as its luckiest row accepted; the others mask the rest.

    Args:
        model: a model that :func:`replayssm.enable` was called on.
        max_window: the longest T of :meth:`verify`.

    Raises:
        ValueError: the model isn't enabled, or max_window is out of range.
    """

    def __init__(self, model: Any, *, max_window: int = MAX_WINDOW) -> None:
        if not 1 <= max_window <= MAX_WINDOW:
            raise ValueError(f"max_window is {max_window}: from 1 to {MAX_WINDOW} is wanted")
        self.model = model
        self.max_window = max_window
        self.gives_hidden = True
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        arguments = inspect.signature(model.forward).parameters
        self.cache_argument = cache_argument(model.forward)
        self.takes_positions = "position_ids" in arguments
        self.takes_logits_to_keep = "logits_to_keep" in arguments
        self.cache = ReplayCache(model, max_window=max_window)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    def prefill(self, ids: Tensor, mask: Tensor) -> Prefilled:
        """See :meth:`Verifier.prefill`."""
        self.cache.reset()
        self.committed = mask.bool()  # [B, S], which of the attention layers' places count
        self.lengths = mask.sum(1)  # [B], tokens processed
        arguments: dict[str, Any] = {"attention_mask": mask.long()}
        if self.takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        positions = (self.committed.long().cumsum(1) - 1).clamp_min(0)
        logits, hidden = self._forward(ids, positions, arguments)
        return Prefilled(logits[:, -1], hidden)

    def verify(self, tokens: Tensor, parents: Tensor | None, num_tokens: Tensor) -> Verified:
        """See :meth:`Verifier.verify`."""
        batch, length = tokens.shape
        used = torch.arange(length, device=tokens.device) < num_tokens.unsqueeze(1)
        depths, sees = _paths(parents, batch, length, tokens.device)
        self.cache.verify(num_tokens, parents)
        arguments: dict[str, Any] = {}
        if batch > 1 or parents is not None:
            arguments["attention_mask"] = self._masks(sees)
        try:
            ids = torch.where(used, tokens, 0)
            return Verified(*self._forward(ids, self.lengths.unsqueeze(1) + depths, arguments))
        except BaseException:
            self.cache.window = None  # what it left half-done, the cache refuses to continue
            raise

    def commit(self, num_accepted: Tensor, path: Tensor | None) -> None:
        """See :meth:`Verifier.commit`."""
        longest = int(num_accepted.max())
        self.cache.commit(num_accepted, longest, path)
        kept = torch.arange(longest, device=num_accepted.device) < num_accepted.unsqueeze(1)
        self.committed = torch.cat([self.committed, kept], dim=1)
        self.lengths = self.lengths + num_accepted

    def _masks(self, sees: Tensor) -> dict[str, Tensor | None]:
        """A mask ``[B, 1, T, S + T]`` to be added to attention scores, for each kind of layer."""
        batch, length = sees.shape[:2]
        before = self.committed.unsqueeze(1).expand(batch, length, -1)
        visible = torch.cat([before, sees], dim=2).unsqueeze(1)
        dtype = self.model.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=sees.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )
        return dict.fromkeys(RECURRENT) | dict.fromkeys(ATTENTION, mask)

    @torch.no_grad()
    def _forward(self, ids: Tensor, positions: Tensor, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Logits, and hidden states after the final norm, of all tokens."""
        if self.takes_positions:
            arguments["position_ids"] = positions
        captured: list[Tensor] = []
        trunk = self.model.get_decoder()
        hook = trunk.register_forward_hook(lambda *given: captured.append(given[-1][0]))
        try:
            logits = self.model(input_ids=ids, use_cache=True, **arguments, **{self.cache_argument: self.cache}).logits
        finally:
            hook.remove()
        return logits, captured[0]


def _paths(parents: Tensor | None, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Depth of each token ``[B, T]``, and which tokens it sees, bool ``[B, T, T]``."""
    if parents is None:
        ones = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        return torch.arange(length, device=device).expand(batch, -1), ones.expand(batch, -1, -1)
    depths = torch.zeros(batch, length, dtype=torch.long, device=device)
    sees = torch.eye(length, dtype=torch.bool, device=device).expand(batch, -1, -1).clone()
    for i in range(1, length):
        parent = parents[:, i : i + 1].long().clamp(0, i - 1)  # an unused token's may be anything
        depths[:, i : i + 1] = depths.gather(1, parent) + 1
        sees[:, i] |= sees.gather(1, parent.unsqueeze(2).expand(-1, 1, length)).squeeze(1)
    return depths, sees
