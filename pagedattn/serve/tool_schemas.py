"""The schema that an answer must meet where a call is not the model's to refuse.

Knows how tools' own schemas go into one, references and all; the engine's grammar
makes the model keep to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedattn.request import StructuredOutputsParams
from pagedattn.serve.problems import ApiError
from pagedattn.serve.tool_fields import ToolFields

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_SHAPES = ("type", "$ref", "anyOf", "oneOf", "allOf")


def forced_schema(body: ToolFields) -> StructuredOutputsParams | None:
    """The form of an answer whose calls `tool_choice` demands; None: it demands none.

    One named function: its arguments. Required: an array of calls, of exactly one
    where there may be one at most.
    """
    if body.choice not in ("required", "named"):
        return None
    try:
        schema = _arguments(body) if body.named is not None else _calls(body)
    except RecursionError:
        raise ApiError(400, "tools: a schema is nested too deeply.", "tools") from None
    return StructuredOutputsParams(json=schema, source="tools")


def _arguments(body: ToolFields) -> dict[str, Any]:
    return _object(body.schemas[str(body.named)])


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's schema, which is of an object even where it does not say so."""
    if not schema:
        return _NOTHING
    said = any(word in schema for word in _SHAPES)
    return dict(schema) if said else {"type": "object", **schema}


def _calls(body: ToolFields) -> dict[str, Any]:
    names = list(body.schemas)
    items = [_call(name, f"#/$defs/{i}") for i, name in enumerate(names)]
    defs = {
        str(i): _moved(_object(body.schemas[name]), f"#/$defs/{i}")
        for i, name in enumerate(names)
    }
    array = {"type": "array", "minItems": 1, "items": {"anyOf": items}, "$defs": defs}
    return {**array, "maxItems": 1} if body.one_call else array


def _call(name: str, where: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": where}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(node: Any, to: str) -> Any:
    """A schema that stood alone, as a part: its references from the root lead there."""
    if isinstance(node, list):
        return [_moved(item, to) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {name: _moved(item, to) for name, item in node.items()}
    ref = node.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        moved["$ref"] = to + ref[1:]
    return moved
