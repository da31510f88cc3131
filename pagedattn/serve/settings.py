"""The server's own settings, beside the engine's: where, for whom, how long.

Knows flags, their defaults and their meanings; nothing of models or requests.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pagedattn.config import setting
from pagedattn.errors import UserError
from pagedattn.serve.reasoning import REASONING_PARSERS
from pagedattn.serve.reasoning.split import ReasoningParser
from pagedattn.serve.tools import TOOL_PARSERS
from pagedattn.serve.tools.calls import ToolParser
from pagedattn.serve.tools.plugin import load

P = TypeVar("P")

KEY_VARIABLES = ("PAGEDATTN_API_KEY", "VLLM_API_KEY")
DEV_VARIABLE = "VLLM_SERVER_DEV_MODE"
LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(slots=True)
class ServeArgs:
    """What `pagedattn serve` takes beside `EngineArgs`."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: every interface")
    port: int = setting(8000, "port to listen on; 0: any free one")
    api_key: list[str] | None = setting(
        None,
        "a key that clients must send; may be given several times "
        f"(or the environment's {' or '.join(KEY_VARIABLES)})",
    )
    allowed_origins: tuple[str, ...] = setting(("*",), 'CORS origins, as JSON: ["*"]')
    allowed_methods: tuple[str, ...] = setting(("*",), "CORS methods, as JSON")
    allowed_headers: tuple[str, ...] = setting(("*",), "CORS request headers, as JSON")
    allow_credentials: bool = setting(False, "CORS: allow credentials")
    ssl_keyfile: str | None = setting(None, "TLS: file with the private key")
    ssl_certfile: str | None = setting(None, "TLS: file with the certificate chain")
    ssl_ca_certs: str | None = setting(None, "TLS: file with CAs of clients")
    ssl_cert_reqs: int = setting(
        0, "TLS: clients' certificates: 0 not asked for, 1 optional, 2 required"
    )
    root_path: str = setting("", "path prefix that a proxy in front takes away")
    chat_template: str | None = setting(
        None, "a file with, or the text of, a jinja chat template"
    )
    trust_request_chat_template: bool = setting(
        False, "let requests bring their own chat_template (sandboxed and bounded)"
    )
    enable_auto_tool_choice: bool = setting(
        False, "let the model choose tools: needs --tool-call-parser"
    )
    tool_call_parser: str | None = setting(
        None, f"how this model writes tool calls: {', '.join(TOOL_PARSERS)}"
    )
    tool_parser_plugin: str = setting(
        "", "a Python file that is run at the start and defines more TOOL_PARSERS"
    )
    reasoning_parser: str = setting(
        "", f"how this model writes its reasoning: {', '.join(REASONING_PARSERS)}"
    )
    response_role: str = setting("assistant", "role of the answers in chats")
    max_body_bytes: int = setting(16 << 20, "largest request body")
    max_stored_responses: int = setting(
        1_000, "answers of /v1/responses kept in memory; 0: none"
    )
    max_stored_response_bytes: int = setting(
        64 << 20, "bytes that they may take, with the conversations before them"
    )
    shutdown_timeout: float = setting(
        30.0, "seconds that running requests get after SIGTERM or Ctrl-C"
    )
    log_level: str = setting("info", "how much this package logs", choices=LEVELS)
    uvicorn_log_level: str = setting(
        "info", "how much uvicorn logs", choices=(*LEVELS, "trace")
    )
    disable_uvicorn_access_log: bool = setting(False, "no log line per HTTP request")
    structured_logs: bool = setting(False, "one JSON object per log line")
    enable_log_requests: bool = setting(False, "log each request as it comes")
    otlp_traces_endpoint: str | None = setting(
        None, "URL that takes OpenTelemetry traces (pip install 'pagedattn[otel]')"
    )
    enable_dev_mode: bool = setting(
        False,
        "open /sleep, /pause, /reset_prefix_cache and their like; so does "
        f"{DEV_VARIABLE}=1 in the environment",
    )
    disable_fastapi_docs: bool = setting(False, "no /docs, /redoc and /openapi.json")

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise UserError(
                    f"{name} must be in [{low:g}, {high:g}], got {value}.", name
                )
        if any(not key for key in self.api_key or []):
            raise UserError("api_key must not be empty.", "api_key")
        if self.enable_auto_tool_choice and self.tool_parser() is None:
            raise UserError(
                "enable_auto_tool_choice needs tool_call_parser.", "tool_call_parser"
            )
        for find in (self.tool_parser, self.reasoning):
            find()
        self._check_tls()

    def tool_parser(self) -> ToolParser | None:
        """The parser of tool calls; UserError for a name that is none."""
        plugin = self.tool_parser_plugin
        known = {**TOOL_PARSERS, **(load(plugin) if plugin else {})}
        return _named(known, "tool_call_parser", self.tool_call_parser)

    def reasoning(self) -> ReasoningParser | None:
        """The parser of reasoning; UserError for a name that is none."""
        return _named(REASONING_PARSERS, "reasoning_parser", self.reasoning_parser)

    def _check_tls(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise UserError(
                "ssl_keyfile and ssl_certfile need each other.", "ssl_certfile"
            )
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            value = getattr(self, name)
            if value is not None and not Path(value).is_file():
                raise UserError(f"{name}={value!r} is no file.", name)
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise UserError("ssl_cert_reqs needs ssl_ca_certs.", "ssl_cert_reqs")

    @property
    def tls(self) -> bool:
        """Whether the server speaks HTTPS."""
        return self.ssl_certfile is not None

    def dev_mode(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether the routes for development are open."""
        return self.enable_dev_mode or environ.get(DEV_VARIABLE) == "1"

    def keys(self, environ: Mapping[str, str] = os.environ) -> list[str]:
        """The keys that open the API; none: it is open to all."""
        found = [environ[v] for v in KEY_VARIABLES if environ.get(v)]
        return self.api_key or found


_RANGES = (
    ("port", 0, 65_535),
    ("ssl_cert_reqs", 0, 2),
    ("max_body_bytes", 1_024, 1 << 32),
    ("max_stored_responses", 0, 1 << 20),
    ("max_stored_response_bytes", 0, 1 << 40),
    ("shutdown_timeout", 0.0, 86_400.0),
)


def _named(table: Mapping[str, P], flag: str, name: str | None) -> P | None:
    if not name:
        return None
    if name not in table:
        known = ", ".join(sorted(table))
        raise UserError(f"{flag}={name!r} is not known. There are: {known}.", flag)
    return table[name]


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each setting above; booleans also get their --no- form."""
    group = parser.add_argument_group("server")
    for f in fields(ServeArgs):
        text = f"{f.metadata['help']} (default: {f.default})"
        options: dict[str, Any] = {"default": f.default, "help": text, "dest": f.name}
        if f.metadata["choices"]:
            options["choices"] = f.metadata["choices"]
        kind = str(f.type)
        if kind == "bool":
            options["action"] = argparse.BooleanOptionalAction
        elif f.name == "api_key":
            options["action"] = "append"
        elif kind.startswith("tuple"):
            options["type"] = _strings
        elif kind in ("int", "float"):
            options["type"] = {"int": int, "float": float}[kind]
        group.add_argument("--" + f.name.replace("_", "-"), **options)


def _strings(text: str) -> tuple[str, ...]:
    """A JSON list of strings, or one bare string."""
    if not text.startswith("["):
        return (text,)
    items = json.loads(text)
    if not all(isinstance(item, str) for item in items):
        raise ValueError(text)
    return tuple(items)


def serve_args_from(namespace: argparse.Namespace) -> ServeArgs:
    """The `ServeArgs` of a parsed command line; other names in it are left alone."""
    return ServeArgs(**{f.name: getattr(namespace, f.name) for f in fields(ServeArgs)})


def read_template(value: str | None) -> str | None:
    """The template's text: a file's, or `value` itself where it looks like jinja."""
    if value is None:
        return None
    path = Path(value)
    if "\n" not in value and len(value) < 4096 and path.is_file():
        return path.read_text(encoding="utf-8")
    if "{" in value and "}" in value:
        return value
    raise UserError(
        f"chat_template={value!r} is neither a file nor a jinja template.",
        "chat_template",
    )
