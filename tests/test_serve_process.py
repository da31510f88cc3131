"""The server as a process: how it starts, what it says, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from serve_live import write_model

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}


class Process:
    """`python -m pagedattn.serve` on a free port; its lines as they come."""

    def __init__(self, *flags: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "pagedattn.serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._came: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self.wait_for(r"address +(http://\S+)")

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self._came.put(line.rstrip())
        self._came.put(None)

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """The first group of the first line to come that matches."""
        deadline = time.monotonic() + seconds
        while True:
            line = self._came.get(timeout=max(deadline - time.monotonic(), 0.01))
            assert line is not None, "\n".join(self.lines)
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found[1] if found.groups() else line

    def client(self) -> httpx.Client:
        """A client, once the server answers."""
        deadline = time.monotonic() + 20
        while True:
            try:
                httpx.get(self.url + "/health")
                return httpx.Client(base_url=self.url, timeout=60)
            except httpx.ConnectError:
                assert time.monotonic() < deadline
                time.sleep(0.02)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(model: Path) -> Iterator[Any]:
    """Start servers with further flags; none outlives the test."""
    processes: list[Process] = []

    def begin(*flags: str) -> Process:
        pool = ("--num-gpu-blocks-override", "65", "--served-model-name", "tiny")
        processes.append(Process(str(model), *pool, *flags))
        return processes[-1]

    yield begin
    for process in processes:
        process.child.kill()
        process.child.wait()


def stream_in_thread(client: httpx.Client, began: threading.Event) -> list[str]:
    """The lines of a long stream, filled in as they come."""
    lines: list[str] = []

    def read() -> None:
        with client.stream("POST", COMPLETIONS, json=LONG) as reply:
            for line in reply.iter_lines():
                lines.append(line)
                began.set()

    threading.Thread(target=read, daemon=True).start()
    return lines


def test_banner_then_answers_then_sigterm_drains_and_exits_0(start: Any) -> None:
    process = start("--shutdown-timeout", "30")
    with process.client() as client:
        text = "\n".join(process.lines)
        for word in ("tiny", "float32", "linear", "64 blocks of 16 tokens, 1024"):
            assert word in text, text
        assert "2.0 requests at full length" in text
        curl = process.wait_for("curl (.*)")
        assert process.url in curl
        body = re.search(r"-d '(.*)'", curl)
        assert body is not None
        asked = json.loads(body[1]) | {"max_tokens": 2}
        assert client.post("/v1/chat/completions", json=asked).status_code == 200
        began = threading.Event()
        lines = stream_in_thread(client, began)
        assert began.wait(20)
        process.child.send_signal(signal.SIGTERM)
        process.wait_for("SIGTERM")
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 503
        assert process.child.wait(30) == 0
    assert "data: [DONE]" in lines
    ends = [x for x in lines if '"finish_reason":"length"' in x]
    assert len(ends) == 1


@pytest.mark.parametrize("second", [False, True])
def test_a_stream_that_may_not_finish_gets_an_end(start: Any, second: bool) -> None:
    """With timeout 0, or at a second signal, running requests end as aborted."""
    process = start("--shutdown-timeout", "60" if second else "0")
    with process.client() as client:
        began = threading.Event()
        lines = stream_in_thread(client, began)
        assert began.wait(20)
        process.child.send_signal(signal.SIGINT)
        if second:
            process.wait_for("SIGINT")
            process.child.send_signal(signal.SIGTERM)
        assert process.child.wait(20) == 0
    assert "data: [DONE]" in lines
    assert any('"finish_reason":"abort"' in line for line in lines)


def test_an_address_in_use_is_one_line_before_anything_is_loaded(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-X", "importtime", "-m", "pagedattn.serve"]
        done = subprocess.run(
            [*command, str(model), "--port", port], capture_output=True, text=True
        )
    assert done.returncode == 2 and done.stdout == ""
    said = [x for x in done.stderr.splitlines() if not x.startswith("import time:")]
    assert len(said) == 1 and said[0].startswith("pagedattn: error: ")
    assert f"127.0.0.1:{port}" in said[0] and "in use" in said[0]
    assert "| torch" not in done.stderr
