"""What a parser says of a text: its content, and the calls in it, so far.

Knows nothing of any format. A parser is a pure function of the text so far and keeps
one promise: what it says of a text, it never takes back for a longer one. So it holds
back what may still become a call, and names a call only when it must be one.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]  # a tool's name -> its parameters' schema


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: `arguments` is JSON text, complete where the model completed it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a text says: words for the reader, calls for the tools."""

    content: str
    calls: tuple[ToolCall, ...] = ()


# (text so far, whether it has ended, the tools' schemas) -> what it says. What never
# became a call is content once the text has ended: nothing the model said is lost.
Parse = Callable[[str, bool, Schemas], Parsed]


def long_id() -> str:
    """A call's id as OpenAI and most models write it."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ToolParser:
    """A format: its function, the markers that may be special tokens, its ids."""

    parse: Parse
    markers: tuple[str, ...] = ()
    new_id: Callable[[], str] = long_id
