"""From what a text says so far to what a stream still has to say of it.

Knows the shape of OpenAI's deltas and what was sent already; nothing of formats. What
was sent is never sent again and never taken back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedattn.serve.tools.calls import ToolCall

log = logging.getLogger("pagedattn.serve")


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer says, so far or in the end."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


class Deltas:
    """One choice's stream: what of it was sent."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._content = self._reasoning = ""
        self._arguments: list[str] = []

    def take(self, said: Said) -> dict[str, Any]:
        """The delta from what was sent to `said`; empty where nothing is new."""
        delta: dict[str, Any] = {}
        if reasoning := _new(self._reasoning, said.reasoning):
            delta["reasoning"] = reasoning
            self._reasoning += reasoning
        if content := _new(self._content, said.content):
            delta["content"] = content
            self._content += content
        calls = [self._call(i, call) for i, call in enumerate(said.calls)]
        if any(calls):
            delta["tool_calls"] = [call for call in calls if call]
        return delta

    def _call(self, index: int, call: ToolCall) -> dict[str, Any] | None:
        """A call's first delta names it, the later ones add to its arguments."""
        if index == len(self._arguments):
            self._arguments.append(call.arguments)
            return call_object(call, self._new_id(), index)
        more = _new(self._arguments[index], call.arguments)
        self._arguments[index] += more
        return {"index": index, "function": {"arguments": more}} if more else None


def call_object(call: ToolCall, id: str, index: int | None = None) -> dict[str, Any]:
    """A call as OpenAI writes it; with its index in streams."""
    function = {"name": call.name, "arguments": call.arguments}
    place = {} if index is None else {"index": index}
    return {**place, "id": id, "type": "function", "function": function}


def _new(sent: str, so_far: str) -> str:
    """What `so_far` adds; a parser that takes something back is not followed."""
    if so_far.startswith(sent):
        return so_far[len(sent) :]
    if not sent.startswith(so_far):
        log.warning("a parser took back what it had said; its change is left out")
    return ""
