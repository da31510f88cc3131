"""Mistral (Magistral): `[THINK]…[/THINK]`; without the first there is no reasoning.

Knows the two tokens; words before the first are content.
"""

from __future__ import annotations

from pagedattn.serve.reasoning.split import ReasoningParser, cut
from pagedattn.serve.tools.marked import free

_OPENS, _CLOSES = "[THINK]", "[/THINK]"


def split(text: str, final: bool) -> tuple[str, str]:
    """(reasoning, rest) of a text so far."""
    before, opened, after = text.partition(_OPENS)
    if not opened:
        words = text if final else free(text, (_OPENS, _CLOSES))
        return "", words.replace(_CLOSES, "")
    reasoning, rest = cut(after, final, _CLOSES)
    return reasoning, before.replace(_CLOSES, "") + rest


MISTRAL = ReasoningParser(split, _OPENS, _CLOSES, (_OPENS, _CLOSES))
