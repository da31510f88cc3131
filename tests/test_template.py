"""Chat templates against transformers' own rendering, and what callers may get wrong.

The templates are written after those of well-known families: each uses the features
of Jinja that its model's does.
"""

import functools
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_text import demo, tiny

from pagedattn.errors import NotSupported, UserError
from pagedattn.text.template import ChatTemplate

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system'"
    " %}{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- set ns = namespace(last=messages | length - 1, seen=0) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {{ item['text'] | trim }}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}
{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}
{% endif %}
{% endfor %}"""
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %};{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen": QWEN,
    "gemma": GEMMA,
    "mistral": MISTRAL,
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEXT = st.text(max_size=12) | st.sampled_from(
    ["OK!", " OK ", "<b>'\"&", "a\n\n", "<s>"]
)


@functools.cache
def compiled(name: str) -> ChatTemplate:
    """One of the templates above."""
    return ChatTemplate(TEMPLATES[name])


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content, **more}


def theirs(source: str, messages: list[dict], **options: Any) -> str:
    """transformers' rendering."""
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template([messages], chat_template=source, **options)
    return rendered[0]


@st.composite
def chats(draw: st.DrawFn, last: str = "user") -> list[dict[str, Any]]:
    """Alternating turns, with or without a system message."""
    count = draw(st.integers(1, 3)) * 2 - (last == "user")
    chat = [turn(("user", "assistant")[i % 2], draw(TEXT)) for i in range(count)]
    return [turn("system", draw(TEXT))] * draw(st.booleans()) + chat


# The same text as transformers.


@pytest.mark.parametrize("name", TEMPLATES)
@given(chats(), st.booleans())
def test_renders_as_transformers(name: str, chat: list[dict], prompt: bool) -> None:
    ours = compiled(name).render(
        chat, tokenizer=tiny(), add_generation_prompt=prompt, date_string="1 Jan 2025"
    )
    more = NAMED | {"date_string": "1 Jan 2025", "add_generation_prompt": prompt}
    assert ours == theirs(TEMPLATES[name], chat, **more)


@pytest.mark.parametrize("name", TEMPLATES)
@given(chats(last="assistant"))
def test_continues_as_transformers(name: str, chat: list[dict]) -> None:
    """C80: also where the template trims, or the text ends in white space."""
    options = {"continue_final_message": True, "add_generation_prompt": False}
    more = NAMED | {"date_string": "d"} | options
    ours = compiled(name).render(chat, tokenizer=tiny(), date_string="d", **options)
    assert ours == theirs(TEMPLATES[name], chat, **more)


def test_white_space_around_blocks_is_as_transformers_has_it() -> None:
    source = "<\n  {% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n>\n"
    chat = [turn("user", "a"), turn("assistant", "b")]
    assert ChatTemplate(source).render(chat) == theirs(source, chat)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_an_earlier_thought_is_there_by_both_names(name: str) -> None:
    """Qwen's and DeepSeek's templates read `reasoning_content`, others `reasoning`."""
    chat = [turn("user", "?"), turn("assistant", "so", **{name: "hm"})]
    for read in ("reasoning", "reasoning_content"):
        source = "{% for m in messages %}[{{ m." + read + " }}]{% endfor %}"
        assert ChatTemplate(source).render(chat) == "[][hm]"
    assert chat[1] == turn("assistant", "so", **{name: "hm"})


def test_tools_and_thinking_reach_the_template() -> None:
    tool = {"type": "function", "function": {"name": "é<b>", "parameters": {}}}
    chat = [turn("user", "Hi")]
    more = {"date_string": "d", "add_generation_prompt": True}
    ours = ChatTemplate(LLAMA3).render(
        chat, tokenizer=tiny(), tools=iter([tool]), date_string="d"
    )
    assert ours == theirs(LLAMA3, chat, tools=[tool], **NAMED, **more)
    assert "é<b>" in ours
    quiet = ChatTemplate(QWEN).render(chat, enable_thinking=False)
    assert quiet.endswith("<think>\n\n</think>\n\n")


def test_the_demo_models_template() -> None:
    template = ChatTemplate(demo().chat_template)
    chat = [turn("user", "Hi"), turn("assistant", "Yes"), turn("user", "So?")]
    assert template.render(chat, tokenizer=demo()) == theirs(
        template.source, chat, add_generation_prompt=True
    )


def test_date_comes_from_the_clock_given() -> None:
    template = ChatTemplate(LLAMA3, now=lambda: datetime(2024, 7, 26))
    assert "Today: 26 Jul 2024" in template.render([turn("user", "Hi")])


# The shapes in which messages come.


def test_parts_become_what_the_template_wants() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    flat = ChatTemplate(MISTRAL).render([turn("user", parts)], tokenizer=tiny())
    assert "[INST] a\nb [/INST]" in flat
    listed = ChatTemplate(PARTS_ONLY)
    assert listed.render([turn("user", parts), turn("user", "c")]) == "user:ab;user:c;"
    macro = "{% macro show(content) %}{% for part in content %}{{ part.text }}{% endfor"
    macro += " %}{% endmacro %}{{ show(messages[0].content) }}"
    assert ChatTemplate(macro).render([turn("user", "cd")]) == "cd"
    both = ChatTemplate(GEMMA)
    text_parts = [{"type": "text", "text": text} for text in "ab"]
    assert both.render([turn("user", parts)], tokenizer=tiny()) == theirs(
        GEMMA, [turn("user", text_parts)], add_generation_prompt=True, **NAMED
    )


