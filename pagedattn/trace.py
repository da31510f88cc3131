"""What happened, event by event: the record that pictures and time travel read.

Blocks, tables and the scheduler emit events; this module keeps them and knows
nothing of what they mean or how they are drawn. Built in chapter 00.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Emit = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in step `step`; `amount` counts tokens."""

    step: int
    kind: str
    request: str | None
    blocks: tuple[int, ...]
    amount: int


def silence(
    kind: str, request: str | None = None, blocks: Iterable[int] = (), amount: int = 0
) -> None:
    """The emitter of an engine that nobody watches."""


class Recorder:
    """Keeps every event. `emit` goes where an emitter is wanted; `tick` ends a step."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.step = 0

    def emit(
        self,
        kind: str,
        request: str | None = None,
        blocks: Iterable[int] = (),
        amount: int = 0,
    ) -> None:
        """Record one event of the current step."""
        self.events.append(Event(self.step, kind, request, tuple(blocks), amount))

    def tick(self) -> None:
        """The events that follow belong to the next step."""
        self.step += 1
