"""Keys, CORS, sizes, lost clients, a dead engine, a server that is leaving."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from serve_live import Live, engine_for, serving, write_model
from starlette.routing import Route

from pagedattn.async_engine import AsyncEngine
from pagedattn.serve.app import build_app
from pagedattn.serve.gate import OPEN_PATHS
from pagedattn.serve.settings import ServeArgs

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
LONG = {"prompt": "a long story", "max_tokens": 480, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[AsyncEngine]:
    engine = engine_for(model, max_num_seqs=4)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def shared(engine: AsyncEngine) -> Iterator[Live]:
    with serving(engine, ServeArgs(max_body_bytes=200_000)) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server; afterwards it must be idle, its pool whole."""
    yield shared
    shared.wait_idle()


@pytest.fixture(scope="module")
def locked(engine: AsyncEngine) -> Iterator[Live]:
    """A server that wants one of two keys, for the same engine."""
    with serving(engine, ServeArgs(api_key=["sesame", "clé"])) as live:
        yield live


# C101: keys.
def calls(app: Any) -> list[tuple[str, str]]:
    """(method, path) of every route, its parameters filled in."""
    found = []
    for route in walk(app.routes):
        assert isinstance(route, APIRoute | Route), route
        path = route.path.replace("{name:path}", "tiny")
        path = path.replace("{response_id}", "resp_none")
        assert "{" not in path
        found += [(method, path) for method in route.methods - {"HEAD", "OPTIONS"}]
    return found


def walk(routes: list[Any]) -> Iterator[Any]:
    """Every route, those of included routers too."""
    for route in routes:
        inner = getattr(getattr(route, "original_router", route), "routes", None)
        if inner:
            yield from walk(inner)
        else:
            yield route


def test_c101_every_route_but_the_open_ones_wants_a_key(locked: Live) -> None:
    app = build_app(locked.engine, ServeArgs(api_key=["sesame"]))
    seen = calls(app)
    assert {path for _, path in seen} >= {COMPLETIONS, CHAT, "/docs", "/load"}
    wrong = (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "sesame"},
        {"Authorization": "Basic sesame"},
        {"Authorization": "Bearer sesame2"},
        {"Authorization": "Bearer"},
        {"x-api-key": "wrong"},
    )
    for method, path in seen:
        for headers in wrong:
            reply = locked.http.request(method, path, headers=headers)
            if path in OPEN_PATHS:
                assert reply.status_code == 200, (method, path)
                continue
            assert reply.status_code == 401, (method, path, headers)
            anthropic = path.startswith("/v1/messages")
            kind = "authentication_error" if anthropic else "AuthenticationError"
            assert reply.json()["error"]["type"] == kind
    assert OPEN_PATHS == {"/", "/health", "/ping", "/version", "/metrics"}


@pytest.mark.parametrize(
    "path", ["/nowhere", "/v1", "//v1/models", "/v1/models/", "/HEALTH", "/health/x"]
)
def test_c101_unknown_paths_want_a_key_too(locked: Live, path: str) -> None:
    assert locked.http.get(locked.url + path).status_code == 401


def test_c101_the_key_opens(locked: Live) -> None:
    for value in (b"Bearer sesame", "Bearer clé".encode(), b"bearer sesame"):
        headers = {b"Authorization": value}
        assert locked.http.get("/v1/models", headers=headers).status_code == 200
    headers = {"x-api-key": "sesame"}
    assert locked.http.get("/v1/models", headers=headers).status_code == 200
    reply = locked.http.get("/nowhere", headers=headers)
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "NotFoundError"
    reply = locked.http.get(COMPLETIONS, headers=headers)
    assert reply.status_code == 405 and reply.json()["error"]["code"] == 405


def test_keys_come_from_flags_or_the_environment() -> None:
    environ = {"VLLM_API_KEY": "v", "PAGEDATTN_API_KEY": "p"}
    assert ServeArgs().keys({}) == []
    assert ServeArgs().keys(environ) == ["p", "v"]
    assert ServeArgs(api_key=["a"]).keys(environ) == ["a"]


