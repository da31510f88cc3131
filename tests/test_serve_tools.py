"""Tools, reasoning and what chats send, over HTTP and through the openai client.

The engine says what a test tells it to say, in random pieces; parsing itself is
tested elsewhere, on every split of many samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_live import Live, engine_for, serving, write_model
from serve_scripted import SAY, TEMPLATE, Scripted

import pagedattn.serve
from pagedattn.errors import UserError
from pagedattn.serve.reading import Reading
from pagedattn.serve.settings import ServeArgs
from pagedattn.serve.tools import TOOL_PARSERS
from pagedattn.serve.tools.calls import ToolCall
from pagedattn.text.template import ChatTemplate

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tokyo"}}\n'
WEATHER += "</tool_call>"
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}
SILENT = {"chat_template_kwargs": {"enable_thinking": False}}


def settings(**more: Any) -> ServeArgs:
    return ServeArgs(chat_template=TEMPLATE, **more)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    engine = Scripted(engine_for(write_model(tmp_path_factory.mktemp("tiny"))))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def live(engine: Scripted) -> Iterator[Live]:
    """Reads hermes' calls."""
    args = settings(enable_auto_tool_choice=True, tool_call_parser="hermes")
    with serving(engine, args) as live:
        yield live


@pytest.fixture(scope="module")
def thinker(engine: Scripted) -> Iterator[Live]:
    """Reads hermes' calls and Qwen's thoughts."""
    args = settings(
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    with serving(engine, args) as live:
        yield live


def says(text: str, **more: Any) -> dict[str, Any]:
    """A request that is answered with this text."""
    return {"messages": [{"role": "user", "content": SAY + text}], **more}


def whole(live: Live, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(message, finish reason), calls without their ids."""
    choice = live.chat(**body)["choices"][0]
    message = choice["message"]
    assert message.pop("role") == "assistant" and message.pop("refusal") is None
    message["content"] = message["content"] or None
    assert message.get("reasoning") == message.pop("reasoning_content", None)
    return without_ids(message), choice["finish_reason"]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    for call in message.get("tool_calls", ()):
        assert call.pop("id") and call.pop("type") == "function"
    return message


def streamed(live: Live, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The same, joined from the chunks."""
    message: dict[str, Any] = {}
    reasons = []
    for chunk in live.chunks(CHAT, body):
        for choice in chunk["choices"]:
            join(message, choice["delta"])
            reasons.append(choice["finish_reason"])
    assert all(r is None for r in reasons[:-1])
    assert message.pop("role") == "assistant"
    message["content"] = message["content"] or None
    return without_ids(message), reasons[-1]


def join(message: dict[str, Any], delta: dict[str, Any]) -> None:
    assert delta.get("reasoning") == delta.pop("reasoning_content", None)
    for name in ("role", "content", "reasoning"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    for part in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if part["index"] == len(calls):
            calls.append({**part, "function": dict(part["function"])})
            del calls[-1]["index"]
        else:
            more = part["function"]["arguments"]
            calls[part["index"]]["function"]["arguments"] += more


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def refused(live: Live, body: dict[str, Any], param: str) -> str:
    reply = live.post(CHAT, {"messages": [{"role": "user", "content": "x"}], **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and error["type"] == "BadRequestError"
    return error["message"]


# Tools.
def test_c71_calls_stream_as_they_are_answered_whole(live: Live) -> None:
    body = says(f"I look.\n{WEATHER}\n{NOW}", tools=TOOLS)
    message, reason = whole(live, body)
    assert message == {
        "content": "I look.\n",
        "tool_calls": [call("get_weather", '{"city": "Tokyo"}'), call("now", "{}")],
    }
    assert reason == "tool_calls"
    assert streamed(live, body) == (message, reason)


@pytest.mark.parametrize(
    ("text", "limit", "reason"),
    [
        (WEATHER, None, "tool_calls"),
        ("No call.", None, "stop"),
        ("<tool_call>nonsense", None, "stop"),
        (WEATHER, 60, "length"),
        (WEATHER, 12, "length"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_c73_finish_reason(
    live: Live, text: str, limit: int | None, reason: str, choice: str | None
) -> None:
    body = says(text, tools=TOOLS, tool_choice=choice, max_tokens=limit)
    message, got = whole(live, body)
    assert streamed(live, body) == (message, got)
    called = choice != "none" and text == WEATHER and limit != 12
    assert ("tool_calls" in message) == called
    if choice == "none":
        assert message["content"] == text[: limit or 999]
        assert got == ("length" if limit else "stop")
    else:
        assert got == reason


def test_no_parallel_calls_leave_the_first(live: Live) -> None:
    body = says(NOW + WEATHER, tools=TOOLS, parallel_tool_calls=False)
    message, reason = whole(live, body)
    assert message["tool_calls"] == [call("now", "{}")] and reason == "tool_calls"
    assert streamed(live, body) == (message, reason)


def test_choices_of_one_request_have_their_own_calls(live: Live) -> None:
    body = says(WEATHER, tools=TOOLS, n=3, temperature=1)
    answer = live.chat(**body)
    ids = [c["message"]["tool_calls"][0]["id"] for c in answer["choices"]]
    assert len(set(ids)) == 3
    joined: dict[int, dict[str, Any]] = {0: {}, 1: {}, 2: {}}
    for chunk in live.chunks(CHAT, body):
        for choice in chunk["choices"]:
            join(joined[choice["index"]], choice["delta"])
    expected = [call("get_weather", '{"city": "Tokyo"}')]
    assert all(without_ids(m)["tool_calls"] == expected for m in joined.values())


def test_client_reads_calls(live: Live) -> None:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="x", max_retries=0) as client:
        asked = {"model": "tiny", "tools": TOOLS, **says(f"Yes. {WEATHER}{NOW}")}
        message = client.chat.completions.create(**asked).choices[0].message
        assert [c.function.name for c in message.tool_calls] == ["get_weather", "now"]
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls" and final.message.content == "Yes. "
        got = [c.function.arguments for c in final.message.tool_calls]
        assert got == ['{"city": "Tokyo"}', "{}"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": []}, "tools", "empty"),
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "needs tools",
        ),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tool_choice",
            "'f'",
        ),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", ""),
        ({"tools": [{"type": "function"}]}, "tools", "function"),
        ({"tools": [{"type": "browser"}]}, "tools", "type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "name"),
        ({"tools": TOOLS * 600}, "tools", "1024"),
    ],
)
def test_c75_choices_and_tools_that_can_not_be(
    live: Live, body: dict[str, Any], param: str, words: str
) -> None:
    assert words in refused(live, body, param)


def test_auto_without_the_flags_names_them(engine: Scripted) -> None:
    with serving(engine, settings()) as live:
        refused(live, {"tools": TOOLS, "tool_choice": "auto"}, "tool_choice")
        message = refused(live, {"tools": TOOLS}, "tools")
        assert "--enable-auto-tool-choice" in message
        assert "--tool-call-parser" in message
        body = says(WEATHER, tools=TOOLS, tool_choice="none")
        assert whole(live, body) == ({"content": WEATHER}, "stop")


def test_template_without_tools_says_so(engine: Scripted) -> None:
    args = ServeArgs(enable_auto_tool_choice=True, tool_call_parser="hermes")
    with serving(engine, args) as live:
        message = refused(live, {"tools": TOOLS}, "tools")
        assert "--chat-template" in message


def test_c79_tools_and_history_are_the_same_ids_on_every_path(live: Live) -> None:
    history = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "now", "arguments": '{"a": 1}'},
                }
            ],
        },
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": [{"type": "text", "text": "noon"}],
        },
    ]
    form = {"messages": history, "tools": TOOLS}
    ids = live.post("/tokenize", form).json()["tokens"]
    answer = live.chat(**form, return_token_ids=True, return_prompt_text=True)
    assert answer["prompt_token_ids"] == ids
    assert 'CALL now {"a": 1}' in answer["prompt_text"]
    assert json.dumps(TOOLS) in answer["prompt_text"]
    assert answer["prompt_text"].endswith("noon<|end|><|assistant|>")


