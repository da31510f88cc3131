"""Granite 3.2: "Here is my thought process:" … "Here is my response:".

Knows both sentences, with "Here's" too; a text that begins otherwise is content.
"""

from __future__ import annotations

import re

from pagedattn.serve.reasoning.split import ReasoningParser
from pagedattn.serve.tools.marked import free

_OPENS = ("Here is my thought process:", "Here's my thought process:")
_CLOSES = ("Here is my response:", "Here's my response:")
_CLOSE = re.compile("|".join(_CLOSES))


def split(text: str, final: bool) -> tuple[str, str]:
    """(reasoning, rest) of a text so far."""
    begun = text.lstrip()
    opens = next((o for o in _OPENS if begun.startswith(o)), None)
    if opens is None:
        waiting = not final and any(o.startswith(begun) for o in _OPENS)
        return "", "" if waiting else text
    thought = begun[len(opens) :]
    close = _CLOSE.search(thought)
    if close is not None:
        return thought[: close.start()], thought[close.end() :]
    return (thought if final else free(thought, _CLOSES)), ""


GRANITE = ReasoningParser(split, _OPENS[0], _CLOSES[0])