# C91: CORS.
def test_c91_preflight_needs_no_key(locked: Live) -> None:
    origin = {"Origin": "http://page.example"}
    asked = {
        **origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    reply = locked.http.options(CHAT, headers=asked)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "*"
    allowed = reply.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    for reply in (
        locked.http.get("/v1/models", headers=origin),
        locked.http.post(CHAT, headers=origin, content=b"{}"),
    ):
        assert reply.status_code == 401
        assert reply.headers["access-control-allow-origin"] == "*"


def test_cors_origins_can_be_named(engine: AsyncEngine) -> None:
    settings = ServeArgs(allowed_origins=("http://good.example",))
    with serving(engine, settings) as live:
        for origin, allowed in (("http://good.example", True), ("http://x.y", False)):
            reply = live.http.get("/version", headers={"Origin": origin})
            named = reply.headers.get("access-control-allow-origin")
            assert (named == origin) is allowed


def test_failures_carry_cors_headers_and_an_id(live: Live) -> None:
    headers = {"Origin": "http://page.example", "X-Request-Id": "mine"}
    for body in ("{", "x" * 300_000):
        reply = live.post(COMPLETIONS, body, headers=headers)
        assert reply.status_code in (400, 413)
        assert reply.headers["access-control-allow-origin"] == "*"
        assert reply.headers["x-request-id"] == "mine"


# C104: sizes, and a loop that goes on.
def test_c104_large_bodies_are_refused(live: Live) -> None:
    body = json.dumps({"prompt": "x" * 200_000})
    reply = live.post(COMPLETIONS, body)
    assert reply.status_code == 413
    assert reply.json()["error"]["type"] == "RequestTooLargeError"

    def parts() -> Iterator[bytes]:  # no Content-Length
        for _ in range(300):
            yield b" " * 1000

    assert live.http.post(COMPLETIONS, content=parts()).status_code == 413


def test_c104_health_answers_while_a_long_text_is_tokenized(
    engine: AsyncEngine,
) -> None:
    text = " ".join(f"{i * 7919:x}" for i in range(60_000))
    with serving(engine, ServeArgs(max_body_bytes=1 << 25)) as live:
        done = threading.Event()

        def tokenize() -> None:
            live.post("/tokenize", {"prompt": text})
            done.set()

        thread = threading.Thread(target=tokenize)
        slowest, asked = 0.0, 0
        with httpx.Client(base_url=live.url) as other:
            other.get("/health")
            thread.start()
            while not done.is_set():
                start = time.monotonic()
                assert other.get("/health").status_code == 200
                slowest = max(slowest, time.monotonic() - start)
                asked += 1
                time.sleep(0.01)
        thread.join()
    assert asked > 10 and slowest < 2.0


# C88, C97: clients that leave.
def wait_running(live: Live) -> None:
    deadline = time.monotonic() + 10
    while not live.engine._engine.scheduler.running:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def raw_request(
    live: Live, body: dict[str, Any], path: str = COMPLETIONS
) -> socket.socket:
    """A bare connection that has sent a request and read nothing."""
    payload = json.dumps(body).encode()
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
    connection.sendall(head.encode() + payload)
    return connection


@pytest.mark.parametrize("n", [1, 3])
def test_c88_a_stream_left_after_its_first_chunk(live: Live, n: int) -> None:
    for path, body in (
        (COMPLETIONS, LONG),
        (CHAT, {"messages": HI, "max_tokens": 480}),
    ):
        body = {**body, "stream": True, "n": n, "temperature": 1, "ignore_eos": True}
        for _ in range(3):
            with live.http.stream("POST", path, json=body) as reply:
                next(reply.iter_bytes())
            started = time.monotonic()
            live.wait_idle(5)
            assert time.monotonic() - started < 2


def test_c88_whole_answers_nobody_waits_for(live: Live) -> None:
    for batch in (False, True):
        for _ in range(3):
            body = {**LONG, "prompt": [LONG["prompt"]] * 3} if batch else LONG
            connection = raw_request(live, body)
            wait_running(live)
            connection.close()
            live.wait_idle(5)


def test_c88_left_while_waiting_and_c97_gauges(live: Live) -> None:
    connections = [raw_request(live, LONG) for _ in range(12)]
    try:
        shown = 'vllm:num_requests_{}{{engine="0",model_name="tiny"}} {}.0'
        for line in (shown.format("running", 4), shown.format("waiting", 8)):
            deadline = time.monotonic() + 10
            while line not in live.http.get("/metrics").text:
                assert time.monotonic() < deadline
        assert live.http.get("/load").json()["server_load"] == 12
    finally:
        for connection in connections:
            connection.close()
    live.wait_idle(5)
    text = live.http.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="tiny"}} 0.0' in text
    assert live.http.get("/load").json() == {"server_load": 0}


