"""Failures as OpenAI-shaped JSON with the right status code.

Knows exceptions and the error object; nothing of routes or engines.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.exceptions import HTTPException

from pagedattn.errors import EngineDead, UserError

log = logging.getLogger("pagedattn.serve")

KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
# Anthropic's words for the same, on its routes.
ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
LONGEST_MESSAGE = 2_000  # characters; messages may quote what the client sent


class ApiError(Exception):
    """A failure with its status, its words and the field at fault, if there is one."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param

    def body(self) -> dict[str, Any]:
        """The error object that clients read."""
        message = self.message
        if len(message) > LONGEST_MESSAGE:
            message = message[:LONGEST_MESSAGE] + " …"
        kind = KINDS.get(self.status, "APIError")
        error = {"message": message, "type": kind, "param": self.param}
        return {"error": {**error, "code": self.status}}


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The error object that clients of `/v1/messages` read."""
    kind = ANTHROPIC_KINDS.get(error.status, "invalid_request_error")
    message = error.body()["error"]["message"]
    return {"type": "error", "error": {"type": kind, "message": message}}


def body_for(path: str, error: ApiError) -> dict[str, Any]:
    """The error object in the shape that clients of `path` read."""
    anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return anthropic_body(error) if anthropic else error.body()


def as_api_error(problem: Exception) -> ApiError:
    """The answer to any exception; what nobody foresaw is logged and told as 500."""
    match problem:
        case ApiError():
            return problem
        case UserError():
            return ApiError(400, str(problem), problem.param)
        case EngineDead():
            return ApiError(503, str(problem) or "The engine has stopped.")
        case HTTPException():
            return ApiError(problem.status_code, str(problem.detail))
    log.error("unexpected failure", exc_info=problem)
    return ApiError(500, f"{type(problem).__name__} in the server; see its log.")
