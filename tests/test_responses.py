"""`/v1/responses` through the real `openai` client and over raw HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from chat_chunks import replay_response
from pydantic import BaseModel
from serve_live import Live, engine_for, serving, write_model
from serve_scripted import SAY, TEMPLATE, Scripted

from pagedattn.serve.settings import ServeArgs

RESPONSES = "/v1/responses"
GREEDY = {"model": "tiny", "temperature": 0}
LONG = {**GREEDY, "input": "go on", "extra_body": {"ignore_eos": True}}
TOOL = {"type": "function", "name": "now", "parameters": {"type": "object"}}
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Tokyo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine = engine_for(write_model(tmp_path_factory.mktemp("tiny")))
    with serving(engine, ServeArgs(max_stored_responses=40)) as live:
        yield live
    engine.shutdown()


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server; afterwards it must be idle, its pool whole."""
    yield shared
    shared.wait_idle()


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as c:
        yield c


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a server that says what it is told, and reads calls and thoughts."""
    engine = Scripted(engine_for(write_model(tmp_path_factory.mktemp("said"))))
    args = ServeArgs(
        chat_template=TEMPLATE,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    with serving(engine, args) as live:
        yield openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0)
        assert live.front.in_flight == 0
    engine.shutdown()


def events_of(live: Live, **body: Any) -> list[dict[str, Any]]:
    """The events of a streamed answer, whose names must be their types."""
    reply = live.post(RESPONSES, {"temperature": 0, "stream": True, **body})
    assert reply.status_code == 200, reply.text
    return frames(reply.text)


def frames(text: str) -> list[dict[str, Any]]:
    """Server-sent events, each with its name."""
    found = []
    for frame in text.split("\n\n")[:-1]:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + found[-1]["type"]
    return found


# Whole and streamed.
def test_a_response_is_the_chats_answer(client: openai.OpenAI, live: Live) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
    chat = live.chat(**asked)
    found = client.responses.create(**GREEDY, input="Hi", max_output_tokens=9)
    assert found.output_text == chat["choices"][0]["message"]["content"]
    assert found.status == "incomplete" and found.error is None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert found.usage.output_tokens == 9 == found.usage.total_tokens - 5
    assert found.usage.output_tokens_details.reasoning_tokens == 0


def test_a_stream_is_the_whole_answer_in_order(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "input": "Hello", "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.incomplete"),
    ]
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == 12


def test_raw_events_add_up(live: Live) -> None:
    events = events_of(live, input="Hello", max_output_tokens=9, top_logprobs=2)
    response = replay_response(events)
    told = [e["logprobs"] for e in events if e["type"].endswith("output_text.delta")]
    part = response["output"][0]["content"][0]
    assert sum(told, []) == part["logprobs"] and len(part["logprobs"]) == 9
    body = {"input": "Hello", "max_output_tokens": 9, "temperature": 0}
    whole = live.post(RESPONSES, {**body, "top_logprobs": 2}).json()
    assert whole["output"][0]["content"] == response["output"][0]["content"]
    bare = live.post(RESPONSES, body).json()["output"][0]["content"][0]
    assert bare == {**part, "logprobs": []}


def test_instructions_and_items_make_the_prompt(client: openai.OpenAI) -> None:
    items = [{"role": "developer", "content": "y"}, {"role": "user", "content": "z"}]
    found = client.responses.create(
        **GREEDY, instructions="xx", input=items, max_output_tokens=1
    )
    # <|system|>xx<|end|> <|system|>y<|end|> <|user|>z<|end|> <|assistant|>
    assert found.usage.input_tokens == 4 + 3 + 3 + 1


def test_c84_cached_tokens_are_told(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "input": "cached, " * 4, "max_output_tokens": 2}
    counts = [client.responses.create(**asked).usage for _ in range(2)]
    cached = [usage.input_tokens_details.cached_tokens for usage in counts]
    assert cached == [0, 32] and counts[0].input_tokens == counts[1].input_tokens == 35


# What is kept.
def test_a_conversation_goes_on(client: openai.OpenAI, live: Live) -> None:
    first = client.responses.create(
        **GREEDY, instructions="once", input="ab", max_output_tokens=4
    )
    second = client.responses.create(
        **GREEDY, input="cd", previous_response_id=first.id, max_output_tokens=4
    )
    said = [("user", "ab"), ("assistant", first.output_text), ("user", "cd")]
    chat = live.chat(
        messages=[{"role": r, "content": c} for r, c in said], max_tokens=4
    )
    assert second.output_text == chat["choices"][0]["message"]["content"]
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert client.responses.retrieve(second.id).output == second.output
    items = client.responses.input_items.list(second.id).data
    assert [item.content[0].text for item in items] == [c for _, c in said]


def test_what_is_not_kept_is_not_found(client: openai.OpenAI, live: Live) -> None:
    asked = {**GREEDY, "input": "x", "max_output_tokens": 1}
    secret = client.responses.create(**asked, store=False)
    gone = client.responses.create(**asked)
    client.responses.delete(gone.id)
    for response_id in (secret.id, gone.id, "resp_0", "x" * 5_000):
        for call in (
            client.responses.retrieve,
            client.responses.cancel,
            client.responses.delete,
        ):
            with pytest.raises(openai.NotFoundError):
                call(response_id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**asked, previous_response_id=response_id)
    assert live.http.get(f"{RESPONSES}/{gone.id}/input_items").status_code == 404


def test_the_oldest_are_forgotten(client: openai.OpenAI, live: Live) -> None:
    asked = {**GREEDY, "input": "x", "max_output_tokens": 1}
    ids = [client.responses.create(**asked).id for _ in range(42)]
    assert len(live.front.responses) == 40
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids[1])
    assert client.responses.retrieve(ids[2]).id == ids[2]


# In the background.
def ended(client: openai.OpenAI, response_id: str) -> Any:
    deadline = time.monotonic() + 30
    while (found := client.responses.retrieve(response_id)).status == "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_background_is_fetched_later(client: openai.OpenAI) -> None:
    asked = {**GREEDY, "input": "Hi", "max_output_tokens": 30}
    begun = client.responses.create(**asked, background=True)
    assert begun.status == "in_progress" and begun.background
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(begun.id, stream=True)
    whole = client.responses.create(**asked)
    found = ended(client, begun.id)
    assert found.output_text == whole.output_text
    assert found.usage.output_tokens == 30
    assert client.responses.cancel(begun.id).status == found.status


def test_background_is_cancelled(client: openai.OpenAI, live: Live) -> None:
    begun = client.responses.create(**LONG, max_output_tokens=450, background=True)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**GREEDY, input="x", previous_response_id=begun.id)
    assert client.responses.cancel(begun.id).status == "cancelled"
    live.wait_idle()
    assert client.responses.retrieve(begun.id).status == "cancelled"
    whole = client.responses.create(**GREEDY, input="x", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(whole.id)
    second = client.responses.create(**LONG, max_output_tokens=450, background=True)
    client.responses.delete(second.id)
    live.wait_idle()


def test_background_outlives_its_stream(client: openai.OpenAI, live: Live) -> None:
    body = {"input": "go on", "max_output_tokens": 200, "ignore_eos": True}
    body |= {"background": True, "stream": True, "temperature": 0}
    with live.http.stream("POST", RESPONSES, json=body) as reply:
        line = next(line for line in reply.iter_lines() if line.startswith("data"))
    response_id = json.loads(line.removeprefix("data: "))["response"]["id"]
    path = f"{RESPONSES}/{response_id}?stream=true"
    events = frames(live.http.get(path).text)
    response = replay_response(events)
    assert response["usage"]["output_tokens"] == 200
    assert response == live.http.get(f"{RESPONSES}/{response_id}").json()
    later = frames(live.http.get(path + "&starting_after=5").text)
    assert later == events[6:]
    assert live.http.get(path + "&starting_after=x").status_code == 400
    again = list(client.responses.retrieve(response_id, stream=True))
    assert [e.sequence_number for e in again] == list(range(len(events)))


# Clients that leave, and many at once.
def test_c88_a_client_that_leaves_frees_everything(live: Live) -> None:
    body = {"input": "go on", "max_output_tokens": 450, "ignore_eos": True}
    before = len(live.front.responses)
    for _ in range(5):
        stream = {**body, "stream": True}
        with live.http.stream("POST", RESPONSES, json=stream) as reply:
            next(reply.iter_lines())
        with pytest.raises(Exception, match="timed out"):
            live.post(RESPONSES, body, timeout=0.05)
    live.wait_idle()
    assert len(live.front.responses) == before


def test_c89_many_at_once_with_one_request_id(live: Live) -> None:
    headers = {"X-Request-Id": "same"}

    async def ask(client: openai.AsyncOpenAI, i: int) -> Any:
        asked = {**GREEDY, "input": f"number {i}", "max_output_tokens": 16}
        if i % 3 == 0:
            return await client.responses.create(**asked, extra_headers=headers)
        if i % 3 == 1:
            begun = await client.responses.create(**asked, background=True)
            while begun.status == "in_progress":
                await asyncio.sleep(0.01)
                begun = await client.responses.retrieve(begun.id)
            return begun
        async with client.responses.stream(**asked, extra_headers=headers) as stream:
            return [e async for e in stream][-1].response

    async def scene() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="x") as c:
            return await asyncio.gather(*(ask(c, i) for i in range(24)))

    found = asyncio.run(scene())
    assert len({r.id for r in found}) == 24
    for i in range(0, 24, 7):
        body = {"input": f"number {i}", "max_output_tokens": 16, "temperature": 0}
        alone = live.post(RESPONSES, body).json()
        assert found[i].output_text == alone["output"][0]["content"][0]["text"]


# What is wrong.
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ("nonsense", 400, None),
        ('{"input": "x", "temperature": NaN}', 400, None),
        ("[]", 400, None),
        ({}, 400, "input"),
        ({"input": 7}, 400, "input"),
        ({"input": "x", "model": "other"}, 404, "model"),
        ({"input": "x", "temperature": 9}, 400, "temperature"),
        ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 10**30}, 400, "max_output_tokens"),
        ({"input": "x", "top_logprobs": 10**6}, 400, "top_logprobs"),
        ({"input": "x" * 9_000}, 400, "input"),
        ({"input": "x" * 9_000, "background": True}, 400, "input"),
        ({"input": "x" * 9_000, "stream": True}, 400, "input"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, 400, None),
    ],
)
def test_faults_have_their_status_and_parameter(
    live: Live, body: Any, status: int, param: str | None
) -> None:
    reply = live.post(RESPONSES, body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert error["code"] == status and param in (None, error["param"])


def test_a_schema_is_enforced(client: openai.OpenAI) -> None:
    """The tiny model knows no JSON; its grammar does."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    schema |= {"required": ["ok"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    found = client.responses.create(
        **GREEDY, input="Hi", text={"format": form}, max_output_tokens=100
    )
    assert found.status == "completed"
    assert list(json.loads(found.output_text)) == ["ok"]


