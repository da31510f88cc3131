"""Open WebUI, Chatbox, Dify and FastGPT, by the calls that they make.

They are whole products that a test can't install, so what their source sends is sent
again: the same paths, headers and bodies, and the answer is read as they read it.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .conftest import Demo

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
BROWSER = {"Origin": "http://localhost:3000", "Referer": "http://localhost:3000/"}


def streamed(client: httpx.Client, body: dict[str, Any], **more: Any) -> str:
    """The text of a stream, read line by line; [DONE] must end it."""
    text, last = "", ""
    with client.stream("POST", CHAT, json=body, **more) as reply:
        assert reply.status_code == 200, reply.read()
        for line in filter(None, reply.iter_lines()):
            assert line.startswith("data: ")
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                for choice in json.loads(last)["choices"]:
                    text += choice["delta"].get("content") or ""
    assert last == "[DONE]"
    return text


def test_open_webui(demo: Demo) -> None:
    """It lists models to check a connection, streams, then asks for a title."""
    names = {"X-OpenWebUI-User-Name": "Ann", "X-OpenWebUI-Chat-Id": "1"}
    with demo.http(**names) as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list" and listed["data"][0]["id"] == demo.model
        body = {
            "stream": True,
            "model": demo.model,
            "messages": [{"role": "system", "content": "Be brief."}, QUESTION],
            "stream_options": {"include_usage": True},
            "max_tokens": 12,
            "temperature": 0,
        }
        assert streamed(client, body)
        title = {
            "model": demo.model,
            "messages": [{"role": "user", "content": "### Task: give a title."}],
            "stream": False,
            "max_completion_tokens": 8,
        }
        reply = client.post(CHAT, json=title).json()
        assert reply["choices"][0]["message"]["content"]


def test_chatbox(demo: Demo) -> None:
    """A desktop or a page: it asks leave to send its headers, then streams."""
    names = {"HTTP-Referer": "https://chatboxai.app", "X-Title": "Chatbox AI"}
    asks = {
        **BROWSER,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-title",
    }
    preflight = httpx.options(demo.url + CHAT, headers=asks)
    assert preflight.status_code == 200
    assert "x-title" in preflight.headers["access-control-allow-headers"]
    parts = [{"type": "text", "text": QUESTION["content"]}]
    with demo.http(**BROWSER, **names) as client:
        assert client.get("/v1/models").json()["data"]
        body = {
            "model": demo.model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 12,
            "temperature": 0,
            "top_p": 1,
            "stream": True,
        }
        assert "Paris" in streamed(client, body)


@pytest.mark.parametrize("stream", [False, True])
def test_dify(demo: Demo, stream: bool) -> None:
    """It pings to check what was typed in, and wants to read `chat.completion`."""
    with demo.http(**{"Accept-Charset": "utf-8"}) as client:
        ping = {
            "model": demo.model,
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "ping"}],
        }
        reply = client.post(CHAT, json=ping)
        assert reply.status_code == 200
        assert reply.json()["object"] == "chat.completion"
        asked = {
            "model": demo.model,
            "stream": stream,
            "messages": [QUESTION],
            "temperature": 0,
            "max_tokens": 12,
            "user": "abc-123",
            "stop": ["\nHuman:"],
        }
        if stream:
            options = {"stream_options": {"include_usage": True}}
            assert "Paris" in streamed(client, {**asked, **options})
        else:
            usage = client.post(CHAT, json=asked).json()["usage"]
            assert usage["prompt_tokens"] and usage["completion_tokens"]


def test_fastgpt(demo: Demo) -> None:
    """OpenAI's library for Node: its headers, its nulls, its usage at the end."""
    names = {
        "X-Stainless-Lang": "js",
        "X-Stainless-Retry-Count": "0",
        "User-Agent": "OpenAI/JS 4.61.0",
    }
    with demo.http(**names) as client:
        trial = {
            "model": demo.model,
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4,
            "stream": True,
        }
        assert streamed(client, trial)
        body = {
            **trial,
            "messages": [QUESTION],
            "temperature": 0,
            "max_tokens": 12,
            "stop": None,
            "response_format": None,
            "tools": None,
            "stream_options": {"include_usage": True},
        }
        assert "Paris" in streamed(client, body)


def test_a_wrong_key_is_told_as_they_show_it(demo: Demo) -> None:
    """All four show `error.message`."""
    reply = httpx.get(demo.v1 + "/models", headers={"Authorization": "Bearer no"})
    assert reply.status_code == 401 and reply.json()["error"]["message"]
