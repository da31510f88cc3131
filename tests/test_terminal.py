"""`pagedattn chat` and `complete` against a live server: pipes, a terminal, Ctrl-C."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from serve_live import Live, engine_for, serving, write_model

from pagedattn.serve.cli import main
from pagedattn.serve.settings import ServeArgs
from pagedattn.serve.terminal import written

KEY = "sesame"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_model(tmp_path_factory.mktemp("tiny"))
    greedy = {"temperature": 0.0, "max_new_tokens": 12}
    engine = engine_for(folder, override_generation_config=greedy)
    with serving(engine, ServeArgs(api_key=[KEY])) as live:
        live.http.headers["Authorization"] = f"Bearer {KEY}"
        yield live
    engine.shutdown()


def flags(live: Live, *more: str) -> list[str]:
    return ["--url", live.url + "/v1", "--api-key", KEY, *more]


def said(live: Live, messages: list[dict]) -> str:
    return live.chat(messages=messages)["choices"][0]["message"]["content"]


def test_a_quick_chat(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *flags(live, "-q", "Hi")]) == 0
    assert capsys.readouterr().out == said(live, HI) + "\n"
    system = {"role": "system", "content": "Be brief"}
    assert main(["chat", *flags(live, "-q", "Hi", "--system-prompt", "Be brief")]) == 0
    assert capsys.readouterr().out == said(live, [system, *HI]) + "\n"


def test_a_chat_remembers(
    live: Live,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nmore\n"))
    assert main(["chat", *flags(live, "--model-name", "alias")]) == 0
    first = said(live, HI)
    turns = [*HI, {"role": "assistant", "content": first}]
    second = said(live, [*turns, {"role": "user", "content": "more"}])
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_completing(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", *flags(live, "-q", "once", "--max-tokens", "5")]) == 0
    right = live.complete(prompt="once", max_tokens=5)["choices"][0]["text"]
    assert capsys.readouterr().out == right + "\n"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--api-key", "wrong"], "key"),
        (["--model-name", "other"], "other"),
        (["--url", "http://127.0.0.1:9/v1"], "no server"),
        (["--url", "nonsense"], "no server"),
    ],
)
def test_mistakes_are_one_line(
    live: Live, more: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *flags(live, "-q", "Hi", *more)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("pagedattn: error: ") and told.count("\n") == 1
    assert word in told


def test_ctrl_c_stops_an_answer_and_keeps_what_there_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    closed = []

    def pieces() -> Iterator[str]:
        try:
            yield "one "
            yield "two"
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    assert written(pieces()) == "one two" and closed
    assert capsys.readouterr().out == "one two …\n"


def test_ctrl_c_at_a_terminal(live: Live) -> None:
    """The answer ends, the session goes on; Ctrl-D ends that, with exit code 0."""
    ours, theirs = pty.openpty()
    code = "import sys; from pagedattn.serve.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "complete",
        *flags(live, "--max-tokens", "400"),
    ]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        seen = _until(ours, b"> ")
        os.write(ours, b"go on\n")
        seen = _until(ours, b"go on")
        deadline = time.monotonic() + 30
        while not live.front.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        seen = _until(ours, b"> ")
        assert "…".encode() in seen
        live.wait_idle()
        os.write(ours, b"\x04")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _until(terminal: int, mark: bytes, seconds: float = 60) -> bytes:
    """What a terminal shows, until `mark` is part of it."""
    os.set_blocking(terminal, False)
    seen, deadline = b"", time.monotonic() + seconds
    while mark not in seen:
        assert time.monotonic() < deadline, seen
        try:
            seen += os.read(terminal, 4096)
        except BlockingIOError:
            time.sleep(0.02)
    return seen
