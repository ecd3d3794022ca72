"""One stream of updates from several prompts' requests."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from replayssm.engine.outputs import Update
from replayssm.engine.params import SamplingParams
from replayssm.server.contract import ServedEngine, UpdateStream

NumberedUpdates = AsyncGenerator[tuple[int, Update] | None, None]


@contextlib.asynccontextmanager
async def started(
    engine: ServedEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, request_id: str
) -> AsyncIterator[list[UpdateStream]]:
    """A request of the engine for each prompt, all or none; what isn't done at the end is cancelled."""
    async with contextlib.AsyncExitStack() as stack:
        streams = []
        for i, prompt in enumerate(prompts):
            stream = await engine.start(prompt, params, request_id=f"{request_id}-{i}")
            stack.push_async_callback(stream.aclose)
            streams.append(stream)
        yield streams


async def merged(streams: Sequence[UpdateStream], pause: float) -> NumberedUpdates:
    """Updates with their prompt's number, as they come; None after each `pause` seconds without any."""
    waiting = {_next(stream): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for task in done:
                update = task.result()
                i = waiting.pop(task)
                if update is not None:
                    waiting[_next(streams[i])] = i
                    yield i, update
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next(stream: UpdateStream) -> "asyncio.Task[Update | None]":
    return asyncio.create_task(_next_or_none(stream))


async def _next_or_none(stream: UpdateStream) -> Update | None:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None
