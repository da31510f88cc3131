"""Ollama's API over HTTP: chats, prompts, embeddings, and what it tells of models."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from serve_live import Live, engine_for, serving, write_model

from pagedattn.serve.ollama.bodies import OllamaChat, OllamaGenerate
from pagedattn.serve.problems import ApiError

HI = [{"role": "user", "content": "Hi"}]
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine = engine_for(write_model(tmp_path_factory.mktemp("tiny")))
    with serving(engine) as live:
        yield live
    engine.shutdown()


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server; afterwards it must be idle, its pool whole."""
    yield shared
    shared.wait_idle()


def lines(live: Live, path: str, body: dict) -> list[dict]:
    reply = live.post(path, {"model": "tiny", **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("application/x-ndjson")
    assert reply.text.endswith("\n")
    return [json.loads(line) for line in reply.text.splitlines()]


def whole(live: Live, path: str, body: dict) -> dict:
    reply = live.post(path, {"model": "tiny", "stream": False, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(live: Live, path: str, body: dict, status: int = 400) -> str:
    reply = live.post(path, body)
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    return reply.json()["error"]


def test_a_chat_line_by_line_and_whole(live: Live) -> None:
    right = live.chat(messages=HI, max_tokens=8)
    *parts, last = lines(live, "/api/chat", {"messages": HI, "options": GREEDY})
    text = "".join(p["message"]["content"] for p in parts)
    assert text == right["choices"][0]["message"]["content"]
    assert all(not p["done"] and p["message"]["role"] == "assistant" for p in parts)
    assert (last["done"], last["done_reason"]) == (True, "length")
    assert last["eval_count"] == 8
    assert last["prompt_eval_count"] == right["usage"]["prompt_tokens"]
    assert last["total_duration"] >= last["prompt_eval_duration"] > 0
    assert last["model"] == "tiny:latest" and last["load_duration"] == 0
    answer = whole(live, "/api/chat", {"messages": HI, "options": GREEDY})
    assert answer["message"] == {"role": "assistant", "content": text}
    assert answer["done"] and answer["done_reason"] == "length"


def test_a_prompt_goes_through_the_template(live: Live) -> None:
    messages = [{"role": "system", "content": "Be brief"}, *HI]
    right = live.chat(messages=messages, max_tokens=8)["choices"][0]
    body = {"prompt": "Hi", "system": "Be brief", "options": GREEDY}
    answer = whole(live, "/api/generate", body)
    assert answer["response"] == right["message"]["content"]
    *parts, last = lines(live, "/api/generate", body)
    assert "".join(p["response"] for p in parts) == answer["response"]
    assert last["response"] == "" and last["done"]


def test_a_raw_prompt_does_not(live: Live) -> None:
    right = live.complete(prompt="once upon", max_tokens=8)["choices"][0]["text"]
    body = {"prompt": "once upon", "raw": True, "options": GREEDY}
    assert whole(live, "/api/generate", body)["response"] == right
    parts = lines(live, "/api/generate", body)
    assert "".join(p["response"] for p in parts) == right


def test_raw_answers_end_with_the_context(live: Live) -> None:
    body = {"prompt": "x" * 500, "raw": True, "options": {"temperature": 0}}
    answer = whole(live, "/api/generate", body)
    assert answer["eval_count"] <= 12


def test_options_are_obeyed(live: Live) -> None:
    body = {"messages": HI, "options": {**GREEDY, "temperature": 1, "seed": 5}}
    answer = whole(live, "/api/chat", body)["message"]["content"]
    right = live.chat(messages=HI, max_tokens=8, temperature=1.0, seed=5)
    assert answer == right["choices"][0]["message"]["content"]
    text = live.chat(messages=HI, max_tokens=8)["choices"][0]["message"]["content"]
    body = {"messages": HI, "options": {**GREEDY, "stop": [text[3]], "num_ctx": 9999}}
    stopped = whole(live, "/api/chat", body)
    assert stopped["message"]["content"] == text[: text.index(text[3])]
    assert stopped["done_reason"] == "stop"


def test_the_names_of_options() -> None:
    body = OllamaChat(
        model="m",
        messages=HI,
        format="json",
        think=False,
        options={"num_predict": -1, "repeat_penalty": 1, "mirostat": 0, "num_gpu": 3},
    )
    body.check()
    assert body.chat() == {
        "repetition_penalty": 1.0,
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": HI,
    }
    schema = {"type": "object"}
    body = OllamaGenerate(model="m", prompt="p", format=schema)
    form = body.chat()["response_format"]
    assert form["json_schema"]["schema"] == schema
    with pytest.raises(ApiError, match="mirostat"):
        OllamaChat(model="m", options={"mirostat": 2}).sampling()


def test_tool_calls_and_results_become_openais() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_name": "add"},
    ]
    first, second = OllamaChat(model="m", messages=messages).chat()["messages"]
    assert first["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1}',
    }
    assert first["tool_calls"][0]["id"] == second["tool_call_id"] == "add"


def test_json_is_json(live: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    body = {"messages": HI, "format": schema, "options": {"temperature": 0}}
    answer = whole(live, "/api/chat", body)
    assert json.loads(answer["message"]["content"])["a"] in (1, 2)
    assert answer["done_reason"] == "stop"


CHAT_MISTAKES = [
    ({"model": "x"}, "'x' not found"),
    ({"model": None}, "model is required"),
    ({"messages": 3}, "messages"),
    ({"messages": [{"role": "foo", "content": ""}]}, "foo"),
    ({"messages": [{**HI[0], "images": ["a"]}]}, "images"),
    ({"messages": [{**HI[0], "tool_calls": [{}]}]}, "tool_calls"),
    ({"format": "xml"}, "format"),
    ({"think": "high"}, "think"),
    ({"options": {"top_p": 7}}, "top_p"),
    ({"options": {"tfs_z": 0.5}}, "tfs_z"),
]
PROMPT_MISTAKES = [
    ({"images": ["a"]}, "images"),
    ({"suffix": "b"}, "suffix"),
    ({"template": "b"}, "template"),
    ({"context": [1]}, "context"),
    ({"raw": True, "system": "b"}, "raw"),
]


@pytest.mark.parametrize(("body", "word"), CHAT_MISTAKES)
def test_mistakes_in_chats(live: Live, body: dict, word: str) -> None:
    status = 404 if "not found" in word else 400
    body = {"model": "tiny", "messages": HI, **body}
    assert word in refused(live, "/api/chat", body, status)


@pytest.mark.parametrize(("body", "word"), PROMPT_MISTAKES)
def test_mistakes_in_prompts(live: Live, body: dict, word: str) -> None:
    body = {"model": "tiny", "prompt": "a", **body}
    assert word in refused(live, "/api/generate", body)


def test_mistakes_elsewhere(live: Live) -> None:
    assert "not found" in refused(live, "/api/show", {"model": "x"}, 404)
    assert "input" in refused(live, "/api/embed", {"model": "tiny"})


def test_empty_requests_load(live: Live) -> None:
    for path in ("/api/chat", "/api/generate"):
        answer = whole(live, path, {})
        assert answer["done"] and answer["done_reason"] == "load"
        answer = whole(live, path, {"keep_alive": 0, "images": [], "context": []})
        assert answer["done_reason"] == "unload"


def test_embeddings(live: Live) -> None:
    right = live.post("/v1/embeddings", {"input": ["a", "bc"]}).json()["data"]
    answer = whole(live, "/api/embed", {"input": ["a", "bc"]})
    assert len(answer["embeddings"]) == 2 and answer["prompt_eval_count"] == 3
    for ours, theirs in zip(answer["embeddings"], right, strict=True):
        assert ours == pytest.approx(theirs["embedding"], abs=1e-5)
    one = whole(live, "/api/embeddings", {"prompt": "a"})["embedding"]
    assert one == pytest.approx(right[0]["embedding"], abs=1e-5)
    long = {"input": "x" * 600}
    assert whole(live, "/api/embed", long)["prompt_eval_count"] == 512
    refused(live, "/api/embed", {"model": "tiny", "truncate": False, **long})


def test_what_is_told_of_models(live: Live) -> None:
    tags = live.http.get("/api/tags").json()["models"]
    assert [m["name"] for m in tags] == ["tiny:latest", "alias:latest"]
    loaded = live.http.get("/api/ps").json()["models"]
    assert loaded[0]["context_length"] == 512
    for name in ("tiny", "tiny:latest", "alias:latest"):
        shown = live.post("/api/show", {"model": name}).json()
        assert shown["capabilities"] == ["completion", "embedding"]
        assert shown["model_info"]["llama.context_length"] == 512
        assert shown["details"]["family"] == "llama"
    assert live.http.get("/api/version").json()["version"].count(".") == 2
    assert live.http.head("/").status_code == 200
