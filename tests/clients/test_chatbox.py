"""Chatbox, by the calls of the libraries that its source makes them with.

chatboxai/chatbox, src/shared/models/openai-compatible.ts and abstract-ai-sdk.ts: it
calls `streamText` of Vercel's `ai` on `@ai-sdk/openai-compatible`. The two (6.0.326 and
2.0.92) were run through a recording proxy; bodies and headers below are theirs.
"""

from __future__ import annotations

import json
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
    TOOL,
    WIDTH,
    WISH,
    answer,
    refusal,
    stream,
)

AGENT = (
    "ai-sdk/openai-compatible/2.0.92 ai-sdk/provider-utils/4.0.65 "
    "runtime/node.js/v20.20.2"
)
# The app is a page, in Electron or a browser, which adds where it comes from.
PAGE = {
    "User-Agent": AGENT,
    "Accept-Language": "*",
    "Sec-Fetch-Mode": "cors",
    "Origin": "http://localhost:1212",
    "Referer": "http://localhost:1212/",
}
REASONS = {"stop", "length", "content_filter", "function_call", "tool_calls"}


def read(text: str) -> dict[str, Any]:
    """packages/openai-compatible/src/chat/openai-compatible-chat-language-model.ts in
    vercel/ai: events by the standard; a stream must say why it ended, the first part
    of a call must have an id and a name, and its input is JSON once it is whole."""
    said: dict[str, Any] = {"content": "", "thought": "", "calls": [], "usage": None}
    for event in text.split("\n\n"):
        data = event.removeprefix("data: ")
        if not event or data == "[DONE]":
            continue
        chunk = json.loads(data)
        assert isinstance(chunk["choices"], list) and "error" not in chunk
        said["usage"] = chunk.get("usage") or said["usage"]
        for choice in chunk["choices"][:1]:
            said["reason"] = choice.get("finish_reason") or said.get("reason")
            _take(said, choice["delta"])
    assert said["reason"] in REASONS
    return said


def _take(said: dict[str, Any], delta: dict[str, Any]) -> None:
    assert delta.get("role") in (None, "assistant")
    said["content"] += delta.get("content") or ""
    said["thought"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
    for part in delta.get("tool_calls") or []:
        if part["index"] == len(said["calls"]):
            assert isinstance(part["id"], str) and part["function"]["name"]
            assert part.get("type", "function") == "function"
            said["calls"].append({**part["function"], "id": part["id"]})
        else:
            said["calls"][part["index"]]["arguments"] += part["function"]["arguments"]


@pytest.fixture
def client(demo: Demo) -> Iterator[httpx.Client]:
    with demo.http(**PAGE) as client:
        yield client


# openai-compatible.ts, fetchRemoteModels: `data`, and of each card the id.
def test_models_are_fetched(demo: Demo, client: httpx.Client) -> None:
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [
        demo.model
    ]


# A page asks leave first.
@pytest.mark.parametrize("path", ["/v1/models", CHAT, EMBED])
def test_page_is_given_leave(demo: Demo, path: str) -> None:
    asked = "authorization,content-type,user-agent"
    asks = {
        "Origin": PAGE["Origin"],
        "Access-Control-Request-Method": "GET" if path == "/v1/models" else "POST",
        "Access-Control-Request-Headers": asked,
    }
    reply = httpx.options(demo.url + path, headers=asks)
    assert reply.status_code == 200
    given = reply.headers["access-control-allow-headers"].lower()
    assert all(name in given for name in asked.split(",")) or given == "*"
    assert reply.headers["access-control-allow-origin"] in ("*", PAGE["Origin"])


# getCallSettings: temperature, topP and maxOutputTokens; no stream_options.
@pytest.mark.parametrize("limits", [{}, {"top_p": 1, "max_tokens": 12}])
def test_chat_is_streamed(
    demo: Demo, client: httpx.Client, limits: dict[str, Any]
) -> None:
    system = {"role": "system", "content": "Be brief."}
    body = {"model": demo.model, "temperature": 0, **limits}
    said = read(stream(client, {**body, "messages": [system, QUESTION]}))
    assert "Paris" in said["content"] and said["usage"] is None


# abstract-ai-sdk.ts, `stream: false`: one answer, read as a stream of one part.
def test_chat_without_a_stream(demo: Demo, client: httpx.Client) -> None:
    body = {"model": demo.model, "messages": [QUESTION], "temperature": 0}
    found = answer(client, CHAT, body)
    assert "Paris" in found["choices"][0]["message"]["content"]
    assert found["choices"][0]["finish_reason"] == "stop" and found["created"]
    assert found["usage"]["prompt_tokens"] and found["usage"]["completion_tokens"] == 8


def test_tools_and_their_history(tooled: Demo) -> None:
    """A thought goes back as reasoning_content, beside calls and no content at all."""
    body = {"model": tooled.model, "max_tokens": 60, "temperature": 0}
    body |= {"messages": [WISH], "tools": [TOOL], "tool_choice": "auto"}
    with tooled.http(**PAGE) as client:
        assert read(stream(client, body))["content"]
        said = read(stream(client, {**body, "tool_choice": "required"}))
        assert said["reason"] == "tool_calls"
        assert said["calls"][0]["name"] == "get_weather"
        assert isinstance(json.loads(said["calls"][0]["arguments"])["city"], str)
        function = {"name": "get_weather", "arguments": ARGUMENTS}
        call = {"id": said["calls"][0]["id"], "type": "function", "function": function}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        turn["reasoning_content"] = "I need the tool."
        result = {"role": "tool", "tool_call_id": call["id"], "content": '{"c":21}'}
        again = {**body, "messages": [WISH, turn, result], "max_tokens": 12}
        assert read(stream(client, again))["content"]


def test_thoughts_are_read(musing: Demo) -> None:
    body = {"model": musing.model, "messages": [QUESTION], "temperature": 0}
    with musing.http(**PAGE) as client:
        said = read(stream(client, body))
        assert "Paris" in said["thought"] and said["content"] == ""
        message = answer(client, CHAT, body)["choices"][0]["message"]
    assert message["reasoning_content"] == said["thought"]


# openai-compatible-embedding-model.ts: floats, and usage.prompt_tokens.
def test_knowledge_is_embedded(demo: Demo, client: httpx.Client) -> None:
    body = {"model": demo.model, "input": ["a cat", "a dog"]}
    found = answer(client, EMBED, {**body, "encoding_format": "float"})
    assert [len(row["embedding"]) for row in found["data"]] == [WIDTH, WIDTH]
    assert found["usage"]["prompt_tokens"] == 4


# openai-compatible-error.ts: error.message is a text; code a text or a number.
def test_errors_are_shown(demo: Demo, client: httpx.Client) -> None:
    long = {"role": "user", "content": "word " * 5000}
    assert "2048" in refusal(client, CHAT, {"model": demo.model, "messages": [long]})
    reply = client.get("/v1/models", headers={"Authorization": "Bearer no"})
    assert reply.status_code == 401
    assert isinstance(reply.json()["error"]["message"], str)
    assert isinstance(reply.json()["error"]["code"], int | str)
