"""Open WebUI itself: what its API does with our server, and what they send.

The replay in tests/clients/test_open_webui.py holds to these calls without it.
"""

from __future__ import annotations

import pytest

from .conftest import OpenWebUI

QUESTION = {"role": "user", "content": "What is the capital of France?"}
SENT = {  # the fields of chats that the replay sends
    *("model", "messages", "stream", "stream_options", "temperature", "max_tokens"),
    *("tools", "tool_choice"),
}
pytestmark = pytest.mark.long


def test_models_are_listed_and_the_connection_holds(open_webui: OpenWebUI) -> None:
    with open_webui.http() as client:
        models = client.get("/api/models").json()["data"]
        assert open_webui.model in [model["id"] for model in models]
        ours = {"url": f"{open_webui.recorder.url}/v1", "key": "sesame"}
        assert client.post("/openai/verify", json=ours).json()["object"] == "list"
        wrong = client.post("/openai/verify", json={**ours, "key": "no"})
    assert wrong.status_code == 401
    assert "A valid API key is needed." in wrong.text


def test_chat_is_streamed(open_webui: OpenWebUI) -> None:
    body = {"model": open_webui.model, "messages": [QUESTION], "stream": True}
    body |= {"params": {"temperature": 0, "max_tokens": 12}}
    body |= {"stream_options": {"include_usage": True}}
    with open_webui.http() as client:
        text = client.post("/api/chat/completions", json=body).text
    assert " Paris" in text and '"completion_tokens":8' in text
    call = open_webui.recorder.of("/v1/chat/completions")[-1]
    assert call.status == 200 and call.headers["x-openwebui-user-name"] == "Ann"


def test_tools_are_called(open_webui: OpenWebUI) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_weather", "description": "Weather of a city"}
    function["parameters"] = {**city, "required": ["city"]}
    wish = {"role": "user", "content": "What is the weather in Paris? Use the tool."}
    body = {"model": open_webui.model, "messages": [wish], "stream": True}
    body |= {"tools": [{"type": "function", "function": function}]}
    body |= {"tool_choice": "required", "temperature": 0, "max_tokens": 60}
    with open_webui.http() as client:
        text = client.post("/api/chat/completions", json=body).text
    assert '"get_weather"' in text and '"finish_reason":"tool_calls"' in text


@pytest.mark.parametrize("task", ["title", "tags", "follow_up"])
def test_tasks_are_answered(open_webui: OpenWebUI, task: str) -> None:
    turns = [QUESTION, {"role": "assistant", "content": "Paris."}]
    body = {"model": open_webui.model, "messages": turns}
    with open_webui.http() as client:
        reply = client.post(f"/api/v1/tasks/{task}/completions", json=body)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"]


def test_documents_are_found_again(open_webui: OpenWebUI) -> None:
    text = "Cats are small animals. " * 30
    with open_webui.http() as client:
        kept = client.post(
            "/api/v1/retrieval/process/text",
            json={"name": "cats", "content": text, "collection_name": "cats"},
        )
        assert kept.json()["status"] is True
        asked = {"collection_name": "cats", "query": "what are cats?", "k": 1}
        found = client.post("/api/v1/retrieval/query/doc", json=asked).json()
    assert "Cats are small animals." in found["documents"][0][0]
    assert {call.status for call in open_webui.recorder.of("/v1/embeddings")} == {200}


def test_replay_sends_all_that_was_sent(open_webui: OpenWebUI) -> None:
    """Last: no field was seen that the replay doesn't send, and nothing failed but
    what was sent without a key or with a wrong one."""
    chats = open_webui.recorder.of("/v1/chat/completions")
    assert chats and {name for call in chats for name in call.body} <= SENT
    failed = [c for c in open_webui.recorder.calls if c.status >= 400]
    assert {call.status for call in failed} <= {401}