def test_bad_arguments_in_history_are_named(live: Live) -> None:
    function = {"name": "now", "arguments": "{"}
    history = [{"role": "assistant", "tool_calls": [{"function": function}]}]
    assert "not JSON" in refused(live, {"messages": history}, "messages[0].tool_calls")


def test_special_markers_are_shown_to_the_parser(live: Live, engine: Scripted) -> None:
    """Where a marker is a special token, texts would leave it out."""
    read = Reading(lambda text, final: None, markers=("x", "<|user|>"))
    assert read.needs_specials(engine.tokenizer)
    plain = Reading(lambda text, final: None, markers=("<tool_call>",))
    assert not plain.needs_specials(engine.tokenizer)
    live.chat(**says(WEATHER, tools=TOOLS))
    assert engine.last is not None and engine.last.skip_special_tokens


def test_special_markers_are_asked_of_the_engine(
    engine: Scripted, tmp_path: Any
) -> None:
    (tmp_path / "p.py").write_text(
        "from pagedattn.serve.tools import TOOL_PARSERS as known\n"
        "from dataclasses import replace\n"
        "TOOL_PARSERS = {'mine': replace(known['hermes'], markers=('<|user|>',))}\n"
    )
    args = settings(
        enable_auto_tool_choice=True,
        tool_call_parser="mine",
        tool_parser_plugin=str(tmp_path / "p.py"),
    )
    with serving(engine, args) as live:
        message, _ = whole(live, says(WEATHER, tools=TOOLS))
        assert message["tool_calls"] == [call("get_weather", '{"city": "Tokyo"}')]
        assert engine.last is not None and not engine.last.skip_special_tokens


