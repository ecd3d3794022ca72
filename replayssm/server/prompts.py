"""From request bodies to prompt tokens: tokenization and chat templates, in a thread of their own."""

import asyncio
import copy
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from replayssm.errors import one_line
from replayssm.server.bodies import ChatBody, Prompt
from replayssm.server.errors import bad_request, busy

T = TypeVar("T")


class PromptReader:
    """Makes tokens of texts and chats.

    One thread, with a copy of the tokenizer that no one else calls: long prompts don't hold up the streams of others,
    and tokenizers need not be safe for threads.
    """

    def __init__(self, tokenizer: Any, max_waiting: int) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._waiting, self._max_waiting = 0, max_waiting
        # What chat_template_kwargs may not set: among the function's parameters is the template itself.
        self._own_parameters = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def tokens(self, prompts: list[Prompt]) -> list[list[int]]:
        """Tokens of texts; token ids stay as they are."""
        return await self._run(lambda: [self._encode(p, special=True) if isinstance(p, str) else p for p in prompts])

    async def chat_tokens(self, body: ChatBody) -> list[int]:
        """Tokens of a chat, with its tools, up to where the assistant's answer begins."""
        return await self._run(lambda: self._encode(self._render(body), special=False))

    async def text(self, tokens: list[int]) -> str:
        return await self._run(lambda: self._decode(tokens))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= self._max_waiting:
            raise busy(f"the server has {self._waiting} prompts to read already: try again later")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._waiting -= 1

    def _encode(self, text: str, *, special: bool) -> list[int]:
        param = "prompt" if special else "messages"
        try:
            tokens: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        except Exception as error:  # as for half a surrogate pair, which arguments of tool calls may have
            raise bad_request(f"{param} can't be tokenized: {one_line(error)}", param=param) from error
        if not tokens:
            raise bad_request(f"{param} has no tokens after tokenization: at least one is wanted", param=param)
        return tokens

    def _decode(self, tokens: list[int]) -> str:
        try:
            return str(self._tokenizer.decode(tokens))
        except OverflowError as error:
            message = f"prompt has a token id that is none of the tokenizer's: {one_line(error)}"
            raise bad_request(message, param="prompt") from error

    def _render(self, body: ChatBody) -> str:
        """The chat as the model's template writes it."""
        tokenizer = self._tokenizer
        if not tokenizer.chat_template:
            raise bad_request("this model has no chat template: /v1/completions takes text as it is", param="model")
        extra = body.chat_template_kwargs or {}
        taken = sorted(extra.keys() & self._own_parameters)
        if taken:
            raise bad_request(f"chat_template_kwargs may not have {taken[0]}", param="chat_template_kwargs")
        try:
            text: str = tokenizer.apply_chat_template(
                [message.for_template() for message in body.messages],
                tools=body.tools_for_template,
                add_generation_prompt=True,
                tokenize=False,
                **extra,
            )
        except Exception as error:  # a template is code of the model folder, and may raise anything
            message = f"the model's chat template refuses these messages: {one_line(error)}"
            raise bad_request(message, param="messages") from error
        return text
