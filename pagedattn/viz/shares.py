"""Bars that add up to one: what shares of a whole go where, a bar for each row.

Knows names, numbers and how to draw them; knows nothing of memory. Used in chapter 03.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.viz.figure import (
    CACHED,
    FREE,
    Figure,
    label,
    legend,
    page,
    rect,
)

FILLS = ("#4477aa", "#66ccee", "#ee6677", CACHED)
INKS = (FREE, "#222222", FREE, "#222222")
LEFT, WIDTH, BAR, GAP = 190, 480, 26, 10  # pixels


def bars(rows: dict[str, Sequence[float]], parts: Sequence[str], alt: str) -> Figure:
    """A bar for each of `rows`: name → shares of up to four `parts`, which add up to
    at most one."""
    drawn = legend(zip(parts, FILLS, strict=False), 16, 28)
    for i, (name, shares) in enumerate(rows.items()):
        y = 46 + i * (BAR + GAP)
        drawn.append(label(LEFT - 10, y + 18, name, text_anchor="end"))
        drawn += _bar(shares, y)
    svg = page(LEFT + WIDTH + 16, 46 + len(rows) * (BAR + GAP) + 6, drawn)
    return Figure(svg, _text(rows, parts), alt)


def _bar(shares: Sequence[float], y: float) -> list[str]:
    drawn, x = [], float(LEFT)
    for share, fill, ink in zip(shares, FILLS, INKS, strict=False):
        width = WIDTH * share
        drawn.append(rect(x, y, width, BAR, fill))
        if width > 30:
            number = f"{100 * share:.1f}"
            middle = x + width / 2
            drawn.append(
                label(middle, y + 18, number, size=12, fill=ink, text_anchor="middle")
            )
        x += width
    return [*drawn, rect(LEFT, y, WIDTH, BAR, "none", stroke="#888888")]


def _text(rows: dict[str, Sequence[float]], parts: Sequence[str]) -> str:
    wide = max(map(len, rows))
    head = " " * wide + "".join(f"{part:>12}" for part in parts)
    return "\n".join(
        [head]
        + [
            f"{name:<{wide}}" + "".join(f"{share:>12.1%}" for share in shares)
            for name, shares in rows.items()
        ]
    )
