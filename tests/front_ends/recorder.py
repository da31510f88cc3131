"""A proxy that writes down what passes: what a front end sends, and what it is told.

Knows HTTP and nothing of either side. Answers are passed on as they come, so that a
stream stays one, and a client that leaves in mid-answer is one that left the server.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

METHODS = ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"]
# Of this connection, not of the call.
HOP = {"host", "content-length", "connection", "transfer-encoding", "date", "server"}


@dataclass(slots=True)
class Call:
    """One request as it was sent, and the answer: its status, and where it ended."""

    method: str
    path: str
    headers: dict[str, str]
    body: object = None
    status: int = 0
    answer: str = ""
    left: bool = False  # the client left before the answer had ended


@dataclass(slots=True)
class Recorder:
    """Passes everything on to `server`, and remembers it in order."""

    server: str
    url: str = ""
    calls: list[Call] = field(default_factory=list)

    def of(self, path: str) -> list[Call]:
        """The calls whose path is `path`."""
        return [call for call in self.calls if call.path == path]

    def dump(self) -> list[dict]:
        """Every call as plain data."""
        return [asdict(call) for call in self.calls]

    async def pass_on(self, request: Request) -> StreamingResponse:
        """Send a request on; its answer comes back piece by piece."""
        raw = await request.body()
        headers = {k: v for k, v in request.headers.items() if k not in HOP}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        call = Call(request.method, path, headers, _read(raw))
        self.calls.append(call)
        client: httpx.AsyncClient = request.app.state.client
        sent = client.build_request(
            request.method, self.server + path, headers=headers, content=raw
        )
        reply = await client.send(sent, stream=True)
        call.status = reply.status_code
        kept = {k: v for k, v in reply.headers.items() if k not in HOP}
        return StreamingResponse(_copy(reply, call), reply.status_code, kept)


async def _copy(reply: httpx.Response, call: Call) -> AsyncIterator[bytes]:
    call.left = True
    try:
        async for piece in reply.aiter_raw():
            call.answer += piece.decode("utf-8", "replace")
            yield piece
        call.left = False
    finally:
        await reply.aclose()


def _read(raw: bytes) -> object:
    try:
        return json.loads(raw) if raw else None
    except ValueError:
        return raw.decode("utf-8", "replace")


@contextmanager
def recording(server: str, port: int = 0) -> Iterator[Recorder]:
    """A recorder before `server`, listening on `port` or any free one."""
    recorder = Recorder(server)

    @asynccontextmanager
    async def client(app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=300) as app.state.client:
            yield

    everything = [Route("/{path:path}", recorder.pass_on, methods=METHODS)]
    app = Starlette(routes=everything, lifespan=client)
    config = uvicorn.Config(app, port=port, log_level="warning")
    proxy = uvicorn.Server(config)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    while not proxy.started:
        time.sleep(0.01)
    bound = proxy.servers[0].sockets[0].getsockname()[1]
    recorder.url = f"http://127.0.0.1:{bound}"
    try:
        yield recorder
    finally:
        proxy.should_exit = True
        thread.join(20)
