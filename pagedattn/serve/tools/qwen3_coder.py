"""Qwen3-Coder: `<function=name>` and `<parameter=key>` tags, values as plain text.

Knows that values carry no types: those of the tool's schema decide whether `42` is a
number or a text. A text argument streams; others come whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pagedattn.serve.tools.calls import Parsed, Schemas, ToolCall, ToolParser
from pagedattn.serve.tools.jsontext import skip_space
from pagedattn.serve.tools.marked import Block, closed, marked

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_MARKER = re.compile(f"{_OPEN}|{_FUNCTION}")
_NAME = re.compile(r"([^<>\s]+)\s*>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)\s*>\n?")
# A value ends with its tag, if a tag follows; models also forget the tag.
_VALUE_END = re.compile(
    r"\n?</parameter>\s*(?=<parameter=|</function>|</tool_call>)"
    r"|\n(?=<parameter=)|\n?(?=</function>)"
)
_MAY_END = re.compile(r"\n?</parameter>\s*(?:<[a-z/_=]*)?\Z|\n?(?:<[a-z/_=]*)?\Z")
_KINDS = {
    **{"string": str, "integer": int, "number": (int, float), "boolean": bool},
    **{"array": list, "object": dict, "null": type(None)},
}


def parse(text: str, final: bool, schemas: Schemas) -> Parsed:
    """Words and calls of a text so far."""

    def read(text: str, start: int, at: int) -> Block | None:
        if text.startswith(_OPEN, start):
            at = skip_space(text, at)
            if not text.startswith(_FUNCTION, at):
                return Block() if _FUNCTION.startswith(text[at:]) else None
            at += len(_FUNCTION)
        return _function(text, at, schemas)

    return marked(text, final, _MARKER, read, (_OPEN, _FUNCTION))


def _function(text: str, at: int, schemas: Schemas) -> Block | None:
    match = _NAME.match(text, at)
    if match is None:
        begun = re.compile(r"[^<>\s]*\s*\Z").match(text, at)
        return Block() if begun else None
    name, at = match.group(1), match.end()
    pairs, at = _parameters(text, at, _types(schemas.get(name)))
    body = "{" + ", ".join(pairs)
    if at is None or not text.startswith(_FUNCTION_END, at):
        return _unended(text, at, ToolCall(name, body), bool(pairs))
    calls = (ToolCall(name, body + "}"),)
    return Block(calls, closed(text, at + len(_FUNCTION_END), _CLOSE))


def _unended(text: str, at: int | None, call: ToolCall, begun: bool) -> Block:
    """A function without its end: one that goes on, one closed too early, or one
    that says what has no place in it."""
    if at is None or _FUNCTION_END.startswith(text[at:]):
        return Block((call,))
    if text.startswith(_CLOSE, at):
        call = replace(call, arguments=call.arguments + "}")
        return Block((call,), at + len(_CLOSE))
    going_on = any(tag.startswith(text[at:]) for tag in (_CLOSE, "<parameter="))
    going_on = going_on or re.compile(r"<parameter=[^<>\s]*\s*\Z").match(text, at)
    return Block((call,), broken=not going_on)


def _parameters(
    text: str, at: int, types: Mapping[str, frozenset[str]]
) -> tuple[list[str], int | None]:
    """The parameters' JSON pairs, the last perhaps unfinished, and where they end;
    None: in the middle of one."""
    pairs: list[str] = []
    at = skip_space(text, at)
    while (match := _PARAMETER.match(text, at)) is not None:
        if match.end() == len(text):  # a line break may follow, which is not value
            return pairs, None
        key = json.dumps(match.group(1), ensure_ascii=False)
        kinds = types.get(match.group(1), frozenset(("string",)))
        end = _VALUE_END.search(text, match.end())
        if end is None:
            begun = _begun_value(text[match.end() :], kinds)
            return pairs + ([f"{key}: {begun}"] if begun else []), None
        value = _typed(text[match.end() : end.start()], kinds)
        pairs.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
        at = skip_space(text, end.end())
    return pairs, at


def _begun_value(text: str, kinds: frozenset[str]) -> str:
    """What is certain of a value that goes on: of a text all but what may end it."""
    if kinds != {"string"}:
        return ""
    certain = text[: _MAY_END.search(text).start()]
    return json.dumps(certain, ensure_ascii=False)[:-1]


def _types(schema: Mapping[str, Any] | None) -> dict[str, frozenset[str]]:
    """The types that each parameter may have; without a schema: text."""
    properties = (schema or {}).get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: frozenset(_kinds(value)) for name, value in properties.items()}


def _kinds(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return ["string"]
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return [kinds]
    if isinstance(kinds, list):
        return [kind for kind in kinds if isinstance(kind, str)]
    options = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(options, list):
        return [kind for option in options for kind in _kinds(option)]
    return ["string"]


def _typed(text: str, kinds: frozenset[str]) -> Any:
    """The value that `text` is under these types; itself where it fits none."""
    if kinds == {"string"}:
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if any(_fits(value, kind) for kind in kinds):
            return value
    words = {"true": True, "false": False, "null": None, "none": None}
    value = words.get(text.strip().lower(), text)
    return value if any(_fits(value, kind) for kind in kinds) else text


def _fits(value: Any, kind: str) -> bool:
    wanted = _KINDS.get(kind, ())
    if isinstance(value, bool):
        return wanted is bool
    return isinstance(value, wanted)


QWEN3_CODER = ToolParser(parse, (_OPEN, _CLOSE))
