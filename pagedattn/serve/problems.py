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
    500: "InternalServerError",
    503: "ServiceUnavailableError",
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
