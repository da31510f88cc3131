"""Tool and reasoning parsers: every split of every sample says what the whole says.

Plain functions of texts; the server around them is tested over HTTP elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parser_samples import PLAIN, SAMPLES, SCHEMAS, THOUGHTS, Sample, Thought

from pagedattn.errors import UserError
from pagedattn.serve.deltas import Deltas, Said
from pagedattn.serve.reasoning import REASONING_PARSERS
from pagedattn.serve.tools import TOOL_PARSERS
from pagedattn.serve.tools.calls import Parsed, ToolCall
from pagedattn.serve.tools.plugin import load

IDS = [f"{i}-{s.parser}" for i, s in enumerate(SAMPLES)]
EVERY = pytest.mark.parametrize("sample", SAMPLES, ids=IDS)


def parse(name: str, text: str, final: bool) -> Parsed:
    return TOOL_PARSERS[name].parse(text, final, SCHEMAS)


def streamed(name: str, prefixes: Iterable[str], whole: str) -> tuple[str, list]:
    """Content and calls as a client joins them from deltas over these prefixes."""
    deltas = Deltas(TOOL_PARSERS[name].new_id)
    content, calls = "", []
    for text, final in [*((p, False) for p in prefixes), (whole, True)]:
        said = parse(name, text, final)
        delta = deltas.take(Said(said.content, said.calls))
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            take(calls, call)
    return content, calls


def take(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Join one delta of a call to those before it, as strictly as a client may."""
    function = call["function"]
    if call["index"] == len(calls):
        assert call["type"] == "function" and call["id"] and function["name"]
        calls.append({"id": call["id"], **function})
        return
    assert set(call) == {"index", "function"} and set(function) == {"arguments"}
    assert function["arguments"]
    calls[call["index"]]["arguments"] += function["arguments"]


def agrees(sample: Sample, cuts: Sequence[int]) -> None:
    """Streaming in these pieces says what the parse of the whole says."""
    whole = parse(sample.parser, sample.text, True)
    prefixes = [sample.text[:cut] for cut in cuts]
    content, calls = streamed(sample.parser, prefixes, sample.text)
    assert content == whole.content
    joined = [(c["name"], c["arguments"]) for c in calls]
    assert joined == [(c.name, c.arguments) for c in whole.calls]
    assert len({c["id"] for c in calls}) == len(calls)


@EVERY
def test_whole_text(sample: Sample) -> None:
    said = parse(sample.parser, sample.text, True)
    assert said.content == sample.content
    assert [c.name for c in said.calls] == [name for name, _ in sample.calls]
    for call, (_, arguments) in zip(said.calls, sample.calls, strict=True):
        text = call.arguments
        if sample.text.endswith(text):  # cut short by the end of the text
            text += "}" * (text.count("{") - text.count("}"))
        assert json.loads(text) == arguments


@EVERY
def test_c71_every_split_in_two_and_every_character(sample: Sample) -> None:
    """And all pairs of cuts, at least of the shorter samples."""
    size = len(sample.text)
    for cut in range(size + 1):
        agrees(sample, [cut])
    agrees(sample, range(size + 1))
    step = max(1, size // 40)
    for first in range(0, size, step):
        for second in range(first, size, step):
            agrees(sample, [first, second])


@given(st.data())
def test_c71_random_splits(data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(SAMPLES))
    cuts = data.draw(st.lists(st.integers(0, len(sample.text)), max_size=12))
    agrees(sample, sorted(cuts))


@EVERY
def test_truncated_samples_take_nothing_back(sample: Sample) -> None:
    """What is said of a prefix is a prefix of what is said of every longer one, and
    of what is said if the text ends there."""
    before = Parsed("")
    for end in range(len(sample.text) + 1):
        now = parse(sample.parser, sample.text[:end], False)
        assert extends(now, before), sample.text[:end]
        ended = parse(sample.parser, sample.text[:end], True)
        assert extends(ended, now), sample.text[:end]
        before = now


def extends(longer: Parsed, shorter: Parsed) -> bool:
    """Whether nothing of `shorter` is missing or changed in `longer`."""
    pairs = list(zip(shorter.calls, longer.calls, strict=False))
    return (
        longer.content.startswith(shorter.content)
        and len(longer.calls) >= len(shorter.calls)
        and all(a.name == b.name for a, b in pairs)
        and all(b.arguments.startswith(a.arguments) for a, b in pairs)
    )


PIECES = sorted(
    {
        s.text[i : i + n]
        for s in SAMPLES
        for n in (3, 9, 20)
        for i in range(0, len(s.text), n)
    }
)


@given(
    st.sampled_from(sorted(TOOL_PARSERS)),
    st.lists(st.sampled_from(PIECES) | st.text(), max_size=8),
)
def test_nonsense_takes_nothing_back_and_raises_nothing(
    name: str, pieces: list[str]
) -> None:
    text, before = "".join(pieces), Parsed("")
    for end in range(len(text) + 1):
        now = parse(name, text[:end], False)
        assert extends(now, before), text[:end]
        assert extends(parse(name, text[:end], True), now), text[:end]
        before = now


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
@pytest.mark.parametrize("text", PLAIN)
def test_words_come_through_untouched(name: str, text: str) -> None:
    agrees(Sample(name, text, ()), range(len(text)))
    assert parse(name, text, True) == Parsed(text)


def test_words_are_not_held_back() -> None:
    """Only what may become a marker waits."""
    assert parse("hermes", "Hello <tool", False).content == "Hello "
    assert parse("hermes", "Hello <tools", False).content == "Hello <tools"
    assert parse("llama3_json", 'A {"answer": 4', False).content == 'A {"answer": 4'
    assert parse("mistral", "a [TOOL_CALL", False).content == "a "


def test_arguments_stream_as_they_are_written() -> None:
    text = '<tool_call>{"name": "w", "arguments": {"text": "once upon a'
    assert parse("hermes", text, False).calls[0].arguments == '{"text": "once upon a'
    text = "<tool_call>\n<function=write>\n<parameter=text>\nonce upon a"
    assert (
        parse("qwen3_coder", text, False).calls[0].arguments == '{"text": "once upon a'
    )
    text = "[f(a=1, b='once"
    assert parse("pythonic", text, False).calls[0].arguments == '{"a": 1'


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "granite"])
def test_c72_no_arguments_are_an_empty_object(name: str) -> None:
    calls = [c for s in SAMPLES if s.parser == name for c in s.calls]
    assert any(arguments == {} for _, arguments in calls)
    for sample in (s for s in SAMPLES if s.parser == name):
        for call in parse(name, sample.text, True).calls:
            assert call.arguments not in ("", "null")