def test_unknown_fields_are_ignored(live: Live) -> None:
    body = {"input": "x", "max_output_tokens": 1, "frobnicate": 3, "user": "me"}
    assert live.post(RESPONSES, body).status_code == 200


# Tools, thoughts and formats, on a server that says what it is told.
def test_a_call_and_its_result(scripted: openai.OpenAI) -> None:
    asked = {"model": "tiny", "tools": [TOOL], "extra_body": SILENT}
    first = scripted.responses.create(**asked, input=SAY + "well " + CALL)
    assert first.status == "completed" and first.output_text.strip() == "well"
    call = first.output[-1]
    assert call.type == "function_call" and call.name == "now"
    assert json.loads(call.arguments) == {"zone": "Tokyo"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "9"}
    items = [{"role": "user", "content": SAY + "noon"}]
    second = scripted.responses.create(
        **asked, input=[result, *items], previous_response_id=first.id
    )
    assert second.output_text == "noon"
    lost = {**result, "call_id": "nobody"}
    with pytest.raises(openai.BadRequestError, match="answers no function_call"):
        scripted.responses.create(**asked, input=[lost], previous_response_id=first.id)


@pytest.mark.parametrize(
    "text",
    [
        "just words",
        CALL,
        CALL + CALL,
        "<think>let me see</think>\n\nso " + CALL,
        "<think>only thoughts",
    ],
)
def test_c71_streamed_items_are_the_whole_answers(
    scripted: openai.OpenAI, text: str
) -> None:
    asked = {"model": "tiny", "tools": [TOOL], "input": SAY + text}
    asked["extra_body"] = {} if text.startswith("<think>") else SILENT
    whole = scripted.responses.create(**asked)
    with scripted.responses.stream(**asked) as stream:
        events = [e.model_dump(mode="json") for e in stream]
    last = events[-1]["response"]
    assert [plain(i) for i in last["output"]] == [
        plain(i.model_dump(mode="json")) for i in whole.output
    ]
    assert last["usage"] == whole.usage.model_dump(mode="json")
    thought = whole.usage.output_tokens_details.reasoning_tokens
    assert (thought > 0) == text.startswith("<think>")


