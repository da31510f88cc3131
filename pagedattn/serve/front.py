"""What every endpoint shares: the engine, the settings, the chat template, the count.

Knows what the server asks of an engine, and no more of it; knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pagedattn.config import EngineArgs, EngineConfig
from pagedattn.errors import NotSupported
from pagedattn.metrics import Metrics
from pagedattn.model.pooling import Pooling
from pagedattn.request import RequestOutput, SamplingParams
from pagedattn.serve.formats import structured_outputs
from pagedattn.serve.problems import ApiError
from pagedattn.serve.protocol import (
    LONGEST_ID,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    GenerateBody,
)
from pagedattn.serve.reasoning.split import ReasoningParser
from pagedattn.serve.responses.store import ResponseStore
from pagedattn.serve.settings import ServeArgs, read_template
from pagedattn.serve.spans import Spans
from pagedattn.serve.tools.calls import ToolParser
from pagedattn.serve.wire import merge
from pagedattn.text.template import ChatTemplate
from pagedattn.text.tokenizer import Tokenizer
from pagedattn.viz.live import Film

log = logging.getLogger("pagedattn.serve")
FIRST_WAIT = 1.0  # seconds before a stream's status is sent without a first token


class ServedEngine(Protocol):
    """What the server needs of an asynchronous engine."""

    config: EngineConfig
    args: EngineArgs
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    metrics: Metrics
    model_name: str
    vocab_size: int
    is_running: bool
    facts: dict[str, str]
    generates: bool
    pooling: Pooling | None
    hidden_size: int

    def default_sampling(self) -> dict[str, Any]:
        """Sampling defaults that the model brings."""
        ...

    def generate(
        self,
        prompt: dict[str, Any],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs as they come; UserError before any work; closing it aborts."""
        ...

    async def embed(
        self, prompt: dict[str, Any], request_id: str, *, priority: int = 0
    ) -> RequestOutput:
        """The prompt's pooled hidden states; being cancelled ends the work."""
        ...

    async def drain(self, timeout: float) -> None:
        """Take no more requests; end those running within `timeout` seconds."""
        ...

    def shutdown(self) -> None:
        """Stop the step loop."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenised; `text` is None where the client sent ids."""

    ids: list[int]
    text: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """One request's identity, which every chunk of its answer repeats."""

    id: str
    created: int
    model: str


