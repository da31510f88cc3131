"""The encoder's queue: budgets, order, failures, leaving, and the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from pagedattn.config import EngineArgs, EngineConfig
from pagedattn.encoder_engine import EncoderEngine
from pagedattn.errors import EngineDead, UserError
from pagedattn.metrics import Gauge
from pagedattn.model.pooling import Pooling


class Echo:
    """An encoder whose states are its ids; it waits until it may go on."""

    config = SimpleNamespace(vocab_size=100, hidden_size=1)

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def forward(self, texts: list[list[int]]) -> list[torch.Tensor]:
        self.batches.append([list(text) for text in texts])
        self.begun.set()
        assert self.go.wait(20)
        if any(99 in text for text in texts):
            raise RuntimeError("no 99 here")
        return [torch.tensor(text, dtype=torch.float32)[:, None] for text in texts]


def engine_with(policy: str = "fcfs") -> EncoderEngine:
    config = EngineConfig(
        max_model_len=8, max_num_batched_tokens=6, max_num_seqs=3, policy=policy
    )
    return EncoderEngine(
        Echo(), None, Pooling("LAST"), config, EngineArgs(), {"model": "echo"}
    )


@pytest.fixture
def engine() -> Iterator[EncoderEngine]:
    made = engine_with()
    yield made
    made.encoder.go.set()
    made.shutdown()


async def queued(
    engine: EncoderEngine, texts: list[list[int]], ranks: list[int] | None = None
) -> list[asyncio.Task]:
    """Tasks that wait for `texts`, of which the first is alone in a batch already."""
    tasks = []
    for i, text in enumerate(texts):
        rank = ranks[i] if ranks else 0
        work = engine.embed(text, f"{i}", priority=rank)
        tasks.append(asyncio.ensure_future(work))
        await asyncio.sleep(0)
        if i == 0:
            assert await asyncio.to_thread(engine.encoder.begun.wait, 20)
    return tasks


def gauges(engine: EncoderEngine) -> dict[str, float]:
    found = engine.metrics.snapshot()
    return {m.name: m.value for m in found if isinstance(m, Gauge)}


async def idle(engine: EncoderEngine) -> None:
    for _ in range(500):
        if not engine._running and not engine._queue:
            break
        await asyncio.sleep(0.01)
    assert gauges(engine)["vllm:num_requests_running"] == 0
    assert gauges(engine)["vllm:num_requests_waiting"] == 0


def test_batches_keep_to_the_budget(engine: EncoderEngine) -> None:
    async def run() -> list[float]:
        texts = [[1], [2] * 3, [3] * 3, [4], [5] * 8, [6], [7], [8], [9]]
        tasks = await queued(engine, texts)
        assert gauges(engine)["vllm:num_requests_waiting"] == 8
        engine.encoder.go.set()
        outputs = await asyncio.gather(*tasks)
        await idle(engine)
        return [output.pooled.item() for output in outputs]

    assert asyncio.run(run()) == list(range(1, 10))
    sizes = [[len(text) for text in batch] for batch in engine.encoder.batches]
    assert sizes == [[1], [3, 3], [1], [8], [1, 1, 1], [1]]


def test_important_texts_go_first() -> None:
    engine = engine_with("priority")

    async def run() -> None:
        tasks = await queued(engine, [[1] * 6, [2] * 6, [3] * 6, [4] * 6], [0, 2, 1, 1])
        engine.encoder.go.set()
        await asyncio.gather(*tasks)

    asyncio.run(run())
    engine.shutdown()
    assert [batch[0][0] for batch in engine.encoder.batches] == [1, 3, 4, 2]


def test_a_failed_batch_ends_nothing_else(engine: EncoderEngine) -> None:
    async def run() -> None:
        tasks = await queued(engine, [[99], [5] * 6])
        engine.encoder.go.set()
        with pytest.raises(RuntimeError, match="no 99"):
            await tasks[0]
        assert (await tasks[1]).pooled.item() == 5
        await idle(engine)

    asyncio.run(run())


def test_who_leaves_is_not_computed(engine: EncoderEngine) -> None:
    async def run() -> None:
        first, second, third = await queued(engine, [[1], [2], [3]])
        second.cancel()
        first.cancel()  # under way: its result is dropped
        await asyncio.sleep(0.01)
        engine.encoder.go.set()
        assert (await third).pooled.item() == 3
        await idle(engine)

    asyncio.run(run())
    assert engine.encoder.batches == [[[1]], [[3]]]


@pytest.mark.parametrize("text", [[], [1] * 9, [100], [-1]])
def test_what_cannot_be_is_refused(engine: EncoderEngine, text: list[int]) -> None:
    with pytest.raises(UserError):
        asyncio.run(engine.embed(text, "x"))
    assert not engine._queue


def test_draining(engine: EncoderEngine) -> None:
    async def run() -> None:
        tasks = await queued(engine, [[1], [2]])
        await engine.drain(0.05)
        with pytest.raises(EngineDead):
            await tasks[1]
        with pytest.raises(EngineDead):
            await engine.embed([3], "late")
        engine.encoder.go.set()
        assert (await tasks[0]).pooled.item() == 1
        await idle(engine)

    asyncio.run(run())


def test_shutting_down_tells_who_waits() -> None:
    engine = engine_with()

    async def run() -> None:
        tasks = await queued(engine, [[1], [2]])
        engine.encoder.go.set()
        await asyncio.to_thread(engine.shutdown)
        for task in tasks:
            await asyncio.wait([task], timeout=5)
            assert task.done()

    asyncio.run(run())
    assert not engine.is_running
    with pytest.raises(UserError, match="generates no text"):
        asyncio.run(anext(engine.generate("a", None, "x")))
