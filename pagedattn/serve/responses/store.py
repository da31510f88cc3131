"""Responses that are kept: bounded in number and in bytes, oldest use out first.

Knows finished responses, and jobs that run in the background with the events they have
made so far; nothing of what a response says. Lives in memory and dies with the server.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from pagedattn.serve.problems import ApiError
from pagedattn.serve.wire import dumps


@dataclass(slots=True)
class Job:
    """Work in the background: its task, and every event so far for who asks."""

    streamed: bool
    events: list[dict[str, Any]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    ended: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, events: list[dict[str, Any]], ended: bool = False) -> None:
        """Note events and wake whoever follows."""
        self.events += events
        self.ended = self.ended or ended
        self._news.set()
        self._news = asyncio.Event()

    async def follow(self, start: int) -> AsyncGenerator[dict[str, Any], None]:
        """Events from number `start` on, as they come, until the last."""
        while True:
            news = self._news
            for event in self.events[start:]:
                start += 1
                yield event
            if self.ended and start >= len(self.events):
                return
            if news is self._news:
                await news.wait()


@dataclass(slots=True)
class Kept:
    """One response, and the conversation before it; `size` in bytes, set when kept."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    job: Job | None = None
    size: int = 0

    @property
    def running(self) -> bool:
        """Whether it is still being written."""
        return self.job is not None and not self.job.ended

    def weigh(self) -> int:
        """About how many bytes it holds on to, the conversation before it included."""
        events = self.job.events if self.job else []
        return len(dumps([self.response, self.items, events]))


class ResponseStore:
    """id → what is kept. Running jobs are never evicted; clients stop them."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.bytes = 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, kept: Kept) -> None:
        """Keep a response, the newest; old ones go until the limits hold again.

        One that is larger than the limit is not kept. A job that has ended is put
        again, at its final size. 429 if there is no room for another job.
        """
        key = kept.response["id"]
        kept.size = kept.weigh()
        if kept.running:
            self._admit(kept)
        self.drop(key)
        self._kept[key] = kept
        self.bytes += kept.size
        self._evict()

    def _admit(self, new: Kept) -> None:
        running = [kept for kept in self._kept.values() if kept.running]
        size = sum(kept.size for kept in running) + new.size
        if len(running) >= self.most or size > self.most_bytes:
            raise ApiError(
                429,
                f"{len(running)} responses are running in the background; there is "
                f"room for {self.most}, and for {self.most_bytes} bytes.",
                "background",
            )

    def _evict(self) -> None:
        finished = [key for key, kept in self._kept.items() if not kept.running]
        for key in finished:
            if len(self._kept) <= self.most and self.bytes <= self.most_bytes:
                return
            self.drop(key)

    def get(self, key: str) -> Kept:
        """What is kept under `key`, the newest from now on; 404 if there is nothing."""
        if key not in self._kept:
            raise ApiError(404, f"Response with id '{key[:80]}' not found.")
        self._kept.move_to_end(key)
        return self._kept[key]

    def holds(self, kept: Kept) -> bool:
        """Whether it is kept still."""
        return self._kept.get(kept.response["id"]) is kept

    def drop(self, key: str) -> None:
        """Forget a response, if it is kept."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.bytes -= kept.size
