"""A real JupyterLab in a real browser, as a reader has them.

Knows Playwright and Jupyter's commands; the book is copied, for JupyterLab saves what
it runs. Needs Chromium, Debian's or Playwright's own. Screenshots are kept in
build/screenshots.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
STARTING, RUNNING = 60, 180  # seconds that slow machines may take


@dataclass
class Lab:
    """A running JupyterLab and a page of a browser to look at it with."""

    address: str
    page: Any

    def open(self, notebook: str) -> None:
        """Open a chapter in a fresh workspace and wait for its kernel."""
        self.page.goto(f"{self.address}/lab/tree/book/{notebook}?reset")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=STARTING * 1e3)
        self.page.wait_for_function(
            f"({KERNEL})()?.status === 'idle'", timeout=STARTING * 1e3
        )

    def run_all(self) -> None:
        """Run every cell; AssertionError if one fails."""
        assert self.page.evaluate(
            "window.jupyterapp.commands.execute('notebook:run-all-cells')"
        )

    def wait_until_done(self, seconds: float) -> None:
        """Wait until every cell has run and the kernel has nothing to do."""
        self.page.wait_for_function(
            f"({KERNEL})()?.status === 'idle' && ({LAST})().executionCount > 0",
            timeout=seconds * 1e3,
        )

    def errors(self) -> list[str]:
        """What cells have failed with, or warned of."""
        kinds = ("stderr", "error")
        shown = (f"[data-mime-type='application/vnd.jupyter.{k}']" for k in kinds)
        return self.page.locator(", ".join(shown)).all_inner_texts()

    def see(self, name: str) -> None:
        """Keep a screenshot."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png")

    def close(self) -> None:
        """End the open chapter's kernel."""
        self.page.evaluate(
            "window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"
        )


KERNEL = "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
LAST = (
    "() => window.jupyterapp.shell.currentWidget.content.widgets"
    ".findLast((cell) => cell.model.type === 'code').model"
)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def chromium() -> str | None:
    """Debian's Chromium or Google's Chrome; None for the browser Playwright brings."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@pytest.fixture(scope="session")
def page() -> Iterator[Any]:
    """A page of a headless browser."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(
                executable_path=chromium(), args=["--no-sandbox"]
            )
        except playwright.Error as error:
            pytest.skip(f"no browser: {error.message.splitlines()[0]}")
        yield browser.new_page(viewport={"width": 1300, "height": 1000})
        browser.close()


@pytest.fixture(scope="session")
def lab(page: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a copy of the book, asking for no password and no news."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "book", home / "book", ignore=shutil.ignore_patterns("src"))
    tracker = home / ".settings/@jupyterlab/notebook-extension"
    tracker.mkdir(parents=True)  # cells that are out of sight are there as well
    (tracker / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    address = f"http://127.0.0.1:{(port := free_port())}"
    folders = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
    environment = {
        **os.environ,
        **{f"JUPYTER_{name}": str(home / f".{name.lower()}") for name in folders},
        "JUPYTERLAB_SETTINGS_DIR": str(home / ".settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / ".workspaces"),
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *(f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="),
        *("--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={home}"),
        "--LabApp.extension_manager=readonly",
    ]
    with open(home / "log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(lambda: answers(f"{address}/api"), (home / "log").read_text)
        yield Lab(address, page)
    finally:
        server.terminate()
        server.wait(30)


def answers(address: str) -> bool:
    """Whether a server is there."""
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True


def wait_for(done: Callable[[], bool], log: Callable[[], str]) -> None:
    """Wait until `done`; fail with the server's log if that takes too long."""
    until = time.monotonic() + STARTING
    while not done():
        assert time.monotonic() < until, log()
        time.sleep(0.2)
