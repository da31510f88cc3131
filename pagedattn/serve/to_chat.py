"""What the protocols that are written on top of chats share: `ChatBody` in their words.

Knows how to make a chat's body out of fields, and whose names its complaints must use;
nothing of any one protocol.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from pagedattn.errors import UserError
from pagedattn.serve.problems import ApiError
from pagedattn.serve.protocol import ChatBody, StreamOptions, built


def chat_body(values: Mapping[str, Any], names: Mapping[str, str]) -> ChatBody:
    """The chat with these fields, None left out; 400 in the words of `names`."""
    given = {k: v for k, v in values.items() if v is not None}
    with speaking(names):
        return built(ChatBody, given)


def streamed(asked: ChatBody, every: bool = False) -> ChatBody:
    """The same chat, streamed; its usage comes at the end, or in `every` chunk."""
    options = StreamOptions(include_usage=True, continuous_usage_stats=every)
    return asked.model_copy(update={"stream": True, "stream_options": options})


@contextmanager
def speaking(names: Mapping[str, str]) -> Iterator[None]:
    """Complaints about a chat's fields, raised inside, name the client's instead."""
    try:
        yield
    except ApiError as problem:
        raise _said(names, problem.status, problem.message, problem.param) from problem
    except UserError as problem:
        raise _said(names, 400, str(problem), problem.param) from problem


def _said(
    names: Mapping[str, str], status: int, message: str, param: str | None
) -> ApiError:
    if param not in names:
        return ApiError(status, message, param)
    said = re.sub(rf"\b{re.escape(param)}\b", names[param], message)
    return ApiError(status, said, names[param])


def refuse(where: str, rule: str) -> NoReturn:
    """ApiError 400 that names the place in the body, and its field as the parameter."""
    raise ApiError(400, f"{where} {rule}.", re.split(r"[.\[]", where)[0])


def text_of(value: Any, where: str) -> str:
    """`value`, which must be a string."""
    if not isinstance(value, str):
        refuse(where, "must be a string")
    return value


def object_of(value: Any, where: str) -> dict[str, Any]:
    """`value`, which must be an object."""
    if not isinstance(value, dict):
        refuse(where, "must be an object")
    return value


def list_of(value: Any, where: str) -> list[Any]:
    """`value`, which must be a list."""
    if not isinstance(value, list):
        refuse(where, "must be a list")
    return value


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def as_chunk(completion: Mapping[str, Any]) -> dict[str, Any]:
    """A whole answer as the one chunk of a stream, so that both take the same way."""
    choices = [{**c, "delta": c["message"]} for c in completion["choices"]]
    return {**completion, "choices": choices}
