# Exercise 16 · In production: build it.
#
# This is pagedattn/serve/gate.py without these bodies:
#
#     Gate._admit
#     Gate._opens
#     Gate._count
#
# Each raises NotImplementedError. Its docstring is its contract: write the body here,
# in this file, and keep the signature.
#
#     make exercise N=16    the engine's own tests on your file, and one hint
#     make hint N=16        a hint alone
#     make reset N=16       this file as it was; yours is kept beside it
#     PAGEDATTN_STUDENT=16 make serve    the server, on your code
#
# The idea is in book/16_production.ipynb.
# One solution is pagedattn/serve/gate.py itself.
#
# Made from pagedattn/serve/gate.py by exercises/tools.py. Untouched: 28fb8d4c5563

"""What stands before every route: keys, request ids, the count, the last resort.

Knows ASGI and the list of open paths; everything else needs a key where keys are set.
Knows nothing of what the routes do.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Iterable
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedattn.serve.front import Front
from pagedattn.serve.problems import ApiError, as_api_error, body_for
from pagedattn.serve.protocol import LONGEST_ID
from pagedattn.serve.wire import JsonAnswer

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics"})
REQUEST_ID = "x-request-id"


class Gate:
    """ASGI middleware: refuse, count, name, and turn every failure into JSON."""

    def __init__(self, app: ASGIApp, front: Front, keys: Iterable[str]) -> None:
        self._app, self._front = app, front
        self._keys = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route speaks anything else
            await send({"type": "websocket.close", "code": 1008})
            return
        request_id = _request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = request_id
        reply = _Reply(send, request_id)
        try:
            self._admit(scope)
            await self._count(scope, receive, reply)
        except ClientDisconnect:  # in the middle of its body; nobody reads an answer
            return
        except Exception as problem:
            error = as_api_error(problem)
            if reply.started:
                raise
            headers = {"Retry-After": "1"} if error.status == 503 else None
            body = body_for(scope["path"], error)
            answer = JsonAnswer(body, error.status, headers)
            await answer(scope, receive, reply)

    def _admit(self, scope: Scope) -> None:
        """Raise 401 without a key, 503 for new work while the server shuts down."""
        raise NotImplementedError("exercise 16: Gate._admit")

    def _opens(self, headers: Headers) -> bool:
        """Whether a header holds one of the keys; every key is compared, in full."""
        raise NotImplementedError("exercise 16: Gate._opens")

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application; work that was posted counts until it is answered."""
        raise NotImplementedError("exercise 16: Gate._count")


def routed(path: str, root_path: str) -> str:
    """The path that routes are matched with: without the proxy's prefix, if it is
    still there, as Starlette takes it away."""
    rest = path.removeprefix(root_path.rstrip("/"))
    return rest if rest.startswith("/") else path


class _Reply:
    """`send` that names the request and remembers whether the answer has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._id = send, request_id
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            MutableHeaders(scope=message)[REQUEST_ID] = self._id
        await self._send(message)


def _request_id(headers: Headers) -> str:
    """The client's id, cut to a sane length, or a new one."""
    return headers.get(REQUEST_ID, "")[:LONGEST_ID] or uuid.uuid4().hex
