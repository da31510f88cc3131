"""`/v1/completions`: prompts in, continuations out, whole or as a stream.

Knows the shape of OpenAI's completion objects; choices, echo and scoring are settled
here. Knows nothing of sockets or schedulers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from pagedattn.request import (
    CompletionOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from pagedattn.serve.front import (
    FIRST_WAIT,
    Call,
    Front,
    Prompt,
    Tally,
    sampling_values,
)
from pagedattn.serve.logprobs import (
    Position,
    completion_logprobs,
    namer,
    prompt_logprobs,
)
from pagedattn.serve.problems import ApiError, as_api_error
from pagedattn.serve.prompts import completion_prompts
from pagedattn.serve.protocol import CompletionBody
from pagedattn.serve.wire import (
    DONE,
    EventStream,
    JsonAnswer,
    Opened,
    frame,
    gather_lasts,
    opened,
)

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(slots=True)
class _Choice:
    """What of one choice has been written already."""

    started: bool = False
    offset: int = 0


@dataclass(slots=True)
class _Writer:
    """Turns outputs into choices; the same for whole answers and for chunks."""

    front: Front
    body: CompletionBody
    prompts: list[Prompt]
    n: int
    tally: Tally = field(default_factory=Tally)
    choices: dict[int, _Choice] = field(default_factory=dict)
    prompt_lps: dict[int, list[Position]] = field(default_factory=dict)

    def write(self, i: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices that an output of prompt `i` changes."""
        self.tally.add(i, output, generated=not self.body.scoring)
        if output.prompt_logprobs is not None:
            self.prompt_lps[i] = output.prompt_logprobs
        return [self._choice(i, output, out) for out in output.outputs]

    def _choice(
        self, i: int, output: RequestOutput, out: CompletionOutput
    ) -> dict[str, Any]:
        failed_if_error(out.finish_reason)
        index = i * self.n + out.index
        state = self.choices.setdefault(index, _Choice())
        text, ids, lps = out.text, list(out.token_ids), list(out.logprobs or [])
        if self.body.scoring:  # the one token that had to be generated is dropped
            text, ids, lps = "", [], []
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        choice["finish_reason"] = self._finish(out)
        choice["stop_reason"] = None if self.body.scoring else out.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = ids
        if not state.started:
            self._open(choice, i, output, ids, lps)
            state.started = True
        if self.body.logprobs is not None:
            choice["logprobs"], state.offset = self._logprobs(ids, lps, state.offset)
        return choice

    def _finish(self, out: CompletionOutput) -> str | None:
        scored = self.body.scoring and out.finish_reason in ("stop", "length")
        return "length" if scored else out.finish_reason

    def _open(
        self,
        choice: dict[str, Any],
        i: int,
        output: RequestOutput,
        ids: list[int],
        lps: list[Position],
    ) -> None:
        """Add what only a choice's first part has: the prompt, in what was asked."""
        prompt_ids = list(output.prompt_token_ids)
        if self.body.return_token_ids:
            choice["prompt_token_ids"], choice["token_ids"] = prompt_ids, list(ids)
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self.prompt_lps.get(i), self.front.tokenizer
            )
        if self.body.echo:
            choice["text"] = self._echo(i, prompt_ids) + choice["text"]
            ids[:0] = prompt_ids
            lps[:0] = self.prompt_lps.get(i, [None] * len(prompt_ids))

    def _echo(self, i: int, ids: list[int]) -> str:
        """The prompt's text: as sent, or decoded if it came as ids or was cut."""
        text = self.prompts[i].text
        if text is not None and len(ids) == len(self.prompts[i].ids):
            return text
        skip = self.body.skip_special_tokens is not False
        return self.front.tokenizer.decode(ids, skip_special_tokens=skip)

    def _logprobs(
        self, ids: list[int], lps: list[Position], offset: int
    ) -> tuple[dict[str, Any], int]:
        name = namer(self.front.tokenizer, bool(self.body.return_tokens_as_token_ids))
        return completion_logprobs(ids, lps, self.body.logprobs or 0, name, offset)


def failed_if_error(finish_reason: str | None) -> None:
    """Raise the answer to a request that the engine gave up."""
    if finish_reason == "error":
        raise ApiError(500, "The engine failed while it worked on this request.")


