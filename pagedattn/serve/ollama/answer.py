"""Ollama's API, for tools that speak nothing else: its routes, written on top of ours.

Knows Ollama's shapes and its newline-delimited JSON; bodies become chat and completion
bodies, chunks of chats become lines. Knows nothing of engines.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pagedattn.serve import chat, completions
from pagedattn.serve.front import Front
from pagedattn.serve.ollama.bodies import (
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaGenerate,
    OllamaShow,
)
from pagedattn.serve.pooling import embeddings
from pagedattn.serve.pooling.bodies import EmbeddingBody
from pagedattn.serve.problems import ApiError, as_api_error
from pagedattn.serve.protocol import ChatBody, CompletionBody, parse, read_body
from pagedattn.serve.wire import JsonAnswer, Opened, dumps, until_gone

VERSION = "0.12.0"  # of Ollama, whose API this is; clients ask for a least one
LATEST = ":latest"
FOREVER = "2318-12-31T00:00:00Z"  # what stays loaded; Ollama's own far future

router = APIRouter()


# What all routes share: their errors are {"error": text}, names may end in :latest.
async def _answer(
    http: Request,
    model: type[Any],
    work: Callable[[Front, Any, str], Awaitable[Response]],
) -> Response:
    front: Front = http.app.state.front
    try:
        body = parse(model, await read_body(http, front.settings.max_body_bytes))
        body.model = served_name(front, body.model)
        call = work(front, body, http.state.request_id)
        return await until_gone(http.receive, call) or Response(status_code=499)
    except ClientDisconnect:  # in the middle of its body; nobody reads an answer
        raise
    except Exception as problem:
        error = as_api_error(problem)
        return JsonAnswer({"error": error.message}, error.status)


def served_name(front: Front, asked: str) -> str:
    """The name here of a model as Ollama's clients write it; 404 if there is none."""
    for name in (asked, asked.removesuffix(LATEST)):
        if name in front.names:
            return name
    raise ApiError(404, f"model '{asked[:200]}' not found", "model")


def tagged(name: str) -> str:
    """A served name as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def _as(model: type[Any], values: dict[str, Any]) -> Any:
    """A body of ours, checked like one that came over the wire."""
    return parse(model, json.dumps(values).encode())


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# An answer: what came so far, and the figures at its end.
@dataclass(slots=True)
class _Told:
    """One answer being told; `chat` or not decides where its text stands."""

    model: str
    chat: bool
    started: int = field(default_factory=time.perf_counter_ns)
    first: int | None = None
    reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any]) -> dict[str, str]:
        """The text and thoughts that a chunk adds; all else is remembered."""
        self.usage = chunk.get("usage") or self.usage
        if not chunk["choices"]:
            return {}
        self.first = self.first or time.perf_counter_ns()
        choice = chunk["choices"][0]
        self.reason = choice["finish_reason"] or self.reason
        delta = choice.get("delta", {"content": choice.get("text")})
        for part in delta.get("tool_calls") or ():
            self._call(part)
        pieces = {"content": delta.get("content"), "thinking": delta.get("reasoning")}
        return {name: text for name, text in pieces.items() if text}

    def _call(self, part: dict[str, Any]) -> None:
        call = self.calls.setdefault(part["index"], {"name": "", "arguments": ""})
        for name, text in part["function"].items():
            call[name] = call.get(name, "") + (text or "")

    def line(self, pieces: dict[str, str], **more: Any) -> dict[str, Any]:
        """One line of the answer."""
        head = {"model": self.model, "created_at": _now()}
        text = {k: v for k, v in pieces.items() if k == "thinking"}
        content = pieces.get("content", "")
        if self.chat:
            calls = {"tool_calls": more.pop("calls")} if more.get("calls") else {}
            more.pop("calls", None)
            message = {"role": "assistant", "content": content, **text, **calls}
            return {**head, "message": message, "done": False, **more}
        more.pop("calls", None)
        return {**head, "response": content, **text, "done": False, **more}

    def last(self, pieces: dict[str, str]) -> dict[str, Any]:
        """The line that ends it, with its figures; times in nanoseconds."""
        end = time.perf_counter_ns()
        first = self.first or end
        return self.line(
            pieces,
            calls=self._calls(),
            done=True,
            done_reason="length" if self.reason == "length" else "stop",
            total_duration=end - self.started,
            load_duration=0,
            prompt_eval_count=self.usage.get("prompt_tokens", 0),
            prompt_eval_duration=first - self.started,
            eval_count=self.usage.get("completion_tokens", 0),
            eval_duration=end - first,
        )

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {"function": {"name": c["name"], "arguments": _arguments(c["arguments"])}}
            for _, c in sorted(self.calls.items())
        ]


def _arguments(text: str) -> Any:
    """Arguments as an object; as text where the model was cut off within them."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


async def _lines(
    told: _Told, source: Opened[dict[str, Any]]
) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in source:
            if pieces := told.take(chunk):
                yield dumps(told.line(pieces)) + b"\n"
        yield dumps(told.last({})) + b"\n"
    except Exception as problem:
        yield dumps({"error": as_api_error(problem).message}) + b"\n"


class _LineStream(StreamingResponse):
    """Lines made from `source`; both are closed if the client leaves."""

    def __init__(self, told: _Told, source: Opened[dict[str, Any]]) -> None:
        self._lines, self._source = _lines(told, source), source
        super().__init__(self._lines, media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self.stream_response(send))
        finally:
            await self._lines.aclose()
            await self._source.aclose()


