"""A client's visit to the real application, without a network: who did what, when.

A `Visitor` posts one request over ASGI, reads what comes, and may leave early. A
`Diary` notes moments with their thread and time. A `Turnstile` lets the engine run one
plan at a time, so that a visit goes the same way on every machine. Knows the engine's
edges and nothing of what lies between them. Chapter 09 shows it.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pagedattn.async_engine import AsyncEngine
from pagedattn.intake import Ask
from pagedattn.scheduler import Plan, Result

CLIENT, LOOP, ENGINE = "client", "event loop", "engine thread"
Edge = tuple[Any, str, Callable[..., Any]]  # whose, which method, what stands in for it


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that was done: in which lane, by which thread, when by the clock.

    `cause` is the number of the moment that led to it, if that was in another lane.
    """

    lane: str
    text: str
    thread: str
    at: float
    cause: int | None = None


@dataclass(slots=True)
class Diary:
    """Moments in the order in which they were noted, from any thread."""

    moments: list[Moment] = field(default_factory=list)

    def note(self, lane: str, text: str, after: str | None = None) -> None:
        """Note something that is being done now, by this thread, because of what was
        last noted in the lane `after`."""
        causes = [i for i, moment in enumerate(self.moments) if moment.lane == after]
        cause = causes[-1] if causes else None
        name, now = threading.current_thread().name, time.perf_counter()
        self.moments.append(Moment(lane, text, name, now, cause))


class Turnstile:
    """Stands before every run of a plan and lets one through for each `go`."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._somebody = threading.Event()
        self._open = False

    def go(self) -> None:
        """Let one plan run."""
        self._permits.release()

    def open(self) -> None:
        """Let everything through from now on."""
        self._open = True
        self._permits.release()

    def meet(self) -> None:
        """Block until a plan stands here."""
        self._somebody.wait()

    @property
    def busy(self) -> bool:
        """Whether a plan stands here."""
        return self._somebody.is_set()

    def wait(self) -> None:
        """Stand here until let through."""
        if not self._open:
            self._somebody.set()
            self._permits.acquire()
            self._somebody.clear()


# Watching: the engine's edges, with something in front of each.
@contextmanager
def watched(serving: AsyncEngine, diary: Diary, turnstile: Turnstile) -> Iterator[None]:
    """Within, what enters and leaves `serving` is noted, and plans wait at the
    turnstile; at the end it is open."""
    edges = [*_outer(serving, diary), *_inner(serving, diary, turnstile)]
    for owner, name, noted in edges:
        setattr(owner, name, noted)
    try:
        yield
    finally:
        turnstile.open()
        for owner, name, _ in edges:
            delattr(owner, name)


def _outer(serving: AsyncEngine, diary: Diary) -> Iterator[Edge]:
    """What callers do, in the event loop."""
    enter, leave = serving._enter, serving._abort

    def noted_enter(ask: Ask, stream: Any) -> None:
        diary.note(LOOP, f"{tokens(len(ask.prompt_ids))} into the inbox", CLIENT)
        enter(ask, stream)

    def noted_leave(request_id: str) -> None:
        diary.note(LOOP, "an abort into the inbox", CLIENT)
        leave(request_id)

    yield serving, "_enter", noted_enter
    yield serving, "_abort", noted_leave


def _inner(serving: AsyncEngine, diary: Diary, turnstile: Turnstile) -> Iterator[Edge]:
    """What the step loop does, in its thread."""
    engine = serving.parts.engine
    run, add, abort, free = (
        *(engine.runner.run, engine.add, engine.abort_request),
        engine.scheduler.pool.free,
    )

    def noted_run(plan: Plan) -> list[Result]:
        turnstile.wait()
        diary.note(ENGINE, f"runs a plan of {tokens(plan.num_tokens)}")
        return run(plan)

    def noted_add(ask: Ask) -> None:
        diary.note(ENGINE, "takes the request", LOOP)
        add(ask)

    def noted_abort(request_id: str) -> None:
        before = len(free)
        abort(request_id)
        diary.note(ENGINE, f"takes the abort: {len(free) - before} blocks free", LOOP)

    yield engine.runner, "run", noted_run
    yield engine, "add", noted_add
    yield engine, "abort_request", noted_abort


def tokens(n: int) -> str:
    """A number of tokens in words."""
    return f"{n} token" + "s" * (n != 1)


@dataclass(slots=True)
class Visitor:
    """One client of an ASGI application. `on_chunk` is called with each piece of the
    body as it comes; after `leave_after` of them the client hangs up."""

    app: Any
    leave_after: int | None = None
    on_chunk: Callable[[bytes], None] = lambda chunk: None
    status: int = 0
    chunks: list[bytes] = field(default_factory=list)
    _body: bytes | None = None
    _left: asyncio.Event = field(default_factory=asyncio.Event)

    async def post(
        self, path: str, body: dict[str, Any], request_id: str = "visit"
    ) -> bytes:
        """The body of the answer, as far as it was read."""
        self._body = json.dumps(body).encode()
        await self.app(scope("POST", path, request_id), self._receive, self._send)
        return b"".join(self.chunks)

    async def get(self, path: str) -> int:
        """The status of the answer."""
        self._body = b""
        await self.app(scope("GET", path, "visit"), self._receive, self._send)
        return self.status

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("body"):
            self.chunks.append(message["body"])
            self.on_chunk(message["body"])
            if len(self.chunks) == self.leave_after:
                self._left.set()


def scope(method: str, path: str, request_id: str) -> dict[str, Any]:
    """What an ASGI server says of a request before its body."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"x-request-id", request_id.encode()),
        ],
        "client": ("here", 0),
        "server": ("here", 80),
    }
