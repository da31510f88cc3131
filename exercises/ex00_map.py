# Exercise 0 · The map: build it.
#
# This is pagedattn/trace.py without these bodies:
#
#     Recorder.emit
#     Recorder.tick
#
# Each raises NotImplementedError. Its docstring is its contract: write the body here,
# in this file, and keep the signature.
#
#     make exercise N=0    the engine's own tests on your file, and one hint
#     make hint N=0        a hint alone
#     make reset N=0       this file as it was; yours is kept beside it
#     PAGEDATTN_STUDENT=0 make serve    the server, on your code
#
# The idea is in book/00_map.ipynb.
# One solution is pagedattn/trace.py itself.
#
# Made from pagedattn/trace.py by exercises/tools.py. Untouched: 406c791e5968

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
        raise NotImplementedError("exercise 0: Recorder.emit")

    def tick(self) -> None:
        """The events that follow belong to the next step."""
        raise NotImplementedError("exercise 0: Recorder.tick")
