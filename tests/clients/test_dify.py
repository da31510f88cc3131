"""Dify, by the calls that its own classes made through a recording proxy.

langgenius/dify-official-plugins, models/openai_api_compatible, extends classes of
`dify_plugin` (0.7.4), interfaces/model/openai_compatible; these were run.
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
    RERANK,
    TOOL,
    WIDTH,
    WISH,
    answer,
    stream,
)

PYTHON = {
    "User-Agent": "python-requests/2.32.5",
    "Accept-Encoding": "gzip, deflate",
    "Accept-Charset": "utf-8",
}
MORE = {"stop": ["\nHuman:"], "user": "abc-123"}
USAGE = {"stream_options": {"include_usage": True}}  # the plugin's llm.py, _invoke


def read(text: str) -> dict[str, Any]:
    """llm.py, _handle_generate_stream_response: pieces between blank lines, comments
    left out; a piece that is no JSON ends it; every chunk must have choices."""
    said: dict[str, Any] = {"content": "", "thought": "", "calls": [], "usage": None}
    for piece in filter(None, (part.strip() for part in text.split("\n\n"))):
        decoded = piece.removeprefix("data:").lstrip()
        if piece.startswith(":") or decoded == "[DONE]":
            continue
        chunk = json.loads(decoded)
        assert not chunk.get("error")
        said["usage"] = chunk.get("usage") or said["usage"]
        for choice in chunk["choices"][:1]:
            said["reason"] = choice.get("finish_reason")
            _take(said, choice["delta"])
    return said


def _take(said: dict[str, Any], delta: dict[str, Any]) -> None:
    said["content"] += delta.get("content") or ""
    said["thought"] += delta.get("reasoning") or delta.get("reasoning_content") or ""
    for part in delta.get("tool_calls") or []:
        # _increase_tool_call: a part without an id belongs to the call before it.
        if part.get("id", ""):
            said["calls"].append({"id": part["id"], "name": "", "arguments": ""})
        said["calls"][-1]["name"] += part["function"].get("name", "")
        said["calls"][-1]["arguments"] += part["function"].get("arguments", "")


@pytest.fixture
def client(demo: Demo) -> Iterator[httpx.Client]:
    with demo.http(**PYTHON) as client:
        yield client


# llm.py, validate_credentials; five tokens, or ten where streaming is tried.
def test_credentials_are_validated(demo: Demo, client: httpx.Client) -> None:
    ping = [{"role": "user", "content": "ping"}]
    body = {"model": demo.model, "max_tokens": 5}
    assert answer(client, CHAT, {**body, "messages": ping})["object"] == (
        "chat.completion"
    )
    found = answer(client, "/v1/completions", {**body, "prompt": "ping"})
    assert found["object"] == "text_completion" and "text" in found["choices"][0]
    assert read(stream(client, {**body, "max_tokens": 10, "messages": ping}))
    # The plugin's _retry_with_safe_min_tokens, for token_param_name.
    safe = {"model": demo.model, "max_completion_tokens": 16, "stream": False}
    assert answer(client, CHAT, {**safe, "messages": ping})
    # The plugin's remote_models, tested by its tests/test_remote_models.py.
    assert client.get("/v1/models").json()["data"][0]["id"] == demo.model


@pytest.mark.parametrize("more", [{}, USAGE])
def test_chat_is_streamed(
    demo: Demo, client: httpx.Client, more: dict[str, Any]
) -> None:
    body = {"model": demo.model, "temperature": 0, "max_tokens": 12, **more, **MORE}
    said = read(stream(client, {**body, "messages": [QUESTION]}))
    assert "Paris" in said["content"] and said["reason"] in ("stop", None)
    if more:
        assert (
            said["usage"]["prompt_tokens"] and said["usage"]["completion_tokens"] == 8
        )


def test_chat_and_completion_without_a_stream(demo: Demo, client: httpx.Client) -> None:
    """_handle_generate_response: content, id, and both counts of the usage."""
    body = {"model": demo.model, "stream": False, "temperature": 0, "max_tokens": 12}
    found = answer(client, CHAT, {**body, "messages": [QUESTION], **MORE})
    assert "Paris" in found["choices"][0]["message"]["content"] and found["id"]
    assert found["usage"]["prompt_tokens"] and found["usage"]["completion_tokens"]
    prompt = {"prompt": "The capital of France is", **MORE}
    found = answer(client, "/v1/completions", {**body, **prompt})
    assert "Paris" in found["choices"][0]["text"]


# The plugin's "extended" compatibility says what it says in every server's words.
def test_extended_compatibility(demo: Demo, musing: Demo) -> None:
    off = {
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
        "thinking": {"type": "disabled"},
        "enable_thinking": False,
    }
    for server in (demo, musing):
        body = {"model": server.model, "temperature": 0, "messages": [QUESTION], **off}
        with server.http(**PYTHON) as client:
            said = read(stream(client, body))
        assert "Paris" in said["content"] and said["thought"] == ""


def test_structured_outputs(demo: Demo, client: httpx.Client) -> None:
    """json_schema as a text that is the form's own object: a name and a schema."""
    city = {"city": {"type": "string", "maxLength": 12}}
    schema = {"type": "object", "properties": city, "required": ["city"]}
    form = {"name": "place", "schema": {**schema, "additionalProperties": False}}
    body = {"model": demo.model, "temperature": 0, "messages": [QUESTION], **MORE}
    wish = {"response_format": {"type": "json_schema", "json_schema": form}}
    found = json.loads(read(stream(client, {**body, **wish}))["content"])
    assert list(found) == ["city"]
    wish = {"response_format": {"type": "json_object"}, "max_tokens": 8}
    assert read(stream(client, {**body, **wish}))["content"].startswith("{")


