"""`/v1/messages` over HTTP: answers, events, counts, errors in Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from chat_chunks import replay_message
from serve_live import Live, engine_for, serving, write_model
from serve_scripted import SAY, TEMPLATE, Scripted

from pagedattn.serve.settings import ServeArgs

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "now", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Tokyo"}}\n</tool_call>'


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


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that says what it is told, and reads calls and thoughts."""
    engine = Scripted(engine_for(write_model(tmp_path_factory.mktemp("said"))))
    args = ServeArgs(
        chat_template=TEMPLATE,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    with serving(engine, args) as live:
        yield live
        assert live.front.in_flight == 0
    engine.shutdown()


def ask(live: Live, **body: Any) -> dict[str, Any]:
    """The message that answers."""
    body = {"max_tokens": 400, "temperature": 0, "messages": HI, **body}
    reply = live.post(MESSAGES, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(live: Live, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, whose names must be their types."""
    body = {"max_tokens": 400, "temperature": 0, "messages": HI, **body}
    reply = live.post(MESSAGES, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    found = []
    for frame in reply.text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": SAY + text}]


def test_a_message_is_the_chats_answer(live: Live) -> None:
    chat = live.chat(messages=HI, max_tokens=9)
    found = ask(live, max_tokens=9)
    text = chat["choices"][0]["message"]["content"]
    assert found["content"] == [{"type": "text", "text": text}]
    assert (found["type"], found["role"]) == ("message", "assistant")
    assert found["stop_reason"] == "max_tokens" and found["stop_sequence"] is None
    assert found["usage"]["output_tokens"] == 9
    again = replay_message(stream(live, max_tokens=9))
    assert {**again, "id": 0} == {**found, "id": 0}


def test_the_stop_sequence_is_told(live: Live) -> None:
    text = live.chat(messages=HI, max_tokens=40, seed=2)["choices"][0]["message"]
    stop = next(c for c in text["content"][3:] if c.isascii() and c.isprintable())
    body = {"max_tokens": 40, "stop_sequences": [stop]}
    found = ask(live, **body)
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", stop)
    events = stream(live, **body)
    assert {**replay_message(events), "id": 0} == {**found, "id": 0}


def test_c79_every_form_counts_what_it_is_served_as(live: Live) -> None:
    """Counted, served and as a chat: the same tokens, tool history included."""
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for more in (
        {},
        {"system": "be kind"},
        {"system": blocks, "messages": [{"role": "user", "content": blocks}]},
        {"messages": [*HI, {"role": "assistant", "content": "The"}]},
    ):
        count = live.post(COUNT, {"messages": HI, **more}).json()["input_tokens"]
        usage = ask(live, max_tokens=1, **more)["usage"]
        cached = usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + cached == count > 0


def test_c79_tools_are_counted_too(scripted: Live) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "noon"}
    history = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    body = {"messages": history, "tools": [TOOL]}
    counts = [
        scripted.post(COUNT, b).json()["input_tokens"]
        for b in (body, {"messages": history}, {"messages": HI})
    ]
    assert counts[0] > counts[1] > counts[2]
    assert ask(scripted, **body)["usage"]["input_tokens"] == counts[0]


def test_c84_cached_tokens_are_told(live: Live) -> None:
    messages = [{"role": "user", "content": "cached, " * 4}]
    usages = [ask(live, messages=messages, max_tokens=2)["usage"] for _ in range(2)]
    assert [u["cache_read_input_tokens"] for u in usages] == [0, 32]
    assert [u["input_tokens"] for u in usages] == [35, 3]
    start = stream(live, messages=messages, max_tokens=2)[0]["message"]["usage"]
    assert start == {**usages[1], "output_tokens": 0}


def test_c80_an_assistants_last_text_is_gone_on_with(live: Live) -> None:
    begun = [*HI, {"role": "assistant", "content": "OK!"}]
    chat = live.chat(
        messages=begun,
        continue_final_message=True,
        add_generation_prompt=False,
        max_tokens=5,
    )
    found = ask(live, messages=begun, max_tokens=5)
    text = chat["choices"][0]["message"]["content"]
    assert found["content"] == [{"type": "text", "text": text}]
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"] == 8


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        ("<think>hm</think>\n\nso", ["thinking", "text"], "end_turn"),
        ("<think>hm</think>\n\n" + CALL, ["thinking", "tool_use"], "tool_use"),
        ("<think>x</think>\n\nwell " + CALL, ["thinking", "text", "tool_use"], None),
        ("<think>hm", ["thinking"], "end_turn"),
    ],
)
def test_c71_streamed_blocks_are_the_whole_answers(
    scripted: Live, text: str, kinds: list[str], reason: str | None
) -> None:
    body = {"messages": said(text), "tools": [TOOL]}
    whole = ask(scripted, **body)
    assert [block["type"] for block in whole["content"]] == kinds
    assert whole["stop_reason"] == (reason or "tool_use")
    again = replay_message(stream(scripted, **body))
    assert nameless(again) == nameless(whole)


def nameless(message: dict[str, Any]) -> dict[str, Any]:
    content = [{**block, "id": 0} for block in message["content"]]
    return {**message, "id": 0, "content": content}


def test_thinking_can_be_left_out(scripted: Live) -> None:
    off = {"thinking": {"type": "disabled"}}
    found = ask(scripted, messages=said("so"), **off)
    assert found["content"] == [{"type": "text", "text": "so"}]


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        ("nonsense", 400, "invalid_request_error", "JSON"),
        ('{"max_tokens": NaN}', 400, "invalid_request_error", "NaN"),
        ({"messages": HI}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 1}, 400, "invalid_request_error", "messages"),
        ({"max_tokens": 0, "messages": HI}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 1, "messages": HI, "model": "x"}, 404, "not_found_error", "x"),
        (
            {"max_tokens": 1, "messages": said("x" * 9_000)},
            *(400, "invalid_request_error", "characters"),
        ),
        (
            {"max_tokens": 1, "stream": True, "messages": said("x" * 9_000)},
            *(400, "invalid_request_error", "characters"),
        ),
        (
            {"max_tokens": 1, "messages": HI, "tools": [TOOL]},
            *(400, "invalid_request_error", "enable-auto-tool-choice"),
        ),
        ("x" * 5_000, 413, "request_too_large", "limit"),
    ],
)
def test_faults_are_in_anthropics_shape(
    live: Live, body: Any, status: int, kind: str, words: str
) -> None:
    if status == 413:
        live.front.settings.max_body_bytes = 4_000
    try:
        reply = live.post(MESSAGES, body)
    finally:
        live.front.settings.max_body_bytes = 16 << 20
    assert reply.status_code == status, reply.text
    error = reply.json()
    assert error["type"] == "error" and error["error"]["type"] == kind
    assert words in error["error"]["message"]


def test_c101_the_key_is_wanted_in_its_own_header(live: Live) -> None:
    with serving(live.engine, ServeArgs(api_key=["sesame"])) as locked:
        for headers in ({}, {"x-api-key": "wrong"}):
            for path in (MESSAGES, COUNT):
                reply = locked.post(path, {"messages": HI}, headers=headers)
                assert reply.status_code == 401
                assert reply.json()["error"]["type"] == "authentication_error"
        opened = locked.post(COUNT, {"messages": HI}, headers={"x-api-key": "sesame"})
        assert opened.json() == {"input_tokens": 5}
        other = locked.post("/v1/responses", {})
        assert "code" in other.json()["error"]  # in OpenAI's shape there


def test_c88_a_client_that_leaves_frees_everything(live: Live) -> None:
    body = {"messages": HI, "max_tokens": 450, "stream": True, "seed": 1}
    for _ in range(5):
        with live.http.stream("POST", MESSAGES, json=body) as reply:
            next(reply.iter_lines())
    live.wait_idle()


def test_unknown_fields_and_hints_are_ignored(live: Live) -> None:
    hint = {"type": "ephemeral"}
    block = {"type": "text", "text": "Hi", "cache_control": hint}
    body = {"messages": [{"role": "user", "content": [block]}], "frobnicate": 1}
    body |= {"metadata": {"user_id": "me"}, "service_tier": "auto"}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"}
    reply = live.post(
        MESSAGES + "?beta=true", {**body, "max_tokens": 1}, headers=headers
    )
    assert reply.status_code == 200, reply.text
