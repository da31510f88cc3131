"""Granite 3: `<|tool_call|>` or `<tool_call>`, then an array of objects.

Knows that the array may also stand alone at the beginning of the text.
"""

from __future__ import annotations

import re

from pagedattn.serve.tools.calls import Parsed, Schemas, ToolParser
from pagedattn.serve.tools.jsoncalls import read_calls
from pagedattn.serve.tools.marked import Block, marked

_MARKERS = ("<|tool_call|>", "<tool_call>")
_MARKER = re.compile(r"<\|tool_call\|>|<tool_call>|\A\s*(?=\[)")


def _read(text: str, start: int, at: int) -> Block | None:
    return read_calls(text, at, strict=text[start : start + 1] != "<")


def parse(text: str, final: bool, schemas: Schemas) -> Parsed:
    """Words and calls of a text so far."""
    return marked(text, final, _MARKER, _read, _MARKERS)


GRANITE = ToolParser(parse, _MARKERS)
