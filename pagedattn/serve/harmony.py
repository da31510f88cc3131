"""gpt-oss's harmony: messages with channels and recipients, between marker tokens.

Knows how a text so far falls into messages; what a channel means for a client is the
tool parser's and the reasoning parser's affair.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
MARKERS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)

_STOP = re.compile("|".join(map(re.escape, (END, CALL, RETURN, START, CHANNEL))))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


@dataclass(frozen=True, slots=True)
class Message:
    """One message: the raw text from `start` to `end`; `body` without markers."""

    channel: str
    recipient: str | None
    body: str
    start: int
    end: int
    done: bool


def messages(text: str, final: bool) -> list[Message]:
    """The messages of a text so far; one whose header is unfinished is not yet one."""
    found: list[Message] = []
    at = 0
    while at < len(text):
        message = _message(text, at, final)
        if message is None:
            break
        found.append(message)
        at = message.end
    return found


def _message(text: str, at: int, final: bool) -> Message | None:
    if _is_plain(text, at, final):
        return _body(text, at, at, "final", None, final)
    header_end = text.find(MESSAGE, at)
    if header_end < 0:
        return None
    header = text[at:header_end]
    channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
    return _body(
        text,
        at,
        header_end + len(MESSAGE),
        channel.group(1) if channel else "final",
        recipient.group(1) if recipient else None,
        final,
    )


def _is_plain(text: str, at: int, final: bool) -> bool:
    """Whether the text begins with words, where a header should stand."""
    if at > 0:
        return False
    heads = (CHANNEL, START, MESSAGE, " to=")
    begun = any(h.startswith(text[: len(h)]) for h in heads)
    return not begun or (final and not any(text.startswith(h) for h in heads))


def _body(
    text: str, start: int, at: int, channel: str, recipient: str | None, final: bool
) -> Message:
    stop = _STOP.search(text, at)
    if stop is None:
        return Message(
            channel, recipient, _free(text[at:], final), start, len(text), False
        )
    keeps = stop.group() in (START, CHANNEL)  # the next message's
    end = stop.start() if keeps else stop.end()
    return Message(channel, recipient, text[at : stop.start()], start, end, True)


def _free(body: str, final: bool) -> str:
    """A body without an end that may become a marker."""
    at = body.rfind("<")
    if final or at < 0:
        return body
    return body[:at] if any(m.startswith(body[at:]) for m in MARKERS) else body