def plain(item: dict[str, Any]) -> tuple[Any, ...]:
    """What an item says, without the names it got."""
    texts = [part["text"] for part in item.get("content") or []]
    return item["type"], item["status"], texts, item.get("name"), item.get("arguments")


def test_c75_a_named_tool_is_called(scripted: openai.OpenAI) -> None:
    found = scripted.responses.create(
        model="tiny",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "now"},
        input=SAY + '{"zone": "Oslo"}',
    )
    (call,) = found.output
    assert (call.name, call.arguments) == ("now", '{"zone": "Oslo"}')
    with pytest.raises(openai.BadRequestError):
        scripted.responses.create(
            model="tiny",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "later"},
            input="x",
        )


def test_reasoning_comes_back_as_reasoning(scripted: openai.OpenAI) -> None:
    text = SAY + "<think>hm</think>\n\nso"
    first = scripted.responses.create(model="tiny", input=text)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert first.output[0].content[0].text.strip() == "hm"
    items = [item.model_dump(mode="json") for item in first.output]
    asked = [*items, {"role": "user", "content": SAY + "yes"}]
    again = scripted.responses.create(model="tiny", input=asked, extra_body=SILENT)
    assert again.output_text == "yes"


class Answer(BaseModel):
    """A schema that clients ask for by its class."""

    number: int


def test_a_schema_reaches_the_chat(scripted: openai.OpenAI) -> None:
    """Parsed by the client; enforced, or refused by name, by the chat."""
    try:
        found = scripted.responses.parse(
            model="tiny",
            input=SAY + '{"number": 7}',
            text_format=Answer,
            extra_body=SILENT,
        )
    except openai.BadRequestError as problem:
        assert problem.body["param"] == "text.format"
    else:
        assert found.output_parsed == Answer(number=7)
