"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": …, "arguments": …}</tool_call>`.

Knows the two tags; the object is `jsoncalls`' affair.
"""

from __future__ import annotations

import re
from dataclasses import replace

from pagedattn.serve.tools.calls import Parsed, Schemas, ToolParser
from pagedattn.serve.tools.jsoncalls import read_calls
from pagedattn.serve.tools.marked import Block, closed, marked

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKER = re.compile(re.escape(_OPEN))


def _read(text: str, start: int, at: int) -> Block | None:
    block = read_calls(text, at)
    if block is None or block.end is None:
        return block
    return replace(block, end=closed(text, block.end, _CLOSE))


def parse(text: str, final: bool, schemas: Schemas) -> Parsed:
    """Words and calls of a text so far."""
    return marked(text, final, _MARKER, _read, (_OPEN,))


HERMES = ToolParser(parse, (_OPEN, _CLOSE))
