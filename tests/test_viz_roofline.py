"""The pictures of costs: what they say is what bench.costs counts, they stay inside
their frame, and the calculator's sliders change what it shows."""

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.bench.costs import DEVICES, SHAPES, concurrency, decode, knee, step
from pagedattn.viz.figure import Figure
from pagedattn.viz.roofline import (
    batching,
    calculator_picture,
    calculator_table,
    roofline,
    roofline_calculator,
    si,
    token_work,
)

LLAMA2, H100 = SHAPES["Llama-2-7B"], DEVICES["H100 SXM"]
SHAPE = st.sampled_from(list(SHAPES.values()))
DEVICE = st.sampled_from(list(DEVICES.values()))


def outside(figure: Figure) -> list[str]:
    """What is drawn beyond the picture's edges; raises if it is no XML."""
    root = ElementTree.fromstring(figure.svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    found = []
    for node in list(root)[1:]:
        pairs = [(node.get("x"), node.get("y")), (node.get("x2"), node.get("y2"))]
        pairs += [tuple(p.split(",")) for p in node.get("points", "").split()]
        for x, y in pairs:
            if x and y and not (0 <= float(x) <= width and 0 <= float(y) <= height):
                found.append(f"{node.tag} at {x}, {y}")
    return found


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0 B"),
        (13.2e9, "13.2 GB"),
        (989.4e12, "989 TB"),
        (0.00394, "3.94 mB"),
        (157e-6, "157 µB"),
        (42, "42.0 B"),
        (1e15, "1.00 PB"),
    ],
)
def test_numbers_are_short(x: float, text: str) -> None:
    assert si(x, "B") == text


@given(st.floats(1e-9, 9e17))
def test_numbers_keep_three_digits(x: float) -> None:
    number, unit = si(x, "s").split()
    scale = 10.0 ** (3 * "nµm kMGTP".index(unit[:-1] or " ") - 9)
    assert float(number.replace(",", "")) * scale == pytest.approx(x, rel=6e-3)


# The roofline.
def test_roofline_says_what_is_counted() -> None:
    loads = {"decode": [(1, 1000)] * 32, "prefill": [(2048, 2048)]}
    rows = roofline(LLAMA2, H100, loads).text.splitlines()
    assert rows[0].startswith("H100 SXM") and "ridge 295" in rows[0]
    one = step(LLAMA2, loads["decode"])
    assert rows[2].split()[:2] == ["decode", "products"]
    assert si(one.products.seconds(H100), "s") in rows[2]
    assert si(one.attention.seconds(H100), "s") in rows[3]
    assert [row.split()[-1] for row in rows[2:]] == ["memory"] * 2 + ["arithmetic"] * 2


@given(SHAPE, DEVICE, st.integers(1, 1024), st.integers(1, 131072))
@settings(max_examples=30)
def test_roofline_stays_in_its_frame(
    shape: Any, device: Any, batch: int, context: int
) -> None:
    assert not outside(calculator_picture(shape, device, batch, context))


def test_marks_lie_on_the_roof_and_never_on_each_other() -> None:
    loads = {f"batch {n}": [(1, 1000)] * n for n in (1, 2, 4, 32, 256)}
    svg = roofline(LLAMA2, H100, loads).svg
    marks = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="18" height="18"', svg)
    at = [(float(x), float(y)) for x, y in marks]
    assert len(at) == 10
    pairs = [(p, q) for i, p in enumerate(at) for q in at[:i]]
    assert all(max(abs(a - c), abs(b - d)) >= 18 for (a, b), (c, d) in pairs)


# Batching.
def test_batching_says_what_is_counted() -> None:
    text = batching(LLAMA2, H100, [128, 4096]).text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:-1]}
    for n in (1, 16, 512):
        rate = n / decode(LLAMA2, n, 4096).seconds(H100)
        full = n > concurrency(LLAMA2, H100, 4096)
        assert rows[str(n)][-1] == f"{rate:,.0f}" + "*" * full
    assert "1,024" not in rows and rows["1024"][0].endswith("*")


@given(SHAPE, DEVICE)
@settings(max_examples=20)
def test_batching_stays_in_its_frame(shape: Any, device: Any) -> None:
    figure = batching(shape, device, [1, 1000, 131072])
    assert not outside(figure)
    assert f"knee {knee(shape, device)}" in figure.svg


# Generation.
@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 5))
@settings(max_examples=30)
def test_token_work_counts_its_squares(prompt: int, answer: int, block: int) -> None:
    figure = token_work(prompt, answer, block)
    naive, cached = figure.text.split("with a KV cache")
    once, again = prompt + answer - 1, sum(range(prompt, prompt + answer))
    assert naive.count("🟦") + naive.count("🟥") == again
    assert f"without a KV cache: {again} " in naive
    squares = cached.partition("\n")[2].rpartition("\n")[0]
    assert squares.count("🟦") == once and squares.count("⬜") == again - once
    assert not outside(figure)


def test_pictures_are_the_same_each_time() -> None:
    assert token_work(12, 6) == token_work(12, 6)
    assert batching(LLAMA2, H100, [128]) == batching(LLAMA2, H100, [128])


# The calculator.
def test_table_has_every_device_and_the_chosen_in_bold() -> None:
    table = calculator_table(LLAMA2, H100, 16, 1024)
    assert all(name in table for name in DEVICES)
    assert re.findall(r"<td [^>]*><b>([^<]*)</b>", table)[0] == "H100 SXM"
    assert "weights do not fit" in table  # float32 on the CPU row


def controls(widget: Any) -> dict[str, Any]:
    """Everything in a widget that has a description, by it."""
    children = getattr(widget, "children", ())
    found = {k: v for child in children for k, v in controls(child).items()}
    if name := getattr(widget, "description", ""):
        found[name] = widget
    return found


def shown(widget: Any) -> str:
    """All HTML in a widget, in order."""
    children = getattr(widget, "children", ())
    own = widget.value if type(widget).__name__ == "HTML" else ""
    return own + "".join(shown(child) for child in children)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch", 256),
        ("context", 8192),
        ("model", "Llama-2-7B"),
        ("device", "L4"),
    ],
)
def test_every_control_changes_what_is_shown(name: str, value: Any) -> None:
    pytest.importorskip("ipywidgets")
    widget = roofline_calculator()
    handles = controls(widget)
    assert set(handles) == {"model", "device", "batch", "context"}
    before = shown(widget)
    assert "<img" in before and "<table" in before
    old = handles[name].value
    handles[name].value = value
    after = shown(widget)
    assert after != before
    handles[name].value = old
    assert shown(widget) == before
