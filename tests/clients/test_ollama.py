"""Ollama's own Python client, as its manual says to use it."""

from __future__ import annotations

import asyncio

import ollama
import pytest

from .conftest import Demo

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
OPTIONS = {"temperature": 0, "num_predict": 12, "num_ctx": 2048}


@pytest.fixture(scope="module")
def client(demo: Demo) -> ollama.Client:
    headers = {"Authorization": f"Bearer {demo.key}"}
    return ollama.Client(host=demo.url, headers=headers)


def test_ollama_lists_and_shows(demo: Demo, client: ollama.Client) -> None:
    assert [m.model for m in client.list().models] == [f"{demo.model}:latest"]
    assert [m.model for m in client.ps().models] == [f"{demo.model}:latest"]
    assert "completion" in client.show(demo.model).capabilities


def test_ollama_chat_whole_and_streamed(demo: Demo, client: ollama.Client) -> None:
    answer = client.chat(model=demo.model, messages=MESSAGES, options=OPTIONS)
    assert "Paris" in answer.message.content
    assert answer.done and answer.eval_count <= 12
    parts = list(
        client.chat(
            model=f"{demo.model}:latest",
            messages=MESSAGES,
            options=OPTIONS,
            stream=True,
        )
    )
    assert "".join(p.message.content for p in parts) == answer.message.content
    assert len(parts) > 3 and parts[-1].done_reason in ("stop", "length")


def test_ollama_generate(demo: Demo, client: ollama.Client) -> None:
    raw = {"prompt": "The capital of France is", "raw": True}
    answer = client.generate(model=demo.model, options=OPTIONS, **raw)
    assert "Paris" in answer.response
    parts = client.generate(model=demo.model, options=OPTIONS, stream=True, **raw)
    assert "".join(p.response for p in parts) == answer.response


def test_ollama_embeds(demo: Demo, client: ollama.Client) -> None:
    found = client.embed(model=demo.model, input=["a cat", "a dog"]).embeddings
    assert len(found) == 2 and len(found[0]) == 576


def test_ollama_is_told_of_mistakes(demo: Demo, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="'other' not found") as problem:
        client.chat(model="other", messages=MESSAGES)
    assert problem.value.status_code == 404


def test_ollama_async(demo: Demo) -> None:
    async def ask() -> str:
        headers = {"Authorization": f"Bearer {demo.key}"}
        client = ollama.AsyncClient(host=demo.url, headers=headers)
        stream = await client.chat(
            model=demo.model, messages=MESSAGES, options=OPTIONS, stream=True
        )
        return "".join([part.message.content async for part in stream])

    assert "Paris" in asyncio.run(ask())
