"""A server to ask in tests: in a thread of this process, over an engine whose tokens depend on the prompt alone."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from replayssm import bundled
from replayssm.engine.errors import EngineClosed, QueueFull
from replayssm.engine.outputs import TokenLogprobs, Update
from replayssm.engine.params import SamplingParams
from replayssm.engine.stats import EngineStats
from replayssm.loading import LoadedModel
from replayssm.server.logs import LOGGER
from replayssm.server.options import ServerOptions
from replayssm.server.run import Server, bind, url
from replayssm.server.service import make_service

MODEL = bundled.names()[0]
CONTEXT = 8192
POLL = 0.002


@cache
def tokenizer():
    """The first bundled model's; a token is a byte."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled.path(MODEL))


def loaded_tokenizer() -> LoadedModel:
    """What the server reads of a loaded model, without the model."""
    return LoadedModel(MODEL, None, tokenizer(), (256, 258), "cpu", "float32")


def fake_tokens(prompt: Sequence[int], count: int, *, index: int = 0, seed: int = 0) -> list[int]:
    """Printable characters that a hash of the prompt chooses."""
    key = repr((tuple(prompt), index, seed)).encode()
    return [32 + hashlib.blake2b(key + i.to_bytes(4)).digest()[0] % 95 for i in range(count)]


def fake_text(prompt: str | Sequence[int], count: int, **kwargs: int) -> str:
    tokens = tokenizer()(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    return bytes(fake_tokens(tokens, count, **kwargs)).decode()


@dataclass
class FakeRequest:
    """One request of the fake engine: an iterator of its updates."""

    engine: FakeEngine
    id: str
    prompt: list[int]
    params: SamplingParams
    sent: int = 0
    done: bool = False
    cancelled: bool = False
    tokens: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [
            fake_tokens(self.prompt, self.params.max_tokens, index=i, seed=self.params.seed or 0)
            for i in range(self.params.n)
        ]
        self._updates = self._run()

    def __aiter__(self):
        return self

    async def __anext__(self) -> Update:
        return await anext(self._updates)

    async def _run(self):
        ended: set[int] = set()
        for position in range(self.params.max_tokens):
            await self.engine.turn()
            for index in set(range(self.params.n)) - ended:
                update = self._update(index, position)
                self.sent += 1
                if update.finish_reason:
                    ended.add(index)
                    self.done = len(ended) == self.params.n
                    self.engine.leave(self)
                yield update
                if update.finish_reason == "abort":
                    return

    def _update(self, index: int, position: int) -> Update:
        token = self.tokens[index][position]
        text, reason = chr(token), "length" if position + 1 == self.params.max_tokens else None
        if self.engine.failing:
            return Update(self.id, index, "", (), (), "error", None, "the fake engine is told to fail")
        if self.engine.aborting:
            return Update(self.id, index, "", (), (), "abort", None)
        if text in self.params.stop:
            text, reason = "", "stop"
        logprobs = ()
        if self.params.logprobs is not None:
            top = tuple((32 + (token - 32 + k) % 95, -0.5 - k) for k in range(self.params.logprobs))
            logprobs = (TokenLogprobs(token, -0.5, top),)
        cached = min(len(self.prompt) - 1, 16) if position == 0 else None
        return Update(self.id, index, text, (token,), logprobs, reason, None, None, cached)

    async def aclose(self) -> None:
        self.cancelled = not self.done
        self.engine.leave(self)


class FakeEngine:
    """Keeps to `server/contract.py`. Each token takes `seconds`; `hold` stops all until it is cleared."""

    def __init__(self, seconds: float = 0.0, max_queue: int = 10_000) -> None:
        self.seconds, self.max_queue = seconds, max_queue
        self.requests: list[FakeRequest] = []
        self.running: dict[str, FakeRequest] = {}
        self.hold = self.failing = self.aborting = self.closed = False
        self.hurry = False
        self.failed: str | None = None

    async def start(self, prompt, params, *, request_id=None, priority=0):
        if self.closed:
            raise EngineClosed("closed")
        if len(self.running) >= self.max_queue:
            raise QueueFull(f"the queue holds {self.max_queue} requests, as many as it may")
        params.check_vocabulary(272)
        request = FakeRequest(self, request_id, list(prompt), params)
        self.requests.append(request)
        self.running[request_id] = request
        return request

    async def turn(self) -> None:
        """Wait until the next token may come."""
        await asyncio.sleep(self.seconds)
        while self.hold and not self.aborting:
            await asyncio.sleep(POLL)

    def leave(self, request: FakeRequest) -> None:
        if request.done or request.cancelled:
            self.running.pop(request.id, None)

    def stats(self) -> EngineStats:
        done = [request for request in self.requests if request.done]
        return EngineStats(
            prompt_tokens=sum(len(r.prompt) for r in self.requests),
            cached_tokens=160, cache_hits=10, generated_tokens=sum(r.sent for r in self.requests), steps=7, batch=3,
            preemptions=1, cancelled=sum(r.cancelled for r in self.requests), finished=len(done), evictions=2,
            drafted=30, accepted=20, windows=10, queued=0, running=len(self.running), pages_total=64, pages_free=60,
            slots_total=8, slots_free=5, snapshots=3,
            counters={"flushes": 5, "folds": 2, "state_bytes_written": 1000, "state_bytes_written_stepwise": 16000},
        )  # fmt: skip

    async def shutdown(self, *, drain_seconds: float) -> None:
        self.closed = True
        self.hurry = self.hurry or drain_seconds == 0
        end = time.monotonic() + drain_seconds
        while self.running and time.monotonic() < end and not self.hurry:
            await asyncio.sleep(POLL)
        self.aborting = True


class Running:
    """A server in a thread, from `with` to its end."""

    def __init__(self, engine=None, loaded: LoadedModel | None = None, max_context: int = CONTEXT, **options) -> None:
        self.engine = engine or FakeEngine()
        self.options = ServerOptions(port=0, **options)
        self._loaded, self._max_context = loaded or loaded_tokenizer(), max_context

    def __enter__(self) -> Running:
        bound = bind(self.options)
        self.url, self.address = url(bound), bound.getsockname()[:2]
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main(bound, ready)))
        self._thread.start()
        assert ready.wait(20)
        return self

    async def _main(self, bound, ready) -> None:
        self.service = make_service(self.engine, self._loaded, self._max_context, self.options)
        self.server, self._loop = Server(self.service), asyncio.get_running_loop()
        await self.server.serve(bound, ready.set)

    def stop(self) -> None:
        """What a signal does."""
        self._loop.call_soon_threadsafe(self.server.stop)

    def join(self, seconds: float = 20) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the server did not end"

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.engine.hold = False
            self.stop()
        self.join()

    def client(self, **kwargs):
        from openai import OpenAI

        return OpenAI(**self._client(kwargs))

    def async_client(self, **kwargs):
        from openai import AsyncOpenAI

        return AsyncOpenAI(**self._client(kwargs))

    def _client(self, kwargs):
        return {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20} | kwargs


def wait_until(true, seconds: float = 10.0) -> None:
    """Wait for something that happens in the server's thread."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(POLL)


class Kept(logging.Handler):
    """Keeps what is logged, formatted."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(self.format(record))


@contextlib.contextmanager
def kept_log(formatter: logging.Formatter):
    """What the server logs meanwhile."""
    handler, level = Kept(formatter), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
