"""Moments of several threads as lanes: who did what, in which order.

Knows moments (see `visit`) and how to draw them; order stands for time, so that the
picture is the same on every machine. Chapter 09 shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagedattn.viz.figure import COLOURS, TINTS, Figure, label, line, page, rect
from pagedattn.viz.visit import Moment

LANE, ROW, TOP, LEFT, BOX, GAP = 280, 32, 58, 20, 24, 52  # pixels


def lanes(moments: Sequence[Moment]) -> Figure:
    """One column for each lane, in order of appearance, one row for each moment, and
    an arrow from what caused it, where that was in another lane."""
    names = list(dict.fromkeys(moment.lane for moment in moments))
    width, height = LEFT + len(names) * LANE, TOP + len(moments) * ROW + 8
    parts = [_head(name, i, height) for i, name in enumerate(names)]
    for row, moment in enumerate(moments):
        parts.append(_box(moment, names.index(moment.lane), row))
        if moment.cause is not None:
            before = names.index(moments[moment.cause].lane)
            parts.append(_arrow(before, moment.cause, names.index(moment.lane), row))
    alt = f"{len(moments)} moments of {', '.join(names)}"
    return Figure(page(width, height, parts), _text(moments, names), alt)


def _left(lane: int) -> float:
    return LEFT + lane * LANE + GAP / 2


def _head(name: str, lane: int, height: float) -> str:
    x, colour = _left(lane) + (LANE - GAP) / 2, COLOURS[lane % len(COLOURS)]
    bold = {"text_anchor": "middle", "font_weight": "bold"}
    return label(x, 30, name, size=15, fill=colour, **bold) + line(
        x, 42, x, height - 8, stroke=colour, stroke_width=1, stroke_dasharray="3 4"
    )


def _box(moment: Moment, lane: int, row: int) -> str:
    x, y = _left(lane), TOP + row * ROW
    wide, colour = LANE - GAP, COLOURS[lane % len(COLOURS)]
    return (
        label(8, y + 16, row + 1, size=11, fill="#777777")
        + rect(x, y, wide, BOX, TINTS[lane % len(TINTS)], stroke=colour, rx=4)
        + label(x + wide / 2, y + 16, moment.text, size=12, text_anchor="middle")
    )


def _arrow(before: int, from_row: int, lane: int, row: int) -> str:
    """From the near edge of one box to the near edge of another, with a head."""
    wide, right = LANE - GAP, lane > before
    x1 = _left(before) + (wide if right else 0)
    x2 = _left(lane) + (0 if right else wide)
    y1, y2 = TOP + from_row * ROW + BOX / 2, TOP + row * ROW + BOX / 2
    back = -7 if right else 7
    head = f"M{x2:g} {y2:g}l{back} -4v8z"
    shaft = line(x1, y1, x2 + back, y2, stroke="#555555", stroke_width=1.2)
    return f'{shaft}<path d="{head}" fill="#555555"/>'


def _text(moments: Sequence[Moment], names: Sequence[str]) -> str:
    """A line for each moment: number, lane, what was done."""
    wide = max(map(len, names), default=0) + 2
    return "\n".join(
        f"{row:>2}  {'  ' * names.index(m.lane)}{m.lane:<{wide}}{m.text}"
        for row, m in enumerate(moments, 1)
    )
