"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's protocol over chats.

Knows when to send what; fields, blocks and events are its neighbours'. An answer is a
chat's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from pagedattn.serve import chat
from pagedattn.serve.front import Front
from pagedattn.serve.messages.body import (
    NAMES,
    CountBody,
    MessagesBody,
    chat_for,
    chat_to_count,
)
from pagedattn.serve.messages.events import Answer
from pagedattn.serve.problems import anthropic_body, as_api_error
from pagedattn.serve.prompts import chat_prompt
from pagedattn.serve.to_chat import as_chunk, speaking, streamed
from pagedattn.serve.wire import EventStream, JsonAnswer, Opened, event_frame


async def create(front: Front, body: MessagesBody, request_id: str) -> Response:
    """Answer a conversation; ApiError or UserError if it can't be."""
    asked = chat_for(body)
    answer = Answer(front.model(body.model))
    with speaking(NAMES):
        if body.stream:
            source = await chat.chunks(front, streamed(asked, every=True), request_id)
            return EventStream(_frames(answer, source), source)
        chunk = as_chunk(await chat.whole(front, asked, request_id))
    answer.feed(chunk)
    answer.finish()
    return JsonAnswer(answer.message)


async def _frames(
    answer: Answer, source: Opened[dict[str, Any]]
) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in source:
            for event in answer.feed(chunk):
                yield event_frame(event)
        for event in answer.finish():
            yield event_frame(event)
    except Exception as problem:
        yield event_frame(anthropic_body(as_api_error(problem)))


async def count_tokens(front: Front, body: CountBody) -> Response:
    """The number of tokens of the prompt that `create` would make of it."""
    asked = chat_to_count(body)
    front.model(body.model)
    with speaking(NAMES):
        prompt = await chat_prompt(front, asked)
    return JsonAnswer({"input_tokens": len(prompt.ids)})
