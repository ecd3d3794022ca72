"""What speculation wants from a target model: prefill a prompt, run a window of tokens, keep a part of it.

The loop, the acceptance rules and the drafters know a model by this interface alone. A verifier owns one batch of
sequences: its recurrent states, its KV cache and each row's number of processed tokens.

Names: B rows, P prompt tokens with padding, T tokens of a window (its first token, and drafts), V vocabulary size,
D hidden size. All tensors are on ``device``. A window's token 0 is the row's last committed token, which the model has
not processed yet; tokens 1… are drafts. A tree names each token's parent by its index in the window.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Prefilled(NamedTuple):
    """What a prompt leaves.

    Attributes:
        logits: ``[B, V]``, raw, of the token that follows each prompt; fp32 or the model's dtype.
        hidden: ``[B, P, D]``, every prompt token's hidden state after the model's final norm (the input of
            ``lm_head``), at the places of ``ids``; padding holds anything. None where ``gives_hidden`` is False.
    """

    logits: Tensor
    hidden: Tensor | None = None


class Verified(NamedTuple):
    """What a window gives. Tokens from ``num_tokens`` on hold anything.

    Attributes:
        logits: ``[B, T, V]``, raw: row ``(b, i)`` predicts the token that follows window token i along its path.
        hidden: ``[B, T, D]``, each token's hidden state after the final norm. None where ``gives_hidden`` is False.
    """

    logits: Tensor
    hidden: Tensor | None = None


class Verifier(Protocol):
    """A target model with the states of a batch.

    The order of calls is ``prefill (verify commit)*``: every verify is followed by one commit, with the numbers of
    that verify. A new ``prefill`` drops the batch and starts another.

    Attributes:
        vocab_size: V of the logits.
        max_window: the longest T that `verify` takes (16, or less where the ring or the kernels hold less).
        gives_hidden: whether `prefill` and `verify` return hidden states.
        device: where all tensors are.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_window(self) -> int: ...

    @property
    def gives_hidden(self) -> bool: ...

    @property
    def device(self) -> torch.device: ...

    def prefill(self, ids: Tensor, mask: Tensor) -> Prefilled:
        """Process whole prompts.

        Args:
            ids: ``[B, P]`` int64, padded on the left.
            mask: ``[B, P]`` bool, False at padding; every row has at least one token. A row's first token is at
                position 0, however long its padding.
        """
        ...

    def verify(self, tokens: Tensor, parents: Tensor | None, num_tokens: Tensor) -> Verified:
        """Run a window on top of what is committed; nothing of it is seen later unless `commit` keeps it.

        Args:
            tokens: ``[B, T]`` int64, ``1 ≤ T ≤ max_window``; places from ``num_tokens`` on hold any valid id.
            parents: ``[B, T]`` int32 or None for a chain. ``parents[:, 0] = −1`` (the token follows what is
                committed) and ``0 ≤ parents[b, i] < i`` for the drafts. A token's position is the row's number of
                processed tokens plus its depth (token 0 has depth 0), and it sees its ancestors, itself and what is
                committed.
            num_tokens: ``[B]`` int32, ``0 ≤ num_tokens ≤ T``. 0 is a row without work (finished): its states are left
                alone and its outputs hold anything.
        """
        ...

    def commit(self, num_accepted: Tensor, path: Tensor | None) -> None:
        """Keep a part of the last window; the rest of it leaves no trace.

        Args:
            num_accepted: ``[B]`` int32, ``0 ≤ num_accepted ≤ num_tokens``, token 0 counted.
            path: ``[B, T]`` int32, the kept tokens' window indices in order, each the parent of the next, beginning
                with 0: strictly increasing, ``path[b, i] ≥ i``. Entries from ``num_accepted`` on are anything. None:
                the first ``num_accepted`` tokens.
        """
        ...
