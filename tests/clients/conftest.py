"""The demo model behind `pagedattn serve`, one process for all clients that want no
more; one with tools and one that reads thoughts for those that do.

Knows the command line and the address; the clients know nothing else either. The key
is asked for, since every client has a way of its own to send it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

KEY, MODEL = "sesame", "SmolLM2-135M-Instruct"
FLAGS = (
    *("--port", "0", "--max-model-len", "2048", "--num-gpu-blocks-override", "800"),
    *("--served-model-name", MODEL, "--api-key", KEY),
)
TEMPLATE = Path(__file__).parents[2] / "pagedattn/serve/templates/chatml_tools.jinja"
TOOLS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--chat-template", str(TEMPLATE)),
)
# The demo model has no thoughts: to this parser all that it says is one.
THOUGHTS = ("--reasoning-parser", "deepseek_r1")
# Clients that ask the network about themselves at import don't have to here.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("LANGSMITH_TRACING", "false")


@dataclass(frozen=True, slots=True)
class Demo:
    """The address of a running server, and what it wants to hear."""

    url: str
    key: str = KEY
    model: str = MODEL

    @property
    def v1(self) -> str:
        """What OpenAI's clients call the base URL."""
        return f"{self.url}/v1"

    def http(self, **headers: str) -> httpx.Client:
        """A plain client that sends the key."""
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)


def served(model: Path, log: Path, *more: str) -> Iterator[Demo]:
    """The server; it must end by itself, with exit code 0, when it is told to."""
    command = [sys.executable, "-m", "pagedattn.serve", str(model), *FLAGS, *more]
    with log.open("w") as file:
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True
        )
    try:
        assert server.stdout is not None
        lines = []
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"address +(http://\S+)", line):
                yield Demo(found[1])
                break
        else:
            pytest.fail("".join(lines) + log.read_text())
        server.terminate()
        assert server.wait(60) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()
        assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="session")
def demo(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """As `make serve` starts it."""
    yield from served(demo_gguf, tmp_path_factory.mktemp("demo") / "log")


@pytest.fixture(scope="session")
def tooled(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """With tools: a template that has them, and a parser."""
    yield from served(demo_gguf, tmp_path_factory.mktemp("tooled") / "log", *TOOLS)


@pytest.fixture(scope="session")
def musing(demo_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """All whose answers are thoughts."""
    yield from served(demo_gguf, tmp_path_factory.mktemp("musing") / "log", *THOUGHTS)