def test_mistral_ids_are_what_its_templates_want() -> None:
    assert all(len(i) == 9 and i.isalnum() for i in [TOOL_PARSERS["mistral"].new_id()])
    assert TOOL_PARSERS["hermes"].new_id().startswith("call_")


def test_pythonic_runs_nothing(tmp_path: Any) -> None:
    """Neither does it fall over brackets without end."""
    mark = tmp_path / "mark"
    text = f"[f(a=open({str(mark)!r}, 'w')), g(a=(lambda: 1)()), h(b=__import__('os'))]"
    assert parse("pythonic", text, True).calls == () and not mark.exists()
    deep = "[f(a=" + "[" * 5_000 + "]" * 5_000 + "), g(x=1)]"
    assert parse("pythonic", deep, True).calls == (ToolCall("g", '{"x": 1}'),)


def test_deep_json_is_no_recursion() -> None:
    deep = "[" * 20_000 + "]" * 20_000
    said = parse("hermes", f'<tool_call>{{"name": "f", "arguments": {deep}}}', True)
    assert said.calls == (ToolCall("f", deep),)


# Reasoning.
def split(name: str, text: str, final: bool) -> tuple[str, str]:
    return REASONING_PARSERS[name].split(text, final)


@pytest.mark.parametrize("thought", THOUGHTS, ids=lambda t: t.parser)
def test_reasoning_whole_and_at_every_prefix(thought: Thought) -> None:
    name, text, reasoning, rest = thought
    assert split(name, text, True) == (reasoning, rest)
    before = ("", "")
    for end in range(len(text) + 1):
        now = split(name, text[:end], False)
        ended = split(name, text[:end], True)
        for a, b in [*zip(before, now, strict=True), *zip(now, ended, strict=True)]:
            assert b.startswith(a), text[:end]
        before = now


BITS = st.sampled_from(
    [t.text[i : i + 7] for t in THOUGHTS for i in range(0, len(t.text), 7)]
)


@given(st.sampled_from(sorted(REASONING_PARSERS)), st.lists(BITS, max_size=8))
def test_reasoning_of_nonsense_takes_nothing_back(name: str, bits: list[str]) -> None:
    text, before = "".join(bits), ("", "")
    for end in range(len(text) + 1):
        now, ended = split(name, text[:end], False), split(name, text[:end], True)
        for a, b in [*zip(before, now, strict=True), *zip(now, ended, strict=True)]:
            assert b.startswith(a), text[:end]
        before = now


# Deltas and plugins.
def test_deltas_do_not_follow_a_parser_that_takes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    deltas = Deltas(lambda: "id")
    assert deltas.take(Said("Hello")) == {"content": "Hello"}
    assert deltas.take(Said("Help")) == {} and "took back" in caplog.text
    assert deltas.take(Said("Hello you")) == {"content": " you"}


PLUGIN = """
from pagedattn.serve.tools.calls import Parsed, ToolCall, ToolParser

def parse(text, final, schemas):
    return Parsed("", (ToolCall("shout", "{}"),)) if text == "!" else Parsed(text)

TOOL_PARSERS = {"shout": ToolParser(parse)}
"""


def test_plugin_file_adds_parsers(tmp_path: Any) -> None:
    (tmp_path / "p.py").write_text(PLUGIN)
    parser = load(str(tmp_path / "p.py"))["shout"]
    assert parser.parse("!", True, {}).calls[0].name == "shout"


@pytest.mark.parametrize(
    ("source", "words"),
    [("1/0", "ZeroDivisionError"), ("x = 1", "TOOL_PARSERS"), (None, "no file")],
)
def test_plugin_that_is_none_says_so(
    tmp_path: Any, source: str | None, words: str
) -> None:
    path = tmp_path / "p.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(UserError, match=words):
        load(str(path))
