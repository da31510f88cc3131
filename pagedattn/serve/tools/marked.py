"""The walk that formats share: words, a marker, a block of calls, words, and so on.

Knows which text is certain to be words; what stands in a block its reader knows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from pagedattn.serve.tools.calls import Parsed, ToolCall
from pagedattn.serve.tools.jsontext import skip_space

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Block:
    """What stands after a marker. `end` is None while it goes on; a `broken` one holds
    no more calls, and what remains of it is nobody's."""

    calls: tuple[ToolCall, ...] = ()
    end: int | None = None
    broken: bool = False


# (text, where the marker begins, where it ends) -> its block; None: it is no marker.
Read = Callable[[str, int, int], Block | None]


def marked(
    text: str,
    final: bool,
    marker: re.Pattern[str],
    read: Read,
    partial: tuple[str, ...] = (),
    between: str = SPACE,
) -> Parsed:
    """Words and calls of `text`. `partial`: markers whose beginnings are held back;
    `between`: characters that alone between calls are no words."""
    words: list[str] = []
    calls: list[ToolCall] = []
    start = search = 0
    while (match := marker.search(text, search)) is not None:
        block = read(text, match.start(), match.end())
        if block is None or _never(block, final):
            search = match.start() + 1
            continue
        words.append(text[start : match.start()])
        calls += block.calls
        start = search = _after(text, block, marker, match.end())
    if start <= len(text):
        words.append(text[start:] if final else free(text[start:], partial))
    whole = final and not calls
    kept = (w for w in words if whole or w.strip(between))
    return Parsed("".join(kept), tuple(calls))


def _never(block: Block, final: bool) -> bool:
    """Whether a block that had not begun to be one never will."""
    return final and block.end is None and not block.calls


def _after(text: str, block: Block, marker: re.Pattern[str], at: int) -> int:
    """Where words go on; beyond the text if they don't."""
    if block.broken:
        again = marker.search(text, at)
        return len(text) + 1 if again is None else again.start()
    return len(text) + 1 if block.end is None else block.end


def free(text: str, markers: tuple[str, ...]) -> str:
    """`text` without an end that may become one of the markers."""
    return text[: len(text) - max((_begun(text, m) for m in markers), default=0)]


def _begun(text: str, marker: str) -> int:
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(marker[:n])), 0)


def closed(text: str, at: int, closer: str) -> int | None:
    """Where a block ends whose calls end at `at`: after its closer, if it has one;
    None while that can't be known."""
    stands = skip_space(text, at)
    if text.startswith(closer, stands):
        return stands + len(closer)
    return None if closer.startswith(text[stands:]) else at
