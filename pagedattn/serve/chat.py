"""`/v1/chat/completions`: messages in, a message out, whole or as a stream.

Knows the shape of OpenAI's chat objects; `prompts` makes the prompt. Knows nothing of
sockets or schedulers.
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
from pagedattn.serve.completions import failed_if_error, frames, says_nothing
from pagedattn.serve.front import (
    FIRST_WAIT,
    Call,
    Front,
    Prompt,
    Tally,
    sampling_values,
)
from pagedattn.serve.logprobs import chat_logprobs, namer, prompt_logprobs
from pagedattn.serve.problems import ApiError
from pagedattn.serve.prompts import chat_prompt, last_text
from pagedattn.serve.protocol import ChatBody
from pagedattn.serve.reading import Reading, Reply, check_choice, reading_for
from pagedattn.serve.tool_schemas import forced_schema
from pagedattn.serve.wire import (
    EventStream,
    JsonAnswer,
    Opened,
    gather_lasts,
    opened,
)


@dataclass(slots=True)
class _Writer:
    """Turns outputs into choices, whole or as deltas; counts what was used."""

    front: Front
    body: ChatBody
    prompt: Prompt
    role: str
    reading: Reading | None = None
    tally: Tally = field(default_factory=Tally)
    started: set[int] = field(default_factory=set)
    replies: dict[int, Reply] = field(default_factory=dict)

    def reply(self, out: CompletionOutput) -> tuple[dict[str, Any], str | None]:
        """What new text adds to a choice that is read, and its finish reason."""
        assert self.reading is not None
        reply = self.replies.setdefault(out.index, Reply(self.reading))
        delta = reply.add(out.text, list(out.token_ids), out.finish_reason is not None)
        if self.reading.thinks is not None:
            self.tally.reasoning = self._thought(out)
        return self.thoughts(delta), self.reading.finish(out.finish_reason, reply.said)

    def thoughts(self, said: dict[str, Any]) -> dict[str, Any]:
        """A delta or message with its reasoning left out, if the request wants none,
        or under both names: vLLM's, and DeepSeek's, the only one many clients read."""
        if "reasoning" in said:
            said["reasoning_content"] = said["reasoning"]
        if self.body.include_reasoning is not False:
            return said
        return {k: v for k, v in said.items() if not k.startswith("reasoning")}

    def _thought(self, out: CompletionOutput) -> int | None:
        """Tokens of reasoning, counted where somebody will see them."""
        if out.finish_reason is None and not self.body.continuous_usage:
            return self.tally.reasoning
        tokenizer = self.front.tokenizer
        return sum(reply.thought(tokenizer) for reply in self.replies.values())

    def choice(self, out: CompletionOutput) -> dict[str, Any]:
        """Everything of a choice but its text."""
        failed_if_error(out.finish_reason)
        choice: dict[str, Any] = {"index": out.index, "logprobs": self._logprobs(out)}
        choice["finish_reason"] = out.finish_reason
        choice["stop_reason"] = out.stop_reason
        if self.body.return_token_ids:
            choice["token_ids"] = list(out.token_ids)
        return choice

    def _logprobs(self, out: CompletionOutput) -> dict[str, Any] | None:
        if not self.body.logprobs or not out.token_ids:
            return None
        tokenizer = self.front.tokenizer
        name = namer(tokenizer, bool(self.body.return_tokens_as_token_ids))
        positions = out.logprobs or []
        top = self.body.top_logprobs or 0
        return chat_logprobs(out.token_ids, positions, top, name, tokenizer)

    @property
    def echoed(self) -> str:
        """The text that answers begin with: with `echo`, the message they continue."""
        return last_text(self.body.messages, self.role) if self.body.echo else ""

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """What the answer tells of its prompt, if it was asked."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(output.prompt_token_ids)
        if self.body.return_prompt_text:
            fields["prompt_text"] = self.prompt.text
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                output.prompt_logprobs, self.front.tokenizer
            )
        return fields


def _sampling(front: Front, body: ChatBody, kind: RequestOutputKind) -> SamplingParams:
    values = sampling_values(front, body)
    default = values.pop("max_tokens", None)
    asked = body.max_completion_tokens
    if asked is None:
        asked = body.max_tokens
    return SamplingParams(
        **values,
        max_tokens=default if asked is None else asked,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        output_kind=kind,
    )


async def create(front: Front, body: ChatBody, request_id: str) -> Response:
    """Answer a chat request; ApiError or UserError if it can't be."""
    if not body.stream:
        return JsonAnswer(await whole(front, body, request_id))
    source = await chunks(front, body, request_id)
    return EventStream(frames(source), source)


