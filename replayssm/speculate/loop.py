"""Generate with speculation: draft, verify, accept, commit, until every row is done.

Greedy decoding gives the tokens of plain greedy decoding, and sampling their distribution, whatever the drafts are.
The host looks at the tokens once a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from replayssm.errors import BROKEN_LOGITS, InputError
from replayssm.ops.checks import check_count
from replayssm.speculate.acceptance import Acceptance, accept_greedy, accept_point_mass, accept_rejection
from replayssm.speculate.adaptive import AdaptiveLength, MeasuredCosts
from replayssm.speculate.drafter import Accepted, Draft, Drafter, Start
from replayssm.speculate.sampling import NO_TOKEN, Sampling, draw, told
from replayssm.speculate.statistics import Generation, Statistics
from replayssm.speculate.verifier import Verifier

OnTokens = Callable[[int, list[int]], None]
Stop = Callable[[int, list[int]], bool]


def speculate(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_drafts: int = 3,
    width: int = 1,
    adaptive: AdaptiveLength | None = None,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    eos_token_ids: Iterable[int] = (),
    stop: Stop | None = None,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """Continue a batch of prompts.

    Args:
        verifier: the target model.
        drafter: None decodes one token a step.
        prompts: token ids, at least one in each.
        max_new_tokens: per row.
        num_drafts: K, how deep each draft goes.
        width: 1 for a chain, else candidates per place of a tree. Where a window holds fewer, deeper places get fewer.
        adaptive: picks the depth of each step, up to `num_drafts`; None drafts `num_drafts` always.
        sampling: None for greedy decoding.
        generator: randomness, on the verifier's device.
        eos_token_ids: a row ends after one of these.
        stop: called with a row and all its new tokens after each token; True ends the row there.
        on_tokens: called with a row and its newest tokens, once a step for each row that has some.

    Raises:
        ValueError: one line, before anything runs, that says what doesn't fit.
        InputError: a row came to logits that are NaN or infinite.
    """
    check_request(verifier, drafter, prompts, max_new_tokens, num_drafts, width, adaptive)
    run = _Run(verifier, drafter, max_new_tokens, sampling, generator, frozenset(eos_token_ids), stop, on_tokens)
    with torch.no_grad():
        run.start([list(prompt) for prompt in prompts])
        while not all(run.done):
            depth = num_drafts if adaptive is None else min(adaptive.choose(), num_drafts)
            run.step(depth, width, adaptive)
    return Generation(run.tokens, run.statistics)


def check_request(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_drafts: int,
    width: int,
    adaptive: AdaptiveLength | None,
) -> None:
    """Refuse what can't work, before anything runs."""
    _check_prompts(prompts, verifier.vocab_size)
    for name, value in (("max_new_tokens", max_new_tokens), ("num_drafts", num_drafts), ("width", width)):
        check_count(name, value, 1)
    if drafter is None:
        return
    if num_drafts + 1 > verifier.max_window:
        raise ValueError(
            f"num_drafts is {num_drafts}: the target verifies windows of at most {verifier.max_window} tokens, "
            f"of which the first is none of the drafts, so at most {verifier.max_window - 1} fit"
        )
    if adaptive is not None and adaptive.max_drafts > num_drafts:
        raise ValueError(f"adaptive.max_drafts is {adaptive.max_drafts}: num_drafts allows {num_drafts}")
    drafter.check(verifier, num_drafts)


def _check_prompts(prompts: Sequence[Any], vocab_size: int) -> None:
    """Refuse text, one row's tokens without a list around them, and what is no token of the model."""
    for prompt in prompts:
        if isinstance(prompt, str) or not isinstance(prompt, Iterable):
            raise ValueError(f"prompts has {prompt!r}: a list of token ids for each row is wanted")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt is empty: at least one prompt, and one token in each, are wanted")
    for token in (token for prompt in prompts for token in prompt):
        if not isinstance(token, SupportsIndex) or not 0 <= index(token) < vocab_size:
            raise ValueError(f"a prompt has {token!r}: token ids from 0 to {vocab_size - 1} are wanted")


