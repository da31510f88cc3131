"""How the texts of one request are read: which parser, or none.

Knows the request's choice of tools and what the server was started with; joins the
reasoning parser and the tool parser into one function of the text so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pagedattn.serve.deltas import Deltas, Said, call_object
from pagedattn.serve.front import Front, Prompt
from pagedattn.serve.problems import ApiError
from pagedattn.serve.protocol import ChatBody
from pagedattn.serve.reasoning.split import ReasoningParser
from pagedattn.serve.tools.calls import ToolCall, ToolParser, long_id
from pagedattn.serve.tools.jsoncalls import read_calls
from pagedattn.text.tokenizer import Tokenizer

Read = Callable[[str, bool], Said]


@dataclass(frozen=True, slots=True)
class Reading:
    """What to make of an answer's text, and what the parsers need of the engine."""

    read: Read
    new_id: Callable[[], str] = long_id
    named: bool = False
    thinks: ReasoningParser | None = None
    markers: tuple[str, ...] = ()

    def finish(self, reason: str | None, said: Said) -> str | None:
        """The reason as clients know it: tool_calls if a call is what it stopped for.

        A named choice stops with "stop", as OpenAI's does: there was no choice.
        """
        called = reason == "stop" and said.calls and not self.named
        return "tool_calls" if called else reason

    def needs_specials(self, tokenizer: Tokenizer) -> bool:
        """Whether a marker is a special token, which texts usually leave out."""
        ids = (tokenizer.token_id(marker) for marker in self.markers)
        return any(i in tokenizer.special_ids for i in ids if i is not None)


def check_choice(front: Front, body: ChatBody) -> None:
    """400 for a choice that the server was not started to read."""
    if body.choice == "auto" and not front.settings.enable_auto_tool_choice:
        raise ApiError(
            400,
            'tools: "auto" tool choice requires --enable-auto-tool-choice and '
            "--tool-call-parser to be set.",
            "tools" if body.tool_choice is None else "tool_choice",
        )


def reading_for(
    front: Front, body: ChatBody, prompt: Prompt, free: bool
) -> Reading | None:
    """How this request's answer is read; None: the text is the content.

    An answer that is not `free` in its form has no room for reasoning.
    """
    parser, thinks = front.tool_parser, front.reasoning_parser if free else None
    new_id = parser.new_id if parser else long_id
    if body.choice in ("required", "named"):
        read = _named(body.named) if body.named else _required(body.one_call)
        return Reading(read, new_id, body.named is not None)
    parser = parser if body.choice == "auto" else None
    if parser is None and thinks is None:
        return None
    markers = (parser.markers if parser else ()) + (thinks.markers if thinks else ())
    return Reading(
        _parsed(body, prompt, parser, thinks), new_id, False, thinks, markers
    )


# Choices that a grammar enforces: the text is nothing but JSON.
def _named(name: str) -> Read:
    return lambda text, final: Said("", (ToolCall(name, text),) if text else ())


def _required(one: bool) -> Read:
    def read(text: str, final: bool) -> Said:
        block = read_calls(text, 0)
        calls = block.calls if block else ()
        return Said("", calls[:1] if one else calls)

    return read


# Choices that the model makes: thoughts first, then words and calls.
def _parsed(
    body: ChatBody,
    prompt: Prompt,
    parser: ToolParser | None,
    thinks: ReasoningParser | None,
) -> Read:
    schemas, one = body.schemas, body.one_call
    parse = parser.parse if parser else (thinks.plain if thinks else None)
    lead = _lead(body, prompt, thinks)

    def read(text: str, final: bool) -> Said:
        reasoning = ""
        if thinks is not None and lead is not None:
            reasoning, text = thinks.split(lead + text, final)
        if parse is None:
            return Said(text, (), reasoning)
        parsed = parse(text, final, schemas)
        return Said(
            parsed.content, parsed.calls[:1] if one else parsed.calls, reasoning
        )

    return read


def _lead(body: ChatBody, prompt: Prompt, thinks: ReasoningParser | None) -> str | None:
    """What the prompt already wrote of the reasoning: its opening, or nothing; None
    where there is none to come: switched off, or ended by the prompt."""
    if thinks is None:
        return None
    tail = (prompt.text or "")[-200:].rstrip()
    if tail.endswith(thinks.closes) or not thinking(body):
        return None
    return thinks.opens if tail.endswith(thinks.opens) else ""


def thinking(body: ChatBody) -> bool:
    """Whether the request leaves thinking on, in the words templates know for it."""
    extra = body.template_kwargs
    return all(extra.get(name) is not False for name in ("enable_thinking", "thinking"))


@dataclass(slots=True)
class Reply:
    """One choice's answer as it grows."""

    reading: Reading
    text: str = ""
    ids: list[int] = field(default_factory=list)
    said: Said = Said("")
    deltas: Deltas = field(init=False)

    def __post_init__(self) -> None:
        self.deltas = Deltas(self.reading.new_id)

    def add(self, text: str, ids: list[int], ended: bool) -> dict[str, Any]:
        """Take what is new; the delta that it makes."""
        self.text += text
        self.ids += ids
        self.said = self.reading.read(self.text, ended)
        return self.deltas.take(self.said)

    def message(self) -> dict[str, Any]:
        """Content, reasoning and calls of an answer that has ended."""
        said = self.said
        empty = not said.content and (said.calls or said.reasoning)
        message: dict[str, Any] = {"content": None if empty else said.content}
        if self.reading.thinks is not None:
            message["reasoning"] = said.reasoning or None
        if said.calls:
            new_id = self.reading.new_id
            message["tool_calls"] = [call_object(c, new_id()) for c in said.calls]
        return message

    def thought(self, tokenizer: Tokenizer) -> int:
        """How many tokens were reasoning: those before the closing token, where the
        format has one, else as many as its text makes."""
        thinks, said = self.reading.thinks, self.said
        if thinks is None or not said.reasoning:
            return 0
        opens, closes = map(tokenizer.token_id, (thinks.opens, thinks.closes))
        if closes in self.ids:
            return self.ids.index(closes) - (self.ids[0] == opens)
        return len(tokenizer.encode(said.reasoning, add_special_tokens=False))
