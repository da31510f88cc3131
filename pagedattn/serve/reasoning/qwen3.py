"""Qwen 3: as DeepSeek R1, but a tool call in the midst of thinking ends it too.

Knows that Qwen 3.5 may forget `</think>` before `<tool_call><function=…`; the words
`<tool_call>` alone are thought about, not called.
"""

from __future__ import annotations

import re

from pagedattn.serve.reasoning.split import ReasoningParser, until

_OPENS, _CLOSES = "<think>", "</think>"
_CALLS = re.compile(r"<tool_call>\s*<function=")
_MAY_CALL = re.compile(r"<tool_call>\s*(?:<[a-z]*)?\Z|<[a-z_]*\Z")


def split(text: str, final: bool) -> tuple[str, str]:
    """(reasoning, rest) of a text so far."""
    call = _CALLS.search(text)
    end = text.find(_CLOSES)
    if call is not None and (end < 0 or call.start() < end):
        reasoning, _ = until(text[: call.start()], True, _OPENS, _CLOSES)
        return reasoning, text[call.start() :]
    may = _MAY_CALL.search(text) if end < 0 and not final else None
    return until(text[: may.start()] if may else text, final, _OPENS, _CLOSES)


QWEN3 = ReasoningParser(split, _OPENS, _CLOSES, (_OPENS, _CLOSES))
