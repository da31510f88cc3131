"""What operators read: JSON lines, requests as they come, spans."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from serve_live import Live, engine_for, serving, write_model

from pagedattn.serve.logs import JsonLines
from pagedattn.serve.settings import ServeArgs
from pagedattn.serve.spans import Spans


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine = engine_for(write_model(tmp_path_factory.mktemp("tiny")))
    with serving(engine, ServeArgs(enable_log_requests=True)) as live:
        yield live
    engine.shutdown()


def record(name: str, message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, "", 1, message, args, None)


def test_a_line_is_one_json_object() -> None:
    line = JsonLines().format(record("pagedattn", "two\nlines of %s", "text"))
    assert "\n" not in line
    told = json.loads(line)
    assert told["message"] == "two\nlines of text"
    assert (told["level"], told["logger"]) == ("INFO", "pagedattn")
    assert told["time"].endswith("+00:00")


def test_access_lines_come_in_parts() -> None:
    form = '%s - "%s %s HTTP/%s" %d'
    args = ("127.0.0.1:5", "GET", "/health", "1.1", 200)
    told = json.loads(JsonLines().format(record("uvicorn.access", form, *args)))
    assert (told["method"], told["path"], told["status"]) == ("GET", "/health", 200)


def test_tracebacks_stay_on_the_line() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        one = record("pagedattn", "failed")
        one.exc_info = (ValueError, error, error.__traceback__)
    told = JsonLines().format(one)
    assert "\n" not in told and "ValueError: no" in json.loads(told)["exception"]


def test_requests_are_logged_when_asked(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pagedattn.serve")
    live.complete(prompt="xyz", max_tokens=2, request_id="named")
    lines = [r.getMessage() for r in caplog.records if "Received" in r.getMessage()]
    assert len(lines) == 1
    assert "named" in lines[0] and "[3]" in lines[0] and "max_tokens=2" in lines[0]
    assert "xyz" not in lines[0]


class Span:
    """What OpenTelemetry's tracer would give."""

    ended = False

    def end(self) -> None:
        self.ended = True


class Tracer:
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, object], Span]] = []

    def start_span(
        self, name: str, start_time: int, attributes: dict[str, object]
    ) -> Span:
        """A span, kept."""
        self.seen.append((name, attributes, span := Span()))
        return span


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_for_each_request(
    live: Live, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    tracer = Tracer()
    monkeypatch.setattr(live.front, "spans", Spans(tracer))
    body = {"prompt": "xyz", "max_tokens": 4, "ignore_eos": True, "request_id": "me"}
    if stream:
        live.chunks("/v1/completions", body)
    else:
        live.complete(**body)
    [(name, told, span)] = tracer.seen
    assert name == "llm_request" and span.ended
    assert told["gen_ai.request.id"] == "cmpl-me"
    assert told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.request.max_tokens"] == 4
    assert told["gen_ai.usage.prompt_tokens"] == 3
    assert told["gen_ai.usage.completion_tokens"] == 4
    queue, first = (
        told[f"gen_ai.latency.{k}"] for k in ("time_in_queue", "time_to_first_token")
    )
    assert 0 <= queue <= first <= told["gen_ai.latency.e2e"]
