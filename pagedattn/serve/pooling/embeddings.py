"""`/v1/embeddings` and `/pooling`: texts in, vectors out.

Knows inputs in every form, base64 and Matryoshka cuts; long work is done in a thread,
so that the event loop goes on. Knows nothing of models: the engine gives one pooled
vector for each prompt.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from torch import Tensor

from pagedattn.model.pooling import Pooling
from pagedattn.request import RequestOutput
from pagedattn.serve.front import Call, Front, usage
from pagedattn.serve.pooling.bodies import EmbeddingBody, PoolBody
from pagedattn.serve.problems import ApiError
from pagedattn.serve.prompts import INLINE, chat_prompt, encode
from pagedattn.serve.wire import dumps

MAX_INPUTS = 2_048  # in one request, as OpenAI allows
AT_ONCE = 256  # of these, how many are queued in the engine at a time


async def whole(front: Front, body: EmbeddingBody, request_id: str) -> dict[str, Any]:
    """The answer of `/v1/embeddings` as a dict; ApiError or UserError if there is
    none. Work is dropped if the caller is cancelled."""
    made = await create(front, body, request_id)
    return json.loads(bytes(made.body))


async def create(front: Front, body: EmbeddingBody, request_id: str) -> Response:
    """Answer with one embedding for each input; ApiError or UserError if it can't."""
    return await _answer(front, body, request_id, "embd", "embedding", "embedding")


async def pool(front: Front, body: EmbeddingBody, request_id: str) -> Response:
    """The same under the names of `/pooling`."""
    return await _answer(front, body, request_id, "pool", "pooling", "data")


async def _answer(
    front: Front, body: EmbeddingBody, request_id: str, *names: str
) -> Response:
    prefix, kind, key = names
    call = front.open_pooling(prefix, body.model, request_id)
    pooling = front.pooling
    pooling.check_dimensions(body.dimensions, front.engine.hidden_size)
    prompts = await _prompts(front, body)
    outputs = await pooled(front, call, body, prompts)
    raw = await asyncio.to_thread(
        _written, outputs, pooling.with_activation(body.use_activation), body, kind, key
    )
    head = {"id": call.id, "object": "list", "created": call.created}
    head |= {"model": call.model, "usage": used(outputs)}
    start = dumps(head).removesuffix(b"}")
    return Response(start + b',"data":[' + raw + b"]}", media_type="application/json")


def _written(
    outputs: Sequence[RequestOutput],
    pooling: Pooling,
    body: EmbeddingBody,
    kind: str,
    key: str,
) -> bytes:
    """The JSON of each embedding, one by one, so that other threads get their turn."""
    items = []
    for i, output in enumerate(outputs):
        vector = pooling.finish(output.pooled, body.dimensions)
        value = spelled(vector, body.encoding_format or "float")
        items.append(dumps({"index": i, "object": kind, key: value}))
    return b",".join(items)


def spelled(vector: Tensor, encoding: str) -> list[float] | str:
    """The vector as numbers, or as base64 of little-endian float32."""
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def used(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The usage of all prompts together."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return usage(tokens, 0, sum(output.num_cached_tokens or 0 for output in outputs))


# What both embeddings and scores do: prompts to ids, ids to pooled vectors.
async def pooled(
    front: Front, call: Call, body: PoolBody, prompts: Sequence[list[int]]
) -> list[RequestOutput]:
    """One output for each prompt, in order; if one fails, or the caller is cancelled,
    the others are dropped."""
    unique, places = f"{call.id}-{uuid.uuid4().hex[:12]}", asyncio.Semaphore(AT_ONCE)
    salt = {} if body.cache_salt is None else {"cache_salt": body.cache_salt}

    async def one(i: int, ids: list[int]) -> RequestOutput:
        prompt = {"prompt_token_ids": ids, **salt}
        async with places:
            return await front.engine.embed(
                prompt, f"{unique}-{i}", priority=body.priority or 0
            )

    tasks = [asyncio.ensure_future(one(i, ids)) for i, ids in enumerate(prompts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def text_ids(
    front: Front, body: PoolBody, texts: Sequence[str], param: str
) -> list[list[int]]:
    """Token ids of each text, cut as asked; 400 that names `param` if one is empty."""
    return await _away([(t, None) for t in texts], front, body, param)


async def _prompts(front: Front, body: EmbeddingBody) -> list[list[int]]:
    if body.messages is not None:
        return [cut(front, body, (await chat_prompt(front, body)).ids)]
    return await _away(_items(body.input), front, body, "input")


Item = tuple[str | None, list[int] | None]  # a text or its ids


async def _away(
    items: Sequence[Item], front: Front, body: PoolBody, param: str
) -> list[list[int]]:
    """Ids of all items; in a thread if there is much to read."""
    if len(items) > MAX_INPUTS:
        raise ApiError(
            400, f"{param} holds {len(items)} inputs; the limit is {MAX_INPUTS}.", param
        )

    def work() -> list[list[int]]:
        return [_ids(front, body, text, ids, param) for text, ids in items]

    size = sum(len(text or "") for text, _ in items)
    return work() if size <= INLINE else await asyncio.to_thread(work)


def _ids(
    front: Front, body: PoolBody, text: str | None, ids: list[int] | None, param: str
) -> list[int]:
    keep = body.truncate_prompt_tokens is not None
    if text is not None:
        try:
            ids = encode(front, text, body.add_special_tokens is not False, keep)
        except ApiError as problem:
            words = problem.message.replace("prompt", "input")
            raise ApiError(problem.status, words, param) from None
    return cut(front, body, ids or [])


def _items(value: Any) -> list[Item]:
    """Texts and lists of ids, whatever of the four forms `value` has."""
    if isinstance(value, list) and value and type(value[0]) is int:
        value = [value]
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise ApiError(
            400, "input must be a string, token ids, or a list of either.", "input"
        )
    return [_item(item) for item in items]


def _item(item: Any) -> Item:
    if isinstance(item, str):
        return item, None
    if not isinstance(item, list) or not all(type(i) is int for i in item):
        raise ApiError(400, "input holds what is no text and no token ids.", "input")
    if not item:
        raise ApiError(400, "The input is empty: it has no tokens.", "input")
    return None, item


def cut(front: Front, body: PoolBody, ids: list[int]) -> list[int]:
    """`ids` as they will run: at most `truncate_prompt_tokens`, -1: as many as fit.

    Tokens go from the right unless `truncation_side` says otherwise; a special token
    at the end that is cut, such as BERT's [SEP], stays.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    keep = front.engine.config.max_model_len if keep == -1 else keep
    tokenizer = front.engine.tokenizer
    special = tokenizer.special_ids if tokenizer is not None else frozenset()
    return shorten(ids, keep, body.truncation_side or "right", special)


def shorten(ids: list[int], keep: int, side: str, special: frozenset[int]) -> list[int]:
    """At most `keep` of `ids`; a special token at the end that loses stays, if there
    is room for another beside it."""
    if len(ids) <= keep:
        return ids
    if side == "left":
        return shorten(ids[::-1], keep, "right", special)[::-1]
    last = ids[-1:] if keep > 1 and ids[-1] in special else []
    return ids[: keep - len(last)] + last