def test_unknown_parsers_are_named_at_the_start() -> None:
    with pytest.raises(UserError, match="hermes, llama3_json"):
        ServeArgs(tool_call_parser="qwen")
    with pytest.raises(UserError, match="deepseek_r1, granite"):
        ServeArgs(reasoning_parser="qwen")
    with pytest.raises(UserError, match="needs tool_call_parser"):
        ServeArgs(enable_auto_tool_choice=True)


# Choices that a grammar enforces, on the real model with its random weights.
@pytest.fixture(scope="module")
def real(engine: Scripted) -> Iterator[Live]:
    """The engine itself, with a parser that must not come in its way."""
    args = settings(tool_call_parser="mistral", reasoning_parser="deepseek_r1")
    with serving(engine._engine, args) as live:
        yield live


REF = {"$ref": "#/$defs/unit"}
SET = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Tokyo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": REF,
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
FORECAST = {"type": "function", "function": {"name": "forecast", "parameters": SET}}
CLOCK = {"type": "function", "function": {"name": "now"}}
HI = [{"role": "user", "content": "Hi"}]


def compact(live: Live) -> dict[str, Any]:
    """No white space: a random model would write it until its tokens are spent."""
    ids = live.post("/tokenize", {"prompt": " \n\t\r"}).json()["tokens"]
    return {"logit_bias": {str(i): -100 for i in ids}, "temperature": 1}


def check_arguments(function: dict[str, Any]) -> None:
    """Arguments are JSON and valid under the function's schema."""
    arguments = json.loads(function["arguments"])
    if function["name"] == "now":
        assert arguments == {}
        return
    assert function["name"] == "forecast" and set(arguments) == set(SET["required"])
    assert arguments["city"] in ("Tokyo", "Rome") and arguments["unit"] in ("C", "F")
    assert type(arguments["days"]) is int and 1 <= arguments["days"] <= 14


@pytest.mark.parametrize("seed", range(4))
def test_c75_named_choice_is_arguments_and_nothing_else(real: Live, seed: int) -> None:
    body = {"messages": HI, "tools": [CLOCK, FORECAST], "seed": seed, **compact(real)}
    body["tool_choice"] = {"type": "function", "function": {"name": "forecast"}}
    message, reason = whole(real, {**body, "max_tokens": 300})
    assert reason == "stop" and message["content"] is None
    (only,) = message["tool_calls"]
    check_arguments(only["function"])
    assert only["function"]["name"] == "forecast"
    assert streamed(real, {**body, "max_tokens": 300}) == (message, reason)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_c73_required_choice_calls(real: Live, seed: int, parallel: bool) -> None:
    body = {"messages": HI, "tools": [CLOCK, FORECAST], "seed": seed, **compact(real)}
    body |= {"tool_choice": "required", "parallel_tool_calls": parallel}
    message, reason = whole(real, {**body, "max_tokens": 300})
    assert streamed(real, {**body, "max_tokens": 300}) == (message, reason)
    assert message["content"] is None
    assert reason == "tool_calls" or (parallel and reason == "length")
    calls = message["tool_calls"]
    for each in calls if reason == "tool_calls" else calls[:-1]:
        check_arguments(each["function"])
    assert parallel or len(calls) == 1


