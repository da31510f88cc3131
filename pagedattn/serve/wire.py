"""JSON answers, server-sent events, and streams that stop when the client has gone.

Knows ASGI messages, asyncio tasks and bytes; nothing of what the bytes say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def dumps(value: Any) -> bytes:
    """Compact JSON in ASCII: U+2028 and its like end lines in some clients."""
    return _encode(value).encode()


def frame(value: Any) -> bytes:
    """One server-sent event that carries `value` as JSON."""
    return b"data: " + dumps(value) + b"\n\n"


def event_frame(event: dict[str, Any]) -> bytes:
    """One server-sent event under a name of its own: its type."""
    return b"event: " + event["type"].encode() + b"\n" + frame(event)


class JsonAnswer(Response):
    """A response whose body is the JSON of its content; NaN raises ValueError."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return dumps(content)


class EventStream(StreamingResponse):
    """Frames made from `source` as they come; both are closed if the client leaves."""

    def __init__(self, frames: AsyncGenerator[bytes, None], source: Opened) -> None:
        super().__init__(frames, media_type="text/event-stream", headers=_SSE_HEADERS)
        self._frames, self._source = frames, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; ASGI."""
        try:
            await until_gone(receive, self.stream_response(send))
        finally:  # frames that never started would not close their source
            await self._frames.aclose()
            await self._source.aclose()


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns or raises; cancelled, and None, if the client leaves."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def merge(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """(number of its stream, item) in order of arrival, until all streams have ended.

    The first failure is raised. However this ends, every stream is closed.
    """
    arrived: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.ensure_future(_pump(i, s, arrived)) for i, s in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _pump(i: int, stream: AsyncGenerator[T, None], into: asyncio.Queue) -> None:
    try:
        async for item in stream:
            into.put_nowait((i, item))
        into.put_nowait(None)
    except Exception as problem:
        into.put_nowait(problem)


class Opened(Generic[T]):
    """A stream whose first item was already asked for; made by `opened`."""

    def __init__(
        self, first: asyncio.Future[T | None], stream: AsyncGenerator[T, None]
    ) -> None:
        self._first: asyncio.Future[T | None] | None = first
        self._stream = stream

    def __aiter__(self) -> Opened[T]:
        """Itself."""
        return self

    async def __anext__(self) -> T:
        """The next item."""
        if self._first is None:
            return await anext(self._stream)
        first, self._first = self._first, None
        item = await first
        if item is None:
            raise StopAsyncIteration
        return item

    async def aclose(self) -> None:
        """End the stream; twice is as good as once."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._stream.aclose()


async def opened(stream: AsyncGenerator[T, None], seconds: float) -> Opened[T]:
    """The same stream, having waited up to `seconds` for its first item.

    What is wrong from the start raises here, while a status can still be chosen.
    """
    first = asyncio.ensure_future(anext(stream, None))
    source = Opened(first, stream)
    try:
        await asyncio.wait({first}, timeout=seconds)
        if first.done():
            first.result()
    except BaseException:
        await source.aclose()
        raise
    return source


async def gather_lasts(stream: AsyncIterator[tuple[int, T]], count: int) -> list[T]:
    """The last item of each of `count` merged streams."""
    lasts: dict[int, T] = {}
    async for i, item in stream:
        lasts[i] = item
    return [lasts[i] for i in range(count)]
