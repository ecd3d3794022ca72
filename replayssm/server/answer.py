"""The life of one request: admitted, followed until its samples end, answered whole or as a stream of events."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from replayssm.engine.errors import EngineClosed, QueueFull
from replayssm.engine.outputs import Update
from replayssm.engine.params import SamplingParams
from replayssm.errors import InputError
from replayssm.server import errors
from replayssm.server.errors import ApiError
from replayssm.server.formats import Choice, Format, Usage
from replayssm.server.logs import LOGGER, event, note, note_error, note_gone
from replayssm.server.service import Service
from replayssm.server.updates import NumberedUpdates, merged, started

KEEP_ALIVE_SECONDS = 10.0  # a stream says something at least so often: proxies close silent connections
LAST_EVENT_SECONDS = 5.0  # for a client to take the event that ends a stream early
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Updates = AsyncGenerator[tuple[Choice, Update] | None, None]


@dataclass(frozen=True)
class Job:
    """A request that was read and checked."""

    request_id: str
    prompts: list[list[int]]
    params: SamplingParams
    format: Format
    stream: bool

    @property
    def samples(self) -> int:
        return len(self.prompts) * self.params.n


class Answer(Response):
    """Runs a job for as long as its client listens."""

    def __init__(self, service: Service, job: Job) -> None:
        super().__init__()
        self._service, self._job = service, job
        self._start = time.perf_counter()
        self._choices: list[Choice] = []
        self._cached: dict[int, int] = {}  # by prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                note_gone(scope)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._note_usage(scope)
        if not work.cancelled():
            work.result()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send an answer or an error: as a response before a stream has begun, as its last event after that."""
        events = Events(send)
        try:
            body = await self._work(scope, events)
        except Exception as error:
            failure = self._failure(error)
            note_error(scope, failure)
            if not events.begun:
                await failure.response()(scope, receive, send)
                return
            # One that doesn't read is cut off: the HTTP server closes what is left open.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_EVENT_SECONDS):
                    await events.send(failure.body)
                    await events.end()
            return
        if body is not None:
            await errors.json_response(body)(scope, receive, send)

    async def _work(self, scope: Scope, events: "Events") -> dict[str, Any] | None:
        """The whole answer, or None after a stream of it."""
        job, service = self._job, self._service
        with service.gate.enter(job.samples, "n" if job.params.n > 1 else "prompt"):
            self._choices = [Choice(i) for i in range(job.samples)]
            async with (
                asyncio.timeout(service.options.request_seconds),
                started(service.engine, job.prompts, job.params, job.request_id) as streams,
                contextlib.aclosing(merged(streams, KEEP_ALIVE_SECONDS)) as numbered,
                contextlib.aclosing(self._followed(scope, numbered)) as updates,
            ):
                if job.stream:
                    await self._stream(updates, events)
                    return None
                async for _ in updates:
                    pass
        return job.format.whole(self._choices, self._usage())

    async def _followed(self, scope: Scope, numbered: NumberedUpdates) -> Updates:
        """Updates with the choices that they belong to, which have them already; None for a silence.

        Raises:
            ApiError: a sample was ended before its time.
        """
        first = True
        async for came in numbered:
            if came is None:
                yield None
                continue
            prompt, update = came
            if update.finish_reason == "error":
                raise errors.from_update(update.message)
            if update.finish_reason == "abort":
                raise self._aborted()
            if first:
                note(scope, ttft_seconds=round(time.perf_counter() - self._start, 6))
                first = False
            if update.cached_tokens is not None:
                self._cached[prompt] = update.cached_tokens
            choice = self._choices[prompt * self._job.params.n + update.index]
            choice.add(update)
            yield choice, update
        if any(choice.finish_reason is None for choice in self._choices):
            raise self._aborted()

    async def _stream(self, updates: Updates, events: "Events") -> None:
        shape = self._job.format
        await events.begin()
        for choice in self._choices:
            opening = shape.opening(choice.index)
            if opening is not None:
                await events.send(shape.chunk(opening))
        async for came in updates:
            if came is None:
                await events.keep_alive()
                continue
            choice, update = came
            if update.text or update.finish_reason or (shape.logprobs and update.logprobs):
                await events.send(shape.chunk(shape.piece(choice.index, update)))
        closing = shape.closing(self._usage())
        if closing is not None:
            await events.send(closing)
        await events.end()

    def _usage(self) -> Usage:
        prompt = sum(len(tokens) for tokens in self._job.prompts)
        completion = sum(choice.tokens for choice in self._choices)
        return Usage(prompt, completion, sum(self._cached.values()) if self._cached else None)

    def _note_usage(self, scope: Scope) -> None:
        usage = self._usage()
        note(scope, stream=self._job.stream, prompt_tokens=usage.prompt, completion_tokens=usage.completion)
        note(scope, cached_tokens=usage.cached, finish_reasons=[choice.finish_reason for choice in self._choices])

    def _aborted(self) -> ApiError:
        if self._service.draining:
            return errors.shutting_down()
        return errors.engine_failed("the request was cancelled")

    def _failure(self, error: Exception) -> ApiError:
        """What to tell the client of whatever went wrong."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, QueueFull):
            return errors.busy(str(error))
        if isinstance(error, InputError):
            return errors.from_input_error(error, vars(self._job.params))
        if isinstance(error, TimeoutError):
            return errors.timed_out(self._service.options.request_seconds)
        if isinstance(error, EngineClosed):
            failed = self._service.engine.failed
            return errors.engine_failed(failed) if failed else errors.shutting_down()
        LOGGER.exception("internal error", extra=event("internal_error", id=self._job.request_id))
        return errors.internal_error()


class Events:
    """A response of server-sent events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def begin(self) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)})

    async def send(self, event: dict[str, Any]) -> None:
        await self._write(b"data: " + errors.to_json(event) + b"\n\n")

    async def keep_alive(self) -> None:
        await self._write(b": nothing new\n\n")

    async def end(self) -> None:
        await self._write(b"data: [DONE]\n\n", more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


async def _gone(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
