"""The real `anthropic` client against a live server: messages, streams, tools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import anthropic
import pytest
from serve_live import Live, engine_for, serving, write_model
from serve_scripted import SAY, TEMPLATE, Scripted

from pagedattn.serve.settings import ServeArgs

KEY = "sesame"
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
CALL += "</tool_call>"
THINKS = {"type": "enabled", "budget_tokens": 100}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that says what it is told, and reads calls and thoughts."""
    engine = Scripted(engine_for(write_model(tmp_path_factory.mktemp("said"))))
    args = ServeArgs(
        api_key=[KEY],
        chat_template=TEMPLATE,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    with serving(engine, args) as live:
        yield live
        assert live.front.in_flight == 0
    engine.shutdown()


@pytest.fixture
def client(live: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=live.url, api_key=KEY, max_retries=0) as client:
        yield client


def asked(text: str, **more: object) -> dict:
    """What is answered with this text."""
    messages = [{"role": "user", "content": SAY + text}]
    thinking = {"type": "disabled"}
    return {
        "model": "tiny",
        "max_tokens": 300,
        "messages": messages,
        "thinking": thinking,
        **more,
    }


def test_a_message_and_its_count(client: anthropic.Anthropic) -> None:
    body = asked("hello", system="be kind")
    message = client.messages.create(**body)
    assert [block.text for block in message.content] == ["hello"]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 5
    del body["max_tokens"]
    count = client.messages.count_tokens(**body)
    assert count.input_tokens == message.usage.input_tokens


def test_a_stream_with_thoughts(client: anthropic.Anthropic) -> None:
    body = asked("<think>let me see</think>\n\nfine", thinking=THINKS)
    with client.messages.stream(**body) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    assert {"thinking", "text", "signature"} <= set(events)
    thought, text = message.content
    assert thought.thinking.strip() == "let me see" and thought.signature
    assert text.text.strip() == "fine" and message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    whole = client.messages.create(**body)
    assert [b.to_dict() for b in message.content] == [
        b.to_dict() for b in whole.content
    ]


def test_a_tool_is_called_and_answered(client: anthropic.Anthropic) -> None:
    body = asked("well " + CALL, tools=[TOOL])
    with client.messages.stream(**body) as stream:
        streamed = stream.get_final_message()
    whole = client.messages.create(**body)
    for message in (streamed, whole):
        assert message.stop_reason == "tool_use"
        text, use = message.content
        assert text.text.strip() == "well"
        assert (use.name, use.input) == ("get_weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    turns = [
        *body["messages"],
        whole.to_param(),
        {"role": "user", "content": [result, {"type": "text", "text": SAY + "wet"}]},
    ]
    answer = client.messages.create(**{**body, "messages": turns})
    assert [block.text for block in answer.content] == ["wet"]


def test_a_tool_can_be_required(client: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    body = asked('{"city": "Rome"}', tools=[TOOL], tool_choice=choice)
    message = client.messages.create(**body)
    (use,) = message.content
    assert use.input == {"city": "Rome"} and message.stop_reason == "tool_use"


def test_errors_have_their_class(client: anthropic.Anthropic, live: Live) -> None:
    with pytest.raises(anthropic.NotFoundError) as lost:
        client.messages.create(**{**asked("x"), "model": "other"})
    assert lost.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**asked("x"), "max_tokens": 0})
    stranger = anthropic.Anthropic(base_url=live.url, api_key="x", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**asked("x"))


def test_many_at_once(live: Live) -> None:
    async def ask(client: anthropic.AsyncAnthropic, i: int) -> str:
        if i % 2:
            message = await client.messages.create(**asked(f"number {i}"))
            return message.content[0].text
        async with client.messages.stream(**asked(f"number {i}")) as stream:
            return "".join([text async for text in stream.text_stream])

    async def scene() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=live.url, api_key=KEY) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(20)))

    assert asyncio.run(scene()) == [f"number {i}" for i in range(20)]
