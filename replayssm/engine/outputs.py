"""What an engine gives back: an update for each step of a sample, and a request's whole output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the model's probabilities, at temperature 1 and before anything is left out.

    Attributes:
        token: the token that was taken.
        logprob: its own.
        top: the likeliest tokens, `(token, logprob)` each, in falling order; as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)  # not frozen: that takes three times as long, for each row at each step
class Update:
    """What one step brought to one sample of one request.

    Attributes:
        request_id: the request's name.
        index: the sample's number, from 0 to n − 1.
        text: new text that is final; pieces in order make the sample's text. It may lag behind the tokens: a
            character may need several, and text that may be the beginning of a stop string is held back.
        token_ids: the new tokens.
        logprobs: one for each new token, or none.
        finish_reason: None while it goes on; "stop" at an end of sequence, a stop token or a stop string; "length" at
            `max_tokens`; "abort" when it was cancelled; "error", with `message`, when the engine failed, the model gave
            no token, or a json_schema or regex was too large, with whose name the message then begins.
        stop_reason: the stop string or stop token id that ended it; None otherwise.
        message: what went wrong, in one line.
        cached_tokens: in a sample's first update, how many of the prompt's tokens came from the prefix cache.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    message: str | None = None
    cached_tokens: int | None = None


@dataclass
class Completion:
    """One sample, whole. Attributes as those of :class:`Update`; `logprobs` is None where none were asked for."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    message: str | None = None


@dataclass
class RequestOutput:
    """A request's samples in the order of their index, and what it took.

    Attributes:
        request_id: the request's name.
        prompt_token_ids: the prompt's tokens.
        completions: one for each sample.
        cached_tokens: how many of the prompt's tokens came from the prefix cache.
        queue_seconds: from its arrival to its first step.
        ttft_seconds: from its arrival to its first token.
        seconds: from its arrival to its last token.
    """

    request_id: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    cached_tokens: int
    queue_seconds: float
    ttft_seconds: float
    seconds: float
