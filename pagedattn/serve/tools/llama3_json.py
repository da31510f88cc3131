"""Llama 3: bare objects `{"name": …, "parameters": …}`, `;` between several.

Knows that no marker announces them (`<|python_tag|>` may), so an object is a call only
if it has a call's keys and no others; any other JSON is words.
"""

from __future__ import annotations

import re

from pagedattn.serve.tools.calls import Parsed, Schemas, ToolParser
from pagedattn.serve.tools.jsoncalls import read_calls
from pagedattn.serve.tools.marked import SPACE, Block, marked

_TAG = "<|python_tag|>"
_MARKER = re.compile(re.escape(_TAG) + r"|\{")


def _read(text: str, start: int, at: int) -> Block | None:
    bare = text[start] == "{"
    return read_calls(text, start if bare else at, strict=True)


def parse(text: str, final: bool, schemas: Schemas) -> Parsed:
    """Words and calls of a text so far."""
    return marked(text, final, _MARKER, _read, (_TAG,), SPACE + ";")


LLAMA3_JSON = ToolParser(parse, (_TAG,))
