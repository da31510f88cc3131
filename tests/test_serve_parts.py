"""The server's small parts alone: streams, frames, log-probabilities, settings."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from pagedattn.request import Logprob
from pagedattn.serve.logprobs import (
    LOWEST,
    chat_logprobs,
    completion_logprobs,
    finite,
    namer,
    prompt_logprobs,
)
from pagedattn.serve.problems import ApiError, as_api_error
from pagedattn.serve.wire import (
    EventStream,
    dumps,
    frame,
    gather_lasts,
    merge,
    opened,
    until_gone,
)


class Source:
    """Streams that note what became of them."""

    def __init__(self) -> None:
        self.started, self.closed = 0, 0

    async def stream(
        self, items: list[Any], pause: float = 0.0, fail: bool = False
    ) -> AsyncGenerator[Any, None]:
        """The items, `pause` s apart; then an error, if it is to fail."""
        self.started += 1
        try:
            for item in items:
                await asyncio.sleep(pause)
                yield item
            if fail:
                raise ValueError("failed")
        finally:
            self.closed += 1


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(5):
            return await work

    return asyncio.run(limited())


async def everything(stream: Any) -> list[Any]:
    return [item async for item in stream]


# merge
def test_merge_gives_every_item_and_its_number() -> None:
    source = Source()
    streams = [source.stream([f"{i}{k}" for k in range(5)]) for i in range(4)]
    items = run(everything(merge(streams)))
    for i in range(4):
        assert [x for n, x in items if n == i] == [f"{i}{k}" for k in range(5)]
    assert len(items) == 20 and source.closed == 4


def test_merge_closes_all_when_one_fails_or_the_reader_leaves() -> None:
    async def failing(source: Source) -> None:
        streams = [source.stream([1] * 99, 0.001), source.stream([2], fail=True)]
        with pytest.raises(ValueError, match="failed"):
            await everything(merge(streams))

    async def leaving(source: Source) -> None:
        merged = merge([source.stream([1] * 99, 0.001) for _ in range(3)])
        await anext(merged)
        await merged.aclose()

    for scene in (failing, leaving):
        source = Source()
        run(scene(source))
        assert source.started == source.closed >= 2


def test_gather_lasts_keeps_the_order_of_streams() -> None:
    source = Source()
    streams = [source.stream([0, i], 0.002 * (3 - i)) for i in range(3)]
    assert run(gather_lasts(merge(streams), 3)) == [0, 1, 2]


# opened
@pytest.mark.parametrize("pause", [0.0, 0.05])
def test_opened_loses_nothing(pause: float) -> None:
    async def scene() -> list[int]:
        return await everything(await opened(Source().stream([1, 2, 3], pause), 0.01))

    assert run(scene()) == [1, 2, 3]


def test_opened_takes_an_empty_stream() -> None:
    async def scene() -> list[int]:
        return await everything(await opened(Source().stream([]), 0.1))

    assert run(scene()) == []


def test_opened_raises_what_is_wrong_from_the_start() -> None:
    source = Source()

    async def scene() -> None:
        with pytest.raises(ValueError, match="failed"):
            await opened(source.stream([], fail=True), 1)

    run(scene())
    assert source.closed == 1


def test_opened_closes_its_stream_before_and_after_the_first_item() -> None:
    async def scene(read: bool) -> Source:
        source = Source()
        stream = await opened(source.stream([1, 2], 0.01 if read else 9), 0.001)
        if read:
            assert await anext(stream) == 1
        await stream.aclose()
        await stream.aclose()
        return source

    for read in (True, False):
        assert run(scene(read)).closed == 1


# until_gone and EventStream
def test_until_gone_returns_raises_or_cancels() -> None:
    async def stays() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def leaves() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def answer(value: int, seconds: float = 0.0) -> int:
        await asyncio.sleep(seconds)
        return 6 // value

    assert run(until_gone(stays, answer(2))) == 3
    assert run(until_gone(leaves, answer(2, 60))) is None
    with pytest.raises(ZeroDivisionError):
        run(until_gone(stays, answer(0)))


@pytest.mark.parametrize("before", [True, False])
def test_a_lost_client_closes_the_source(before: bool) -> None:
    """Also one that left before the first frame was asked for."""
    source, sent = Source(), []

    async def receive() -> dict[str, str]:
        if not before:
            await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def scene() -> None:
        stream = await opened(source.stream([b"x"] * 999, 0.005), 0.001)

        async def frames() -> AsyncGenerator[bytes, None]:
            async for item in stream:
                yield item

        await EventStream(frames(), stream)({"type": "http"}, receive, send)

    run(scene())
    assert source.started == source.closed == 1
    assert len(sent) < 100


def test_frames_are_one_ascii_line() -> None:
    made = frame({"text": "a\u2028\n🦙"})
    assert made.startswith(b"data: {") and made.endswith(b"}\n\n")
    assert made.count(b"\n") == 2 and made.isascii()
    assert json.loads(made[6:]) == {"text": "a\u2028\n🦙"}
    with pytest.raises(ValueError):
        dumps({"x": math.nan})


# Log-probabilities
class Bytes:
    """A tokenizer whose token is one byte."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])

    def token_str(self, token: int) -> str:
        return chr(token)


