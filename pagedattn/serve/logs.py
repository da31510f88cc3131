"""Log lines: for people, or one JSON object a line for machines.

Knows `logging` and what uvicorn's access lines hold; nothing of requests.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

PLAIN = "%(levelname)s %(asctime)s %(name)s: %(message)s"
ACCESS = ("client", "method", "path", "http_version", "status")


class JsonLines(logging.Formatter):
    """Each record as one JSON object on one line; access lines in their parts."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.name == "uvicorn.access" and isinstance(record.args, tuple):
            line |= dict(zip(ACCESS, record.args, strict=False))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(level: str, structured: bool = False) -> None:
    """Send everything that is logged to stderr, ours from `level` on."""
    if structured:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        logging.basicConfig(handlers=[handler])
    else:
        logging.basicConfig(format=PLAIN, datefmt="%m-%d %H:%M:%S")
    logging.getLogger("pagedattn").setLevel(level.upper())
