"""What SECURITY.md promises, tried: keys on every way to a path, TLS, limits, and
readers and writers that are slow or half gone."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_live import Live, engine_for, serving, write_model

from pagedattn.async_engine import AsyncEngine
from pagedattn.errors import UserError
from pagedattn.serve.gate import OPEN_PATHS, routed
from pagedattn.serve.server import MAX_HEAD
from pagedattn.serve.settings import ServeArgs

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    engine = engine_for(write_model(tmp_path_factory.mktemp("tiny")), max_num_seqs=4)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def shared(engine: AsyncEngine) -> Iterator[Live]:
    with serving(engine) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server; afterwards it must be idle, its pool whole."""
    yield shared
    shared.wait_idle()


@pytest.fixture(scope="module")
def locked(engine: AsyncEngine) -> Iterator[Live]:
    settings = ServeArgs(api_key=["one", "two"], root_path="/api", enable_dev_mode=True)
    with serving(engine, settings) as live:
        yield live


def raw(live: Live, head: str, body: bytes = b"") -> socket.socket:
    """A connection that has sent just this."""
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(head.encode("latin-1") + body)
    return connection


def status(live: Live, method: str, path: str) -> int:
    """The status of a request whose path no client library has tidied."""
    with raw(live, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n") as connection:
        return int(connection.recv(100).split()[1])


# C101: no way round the key.
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "//v1/models", "/v1//models", "/v1/models/", "/./v1/models"),
        *("/v1%2fmodels", "/%76%31/models", "/V1/models", "/health/../v1/models"),
        *("/health/../../v1/models", "/v1/models?/health", "/v1/models#/health"),
        *("/api/v1/models", "/api//v1/models", "/api/api/v1/models", "/live/frames"),
        *("/health%2f..%2fv1/models", "/health;/v1/models", "/health%00", "/api"),
        *("/sleep", "/api/sleep", "/is_paused", "/openapi.json", "/docs", "/redoc"),
    ],
)
def test_c101_paths_in_disguise(locked: Live, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "BREW"):
        assert status(locked, method, path) == 401, method


def test_c101_open_paths_are_open_with_and_without_the_prefix(locked: Live) -> None:
    for path in OPEN_PATHS:
        assert status(locked, "GET", path) == 200
        assert status(locked, "GET", "/api" + path) == 200


def test_c101_every_key_opens_and_none_else(locked: Live) -> None:
    for key, opens in (("one", 200), ("two", 200), ("onetwo", 401), ("", 401)):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        assert locked.http.get("/v1/models", headers=headers).status_code == opens


def test_the_routed_path_is_what_starlette_makes_of_it() -> None:
    assert routed("/api/health", "/api") == "/health"
    assert routed("/health", "/api") == "/health"
    assert routed("/apihealth", "/api") == "/apihealth"
    assert routed("/api", "/api") == "/api"
    assert routed("/health", "") == "/health"


# TLS.
@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return key, certificate


def test_tls(engine: AsyncEngine, certificate: tuple[Path, Path]) -> None:
    key, chain = certificate
    tls = ServeArgs(ssl_keyfile=str(key), ssl_certfile=str(chain))
    with serving(engine, tls) as live:
        url = live.url.replace("http:", "https:")
        context = ssl.create_default_context(cafile=str(chain))
        assert httpx.get(url + "/health", verify=context).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")  # nobody we know signed it
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(live.url + "/health")


def test_tls_that_wants_to_know_the_client(
    engine: AsyncEngine, certificate: tuple[Path, Path]
) -> None:
    key, chain = map(str, certificate)
    tls = ServeArgs(
        ssl_keyfile=key, ssl_certfile=chain, ssl_ca_certs=chain, ssl_cert_reqs=2
    )
    with serving(engine, tls) as live:
        url = live.url.replace("http:", "https:")
        context = ssl.create_default_context(cafile=chain)
        with pytest.raises(httpx.HTTPError):
            httpx.get(url + "/health", verify=context)
        context.load_cert_chain(chain, key)
        assert httpx.get(url + "/health", verify=context).status_code == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"ssl_keyfile": __file__},
        {"ssl_certfile": __file__},
        {"ssl_certfile": "/nowhere", "ssl_keyfile": __file__},
        {"ssl_cert_reqs": 1},
        {"ssl_cert_reqs": 3},
    ],
)
def test_tls_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="ssl_"):
        ServeArgs(**settings)


# C104: sizes.
def test_c104_headers_have_a_limit(live: Live) -> None:
    head = "GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + "x" * (2 * MAX_HEAD)
    with raw(live, head + "\r\n\r\n") as connection:
        answer = connection.recv(100)
    assert b" 400 " in answer or b" 431 " in answer or answer == b""
    assert live.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "more",
    [
        {"n": 1_000_000, "temperature": 1},
        {"best_of": 100_000},
        {"prompt": ["x"] * 10_000, "n": 128, "temperature": 1},
        {"prompt": ["x"] * 1_000, "n": 128, "temperature": 1},
        {"stop": ["x"] * 100_000},
        {"stop": ["x" * 1_000_000]},
        {"bad_words": ["x"] * 1_000_000},
        {"logprobs": 1_000_000},
        {"prompt_logprobs": 1_000_000},
        {"logit_bias": {str(i): 1 for i in range(100_000)}},
        {"stop_token_ids": [2**70]},
        {"seed": 2**70},
    ],
)
def test_c104_huge_wishes_are_refused_quickly(live: Live, more: dict[str, Any]) -> None:
    started = time.monotonic()
    reply = live.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2, **more})
    assert reply.status_code == 400, reply.text[:300]
    assert len(reply.content) < 4_000
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("depth", [500, 100_000])
def test_c104_deep_json_is_refused_or_ignored(live: Live, depth: int) -> None:
    deep = '{"prompt": "x", "max_tokens": 1, "deep": ' + "[" * depth + "]" * depth + "}"
    assert live.post(COMPLETIONS, deep).status_code in (200, 400)


