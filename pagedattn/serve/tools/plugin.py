"""Parsers from a file of the operator's: `--tool-parser-plugin FILE`.

Knows how to run that file and what it must define: `TOOL_PARSERS`, a dict of names to
`ToolParser`s. The file is Python and runs with the server's rights.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from pagedattn.errors import UserError
from pagedattn.serve.tools.calls import ToolParser

_FLAG = "tool_parser_plugin"


@lru_cache
def load(path: str) -> dict[str, ToolParser]:
    """The parsers that a file defines, which runs once; UserError that says what is
    wrong with it."""
    if not Path(path).is_file():
        raise UserError(f"{_FLAG}={path!r} is no file.", _FLAG)
    try:
        found = runpy.run_path(path).get("TOOL_PARSERS")
    except Exception as problem:
        kind = type(problem).__name__
        raise UserError(f"{_FLAG}={path!r} failed: {kind}: {problem}", _FLAG) from None
    if not isinstance(found, Mapping) or not all(map(_is_entry, found.items())):
        raise UserError(
            f"{_FLAG}={path!r} must define TOOL_PARSERS, a dict of ToolParser.",
            _FLAG,
        )
    return dict(found)


def _is_entry(entry: tuple[object, object]) -> bool:
    name, parser = entry
    return isinstance(name, str) and isinstance(parser, ToolParser)
