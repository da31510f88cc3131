"""A picture in two of its three tiers: text that reads anywhere, and SVG.

Notebooks show the SVG as a data URI, which survives where inline SVG or scripts are
removed; terminals show the text. Knows shapes and colours; knows nothing of engines.
Used from chapter 00 on.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
TINTS = ("#c6d8ec", "#f9ccd2", "#bfe0c6", "#efe8c0", "#cdeef9", "#e6c3da")
SQUARES = "🟦🟥🟩🟨🟪🟧"
SHARED, CACHED, FREE, INK = "#555555", "#d9d9d9", "#ffffff", "#222222"


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture: `svg`, the same as `text`, and one sentence that says what it shows.

    A notebook cell that ends with it displays it; `print` gives the text.
    """

    svg: str
    text: str
    alt: str

    def __str__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.text}

    def html(self) -> str:
        """An <img> that needs nothing but itself."""
        data = quote(self.svg.replace('"', "'").strip(), safe=" /:=,;()'-.")
        return f'<img alt="{escape(self.alt)}" src="data:image/svg+xml,{data}">'

    def save(self, path: Path | str) -> None:
        """Write the SVG to `path`, making its folder."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.svg, "utf-8")


def rect(
    x: float,
    y: float,
    w: float,
    h: float,
    fill: str,
    *,
    stroke: str = "none",
    title: str | None = None,
    **more: object,
) -> str:
    """One rectangle; `title` is what hovering shows, other names are attributes."""
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" '
        f'stroke="{stroke}"{_attributes(more)}>{inner}</rect>'
    )


def label(
    x: float, y: float, text: object, *, size: int = 13, fill: str = INK, **more: object
) -> str:
    """One line of text whose baseline starts at (x, y); other names are attributes."""
    extra = _attributes(more)
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{extra}>'
        f"{escape(str(text))}</text>"
    )


def line(
    x1: float, y1: float, x2: float, y2: float, *, stroke: str = INK, **more: object
) -> str:
    """One line; other names are attributes."""
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" '
        f'stroke="{stroke}"{_attributes(more)}/>'
    )


def _attributes(more: dict[str, object]) -> str:
    return "".join(
        f' {name.replace("_", "-")}="{value}"' for name, value in more.items()
    )


def page(width: float, height: float, parts: Iterable[str]) -> str:
    """An SVG document on white, so that it reads on light and dark pages."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" font-family="sans-serif"><rect width="100%" height="100%" '
        f'rx="6" fill="{FREE}"/>{"".join(parts)}</svg>\n'
    )


def legend(marks: Iterable[tuple[str, str]], x: float, y: float) -> list[str]:
    """Coloured squares with their names, from (x, y) to the right."""
    parts = []
    for name, fill in marks:
        parts.append(rect(x, y - 12, 14, 14, fill, stroke="#888888"))
        parts.append(label(x + 20, y, name))
        x += 40 + 8 * len(name)
    return parts


def chart(drawing: Any, text: str, alt: str) -> Figure:
    """A matplotlib figure as one of ours; the same drawing gives the same bytes."""
    import matplotlib
    from matplotlib import pyplot

    settings = {"svg.hashsalt": "pagedattn", "svg.fonttype": "none"}
    with matplotlib.rc_context(settings), io.StringIO() as out:
        drawing.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
        pyplot.close(drawing)
        svg = out.getvalue()
    # Named fonts stand in quotes, which would end an attribute within a data URI.
    svg = re.sub(r'font-family: [^;"]*', "font-family: sans-serif", svg)
    return Figure(svg[svg.index("<svg") :], text, alt)