async def _told(
    told: _Told, source: Opened[dict[str, Any]], stream: bool | None
) -> Response:
    """The answer line by line, which is Ollama's default, or as one object."""
    if stream is not False:
        return _LineStream(told, source)
    whole: dict[str, str] = {}
    try:
        async for chunk in source:
            for name, text in told.take(chunk).items():
                whole[name] = whole.get(name, "") + text
    finally:
        await source.aclose()
    return JsonAnswer(told.last(whole))


def _loaded(told: _Told, body: OllamaBody) -> Response:
    """The answer to a request without a prompt, by which clients load and unload."""
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    return JsonAnswer(told.line({}, done=True, done_reason=reason))


_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@router.post("/api/chat")
async def api_chat(http: Request) -> Response:
    """Answer a conversation."""
    return await _answer(http, OllamaChat, _chat)


async def _chat(front: Front, body: OllamaChat, request_id: str) -> Response:
    told = _Told(tagged(body.model), chat=True)
    if not body.messages:
        return _loaded(told, body)
    asked = _as(ChatBody, {**body.chat(), **_STREAMED, "model": body.model})
    source = await chat.chunks(front, asked, request_id)
    return await _told(told, source, body.stream)


@router.post("/api/generate")
async def api_generate(http: Request) -> Response:
    """Answer a prompt: through the chat template, or raw."""
    return await _answer(http, OllamaGenerate, _generate)


async def _generate(front: Front, body: OllamaGenerate, request_id: str) -> Response:
    told = _Told(tagged(body.model), chat=False)
    if not body.prompt:
        return _loaded(told, body)
    given = {**_STREAMED, "model": body.model}
    if body.raw:
        values = body.completion(front.engine.config.max_model_len)
        asked = _as(CompletionBody, {**values, **given})
        source = await completions.chunks(front, asked, request_id)
    else:
        asked = _as(ChatBody, {**body.chat(), **given})
        source = await chat.chunks(front, asked, request_id)
    return await _told(told, source, body.stream)


@router.post("/api/embed")
async def api_embed(http: Request) -> Response:
    """Vectors of texts."""
    return await _answer(http, OllamaEmbed, _embed)


@router.post("/api/embeddings")
async def api_embeddings(http: Request) -> Response:
    """The vector of one text, in the older form."""
    return await _answer(http, OllamaEmbed, _embed_one)


async def _embed(front: Front, body: OllamaEmbed, request_id: str) -> Response:
    started = time.perf_counter_ns()
    asked = _as(EmbeddingBody, {**body.embedding(), "model": body.model})
    made = await embeddings.whole(front, asked, request_id)
    answer = {
        "model": tagged(body.model),
        "embeddings": [item["embedding"] for item in made["data"]],
        "total_duration": time.perf_counter_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": made["usage"]["prompt_tokens"],
    }
    return JsonAnswer(answer)


async def _embed_one(front: Front, body: OllamaEmbed, request_id: str) -> Response:
    asked = _as(EmbeddingBody, {**body.embedding(), "model": body.model})
    made = await embeddings.whole(front, asked, request_id)
    return JsonAnswer({"embedding": made["data"][0]["embedding"]})


# Models.
def _details(front: Front) -> dict[str, Any]:
    family = _family(front)
    return {
        "parent_model": "",
        "format": "pagedattn",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "F32",
    }


def _family(front: Front) -> str:
    """The architecture's name as Ollama writes them: llama, qwen3, bert."""
    name = front.engine.facts.get("architecture", "unknown")
    for ending in ("ForCausalLM", "Model"):
        name = name.removesuffix(ending)
    return name.lower()


def _cards(front: Front) -> list[dict[str, Any]]:
    since = datetime.fromtimestamp(front.started, UTC).isoformat()
    return [
        {
            "name": tagged(name),
            "model": tagged(name),
            "modified_at": since.replace("+00:00", "Z"),
            "size": 0,
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "details": _details(front),
        }
        for name in front.names
    ]


@router.get("/api/tags")
async def api_tags(http: Request) -> Response:
    """The names under which the model is served."""
    return JsonAnswer({"models": _cards(http.app.state.front)})


@router.get("/api/ps")
async def api_ps(http: Request) -> Response:
    """The same: what is served is loaded, and stays."""
    front: Front = http.app.state.front
    length = front.engine.config.max_model_len
    more = {"expires_at": FOREVER, "size_vram": 0, "context_length": length}
    return JsonAnswer({"models": [{**card, **more} for card in _cards(front)]})


@router.post("/api/show")
async def api_show(http: Request) -> Response:
    """What is known of the model."""
    return await _answer(http, OllamaShow, _show)


async def _show(front: Front, body: OllamaShow, request_id: str) -> Response:
    family = _family(front)
    template = (front.template.source if front.template else None) or ""
    able = [("completion", front.engine.generates)]
    able.append(("tools", front.engine.generates and "tools" in template))
    able.append(("embedding", front.engine.pooling is not None))
    return JsonAnswer(
        {
            "modelfile": "",
            "parameters": "",
            "template": template,
            "details": _details(front),
            "model_info": {
                "general.architecture": family,
                f"{family}.context_length": front.engine.config.max_model_len,
                f"{family}.embedding_length": front.engine.hidden_size,
            },
            "capabilities": [name for name, can in able if can],
            "modified_at": _now(),
        }
    )


@router.get("/api/version")
async def api_version() -> Response:
    """The version of Ollama whose API this is."""
    return JsonAnswer({"version": VERSION})


@router.head("/")
async def ping() -> Response:
    """200: by this Ollama's command line sees whether a server is there."""
    return Response()
