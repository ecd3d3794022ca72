"""The engine beside an event loop: many streams, leaving, failing, ending."""

import asyncio
import random
import threading

import pytest

from replayssm.engine.async_engine import AsyncEngine
from replayssm.engine.errors import EngineClosed, QueueFull
from replayssm.engine.params import SamplingParams
from replayssm.errors import InputError
from tests.test_engine import GREEDY, LONG, assert_all_is_accounted_for, engine_with
from tests.token_model import greedy, random_prompt

ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


async def tokens_of(engine: AsyncEngine, prompt, params=GREEDY) -> list[int]:
    return [token async for update in engine.generate(prompt, params) for token in update.token_ids]


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not any(thread.name == "replayssm-engine" for thread in threading.enumerate())


@pytest.mark.parametrize("run_ahead", [False, True])
def test_streams_beside_each_other_give_what_each_alone_gives(run_ahead):
    rng = random.Random(0)
    prompts = [random_prompt(rng, rng.randrange(1, 40)) for _ in range(32)]

    async def main():
        async with AsyncEngine(engine_with(run_ahead=run_ahead)) as engine:
            tokens = await asyncio.gather(*(tokens_of(engine, prompt) for prompt in prompts))
            await until(lambda: not engine._streams)  # nothing is kept of what is done
            return tokens

    assert asyncio.run(main()) == [greedy(prompt, 24) for prompt in prompts]


def test_leaving_a_stream_cancels_its_request():
    async def main():
        engine = AsyncEngine(engine_with())
        updates = engine.generate([1, 2, 3], ENDLESS)
        await anext(updates)
        assert engine.stats().running == 1
        await updates.aclose()
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().cancelled == 1
        assert await tokens_of(engine, [4, 5]) == greedy([4, 5], 24)
        await engine.shutdown()
        return engine.engine

    assert_all_is_accounted_for(asyncio.run(main()))


def test_a_stream_that_is_left_does_not_take_a_later_one_of_its_name_along():
    async def main():
        async with AsyncEngine(engine_with()) as engine:
            done = await engine.start([1, 2], GREEDY, request_id="chat")
            await until(lambda: not engine.engine.requests)
            later = await engine.start([4, 5], GREEDY, request_id="chat")
            await done.aclose()
            with pytest.raises(InputError, match="is that of a request that isn't finished"):
                await engine.start([6], GREEDY, request_id="chat")
            async with asyncio.timeout(10):
                return [token async for update in later for token in update.token_ids]

    assert asyncio.run(main()) == greedy([4, 5], 24)


def test_a_cancelled_requests_end_goes_to_its_own_stream_and_its_name_is_taken_until_then():
    async def main():
        async with AsyncEngine(engine_with()) as engine:
            stream = await engine.start([1, 2], ENDLESS, request_id="chat")
            await anext(stream)
            hold = threading.Event()
            held = asyncio.create_task(engine.call(hold.wait))  # what follows comes between the same two steps
            cancelled = asyncio.create_task(engine.call(lambda: engine.engine.cancel("chat")))
            again = asyncio.create_task(engine.start([4, 5], GREEDY, request_id="chat"))
            await until(lambda: engine._inbox.qsize() == 2)
            hold.set()
            assert await held
            assert await cancelled
            with pytest.raises(InputError, match="'chat' is that of a"):
                await again
            async with asyncio.timeout(10):
                assert [update.finish_reason async for update in stream][-1] == "abort"
                later = await engine.start([4, 5], GREEDY, request_id="chat")
                return [token async for update in later for token in update.token_ids]

    assert asyncio.run(main()) == greedy([4, 5], 24)


def test_no_stream_takes_the_place_of_one_that_is_not_done():
    async def main():
        async with AsyncEngine(engine_with()) as engine:
            stream = await engine.start([1, 2], ENDLESS, request_id="chat")
            await engine.call(lambda: engine.engine.drop({"chat"}))  # behind the stream's back
            with pytest.raises(InputError, match="'chat' is that of a request that isn't finished"):
                await engine.start([4, 5], GREEDY, request_id="chat")
            await stream.aclose()
            later = await engine.start([4, 5], GREEDY, request_id="chat")
            return [token async for update in later for token in update.token_ids]

    assert asyncio.run(main()) == greedy([4, 5], 24)


def test_who_waits_for_a_stream_that_another_closes_is_told_so():
    async def main():
        async with AsyncEngine(engine_with(max_rows=1)) as engine:
            running = await engine.start([1], ENDLESS)
            waiting = await engine.start([2], ENDLESS)
            reader = asyncio.create_task(anext(waiting, "nothing"))
            await anext(running)
            assert not reader.done()
            await waiting.aclose()
            return await asyncio.wait_for(reader, 5)

    assert asyncio.run(main()) == "nothing"


