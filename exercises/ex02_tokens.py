# Exercise 2 · Tokens: build it.
#
# This is pagedattn/text/stop.py without these bodies:
#
#     StopStrings._insert
#     StopStrings._link
#     StopStrings.step
#     StopMatcher.feed
#
# Each raises NotImplementedError. Its docstring is its contract: write the body here,
# in this file, and keep the signature.
#
#     make exercise N=2    the engine's own tests on your file, and one hint
#     make hint N=2        a hint alone
#     make reset N=2       this file as it was; yours is kept beside it
#     PAGEDATTN_STUDENT=2 make serve    the server, on your code
#
# The idea is in book/02_tokens.ipynb.
# One solution is pagedattn/text/stop.py itself.
#
# Made from pagedattn/text/stop.py by exercises/tools.py. Untouched: 7cd0723c2b56

"""Stop strings: found as text streams by, one character at a time.

Knows the Aho-Corasick automaton: its state is the longest end of the text that begins
some stop string, which is exactly what must not be shown yet. Does not know tokens.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Node:
    """The text that some stop strings begin with; `fail`: its longest end that is a
    node too; `stop`: index of the first-listed stop string that ends here; `hold`:
    how much of it may still grow into a stop string."""

    depth: int
    next: dict[str, int]
    fail: int = 0
    stop: int | None = None
    hold: int = 0


class StopStrings:
    """The automaton of a list of non-empty stop strings. Immutable once built.

    Building takes time and space proportional to their total length.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "empty stop strings are refused by SamplingParams"
        self.strings = tuple(strings)
        self._nodes = [_Node(0, {})]
        for index, string in enumerate(self.strings):
            self._insert(index, string)
        self._link()

    def _insert(self, index: int, string: str) -> None:
        raise NotImplementedError("exercise 2: StopStrings._insert")

    def _link(self) -> None:
        """Fail links, breadth first: a node's fail is nearer the root, so is done."""
        raise NotImplementedError("exercise 2: StopStrings._link")

    def step(self, state: int, char: str) -> int:
        """The state after `char`; amortised constant time."""
        raise NotImplementedError("exercise 2: StopStrings.step")

    def stop_at(self, state: int) -> str | None:
        """The first-listed stop string that ends in this state, or None."""
        index = self._nodes[state].stop
        return None if index is None else self.strings[index]

    def hold_at(self, state: int) -> int:
        """How many last characters may still become a stop string: no more, no less."""
        return self._nodes[state].hold


class StopMatcher:
    """One text streaming through `StopStrings`.

    `feed` releases what can no longer become part of a match. The match that
    completes first wins; of several that complete at one character, the first listed.
    """

    def __init__(self, stops: StopStrings, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""

    def feed(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Take `text`; return what it releases and the stop string it completes.

        A match ends the text: what follows it is dropped, and the stop string itself
        too, unless `include`. With `armed` False a match completed in `text` passes
        by unseen, but a beginning in it still counts later.
        """
        raise NotImplementedError("exercise 2: StopMatcher.feed")

    def flush(self) -> str:
        """The text still held: nothing follows, so none of it becomes a match."""
        held, self._held = self._held, ""
        return held
