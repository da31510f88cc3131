"""The book in JupyterLab, as a reader meets it: run all, play, click, move a slider."""

import re
from dataclasses import dataclass

import pytest

from browser.conftest import RUNNING, Lab


@dataclass(frozen=True)
class Slider:
    """A widget of a chapter: the slider to move."""

    notebook: str
    slider: str


SLIDERS = [
    Slider("01_cost", "batch"),
    Slider("03_blocks", "block size"),
    Slider("05_scheduler", "budget"),
    Slider("06_attention", "step"),
]


def test_trace_player(lab: Lab) -> None:
    page = lab.page
    lab.open("00_map.ipynb")
    lab.run_all()
    player = page.locator(".pagedattn-player").first
    player.locator("svg").wait_for(timeout=RUNNING * 1e3)
    assert not lab.errors()

    # Scrubbing goes to an event; the title says which.
    scrub = player.locator("input[type=range]")
    last = int(scrub.get_attribute("max"))
    scrub.fill(str(last // 2))
    title = player.locator(".title")
    assert title.inner_text().startswith(f"{last // 2 + 1} of {last + 1}")

    # Hovering shows the line of code that last acted on the block.
    block = player.locator("[data-block='1']")
    block.hover()
    line = player.locator(".line").inner_text()
    assert re.search(r"pagedattn/\S+\.py:\d+", line) and "block 1" in line

    # Clicking shows the block's hash chain.
    player.locator("[data-block='2']").click()
    chain = player.locator(".chain").inner_text()
    assert "You are a poet" in chain and "Be brief" in chain
    lab.see("00_player")

    # Playing goes on by itself.
    before = title.inner_text()
    player.locator("button.play").click()
    page.wait_for_function(
        "before => document.querySelector('.pagedattn-player .title').innerText"
        " !== before",
        arg=before,
    )
    player.locator("button.play").click()
    lab.close()


def test_a_chapter_runs_to_its_end(lab: Lab) -> None:
    """The one of the first four whose widgets no other test waits for."""
    lab.open("02_tokens.ipynb")
    lab.run_all()
    lab.wait_until_done(RUNNING)
    assert not lab.errors()
    lab.see("02_tokens")
    lab.close()


@pytest.mark.parametrize("widget", SLIDERS, ids=lambda w: w.notebook)
def test_slider_changes_the_picture(lab: Lab, widget: Slider) -> None:
    lab.open(f"{widget.notebook}.ipynb")
    lab.run_all()
    row = lab.page.locator(
        f".widget-inline-hbox:has(> .widget-label:text-is('{widget.slider}'))"
    ).first
    row.wait_for(timeout=RUNNING * 1e3)
    box = lab.page.locator(".jp-OutputArea-output").filter(has=row).first
    picture = box.locator(".widget-html:has(svg, img)").first
    picture.wait_for(timeout=RUNNING * 1e3)
    before = picture.inner_html()
    handle = row.locator(".noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")
    lab.page.wait_for_function(
        "([node, before]) => node.innerHTML !== before",
        arg=[picture.element_handle(), before],
        timeout=RUNNING * 1e3,
    )
    assert not lab.errors()
    row.scroll_into_view_if_needed()
    lab.see(widget.notebook)
    lab.close()
