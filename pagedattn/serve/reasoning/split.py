"""What a reasoning parser promises, and the walk that tag formats share.

Knows texts and markers; no format. As with tool calls: what was said of a text is
never taken back for a longer one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagedattn.serve.tools.calls import Parse
from pagedattn.serve.tools.marked import free

# (text so far, whether it has ended) -> (reasoning, the rest, for the tool parser).
Split = Callable[[str, bool], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """A format. `opens` and `closes` stand around the reasoning, also in prompts;
    `plain` reads the rest where no tool parser does: None, it is the content."""

    split: Split
    opens: str
    closes: str
    markers: tuple[str, ...] = ()
    plain: Parse | None = None


def until(text: str, final: bool, opens: str, closes: str) -> tuple[str, str]:
    """Reasoning is all up to `closes`; an `opens` at the beginning is dropped."""
    begun = text.lstrip()
    if begun.startswith(opens):
        text = begun[len(opens) :]
    elif opens.startswith(begun) and not final:
        return "", ""
    return cut(text, final, closes)


def cut(text: str, final: bool, closes: str) -> tuple[str, str]:
    """What stands before and behind `closes`."""
    before, marker, after = text.partition(closes)
    if marker or final:
        return before, after
    return free(text, (closes,)), ""
