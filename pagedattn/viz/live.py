"""A running engine's last steps, for a page that draws them.

Listens to the trace, and only while somebody has asked for frames lately: otherwise
the scheduler speaks to nobody and a step costs one comparison. A frame holds what
happened in a step, and of the books what events don't say: whose blocks are whose.
Requests appear as numbers, never by the ids that clients chose. Knows the engine's
books; knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from pagedattn.engine import Engine
from pagedattn.request import Request
from pagedattn.scheduler import Scheduler
from pagedattn.trace import silence

KEPT = 240  # frames at least, once there are so many
STRIDE = 60  # a frame with the whole books, so many frames after the last
WATCHED = 5.0  # seconds that a look keeps the film rolling
MOST_BLOCKS = 4_096  # of larger pools only these appear among the cached
MOST_WAITING = 250  # and these of a longer line
MOST_EVENTS = 2_000  # of one step; where there are more, the books say how it ended

Frame = dict[str, Any]
Row = tuple[int, int, Sequence[int]]


class Film:
    """The last frames, oldest first. One thread films, any thread may look.

    The first frame kept has `books`: how things stood after it. Each later frame tells
    what changed: `events` as (kind, request, blocks, amount, time), and as `rows` the
    tables that have changed, for each layer group (from, cut, ids): the ids stand from
    there on, and what lies before `cut` was given back.
    """

    def __init__(
        self,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called where a look finds no film rolling: a turn is wanted."""
        self._wake = wake
        self._clock = clock
        self._until = 0.0
        self._rolling = False
        self.step = 0  # turns taken since the start
        self._frames: list[Frame] = []  # replaced, never changed: others may look
        self._numbers: dict[str, int] = {}
        self._next = 1
        self._events: list[list[Any]] = []
        self._lost = False  # more happened than is kept
        self._since = 0  # frames since the last with books
        self._tables: dict[str, tuple[Sequence[int], ...]] = {}
        self._scheduler: Scheduler | None = None

    def look(self, after: int = 0) -> list[Frame]:
        """The frames of steps later than `after`; goes on filming for a while."""
        self._until = self._clock() + WATCHED
        if not self._rolling:
            self._wake()
        return [frame for frame in self._frames if frame["step"] > after]

    def after_step(self, engine: Engine) -> None:
        """Keep a frame of what has happened, if anybody is looking."""
        self.step += 1
        watched = self._clock() < self._until
        if watched and not self._rolling:
            self._start(engine.scheduler)
        elif self._rolling and not watched:
            self._stop(engine.scheduler)
        elif self._rolling and self._events:
            self._keep(self._frame(engine.scheduler))

    def _start(self, scheduler: Scheduler) -> None:
        self._rolling, self._scheduler, self._since = True, scheduler, STRIDE
        scheduler.trace_to(self._hear)
        self._keep(self._frame(scheduler))

    def _stop(self, scheduler: Scheduler) -> None:
        """Let go of everything but the step's number."""
        scheduler.trace_to(silence)
        self._rolling, self._scheduler, self._lost = False, None, False
        self._frames, self._events = [], []
        self._numbers, self._tables = {}, {}

    # What happens, as it happens.
    def _hear(
        self,
        kind: str,
        request: str | None = None,
        blocks: Iterable[int] = (),
        amount: int = 0,
    ) -> None:
        """Note an event; the same kind again lengthens a list of blocks."""
        events, ids = self._events, [*blocks]
        if kind == "free" and self._cached(ids):
            kind = "keep"
        number = None if request is None else self._number(request)
        if kind == "finish":
            del self._numbers[request]
        if kind == "admit":  # whatever it held before is no longer its
            self._tables.pop(request, None)
        if request is None and events and events[-1][0] == kind:
            events[-1][2] += ids
        elif len(events) < MOST_EVENTS:
            events.append([kind, number, ids, amount, round(self._clock(), 4)])
        else:
            self._lost = True

    def _cached(self, ids: list[int]) -> bool:
        assert self._scheduler is not None
        return all(self._scheduler.pool.blocks[id].key is not None for id in ids)

    def _number(self, id: str) -> int:
        if id not in self._numbers:
            self._numbers[id] = self._next
            self._next += 1
        return self._numbers[id]

    # How things stand.
    def _frame(self, scheduler: Scheduler) -> Frame:
        """What was heard since the last frame; where it is time, the books as well."""
        frame = {
            "step": self.step,
            "time": round(self._clock(), 4),
            "events": self._events,
            "rows": self._rows(scheduler),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free": len(scheduler.pool.free),
            "preemptions": scheduler.preemptions,
        }
        self._since += 1
        if self._lost or self._since >= STRIDE:
            frame["books"], self._since = self._books(scheduler), 0
        self._events, self._lost = [], False
        return frame

    def _rows(self, scheduler: Scheduler) -> dict[int, list[Row]]:
        """The tables that have changed since the last frame."""
        now = {r.id: scheduler.tables.ids(r) for r in scheduler.running}
        changed = {}
        for id, tables in now.items():
            old = self._tables.get(id, ((),) * len(tables))
            if any(ids is not known for ids, known in zip(tables, old, strict=True)):
                lengths = [len(known) for known in old]
                changed[self._number(id)] = _as_rows(tables, lengths)
        self._tables = now
        return changed

    def _books(self, scheduler: Scheduler) -> dict[str, Any]:
        """How things stand, on its own."""
        waiting = islice(scheduler.waiting, MOST_WAITING)
        free = scheduler.pool.free
        return {
            "size": scheduler.config.block_size,
            "pool": scheduler.pool.usable,
            "running": [self._state(request) for request in scheduler.running],
            "waiting": [self._state(request) for request in waiting],
            "tables": {
                self._number(id): _as_rows(tables, [0] * len(tables))
                for id, tables in self._tables.items()
            },
            "cached": [b.id for b in free if b.key and b.id <= MOST_BLOCKS],
        }

    def _state(self, request: Request) -> list[int]:
        number = self._number(request.id)
        return [number, request.prompt_len, request.num_tokens, request.computed]

    def _keep(self, frame: Frame) -> None:
        """Add a frame; the first one kept is always one with books."""
        frames = [*self._frames, frame]
        if len(frames) > KEPT + STRIDE:
            later = range(1, len(frames))
            frames = frames[next(i for i in later if "books" in frames[i]) :]
        self._frames = frames


def _as_rows(tables: Sequence[Sequence[int]], starts: Sequence[int]) -> list[Row]:
    """Of each table the ids from its start on, and how many null blocks lead it."""
    return [
        (start, next((i for i, id in enumerate(ids) if id), len(ids)), ids[start:])
        for ids, start in zip(tables, starts, strict=True)
    ]
