"""Open WebUI 0.12.4, by the calls that a real one made through a recording proxy.

A real installation was started before the demo server, its first user signed up, and
its page driven in Chromium; bodies and headers below are what it sent on its own.
"""

from __future__ import annotations

import json
import time
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

# open-webui/open-webui, backend/open_webui/utils/headers.py; sent with
# ENABLE_FORWARD_USER_INFO_HEADERS.
WHO = {
    "User-Agent": "Python/3.11 aiohttp/3.14.5",
    "Accept-Encoding": "gzip, deflate, br",
    "X-OpenWebUI-Auth-Type": "jwt",
    "X-OpenWebUI-User-Name": "Ann",
    "X-OpenWebUI-User-Id": "189a526a-20a6-462d-a544-74acd573fff0",
    "X-OpenWebUI-User-Email": "ann@example.com",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "31d15e68-4f61-465e-9854-319a18663c5d",
}


def read(text: str) -> dict[str, Any]:
    """backend/open_webui/utils/middleware.py, process_chat_response: line by line; a
    line that is no data is skipped, calls are gathered by their index."""
    said: dict[str, Any] = {"content": "", "thought": "", "calls": {}, "usage": {}}
    for line in filter(None, text.split("\n")):
        part = line.removeprefix("data:").strip()
        if not line.startswith("data:") or part == "[DONE]":
            continue
        data = json.loads(part)
        assert "error" not in data
        said["usage"] |= data.get("usage", {}) or {}
        for choice in data.get("choices", []):
            said["reason"] = choice.get("finish_reason")
            _take(said, choice.get("delta", {}) or {})
    assert part == "[DONE]"
    return said


def _take(said: dict[str, Any], delta: dict[str, Any]) -> None:
    said["content"] += delta.get("content") or ""
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    said["thought"] += thought or ""
    for part in delta.get("tool_calls") or []:
        function = part.get("function", {})
        call = said["calls"].setdefault(
            part["index"], {"id": part.get("id"), "name": "", "arguments": ""}
        )
        call["name"] = function.get("name") or call["name"]
        call["arguments"] += function.get("arguments") or ""


@pytest.fixture
def client(demo: Demo) -> Iterator[httpx.Client]:
    with demo.http(**WHO) as client:
        yield client


# backend/open_webui/routers/openai.py, verify_connection and get_all_models;
# routers/ollama.py, verify_connection and get_all_models: /api/tags, ps and version.
def test_connections_are_checked(demo: Demo, client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert "error" not in listed and listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == [demo.model]
    for path in ("/api/tags", "/api/ps"):
        models = client.get(path).json()["models"]
        assert [m["model"] for m in models] == [f"{demo.model}:latest"]
    assert client.get("/api/version").json()["version"]
    # Ollama's connection has no key until one is typed in: a clear refusal.
    assert httpx.get(demo.url + "/api/tags").status_code == 401


# The page's own chat: backend/open_webui/main.py, /api/chat/completions.
def test_page_chats(demo: Demo, client: httpx.Client) -> None:
    limits = {"temperature": 0, "max_tokens": 40}
    body = {"model": demo.model, **limits, "messages": [QUESTION]}
    said = read(stream(client, body))
    assert said["content"] == "The capital of France is Paris."
    assert said["reason"] == "stop" and said["usage"] == {}
    asked = {**body, "stream_options": {"include_usage": True}}
    said = read(stream(client, asked))
    assert said["usage"]["completion_tokens"] == 8


# backend/open_webui/utils/task.py and routers/tasks.py: titles, tags, follow-ups.
@pytest.mark.parametrize("limit", [{"max_tokens": 1000}, {"max_completion_tokens": 16}])
def test_titles_and_tags_are_asked_for(
    demo: Demo, client: httpx.Client, limit: dict[str, int]
) -> None:
    task = '### Task:\nGenerate a title.\n### Output:\nJSON format: { "title": "" }'
    asked = {"role": "user", "content": f"{task}\nUSER: Hi\nASSISTANT: "}
    body = {"model": demo.model, "messages": [asked], "stream": False, **limit}
    said = answer(client, CHAT, {**body, "temperature": 0.0})["choices"][0]["message"]
    # Read as content, or as the thought where there is no content.
    assert said.get("content") or said.get("reasoning_content")


# The page sends its own tools with every chat, 36 of them, and no tool_choice, unless
# a model's function calling is set to "legacy".
def test_page_sends_tools_with_every_chat(demo: Demo, tooled: Demo) -> None:
    clock = {
        "name": "get_current_timestamp",
        "description": "The time.",
        "parameters": {"properties": {}, "type": "object"},
    }
    tools = [{"type": "function", "function": clock}, TOOL]
    body = {"model": demo.model, "messages": [QUESTION], "tools": tools}
    body |= {"temperature": 0, "max_tokens": 24}
    with tooled.http(**WHO) as client:
        assert "Paris" in read(stream(client, body))["content"]
    # A server that was started without tools says how; the page shows error.message.
    with demo.http(**WHO) as client:
        assert "--enable-auto-tool-choice" in refusal(
            client, CHAT, {**body, "stream": True}
        )


def test_tools_are_called_and_their_results_sent(tooled: Demo) -> None:
    body = {"model": tooled.model, "messages": [WISH], "tools": [TOOL]}
    body |= {"temperature": 0, "max_tokens": 60}
    with tooled.http(**WHO) as client:
        said = read(stream(client, {**body, "tool_choice": "required"}))
        assert said["reason"] == "tool_calls" and list(said["calls"])[0] == 0
        call = said["calls"][0]
        assert call["id"] and call["name"] == "get_weather"
        assert isinstance(json.loads(call["arguments"])["city"], str)
        # utils/misc.py, convert_output_to_messages: the next round.
        function = {"name": "get_weather", "arguments": ARGUMENTS}
        made = {"id": call["id"], "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [made]}
        turn["reasoning_content"] = "I need the weather."
        result = {"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"}
        assert read(stream(client, {**body, "messages": [WISH, turn, result]}))


def test_thoughts_are_read(musing: Demo) -> None:
    body = {"model": musing.model, "messages": [QUESTION], "temperature": 0}
    with musing.http(**WHO) as client:
        said = read(stream(client, {**body, "max_tokens": 12}))
    assert "Paris" in said["thought"] and said["content"] == ""


# backend/open_webui/retrieval/utils.py, agenerate_openai_batch_embeddings; no format.
def test_documents_are_embedded(demo: Demo, client: httpx.Client) -> None:
    texts = ["Cats are small animals. " * 30, "what are cats?"]
    found = answer(client, EMBED, {"input": texts, "model": demo.model})
    assert [len(row["embedding"]) for row in found["data"]] == [WIDTH, WIDTH]


# The stop button: the stream is left in mid-answer, and nothing goes on running.
def test_answers_are_stopped(demo: Demo, client: httpx.Client) -> None:
    story = {"role": "user", "content": "Tell me a very long story about a dragon."}
    body = {"model": demo.model, "messages": [story], "max_tokens": 1500}
    with client.stream("POST", CHAT, json={**body, "stream": True}) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data:")
    running = f'vllm:num_requests_running{{engine="0",model_name="{demo.model}"}}'
    for _ in range(100):
        if f"{running} 0.0" in client.get("/metrics").text:
            return
        time.sleep(0.05)
    pytest.fail("the answer is still being written")
