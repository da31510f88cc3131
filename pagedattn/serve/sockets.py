"""Where the server listens: taken early, so that a taken port is told at once.

Knows addresses; loads neither the web framework nor torch.
"""

from __future__ import annotations

import socket

from pagedattn.errors import UserError

BACKLOG = 2048  # connections that may wait to be accepted; uvicorn's own


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, taken before the model is loaded; UserError if it can't be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)  # a second server is told now; early clients queue
    except OSError as problem:
        raise UserError(
            f"can't listen on {host}:{port}: {problem.strerror}. "
            "Choose another with --host and --port.",
            "port",
        ) from None
    return bound


def url_of(bound: socket.socket, tls: bool = False) -> str:
    """The address that clients use."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    scheme, host = "https" if tls else "http", f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{port}"
