"""Answers in the shapes of the two endpoints, whole and in chunks. One format object serves one request."""

import time
from dataclasses import dataclass, field
from typing import Any

from replayssm.engine.outputs import TokenLogprobs, Update
from replayssm.server.tokens import TokenTexts, chat_logprobs, completion_logprobs


@dataclass
class Choice:
    """What has come of one sample."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None

    def add(self, update: Update) -> None:
        self.text.append(update.text)
        self.logprobs += update.logprobs
        self.tokens += len(update.token_ids)
        self.finish_reason = update.finish_reason


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. `cached`: of the prompt's, those that the prefix cache had; None if nobody said."""

    prompt: int
    completion: int
    cached: int | None = None

    def body(self) -> dict[str, Any]:
        counts = {"prompt_tokens": self.prompt, "completion_tokens": self.completion}
        cached = {} if self.cached is None else {"prompt_tokens_details": {"cached_tokens": self.cached}}
        return counts | {"total_tokens": self.prompt + self.completion} | cached


class Format:
    """What both endpoints share; `whole_object` and `chunk_object` are the names that the API gives to its answers."""

    whole_object: str
    chunk_object: str

    def __init__(self, request_id: str, model: str, texts: TokenTexts, *, logprobs: bool, include_usage: bool) -> None:
        self.texts, self.logprobs, self._include_usage = texts, logprobs, include_usage
        self._head = {"id": request_id, "created": int(time.time()), "model": model, "system_fingerprint": None}

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        shaped = [self.choice(choice) for choice in choices]
        return self._head | {"object": self.whole_object, "choices": shaped, "usage": usage.body()}

    def chunk(self, *choices: dict[str, Any], usage: Usage | None = None) -> dict[str, Any]:
        chunk = self._head | {"object": self.chunk_object, "choices": list(choices)}
        return chunk | {"usage": usage and usage.body()} if self._include_usage else chunk

    def closing(self, usage: Usage) -> dict[str, Any] | None:
        """The last chunk, which holds the usage, if it was asked for."""
        return self.chunk(usage=usage) if self._include_usage else None

    def choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream begins with."""
        raise NotImplementedError

    def piece(self, index: int, update: Update) -> dict[str, Any]:
        raise NotImplementedError


class CompletionFormat(Format):
    """`/v1/completions`."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, *args: Any, echoes: list[str] | None, n: int, **kwargs: Any) -> None:
        """`echoes`: texts of the prompts, to be sent back in front of their `n` samples each."""
        super().__init__(*args, **kwargs)
        self._echoes, self._n = echoes, n
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far

    def choice(self, choice: Choice) -> dict[str, Any]:
        text = self._echo(choice.index) + "".join(choice.text)
        return self._choice(choice.index, text, choice.logprobs, choice.finish_reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._choice(index, self._echo(index), None, None) if self._echoes else None

    def piece(self, index: int, update: Update) -> dict[str, Any]:
        return self._choice(index, update.text, update.logprobs, update.finish_reason)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._n] if self._echoes else ""

    def _choice(self, index: int, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        shaped = None
        if self.logprobs and logprobs is not None:
            offset = self._offsets.get(index, 0)
            shaped = completion_logprobs(self.texts, logprobs, offset)
            self._offsets[index] = offset + sum(len(token) for token in shaped["tokens"])
        return {"index": index, "text": text, "logprobs": shaped, "finish_reason": finish_reason}


class ChatFormat(Format):
    """`/v1/chat/completions`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        logprobs = chat_logprobs(self.texts, choice.logprobs) if self.logprobs else None
        shaped = {"index": choice.index, "message": message}
        return shaped | {"logprobs": logprobs, "finish_reason": choice.finish_reason}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, update: Update) -> dict[str, Any]:
        delta = {"content": update.text} if update.text else {}
        logprobs = chat_logprobs(self.texts, update.logprobs) if self.logprobs and update.logprobs else None
        return self._delta(index, delta, logprobs, update.finish_reason)

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
