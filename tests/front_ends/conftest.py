"""A real Open WebUI before the demo server, with a recording proxy in between.

Knows its environment variables and where `make front-ends` put it. It has a home and a
data folder of its own, and no way to the network.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from browser.conftest import free_port
from clients.conftest import Demo, tooled

from .recorder import Recorder, recording

__all__ = ["tooled"]  # a fixture

COMMAND = Path(__file__).parents[2] / "build/front-ends/open-webui/bin/open-webui"
STARTING = 180  # seconds: its database is made, and one core may be all there is


@dataclass(frozen=True, slots=True)
class OpenWebUI:
    """Its address, its first user's token, and what passed between it and us."""

    url: str
    token: str
    model: str
    recorder: Recorder

    def http(self) -> httpx.Client:
        """A client that is signed in."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)


@pytest.fixture(scope="session")
def open_webui(
    tooled: Demo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenWebUI]:
    """Started from nothing; its first user has signed up."""
    if not COMMAND.exists():
        pytest.skip("no Open WebUI: make front-ends installs it")
    folder, port = tmp_path_factory.mktemp("open-webui"), free_port()
    with recording(tooled.url) as recorder, (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [COMMAND, "serve", "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **_settings(folder, recorder.url, tooled)},
            cwd=folder,
            stdout=log,
            stderr=log,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process, folder / "log")
            started = OpenWebUI(url, _sign_up(url), tooled.model, recorder)
            _set_up(started)
            yield started
        finally:
            process.terminate()
            process.wait(30)


def _settings(folder: Path, server: str, demo: Demo) -> dict[str, str]:
    """Our server for chats, for embeddings, and as an Ollama; nothing from outside."""
    return {
        "HOME": str(folder),
        "DATA_DIR": str(folder / "data"),
        "WEBUI_SECRET_KEY": "0123456789abcdef0123456789abcdef",
        "OFFLINE_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "ANONYMIZED_TELEMETRY": "False",
        "ENABLE_VERSION_UPDATE_CHECK": "False",
        "ENABLE_FORWARD_USER_INFO_HEADERS": "True",
        "OPENAI_API_BASE_URLS": f"{server}/v1",
        "OPENAI_API_KEYS": demo.key,
        "OLLAMA_BASE_URLS": server,
        "RAG_EMBEDDING_ENGINE": "openai",
        "RAG_EMBEDDING_MODEL": demo.model,
        "RAG_OPENAI_API_BASE_URL": f"{server}/v1",
        "RAG_OPENAI_API_KEY": demo.key,
    }


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    pytest.fail(f"Open WebUI did not start:\n{log.read_text()[-3000:]}")


def _sign_up(url: str) -> str:
    who = {"name": "Ann", "email": "ann@example.com", "password": "Secret-12345"}
    reply = httpx.post(f"{url}/api/v1/auths/signup", json=who, timeout=60)
    assert reply.status_code == 200 and reply.json()["role"] == "admin", reply.text
    return reply.json()["token"]


def _set_up(started: OpenWebUI) -> None:
    """Short answers, the same every time; and tools as text, for the 36 that the page
    sends otherwise are longer than the model's window here."""
    params = {"function_calling": "legacy", "temperature": 0, "max_tokens": 60}
    card = {"id": started.model, "base_model_id": None, "name": started.model}
    card |= {"params": params, "meta": {}, "access_grants": [], "is_active": True}
    with started.http() as client:
        reply = client.post("/api/v1/models/create", json=card)
    assert reply.status_code == 200, reply.text
