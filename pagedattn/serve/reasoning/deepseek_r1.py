"""DeepSeek R1: everything up to `</think>`; the prompt, or the text, opens it.

Knows the two tags, whichever of them the model writes.
"""

from __future__ import annotations

from pagedattn.serve.reasoning.split import ReasoningParser, until

_OPENS, _CLOSES = "<think>", "</think>"


def split(text: str, final: bool) -> tuple[str, str]:
    """(reasoning, rest) of a text so far."""
    return until(text, final, _OPENS, _CLOSES)


DEEPSEEK_R1 = ReasoningParser(split, _OPENS, _CLOSES, (_OPENS, _CLOSES))
