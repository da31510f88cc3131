"""What a body says of its answer's form -> `StructuredOutputsParams`.

Knows `response_format`, `structured_outputs` and their older names; whether a schema
can be compiled is found out later, by the engine's intake, off the event loop.
"""

from __future__ import annotations

from typing import Any

from pagedattn.request import StructuredOutputsParams, grammar_from
from pagedattn.serve.problems import ApiError

FORMAT, WISH = "response_format", "structured_outputs"
OLD_NAMES = {
    f"guided_{kind}": f"use {WISH}: {{{kind!r}: …}}"
    for kind in ("json", "regex", "choice", "grammar")
}


def structured_outputs(
    response_format: dict[str, Any] | None, wish: dict[str, Any] | None
) -> StructuredOutputsParams | None:
    """What the answer must be, None where it is free; ApiError or UserError naming
    the fault. At most one of the two may ask for something."""
    found = None if response_format is None else from_format(response_format)
    if wish is None:
        return found
    if found is not None:
        raise ApiError(400, f"{FORMAT} and {WISH} can't both be given.", WISH)
    return grammar_from(wish, WISH)


def from_format(
    response_format: dict[str, Any], source: str = FORMAT
) -> StructuredOutputsParams | None:
    """OpenAI's `response_format`: {"type": "text"}, "json_object" or "json_schema"."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, source=source)
    if kind != "json_schema":
        raise ApiError(
            400,
            f"{source}: type must be 'text', 'json_object' or 'json_schema', "
            f"got {kind!r:.80}.",
            source,
        )
    return from_schema(response_format.get("json_schema"), source)


def from_schema(named: Any, source: str = FORMAT) -> StructuredOutputsParams:
    """OpenAI's {"name", "schema", "strict"}; strict objects have no properties but
    those that are listed."""
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict | bool):
        raise ApiError(
            400, f"{source}: json_schema must be an object with a schema.", source
        )
    strict = named.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ApiError(400, f"{source}: strict must be true or false.", source)
    return StructuredOutputsParams(
        json=schema, disable_additional_properties=bool(strict), source=source
    )