# C108: what a text model is shown.
@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:{port}/x.png", "http://169.254.169.254/latest/meta-data"),
        *("file:///etc/passwd", "http://ok.example\\@127.0.0.1:{port}/", "data:,x"),
    ],
)
@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url"])
def test_c108_media_are_refused_and_never_fetched(
    live: Live, url: str, kind: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.05)
        url = url.format(port=trap.getsockname()[1])
        part = {"type": kind, kind: {"url": url}}
        content = [{"type": "text", "text": "What is this?"}, part]
        reply = live.post(CHAT, {"messages": [{"role": "user", "content": content}]})
        assert reply.status_code == 400
        assert kind in reply.json()["error"]["message"]
        with pytest.raises(TimeoutError):
            trap.accept()


# No answer tells of files or code.
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, "{"),
        (COMPLETIONS, {"prompt": {"x": 1}}),
        (COMPLETIONS, {"prompt": "x", "temperature": "hot"}),
        (CHAT, {"messages": [{"role": "foo", "content": "x"}]}),
        (CHAT, {"messages": 7}),
        (CHAT, {"messages": HI, "chat_template": "{{ 1 / 0 }}"}),
        ("/tokenize", {"prompt": 1}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/nowhere", {}),
    ],
)
def test_no_trace_and_no_path_in_any_answer(live: Live, path: str, body: Any) -> None:
    reply = live.post(path, body)
    assert 400 <= reply.status_code < 500
    for word in ("Traceback", ".py", "site-packages", "/home", "/root", "pagedattn/"):
        assert word not in reply.text


# Clients that are slow, or half there.
def test_a_slow_reader_holds_up_nobody(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    payload = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}"
    with raw(live, head + "\r\n\r\n", payload) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        assert slow.recv(10)
        started = time.monotonic()
        assert live.complete(prompt="y", max_tokens=4)
        assert time.monotonic() - started < 10


def test_half_a_request_holds_up_nobody(live: Live) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    halves = [raw(live, head, b'{"prompt":') for _ in range(20)]
    halves += [raw(live, "POST /v1/comp") for _ in range(20)]
    assert live.complete(prompt="y", max_tokens=4)
    for half in halves:
        half.close()


def test_a_client_that_closed_its_writing_side_still_gets_its_answer_or_none(
    live: Live,
) -> None:
    payload = b'{"prompt": "x", "max_tokens": 3}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}"
    with raw(live, head + "\r\n\r\n", payload) as half:
        half.shutdown(socket.SHUT_WR)
        answer = half.recv(100)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 200")


# C104: bodies of any shape.
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner)
    ),
    max_leaves=6,
)
FIELDS = (
    *("prompt", "messages", "model", "n", "temperature", "top_p", "stop", "logprobs"),
    *("stream", "stream_options", "logit_bias", "seed", "echo", "suffix", "tools"),
    *("response_format", "top_logprobs", "min_tokens", "bad_words", "cache_salt"),
    *("chat_template_kwargs", "documents", "tokens", "add_special_tokens"),
)


@given(
    path=st.sampled_from((COMPLETIONS, CHAT, "/tokenize", "/detokenize")),
    fields=st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=4),
    proper=st.booleans(),
)
@settings(max_examples=150)
def test_random_bodies_are_answered_never_500(
    shared: Live, path: str, fields: dict[str, Any], proper: bool
) -> None:
    base = {"prompt": "x", "messages": HI, "tokens": [1], "max_tokens": 2}
    needed = {COMPLETIONS: "prompt", CHAT: "messages", "/tokenize": "prompt"}
    name = needed.get(path, "tokens")
    body = {name: base[name], "max_tokens": 2, **fields} if proper else fields
    reply = shared.post(path, json.dumps(body))
    assert reply.status_code < 500, (reply.status_code, body, reply.text)


# Kill: the engine's thread ends, and so does the process.
@pytest.mark.timeout(200)  # loads a server beside whatever else runs
def test_a_dead_engine_ends_the_process(tmp_path: Path) -> None:
    """Health says 503, whoever waits hears of it, the exit code says so as well."""
    script = tmp_path / "dies.py"
    script.write_text(
        "import sys\n"
        "from pagedattn.engine import Engine\n"
        "from pagedattn.serve.cli import main\n"
        "step, left = Engine.step, [20]\n"
        "def dies(self):\n"
        "    left[0] -= 1\n"
        "    if left[0] < 0:\n"
        "        raise RuntimeError('killed on purpose')\n"
        "    return step(self)\n"
        "Engine.step = dies\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    model = write_model(tmp_path / "tiny")
    flags = ("--port", "0", "--num-gpu-blocks-override", "65")
    server = subprocess.Popen(
        [sys.executable, str(script), "serve", str(model), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = next(x.split()[-1] for x in server.stdout if "address" in x)
        body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.Client(base_url=url, timeout=60) as http:
            lines = []
            with http.stream("POST", COMPLETIONS, json=body) as reply:
                lines += reply.iter_lines()
            told = [x for x in lines if '"error"' in x]
            assert len(told) == 1 and "ServiceUnavailableError" in told[0]
            try:
                assert http.get("/health").status_code == 503
            except httpx.HTTPError:
                pass  # it has gone already
        assert server.wait(90) == 1
    finally:
        server.kill()
        server.wait()
