"""The fields of Ollama's API, and what they are called in OpenAI's.

Knows names, types and which options change an answer; an option that can't be obeyed
and would is a 400, one that says how the machine should run is left alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from pagedattn.serve.problems import ApiError
from pagedattn.serve.protocol import Body

log = logging.getLogger("pagedattn.serve")

# Ollama's option -> the field here. num_predict of -1 and -2: as many as fit.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "num_predict": "max_tokens",
}
_NUMBERS = {"temperature", "top_p", "min_p", "repeat_penalty"}
_NUMBERS |= {"presence_penalty", "frequency_penalty"}
# How the machine should run, which the server's start has settled.
_MACHINE = frozenset(
    "num_ctx num_keep num_batch num_gpu main_gpu num_thread numa low_vram f16_kv "
    "vocab_only use_mmap use_mlock logits_all draft_num_predict".split()
)
# Samplers that are not built: the values that leave an answer as it is.
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5.0,),
    "typical_p": (1.0,),
    "tfs_z": (1.0,),
    "repeat_last_n": (-1, 64),
    "penalize_newline": (True,),
}


class OllamaBody(Body):
    """What every request has. The model stays loaded, whatever `keep_alive` says."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "adapters": "adapters are not built here",
        "images": "this model takes no images",
        "logprobs": "ask /v1/chat/completions for log-probabilities",
        "top_logprobs": "ask /v1/chat/completions for log-probabilities",
    }

    options: dict[str, Any] | None = None
    keep_alive: Any = None
    stream: bool | None = None

    def check(self) -> None:
        """Refuse what is not built; `model` is needed."""
        for name in [n for n, v in (self.model_extra or {}).items() if v in ([], "")]:
            del self.model_extra[name]
        self.check_extras()
        if not self.model:
            raise ApiError(400, "model is required", "model")

    def sampling(self) -> dict[str, Any]:
        """The options as fields of a chat; 400 for one that can't be obeyed."""
        found: dict[str, Any] = {}
        for name, value in (self.options or {}).items():
            if value is None:
                continue
            if name in _OPTIONS:
                number = name in _NUMBERS and type(value) is int
                found[_OPTIONS[name]] = float(value) if number else value
            elif name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise ApiError(400, f"options.{name}={value!r} is not built.", name)
            elif name not in _NEUTRAL:
                known = "the machine's" if name in _MACHINE else "an unknown"
                log.debug("ignored %s option %r", known, name[:80])
        if found.get("max_tokens") in (-1, -2):
            del found["max_tokens"]
        return found


class _Answered(OllamaBody):
    """What chats and prompts have in common."""

    format: str | dict[str, Any] | None = None
    think: bool | None = None

    def check(self) -> None:
        """As above; `format` is json or a schema."""
        OllamaBody.check(self)
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise ApiError(400, "format must be json or a JSON schema.", "format")

    def answered(self) -> dict[str, Any]:
        """Options, format and thinking, as fields of a chat."""
        fields = self.sampling()
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            schema = {"name": "format", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields

    def thinking(self) -> dict[str, Any]:
        """What the template is told of thinking."""
        if self.think is None:
            return {}
        return {"chat_template_kwargs": {"enable_thinking": self.think}}


class OllamaChat(_Answered):
    """`/api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None

    def chat(self) -> dict[str, Any]:
        """The same as `/v1/chat/completions` has it."""
        fields = {**self.answered(), **self.thinking()}
        if self.tools:
            fields["tools"] = self.tools
        return fields | {"messages": [_message(m) for m in self.messages or []]}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form: arguments as text, tool results by name."""
    if message.get("images"):
        raise ApiError(400, "images: this model takes no images.", "messages")
    kept = {k: v for k, v in message.items() if k != "images"}
    if kept.get("thinking"):
        kept["reasoning"] = kept.pop("thinking")
    if name := kept.pop("tool_name", None):
        kept |= {"name": name, "tool_call_id": name}
    if kept.get("tool_calls"):
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    else:
        kept.pop("tool_calls", None)
    return kept


def _call(call: Any) -> dict[str, Any]:
    made = call.get("function") if isinstance(call, dict) else None
    if not isinstance(made, dict) or not isinstance(made.get("name"), str):
        raise ApiError(400, "tool_calls: each needs a function's name.", "messages")
    arguments = made.get("arguments") or {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    function = {"name": made["name"], "arguments": arguments}
    return {"id": made["name"], "type": "function", "function": function}


class OllamaGenerate(_Answered):
    """`/api/generate`."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        **OllamaBody.elsewhere,
        "context": "send the earlier turns to /api/chat instead",
        "suffix": "filling in the middle is not built",
        "template": "the model's own template is used; raw=true uses none",
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    def check(self) -> None:
        """As above; a raw prompt has no system message."""
        _Answered.check(self)
        if self.raw and self.system:
            raise ApiError(400, "system needs raw=false.", "system")

    def chat(self) -> dict[str, Any]:
        """The prompt as a conversation of one message."""
        system = {"role": "system", "content": self.system}
        user = {"role": "user", "content": self.prompt}
        messages = [system, user] if self.system else [user]
        return {**self.answered(), **self.thinking(), "messages": messages}

    def completion(self, longest: int) -> dict[str, Any]:
        """The raw prompt; its answer is as long as it gets, at most `longest`."""
        return {"max_tokens": longest, **self.answered(), "prompt": self.prompt}


class OllamaEmbed(OllamaBody):
    """`/api/embed`, and the older `/api/embeddings` with `prompt`."""

    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None

    def embedding(self) -> dict[str, Any]:
        """The same as `/v1/embeddings` has it; too long texts are cut, as Ollama
        does unless truncate is false."""
        text = self.prompt if self.input is None else self.input
        cut = {} if self.truncate is False else {"truncate_prompt_tokens": -1}
        return {"input": text, "dimensions": self.dimensions, **cut}


class OllamaShow(OllamaBody):
    """`/api/show`; older clients say `name`."""

    name: str | None = None
    verbose: bool | None = None

    def check(self) -> None:
        """As above, by either name."""
        self.model = self.model or self.name
        OllamaBody.check(self)