@dataclass(slots=True)
class Front:
    """The server's whole state. `in_flight` counts answers not yet sent to the end."""

    engine: ServedEngine
    settings: ServeArgs
    template: ChatTemplate | None
    tool_parser: ToolParser | None = None
    reasoning_parser: ReasoningParser | None = None
    longest_text: int | None = None  # characters that could fit the context at all
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    in_flight: int = 0
    spans: Spans | None = None
    film: Film | None = None
    responses: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.responses = ResponseStore(
            self.settings.max_stored_responses, self.settings.max_stored_response_bytes
        )

    @property
    def names(self) -> list[str]:
        """The names under which the model is served; the first is used in answers."""
        return self.engine.args.served_model_name or [self.engine.model_name]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; 400 where the engine runs without one."""
        if self.engine.tokenizer is None:
            raise ApiError(400, "This server has no tokenizer: send token ids.")
        return self.engine.tokenizer

    def model(self, asked: str | None) -> str:
        """The served name that was asked for, the first by default; else 404."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            name = asked[:200]
            raise ApiError(404, f"The model `{name}` does not exist.", "model")
        return asked

    def open_call(self, prefix: str, body: GenerateBody, request_id: str) -> Call:
        """Identify a request for text; its id is part of the answer's."""
        model = self.model(body.model)
        if not self.engine.generates:
            raise ApiError(
                400,
                f"The model `{model}` generates no text here: it serves embeddings, "
                "scores and reranking only.",
                "model",
            )
        return Call(f"{prefix}-{request_id[:LONGEST_ID]}", int(time.time()), model)

    def open_pooling(self, prefix: str, asked: str | None, request_id: str) -> Call:
        """Identify a request for embeddings or scores; 400 where there are none."""
        model = self.model(asked)
        if self.engine.pooling is None:
            raise ApiError(
                400,
                f"The model `{model}` gives no embeddings here: the server was started "
                "with --convert none.",
                "model",
            )
        return Call(f"{prefix}-{request_id[:LONGEST_ID]}", int(time.time()), model)

    @property
    def pooling(self) -> Pooling:
        """How the model pools; asked only after `open_pooling`."""
        assert self.engine.pooling is not None
        return self.engine.pooling

    def generate(
        self, call: Call, body: GenerateBody, prompts: list[Prompt], p: SamplingParams
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt's number, output) of all prompts as they come.

        Engine ids are unique however often a client repeats its own.
        """
        check_sequences(len(prompts), p.n)
        if self.settings.enable_log_requests:
            lengths = [len(prompt.ids) for prompt in prompts]
            log.info("Received %s: prompt tokens %s, %s", call.id, lengths, p)
        salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}
        unique = f"{call.id}-{uuid.uuid4().hex[:12]}"
        streams = [
            self.engine.generate(
                {"prompt_token_ids": prompt.ids, **salt},
                p,
                f"{unique}-{i}",
                priority=body.priority or 0,
            )
            for i, prompt in enumerate(prompts)
        ]
        if self.spans is not None:
            streams = [self.spans.around(s, call.id, call.model, p) for s in streams]
        return merge(streams)


def front_for(engine: ServedEngine, settings: ServeArgs) -> Front:
    """The state of a server for `engine`; a template in the settings replaces its."""
    source = read_template(settings.chat_template)
    template = engine.chat_template if source is None else ChatTemplate(source)
    front = Front(
        engine,
        settings,
        template,
        settings.tool_parser(),
        settings.reasoning(),
        _longest_text(engine),
    )
    if settings.otlp_traces_endpoint is not None:
        front.spans = Spans.to(settings.otlp_traces_endpoint)
    if hasattr(engine, "after_step"):
        front.film = Film(engine.nudge)
        engine.after_step = front.film.after_step
    return front


def _longest_text(engine: ServedEngine) -> int | None:
    """A text of more characters can't fit, whatever it says; None where unknown."""
    if engine.tokenizer is None:
        return None
    try:
        longest = max(map(len, engine.tokenizer.pieces()), default=1)
    except NotSupported:
        return None
    return engine.config.max_model_len * max(longest, 1)


def check_sequences(prompts: int, n: int) -> None:
    """Refuse more prompts, or prompts × n, than one request may bring."""
    if prompts > MAX_PROMPTS:
        raise ApiError(
            400,
            f"prompt holds {prompts} prompts; the limit is {MAX_PROMPTS}.",
            "prompt",
        )
    if prompts * n > MAX_SEQUENCES:
        raise ApiError(
            400,
            f"n={n} for {prompts} prompts is {prompts * n} sequences; the limit of "
            f"one request is {MAX_SEQUENCES}.",
            "n",
        )


_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids"),
    *("bad_words", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "min_tokens", "skip_special_tokens", "prompt_logprobs"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens"),
)


def sampling_values(front: Front, body: GenerateBody) -> dict[str, Any]:
    """Sampling parameters: the model's defaults, then what the body gives."""
    given = {name: getattr(body, name) for name in _SAMPLING}
    values = {k: v for k, v in given.items() if v is not None}
    wish = structured_outputs(body.response_format, body.structured_outputs)
    if wish is not None:
        values["structured_outputs"] = wish
    detokenize = front.engine.tokenizer is not None
    return {**front.engine.default_sampling(), **values, "detokenize": detokenize}


def usage(prompt_tokens: int, completion_tokens: int, cached: int) -> dict[str, Any]:
    """OpenAI's usage object; cached tokens are always told."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Tally:
    """The usage of one answer, counted from its outputs."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._completion = 0
        self.reasoning: int | None = None  # tokens of it; None: nobody counts them

    def add(self, i: int, output: RequestOutput, generated: bool = True) -> None:
        """Count an output of prompt `i`; without `generated` only its prompt."""
        cached = output.num_cached_tokens or 0
        self._prompts[i] = (len(output.prompt_token_ids), cached)
        if generated:
            self._completion += sum(len(out.token_ids) for out in output.outputs)

    def usage(self) -> dict[str, Any]:
        """What was counted, as OpenAI's usage object."""
        counts: Sequence[tuple[int, int]] = list(self._prompts.values())
        found = usage(
            sum(p for p, _ in counts), self._completion, sum(c for _, c in counts)
        )
        if self.reasoning is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return found

    def in_chunk(self, body: GenerateBody) -> dict[str, Any]:
        """A chunk's usage: counted so far, or null until the last, or left out."""
        if body.continuous_usage:
            return {"usage": self.usage()}
        return {"usage": None} if body.include_usage else {}