@pytest.mark.parametrize("limit", [1, 8, 20, 40])
def test_c73_required_choice_that_is_cut(real: Live, limit: int) -> None:
    body = {"messages": HI, "tools": [FORECAST], "tool_choice": "required"}
    message, reason = whole(real, {**body, "max_tokens": limit})
    assert reason == "length"
    assert streamed(real, {**body, "max_tokens": limit}) == (message, reason)


def test_calls_come_in_pieces(real: Live) -> None:
    """Arguments stream: more deltas than calls."""
    body = {"messages": HI, "tools": [FORECAST], "max_tokens": 200}
    choice = {"type": "function", "function": {"name": "forecast"}}
    chunks = real.chunks(CHAT, {**body, "tool_choice": choice})
    deltas = [c["choices"][0]["delta"].get("tool_calls") for c in chunks]
    assert sum(bool(d) for d in deltas) > 10


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"type": "object", "properties": {"x": {"type": "string", "pattern": "["}}},
        {"type": "object", "properties": 5},
        {"type": "object", "properties": {"x": {"enum": []}}, "required": ["x"]},
        {"type": "object", "properties": {"x": {"$ref": "#/$defs/missing"}}},
    ],
)
def test_c64_bad_schemas_of_tools(real: Live, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        refused(real, {"tools": [tool], "tool_choice": choice}, "tools")
    assert real.http.get("/health").status_code == 200


def test_c65_recursive_schema_of_a_tool(real: Live) -> None:
    """A tree whose references lead to its own root."""
    tree = {
        "type": "object",
        "properties": {
            "v": {"enum": [1, 2]},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        },
        "required": ["v", "next"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": tree}}
    body = {"messages": HI, "tools": [tool], "max_tokens": 300, **compact(real)}
    body |= {"tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(4):
        message, reason = whole(real, {**body, "seed": seed})
        if reason == "tool_calls":
            function = message["tool_calls"][0]["function"]
            assert set(json.loads(function["arguments"])) == {"v", "next"}
            return
    pytest.fail("no seed ended")


def test_demanded_calls_and_another_format_can_not_be(real: Live) -> None:
    body = {"tools": [CLOCK], "tool_choice": "required"}
    message = refused(
        real, {**body, "response_format": {"type": "json_object"}}, "tools"
    )
    assert "response_format" in message


def test_formats_leave_no_room_for_reasoning(real: Live) -> None:
    """A grammar starts with the first token: what comes is content."""
    wish = {"structured_outputs": {"choice": ["yes", "no"]}}
    message, reason = whole(real, {"messages": HI, **wish})
    assert message["content"] in ("yes", "no") and reason == "stop"


# Reasoning.
@pytest.mark.parametrize("text", ["<think>Hm.</think>", "Hm.</think>"])
def test_reasoning_is_apart(thinker: Live, text: str) -> None:
    body = says(text + f"So.{WEATHER}", tools=TOOLS)
    message, reason = whole(thinker, body)
    assert message == {
        "content": "So.",
        "reasoning": "Hm.",
        "tool_calls": [call("get_weather", '{"city": "Tokyo"}')],
    }
    assert reason == "tool_calls" and streamed(thinker, body) == (message, reason)


def test_reasoning_is_counted_and_can_be_left_out(thinker: Live) -> None:
    body = says("Hm, hm.</think>Hi")
    usage = thinker.chat(**body)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 7}
    options = {"stream_options": {"include_usage": True}}
    last = thinker.chunks(CHAT, {**body, **options})[-1]
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}
    message, _ = whole(thinker, {**body, "include_reasoning": False})
    assert message == {"content": "Hi"}
    assert streamed(thinker, {**body, "include_reasoning": False})[0] == message


def test_cut_thought_is_no_content(thinker: Live) -> None:
    message, reason = whole(thinker, says("Hm, hm.</think>Hi", max_tokens=5))
    assert message == {"content": None, "reasoning": "Hm, h"} and reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_both_of_its_names(thinker: Live, stream: bool) -> None:
    """`reasoning` is vLLM's and OpenRouter's; FastGPT and others read only DeepSeek's
    `reasoning_content`. Neither is there where none is wanted."""
    body = says("Hm, hm.</think>Hi")
    for wish, said in ((None, "Hm, hm."), (False, "")):
        asked = {**body, "include_reasoning": wish}
        if stream:
            parts = [c["choices"][0]["delta"] for c in thinker.chunks(CHAT, asked)]
        else:
            parts = [thinker.chat(**asked)["choices"][0]["message"]]
        for name in ("reasoning", "reasoning_content"):
            assert "".join(p.get(name) or "" for p in parts) == said
            assert said or all(name not in p for p in parts)


OFF = (
    SILENT,
    {"reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    # Dify's, where a model has no thoughts and the server is no strict one.
    {
        "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
        "thinking": {"type": "disabled"},
        "enable_thinking": False,
    },
)


@pytest.mark.parametrize("off", OFF)
def test_thinking_switched_off_is_all_content(
    thinker: Live, off: dict[str, Any]
) -> None:
    message, _ = whole(thinker, says("Hi there", **off))
    assert message == {"content": "Hi there", "reasoning": None}
    for on in (THINKS, {"thinking": {"type": "enabled"}}, {"enable_thinking": True}):
        message, _ = whole(thinker, says("Hi there", **on))
        assert message == {"content": None, "reasoning": "Hi there"}


def test_prompt_that_opens_or_ends_the_thought(thinker: Live) -> None:
    """What the template wrote counts, whatever the request said of it."""
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]
    for start, said in (
        (f"{SAY}Hm<think>", "reasoning"),
        (f"{SAY}a</think>\n", "content"),
    ):
        talk[1]["content"] = start
        body = {"messages": talk, "continue_final_message": True}
        message, _ = whole(thinker, {**body, "add_generation_prompt": False})
        assert message[said]


def test_reasoning_effort_reaches_the_template(thinker: Live) -> None:
    answer = thinker.chat(**says("x", reasoning_effort="low", return_prompt_text=True))
    assert answer["prompt_text"].endswith("<|system|>low")
    assert "reasoning_effort" in refused(
        thinker, {"reasoning_effort": "hard"}, "reasoning_effort"
    )


def test_plain_chats_are_not_read(live: Live) -> None:
    message, reason = whole(live, says(WEATHER))
    assert message == {"content": WEATHER} and reason == "stop"


# What chats send.
def test_c81_developer_is_system_where_the_template_knows_no_developer(
    live: Live,
) -> None:
    talk = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": ["Hi", {"type": "text", "text": "you"}]},
    ]
    answer = live.chat(messages=talk, return_prompt_text=True)
    text = "<|system|>Be brief.<|end|><|user|>Hi\nyou<|end|><|assistant|>"
    assert answer["prompt_text"] == text


CHATML = Path(pagedattn.serve.__file__).parent / "templates" / "chatml_tools.jinja"


def test_the_template_for_models_without_tools() -> None:
    """It shows tools, calls and results, and without tools it is plain ChatML."""
    template = ChatTemplate(CHATML.read_text("utf-8"))
    call = {"function": {"name": "now", "arguments": '{"zone": "JST"}'}}
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]
    assert template.render(talk[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    text = template.render(talk, tools=TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert all(json.dumps(tool) in text for tool in TOOLS)
    assert text.count("Be brief.") == 1 and "None" not in text
    assert "<tool_response>\nnoon\n</tool_response>" in text
    written = text.partition("<|im_start|>assistant")[2].partition("<|im_end|>")[0]
    said = TOOL_PARSERS["hermes"].parse(written, True, {})
    assert said.calls == (ToolCall("now", '{"zone": "JST"}'),) * 2
