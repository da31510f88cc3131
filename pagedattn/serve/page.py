"""The page at `/`: a chat beside the live engine, and the frames that it draws.

The page is one file that asks for nothing from elsewhere, and may not: its policy
allows its own script and style by their hashes. The page is open to all and holds
nothing secret; the frames need the key, as everything else does.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, Response

from pagedattn.serve.problems import ApiError
from pagedattn.serve.wire import JsonAnswer

router = APIRouter()
FILE = Path(__file__).with_name("page.html")


@cache
def _page() -> tuple[str, dict[str, str]]:
    """The page and its headers."""
    text = FILE.read_text("utf-8")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(text, 'script')}",
            f"style-src {_hashes(text, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return text, {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _hashes(text: str, tag: str) -> str:
    """The source expressions of the inline elements of this kind."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(
        f"'sha256-{b64encode(sha256(body.encode()).digest()).decode()}'"
        for body in found
    )


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page."""
    text, headers = _page()
    return HTMLResponse(text, headers=headers)


@router.get("/live/frames")
async def frames(http: Request) -> Response:
    """Frames of the steps after `after`, and how many steps there were."""
    film = http.app.state.front.film
    if film is None:
        raise ApiError(404, "This engine can't be filmed.")
    text = http.query_params.get("after", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, "after must be a step's number.", "after")
    return JsonAnswer({"frames": film.look(int(text)), "step": film.step})