def test_c88_fifty_lost_clients_leave_nothing(live: Live) -> None:
    for i in range(50):
        connection = raw_request(live, {**LONG, "stream": bool(i % 2)})
        if i % 5 == 0:
            wait_running(live)
        connection.close()
    live.wait_idle()
    assert live.complete(prompt="x", max_tokens=2)


def test_a_client_that_leaves_in_the_middle_of_its_body(live: Live) -> None:
    host, port = live.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\n{{"
        )
        connection.sendall(head.encode())
    assert live.complete(prompt="x", max_tokens=1)


# Failures of the engine.
@pytest.fixture
def mortal(model: Path) -> Iterator[Live]:
    """A server whose engine may be broken."""
    engine = engine_for(model)
    with serving(engine) as live:
        yield live
    engine.shutdown()


def test_a_failure_in_mid_stream_is_an_event(mortal: Live) -> None:
    runner = mortal.engine._engine.runner
    run, steps = runner.run, iter(range(100))

    def fails(plan: Any) -> Any:
        if next(steps) >= 3:
            raise RuntimeError("broken on purpose")
        return run(plan)

    runner.run = fails
    events = mortal.events(COMPLETIONS, {"prompt": "x", "max_tokens": 50})
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    error = json.loads(events[-2])["error"]
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    whole = mortal.post(COMPLETIONS, {"prompt": "x"})
    assert whole.status_code == 500 and whole.json()["error"]["code"] == 500
    runner.run = run
    assert mortal.complete(prompt="x", max_tokens=2)


def test_a_dead_engine_is_unhealthy_and_says_so(mortal: Live) -> None:
    def dies() -> Any:
        raise RuntimeError("dead on purpose")

    mortal.engine._engine.step = dies
    events = mortal.post(COMPLETIONS, {"prompt": "x", "stream": True})
    assert events.status_code == 503
    assert mortal.http.get("/health").status_code == 503
    assert mortal.http.get("/ping").status_code == 503
    reply = mortal.post(CHAT, {"messages": HI})
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "ServiceUnavailableError"
    assert mortal.http.get("/metrics").status_code == 200


def test_unforeseen_failures_are_500_in_shape(
    mortal: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slip(*_: Any) -> Any:
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr("pagedattn.serve.completions.sampling_values", slip)
    reply = mortal.post(COMPLETIONS, {"prompt": "x"}, headers={"Origin": "http://p"})
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in reply.text
    assert reply.headers["access-control-allow-origin"] == "*"


# C100: leaving, as far as it needs no process.
def test_c100_draining_refuses_new_work_and_finishes_old(mortal: Live) -> None:
    answers: list[list[str]] = []

    def old() -> None:
        answers.append(mortal.events(COMPLETIONS, {**LONG, "max_tokens": 200}))

    thread = threading.Thread(target=old)
    thread.start()
    wait_running(mortal)
    mortal.front.draining = True
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        reply = mortal.post(path, {"prompt": "x", "messages": HI})
        assert reply.status_code == 503 and reply.headers["retry-after"]
    assert mortal.http.get("/health").status_code == 503
    assert mortal.http.get("/metrics").status_code == 200
    asyncio.run(mortal.engine.drain(20))
    thread.join(20)
    assert answers[0][-1] == "[DONE]"
    last = json.loads(answers[0][-2])["choices"][0]
    assert last["finish_reason"] == "length"


def test_c100_what_does_not_finish_in_time_is_aborted(mortal: Live) -> None:
    answers: list[list[str]] = []

    def old() -> None:
        answers.append(mortal.events(COMPLETIONS, LONG))

    thread = threading.Thread(target=old)
    thread.start()
    wait_running(mortal)
    asyncio.run(mortal.engine.drain(0))
    thread.join(20)
    assert answers[0][-1] == "[DONE]"
    assert json.loads(answers[0][-2])["choices"][0]["finish_reason"] == "abort"


# What operators read.
def test_statistics_are_logged_while_there_is_something_to_say(
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("pagedattn.serve.server.STATS_EVERY", 0.02)
    caplog.set_level("INFO", "pagedattn.serve")
    with serving(engine) as live:
        for _ in range(20):  # a busy machine may look away for a whole answer
            live.complete(**LONG)
            if any("running 1" in record.message for record in caplog.records):
                break
        else:
            pytest.fail("no line said that a request was running")
        live.wait_idle()
        time.sleep(0.1)
        caplog.clear()
        time.sleep(0.1)
        assert not caplog.records
