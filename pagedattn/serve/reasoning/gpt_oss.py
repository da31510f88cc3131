"""gpt-oss: harmony's analysis channel is the reasoning; the rest stays harmony.

Knows which messages to take out; the tool parser `openai`, or content alone, reads
what remains.
"""

from __future__ import annotations

from pagedattn.serve.harmony import MARKERS, START, Message, messages
from pagedattn.serve.reasoning.split import ReasoningParser
from pagedattn.serve.tools.gpt_oss import GPT_OSS


def split(text: str, final: bool) -> tuple[str, str]:
    """(reasoning, rest) of a text so far."""
    found = messages(text, final)
    thoughts = [m.body for m in found if _is_thought(m) and m.body]
    rest = "".join(_raw(text, m, final) for m in found if not _is_thought(m))
    return "\n".join(thoughts), rest


def _is_thought(message: Message) -> bool:
    return message.channel == "analysis" and not message.recipient


def _raw(text: str, message: Message, final: bool) -> str:
    """The message as it stands; while it goes on, as far as its body is certain."""
    raw = text[message.start : message.end]
    if message.done or final:
        return raw
    held = len(raw) - raw.rfind(message.body) - len(message.body)
    return raw[: len(raw) - held]


GPT_OSS_REASONING = ReasoningParser(
    split, START, "<|channel|>final<|message|>", MARKERS, GPT_OSS.parse
)
