"""From a prompt to a request: checked before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequence_
from operator import index
from typing import SupportsIndex
from uuid import uuid4

from replayssm.engine.constraints import Constraints
from replayssm.engine.params import SamplingParams
from replayssm.engine.randomness import draw_seed
from replayssm.engine.request import Request, Sequence
from replayssm.engine.text import TextStream
from replayssm.errors import InputError, one_line
from replayssm.loading import LoadedModel
from replayssm.options import check_prompt

Prompt = str | Sequence_[int]
PRIORITIES = range(-100, 101)


class Intake:
    """Makes requests out of prompts.

    Args:
        loaded: whose tokenizer and ends of sequence count.
        vocab_size: of the logits.
        max_context: the longest sequence that fits, prompt and output together.
    """

    def __init__(self, loaded: LoadedModel, vocab_size: int, max_context: int) -> None:
        self.loaded = loaded
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.constraints = Constraints(loaded.tokenizer, vocab_size, loaded.eos_token_ids)

    def request(self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int) -> Request:
        """A request with its samples, not queued yet.

        Raises:
            InputError: what is wrong with it, in one line.
        """
        if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
            raise InputError(f"priority is {priority!r}: from {PRIORITIES[0]} to {PRIORITIES[-1]} is wanted")
        if request_id is not None and not isinstance(request_id, str):
            raise InputError(f"request_id is a {type(request_id).__name__}: a string is wanted")
        params.check_vocabulary(self.vocab_size)
        tokens = self.tokens(prompt)
        if len(tokens) + params.max_tokens > self.max_context:
            raise InputError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {params.max_tokens}: "
                f"together at most {self.max_context} fit"
            )
        constraint = self.constraints.start(params)
        request = Request(request_id or uuid4().hex, tokens, params, draw_seed(params), priority)
        for number in range(params.n):
            text = TextStream(self.loaded.tokenizer, params, self.loaded.eos_token_ids)
            request.sequences.append(
                Sequence(request, number, list(tokens), text, constraint.copy() if constraint else None)
            )
        return request

    def tokens(self, prompt: Prompt) -> list[int]:
        """A prompt's tokens."""
        if isinstance(prompt, str):
            check_prompt(prompt)
            try:
                tokens: list[int] = list(self.loaded.tokenizer(prompt, verbose=False)["input_ids"])
            except Exception as error:  # whatever makes a tokenizer fail, the prompt is the cause
                raise InputError(f"the prompt can't be tokenized: {one_line(error)}") from error
        elif isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
            raise InputError(f"the prompt is a {type(prompt).__name__}: text or token ids are wanted")
        elif (dimensions := getattr(prompt, "ndim", 1)) != 1:  # of a tensor or an array
            raise InputError(f"the prompt has {dimensions} dimensions: one, of token ids, is wanted")
        else:
            tokens = [self._token(token) for token in prompt]
        if not tokens:
            raise InputError("the prompt has no tokens: at least one is wanted")
        return tokens

    def _token(self, token: object) -> int:
        if isinstance(token, bool) or not isinstance(token, SupportsIndex):
            raise InputError(f"the prompt has {token!r}: token ids are wanted")
        try:
            token = index(token)
        except TypeError as error:  # of a tensor
            kind = type(token).__name__
            raise InputError(f"the prompt has a {kind} that is no whole number: token ids are wanted") from error
        if not 0 <= token < self.vocab_size:
            raise InputError(f"the prompt has token id {token}: the model's are from 0 to {self.vocab_size - 1}")
        return token
