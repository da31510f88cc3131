"""The requests' fields, and bodies read strictly: what is known, refused or ignored.

Knows JSON, field names and types; ranges are `SamplingParams`' affair, and meaning is
that of `completions`, `chat` and `prompts`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request

from pagedattn.serve.formats import OLD_NAMES
from pagedattn.serve.problems import ApiError
from pagedattn.serve.tool_fields import ToolFields

log = logging.getLogger("pagedattn.serve")

MAX_PROMPTS = 1_024  # prompts in one request
MAX_SEQUENCES = 1_024  # prompts × n in one request
LONGEST_ID = 256  # characters of a client's request id

# Fields of OpenAI or vLLM whose capability is not built: field -> harmless values.
# null is always harmless; any other value is an error that names the field.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "ec_transfer_params": (),
    "function_call": ("none",),
    "functions": (),
    "guided_decoding_backend": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning": (),
    "repetition_detection": (),
    "return_assistant_tokens_mask": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_interval": (1,),
    "structural_tag": (),
    "suffix": ("",),
    "thinking": (),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none",),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}
# Accepted and without effect: they say who asks, or hint where to cache.
HARMLESS = frozenset(
    "user metadata safety_identifier prompt_cache_key prompt_cache_retention "
    "session_id".split()
)

Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Body(BaseModel):
    """Any request body. Unknown fields are kept aside, null means "not given"."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    elsewhere: ClassVar[Mapping[str, str]] = {}  # fields of other endpoints -> advice

    model: str | None = None

    def check(self) -> None:
        """Refuse what makes no sense; ApiError 400."""
        self.check_extras()

    def check_extras(self) -> None:
        """Refuse known fields that would change the answer if they were ignored."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in HARMLESS:
                continue
            advice = self.elsewhere.get(name) or OLD_NAMES.get(name)
            if advice is not None:
                raise ApiError(400, f"{name}: {advice}.", name)
            if name not in NOT_BUILT:
                log.debug("ignored unknown field %r", name[:80])
            elif not any(_same(value, good) for good in NOT_BUILT[name]):
                raise ApiError(400, f"{name} is not supported by this server.", name)


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b  # True == 1, but not here


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerateBody(Body):
    """What completions and chats have in common; names and meanings are vLLM's."""

    n: Whole | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    seed: Whole | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    allowed_token_ids: list[Whole] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Whole] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Whole | None = None
    prompt_logprobs: Whole | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Whole | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def check(self) -> None:
        """Refuse combinations that make no sense; ranges are checked elsewhere."""
        self.check_extras()
        if self.stream_options is not None and not self.stream:
            _refuse("stream_options", "needs stream=true")
        if self.stream and self.prompt_logprobs:
            _refuse("prompt_logprobs", "is not available with stream=true")
        if self.cache_salt == "":
            _refuse("cache_salt", "must not be empty")
        if len(self.request_id or "") > LONGEST_ID:
            _refuse("request_id", f"has more than {LONGEST_ID} characters")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that holds the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream holds the usage so far."""
        options = self.stream_options
        return self.include_usage and bool(options and options.continuous_usage_stats)


class CompletionBody(GenerateBody):
    """`/v1/completions`. `prompt`: a string, token ids, or a list of either."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "completions take max_tokens",
        "top_logprobs": "completions take logprobs, a number",
        "messages": "completions take prompt; chats are at /v1/chat/completions",
        "reasoning_effort": "completions have no template that could read it",
        "tools": "completions take none; chats are at /v1/chat/completions",
    }

    prompt: Any = None
    logprobs: Whole | None = None

    def check(self) -> None:
        """As above, and what scoring needs."""
        GenerateBody.check(self)
        if self.max_tokens == 0 and not self.echo:
            _refuse("max_tokens", "must be at least 1, or 0 with echo=true")
        if self.scoring and (self.n or 1) > 1:
            _refuse("n", "must be 1 with max_tokens=0")

    @property
    def scoring(self) -> bool:
        """Whether only the prompt's log-probabilities are wanted."""
        return self.max_tokens == 0


class TemplateFields(ToolFields):
    """How messages become a prompt; shared by chats and `/tokenize`."""

    model_config = ConfigDict(strict=True)

    messages: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def generation_prompt(self) -> bool:
        """Whether the rendered prompt ends with the start of an answer."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What templates get beside messages and tools."""
        extra = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", self.reasoning_effort)
        if self.thinks is not None:
            extra.setdefault("enable_thinking", self.thinks)
            extra.setdefault("thinking", self.thinks)
        return extra

    def check_template(self) -> None:
        """Refuse to start an answer and to go on with one at once."""
        self.check_tools()
        if self.continue_final_message and self.generation_prompt:
            _refuse("continue_final_message", "needs add_generation_prompt=false")


class ChatBody(TemplateFields, GenerateBody):
    """`/v1/chat/completions`."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    elsewhere: ClassVar[Mapping[str, str]] = {
        "prompt": "chats take messages; completions are at /v1/completions"
    }

    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    max_completion_tokens: Whole | None = None
    return_prompt_text: bool | None = None

    def check(self) -> None:
        """As above, and what chats need."""
        GenerateBody.check(self)
        self.check_template()
        if self.top_logprobs and not self.logprobs:
            _refuse("top_logprobs", "needs logprobs=true")


class TokenizeBody(TemplateFields, Body):
    """`/tokenize`: a prompt, or messages as in chats."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    prompt: str | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Refuse both forms at once, and neither."""
        self.check_extras()
        self.check_template()
        if (self.prompt is None) == (self.messages is None):
            _refuse("prompt", "or messages must be given, and not both")


class DetokenizeBody(Body):
    """`/detokenize`."""

    tokens: list[Whole]

    def check(self) -> None:
        """Nothing more to check."""
        self.check_extras()


def _refuse(param: str, rule: str) -> NoReturn:
    raise ApiError(400, f"{param} {rule}.", param)


# Reading a body: bounded, finite, valid Unicode, then the fields.
M = TypeVar("M", bound=Body)


async def read_body(http: Request, limit: int) -> bytes:
    """The body's bytes; 413 as soon as there are, or will be, more than `limit`."""
    announced = http.headers.get("content-length", "")
    size = int(announced) if announced.isascii() and announced.isdigit() else 0
    parts = []
    if size <= limit:
        size = 0
        async for part in http.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise ApiError(413, f"The body has {size} bytes or more; the limit is {limit}.")
    return b"".join(parts)


def parse(model: type[M], raw: bytes) -> M:
    """The body as `model`, checked; ApiError 400 that names the first fault."""
    return built(model, parse_json(raw))


def built(model: type[M], values: dict[str, Any]) -> M:
    """The same from fields that are read already."""
    try:
        body = model.model_validate(values)
    except ValidationError as problem:
        raise _first_fault(problem) from None
    body.check()
    return body


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`; no NaN, infinity or half of a surrogate pair in it."""
    try:
        value = json.loads(raw, parse_constant=_not_finite, parse_float=_finite)
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError:
        raise ApiError(400, "The body is not valid Unicode.") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.") from None
    except ValueError as problem:
        raise ApiError(400, f"The body is not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return value


def _not_finite(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number.")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large.")
    return number


def _first_fault(problem: ValidationError) -> ApiError:
    """The first fault, with its path and no copy of what was sent."""
    fault = problem.errors(include_url=False, include_input=False)[0]
    path = [str(p) for p in fault["loc"]]
    where = ".".join(p for p in path if p.isidentifier() or p.isdigit())
    return ApiError(400, f"{where}: {fault['msg']}.", path[0] if path else None)
