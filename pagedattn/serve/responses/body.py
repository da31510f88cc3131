"""`/v1/responses`: the request's fields, and the chat that they ask for.

Knows OpenAI's field names and what of them a chat can do; items become messages in
`responses_input`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from pagedattn.serve.protocol import Body, ChatBody, Number, Whole
from pagedattn.serve.to_chat import chat_body, object_of, refuse, text_of

LOGPROBS = "message.output_text.logprobs"
# Parts of an answer that may be asked for. All but the first belong to tools that only
# OpenAI runs, or would hide reasoning that is told in plain text here.
INCLUDABLE = frozenset(
    {
        LOGPROBS,
        *("reasoning.encrypted_content", "file_search_call.results"),
        *("web_search_call.results", "web_search_call.action.sources"),
        *("message.input_image.image_url", "computer_call_output.output.image_url"),
        "code_interpreter_call.outputs",
    }
)
MAX_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512  # OpenAI's

# Fields of a chat -> the names that clients of this endpoint know them under.
NAMES: Mapping[str, str] = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}
# Handed to the chat as they are.
_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("stop_token_ids", "presence_penalty", "frequency_penalty", "ignore_eos"),
    *("repetition_penalty", "logit_bias", "skip_special_tokens", "min_tokens"),
    *("include_stop_str_in_output", "priority", "cache_salt", "parallel_tool_calls"),
    *("chat_template_kwargs", "structured_outputs"),
)


class Reasoning(BaseModel):
    """How much to think; summaries are made by OpenAI's servers only."""

    model_config = ConfigDict(strict=True)

    effort: str | None = None
    summary: str | None = None


class TextConfig(BaseModel):
    """What the answer's text must look like."""

    model_config = ConfigDict(strict=True)

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class StreamOptions(BaseModel):
    """What a stream carries beside its events."""

    model_config = ConfigDict(strict=True)

    include_obfuscation: bool | None = None


class ResponsesBody(Body):
    """`/v1/responses`. `input`: a string, or items."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "messages": "responses take input; chats are at /v1/chat/completions",
        "max_tokens": "responses take max_output_tokens",
        "max_completion_tokens": "responses take max_output_tokens",
        "response_format": "responses take text.format",
        "reasoning_effort": "responses take reasoning.effort",
        "n": "responses have one answer",
        "conversation": "conversations are not kept here; use previous_response_id",
        "prompt": "prompts are not kept here; send instructions and input",
        "context_management": "contexts are not compacted here",
        "background_options": "background responses start at once here",
    }

    input: Any = None
    instructions: str | None = None
    background: bool | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    frequency_penalty: Number | None = None
    ignore_eos: bool | None = None
    include: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, Number] | None = None
    max_output_tokens: Whole | None = None
    max_tool_calls: Whole | None = None
    metadata: dict[str, str] | None = None
    min_p: Number | None = None
    min_tokens: Whole | None = None
    parallel_tool_calls: bool | None = None
    presence_penalty: Number | None = None
    previous_response_id: str | None = None
    priority: Whole | None = None
    prompt_cache_key: str | None = None
    reasoning: Reasoning | None = None
    repetition_penalty: Number | None = None
    request_id: str | None = None
    safety_identifier: str | None = None
    seed: Whole | None = None
    service_tier: str | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: dict[str, Any] | None = None
    temperature: Number | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_k: Whole | None = None
    top_logprobs: Whole | None = None
    top_p: Number | None = None
    truncation: str | None = None
    user: str | None = None

    def check(self) -> None:
        """Refuse what can't be done, and what makes no sense."""
        self.check_extras()
        if self.input is None:
            refuse("input", "must be given")
        if self.truncation not in (None, "disabled"):
            refuse("truncation", "must be 'disabled': nothing is left out silently")
        if self.background and self.store is False:
            refuse("background", "needs store=true: its answer is fetched later")
        if self.service_tier not in (None, "auto", "default"):
            refuse("service_tier", "must be 'auto' or 'default'")
        if self.stream_options is not None:
            self._check_stream_options()
        self._check_include()
        self._check_metadata()

    def _check_stream_options(self) -> None:
        if not self.stream:
            refuse("stream_options", "needs stream=true")
        if self.stream_options.include_obfuscation:
            refuse("stream_options.include_obfuscation", "must be false")

    def _check_include(self) -> None:
        for i, name in enumerate(self.include or []):
            if name not in INCLUDABLE:
                refuse(f"include[{i}]", "names nothing that could be included")

    def _check_metadata(self) -> None:
        pairs = self.metadata or {}
        if len(pairs) > MAX_METADATA:
            refuse("metadata", f"holds {len(pairs)} keys; the limit is {MAX_METADATA}")
        keys, values = map(len, pairs), map(len, pairs.values())
        if max(keys, default=0) > LONGEST_KEY or max(values, default=0) > LONGEST_VALUE:
            refuse(
                "metadata",
                f"keys have at most {LONGEST_KEY} characters, values {LONGEST_VALUE}",
            )

    @property
    def kept(self) -> bool:
        """Whether the answer is to be stored; OpenAI's default."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text's log-probabilities are told."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


def chat_for(body: ResponsesBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The chat that answers `body`, whose items are `messages` by now."""
    values: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    tools, choice = _tools(body)
    values |= {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs or None,
        "top_logprobs": body.top_logprobs or None,
        "tools": tools or None,
        "tool_choice": choice if tools or choice != "auto" else None,
        "response_format": _format(body),
        "verbosity": body.text and body.text.verbosity,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
    }
    return chat_body(values, NAMES)


# Tools: flat here, one level deeper in chats.
def _tools(body: ResponsesBody) -> tuple[list[dict[str, Any]], Any]:
    """The tools that may be called, and the choice among them, as a chat says both."""
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])]
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return tools, choice
    match choice.get("type"):
        case "function":
            name = text_of(choice.get("name"), "tool_choice.name")
            return tools, {"type": "function", "function": {"name": name}}
        case "allowed_tools":
            return _allowed(tools, choice), choice.get("mode", "auto")
    return refuse("tool_choice.type", "must be 'function' or 'allowed_tools'")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        refuse(f"{where}.type", f"{kind!r} is not supported, only 'function'")
    names = ("name", "description", "parameters", "strict")
    function = {k: tool[k] for k in names if tool.get(k) is not None}
    text_of(function.get("name"), f"{where}.name")
    return {"type": "function", "function": function}


def _allowed(
    tools: list[dict[str, Any]], choice: dict[str, Any]
) -> list[dict[str, Any]]:
    """Those of the tools that the choice allows."""
    entries = choice.get("tools")
    if not isinstance(entries, list) or not entries:
        refuse("tool_choice.tools", "must be a list of tools")
    asked = {
        text_of(object_of(e, where).get("name"), f"{where}.name")
        for i, e in enumerate(entries)
        for where in [f"tool_choice.tools[{i}]"]
    }
    if asked - {tool["function"]["name"] for tool in tools}:
        refuse("tool_choice.tools", "names a tool that tools does not hold")
    return [tool for tool in tools if tool["function"]["name"] in asked]


def _format(body: ResponsesBody) -> dict[str, Any] | None:
    """A chat's `response_format`; None for plain text."""
    given = body.text and body.text.format
    if not given or given.get("type") == "text":
        return None
    if given.get("type") != "json_schema":
        return given
    return {
        "type": "json_schema",
        "json_schema": {k: v for k, v in given.items() if k != "type"},
    }
