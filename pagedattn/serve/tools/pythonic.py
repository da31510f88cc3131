"""Pythonic calls (Llama 3.2 and 4): the whole text is `[name(key=value, …), …]`.

Knows Python's brackets, strings and literals; every argument is parsed with `ast` and
nothing is ever evaluated. A call grows by whole arguments.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from pagedattn.serve.tools.calls import Parsed, Schemas, ToolCall, ToolParser
from pagedattn.serve.tools.jsontext import skip_space
from pagedattn.serve.tools.marked import Block, marked

_MARKER = re.compile(r"\A\s*\[")
_HEAD = re.compile(r"([A-Za-z_][\w.]*)\s*\(")
_BEGUN_HEAD = re.compile(r"[A-Za-z_][\w.]*\s*\Z")
_PIECE = re.compile(
    r"'''.*?'''|\"\"\".*?\"\"\"|'(?!'')(?:[^'\\\n]|\\.)*'|\"(?!\"\")(?:[^\"\\\n]|\\.)*\""
    r"|[\[\](){},]|[^\[\](){},'\"]+",
    re.DOTALL,
)
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


def parse(text: str, final: bool, schemas: Schemas) -> Parsed:
    """Words and calls of a text so far."""
    return marked(text, final, _MARKER, _read)


def _read(text: str, start: int, at: int) -> Block | None:
    """The list's calls; None where the first thing in it is no call. A call that
    can't be read is left out, its neighbours stay."""
    calls: list[ToolCall] = []
    while True:
        at = skip_space(text, at)
        head = _HEAD.match(text, at)
        if head is None:
            begun = at == len(text) or _BEGUN_HEAD.match(text, at)
            return Block(tuple(calls)) if begun else _no_call(calls)
        call, at = _arguments(text, head.group(1), head.end())
        calls += (call,) if call else ()
        if at is None:
            return Block(tuple(calls))
        at = skip_space(text, at)
        if text.startswith("]", at):
            return Block(tuple(calls), at + 1) if calls else None
        if at < len(text) and text[at] != ",":
            return _no_call(calls)
        at += 1


def _no_call(calls: list[ToolCall]) -> Block | None:
    return Block(tuple(calls), broken=True) if calls else None


def _arguments(text: str, name: str, at: int) -> tuple[ToolCall | None, int | None]:
    """A call's arguments from behind its parenthesis: (the call, as far as it is
    certain, where it ends)."""
    pairs: list[str] = []
    bad = False
    while True:
        end = _argument_end(text, at)
        if end is None:
            return (_call(name, pairs, False) if pairs and not bad else None), None
        piece = text[at:end].strip()
        pair = _pair(piece) if piece else ""
        bad = bad or pair is None
        if pair and not bad:
            pairs.append(pair)
        if text[end] == ")":
            return (None if bad and not pairs else _call(name, pairs, not bad)), end + 1
        at = end + 1


def _call(name: str, pairs: list[str], whole: bool) -> ToolCall:
    return ToolCall(name, "{" + ", ".join(pairs) + ("}" if whole else ""))


def _argument_end(text: str, at: int) -> int | None:
    """The comma or parenthesis that ends the argument at `at`; None: not there yet."""
    open_: list[str] = []
    while at < len(text):
        piece = _PIECE.match(text, at)
        if piece is None:
            return None  # in the middle of a string
        token = piece.group()
        if token in _PAIRS:
            open_.append(_PAIRS[token])
        elif open_ and token == open_[-1]:
            open_.pop()
        elif not open_ and token in ",)":
            return at
        at = piece.end()
    return None


def _pair(piece: str) -> str | None:
    """`key=value` as JSON's `"key": value`; None where it is no such thing."""
    try:
        call = ast.parse(f"f({piece})", mode="eval").body
        (keyword,) = call.keywords
        if call.args or keyword.arg is None:
            return None
        value = json.dumps(_literal(keyword.value), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError):
        return None
    return f"{json.dumps(keyword.arg)}: {value}"


def _literal(node: ast.expr) -> Any:
    """What a literal means; ValueError for anything else, unevaluated."""
    match node:
        case ast.Constant(str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_literal(item) for item in items]
        case ast.Dict(keys, values) if all(map(_is_text, keys)):
            pairs = zip(keys, values, strict=True)
            return {key.value: _literal(value) for key, value in pairs}
    raise ValueError(ast.dump(node))


def _is_text(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


PYTHONIC = ToolParser(parse)
