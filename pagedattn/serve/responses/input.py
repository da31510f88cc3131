"""`/v1/responses`: input items, and output items that come back, as chat messages.

Knows the items' shapes; nothing of the store they may come from, or of answers.
"""

from __future__ import annotations

from typing import Any

from pagedattn.serve.to_chat import list_of, new_id, object_of, refuse, text_of

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def input_items(value: Any) -> list[Item]:
    """`input` as items, whichever of its two forms it has; 400 if it is neither."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        refuse("input", "must be a string or a list of items, and not empty")
    return [_item(object_of(item, f"input[{i}]")) for i, item in enumerate(value)]


def _item(item: Item) -> Item:
    """An item as it is kept and told: with a type and an id, its text in a part."""
    item = {"id": new_id("item"), "type": "message", **item}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return item


def to_messages(items: list[Item], instructions: str | None = None) -> list[Item]:
    """The chat that the items are; 400 that names the first item that can't be.

    Reasoning, text and calls that follow each other are one assistant's message.
    """
    chat = _Chat()
    if instructions:
        chat.messages.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        chat.add(item, f"input[{i}]")
    return chat.messages


class _Chat:
    """Messages so far; `turn` is the assistant's that may still grow."""

    def __init__(self) -> None:
        self.messages: list[Item] = []
        self.turn: Item | None = None
        self.calls: set[str] = set()

    def add(self, item: Item, where: str) -> None:
        """Add one item."""
        match item.get("type", "message"):
            case "message":
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._output(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case kind:
                refuse(f"{where}.type", f"{str(kind)[:40]!r} is not supported")

    def _message(self, item: Item, where: str) -> None:
        role = item.get("role")
        if role not in ROLES:
            refuse(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        text = joined(item.get("content"), f"{where}.content")
        if role != "assistant":
            self._close({"role": role, "content": text})
            return
        self._open("content", "tool_calls")["content"] = text

    def _call(self, item: Item, where: str) -> None:
        call_id = text_of(item.get("call_id"), f"{where}.call_id")
        function = {
            "name": text_of(item.get("name"), f"{where}.name"),
            "arguments": text_of(item.get("arguments"), f"{where}.arguments"),
        }
        self.calls.add(call_id)
        calls = self._open().setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _output(self, item: Item, where: str) -> None:
        call_id = text_of(item.get("call_id"), f"{where}.call_id")
        if call_id not in self.calls:
            refuse(f"{where}.call_id", "answers no function_call before it")
        text = joined(item.get("output"), f"{where}.output")
        self._close({"role": "tool", "tool_call_id": call_id, "content": text})

    def _reasoning(self, item: Item, where: str) -> None:
        parts = item.get("content") or item.get("summary") or []
        text = joined(parts, f"{where}.content")
        if text:
            self._open("content", "tool_calls", "reasoning")["reasoning"] = text

    def _open(self, *filled: str) -> Item:
        """The assistant's turn; a new one if any of `filled` is there already."""
        if self.turn is None or any(self.turn.get(name) for name in filled):
            self.turn = {"role": "assistant", "content": None}
            self.messages.append(self.turn)
        return self.turn

    def _close(self, message: Item) -> None:
        self.turn = None
        self.messages.append(message)


def joined(content: Any, where: str) -> str:
    """The text of a string or of parts; 400 for parts that are none."""
    if isinstance(content, str):
        return content
    parts = list_of(content, where)
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(parts))


def _part(part: Any, where: str) -> str:
    kind = object_of(part, where).get("type")
    if kind in _TEXTS:
        return text_of(part.get("text"), f"{where}.text")
    if kind == "refusal":
        return text_of(part.get("refusal"), f"{where}.refusal")
    refuse(f"{where}.type", f"{str(kind)[:40]!r} is not supported, only text")
