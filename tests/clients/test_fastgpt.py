"""FastGPT, by the calls that its source makes with OpenAI's library for Node.

labring/FastGPT, packages/service/core/ai: llm/request/requestBody.ts,
createChatCompletion.ts and response/stream.ts, embedding/index.ts, rerank/index.ts. The
library (6.49.0) was given these bodies through a recording proxy; headers are its own.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import Demo
from .replay import (
    ARGUMENTS,
    CHAT,
    EMBED,
    QUESTION,
    RERANK,
    TOOL,
    WIDTH,
    WISH,
    answer,
    stream,
)

NODE = {
    "User-Agent": "OpenAI/JS 6.49.0",
    "Accept": "application/json, text/plain, */*",
    "Accept-Language": "*",
    "Sec-Fetch-Mode": "cors",
    "X-Stainless-Retry-Count": "0",
    "X-Stainless-Lang": "js",
    "X-Stainless-Package-Version": "6.49.0",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Runtime": "node",
    "X-Stainless-Runtime-Version": "v20.20.2",
}
TOOLED = {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}


def read(text: str) -> dict[str, Any]:
    """utils.ts, parseLLMStreamResponse, and response/stream.ts: thoughts are read as
    reasoning_content and by no other name; a call starts with the whole name of a tool
    that was sent, and what follows is added to the call of its index."""
    said: dict[str, Any] = {"content": "", "thought": "", "calls": {}, "usage": None}
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        part = json.loads(event.removeprefix("data: "))
        said["usage"] = part.get("usage") or said["usage"]
        for choice in part["choices"][:1]:
            said["reason"] = choice.get("finish_reason") or said.get("reason")
            _take(said, choice["delta"])
    return said


def _take(said: dict[str, Any], delta: dict[str, Any]) -> None:
    said["content"] += delta.get("content") or ""
    said["thought"] += delta.get("reasoning_content") or ""
    for part in delta.get("tool_calls") or []:
        function = part["function"]
        if function.get("name"):
            assert function["name"] == TOOL["function"]["name"]
            said["calls"][part["index"]] = {**function, "id": part["id"]}
        else:
            said["calls"][part["index"]]["arguments"] += function["arguments"]


@pytest.fixture
def client(demo: Demo) -> Iterator[httpx.Client]:
    with demo.http(**NODE) as client:
        yield client


# projects/app/src/pages/api/core/ai/model/test.ts: any text at all will do.
def test_models_are_tried(demo: Demo, client: httpx.Client) -> None:
    hi = {"role": "user", "content": "hi"}
    assert read(stream(client, {"messages": [hi], "model": demo.model}))["content"]
    body = {"model": demo.model, "input": ["Hi"], "encoding_format": "float"}
    assert answer(client, EMBED, body)["data"][0]["embedding"]


def test_chat_is_streamed(demo: Demo, client: httpx.Client) -> None:
    body = {"messages": [QUESTION], "model": demo.model, "max_tokens": 12}
    body |= {"temperature": 0.01, "top_p": 0.01, "stop": ["STOP", "END"]}
    said = read(stream(client, {**body, "stream_options": {"include_usage": True}}))
    assert "Paris" in said["content"] and said["reason"] == "stop"
    assert said["usage"]["prompt_tokens"] and said["usage"]["completion_tokens"] == 8


# response/complete.ts: content, finish_reason and usage.
def test_chat_without_a_stream(demo: Demo, client: httpx.Client) -> None:
    body = {"messages": [QUESTION], "model": demo.model, "temperature": 0.01}
    found = answer(client, CHAT, {**body, "max_tokens": 12, "stream": False})
    assert "Paris" in found["choices"][0]["message"]["content"]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 8


# functions/createQuestionGuide.ts: what to ask next, without a thought before it.
def test_question_guide(musing: Demo) -> None:
    asked = {"role": "user", "content": "Give 3 questions as a JSON array."}
    turns = [QUESTION, {"role": "assistant", "content": "Paris."}, asked]
    body = {"model": musing.model, "messages": turns, "temperature": 0.01}
    with musing.http(**NODE) as client:
        said = read(stream(client, {**body, "reasoning_effort": "none"}))
    assert said["content"] and said["thought"] == ""


def test_tools_are_called(tooled: Demo) -> None:
    body = {"messages": [WISH], "model": tooled.model, "temperature": 0.01, **TOOLED}
    body |= {"max_tokens": 60, "stream_options": {"include_usage": True}}
    with tooled.http(**NODE) as client:
        assert read(stream(client, body))["content"]
        said = read(stream(client, {**body, "tool_choice": "required"}))
        call = said["calls"][0]
        assert call["id"] and json.loads(call["arguments"])
        assert said["reason"] == "tool_calls"
        # response/complete.ts keeps calls whose type is "function".
        whole = answer(client, CHAT, {**body, **_whole(), "tool_choice": "required"})
    (made, *_) = whole["choices"][0]["message"]["tool_calls"]
    assert made["type"] == "function" and made["id"]


FUNCTION = {"name": "get_weather", "arguments": ARGUMENTS}
MADE = [{"id": "bQ2kdmvQk1", "type": "function", "function": FUNCTION}]
ONE_TURN = (  # llm/request/createLLMResponse.ts: what is empty is left out
    {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": MADE},
)
TWO_TURNS = (  # the older llm/request.ts
    {"role": "assistant", "content": "", "reasoning_text": "Hm."},
    {"role": "assistant", "tool_calls": MADE},
)


@pytest.mark.parametrize("turns", [ONE_TURN, TWO_TURNS])
def test_results_of_tools_are_sent(
    tooled: Demo, turns: tuple[dict[str, Any], ...]
) -> None:
    result = {"role": "tool", "tool_call_id": "bQ2kdmvQk1", "content": "21"}
    messages = [WISH, *turns, result]
    body = {"messages": messages, "model": tooled.model, "max_tokens": 12, **TOOLED}
    with tooled.http(**NODE) as client:
        assert read(stream(client, {**body, "temperature": 0.01}))["content"]


def _whole() -> dict[str, Any]:
    return {"stream": False, "stream_options": None}


def test_thoughts_are_read(musing: Demo) -> None:
    body = {"model": musing.model, "messages": [QUESTION], "temperature": 0}
    with musing.http(**NODE) as client:
        said = read(stream(client, body))
        message = answer(client, CHAT, body)["choices"][0]["message"]
    assert "Paris" in said["thought"] and said["content"] == ""
    assert message["reasoning_content"] == said["thought"]


# embedding/index.ts asks for floats; the library itself, not told, asks for base64.
def test_knowledge_is_embedded(demo: Demo, client: httpx.Client) -> None:
    texts = ["a cat", "Instruct: find animals\nQuery: a dog"]
    body = {"model": demo.model, "input": texts}
    floats = answer(client, EMBED, {**body, "encoding_format": "float"})
    assert floats["usage"]["total_tokens"] > 4
    packed = answer(client, EMBED, {**body, "encoding_format": "base64"})
    for one, other in zip(floats["data"], packed["data"], strict=True):
        raw = base64.b64decode(other["embedding"])
        assert list(struct.unpack(f"<{WIDTH}f", raw)) == pytest.approx(one["embedding"])


# rerank/index.ts: no top_n; results come best first.
def test_rerank(demo: Demo, client: httpx.Client) -> None:
    documents = ["a dog", "a cat"]
    body = {"model": demo.model, "query": "cat", "documents": documents}
    found = answer(client, RERANK, body)
    assert found["id"] and [r["index"] for r in found["results"]] == [1, 0]
    assert all(isinstance(r["relevance_score"], float) for r in found["results"])


# The library makes its errors of error.message, by the status.
def test_errors_are_shown(demo: Demo, client: httpx.Client) -> None:
    reply = client.post(CHAT, json={"model": demo.model, "messages": []})
    assert reply.status_code == 400 and reply.json()["error"]["message"]
