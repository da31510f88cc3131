"""One process that serves: its socket, its signals, its log lines.

Knows uvicorn and the order of starting and stopping. The first SIGTERM or Ctrl-C
refuses new work and lets the running finish; the second ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from pagedattn.serve.front import Front
from pagedattn.serve.settings import ServeArgs

log = logging.getLogger("pagedattn.serve")

STATS_EVERY = 10.0  # seconds between log lines of statistics
FLUSH = 5.0  # seconds that the last bytes of answers get to leave
MAX_HEAD = 64 << 10  # bytes of a request's line and headers
KEEP_ALIVE = 30  # seconds that an idle connection is kept
LOOK = 0.5  # seconds between looks at whether the engine is alive
LAST_WORDS = 2.0  # seconds in which a dead engine's /health can still say 503
NO_CLOSE = 0.05  # seconds between looks at what is still in flight


class Server(uvicorn.Server):
    """uvicorn, but a signal drains, the process ends with 0, statistics are logged."""

    def __init__(self, app: FastAPI, log_stats: bool) -> None:
        self.front: Front = app.state.front
        super().__init__(_uvicorn_config(app, self.front.settings))
        self._log_stats = log_stats
        self.engine_died = False
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; uvicorn's, and the statistics."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._tasks.append(asyncio.create_task(self._watch_engine()))
        if self._log_stats:
            self._tasks.append(asyncio.create_task(self._statistics()))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: drain, or if that is under way already, end."""
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._stop, signal.Signals(sig).name)

    def _stop(self, name: str) -> None:
        timeout = 0.0 if self.front.draining else self.front.settings.shutdown_timeout
        log.info("%s: running requests get %g s", name, timeout)
        self.front.draining = True
        self._tasks.append(asyncio.create_task(self._drain(timeout)))

    async def _drain(self, timeout: float) -> None:
        try:
            await self.front.engine.drain(timeout)
            async with asyncio.timeout(FLUSH):
                while self.front.in_flight:
                    await asyncio.sleep(NO_CLOSE)
        except Exception as problem:  # whatever happens, the process must end
            log.warning("shutting down with requests left: %r", problem)
        self.should_exit = True

    async def _statistics(self) -> None:
        while True:
            await asyncio.sleep(STATS_EVERY)
            line = self.front.engine.metrics.line(STATS_EVERY)
            if line is not None:
                log.info(line)

    async def _watch_engine(self) -> None:
        """End the process some time after its engine has died; it can't recover."""
        while self.front.engine.is_running:
            await asyncio.sleep(LOOK)
        if not self.front.draining:
            log.critical("The engine has died: this process ends.")
            self.engine_died = True
            await asyncio.sleep(LAST_WORDS)
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close; uvicorn's, and our tasks."""
        for task in self._tasks:
            task.cancel()
        await super().shutdown(sockets)


def _uvicorn_config(app: FastAPI, settings: ServeArgs) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_level=settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        timeout_graceful_shutdown=int(FLUSH),
        lifespan="off",
        server_header=False,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD,
        timeout_keep_alive=KEEP_ALIVE,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        **({"log_config": None} if settings.structured_logs else {}),
    )