class _Run:
    """One batch on its way."""

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        max_new_tokens: int,
        sampling: Sampling | None,
        generator: torch.Generator | None,
        eos_token_ids: frozenset[int],
        stop: Stop | None,
        on_tokens: OnTokens | None,
    ) -> None:
        self.verifier, self.drafter = verifier, drafter
        self.max_new_tokens = max_new_tokens
        self.sampling, self.generator = sampling, generator
        self.eos_token_ids, self.stop, self.on_tokens = eos_token_ids, stop, on_tokens
        self.statistics = Statistics()
        self.tokens: list[list[int]] = []
        self.done: list[bool] = []

    def start(self, prompts: list[list[int]]) -> None:
        """Prefill; each row's first token comes from its logits alone."""
        ids, mask = _left_padded(prompts, self.verifier.device)
        prefilled = self.verifier.prefill(ids, mask)
        if self.sampling is None:
            self.last = prefilled.logits.argmax(-1)
        else:
            self.last = draw(self.sampling.probabilities(prefilled.logits), self.generator)
        first = told(self.last, prefilled.logits.amax(-1)).tolist()
        self.tokens, self.done = [[] for _ in prompts], [False] * len(prompts)
        for row, token in enumerate(first):
            self._add(row, [token])
        if self.drafter is not None and not all(self.done):
            self.drafter.start(
                Start(
                    ids,
                    mask,
                    prompts,
                    self.last,
                    first,
                    prefilled.hidden,
                    self.max_new_tokens,
                    self.sampling,
                    self.generator,
                )
            )

    def step(self, depth: int, width: int, adaptive: AdaptiveLength | None) -> None:
        """One window: draft, verify, accept, commit."""
        began = time.perf_counter()
        draft = self._draft(depth, width)
        window, parents, num_tokens = self._window(draft)
        verified = self.verifier.verify(window, parents, num_tokens)
        accepted = self._accept(verified.logits, draft, window, parents, num_tokens)
        self.verifier.commit(accepted.num_accepted, None if parents is None else accepted.path)
        tokens = _new_tokens(window, accepted)
        self.last = torch.where(accepted.num_accepted > 0, accepted.next_token, self.last)
        # The one place where the host waits for the device.
        depths = _depths(parents, num_tokens)
        new_tokens = told(tokens, verified.logits.amax(-1).gather(1, accepted.path.long()))
        host = torch.cat([accepted.num_accepted[:, None], depths[:, None], num_tokens[:, None], new_tokens], 1).tolist()
        counts, reached, used = ([row[i] for row in host] for i in range(3))
        self.statistics.count_step(counts, reached, used)
        if adaptive is not None:
            working = [row for row, count in enumerate(counts) if count]
            adaptive.observe([reached[row] for row in working], [counts[row] - 1 for row in working])
            if isinstance(adaptive.costs, MeasuredCosts):
                adaptive.costs.observe(max(reached), time.perf_counter() - began)
        kept = [
            self._add(row, new[3 : 3 + count]) if count else []
            for row, (new, count) in enumerate(zip(host, counts, strict=True))
        ]
        self.statistics.tokens_from_steps += sum(map(len, kept))
        if self.drafter is not None and not all(self.done):
            going = torch.tensor([not done for done in self.done], dtype=torch.int32, device=window.device)
            ids = [[] if done else new for new, done in zip(kept, self.done, strict=True)]
            self.drafter.update(Accepted(tokens, accepted.num_accepted * going, accepted.path, ids, verified.hidden))

    def _draft(self, depth: int, width: int) -> Draft | None:
        """Guesses for this step, no deeper than any row has room for; None decodes one token."""
        room = self.max_new_tokens - min(len(t) for t, done in zip(self.tokens, self.done, strict=True) if not done)
        depth = min(depth, room - 1)  # the token after the drafts comes for free
        if self.drafter is None or depth < 1:
            return None
        return self.drafter.propose(depth, width, min(width * depth, self.verifier.max_window - 1))

    def _window(self, draft: Draft | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Tokens, parents and number of tokens of the next window."""
        working = torch.tensor([not done for done in self.done], dtype=torch.int32, device=self.verifier.device)
        if draft is None:
            return self.last[:, None], None, working
        tokens = torch.cat([self.last[:, None], draft.tokens], 1)
        parents = None
        if draft.parents is not None:
            root = draft.parents.new_full((len(tokens), 1), -1)
            parents = torch.cat([root, draft.parents], 1)
        drafts = draft.tokens.shape[1] if draft.num_drafts is None else draft.num_drafts
        return tokens, parents, working * (1 + drafts)

    def _accept(
        self, logits: Tensor, draft: Draft | None, window: Tensor, parents: Tensor | None, num_tokens: Tensor
    ) -> Acceptance:
        if self.sampling is None:
            return accept_greedy(logits, window, parents, num_tokens)
        # Unused places may hold NaN, which a sort would carry into the rows beside them.
        used = torch.arange(window.shape[1], device=window.device) < num_tokens[:, None]
        probs = self.sampling.probabilities(torch.where(used[..., None], logits, 0))
        if draft is None or draft.probs is None:
            return accept_point_mass(probs, window, parents, num_tokens, self.generator)
        return accept_rejection(probs, draft.probs, window, parents, num_tokens, self.generator)

    def _add(self, row: int, new: list[int]) -> list[int]:
        """Append tokens to a row as far as it takes them; returns those."""
        tokens, kept = self.tokens[row], 0
        for token in new:
            if token == NO_TOKEN:
                break
            tokens.append(token)
            kept += 1
            stopped = self.stop is not None and self.stop(row, tokens)
            if stopped or token in self.eos_token_ids or len(tokens) == self.max_new_tokens:
                self.done[row] = True
                break
        self.statistics.new_tokens += kept
        if self.on_tokens is not None:
            self.on_tokens(row, new[:kept])
        if not self.done[row] and kept < len(new):
            raise InputError(BROKEN_LOGITS)
        return new[:kept]


def _left_padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    return ids, torch.arange(longest, device=device) >= (longest - lengths)[:, None]


def _new_tokens(window: Tensor, accepted: Acceptance) -> Tensor:
    """``[B, T]``: the accepted drafts, then the token that follows them; what comes after is anything."""
    along = window.gather(1, accepted.path.long())
    tokens = torch.cat([along[:, 1:], along[:, -1:]], 1)
    last = (accepted.num_accepted.long() - 1).clamp_min(0)[:, None]
    return tokens.scatter(1, last, accepted.next_token[:, None])


def _depths(parents: Tensor | None, num_tokens: Tensor) -> Tensor:
    """``[B]``: how deep each row's drafts go."""
    if parents is None:
        return (num_tokens - 1).clamp_min(0)
    depth = torch.zeros_like(parents)
    for i in range(1, parents.shape[1]):
        here = depth.gather(1, parents[:, i, None].long().clamp_min(0)) + 1
        depth[:, i : i + 1] = torch.where((i < num_tokens)[:, None], here, 0)
    return depth.amax(1)
