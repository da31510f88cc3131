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
        at = 0
        for char in string:
            node = self._nodes[at]
            if char not in node.next:
                node.next[char] = len(self._nodes)
                self._nodes.append(_Node(node.depth + 1, {}))
            at = node.next[char]
        if self._nodes[at].stop is None:
            self._nodes[at].stop = index

    def _link(self) -> None:
        """Fail links, breadth first: a node's fail is nearer the root, so is done."""
        queue = deque(self._nodes[0].next.values())
        while queue:
            node = self._nodes[queue.popleft()]
            fail = self._nodes[node.fail]
            ends = [n.stop for n in (node, fail) if n.stop is not None]
            node.stop = min(ends, default=None)
            node.hold = node.depth if node.next else fail.hold
            for char, child in node.next.items():
                self._nodes[child].fail = self.step(node.fail, char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after `char`; amortised constant time."""
        while char not in (node := self._nodes[state]).next:
            if state == 0:
                return 0
            state = node.fail
        return node.next[char]

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
        pending = self._held + text
        for at, char in enumerate(text, len(self._held) + 1):
            self._state = self._stops.step(self._state, char)
            if armed and (stop := self._stops.stop_at(self._state)) is not None:
                self._held = ""
                return pending[: at if self._include else at - len(stop)], stop
        cut = len(pending) - self._stops.hold_at(self._state)
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """The text still held: nothing follows, so none of it becomes a match."""
        held, self._held = self._held, ""
        return held
