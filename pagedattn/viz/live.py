"""A running engine's last steps, for a page that draws them.

Looks at the books after a step, and only while somebody has asked for frames lately:
otherwise a step costs one comparison. Requests appear as numbers, never by the ids
that clients chose. Knows the engine's books; knows nothing of HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pagedattn.engine import Engine
from pagedattn.request import Request
from pagedattn.viz.pool import block_views

KEPT = 240  # frames
WATCHED = 5.0  # seconds that a look keeps the film rolling
MOST_BLOCKS = 4_096  # larger pools are shown up to here


class Film:
    """The last frames, oldest first. One thread films, any thread may look."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self._frames: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._numbers: dict[str, int] = {}
        self._next = 1
        self._step = 0

    def after_step(self, engine: Engine) -> None:
        """Keep a frame of how things stand, if anybody is looking."""
        self._step += 1
        if self._clock() < self._until:
            self._frames.append(self._frame(engine))

    def look(self, after: int = 0) -> list[dict[str, Any]]:
        """The frames of steps later than `after`; goes on filming for a while."""
        self._until = self._clock() + WATCHED
        return [frame for frame in tuple(self._frames) if frame["step"] > after]

    def _frame(self, engine: Engine) -> dict[str, Any]:
        scheduler, plan = engine.scheduler, engine.plan
        live = [*scheduler.running, *scheduler.waiting]
        self._number(live)
        number = self._numbers
        items = plan.items if plan else ()
        return {
            "step": self._step,
            "time": self._clock(),
            "running": [self._state(request) for request in scheduler.running],
            "waiting": [self._state(request) for request in scheduler.waiting],
            "plan": [
                [number[item.request_id], len(item.tokens)]
                for item in items
                if item.request_id in number
            ],
            "blocks": [
                [view.id, [number[h] for h in view.holders], view.used, view.cached]
                for view in block_views(scheduler)[:MOST_BLOCKS]
                if view.holders or view.cached
            ],
            "pool": min(scheduler.pool.usable, MOST_BLOCKS),
            "free": len(scheduler.pool.free),
            "size": scheduler.config.block_size,
            "preemptions": scheduler.preemptions,
        }

    def _number(self, live: list[Request]) -> None:
        """Give each live request a number and forget the others'."""
        known = {r.id: self._numbers.get(r.id) for r in live}
        for id, number in known.items():
            if number is None:
                known[id] = self._next
                self._next += 1
        self._numbers = known

    def _state(self, request: Request) -> list[int]:
        number = self._numbers[request.id]
        return [number, request.prompt_len, request.num_tokens, request.computed]
