"""The fields of embeddings, scores and reranking; names and meanings are vLLM's.

Knows names, types and which go together; what they mean is told in `embeddings` and
`scoring`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from pagedattn.serve.problems import ApiError
from pagedattn.serve.protocol import LONGEST_ID, Body, TemplateFields, Whole

_NOT_HERE = "is not built for this endpoint"


class PoolBody(Body):
    """What every request for embeddings or scores has."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "embed_dtype": "embeddings are float32; leave it out",
        "endianness": "base64 is little-endian; leave it out",
        "instruction": _NOT_HERE,
        "max_tokens_per_doc": f"{_NOT_HERE}; truncate_prompt_tokens cuts every text",
        "max_tokens_per_query": f"{_NOT_HERE}; truncate_prompt_tokens cuts every text",
        "stream": "embeddings and scores are not streamed",
    }

    truncate_prompt_tokens: Whole | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: Whole | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    def check(self) -> None:
        """Refuse what can't be meant."""
        self.check_extras()
        keep = self.truncate_prompt_tokens
        if keep is not None and keep != -1 and keep < 1:
            _refuse("truncate_prompt_tokens", "must be -1 or at least 1")
        if self.cache_salt == "":
            _refuse("cache_salt", "must not be empty")
        if len(self.request_id or "") > LONGEST_ID:
            _refuse("request_id", f"has more than {LONGEST_ID} characters")


class EmbeddingBody(TemplateFields, PoolBody):
    """`/v1/embeddings`. `input`: text, token ids, or a list of either; or messages."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = None
    use_activation: bool | None = None

    def check(self) -> None:
        """As above, and one of input and messages."""
        PoolBody.check(self)
        self.check_template()
        if (self.input is None) == (self.messages is None):
            _refuse("input", "or messages must be given, and not both")


class PoolingBody(EmbeddingBody):
    """`/pooling`: the same, and which task."""

    task: str | None = None

    def check(self) -> None:
        """As above; embedding is the task that is built."""
        EmbeddingBody.check(self)
        if self.task not in (None, "embed"):
            _refuse("task", f"must be embed; {self.task[:40]!r} is not built")


_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"))


class ScoreBody(PoolBody):
    """`/score`: two texts, or one and several, or as many of each."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None

    def check(self) -> None:
        """As above; the pairs must make sense."""
        PoolBody.check(self)
        self.pairs()

    def pairs(self) -> tuple[list[str], list[str]]:
        """Both sides of each pair, equally many; 400 where they don't match."""
        names = (*_PAIRS, ("data_1", "data_2"))
        given = [p for p in names if all(getattr(self, n) is not None for n in p)]
        if len(given) != 1:
            _refuse("text_1", "and text_2, or queries and documents, must be given")
        left, right = (_listed(getattr(self, name)) for name in given[0])
        if not left or not right:
            _refuse(given[0][0 if right else 1], "is empty")
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            _refuse(
                given[0][0],
                f"holds {len(left)} texts and {given[0][1]} {len(right)}; it must be "
                "one, or as many",
            )
        return left, right


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


class RerankBody(PoolBody):
    """`/rerank`: which documents answer a query best. `top_n` 0: all of them."""

    query: str
    documents: list[str | dict[str, Any]]
    top_n: Whole | None = None
    return_documents: bool | None = None

    def check(self) -> None:
        """As above; documents are texts."""
        PoolBody.check(self)
        if not self.documents:
            _refuse("documents", "is empty")
        if (self.top_n or 0) < 0:
            _refuse("top_n", "must be 0 (all) or more")
        self.texts()

    def texts(self) -> list[str]:
        """The documents' texts."""
        found = [d.get("text") if isinstance(d, dict) else d for d in self.documents]
        for i, text in enumerate(found):
            if not isinstance(text, str):
                _refuse("documents", f"[{i}] must be a string, or have a text")
        return found


def _refuse(param: str, rule: str) -> None:
    raise ApiError(400, f"{param} {rule}.", param)
