"""What models write when they call tools or think: texts and what they mean.

Most are the formats' own examples, or outputs that broke parsers of other engines.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

TOKYO, PARIS = {"city": "Tokyo"}, {"city": "Paris"}
TYPES = {
    **{"string_field": "hello", "int_field": 42, "float_field": 3.14},
    **{"bool_field": True, "null_field": None, "array_field": ["a", "b"]},
    **{"object_field": {"nested": "value"}, "empty_array": [], "empty_object": {}},
}
ESCAPES = {
    **{"quoted": 'He said "hello" {world} [x]', "path": "C:\\Users\\file.txt"},
    **{"newline": "line1\nline2", "unicode": "emoji: 🎉 für </tool_call>"},
}
SCHEMAS = {
    "test_function": {
        "type": "object",
        "properties": {
            **{"string_field": {"type": "string"}, "int_field": {"type": "integer"}},
            **{"float_field": {"type": "number"}, "bool_field": {"type": "boolean"}},
            "null_field": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            **{"array_field": {"type": "array"}, "object_field": {"type": "object"}},
            **{"empty_array": {"type": "array"}, "empty_object": {"type": "object"}},
        },
    },
    "write": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    },
}


class Sample(NamedTuple):
    """A text and what it says; arguments are compared as values."""

    parser: str
    text: str
    calls: tuple[tuple[str, Any], ...]
    content: str = ""


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(name: str, arguments: Any, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {_dumps(arguments)}}}'


WEATHER, TIME = ("get_weather", TOKYO), ("get_time", {"timezone": "Asia/Tokyo"})
NOW, TEST = ("now", {}), ("test_function", TYPES)

# Words only: every parser must hand them through.
PLAIN = (
    "How can I help you today?",
    "",
    " \n",
    "a < b, {c}; [d] `e` and <tool_cal",
    "I would write <tool> or {curly} braces, [1] or (x).\n\nThen?\n",
)


def _hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


HERMES = (
    Sample("hermes", _hermes(_call(*WEATHER)), (WEATHER,)),
    Sample("hermes", _hermes(_call(*WEATHER), _call(*TIME)), (WEATHER, TIME)),
    Sample("hermes", _hermes(_call(*NOW), _call(*WEATHER)), (NOW, WEATHER)),
    Sample("hermes", _hermes('{"name": "now"}', _call(*WEATHER)), (NOW, WEATHER)),
    Sample("hermes", _hermes('{"name": "now", "arguments": null}'), (NOW,)),
    Sample("hermes", _hermes(_call(*TEST)), (TEST,)),
    Sample("hermes", _hermes(_call("e", ESCAPES)), (("e", ESCAPES),)),
    Sample(
        "hermes",
        "Sure, let me check.\n" + _hermes(_call(*WEATHER)) + "\nDone.",
        (WEATHER,),
        "Sure, let me check.\n\nDone.",
    ),
    Sample(  # until the end of the text, no closing tag
        "hermes", f"<tool_call>\n{_call(*WEATHER)}", (WEATHER,)
    ),
    Sample(  # no closing brace either
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"trigger": true}',
        (("f", {"trigger": True}),),
    ),
    Sample(  # arguments before the name, and a name among the arguments
        "hermes",
        _hermes('{"arguments":{"name": "John Doe"}, "name": "get_age"}'),
        (("get_age", {"name": "John Doe"}),),
    ),
    Sample(  # arguments encoded twice
        "hermes",
        _hermes(_call("db", '{"param": "max"}')),
        (("db", {"param": "max"}),),
    ),
    Sample("hermes", _hermes(_call("do", "hello")), (("do", "hello"),)),
    Sample(  # a line break inside of a string, which JSON forbids
        "hermes",
        '<tool_call>{"name": "w", "arguments": {"t": "a\nb\tc"}}</tool_call>',
        (("w", {"t": "a\nb\tc"}),),
    ),
    Sample("hermes", "<tool_call>get_weather()", (), "<tool_call>get_weather()"),
    Sample(
        "hermes",
        "The tag <tool_call> opens." + _hermes(_call(*WEATHER)),
        (WEATHER,),
        "The tag <tool_call> opens.",
    ),
)

_SEARCH = ("searchTool", {"query": "test {v} [c]", "limit": 10})
LLAMA = (
    Sample("llama3_json", _call(*_SEARCH, "parameters"), (_SEARCH,)),
    Sample("llama3_json", _call(*_SEARCH), (_SEARCH,)),
    Sample("llama3_json", "<|python_tag|>" + _call(*_SEARCH, "parameters"), (_SEARCH,)),
    *(
        Sample(
            "llama3_json",
            sep.join(_call(*c, "parameters") for c in (_SEARCH, NOW, WEATHER)),
            (_SEARCH, NOW, WEATHER),
        )
        for sep in ("; ", " ;\n", ";", "\n")
    ),
    Sample(
        "llama3_json",
        "Here: " + _call("open", {}, "parameters") + " I used {open} for this.",
        (("open", {}),),
        "Here:  I used {open} for this.",
    ),
    Sample("llama3_json", '{"parameters": {}}', (), '{"parameters": {}}'),
    Sample("llama3_json", '{"name": "noParams"}', (), '{"name": "noParams"}'),
    Sample(
        "llama3_json",
        '{"name": "bad", "parameters": {invalid json}',
        (),
        '{"name": "bad", "parameters": {invalid json}',
    ),
    Sample(
        "llama3_json",
        '{"name": "Bob", "age": 5, "parameters": {}}',
        (),
        '{"name": "Bob", "age": 5, "parameters": {}}',
    ),
    Sample("llama3_json", _call(*TEST, "parameters"), (TEST,)),
    Sample("llama3_json", _call("e", ESCAPES, "parameters"), (("e", ESCAPES),)),
)

_ADD = ("add", {"a": 3.5, "b": 4})
MISTRAL = (
    Sample("mistral", f"[TOOL_CALLS][{_call(*_ADD)}]", (_ADD,)),
    Sample(
        "mistral", f"[TOOL_CALLS] [{_call(*_ADD)}, {_call(*WEATHER)}]", (_ADD, WEATHER)
    ),
    Sample(
        "mistral",
        '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age"}]',
        (("get_age", {"name": "John Doe"}),),
    ),
    Sample("mistral", f"Hello[TOOL_CALLS] [{_call(*_ADD)}]", (_ADD,), "Hello"),
    Sample("mistral", f"[TOOL_CALLS] [{_call(*_ADD)}]\nextra", (_ADD,), "\nextra"),
    Sample("mistral", '[TOOL_CALLS]add{"a": 3.5, "b": 4}', (_ADD,)),
    Sample(
        "mistral",
        '[TOOL_CALLS]add{"a": 3.5, "b": 4}[TOOL_CALLS]now{}[TOOL_CALLS]get_weather'
        '{"city": "Tokyo"}',
        (_ADD, NOW, WEATHER),
    ),
    Sample(
        "mistral",
        'bla[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 3.5, "b": 4}',
        (_ADD,),
        "bla",
    ),
    Sample("mistral", "[TOOL_CALLS] not json", (), "[TOOL_CALLS] not json"),
    Sample("mistral", f"[TOOL_CALLS]test_function{_dumps(TYPES)}", (TEST,)),
    Sample("mistral", f"[TOOL_CALLS]e {_dumps(ESCAPES)}", (("e", ESCAPES),)),
)

_SF = ("get_weather", {"city": "San Francisco", "metric": "celsius"})
_USER = {"name": "John Doe", "age": 37, "address": {"city": "San Francisco"}}
_USER |= {"role": None, "passed_test": True, "aliases": ["John", "Johnny"], "x": -1.5}
_SF_TEXT = "get_weather(city='San Francisco', metric='celsius')"
_USER_TEXT = (
    "register_user(name='John Doe', age=37, address={'city': 'San Francisco'}, "
    "role=None, passed_test=True, aliases=['John', 'Johnny'], x=-1.5)"
)
PYTHONIC = (
    Sample("pythonic", f"[{_SF_TEXT}]", (_SF,)),
    Sample("pythonic", f"[{_USER_TEXT}]", (("register_user", _USER),)),
    Sample("pythonic", "[get_weather()]", (("get_weather", {}),)),
    Sample(
        "pythonic",
        f"[{_SF_TEXT}, now(), {_USER_TEXT}]",
        (_SF, NOW, ("register_user", _USER)),
    ),
    Sample("pythonic", "[do(d={}, s=[])]", (("do", {"d": {}, "s": []}),)),
    Sample(
        "pythonic",
        r"[w(city='Martha\'s, (Vineyard)', m='\"cool, units]\"', t='''a'b''')]",
        (("w", {"city": "Martha's, (Vineyard)", "m": '"cool, units]"', "t": "a'b"}),),
    ),
    Sample("pythonic", f"[bad(x=b'z'), {_SF_TEXT}]", (_SF,)),
    Sample("pythonic", f"[calc(x=1e999), {_SF_TEXT}]", (_SF,)),
    Sample("pythonic", f"[run(x=open('f')), {_SF_TEXT}]", (_SF,)),
    Sample("pythonic", f"[run(x=1+1), f(1), {_SF_TEXT}]", (_SF,)),
    Sample("pythonic", f"{_SF_TEXT}", (), _SF_TEXT),
    Sample("pythonic", "[1, 2] are two", (), "[1, 2] are two"),
    Sample("pythonic", "[a](http://b) is a link", (), "[a](http://b) is a link"),
    Sample("pythonic", "[f(x), g] list", (), "[f(x), g] list"),
)

_XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nTokyo\n</parameter>\n"
    "</function>\n</tool_call>"
)
_TYPED = (
    "<tool_call>\n<function=test_function>\n"
    + "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else _dumps(v)}\n</parameter>\n"
        for k, v in TYPES.items()
    )
    + "</function>\n</tool_call>"
)
_CODE = 'if a < b:\n    print("</b>")\n\n<parameter> is </parameter> a tag\n'
QWEN = (
    Sample("qwen3_coder", _XML, (WEATHER,)),
    Sample(
        "qwen3_coder", f"Let me see.\n{_XML}\n{_XML}", (WEATHER,) * 2, "Let me see.\n"
    ),
    Sample("qwen3_coder", _TYPED, (TEST,)),
    Sample(
        "qwen3_coder",
        f"<tool_call>\n<function=now>\n</function>\n</tool_call>\n{_XML}",
        (NOW, WEATHER),
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n"
        f"<parameter=text>\n{_CODE}\n</parameter>\n</function>\n</tool_call>",
        (("write", {"path": "a.py", "text": _CODE}),),
    ),
    Sample(  # no <tool_call> around it, and values on one line
        "qwen3_coder",
        "<function=write><parameter=path>a</parameter><parameter=text>b</parameter>"
        "</function>",
        (("write", {"path": "a", "text": "b"}),),
    ),
    Sample(  # a forgotten </parameter>
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=text>\nb\n"
        "</parameter>\n</function>\n</tool_call>",
        (("write", {"path": "a", "text": "b"}),),
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\n<function=test_function>\n<parameter=int_field>\nmany\n"
        "</parameter>\n<parameter=null_field>\nNone\n</parameter>\n"
        "<parameter=bool_field>\nTrue\n</parameter>\n</function>\n</tool_call>",
        (
            (
                "test_function",
                {"int_field": "many", "null_field": None, "bool_field": True},
            ),
        ),
    ),
    Sample("qwen3_coder", "<tool_call> is a tag", (), "<tool_call> is a tag"),
)

GRANITE = (
    Sample("granite", f"<|tool_call|> [{_call(*WEATHER)}]", (WEATHER,)),
    Sample("granite", f"<tool_call>[{_call(*WEATHER)}]", (WEATHER,)),
    Sample("granite", f"[{_call(*WEATHER)}]", (WEATHER,)),
    Sample(
        "granite",
        f"<|tool_call|> [\n  {_call(*WEATHER)},\n  {_call(*NOW)},{_call(*TIME)}\n]",
        (WEATHER, NOW, TIME),
    ),
    Sample(
        "granite",
        '<|tool_call|>[{"arguments": {"city": "Tokyo"}, "name": "get_weather"}]',
        (WEATHER,),
    ),
    Sample(
        "granite",
        f"Let me check.\n<|tool_call|> [{_call(*WEATHER)}]\nI'll get it.",
        (WEATHER,),
        "Let me check.\n\nI'll get it.",
    ),
    Sample("granite", f"<tool_call> [{_call(*TEST)}]", (TEST,)),
    Sample("granite", f"<tool_call> [{_call('e', ESCAPES)}]", (("e", ESCAPES),)),
    Sample("granite", "[1, 2, 3]", (), "[1, 2, 3]"),
    Sample("granite", '[{"name": "func"}]', (), '[{"name": "func"}]'),
)


def _deepseek(*calls: tuple[str, Any]) -> str:
    each = "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dumps(args)}\n"
        "```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


DEEPSEEK = (
    Sample("deepseek_v3", _deepseek(WEATHER), (WEATHER,)),
    Sample("deepseek_v3", _deepseek(NOW, WEATHER, TIME), (NOW, WEATHER, TIME)),
    Sample("deepseek_v3", _deepseek(TEST), (TEST,)),
    Sample("deepseek_v3", _deepseek(("e", ESCAPES)), (("e", ESCAPES),)),
    Sample(
        "deepseek_v3", "Let me see." + _deepseek(WEATHER), (WEATHER,), "Let me see."
    ),
    Sample(
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": '
        '"Tokyo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (WEATHER, NOW),
    ),
)


def _harmony(name: str, body: str) -> str:
    return (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{body}<|call|>"
    )


_THOUGHT = "<|channel|>analysis<|message|>We need <b>. Use the tool.<|end|>"
_NEXT = "<|start|>assistant"
HARMONY = (
    Sample("openai", "<|channel|>final<|message|>This is a test", (), "This is a test"),
    Sample(
        "openai",
        _THOUGHT + _NEXT + _harmony("get_weather", '{"city": "Tokyo"}'),
        (WEATHER,),
    ),
    Sample(
        "openai",
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
        + _harmony("now", "")
        + _NEXT
        + _harmony("get_weather", '{\n"city": "Tokyo"\n}'),
        (NOW, WEATHER),
        "I look it up.",
    ),
    Sample(  # the recipient in the role's place, as newer templates have it
        "gpt_oss",
        " to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Tokyo"}<|call|>',
        (WEATHER,),
    ),
    Sample("openai", _harmony("e", _dumps(ESCAPES)), (("e", ESCAPES),)),
    Sample("openai", "Just words < that.", (), "Just words < that."),
)

SAMPLES = HERMES + LLAMA + MISTRAL + PYTHONIC + QWEN + GRANITE + DEEPSEEK + HARMONY


class Thought(NamedTuple):
    """A text, its reasoning, and what remains for the tool parser or the client."""

    parser: str
    text: str
    reasoning: str
    rest: str


THOUGHTS = (
    *(
        thought
        for name in ("deepseek_r1", "qwen3")
        for thought in (
            Thought(name, "<think>Hm.</think>\n\nHi", "Hm.", "\n\nHi"),
            Thought(name, "Hm.</think>Hi </think>", "Hm.", "Hi </think>"),
            Thought(name, "\n<think>\nHm", "\nHm", ""),
            Thought(name, "Hm <b> </thin", "Hm <b> </thin", ""),
            Thought(name, "", "", ""),
            Thought(name, "</think>Hi", "", "Hi"),
        )
    ),
    Thought("qwen3", f"I call.{_XML}", "I call.", _XML),
    Thought(
        "qwen3",
        "A <tool_call> tag, <tool_call>\nno.</think>Hi",
        "A <tool_call> tag, <tool_call>\nno.",
        "Hi",
    ),
    Thought("mistral", "[THINK]Hm.[/THINK]Hi", "Hm.", "Hi"),
    Thought("mistral", "So [THINK]Hm.[/THINK]Hi", "Hm.", "So Hi"),
    Thought("mistral", "[THINK]Hm", "Hm", ""),
    Thought("mistral", "No thought[/THINK] here [", "", "No thought here ["),
    Thought(
        "granite",
        "Here is my thought process:Hm. Here it is. Here is my response:Hi",
        "Hm. Here it is. ",
        "Hi",
    ),
    Thought(
        "granite",
        "Here's my thought process: Hm\nHere's my response: Hi",
        " Hm\n",
        " Hi",
    ),
    Thought("granite", "Here is my answer: 4", "", "Here is my answer: 4"),
    Thought("granite", "Here is my", "", "Here is my"),
    Thought(
        "openai_gptoss",
        _THOUGHT + _NEXT + "<|channel|>final<|message|>Hi<|return|>",
        "We need <b>. Use the tool.",
        _NEXT + "<|channel|>final<|message|>Hi<|return|>",
    ),
    Thought(
        "openai_gptoss",
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis"
        "<|message|>B < C",
        "A\nB < C",
        "",
    ),
)
