"""Calls written as JSON objects, `{"name": …, "arguments": …}`, alone or in an array.

Knows what models write in these objects; which marker announces them the formats know.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from pagedattn.serve.tools.calls import ToolCall
from pagedattn.serve.tools.jsontext import Object, Value, scan, scan_object, skip_space
from pagedattn.serve.tools.marked import Block

_KEYS = frozenset(("name", "arguments", "parameters", "type", "id"))
_LONGEST_HEAD = 512  # characters between a marker and the arguments


@dataclass(frozen=True, slots=True)
class _Found:
    """One object: a call, or None while it is not certain, or `refused` for good."""

    call: ToolCall | None = None
    end: int | None = None
    fault: bool = False
    refused: bool = False


def arguments(value: Value) -> str | None:
    """The arguments' JSON so far; None while their form is not certain.

    null and "" are no arguments, {}. A string that holds an object is that object:
    some models encode twice.
    """
    if value.text.startswith("{"):
        return value.text if value.begun else None
    if value.end is None:
        return None
    if value.text in ("null", '""'):
        return "{}"
    return _decoded(value.text) if value.text.startswith('"') else value.text


def _decoded(string: str) -> str:
    try:
        inner = json.loads(string)
        return inner if isinstance(json.loads(inner), dict) else string
    except (ValueError, RecursionError):
        return string


def _name(value: Value | None) -> str | None:
    """A name, once it has ended; "" where it is none."""
    if value is None or value.end is None:
        return None
    try:
        name = json.loads(value.text)
    except ValueError:
        return ""
    return name if isinstance(name, str) else ""


def _call(text: str, at: int, strict: bool) -> _Found:
    found = scan_object(text, at)
    name = _name(found.fields.get("name"))
    if name == "" or (strict and found.fields.keys() - _KEYS):
        return _Found(refused=True)
    given = _given(found, strict)
    if name is None or given is None:
        hopeless = found.fault is not None or found.end is not None
        return _Found(refused=hopeless)
    call = ToolCall(name, given)
    return _Found(call, found.end, fault=found.fault is not None)


def _given(found: Object, strict: bool) -> str | None:
    value = found.fields.get("arguments") or found.fields.get("parameters")
    if value is not None:
        return arguments(value)
    return "{}" if found.end is not None and not strict else None


def read_calls(text: str, at: int, strict: bool = False) -> Block | None:
    """The calls that begin at `at`, white space aside: an object or an array of them.

    None if these can be no calls. `strict` objects, which no marker announces, hold a
    call's keys and no others.
    """
    at = skip_space(text, at)
    if not text.startswith("[", at):
        found = _call(text, at, strict)
        if found.refused:
            return None
        calls = (found.call,) if found.call else ()
        return Block(calls, None if found.fault else found.end, found.fault)
    return _read_array(text, at + 1, strict)


def _read_array(text: str, at: int, strict: bool) -> Block | None:
    calls: list[ToolCall] = []
    while True:
        at = skip_space(text, at)
        if calls and text.startswith("]", at):
            return Block(tuple(calls), at + 1)
        if calls and text.startswith(",", at):
            at = skip_space(text, at + 1)
        elif calls and at < len(text):
            return Block(tuple(calls), broken=True)
        if at == len(text):
            return Block(tuple(calls))
        found = _call(text, at, strict)
        if found.refused:
            return Block(tuple(calls), broken=True) if calls else None
        calls += (found.call,) if found.call else ()
        if found.fault or found.end is None:
            return Block(tuple(calls), broken=found.fault)
        at = found.end


def read_headed(text: str, at: int, head: re.Pattern[str]) -> Block | None:
    """One call whose name stands in a head before the arguments' brace.

    The pattern's one group that matched is the name. None if this can be no call.
    """
    match = head.match(text, at)
    if match is None:
        upto = text.find("{", at)
        return None if upto >= 0 or len(text) - at > _LONGEST_HEAD else Block()
    name = next(filter(None, match.groups())).strip()
    value = scan(text, match.end())
    given = arguments(value)
    if given is None or not name:
        return Block() if value.fault is None and name else None
    broken = value.fault is not None
    return Block((ToolCall(name, given),), None if broken else value.end, broken)
