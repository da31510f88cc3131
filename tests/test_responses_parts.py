"""`/v1/responses` without a server: items, events and the store alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from chat_chunks import Said, answers, cuts, replay_response
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.serve.problems import ApiError
from pagedattn.serve.protocol import built
from pagedattn.serve.responses.body import ResponsesBody, chat_for
from pagedattn.serve.responses.events import Answer
from pagedattn.serve.responses.input import input_items, to_messages
from pagedattn.serve.responses.store import Job, Kept, ResponseStore
from pagedattn.serve.to_chat import as_chunk

CALL = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "noon"}
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}


def messages(value: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    return to_messages(input_items(value), instructions)


def fresh() -> dict[str, Any]:
    return {"id": "resp_1", "status": "in_progress", "output": [], "usage": None}


def body(**fields: Any) -> ResponsesBody:
    return built(ResponsesBody, {"input": "hi", **fields})


# Items become messages.
def test_a_string_is_a_users_message() -> None:
    system = {"role": "system", "content": "be kind"}
    assert messages("hi", "be kind") == [system, {"role": "user", "content": "hi"}]


def test_parts_of_either_side_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    out = [{"type": "output_text", "text": "c"}, {"type": "refusal", "refusal": "no"}]
    found = messages(
        [{"role": "developer", "content": parts}, {"role": "assistant", "content": out}]
    )
    assert found[0] == {"role": "developer", "content": "a\nb"}
    assert found[1] == {"role": "assistant", "content": "c\nno"}


def test_an_assistants_turn_is_one_message() -> None:
    thought = {
        "type": "reasoning",
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    said = {"type": "message", "role": "assistant", "content": "so"}
    second = {**CALL, "call_id": "c2"}
    found = messages([thought, said, CALL, second, RESULT, said])
    assert [m["role"] for m in found] == ["assistant", "tool", "assistant"]
    assert found[0]["reasoning"] == "t" and found[0]["content"] == "so"
    assert [c["id"] for c in found[0]["tool_calls"]] == ["c1", "c2"]
    assert found[1] == {"role": "tool", "tool_call_id": "c1", "content": "noon"}


def test_reasoning_of_another_turn_begins_another_message() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    found = messages([CALL, thought, {**CALL, "call_id": "c2"}])
    assert [m["role"] for m in found] == ["assistant", "assistant"]
    assert found[1]["reasoning"] == "t" and len(found[1]["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([], "input must"),
        (7, "input must"),
        ([7], "input[0] must"),
        ([{"role": "foo", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": [7]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "content[0].text"),
        ([{"type": "web_search_call"}], "input[0].type"),
        ([{"type": ["a"]}], "input[0].type"),
        ([RESULT], "input[0].call_id"),
        ([{**CALL, "arguments": {}}], "input[0].arguments"),
        ([{**CALL, "call_id": None}], "input[0].call_id"),
        ([{"type": "item_reference", "id": "x"}], "input[0].type"),
    ],
)
def test_what_is_no_item_is_named(value: Any, where: str) -> None:
    with pytest.raises(ApiError) as wrong:
        messages(value)
    assert wrong.value.status == 400 and where in wrong.value.message
    assert wrong.value.param == "input"


# Fields become a chat's.
def test_tools_and_choice_are_a_chats() -> None:
    chat = chat_for(
        body(tools=[TOOL], tool_choice={"type": "function", "name": "now"}),
        messages("x"),
    )
    assert chat.named == "now" and chat.schemas == {"now": {"type": "object"}}


def test_allowed_tools_are_the_only_ones() -> None:
    tools = [TOOL, {**TOOL, "name": "add"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "add"}]}
    chat = chat_for(body(tools=tools, tool_choice=choice), messages("x"))
    assert list(chat.schemas) == ["add"] and chat.choice == "required"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": {"type": "mcp"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, None),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"include": ["x"]}, "include"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"stream_options": {}}, "stream_options"),
        ({"conversation": "x"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_output_tokens": 1.5}, "max_output_tokens"),
        ({"text": "json"}, "text"),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as wrong:
        chat_for(body(**fields), messages("x"))
    assert wrong.value.status == 400 and param in (None, wrong.value.param)


# Chunks become events and items.
def run(chunks: list[dict[str, Any]]) -> tuple[Answer, list[dict[str, Any]]]:
    answer = Answer(fresh())
    events = answer.start()
    for chunk in chunks:
        events += answer.feed(chunk)
    return answer, events + answer.finish()


def nameless(response: dict[str, Any]) -> dict[str, Any]:
    """Without the ids and times that every answer draws anew."""
    output = [{**item, "id": None} for item in response["output"]]
    return {**response, "output": output, "completed_at": None}


@settings(deadline=None)
@given(st.data(), answers())
def test_any_cut_gives_the_whole_answer(data: st.DataObject, said: Said) -> None:
    answer, events = run(data.draw(cuts(said)))
    whole, _ = run([as_chunk(said.completion())])
    assert nameless(answer.response) == nameless(whole.response)
    assert replay_response(events) == answer.response
    kinds = [item["type"] for item in answer.response["output"]]
    said_kinds = ["reasoning"] * bool(said.reasoning) + ["message"] * bool(said.content)
    assert kinds == said_kinds + ["function_call"] * len(said.calls)
    cut = said.reason == "length"
    assert answer.response["status"] == ("incomplete" if cut else "completed")


def test_usage_is_in_this_endpoints_words() -> None:
    answer = Answer(fresh())
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}
    usage["prompt_tokens_details"] = {"cached_tokens": 8}
    usage["completion_tokens_details"] = {"reasoning_tokens": 3}
    answer.feed({"choices": [], "usage": usage})
    found = answer.response["usage"]
    assert (found["input_tokens"], found["output_tokens"]) == (9, 4)
    assert found["input_tokens_details"]["cached_tokens"] == 8
    assert found["output_tokens_details"] == {"reasoning_tokens": 3}


def test_every_logprob_is_told_once() -> None:
    """Tokens that end no character come with the next text, those after it alone."""
    steps = [("", "t0"), ("é", "t1"), ("b", "t2"), ("", "t3")]
    answer = Answer(fresh())
    events = answer.start()
    for text, token in steps:
        choice = {"delta": {"content": text}, "logprobs": {"content": [token]}}
        events += answer.feed({"choices": [choice]})
    events += answer.feed({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    events += answer.finish()
    told = [
        t for e in events if e["type"].endswith("text.delta") for t in e["logprobs"]
    ]
    part = answer.response["output"][0]["content"][0]
    assert told == part["logprobs"] == ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize("reason", [None, "abort"])
def test_an_answer_that_was_ended_has_failed(reason: str | None) -> None:
    answer = Answer(fresh())
    events = answer.start()
    choice = {"delta": {"content": "a"}, "finish_reason": reason}
    events += answer.feed({"choices": [choice]}) + answer.finish()
    assert replay_response(events)["status"] == "failed"
    assert answer.response["error"]["code"] == "server_error"
    assert answer.response["output"][0]["status"] == "incomplete"


# The store.
def kept(name: str, size: int = 1) -> Kept:
    return Kept({"id": name, "output": []}, [{"text": "x" * size}])


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(2, 10_000)
    store.put(kept("a"))
    store.put(kept("b"))
    store.get("a")
    store.put(kept("c"))
    assert store.get("a") and store.get("c") and len(store) == 2
    with pytest.raises(ApiError) as gone:
        store.get("b")
    assert gone.value.status == 404


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400)), max_size=30))
def test_the_limits_always_hold(puts: list[tuple[int, int]]) -> None:
    store = ResponseStore(3, 700)
    for name, size in puts:
        store.put(kept(str(name), size))
        left = [k for k in map(str, range(6)) if _has(store, k)]
        assert len(store) == len(left) <= 3
        assert store.bytes == sum(store.get(k).size for k in left) <= 700
        assert str(name) in left or kept(str(name), size).weigh() > 700


def _has(store: ResponseStore, key: str) -> bool:
    try:
        return store.get(key) is not None
    except ApiError:
        return False


def test_running_jobs_stay_and_have_a_limit() -> None:
    store = ResponseStore(2, 10_000)
    jobs = []
    for name in "ab":
        jobs.append(kept(name))
        jobs[-1].job = Job(False)
        store.put(jobs[-1])
    store.put(kept("c"))
    assert not _has(store, "c") and _has(store, "a") and _has(store, "b")
    late = kept("d")
    late.job = Job(False)
    with pytest.raises(ApiError) as full:
        store.put(late)
    assert full.value.status == 429 and len(store) == 2
    jobs[0].job.add([], ended=True)
    store.put(late)
    assert _has(store, "d") and not _has(store, "a")


def test_events_are_followed_from_anywhere_to_the_end() -> None:
    async def follow(job: Job, start: int) -> list[int]:
        return [event["n"] async for event in job.follow(start)]

    async def scene() -> list[list[int]]:
        job = Job(True)
        job.add([{"n": 0}])
        early = asyncio.create_task(follow(job, 0))
        late = asyncio.create_task(follow(job, 2))
        for n in range(1, 5):
            await asyncio.sleep(0)
            job.add([{"n": n}])
        job.add([], ended=True)
        return [await early, await late, await follow(job, 4), await follow(job, 9)]

    found = asyncio.run(asyncio.wait_for(scene(), 5))
    assert found == [[0, 1, 2, 3, 4], [2, 3, 4], [4], []]


def test_sizes_are_those_of_the_json() -> None:
    assert kept("a", 5).weigh() >= len(json.dumps("x" * 5))