# Whole answers and chunks, as dicts: other protocols are written on top of these two.
async def whole(front: Front, body: ChatBody, request_id: str) -> dict[str, Any]:
    """The `chat.completion` that answers; ApiError or UserError if there is none.

    Work is dropped if the caller is cancelled.
    """
    asked = await _ask(front, body, request_id, RequestOutputKind.FINAL_ONLY)
    try:
        (output,) = await gather_lasts(asked.stream, 1)
    finally:
        await asked.stream.aclose()
    return _whole(asked.call, asked.writer, output)


async def chunks(
    front: Front, body: ChatBody, request_id: str
) -> Opened[dict[str, Any]]:
    """The `chat.completion.chunk`s of the answer, an async iterator as they come.

    What is wrong from the start raises here, what fails later raises while iterating.
    The caller must iterate to the end or `aclose()`, which drops the work.
    """
    asked = await _ask(front, body, request_id, RequestOutputKind.DELTA)
    return await opened(_stream(asked), FIRST_WAIT)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request on its way: who it is, who writes its answer, what comes."""

    call: Call
    writer: _Writer
    stream: AsyncGenerator[tuple[int, RequestOutput], None]


async def _ask(
    front: Front, body: ChatBody, request_id: str, kind: RequestOutputKind
) -> _Asked:
    call = front.open_call("chatcmpl", body, request_id)
    params = _sampling(front, body, kind)
    check_choice(front, body)
    forced = forced_schema(body)
    if forced is not None and params.structured_outputs is not None:
        field = "response_format or structured_outputs"
        raise ApiError(400, f"tool_choice can't demand calls with {field}.", "tools")
    params.structured_outputs = forced or params.structured_outputs
    prompt = await chat_prompt(front, body)
    reading = reading_for(front, body, prompt, params.structured_outputs is None)
    if reading is not None and reading.needs_specials(front.tokenizer):
        params.skip_special_tokens = False
    writer = _Writer(front, body, prompt, front.settings.response_role, reading)
    return _Asked(call, writer, front.generate(call, body, [prompt], params))


# The whole answer.
def _whole(call: Call, writer: _Writer, output: RequestOutput) -> dict[str, Any]:
    writer.tally.add(0, output)
    outputs = sorted(output.outputs, key=lambda out: out.index)
    choices = [_message(writer, out) for out in outputs]
    return {
        "id": call.id,
        "object": "chat.completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
        "usage": writer.tally.usage(),
        **writer.prompt_fields(output),
    }


def _message(writer: _Writer, out: CompletionOutput) -> dict[str, Any]:
    message = {"role": writer.role, "content": out.text, "refusal": None}
    choice = writer.choice(out)
    if writer.reading is not None:
        _, choice["finish_reason"] = writer.reply(out)
        message |= writer.thoughts(writer.replies[out.index].message())
    if writer.echoed:
        message["content"] = writer.echoed + (message["content"] or "")
    return {**choice, "message": message}


# The stream.
async def _stream(asked: _Asked) -> AsyncGenerator[dict[str, Any], None]:
    call, writer = asked.call, asked.writer
    head = {"id": call.id, "object": "chat.completion.chunk", "created": call.created}
    head["model"] = call.model
    try:
        async for _, output in asked.stream:
            for chunk in _chunks(writer, output):
                yield {**head, **chunk}
        if writer.body.include_usage:
            yield {**head, "choices": [], "usage": writer.tally.usage()}
    finally:
        await asked.stream.aclose()


def _chunks(writer: _Writer, output: RequestOutput) -> list[dict[str, Any]]:
    """What one output adds to the stream: a choice's first chunk names the role."""
    chunks = []
    writer.tally.add(0, output, generated=False)
    for out in output.outputs:
        if out.index not in writer.started:
            chunks.append(_first(writer, output, out.index))
            writer.started.add(out.index)
    writer.tally.add(0, output)
    for out in output.outputs:
        choice, delta = writer.choice(out), {"content": out.text}
        if writer.reading is not None:
            delta, choice["finish_reason"] = writer.reply(out)
        if not says_nothing(choice, any(delta.values()), writer.body.continuous_usage):
            choice["delta"] = delta
            chunks.append({"choices": [choice], **writer.tally.in_chunk(writer.body)})
    return chunks


def _first(writer: _Writer, output: RequestOutput, index: int) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
    choice["delta"] = {"role": writer.role, "content": writer.echoed}
    fields = {} if writer.started else writer.prompt_fields(output)
    return {"choices": [choice], **writer.tally.in_chunk(writer.body), **fields}
