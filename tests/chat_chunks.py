"""Chats' answers, whole and cut into chunks anywhere, and what replays their events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from pagedattn.serve.front import usage

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.dictionaries(st.sampled_from("abc"), st.integers() | TEXTS, max_size=3)


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer says."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    reason: str

    def completion(self) -> dict[str, Any]:
        """The whole answer."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": f"call_{i}", "type": "function", "function": function(*call)}
                for i, call in enumerate(self.calls)
            ]
        choice = {"index": 0, "logprobs": None, "finish_reason": self.reason}
        choice |= {"stop_reason": None, "message": message}
        return {"choices": [choice], "usage": usage(7, 5, 0)}


def function(name: str, arguments: str) -> dict[str, str]:
    """A call as chats say it."""
    return {"name": name, "arguments": arguments}


@st.composite
def answers(draw: st.DrawFn) -> Said:
    """Any answer: thoughts, words and calls, each of them or none."""
    names = st.sampled_from(["now", "add"])
    call = st.tuples(names, VALUES.map(json.dumps))
    calls = draw(st.lists(call, max_size=3))
    reason = draw(st.sampled_from(["tool_calls" if calls else "stop", "length"]))
    return Said(draw(TEXTS), draw(TEXTS), tuple(calls), reason)


@st.composite
def cuts(draw: st.DrawFn, said: Said) -> list[dict[str, Any]]:
    """The chunks of an answer, its texts cut anywhere, empty chunks in between."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": part} for part in draw(pieces(said.reasoning))]
    deltas += [{"content": part} for part in draw(pieces(said.content))]
    for i, (name, arguments) in enumerate(said.calls):
        first, *rest = draw(pieces(arguments)) or [""]
        head = {"index": i, "id": f"call_{i}", "type": "function"}
        deltas.append({"tool_calls": [{**head, "function": function(name, first)}]})
        deltas += [
            {"tool_calls": [{"index": i, "function": {"arguments": part}}]}
            for part in rest
        ]
    at = draw(st.integers(0, len(deltas)))
    deltas.insert(at, {"content": ""})
    choices = [{"index": 0, "delta": d, "finish_reason": None} for d in deltas]
    end = {"index": 0, "delta": {}, "finish_reason": said.reason, "stop_reason": None}
    chunks = [{"choices": [c], "usage": usage(7, 1, 0)} for c in [*choices, end]]
    return [*chunks, {"choices": [], "usage": usage(7, 5, 0)}]


def pieces(text: str) -> st.SearchStrategy[list[str]]:
    """`text` cut at any places."""
    places = st.sets(st.integers(1, max(len(text) - 1, 1)), max_size=5)
    return places.map(lambda at: _cut(text, sorted(at)))


def _cut(text: str, at: list[int]) -> list[str]:
    ends = [0, *at, len(text)]
    parts = [text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    return [part for part in parts if part]


def replay_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that the events add up to; AssertionError if their order is wrong.

    It must be what the last event says, item by item.
    """
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    kinds = [e["type"] for e in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    is_open = part_open = False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items)
            items.append(event["item"] | {"said": ""})
            is_open, part_open = True, False
            assert event["item"]["status"] == "in_progress"
            continue
        item = items[-1]
        assert is_open and event["output_index"] == len(items) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        text = item["type"] != "function_call"
        if kind == "content_part.added":
            assert text and not part_open
            part_open = True
        elif kind.endswith(".delta"):
            assert part_open or not text
            item["said"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert part_open and event["text"] == item["said"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == item["said"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == item["said"]
            part_open = False
        else:
            assert kind == "output_item.done" and not part_open
            assert event["item"]["id"] == item["id"]
            is_open = False
            items[-1] = event["item"]
    assert not is_open
    response = events[-1]["response"]
    assert kinds[-1] == "response." + response["status"]
    assert response["output"] == items
    return response


def replay_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events add up to; AssertionError if their order is wrong."""
    assert [e["type"] for e in events[:2]] == ["message_start", "ping"]
    assert [e["type"] for e in events[-2:]] == ["message_delta", "message_stop"]
    message, blocks, is_open = events[0]["message"], [], False
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
            is_open = True
            continue
        assert is_open and event["index"] == len(blocks) - 1
        if event["type"] == "content_block_stop":
            is_open = False
            continue
        assert event["type"] == "content_block_delta"
        _grow(blocks[-1], event["delta"])
    assert not is_open
    for block in blocks:
        arguments = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments or "{}")
    end = events[-2]
    return {**message, "content": blocks, **end["delta"], "usage": end["usage"]}


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            assert block["signature"] == ""
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            assert block["type"] == "tool_use"
            block["json"] += delta["partial_json"]
        case kind:
            raise AssertionError(kind)
