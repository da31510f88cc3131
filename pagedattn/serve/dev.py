"""Routes for development: pauses, sleep, and a prefix cache made empty.

They stop everybody's requests, so they exist only where the settings open them. Names
and queries are vLLM's. Knows HTTP and the asynchronous engine.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagedattn.errors import UserError
from pagedattn.serve.problems import ApiError
from pagedattn.serve.wire import JsonAnswer

router = APIRouter()
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def _flag(http: Request, name: str, default: bool) -> bool:
    text = http.query_params.get(name, str(default)).lower()
    if text not in _BOOLEANS:
        raise ApiError(400, f"{name} must be true or false, got {text[:40]!r}.", name)
    return _BOOLEANS[text]


def _level(http: Request) -> int:
    text = http.query_params.get("level", "1")
    if not (text.isascii() and text.isdigit() and len(text) == 1):
        raise UserError(f"level must be 0 or 1, got {text[:40]!r}.", "level")
    return int(text)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(http: Request) -> Response:
    """Forget every cached prefix; 409 while requests run, unless they may be
    preempted."""
    preempt = _flag(http, "reset_running_requests", False)
    if not await http.app.state.front.engine.reset_prefix_cache(preempt):
        raise ApiError(
            409, "Requests are running: reset_running_requests=true preempts them."
        )
    return JsonAnswer({})


@router.post("/pause")
async def pause(http: Request) -> Response:
    """Hold requests back: `mode` abort, wait or keep for those under way."""
    mode = http.query_params.get("mode", "abort")
    await http.app.state.front.engine.pause(mode, _flag(http, "clear_cache", True))
    return JsonAnswer({"status": "paused"})


@router.post("/resume")
async def resume(http: Request) -> Response:
    """Go on."""
    await http.app.state.front.engine.resume()
    return JsonAnswer({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(http: Request) -> Response:
    """Whether requests are held back."""
    return JsonAnswer({"is_paused": http.app.state.front.engine.is_paused})


@router.post("/sleep")
async def sleep(http: Request) -> Response:
    """Pause, and from `level` 1 on let go of the KV tensors."""
    mode = http.query_params.get("mode", "abort")
    await http.app.state.front.engine.sleep(_level(http), mode)
    return JsonAnswer({})


@router.post("/wake_up")
async def wake_up(http: Request) -> Response:
    """Take the KV tensors back and go on."""
    await http.app.state.front.engine.wake_up()
    return JsonAnswer({})


@router.get("/is_sleeping")
async def is_sleeping(http: Request) -> Response:
    """Whether the KV tensors are gone."""
    return JsonAnswer({"is_sleeping": http.app.state.front.engine.is_sleeping})
