"""The two kinds of failure a caller can meet: a mistake of theirs, or a dead engine.

Knows nothing of requests, models or HTTP; the server turns these into status codes.
"""


class UserError(ValueError):
    """A caller's mistake: the message names the parameter, the value and the limit.

    `param` is the field at fault, as the caller spells it, where there is one.
    Raised before any work starts, so nothing has changed.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotSupported(UserError):
    """A feature that exists elsewhere but is not built here; names what is."""


class EngineDead(RuntimeError):
    """The step loop has ended; no request can be served any more."""
