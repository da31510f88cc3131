"""Spans as a collector receives them: OTLP over HTTP, by the SDK's own exporter."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from serve_live import engine_for, serving, write_model

from pagedattn.serve.settings import ServeArgs


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An address that takes spans, and the spans that it took."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                raw = gzip.decompress(raw)
            for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        finally:
            server.shutdown()
            thread.join()


def attributes(span: Any) -> dict[str, Any]:
    """A span's attributes as plain values."""
    return {
        a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes
    }


def test_a_request_is_a_span(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
    engine = engine_for(write_model(tmp_path / "tiny"))
    with collector() as (url, spans):
        with serving(engine, ServeArgs(otlp_traces_endpoint=url)) as live:
            live.complete(prompt="four", max_tokens=3, ignore_eos=True)
            deadline = time.monotonic() + 20
            while not spans and time.monotonic() < deadline:
                time.sleep(0.02)
    engine.shutdown()
    [span] = spans
    found = attributes(span)
    assert span.name == "llm_request"
    assert found["gen_ai.usage.prompt_tokens"] == 4
    assert found["gen_ai.usage.completion_tokens"] == 3
    assert found["gen_ai.request.max_tokens"] == 3
    assert found["gen_ai.response.model"] == "tiny"
    first, whole = (
        found[f"gen_ai.latency.{x}"] for x in ("time_to_first_token", "e2e")
    )
    assert 0 < first <= whole
    assert span.end_time_unix_nano > span.start_time_unix_nano