def test_finite_clamps_what_json_cannot_carry() -> None:
    assert finite(-math.inf) == finite(math.nan) == finite(-1e30) == LOWEST
    assert finite(-1.5) == -1.5


def test_completion_shape_keeps_the_better_of_two_names() -> None:
    name = namer(Bytes(), False)
    position = {
        65: Logprob(-3.0, 3, "same"),
        66: Logprob(-1.0, 1, "same"),
        67: Logprob(-2.0, 2, "other"),
    }
    shape, end = completion_logprobs([65], [position], 2, name, 10)
    assert shape["token_logprobs"] == [-3.0]
    assert shape["top_logprobs"] == [{"same": -1.0, "other": -2.0}]
    assert shape["text_offset"] == [10] and end == 14
    chat = chat_logprobs([65], [position], 2, name, Bytes())["content"][0]
    assert chat["bytes"] == [65] and chat["logprob"] == -3.0
    assert [t["logprob"] for t in chat["top_logprobs"]] == [-1.0, -2.0]
    everything = chat_logprobs([65], [position], -1, name, Bytes())["content"][0]
    assert len(everything["top_logprobs"]) == 3


def test_the_chosen_token_joins_the_top_when_it_is_not_in_it() -> None:
    position = {65: Logprob(-9.0, 9, "A"), 66: Logprob(-1.0, 1, "B")}
    shape, _ = completion_logprobs([65], [position], 1, namer(Bytes(), False), 0)
    assert shape["top_logprobs"] == [{"B": -1.0, "A": -9.0}]
    as_ids, _ = completion_logprobs([65], [position], 1, namer(Bytes(), True), 0)
    assert as_ids["top_logprobs"] == [{"token_id:66": -1.0, "token_id:65": -9.0}]


def test_prompt_logprobs_are_keyed_by_id() -> None:
    positions = [None, {65: Logprob(-math.inf, 7, "A")}]
    shape = prompt_logprobs(positions, Bytes())
    entry = {"logprob": LOWEST, "rank": 7, "decoded_token": "A"}
    assert shape == [None, {"65": entry}] and prompt_logprobs(None, Bytes()) is None


# Failures
def test_long_messages_are_cut() -> None:
    error = as_api_error(ApiError(400, "x" * 9999, "p")).body()["error"]
    assert len(error["message"]) < 2100 and error["param"] == "p"


def test_the_documentation_has_no_dangling_references():
    from pagedattn.serve.app import _reads
    from pagedattn.serve.protocol import ChatBody, CompletionBody

    for model in (ChatBody, CompletionBody):
        assert "$ref" not in str(_reads(model)) and "StreamOptions" in str(
            _reads(model)
        )
