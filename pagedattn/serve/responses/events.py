"""`/v1/responses`: what a chat's chunks say, as events and as output items.

Knows the order of OpenAI's events and the shapes of its items; takes whole answers as
streams of one chunk. Knows nothing of engines, stores or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pagedattn.serve.problems import ApiError
from pagedattn.serve.to_chat import new_id

Event = dict[str, Any]


class Answer:
    """The response object as it grows, and the events that tell how.

    `response` is always what a client would be shown now. Items follow each other:
    one that has begun ends before the next begins.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self.item: Text | Reasoning | Call | None = None
        self.reason: str | None = None
        self._sequence = 0
        self._lps: list[dict[str, Any]] = []  # of tokens that have no text yet

    def start(self) -> list[Event]:
        """The first events: nothing is said yet."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self.snapshot()) for kind in kinds]

    def feed(self, chunk: Mapping[str, Any]) -> list[Event]:
        """The events that one chunk makes, none for most that carry only usage."""
        if chunk.get("usage"):
            self.response["usage"] = _usage(chunk["usage"])
        events = []
        for choice in chunk["choices"]:
            events += self._delta(choice["delta"], choice.get("logprobs"))
            self.reason = choice.get("finish_reason") or self.reason
        return events

    def finish(self) -> list[Event]:
        """The last events: completed, or incomplete for want of tokens."""
        if self.reason == "length":
            details = {"reason": "max_output_tokens"}
            return self._end("incomplete", incomplete_details=details)
        if self.reason in ("stop", "tool_calls"):
            return self._end("completed", completed_at=int(time.time()))
        return self.fail(ApiError(503, "The server ended this answer."))

    def fail(self, problem: ApiError) -> list[Event]:
        """The last events where something went wrong."""
        error = {"code": "server_error", "message": problem.body()["error"]["message"]}
        return self._end("failed", error=error)

    def cancel(self) -> None:
        """End it as a client asked; there is no event for that."""
        self._end("cancelled")

    def snapshot(self) -> dict[str, Any]:
        """The response as it stands, safe from what comes."""
        return {**self.response, "output": list(self.response["output"])}

    def _end(self, status: str, **fields: Any) -> list[Event]:
        whole = "completed" if status == "completed" else "incomplete"
        events = self._close(whole)
        self.response.update(status=status, **fields)
        last = self._event(f"response.{status}", response=self.snapshot())
        return [*events, last]

    # One delta: reasoning, then text, then calls.
    def _delta(self, delta: Mapping[str, Any], lps: Any) -> list[Event]:
        events = []
        if delta.get("reasoning"):
            events += self._say(Reasoning, delta["reasoning"], [])
        elif not delta.get("tool_calls"):
            self._lps += _logprobs(lps)
        text = delta.get("content") or ""
        if text or (self._lps and isinstance(self.item, Text)):
            lps, self._lps = self._lps, []
            events += self._say(Text, text, lps)
        return events + self._calls(delta)

    def _say(
        self, kind: type[Text] | type[Reasoning], text: str, lps: list[Any]
    ) -> list[Event]:
        events = [] if isinstance(self.item, kind) else self._open(kind())
        return events + self._events(self.item.add(text, lps))

    def _calls(self, delta: Mapping[str, Any]) -> list[Event]:
        events = []
        for i, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", i), call.get("function") or {}
            if not isinstance(self.item, Call) or self.item.index != index:
                call_id = call.get("id") or new_id("call")
                events += self._open(Call(index, call_id, function.get("name") or ""))
            if function.get("arguments"):
                events += self._events(self.item.add(function["arguments"]))
        return events

    def _open(self, item: Text | Reasoning | Call) -> list[Event]:
        events = self._close("completed")
        self.item = item
        self.response["output"].append(item.shown("in_progress"))
        return events + self._events(item.first())

    def _close(self, status: str) -> list[Event]:
        if self.item is None:
            return []
        item, self.item = self.item, None
        shown = item.shown(status)
        events = self._events(item.last(shown))
        self.response["output"][-1] = shown
        return events

    def _events(self, parts: list[tuple[str, dict[str, Any]]]) -> list[Event]:
        at = len(self.response["output"]) - 1
        return [self._event(kind, output_index=at, **fields) for kind, fields in parts]

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


Part = tuple[str, dict[str, Any]]


class Text:
    """A message of one text."""

    def __init__(self) -> None:
        self.id, self.text, self.logprobs = new_id("msg"), "", []
        self._at = {"item_id": self.id, "content_index": 0}

    def shown(self, status: str) -> dict[str, Any]:
        """The item as clients see it."""
        content = [] if status == "in_progress" else [self._part(self.text)]
        item = {"id": self.id, "type": "message", "status": status}
        return {**item, "role": "assistant", "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        lps = list(self.logprobs) if text else []
        return {"type": "output_text", "annotations": [], "logprobs": lps, "text": text}

    def first(self) -> list[Part]:
        """Events before its first delta."""
        return [
            ("response.output_item.added", {"item": self.shown("in_progress")}),
            ("response.content_part.added", {**self._at, "part": self._part("")}),
        ]

    def add(self, text: str, lps: list[dict[str, Any]]) -> list[Part]:
        """Events of more text."""
        self.text += text
        self.logprobs += lps
        fields = {**self._at, "delta": text, "logprobs": lps}
        return [("response.output_text.delta", fields)]

    def last(self, shown: dict[str, Any]) -> list[Part]:
        """Events after its last delta."""
        part = shown["content"][0]
        said = {"text": self.text, "logprobs": part["logprobs"]}
        return [
            ("response.output_text.done", {**self._at, **said}),
            ("response.content_part.done", {**self._at, "part": part}),
            ("response.output_item.done", {"item": shown}),
        ]


class Reasoning:
    """What the model thought, in plain words."""

    def __init__(self) -> None:
        self.id, self.text = new_id("rs"), ""
        self._at = {"item_id": self.id, "content_index": 0}

    def shown(self, status: str) -> dict[str, Any]:
        """The item as clients see it."""
        content = [] if status == "in_progress" else [self._part(self.text)]
        item = {"id": self.id, "type": "reasoning", "status": status}
        return {**item, "summary": [], "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def first(self) -> list[Part]:
        """Events before its first delta."""
        return [
            ("response.output_item.added", {"item": self.shown("in_progress")}),
            ("response.content_part.added", {**self._at, "part": self._part("")}),
        ]

    def add(self, text: str, lps: list[dict[str, Any]]) -> list[Part]:
        """Events of more reasoning; log-probabilities are told of text alone."""
        self.text += text
        return [("response.reasoning_text.delta", {**self._at, "delta": text})]

    def last(self, shown: dict[str, Any]) -> list[Part]:
        """Events after its last delta."""
        return [
            ("response.reasoning_text.done", {**self._at, "text": self.text}),
            ("response.content_part.done", {**self._at, "part": shown["content"][0]}),
            ("response.output_item.done", {"item": shown}),
        ]


class Call:
    """A call of one function; `index` is its number among the chat's calls."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.id, self.index, self.arguments = new_id("fc"), index, ""
        self._head = {"id": self.id, "type": "function_call", "call_id": call_id}
        self._name = name

    def shown(self, status: str) -> dict[str, Any]:
        """The item as clients see it."""
        fields = {"name": self._name, "arguments": self.arguments, "status": status}
        return {**self._head, **fields}

    def first(self) -> list[Part]:
        """Events before its first delta."""
        return [("response.output_item.added", {"item": self.shown("in_progress")})]

    def add(self, text: str) -> list[Part]:
        """Events of more arguments."""
        self.arguments += text
        fields = {"item_id": self.id, "delta": text}
        return [("response.function_call_arguments.delta", fields)]

    def last(self, shown: dict[str, Any]) -> list[Part]:
        """Events after its last delta."""
        fields = {"item_id": self.id, "name": self._name, "arguments": self.arguments}
        return [
            ("response.function_call_arguments.done", fields),
            ("response.output_item.done", {"item": shown}),
        ]


def _logprobs(lps: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return list((lps or {}).get("content") or [])


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's usage in this endpoint's words."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    details = usage.get("completion_tokens_details") or {}
    thought = details.get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["total_tokens"],
    }
