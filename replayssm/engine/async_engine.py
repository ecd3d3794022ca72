"""An engine beside an event loop: one thread runs its steps, and requests and updates go to and fro."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar

from replayssm.engine.engine import Engine
from replayssm.engine.errors import EngineClosed
from replayssm.engine.intake import Prompt
from replayssm.engine.outputs import Update
from replayssm.engine.params import SamplingParams
from replayssm.engine.request import Request
from replayssm.engine.stats import EngineStats
from replayssm.errors import InputError, one_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_SECONDS = 0.02  # how often a shutdown looks whether all is done


class Stream:
    """The updates of one request, until each of its samples has a finish reason.

    Attributes:
        request_id: its name.
        prompt_token_ids: its prompt's tokens.
    """

    def __init__(self, engine: AsyncEngine, request: Request) -> None:
        self.request_id = request.id
        self.prompt_token_ids = request.prompt
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update | None] = asyncio.Queue()  # None at the end stays, for all who wait then
        self._unfinished = request.params.n

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        if not self._unfinished:
            raise StopAsyncIteration
        update = await self._updates.get()
        if update is None or not self._unfinished:
            self._updates.put_nowait(None)
            raise StopAsyncIteration
        self._unfinished -= update.finish_reason is not None
        if not self._unfinished:
            self._updates.put_nowait(None)
        return update

    async def aclose(self) -> None:
        """Cancel the request, if it isn't done. Nothing more comes then."""
        if self._unfinished:
            self._unfinished = 0
            self._updates.put_nowait(None)
            self._engine.leave(self)

    def put(self, updates: list[Update]) -> None:
        """Hand updates over, from any thread."""

        def deliver() -> None:
            for update in updates:
                self._updates.put_nowait(update)

        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:  # the loop is closed, so nobody listens
            self._engine.leave(self)


class AsyncEngine:
    """Runs an engine in a thread of its own, which no other may use then.

    Args:
        engine: is closed by :meth:`shutdown`.

    Attributes:
        engine: to ask for what doesn't change: `loaded`, `max_context`, `options`.
        failed: why the thread gave up; None as long as it works. A step that fails ends the requests that ran, and the
            thread goes on; it gives up when steps fail without any.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failed: str | None = None
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[str, Stream] = {}  # the thread's own
        self._preparing = threading.Lock()
        self._posting = threading.Lock()
        self._accepting = True
        self._stopped = False  # the thread ends when nothing is left to do
        self._ended = False  # it takes no more calls
        self._thread = threading.Thread(target=self._run, name="replayssm-engine", daemon=True)
        self._thread.start()

    async def start(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> Stream:
        """Queue a request. Arguments as those of :meth:`Engine.add`.

        Returns:
            Its updates; closing them cancels it.

        Raises:
            QueueFull: as many samples wait as may.
            InputError: the request can't be served; nothing was queued.
            EngineClosed: a shutdown has begun, or the engine failed.
        """
        self._check_open()
        # Beside the steps: a long prompt or a large schema would hold them up.
        request = await asyncio.to_thread(self._prepare, prompt, params or SamplingParams(), request_id, priority)
        self._check_open()
        stream = Stream(self, request)
        try:
            await self.call(lambda: self._enqueue(request, stream))
        except asyncio.CancelledError:
            self.leave(stream)
            raise
        return stream

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[Update]:
        """The updates of a request; leaving the iterator cancels it. Arguments and errors as those of :meth:`start`."""
        stream = await self.start(prompt, params, request_id=request_id, priority=priority)
        try:
            async for update in stream:
                yield update
        finally:
            await stream.aclose()

    def stats(self) -> EngineStats:
        """See :meth:`Engine.stats`."""
        return self.engine.stats()

    def leave(self, stream: Stream) -> None:
        """Nobody listens to a stream any more: cancel its request. From any thread."""
        self._post(lambda: self._drop(stream))

    async def shutdown(self, *, drain_seconds: float = 0.0) -> None:
        """Take no more requests, give the others time to finish, end them with an "abort", and close the engine.

        Args:
            drain_seconds: how long the others may take.
        """
        self._accepting = False
        deadline = time.monotonic() + drain_seconds
        while self._thread.is_alive() and self.engine.requests and time.monotonic() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        self._post(self._stop)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def call(self, function: Callable[[], T]) -> T:
        """Have the thread call a function between two steps, for example a method of the engine; gives its result."""
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self._post(call)
        return await asyncio.wrap_future(future)

    def _check_open(self) -> None:
        if self.failed is not None:
            raise EngineClosed(self.failed)
        if not self._accepting:
            raise EngineClosed("the engine is shutting down and takes no more requests")

    def _prepare(self, prompt: Prompt, params: SamplingParams, request_id: str | None, priority: int) -> Request:
        with self._preparing:
            return self.engine.prepare(prompt, params, request_id, priority)

    def _post(self, call: Callable[[], None]) -> None:
        """Leave a call for the thread; once that has ended, there is nothing it could disturb."""
        with self._posting:
            if not self._ended:
                self._inbox.put(call)
                return
        call()

    # The thread

    def _run(self) -> None:
        while self.engine.has_work or not self._stopped:
            self._take_calls()
            if self.engine.has_work:
                self._deliver(self._step())
        self.engine.close()
        with self._posting:
            self._ended = True
        self._take_calls()

    def _take_calls(self) -> None:
        """Do what was asked for; wait for it if there is nothing else to do."""
        while not self._inbox.empty() or not (self.engine.has_work or self._stopped):
            self._inbox.get()()

    def _step(self) -> list[Update]:
        try:
            return self.engine.step()
        except Exception as error:
            logger.exception("a step failed", extra={"event": "step_failed"})
            ended = self.engine.take_updates()
            if not ended:
                self.failed = f"the engine failed: {type(error).__name__}: {one_line(error)}"
                self._stopped = True
                self.engine.end_all("error", self.failed)
                ended = self.engine.take_updates()
            return ended

    def _deliver(self, updates: list[Update]) -> None:
        by_request: dict[str, list[Update]] = {}
        for update in updates:
            by_request.setdefault(update.request_id, []).append(update)
        for request_id, its in by_request.items():
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(its)
            if request_id not in self.engine.requests:
                self._streams.pop(request_id, None)

    def _enqueue(self, request: Request, stream: Stream) -> None:
        self._check_open()
        if request.id in self._streams:
            raise InputError(f"request_id {request.id!r} is that of a request that isn't finished: another is wanted")
        self.engine.enqueue(request)
        self._streams[request.id] = stream

    def _drop(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:  # else it is done, and another may have its name
            del self._streams[stream.request_id]
            self.engine.drop({stream.request_id})

    def _stop(self) -> None:
        """End what runs, and then the thread."""
        self._stopped = True
        self.engine.end_all("abort")
