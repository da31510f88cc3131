"""`/v1/responses`: create, fetch, follow, cancel and forget.

Knows which answers wait for their client and which go on in the background; fields,
items, events and the store are its neighbours'. An answer is a chat's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response

from pagedattn.serve import chat
from pagedattn.serve.front import Front
from pagedattn.serve.problems import ApiError, as_api_error
from pagedattn.serve.responses.body import NAMES, ResponsesBody, chat_for
from pagedattn.serve.responses.events import Answer, Event
from pagedattn.serve.responses.input import input_items, to_messages
from pagedattn.serve.responses.store import Job, Kept
from pagedattn.serve.to_chat import as_chunk, new_id, speaking, streamed
from pagedattn.serve.wire import EventStream, JsonAnswer, Opened, event_frame


async def create(front: Front, body: ResponsesBody, request_id: str) -> Response:
    """Answer, or begin to; ApiError or UserError if it can't be."""
    kept = _begin(front, body)
    asked = chat_for(body, to_messages(kept.items, body.instructions))
    answer = Answer(kept.response)
    with speaking(NAMES):
        if not (body.background or body.stream or body.wants_logprobs):
            chunk = as_chunk(await chat.whole(front, asked, request_id))
            answer.feed(chunk)
            answer.finish()
            return _told(front, body, kept)
        source = await chat.chunks(front, streamed(asked), request_id)
    if body.background:
        return await _background(front, body, kept, source)
    if body.stream:
        return EventStream(_frames(front, body, kept, answer, source), source)
    try:
        await _last(_events(answer, source))
    finally:
        await source.aclose()
    return _told(front, body, kept)


def _begin(front: Front, body: ResponsesBody) -> Kept:
    """The response as it begins, after the conversation that it goes on with."""
    items = input_items(body.input)
    if body.previous_response_id is not None:
        before = front.responses.get(body.previous_response_id)
        if before.running:
            raise ApiError(
                400, "previous_response_id is still running.", "previous_response_id"
            )
        items = [*before.items, *before.response["output"], *items]
    return Kept(_response(front, body), items)


def _response(front: Front, body: ResponsesBody) -> dict[str, Any]:
    """The object before anything is said; it repeats what was asked."""
    defaults = front.engine.default_sampling()
    text = body.text.model_dump(exclude_none=True) if body.text else {}
    effort = body.reasoning and body.reasoning.effort
    chosen = {
        name: defaults.get(name, 1.0) if value is None else value
        for name, value in (("temperature", body.temperature), ("top_p", body.top_p))
    }
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": front.model(body.model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.kept,
        **chosen,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _told(front: Front, body: ResponsesBody, kept: Kept) -> JsonAnswer:
    """The finished response; 500 if it failed."""
    if kept.response["status"] == "failed":
        raise ApiError(503, kept.response["error"]["message"])
    _keep(front, body, kept)
    return JsonAnswer(kept.response)


def _keep(front: Front, body: ResponsesBody, kept: Kept) -> None:
    if body.kept:
        front.responses.put(kept)


# Streams.
async def _events(
    answer: Answer, source: Opened[dict[str, Any]]
) -> AsyncGenerator[list[Event], None]:
    """Every event of an answer, as they come; whatever goes wrong is the last."""
    yield answer.start()
    try:
        async for chunk in source:
            events = answer.feed(chunk)
            if events:
                yield events
    except Exception as problem:
        yield answer.fail(as_api_error(problem))
        return
    yield answer.finish()


async def _last(stream: AsyncGenerator[list[Event], None]) -> None:
    async for _ in stream:
        pass


async def _frames(
    front: Front,
    body: ResponsesBody,
    kept: Kept,
    answer: Answer,
    source: Opened[dict[str, Any]],
) -> AsyncGenerator[bytes, None]:
    async for events in _events(answer, source):
        if kept.response["status"] != "in_progress":
            _keep(front, body, kept)  # before anybody hears that it is there
        for event in events:
            yield event_frame(event)


# In the background: a job that outlives its client.
async def _background(
    front: Front, body: ResponsesBody, kept: Kept, source: Opened[dict[str, Any]]
) -> Response:
    """Start the job and answer at once, or follow it if a stream was asked for."""
    job = kept.job = Job(bool(body.stream))
    try:
        front.responses.put(kept)
    except BaseException:
        await source.aclose()
        raise
    answer = Answer(kept.response)
    job.task = asyncio.create_task(_run(front, kept, answer, job, source))
    return _followed(job, 0) if body.stream else JsonAnswer(answer.snapshot())


async def _run(
    front: Front,
    kept: Kept,
    answer: Answer,
    job: Job,
    source: Opened[dict[str, Any]],
) -> None:
    """Write an answer to its end; it counts as work that is under way."""
    front.in_flight += 1
    try:
        async for events in _events(answer, source):
            job.add(events)
    except asyncio.CancelledError:
        answer.cancel()
    finally:
        front.in_flight -= 1
        job.add([], ended=True)
        await source.aclose()
    if front.responses.holds(kept):
        front.responses.put(kept)


def _followed(job: Job, start: int) -> EventStream:
    frames = _job_frames(job, start)
    return EventStream(frames, frames)


async def _job_frames(job: Job, start: int) -> AsyncGenerator[bytes, None]:
    async for event in job.follow(start):
        yield event_frame(event)


# What was kept.
async def retrieve(
    front: Front, response_id: str, stream: bool, starting_after: int | None
) -> Response:
    """The response as it stands, or its events after number `starting_after`."""
    kept = front.responses.get(response_id)
    if not stream:
        return JsonAnswer(kept.response)
    if kept.job is None or not kept.job.streamed:
        raise ApiError(
            400, "stream needs background=true and stream=true at creation.", "stream"
        )
    return _followed(kept.job, 0 if starting_after is None else starting_after + 1)


async def cancel(front: Front, response_id: str) -> Response:
    """Stop a job; one that has ended stays as it is."""
    kept = front.responses.get(response_id)
    if kept.job is None:
        raise ApiError(400, "Only background responses can be cancelled.")
    await _stop(kept)
    return JsonAnswer(kept.response)


async def delete(front: Front, response_id: str) -> Response:
    """Forget a response, and stop its job."""
    kept = front.responses.get(response_id)
    front.responses.drop(response_id)
    await _stop(kept)
    return JsonAnswer({"id": response_id, "object": "response", "deleted": True})


async def input_items_of(front: Front, response_id: str) -> Response:
    """What a response was asked, the conversation before it included."""
    items = front.responses.get(response_id).items
    ids = [item.get("id") for item in items]
    return JsonAnswer(
        {
            "object": "list",
            "data": items,
            "first_id": ids[0],
            "last_id": ids[-1],
            "has_more": False,
        }
    )


async def _stop(kept: Kept) -> None:
    if kept.running:
        kept.job.task.cancel()
        await asyncio.gather(kept.job.task, return_exceptions=True)