def _sampling(
    front: Front, body: CompletionBody, kind: RequestOutputKind
) -> SamplingParams:
    values = sampling_values(front, body)
    values.pop("max_tokens", None)  # the model's; a completion's default is OpenAI's
    most = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.echo and body.logprobs is not None and "prompt_logprobs" not in values:
        values["prompt_logprobs"] = body.logprobs
    lps = None if body.scoring else body.logprobs
    if body.scoring:
        most, values["min_tokens"] = 1, 0
    return SamplingParams(**values, max_tokens=most, logprobs=lps, output_kind=kind)


async def create(front: Front, body: CompletionBody, request_id: str) -> Response:
    """Answer a completion request; ApiError or UserError if it can't be."""
    if not body.stream:
        return JsonAnswer(await whole(front, body, request_id))
    source = await chunks(front, body, request_id)
    return EventStream(frames(source), source)


# Whole answers and chunks, as dicts: other protocols are written on top of these two.
async def whole(front: Front, body: CompletionBody, request_id: str) -> dict[str, Any]:
    """The `text_completion` that answers; ApiError or UserError if there is none.

    Work is dropped if the caller is cancelled.
    """
    asked = await _ask(front, body, request_id, RequestOutputKind.FINAL_ONLY)
    try:
        outputs = await gather_lasts(asked.stream, len(asked.writer.prompts))
    finally:
        await asked.stream.aclose()
    return _whole(asked.call, asked.writer, outputs)


async def chunks(
    front: Front, body: CompletionBody, request_id: str
) -> Opened[dict[str, Any]]:
    """The chunks of the answer, an async iterator as they come.

    What is wrong from the start raises here, what fails later raises while iterating.
    The caller must iterate to the end or `aclose()`, which drops the work.
    """
    asked = await _ask(front, body, request_id, RequestOutputKind.DELTA)
    return await opened(_stream(asked), FIRST_WAIT)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request under way."""

    call: Call
    writer: _Writer
    stream: AsyncGenerator[tuple[int, RequestOutput], None]


async def _ask(
    front: Front, body: CompletionBody, request_id: str, kind: RequestOutputKind
) -> _Asked:
    call = front.open_call("cmpl", body, request_id)
    params = _sampling(front, body, kind)
    special = body.add_special_tokens is not False
    cut = body.truncate_prompt_tokens is not None
    prompts = await completion_prompts(front, body.prompt, params.n, special, cut)
    writer = _Writer(front, body, prompts, params.n)
    return _Asked(call, writer, front.generate(call, body, prompts, params))


def _whole(call: Call, writer: _Writer, outputs: list[RequestOutput]) -> dict[str, Any]:
    choices = [c for i, output in enumerate(outputs) for c in writer.write(i, output)]
    return {
        "id": call.id,
        "object": "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": sorted(choices, key=lambda choice: choice["index"]),
        "usage": writer.tally.usage(),
    }


async def frames(source: Opened[dict[str, Any]]) -> AsyncGenerator[bytes, None]:
    """A stream's events, of completions and chats alike; a failure is one of them."""
    try:
        async for chunk in source:
            yield frame(chunk)
    except Exception as problem:
        yield frame(as_api_error(problem).body())
    yield DONE


async def _stream(asked: _Asked) -> AsyncGenerator[dict[str, Any], None]:
    call, writer, body = asked.call, asked.writer, asked.writer.body
    head = {"id": call.id, "object": "text_completion", "created": call.created}
    head["model"] = call.model
    try:
        async for i, output in asked.stream:
            for choice in writer.write(i, output):
                if not says_nothing(choice, choice["text"], body.continuous_usage):
                    yield {**head, "choices": [choice], **writer.tally.in_chunk(body)}
        if body.include_usage:
            yield {**head, "choices": [], "usage": writer.tally.usage()}
    finally:
        await asked.stream.aclose()


def says_nothing(choice: dict[str, Any], text: str | bool, counted: bool) -> bool:
    """Whether a chunk would tell the client nothing: its text is held back."""
    return not (
        text
        or counted
        or choice["finish_reason"]
        or choice["logprobs"]
        or choice.get("token_ids")
        or "prompt_token_ids" in choice
    )
