"""The application: which path does what.

Knows routes and hands their bodies to `completions`, `chat` and `prompts`; sets no
signal handlers and starts nothing, so any ASGI server can run it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from pagedattn.serve import chat, completions, dev, page
from pagedattn.serve.front import Front, ServedEngine, front_for
from pagedattn.serve.gate import REQUEST_ID, Gate
from pagedattn.serve.messages import answer as messages
from pagedattn.serve.messages.body import CountBody, MessagesBody
from pagedattn.serve.ollama import answer as ollama
from pagedattn.serve.pooling import embeddings, scoring
from pagedattn.serve.pooling.bodies import (
    EmbeddingBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from pagedattn.serve.problems import ApiError, as_api_error, body_for
from pagedattn.serve.prompts import chat_prompt, plain_ids
from pagedattn.serve.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    parse,
    read_body,
)
from pagedattn.serve.responses import answer as responses
from pagedattn.serve.responses.body import ResponsesBody
from pagedattn.serve.settings import ServeArgs
from pagedattn.serve.wire import JsonAnswer, until_gone
from pagedattn.version import __version__

CLIENT_GONE = 499  # nobody reads it; nginx's number, for the access log

router = APIRouter()
Create = Callable[[Front, Any, str], Awaitable[Response]]


def build_app(engine: ServedEngine, settings: ServeArgs | None = None) -> FastAPI:
    """The application in front of `engine`; UserError for settings that can't be."""
    settings = settings or ServeArgs()
    docs = {} if not settings.disable_fastapi_docs else {"openapi_url": None}
    app = FastAPI(
        title="pagedattn", version=__version__, root_path=settings.root_path, **docs
    )
    app.state.front = front_for(engine, settings)
    app.include_router(router)
    app.include_router(ollama.router)
    app.include_router(page.router)
    if settings.dev_mode() and hasattr(engine, "pause"):  # encoders have no such
        app.include_router(dev.router)
    app.add_exception_handler(HTTPException, _http_problem)
    # The last added is outermost: refusals carry CORS headers, preflights need no key.
    app.add_middleware(Gate, front=app.state.front, keys=settings.keys())
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
        expose_headers=[REQUEST_ID],
    )
    return app


async def _http_problem(http: Request, problem: Exception) -> Response:
    error = as_api_error(problem)
    headers = getattr(problem, "headers", None)
    return JsonAnswer(body_for(http.url.path, error), error.status, headers)


def _front(http: Request) -> Front:
    return http.app.state.front


def _reads(model: type[Any]) -> dict[str, Any]:
    """The body's schema for the API's own documentation."""
    schema = model.model_json_schema(mode="validation")
    schema = _inline(schema, schema.get("$defs", {}))
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


