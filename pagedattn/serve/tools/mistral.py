"""Mistral: `[TOOL_CALLS]`, then an array of objects, or `name{…}` in newer models.

Knows both, and that Mistral's templates want call ids of nine letters and digits.
"""

from __future__ import annotations

import re
import uuid

from pagedattn.serve.tools.calls import Parsed, Schemas, ToolParser
from pagedattn.serve.tools.jsoncalls import read_calls, read_headed
from pagedattn.serve.tools.jsontext import skip_space
from pagedattn.serve.tools.marked import Block, marked

_TAG = "[TOOL_CALLS]"
_MARKER = re.compile(re.escape(_TAG))
_HEAD = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{)")


def _read(text: str, start: int, at: int) -> Block | None:
    at = skip_space(text, at)
    if text[at : at + 1] in ("[", "{"):
        return read_calls(text, at)
    return read_headed(text, at, _HEAD)


def parse(text: str, final: bool, schemas: Schemas) -> Parsed:
    """Words and calls of a text so far."""
    return marked(text, final, _MARKER, _read, (_TAG,))


def short_id() -> str:
    """Nine letters and digits."""
    return uuid.uuid4().hex[:9]


MISTRAL = ToolParser(parse, (_TAG, "[CALL_ID]", "[ARGS]"), short_id)
