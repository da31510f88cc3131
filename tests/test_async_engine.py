"""The step loop behind asyncio: streams, leaving, refusing, draining, dying."""

import asyncio

import pytest

from pagedattn.assembly import Assembled
from pagedattn.async_engine import AsyncEngine
from pagedattn.config import EngineArgs
from pagedattn.errors import EngineDead, UserError
from pagedattn.request import RequestOutputKind, SamplingParams
from pagedattn.testing import hash_engine, naive_generate

PARAMS = SamplingParams(
    temperature=0, max_tokens=30, output_kind=RequestOutputKind.DELTA
)


@pytest.fixture
def engine():
    made = hash_engine(block_size=4, num_blocks=200)
    serving = AsyncEngine(Assembled(made, EngineArgs(), "hash", None, None, {}, {}))
    yield serving
    serving.shutdown()
    if serving._error is None:
        made.check()


async def collect(engine, prompt, name, params=PARAMS):
    tokens = []
    async for output in engine.generate(prompt, params, name):
        tokens += output.outputs[0].token_ids
    return tokens


def truth(engine, prompt):
    ask = engine.parts.engine.intake.accept("truth", prompt, PARAMS)
    return naive_generate(ask.requests[0])[0]


def test_many_streams_at_once(engine):
    async def run():
        jobs = [collect(engine, [i, i + 1], f"r{i}") for i in range(20)]
        return await asyncio.gather(*jobs)

    for i, tokens in enumerate(asyncio.run(run())):
        assert tokens == truth(engine, [i, i + 1])


def test_a_step_wakes_the_event_loop_once_however_many_it_served(engine, monkeypatch):
    """One output for each of 30 tokens of 20 requests, but a wake for each step."""

    async def run():
        loop, wakes = asyncio.get_running_loop(), []
        wake = loop.call_soon_threadsafe

        def counted(callback, *args):
            wakes.append(args)
            return wake(callback, *args)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        jobs = [collect(engine, [i, i + 1], f"r{i}") for i in range(20)]
        tokens = sum(map(len, await asyncio.gather(*jobs)))
        outputs = sum(len(deliveries) for (deliveries,) in wakes)
        return tokens, outputs, len(wakes)

    tokens, outputs, wakes = asyncio.run(run())
    assert tokens == outputs == 20 * 30
    assert wakes < 20 * 30 / 4  # 30 steps if all arrive at once, never one per output


def test_leaving_early_frees_everything(engine):
    async def run():
        long = SamplingParams(max_tokens=400, output_kind=RequestOutputKind.DELTA)
        stream = engine.generate([1, 2, 3], long, "a")
        await anext(stream)
        await stream.aclose()
        return await collect(engine, [1, 2, 3], "b")

    assert asyncio.run(run()) == truth(engine, [1, 2, 3])


def test_a_second_request_of_one_id_does_not_harm_the_first(engine):
    async def run():
        first = asyncio.create_task(collect(engine, [1], "same"))
        await asyncio.sleep(0)
        with pytest.raises(UserError, match="already running"):
            await collect(engine, [2], "same")
        return await first

    assert asyncio.run(run()) == truth(engine, [1])


def test_bad_requests_raise_before_any_work(engine):
    with pytest.raises(UserError, match="empty"):
        asyncio.run(collect(engine, [], "a"))
    assert not engine.parts.engine.has_unfinished_requests()


def test_draining_finishes_the_running_and_refuses_the_new(engine):
    async def run():
        running = asyncio.create_task(collect(engine, [1], "a"))
        await asyncio.sleep(0.01)
        drain = asyncio.create_task(engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="shutting down"):
            await collect(engine, [2], "b")
        await drain
        return await running

    assert asyncio.run(run()) == truth(engine, [1])


def test_what_does_not_finish_in_time_is_aborted(engine):
    async def run():
        long = SamplingParams(max_tokens=700)
        running = asyncio.create_task(last(engine, [1], long))
        await asyncio.sleep(0.05)
        await engine.drain(0)
        return await running

    assert asyncio.run(run()).outputs[0].finish_reason == "abort"


async def last(engine, prompt, params):
    return [output async for output in engine.generate(prompt, params, "a")][-1]


def test_a_dead_engine_tells_everyone(engine):
    """A fault in the loop itself, which no request can be blamed for."""

    async def run():
        long = SamplingParams(max_tokens=700, output_kind=RequestOutputKind.DELTA)
        running = asyncio.create_task(collect(engine, [1], "a", long))
        await asyncio.sleep(0.01)
        engine.parts.engine.scheduler.plan = None
        with pytest.raises(EngineDead):
            await running
        with pytest.raises(EngineDead, match="died"):
            await collect(engine, [2], "b")

    assert engine.is_running
    asyncio.run(run())
    assert not engine.is_running