def _inline(node: Any, defs: dict[str, Any]) -> Any:
    """`node` with every reference to `defs` replaced by what it names, since the
    documentation has no place for definitions of its own."""
    if isinstance(node, list):
        return [_inline(value, defs) for value in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(defs[node["$ref"].rsplit("/", 1)[1]], defs)
    return {k: _inline(v, defs) for k, v in node.items() if k != "$defs"}


async def _read(http: Request, model: type[Any]) -> Any:
    limit = _front(http).settings.max_body_bytes
    return parse(model, await read_body(http, limit))


async def _generate(http: Request, model: type[Any], create: Create) -> Response:
    """Read the body and answer it; the work is dropped if the client leaves."""
    body = await _read(http, model)
    given = http.headers.get(REQUEST_ID) or body.request_id
    work = create(_front(http), body, given or http.state.request_id)
    answer = await until_gone(http.receive, work)
    return answer or Response(status_code=CLIENT_GONE)


# Generation.
@router.post("/v1/completions", openapi_extra=_reads(CompletionBody))
async def create_completion(http: Request) -> Response:
    """Continue prompts."""
    return await _generate(http, CompletionBody, completions.create)


@router.post("/v1/chat/completions", openapi_extra=_reads(ChatBody))
async def create_chat_completion(http: Request) -> Response:
    """Answer a conversation."""
    return await _generate(http, ChatBody, chat.create)


# OpenAI's responses, and what is kept of them.
@router.post("/v1/responses", openapi_extra=_reads(ResponsesBody))
async def create_response(http: Request) -> Response:
    """Answer input items; the answer is kept for what follows."""
    return await _generate(http, ResponsesBody, responses.create)


@router.get("/v1/responses/{response_id}")
async def retrieve_response(http: Request, response_id: str) -> Response:
    """A response that was kept, as it stands, or the events of one that streams."""
    query = http.query_params
    after = query.get("starting_after")
    if after is not None and not (after.isascii() and after.isdigit()):
        raise ApiError(400, "starting_after must be a number.", "starting_after")
    return await responses.retrieve(
        _front(http),
        response_id,
        query.get("stream", "").lower() in ("true", "1"),
        None if after is None else int(after[:18]),
    )


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(http: Request, response_id: str) -> Response:
    """What a response was asked."""
    return await responses.input_items_of(_front(http), response_id)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(http: Request, response_id: str) -> Response:
    """Stop a response that is written in the background."""
    return await responses.cancel(_front(http), response_id)


@router.delete("/v1/responses/{response_id}")
async def delete_response(http: Request, response_id: str) -> Response:
    """Forget a response."""
    return await responses.delete(_front(http), response_id)


# Anthropic's messages.
@router.post("/v1/messages", openapi_extra=_reads(MessagesBody))
async def create_message(http: Request) -> Response:
    """Answer a conversation, in Anthropic's words."""
    return await _generate(http, MessagesBody, messages.create)


@router.post("/v1/messages/count_tokens", openapi_extra=_reads(CountBody))
async def count_message_tokens(http: Request) -> Response:
    """How many tokens a message would be served as."""
    body = await _read(http, CountBody)
    return await messages.count_tokens(_front(http), body)


# Embeddings, and how near texts are.
@router.post("/v1/embeddings", openapi_extra=_reads(EmbeddingBody))
async def create_embedding(http: Request) -> Response:
    """Vectors of texts."""
    return await _generate(http, EmbeddingBody, embeddings.create)


@router.post("/pooling", openapi_extra=_reads(PoolingBody))
async def pooling(http: Request) -> Response:
    """Vectors of texts, in vLLM's form."""
    return await _generate(http, PoolingBody, embeddings.pool)


@router.post("/score", openapi_extra=_reads(ScoreBody))
@router.post("/v1/score", openapi_extra=_reads(ScoreBody))
async def score(http: Request) -> Response:
    """How near the two texts of each pair are."""
    return await _generate(http, ScoreBody, scoring.score)


@router.post("/rerank", openapi_extra=_reads(RerankBody))
@router.post("/v1/rerank", openapi_extra=_reads(RerankBody))
@router.post("/v2/rerank", openapi_extra=_reads(RerankBody))
async def rerank(http: Request) -> Response:
    """Documents in the order of their nearness to a query."""
    return await _generate(http, RerankBody, scoring.rerank)


@router.post("/classify", openapi_extra=_reads(PoolBody))
async def classify(http: Request) -> Response:
    """Refused: no classifier is built."""
    return await _generate(http, PoolBody, scoring.classify)


# Models.
def _card(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.started,
        "owned_by": "pagedattn",
        "root": front.engine.args.model or front.engine.model_name,
        "parent": None,
        "max_model_len": front.engine.config.max_model_len,
        "permission": [],
    }


@router.get("/v1/models")
async def list_models(http: Request) -> Response:
    """One card for each name under which the model is served."""
    front = _front(http)
    cards = [_card(front, name) for name in front.names]
    return JsonAnswer({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def retrieve_model(http: Request, name: str) -> Response:
    """The card of one name."""
    front = _front(http)
    return JsonAnswer(_card(front, front.model(name)))


# Tokens.
@router.post("/tokenize", openapi_extra=_reads(TokenizeBody))
async def tokenize(http: Request) -> Response:
    """The ids that a prompt, or messages, would be served as."""
    body = await _read(http, TokenizeBody)
    front = _front(http)
    front.model(body.model)
    if body.messages is not None:
        ids = (await chat_prompt(front, body)).ids
    else:
        special = body.add_special_tokens is not False
        ids = await plain_ids(front, body.prompt, special)
    token = front.tokenizer.token
    return JsonAnswer(
        {
            "count": len(ids),
            "max_model_len": front.engine.config.max_model_len,
            "tokens": ids,
            "token_strs": [token(i) for i in ids] if body.return_token_strs else None,
        }
    )


@router.post("/detokenize", openapi_extra=_reads(DetokenizeBody))
async def detokenize(http: Request) -> Response:
    """The text of token ids, special tokens included."""
    body = await _read(http, DetokenizeBody)
    front = _front(http)
    front.model(body.model)
    text = front.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return JsonAnswer({"prompt": text})


# Operation.
@router.get("/health")
async def health(http: Request) -> Response:
    """200 while requests can be served, 503 once the engine or the server ends."""
    front = _front(http)
    well = front.engine.is_running and not front.draining
    return Response(status_code=200 if well else 503)


@router.get("/ping")
@router.post("/ping")
async def ping(http: Request) -> Response:
    """The same as `/health`."""
    return await health(http)


@router.get("/version")
async def version() -> Response:
    """This package's version."""
    return JsonAnswer({"version": __version__})


@router.get("/load")
async def load(http: Request) -> Response:
    """How many posted requests are being worked on."""
    return JsonAnswer({"server_load": _front(http).in_flight})


@router.get("/metrics")
async def metrics(http: Request) -> Response:
    """Prometheus' text exposition."""
    content = _front(http).engine.metrics.render()
    return Response(content, media_type=CONTENT_TYPE_LATEST)
