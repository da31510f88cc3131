"""JSON that is still being written: where a value ends, and what of it is certain.

Knows tokens of JSON and brackets; leaves it to the client whether commas and colons
stand where they should. Runs over the text with regular expressions, so that long
arguments cost little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SPACE = re.compile(r"\s*")
_STRING = r'"(?:[^"\\]|\\.)*"'
_TOKEN = re.compile(
    rf"\s+|{_STRING}|[\[\]{{}},:]|-?\d[\d.eE+-]*|true|false|null", re.DOTALL
)
_BEGUN = re.compile(r'"(?:[^"\\]|\\.)*\\?\Z|-\Z', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_CLOSES = {"{": "}", "[": "]"}
_WORDS = ("true", "false", "null")


@dataclass(frozen=True, slots=True)
class Value:
    """A value so far. `end` is None until it has ended; `fault` is where it stops
    being JSON, which is for good."""

    text: str
    end: int | None
    fault: int | None = None
    tokens: int = 0

    @property
    def begun(self) -> bool:
        """Whether there is no doubt that this is JSON: it ended, or went on well."""
        return self.end is not None or self.tokens > 1


@dataclass(slots=True)
class Object:
    """An object's fields so far: the first of a name counts."""

    fields: dict[str, Value] = field(default_factory=dict)
    end: int | None = None
    fault: int | None = None


def skip_space(text: str, at: int) -> int:
    """The first place from `at` on that is no white space."""
    return _SPACE.match(text, at).end()


def scan(text: str, at: int) -> Value:
    """The value that begins at `at`, which is no white space.

    Raw control characters in strings, which models write and JSON forbids, come out
    escaped.
    """
    parts: list[str] = []
    open_: list[str] = []
    tokens = 0
    while True:
        match = _TOKEN.match(text, at)
        if match is None:
            return _unfinished(text, at, parts, tokens)
        token = match.group()
        if _misplaced(token, open_):
            return Value("".join(parts), None, at, tokens)
        if token in _CLOSES:
            open_.append(token)
        parts.append(_escaped(token) if token[0] == '"' else token)
        at, tokens = match.end(), tokens + (not token.isspace())
        if not open_ and not _may_go_on(token, at == len(text)):
            return Value("".join(parts), at, None, tokens)


def _misplaced(token: str, open_: list[str]) -> bool:
    """Whether a token can't stand here; a bracket that closes takes its opener off."""
    if token in "}]":
        return not open_ or _CLOSES[open_.pop()] != token
    return token in ",:" and not open_


def _may_go_on(token: str, at_end: bool) -> bool:
    """Whether the value is not over: a number at the text's end may get more digits."""
    return token.isspace() or (at_end and (token[0] == "-" or token[0].isdigit()))


def _unfinished(text: str, at: int, parts: list[str], tokens: int) -> Value:
    rest = text[at:]
    begun = _BEGUN.match(text, at)
    if begun is not None:
        tail = _escaped(rest) if rest[0] == '"' else rest
        return Value("".join(parts) + tail, None, None, tokens + 1)
    if any(word.startswith(rest) for word in _WORDS):
        return Value("".join(parts), None, None, tokens)
    return Value("".join(parts), None, at, tokens)


def _escaped(string: str) -> str:
    return _CONTROL.sub(lambda c: _escape(c.group()), string)


def _escape(char: str) -> str:
    short = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    return short.get(char) or f"\\u{ord(char):04x}"


def scan_object(text: str, at: int) -> Object:
    """The object that begins at `at`; a fault where none does."""
    found = Object()
    if at >= len(text):
        return found
    if text[at] != "{":
        found.fault = at
        return found
    at = skip_space(text, at + 1)
    while at < len(text) and found.end is None and found.fault is None:
        if text[at] == "}":
            found.end = at + 1
        else:
            at = _field(text, at, found)
    return found


def _field(text: str, at: int, found: Object) -> int:
    """Read one `"key": value` and the comma after it; where to go on."""
    key = scan(text, at)
    if text[at] != '"' or key.fault is not None:
        found.fault = at
        return at
    if key.end is None or (at := skip_space(text, key.end)) == len(text):
        return len(text)
    if text[at] != ":":
        found.fault = at
        return at
    if (at := skip_space(text, at + 1)) == len(text):
        return at
    value = scan(text, at)
    found.fields.setdefault(key.text[1:-1], value)
    found.fault = value.fault
    return len(text) if value.end is None else _comma(text, value.end, found)


def _comma(text: str, at: int, found: Object) -> int:
    at = skip_space(text, at)
    if at == len(text) or text[at] == "}":
        return at
    if text[at] != ",":
        found.fault = at
        return at
    return skip_space(text, at + 1)