def test_one_shot_iterables_and_models() -> None:
    """C79: read once into plain lists; what was given is left as it was."""

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return turn("user", ({"type": "text", "text": t} for t in "ab"))

    def calls() -> Iterator[dict[str, Any]]:
        yield {"function": {"name": "f", "arguments": '{"x": 1}'}}

    given_turn = turn("assistant", None, tool_calls=[*calls()])
    asks = turn("assistant", None, tool_calls=calls())
    template = ChatTemplate(LLAMA3)
    once = template.render((m for m in [Model(), asks]), date_string="d")
    twice = [template.render([Model(), given_turn], date_string="d") for _ in "ab"]
    assert [once, once] == twice
    assert '{"name": "f", "parameters": {"x": 1}}' in once and "a\nb" in once
    assert given_turn["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'


def test_absent_and_null_are_alike() -> None:
    """Clients send null for what a message has not, and "" for no arguments."""
    template = ChatTemplate(LLAMA3)
    chat = [turn("assistant", "hi", tool_calls=None, name=None)]
    assert template.render(chat) == template.render([turn("assistant", "hi")])
    call = {"function": {"name": "f", "arguments": ""}}
    asks = [turn("assistant", None, tool_calls=[call])]
    assert '"parameters": {}' in template.render(asks)


def test_developer_is_system_unless_the_template_names_it() -> None:
    """C81: its text is in the prompt either way."""
    chat = [turn("developer", "Be brief"), turn("user", "Hi")]
    system = [turn("system", "Be brief"), turn("user", "Hi")]
    for template in map(compiled, TEMPLATES):
        ours = template.render(chat, tokenizer=tiny(), date_string="d")
        assert ours == template.render(system, tokenizer=tiny(), date_string="d")
        assert "Be brief" in ours
    own = "{% for m in messages %}{{ m.role == 'developer' }} {% endfor %}"
    assert ChatTemplate(own).render(chat) == "True False "


# What callers may get wrong.


@pytest.mark.parametrize(
    "source, chat, message",
    [
        (GEMMA, [turn("user", "a"), turn("user", "b")], "roles must alternate"),
        (MISTRAL, [turn("foo", "a")], "Only user and assistant roles"),
        (QWEN, [turn("foo", "a")], "Unexpected message role"),
        (CHATML, [], "messages must be a non-empty list"),
        (CHATML, "Hi", "messages must be a non-empty list"),
        (CHATML, [{"content": "Hi"}], r"messages\[0\] has no role"),
        (CHATML, ["Hi"], r"messages\[0\] has no role"),
        (CHATML, [turn("user", 5)], r"messages\[0\].content must be a string"),
        (CHATML, [turn("user", [{"type": "text"}])], "part without text"),
        ("{{ messages[0].content + 1 }}", [turn("user", "a")], "TypeError"),
        ("{{ nothing.at.all }}", [turn("user", "a")], "nothing"),
        ("{{ ''.__class__.__mro__ }}", [turn("user", "a")], "__class__"),
        ("{{ messages.append(1) }}", [turn("user", "a")], "append"),
    ],
)
def test_the_templates_words_reach_the_caller(
    source: str, chat: Any, message: str
) -> None:
    """C81: a UserError with the template's own message, never another exception."""
    with pytest.raises(UserError, match=message):
        ChatTemplate(source).render(chat)


@pytest.mark.parametrize(
    "chat, message",
    [
        (
            [turn("user", [{"type": "image_url", "image_url": {}}])],
            "'image_url' is not",
        ),
        ([turn("user", [{}])], "None is not supported by this text model"),
    ],
)
def test_other_parts_are_not_supported(chat: list[dict], message: str) -> None:
    with pytest.raises(NotSupported, match=message) as caught:
        ChatTemplate(CHATML).render(chat)
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize(
    "calls, message",
    [
        ([{"function": {"name": "f", "arguments": "{"}}], "not JSON"),
        (["f"], "without a function"),
    ],
)
def test_malformed_tool_calls(calls: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate(CHATML).render([turn("assistant", "", tool_calls=calls)])


def test_continuing_needs_an_open_assistant_turn() -> None:
    template, chat = ChatTemplate(CHATML), [turn("assistant", "OK")]
    with pytest.raises(UserError, match="can't both be true"):
        template.render(chat, continue_final_message=True)
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(UserError, match="not 'user'"):
        template.render([turn("user", "Hi")], **options)
    with pytest.raises(UserError, match="does not show the last message"):
        ChatTemplate("{{ messages[0].role }}").render(chat, **options)
    assert template.render(chat, **options).endswith("<|im_start|>assistant\nOK")
    kept = ChatTemplate(PARTS_ONLY).render(chat, **options)
    assert kept == "assistant:OK"


def test_no_template_and_broken_template() -> None:
    with pytest.raises(UserError, match="--chat-template"):
        ChatTemplate(None).render([turn("user", "Hi")])
    with pytest.raises(UserError, match="line 2") as caught:
        ChatTemplate("\n{% if %}")
    assert caught.value.param == "chat_template"
