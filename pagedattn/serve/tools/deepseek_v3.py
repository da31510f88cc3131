"""DeepSeek V3 and V3.1: calls between full-width marker tokens.

Knows V3's `function<｜tool▁sep｜>name` with the arguments in a Markdown fence, and
V3.1's `name<｜tool▁sep｜>{…}`.
"""

from __future__ import annotations

import re
from dataclasses import replace

from pagedattn.serve.tools.calls import Parsed, Schemas, ToolParser
from pagedattn.serve.tools.jsoncalls import read_headed
from pagedattn.serve.tools.marked import Block, closed, marked

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEP = "<｜tool▁sep｜>"
_MARKERS = (_ALL, _ALL_END, _ONE)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_HEAD = re.compile(
    rf"function{_SEP}([^\n{{<]+)\n```json\s*(?=\{{)|([^\n{{<]+){_SEP}\s*(?=\{{)"
)


def _read(text: str, start: int, at: int) -> Block | None:
    if not text.startswith(_ONE, start):
        return Block(end=at)  # around all calls: says nothing
    block = read_headed(text, at, _HEAD)
    if block is None or block.end is None:
        return block
    end = closed(text, block.end, "```")
    return replace(block, end=None if end is None else closed(text, end, _ONE_END))


def parse(text: str, final: bool, schemas: Schemas) -> Parsed:
    """Words and calls of a text so far."""
    return marked(text, final, _MARKER, _read, _MARKERS)


DEEPSEEK_V3 = ToolParser(parse, (*_MARKERS, _ONE_END, _SEP))
