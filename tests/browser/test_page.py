"""The page at `/` in a real browser: a chat, the map beside it, time travel."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import SCREENSHOTS

KEY = "sesame"
SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "200")


@pytest.fixture(scope="module")
def address(demo_gguf: Path) -> Iterator[str]:
    """A server that wants a key."""
    command = [sys.executable, "-m", "pagedattn.serve", str(demo_gguf), "--port", "0"]
    server = subprocess.Popen(
        [*command, *SMALL, "--api-key", KEY], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    for line in server.stdout:
        if found := re.search(r"address +(http://\S+)", line):
            yield found[1]
            break
    server.terminate()
    assert server.wait(60) == 0


# Frames whose books differ from what the page had made of the events up to them.
REPLAYED = """() => film.filter((f, i) => {
  if (!i || !f.books) return false;
  const show = (s) => JSON.stringify([[...s.waiting.keys()], [...s.cached].sort(),
    [...s.running].map(([n, r]) => [n, r.prompt, r.computed, r.rows])]);
  const followed = follow(replay(i - 1), { ...f, books: undefined });
  return show(followed) !== show(replay(i));
}).map((f) => f.step)"""


def travel_to_a_plan(tab: Any, expect: Any) -> None:
    """Back to a step that had a plan: a short answer may be over before the page has
    looked once."""
    expect(tab.locator("#send")).to_have_text("Send", timeout=60_000)
    tab.wait_for_timeout(1_000)  # four looks, so that every frame has come
    tab.focus("#back")
    for _ in range(20):
        if tab.evaluate("film[shown].plan.length"):
            return
        tab.keyboard.press("Enter")
    pytest.fail("none of the last steps had a plan")


@pytest.mark.parametrize(
    ("name", "width", "height", "scheme"),
    [
        ("wide", 1300, 900, "light"),
        ("dark", 1300, 900, "dark"),
        ("phone", 390, 844, "light"),
    ],
)
def test_chat_beside_the_engine(
    page: Any, address: str, name: str, width: int, height: int, scheme: str
) -> None:
    """By keyboard alone: give the key, ask, see the answer and the blocks, go back."""
    expect = pytest.importorskip("playwright.sync_api").expect
    tab = page.context.browser.new_page(
        viewport={"width": width, "height": height}, color_scheme=scheme
    )
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda m: problems.append(m.text) if "Policy" in m.text else None)
    tab.goto(address)
    tab.wait_for_selector("dialog[open]")
    tab.keyboard.type(KEY)
    tab.keyboard.press("Enter")
    expect(tab.locator("#model")).not_to_be_empty()
    tab.focus("#text")
    tab.keyboard.type("What is the capital of France?")
    tab.keyboard.press("Enter")
    expect(tab.locator("#talk .assistant")).to_contain_text(" ", timeout=60_000)
    travel_to_a_plan(tab, expect)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    tab.screenshot(path=SCREENSHOTS / f"page-{name}.png", full_page=True)
    assert "held" in tab.inner_text("#legend")
    wide = tab.evaluate("document.documentElement.scrollWidth")
    assert wide <= width
    assert tab.evaluate(REPLAYED) == []
    step = int(tab.inner_text("#step").replace(",", ""))
    tab.focus("#back")
    tab.keyboard.press("Enter")
    assert int(tab.inner_text("#step").replace(",", "")) <= step
    assert tab.get_attribute("#live", "aria-pressed") == "false"
    tab.keyboard.press("Escape")
    expect(tab.locator("#send")).to_have_text("Send")
    tab.close()
    assert not problems
