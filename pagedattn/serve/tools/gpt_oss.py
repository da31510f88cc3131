"""gpt-oss: a message with a recipient is a call, the final channel is content.

Knows which of harmony's messages a client sees; the analysis channel is the reasoning
parser's.
"""

from __future__ import annotations

from pagedattn.serve.harmony import MARKERS, Message, messages
from pagedattn.serve.tools.calls import Parsed, Schemas, ToolCall, ToolParser


def parse(text: str, final: bool, schemas: Schemas) -> Parsed:
    """Words and calls of a text so far."""
    found = messages(text, final)
    calls = tuple(_call(m, final) for m in found if m.recipient)
    words = (m.body for m in found if not m.recipient and m.channel != "analysis")
    return Parsed("".join(words), calls)


def _call(message: Message, final: bool) -> ToolCall:
    name = (message.recipient or "").removeprefix("functions.")
    empty = (message.done or final) and not message.body.strip()
    return ToolCall(name, "{}" if empty else message.body.lstrip())


GPT_OSS = ToolParser(parse, MARKERS)