@pytest.mark.parametrize("closed", [False, True])
def test_all_who_read_one_stream_are_told_its_end(closed):
    async def main():
        async with AsyncEngine(engine_with()) as engine:
            stream = await engine.start([1, 2, 3], ENDLESS if closed else GREEDY)

            async def read():
                return [token async for update in stream for token in update.token_ids]

            readers = [asyncio.create_task(read()) for _ in range(4)]
            if closed:
                await asyncio.sleep(0.01)
                await stream.aclose()
            async with asyncio.timeout(10):
                return [token for tokens in await asyncio.gather(*readers) for token in tokens]

    tokens = asyncio.run(main())
    assert closed or sorted(tokens) == sorted(greedy([1, 2, 3], 24))


def test_a_task_that_is_cancelled_at_any_moment_leaves_nothing_behind():
    rng = random.Random(1)

    async def main():
        engine = AsyncEngine(engine_with(max_rows=2))
        tasks = [asyncio.create_task(tokens_of(engine, random_prompt(rng, 9), ENDLESS)) for _ in range(40)]
        for task in tasks:
            await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        await until(lambda: not engine.engine.requests)
        assert engine.stats().finished == 0, "one that nobody listens to was served to its end"
        await engine.shutdown()
        return engine.engine

    assert_all_is_accounted_for(asyncio.run(main()))


def test_what_cannot_be_served_is_refused_at_once():
    async def main():
        async with AsyncEngine(engine_with(max_rows=1, max_queue=1)) as engine:
            with pytest.raises(InputError, match="no tokens"):
                await engine.start([])
            running = await engine.start([1], ENDLESS)
            await anext(running)
            waiting = await engine.start([2], ENDLESS)
            with pytest.raises(QueueFull):
                await engine.start([3], ENDLESS)
            await waiting.aclose()
            await until(lambda: engine.stats().queued == 0)
            await (await engine.start([3], ENDLESS)).aclose()

    asyncio.run(main())


def test_a_shutdown_lets_requests_finish_as_long_as_there_is_time():
    async def main():
        engine = AsyncEngine(engine_with())
        task = asyncio.create_task(tokens_of(engine, [1, 2, 3], SamplingParams(temperature=0, **LONG)))
        await until(lambda: engine.stats().running)
        await engine.shutdown(drain_seconds=30)
        with pytest.raises(EngineClosed, match="shutting down"):
            await engine.start([1])
        return engine, await task

    engine, tokens = asyncio.run(main())
    assert len(tokens) == 40
    assert engine.engine.runner.closed


def test_what_is_not_done_in_time_ends_with_an_abort():
    async def main():
        engine = AsyncEngine(engine_with(max_rows=1))
        streams = [await engine.start([number], ENDLESS) for number in range(1, 4)]
        await anext(streams[0])
        await engine.shutdown(drain_seconds=0)
        return [[update async for update in stream][-1].finish_reason for stream in streams], engine.engine

    reasons, engine = asyncio.run(main())
    assert reasons == ["abort"] * 3
    assert engine.pages.num_available == engine.pages.num_pages


def test_a_step_that_fails_ends_what_ran_and_the_thread_goes_on(monkeypatch, caplog):
    async def main():
        async with AsyncEngine(engine_with()) as engine:
            stream = await engine.start([1, 2], ENDLESS)
            await anext(stream)
            with monkeypatch.context() as patched:
                patched.setattr(engine.engine.runner, "decode", lambda *_: 1 / 0)
                last = [update async for update in stream][-1]
            assert (last.finish_reason, engine.failed) == ("error", None)
            assert "ZeroDivisionError" in last.message
            return await tokens_of(engine, [4, 5])

    assert asyncio.run(main()) == greedy([4, 5], 24)
    assert "a step failed" in caplog.text


def test_steps_that_fail_by_themselves_end_the_thread(monkeypatch):
    async def main():
        engine = AsyncEngine(engine_with())
        monkeypatch.setattr(engine.engine.scheduler, "plan", lambda: 1 / 0)
        updates = [update async for update in engine.generate([1, 2], GREEDY)]
        assert [update.finish_reason for update in updates] == ["error"]
        with pytest.raises(EngineClosed, match="ZeroDivisionError"):
            await engine.start([1, 2])
        await engine.shutdown()
        return engine.failed

    assert asyncio.run(main()) == "the engine failed: ZeroDivisionError: division by zero"


def test_a_call_runs_between_two_steps():
    async def main():
        async with AsyncEngine(engine_with()) as engine:
            name = await engine.call(lambda: threading.current_thread().name)
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda: 1 / 0)
            return name

    assert asyncio.run(main()) == "replayssm-engine"
