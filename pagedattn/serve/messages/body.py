"""`/v1/messages`: the request's fields, and the chat that they ask for.

Knows Anthropic's field names and what of them a chat can do; content blocks become
messages in `messages_input`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from pagedattn.serve.messages.input import to_messages
from pagedattn.serve.protocol import Body, ChatBody, Number, Whole
from pagedattn.serve.to_chat import chat_body, refuse, text_of

# Fields of a chat -> the names that clients of this endpoint know them under.
NAMES: Mapping[str, str] = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "max_completion_tokens": "max_tokens",
}
THINKING = ("enabled", "disabled", "adaptive")


class OutputConfig(BaseModel):
    """How hard to try, and what the text must look like."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None
    format: dict[str, Any] | None = None


class Thinking(BaseModel):
    """Whether to think before answering. The budget is a hint that no model here
    can read; `max_tokens` is what bounds thoughts and text together."""

    model_config = ConfigDict(strict=True)

    type: str
    budget_tokens: Whole | None = None


class CountBody(Body):
    """`/v1/messages/count_tokens`: what makes the prompt."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "prompt": "messages take messages; completions are at /v1/completions",
        "stop": "messages take stop_sequences",
        "max_completion_tokens": "messages take max_tokens",
        "reasoning_effort": "messages take output_config.effort",
        "response_format": "messages take output_config.format",
        "container": "nothing is run here",
        "mcp_servers": "nothing is run here",
        "context_management": "contexts are not edited here",
    }

    messages: Any = None
    system: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Refuse what can't be done, and what makes no sense."""
        self.check_extras()
        if self.thinking and self.thinking.type not in THINKING:
            refuse("thinking.type", f"must be one of {', '.join(THINKING)}")
        budget = self.thinking and self.thinking.budget_tokens
        if budget is not None and budget < 1:
            refuse("thinking.budget_tokens", "must be at least 1")

    def chat_values(self) -> dict[str, Any]:
        """The fields of the chat that has the same prompt."""
        chat, goes_on = to_messages(self.messages, self.system)
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or [])]
        choice, parallel = _choice(self.tool_choice)
        return {
            "model": self.model,
            "messages": chat,
            "continue_final_message": goes_on or None,
            "add_generation_prompt": False if goes_on else None,
            "tools": tools or None,
            "tool_choice": choice if tools or choice != "auto" else None,
            "parallel_tool_calls": parallel,
            "chat_template_kwargs": self._template_kwargs(),
            "reasoning_effort": self.output_config and self.output_config.effort,
        }

    def _template_kwargs(self) -> dict[str, Any] | None:
        """Whether to think, in the word that templates know for it."""
        if self.thinking is None:
            return self.chat_template_kwargs
        thinks = {"enable_thinking": self.thinking.type != "disabled"}
        return {**thinks, **(self.chat_template_kwargs or {})}


class MessagesBody(CountBody):
    """`/v1/messages`."""

    max_tokens: Whole
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    priority: Whole | None = None
    request_id: str | None = None
    seed: Whole | None = None
    service_tier: str | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Number | None = None
    top_k: Whole | None = None
    top_p: Number | None = None

    def check(self) -> None:
        """As above, and what generation needs."""
        CountBody.check(self)
        if self.service_tier not in (None, "auto", "standard_only"):
            refuse("service_tier", "must be 'auto' or 'standard_only'")
        budget = self.thinking and self.thinking.budget_tokens
        if budget and budget >= self.max_tokens:
            refuse("thinking.budget_tokens", "must be less than max_tokens")


_SAME = ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt")


def chat_for(body: MessagesBody) -> ChatBody:
    """The chat that answers `body`."""
    disabled = body.thinking is not None and body.thinking.type == "disabled"
    values = {
        **body.chat_values(),
        **{name: getattr(body, name) for name in _SAME},
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "response_format": _format(body.output_config),
        "include_reasoning": False if disabled else None,
    }
    return chat_body(values, NAMES)


def chat_to_count(body: CountBody) -> ChatBody:
    """A chat that has the same prompt as the one that would answer `body`."""
    return chat_body(body.chat_values(), NAMES)


# Tools.
def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = str(tool["type"])[:40]
        refuse(f"{where}.type", f"{kind!r} is not supported, only 'custom'")
    function = {"name": text_of(tool.get("name"), f"{where}.name")}
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        refuse(f"{where}.input_schema", "must be an object")
    more = {k: tool[k] for k in ("description", "strict") if tool.get(k) is not None}
    return {"type": "function", "function": {**function, **more, "parameters": schema}}


def _choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """(a chat's tool_choice, its parallel_tool_calls)."""
    if choice is None:
        return None, None
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    match choice.get("type"):
        case "auto" | "none" as same:
            return same, parallel
        case "any":
            return "required", parallel
        case "tool":
            name = text_of(choice.get("name"), "tool_choice.name")
            return {"type": "function", "function": {"name": name}}, parallel
    return refuse("tool_choice.type", "must be auto, any, tool or none")


def _format(config: OutputConfig | None) -> dict[str, Any] | None:
    """A chat's `response_format`; None for plain text."""
    given = config and config.format
    if not given:
        return None
    if given.get("type") != "json_schema":
        refuse("output_config.format.type", "must be 'json_schema'")
    return {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": given.get("schema")},
    }
