"""`/v1/messages`: what a chat's chunks say, as Anthropic's events and content blocks.

Knows the order of the events and the blocks' shapes; takes whole answers as streams of
one chunk. Knows nothing of engines or sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from pydantic_core import from_json

from pagedattn.serve.problems import ApiError
from pagedattn.serve.to_chat import new_id

Event = dict[str, Any]
REASONS: Mapping[str, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}


class Answer:
    """The message as it grows, and the events that tell how; one block at a time."""

    def __init__(self, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage({"prompt_tokens": 0, "completion_tokens": 0}),
        }
        self.block: Text | Thinking | ToolUse | None = None
        self._started = False
        self._ended = False

    def feed(self, chunk: Mapping[str, Any]) -> list[Event]:
        """The events that one chunk makes; the first chunk's begin the message."""
        if chunk.get("usage"):
            self.message["usage"] = _usage(chunk["usage"])
        events = [] if self._started else self._start()
        for choice in chunk["choices"]:
            events += self._delta(choice["delta"])
            if choice.get("finish_reason"):
                self._note(choice)
        return events

    def finish(self) -> list[Event]:
        """The last events; ApiError if the answer was cut off."""
        if not self._ended:
            raise ApiError(503, "The server ended this answer.")
        message = self.message
        events = [] if self._started else self._start()
        events += self._close()
        if any(block["type"] == "tool_use" for block in message["content"]):
            if message["stop_reason"] == "end_turn":  # a named tool: no choice
                message["stop_reason"] = "tool_use"
        delta = {k: message[k] for k in ("stop_reason", "stop_sequence")}
        usage = message["usage"]
        last = {"type": "message_delta", "delta": delta, "usage": usage}
        return [*events, last, {"type": "message_stop"}]

    def _start(self) -> list[Event]:
        self._started = True
        usage = {**self.message["usage"], "output_tokens": 0}
        head = {**self.message, "content": [], "usage": usage}
        return [{"type": "message_start", "message": head}, {"type": "ping"}]

    def _note(self, choice: Mapping[str, Any]) -> None:
        """Note why it stopped, if that is known to clients."""
        reason, stopped = choice["finish_reason"], choice.get("stop_reason")
        self._ended = reason in REASONS
        self.message["stop_reason"] = REASONS.get(reason)
        if reason == "stop" and isinstance(stopped, str):
            self.message.update(stop_reason="stop_sequence", stop_sequence=stopped)

    def _delta(self, delta: Mapping[str, Any]) -> list[Event]:
        events = []
        for kind, text in ((Thinking, "reasoning"), (Text, "content")):
            if delta.get(text):
                if not isinstance(self.block, kind):
                    events += self._open(kind())
                events.append(self._add(delta[text]))
        for i, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", i), call.get("function") or {}
            if not isinstance(self.block, ToolUse) or self.block.index != index:
                call_id = call.get("id") or new_id("toolu")
                events += self._open(
                    ToolUse(index, call_id, function.get("name") or "")
                )
            if function.get("arguments"):
                events.append(self._add(function["arguments"]))
        return events

    def _open(self, block: Text | Thinking | ToolUse) -> list[Event]:
        events = self._close()
        self.block = block
        self.message["content"].append(block.shown())
        start = self._event("content_block_start", content_block=block.shown())
        return [*events, start]

    def _add(self, text: str) -> Event:
        delta = self.block.add(text)
        return self._event("content_block_delta", delta=delta)

    def _close(self) -> list[Event]:
        if self.block is None:
            return []
        block, self.block = self.block, None
        self.message["content"][-1] = block.shown(ended=True)
        deltas = [self._event("content_block_delta", delta=d) for d in block.last()]
        return [*deltas, self._event("content_block_stop")]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.message["content"]) - 1, **fields}


class Text:
    """A block of text."""

    def __init__(self) -> None:
        self.text = ""

    def shown(self, ended: bool = False) -> dict[str, Any]:
        """The block as clients see it, empty until it has ended."""
        return {"type": "text", "text": self.text if ended else ""}

    def add(self, text: str) -> dict[str, Any]:
        """The delta of more text."""
        self.text += text
        return {"type": "text_delta", "text": text}

    def last(self) -> list[dict[str, Any]]:
        """Deltas before the end: none."""
        return []


class Thinking:
    """A block of thoughts. Its signature is a digest: clients must find one, and send
    it back, but nobody here has to trust it."""

    def __init__(self) -> None:
        self.text = ""

    def shown(self, ended: bool = False) -> dict[str, Any]:
        """The block as clients see it, empty until it has ended."""
        text, signature = (self.text, self._signature()) if ended else ("", "")
        return {"type": "thinking", "thinking": text, "signature": signature}

    def _signature(self) -> str:
        return sha256(self.text.encode()).hexdigest()

    def add(self, text: str) -> dict[str, Any]:
        """The delta of more thoughts."""
        self.text += text
        return {"type": "thinking_delta", "thinking": text}

    def last(self) -> list[dict[str, Any]]:
        """Deltas before the end: the signature."""
        return [{"type": "signature_delta", "signature": self._signature()}]


class ToolUse:
    """A call of a tool; `index` is its number among the chat's calls."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.index, self.arguments = index, ""
        self._head = {"type": "tool_use", "id": call_id, "name": name}

    def shown(self, ended: bool = False) -> dict[str, Any]:
        """The block as clients see it, without input until it has ended."""
        return {**self._head, "input": _input(self.arguments) if ended else {}}

    def add(self, text: str) -> dict[str, Any]:
        """The delta of more arguments."""
        self.arguments += text
        return {"type": "input_json_delta", "partial_json": text}

    def last(self) -> list[dict[str, Any]]:
        """Deltas before the end: none."""
        return []


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; of those that were cut, what is whole of them."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's usage in this endpoint's words: what was cached is counted apart."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