# llm.py, _convert_prompt_message_to_dict with function_calling_type "tool_call".
def test_tools_and_their_history(tooled: Demo) -> None:
    body = {"model": tooled.model, "temperature": 0, "max_tokens": 60, **USAGE, **MORE}
    body |= {"messages": [WISH], "tool_choice": "auto", "tools": [TOOL]}
    with tooled.http(**PYTHON) as client:
        assert read(stream(client, body))["content"]
        said = read(stream(client, {**body, "tool_choice": "required"}))
        (call,) = said["calls"]
        assert call["name"] == "get_weather" and json.loads(call["arguments"])
        function = {"name": "get_weather", "arguments": ARGUMENTS}
        made = {"id": call["id"], "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [made]}
        result = {"role": "tool", "content": "21", "tool_call_id": call["id"]}
        again = {**body, "messages": [WISH, turn, result]}
        assert read(stream(client, again))["content"]


def test_thoughts_are_read(musing: Demo) -> None:
    body = {"model": musing.model, "messages": [QUESTION], "temperature": 0}
    with musing.http(**PYTHON) as client:
        assert "Paris" in read(stream(client, body))["thought"]
        message = answer(client, CHAT, body)["choices"][0]["message"]
    assert message["reasoning"] and message["reasoning_content"]


# text_embedding.py: "ping" alone to validate, then lists; the plugin sends no format.
def test_knowledge_is_embedded(demo: Demo, client: httpx.Client) -> None:
    assert "model" in answer(client, EMBED, {"input": "ping", "model": demo.model})
    body = {"input": ["a cat", "a dog"], "model": demo.model}
    for more in ({}, {"user": "abc", "encoding_format": "float"}):
        found = answer(client, EMBED, {**body, **more})
        assert [len(row["embedding"]) for row in found["data"]] == [WIDTH, WIDTH]
        assert found["usage"]["total_tokens"] == 4


# rerank.py: relevance_score and index of every result, and its document's text.
def test_rerank(demo: Demo, client: httpx.Client) -> None:
    documents = ["a dog", "a cat"]
    body = {"model": demo.model, "query": "cat", "documents": documents}
    for top in (None, 1):
        more = {"top_n": top, "return_documents": True}
        results = answer(client, RERANK, {**body, **more})["results"]
        assert len(results) == (top or 2) and results[0]["index"] == 1
        assert results[0]["document"]["text"] == "a cat"
        scores = [found["relevance_score"] for found in results]
        assert scores == sorted(scores, reverse=True)


# InvokeError shows the status and the whole text.
def test_errors_are_shown(demo: Demo, client: httpx.Client) -> None:
    body = {"model": "gone", "messages": [QUESTION], "stream": True}
    reply = client.post(CHAT, json=body)
    assert reply.status_code == 404 and "gone" in reply.text
