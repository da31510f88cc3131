"""What the replays of front ends share: questions, a tool, and their calls sent again.

Front ends are whole products that a test can't install; a replay sends what their
published source sends and reads the answer as it reads it. Headers are the ones that
a recording proxy saw the real client library send.
"""

from __future__ import annotations

from typing import Any

import httpx

CHAT, EMBED, RERANK = "/v1/chat/completions", "/v1/embeddings", "/v1/rerank"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
WISH = {"role": "user", "content": "What is the weather in Paris? Use the tool."}
ARGUMENTS = '{"city": "Paris"}'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
WIDTH = 576  # of the demo model's vectors


def answer(
    client: httpx.Client, path: str, body: dict[str, Any], **headers: str
) -> dict[str, Any]:
    """The JSON of a call that must succeed."""
    reply = client.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(client: httpx.Client, body: dict[str, Any], **headers: str) -> str:
    """The whole text of a streamed chat, which must succeed as an event stream."""
    reply = client.post(CHAT, json={**body, "stream": True}, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return reply.text


def refusal(client: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """`error.message`, which all of them show, of a call that must be refused."""
    reply = client.post(path, json=body)
    assert 400 <= reply.status_code < 500, reply.text
    return reply.json()["error"]["message"]
