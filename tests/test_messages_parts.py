"""`/v1/messages` without a server: turns, blocks, fields and events alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_chunks import Said, answers, cuts, replay_message
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.serve.messages.body import MessagesBody, chat_for
from pagedattn.serve.messages.events import Answer
from pagedattn.serve.messages.input import to_messages
from pagedattn.serve.problems import ApiError
from pagedattn.serve.protocol import built
from pagedattn.serve.to_chat import as_chunk

HI = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "t1", "name": "now", "input": {"zone": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "noon"}
TOOL = {"name": "now", "description": "the time", "input_schema": {"type": "object"}}


def chat(messages: Any, system: Any = None) -> list[dict[str, Any]]:
    return to_messages(messages, system)[0]


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def body(**fields: Any) -> MessagesBody:
    return built(MessagesBody, {"messages": [HI], "max_tokens": 9, **fields})


# Turns and blocks become messages.
def test_system_is_the_first_message() -> None:
    assert chat([HI], "be kind") == [{"role": "system", "content": "be kind"}, HI]
    assert chat([HI], [text("a"), text("b")])[0]["content"] == "a\nb"
    assert chat([HI], "") == [HI]


def test_a_header_that_differs_each_time_spoils_no_prefix() -> None:
    blocks = [text("x-anthropic-billing-header: cch=1;"), text("be kind")]
    assert chat([HI], blocks)[0]["content"] == "be kind"


def test_turns_of_one_role_in_a_row_are_one() -> None:
    found = chat([HI, {"role": "user", "content": [text("ho")]}])
    assert found == [{"role": "user", "content": "hi\nho"}]


def test_calls_and_their_results() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "x"}
    blocks = [thought, hidden, text("a"), USE]
    answer = [{**RESULT, "content": [text("1"), text("2")]}, text("so?")]
    found = chat(
        [
            HI,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": answer},
        ]
    )
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "user"]
    assert found[1]["reasoning"] == "hm" and found[1]["content"] == "a"
    (call,) = found[1]["tool_calls"]
    assert call["id"] == "t1" and call["function"]["name"] == "now"
    assert json.loads(call["function"]["arguments"]) == {"zone": "é"}
    assert found[2] == {"role": "tool", "tool_call_id": "t1", "content": "1\n2"}
    assert found[3]["content"] == "so?"


def test_a_failed_call_says_so() -> None:
    turns = [HI, {"role": "assistant", "content": [USE]}]
    failed = {**RESULT, "is_error": True}
    found = chat([*turns, {"role": "user", "content": [failed]}])
    assert found[1]["content"] is None
    assert found[2]["content"] == "Error: noon"
    nothing = chat([*turns, {"role": "user", "content": [{**RESULT, "content": None}]}])
    assert nothing[2]["content"] == "" and len(nothing) == 3


@pytest.mark.parametrize(
    ("blocks", "goes_on"), [([text("The best is (")], True), ([USE], False)]
)
def test_an_assistants_last_text_is_gone_on_with(blocks: list, goes_on: bool) -> None:
    last = {"role": "assistant", "content": blocks}
    assert to_messages([HI, last], None)[1] is goes_on
    found = chat_for(body(messages=[HI, last], tools=[TOOL]))
    assert bool(found.continue_final_message) is goes_on
    assert found.generation_prompt is not goes_on


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        (None, "messages must"),
        ([], "messages must"),
        ([7], "messages[0] must"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content[0].text"),
        ([{"role": "user", "content": [USE]}], "content[0].type"),
        ([{"role": "user", "content": [RESULT]}], "content[0].tool_use_id"),
        ([{"role": "assistant", "content": [{**USE, "input": "x"}]}], "[0].input"),
        ([{"role": "assistant", "content": [{**USE, "id": None}]}], "[0].id"),
        ([HI, {"role": "assistant", "content": [{"type": ["a"]}]}], "[0].type"),
    ],
)
def test_what_is_no_block_is_named(messages: Any, where: str) -> None:
    with pytest.raises(ApiError) as wrong:
        to_messages(messages, None)
    assert wrong.value.status == 400 and where in wrong.value.message


# Fields become a chat's.
@pytest.mark.parametrize(
    ("choice", "chats"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "now"}, "named"),
        ({"type": "none"}, "none"),
        (None, "auto"),
    ],
)
def test_choices_are_a_chats(choice: Any, chats: str) -> None:
    found = chat_for(body(tools=[TOOL], tool_choice=choice))
    assert found.choice == chats and found.parallel_tool_calls is None
    assert found.tools[0].function.description == "the time"
    if choice and choice["type"] != "none":
        alone = {**choice, "disable_parallel_tool_use": True}
        assert chat_for(body(tools=[TOOL], tool_choice=alone)).one_call


def test_thinking_is_told_to_the_template_and_hidden_if_off() -> None:
    on = chat_for(body(thinking={"type": "enabled", "budget_tokens": 5}))
    off = chat_for(body(thinking={"type": "disabled"}))
    assert on.template_kwargs["enable_thinking"] is True
    assert off.template_kwargs["enable_thinking"] is False
    assert on.include_reasoning is None and off.include_reasoning is False
    assert chat_for(body()).template_kwargs == {}


def test_the_rest_keeps_its_meaning() -> None:
    found = chat_for(body(stop_sequences=["x"], top_k=3, temperature=0.5, top_p=0.5))
    assert (found.stop, found.top_k, found.temperature) == (["x"], 3, 0.5)
    assert found.max_completion_tokens == 9


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tools": [{"name": "now"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, None),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking"),
        ({"service_tier": "x"}, "service_tier"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop": ["x"]}, "stop"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"stop_sequences": "x"}, "stop_sequences"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as wrong:
        chat_for(body(**fields))
    assert wrong.value.status == 400 and param in (None, wrong.value.param)


# Chunks become events and blocks.
def run(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    answer = Answer("tiny")
    events = [event for chunk in chunks for event in answer.feed(chunk)]
    return answer.message, events + answer.finish()


@settings(deadline=None)
@given(st.data(), answers())
def test_any_cut_gives_the_whole_answer(data: st.DataObject, said: Said) -> None:
    message, events = run(data.draw(cuts(said)))
    whole, _ = run([as_chunk(said.completion())])
    assert {**message, "id": 0} == {**whole, "id": 0}
    assert replay_message(events) == message
    inputs = [b["input"] for b in message["content"] if b["type"] == "tool_use"]
    assert inputs == [json.loads(arguments) for _, arguments in said.calls]
    kinds = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
    assert message["stop_reason"] == kinds[said.reason]


def end(reason: str, stopped: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"delta": delta, "finish_reason": reason, "stop_reason": stopped}
    return {"choices": [choice]}


def test_the_sequence_that_stopped_it_is_told() -> None:
    message, events = run([end("stop", "END", content="a")])
    assert (message["stop_reason"], message["stop_sequence"]) == (
        "stop_sequence",
        "END",
    )
    assert events[-2]["delta"]["stop_sequence"] == "END"
    message, _ = run([end("stop", 256, content="a")])
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


def test_c73_a_named_call_is_a_tool_use_here() -> None:
    """Chats say "stop" of a choice that was none; Anthropic's messages tool_use."""
    call = {"id": "c", "function": {"name": "now", "arguments": "{}"}}
    message, events = run([end("stop", None, tool_calls=[call])])
    assert message["stop_reason"] == "tool_use" == events[-2]["delta"]["stop_reason"]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("", {}),
        ('{"a": 1, "b": "cu', {"a": 1}),
        ("[1]", {"arguments": "[1]"}),
        ("no", {"arguments": "no"}),
    ],
)
def test_arguments_that_were_cut_are_what_is_whole(arguments: str, value: dict) -> None:
    call = {"id": "c", "function": {"name": "now", "arguments": arguments}}
    message, _ = run([end("length", None, tool_calls=[call])])
    assert message["content"][0]["input"] == value
    assert message["stop_reason"] == "max_tokens"


def test_cached_tokens_are_counted_apart() -> None:
    usage = {"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23}
    usage["prompt_tokens_details"] = {"cached_tokens": 16}
    message, events = run([{**end("stop", None, content="a"), "usage": usage}])
    found = message["usage"]
    assert (found["input_tokens"], found["cache_read_input_tokens"]) == (4, 16)
    first = events[0]["message"]["usage"]
    assert (first["input_tokens"], first["output_tokens"]) == (4, 0)


@pytest.mark.parametrize("reason", ["abort", None])
def test_an_answer_that_was_ended_is_an_error(reason: str | None) -> None:
    answer = Answer("tiny")
    answer.feed({"choices": [{"delta": {"content": "a"}, "finish_reason": reason}]})
    with pytest.raises(ApiError) as ended:
        answer.finish()
    assert ended.value.status == 503
