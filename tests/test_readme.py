"""The README's Python runs as it stands there: scripts, `python -c`, and clients.

Knows Markdown fences and the demo model. An example that talks to port 8000 talks to
a server started for it on a free port.
"""

import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PORT = "8000"


def commands(block: str) -> Iterator[str]:
    """The code of each `python -c` in a block of shell."""
    words = shlex.split(block.replace("\\\n", " "), comments=True)
    for name, flag, code in zip(words, words[1:], words[2:], strict=False):
        if re.fullmatch(r"(.*/)?python3?", name) and flag == "-c":
            yield code


def examples(text: str) -> Iterator[str]:
    """Every piece of Python in a Markdown text, in order."""
    for language, block in FENCE.findall(text):
        if language in ("python", "py"):
            yield block
        elif language in ("sh", "bash", "shell", "console"):
            yield from commands(block)


def run(code: str, cwd: Path) -> None:
    """Run `code` in a fresh interpreter; what it prints on failure is the message."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def port(demo_gguf: Path) -> Iterator[str]:
    """The port of a server with the demo model, ended as an operator would end it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "pagedattn.serve", "--port", port]
    server = subprocess.Popen(command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        wait_until_ready(server, port)
        yield port
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0


def wait_until_ready(server: subprocess.Popen[bytes], port: str) -> None:
    """Return when /health answers; fail if the server ends or takes two minutes."""
    for _ in range(240):
        assert server.poll() is None, "the server ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail("the server took more than two minutes")


EXAMPLES = list(examples(README.read_text("utf-8")))


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_readme_example(
    code: str, demo_gguf: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if PORT in code:
        code = code.replace(PORT, request.getfixturevalue("port"))
    run(code, tmp_path)


def test_examples_are_found() -> None:
    text = (
        "```python\nprint(1)\n```\nwords\n```\npython -c 'no language'\n```\n"
        "```console\n$ .venv/bin/python -c \"print('two')\"  # a comment\n"
        "$ make serve\n$ python \\\n  -c 'x = 3\nprint(x)'\n```\n"
    )
    assert list(examples(text)) == ["print(1)\n", "print('two')", "x = 3\nprint(x)"]
