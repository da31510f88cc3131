"""`/score` and `/rerank`: how near texts are, as the cosine of their embeddings.

Knows pairs, order and the shapes of both answers; `embeddings` makes the vectors.
Cross-encoders, which read both texts at once, are not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from starlette.responses import Response
from torch import Tensor

from pagedattn.serve.front import Front
from pagedattn.serve.pooling.bodies import PoolBody, RerankBody, ScoreBody
from pagedattn.serve.pooling.embeddings import pooled, text_ids, used
from pagedattn.serve.problems import ApiError
from pagedattn.serve.wire import JsonAnswer


async def score(front: Front, body: ScoreBody, request_id: str) -> Response:
    """The cosine of each pair; ApiError or UserError if it can't be."""
    call = front.open_pooling("score", body.model, request_id)
    left, right = body.pairs()
    vectors, outputs = await _vectors(front, call, body, [*left, *right], "text_1")
    scores = cosines(vectors[: len(left)], vectors[len(left) :])
    data = [{"index": i, "object": "score", "score": s} for i, s in enumerate(scores)]
    head = {"id": call.id, "object": "list", "created": call.created}
    return JsonAnswer(
        {**head, "model": call.model, "data": data, "usage": used(outputs)}
    )


async def rerank(front: Front, body: RerankBody, request_id: str) -> Response:
    """The documents nearest to the query, the best first."""
    call = front.open_pooling("rerank", body.model, request_id)
    texts = body.texts()
    vectors, outputs = await _vectors(
        front, call, body, [body.query, *texts], "documents"
    )
    scores = cosines(vectors[:1].expand(len(texts), -1), vectors[1:])
    best = ranked(scores, body.top_n or 0)
    results = [_result(body, i, texts[i], scores[i]) for i in best]
    head = {"id": call.id, "model": call.model, "usage": used(outputs)}
    return JsonAnswer({**head, "results": results})


def _result(body: RerankBody, i: int, text: str, value: float) -> dict[str, Any]:
    result: dict[str, Any] = {"index": i, "relevance_score": value}
    if body.return_documents is not False:
        result["document"] = {"text": text}
    return result


async def classify(front: Front, body: PoolBody, request_id: str) -> Response:
    """400: classifiers are not built."""
    raise ApiError(
        400,
        "The model does not support the Classification API: classifiers and "
        "cross-encoders are not built. /score and /rerank compare embeddings.",
    )


async def _vectors(
    front: Front, call: Any, body: PoolBody, texts: list[str], param: str
) -> tuple[Tensor, list[Any]]:
    """[texts, size], one row for each text; equal texts are computed once."""
    distinct = list(dict.fromkeys(texts))
    prompts = await text_ids(front, body, distinct, param)
    outputs = await pooled(front, call, body, prompts)
    rows = {text: i for i, text in enumerate(distinct)}
    stacked = torch.stack([output.pooled for output in outputs])
    return stacked[[rows[text] for text in texts]], outputs


def cosines(left: Tensor, right: Tensor) -> list[float]:
    """The cosine of each row of `left` [n, size] with the same row of `right`."""
    unit = (torch.nn.functional.normalize(x.double(), dim=-1) for x in (left, right))
    a, b = unit
    return (a * b).sum(-1).clamp(-1, 1).tolist()


def ranked(scores: Sequence[float], top_n: int) -> list[int]:
    """Indices of the best `top_n`, all if 0, best first; of equals the first."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return order[: top_n or None]
