"""An automaton over bytes as a drawing, and which tokens each of its states allows.

Knows tables of states, bytes and token texts, and how to draw them; knows nothing of
grammars or vocabularies. Chapter 10 shows it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from html import escape
from itertools import groupby

from pagedattn.viz.figure import COLOURS, INK, TINTS, Figure, label, page, rect

Steps = Sequence[Mapping[int, int]]  # state -> byte -> the next state
WIDE, HIGH, RADIUS, LEFT, TOP = 120, 74, 18, 50, 60  # pixels
CELL, ROW, NAMES = 64, 30, 150


def spans(found: Collection[int]) -> str:
    """Bytes as a class would spell them: `0-9`, `a b`, `x80-xbf`."""
    ordered = sorted(found)
    runs = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    texts = []
    for _, run in runs:
        members = [byte for _, byte in run]
        if len(members) < 3:
            texts += map(_byte, members)
        else:
            texts.append(f"{_byte(members[0])}-{_byte(members[-1])}")
    return " ".join(texts)


def _byte(byte: int) -> str:
    if byte == 32:
        return "␣"
    return chr(byte) if 32 < byte < 127 else f"x{byte:02x}"


def levels(steps: Steps) -> list[list[int]]:
    """States by their distance from state 0."""
    found, seen = [[0]], {0}
    while found[-1]:
        after = [to for state in found[-1] for to in steps[state].values()]
        fresh = [s for s in dict.fromkeys(after) if s not in seen]
        seen.update(fresh)
        found.append(fresh)
    return found[:-1]


def _joined(steps: Mapping[int, int]) -> dict[int, str]:
    """Next state -> the bytes that lead there."""
    ends: dict[int, list[int]] = {}
    for byte, to in steps.items():
        ends.setdefault(to, []).append(byte)
    return {to: spans(found) for to, found in ends.items()}


def machine(steps: Steps, accepting: Collection[int]) -> Figure:
    """Circles for states, 0 the first, a double ring where the text may end; arrows
    for bytes."""
    columns = levels(steps)
    tall = max(map(len, columns))
    place = {
        state: (
            LEFT + x * WIDE,
            TOP + HIGH * (y + (tall - len(column)) / 2),
        )
        for x, column in enumerate(columns)
        for y, state in enumerate(column)
    }
    parts, lines = [], []
    for state in place:
        for to, text in _joined(steps[state]).items():
            parts += _arrow(place[state], place[to], text)
            lines.append(f"{state} --{text}--> {to}")
    for state, (x, y) in place.items():
        parts += _circle(x, y, state, state in accepting)
    ends = ", ".join(map(str, sorted(accepting)))
    text = "\n".join([*lines, f"may end in: {ends}"])
    alt = f"An automaton of {len(place)} states, of which {len(accepting)} may end"
    width = LEFT + (len(columns) - 1) * WIDE + 60
    return Figure(page(width, TOP + tall * HIGH, parts), text, alt)


def _circle(x: float, y: float, state: int, last: bool) -> list[str]:
    fill, stroke = TINTS[2 if last else 0], COLOURS[2 if last else 0]
    rings = [RADIUS, RADIUS - 4] if last else [RADIUS]
    drawn = [
        f'<circle cx="{x:g}" cy="{y:g}" r="{r}" fill="{fill}" stroke="{stroke}"/>'
        for r in rings
    ]
    return [*drawn, label(x, y + 5, state, text_anchor="middle")]


def _arrow(a: tuple[float, float], b: tuple[float, float], text: str) -> list[str]:
    """A straight arrow forward; an arc above for a loop or a way back."""
    if b[0] > a[0]:
        start, end, up = a[0] + RADIUS, b[0] - RADIUS - 6, 0.0
        middle = (start + end) / 2, (a[1] + b[1]) / 2 - 6
        path = f"M{start:g} {a[1]:g} L{end:g} {b[1]:g}"
    else:
        start, end, up = a[0] + 8, b[0] - 8, 44.0
        top = min(a[1], b[1]) - RADIUS
        path = f"M{start:g} {top:g} C{start:g} {top - up:g} {end:g} {top - up:g} "
        path += f"{end:g} {top - 4:g}"
        middle = (start + end) / 2, top - 36
    tip = (end, b[1]) if up == 0 else (end, min(a[1], b[1]) - RADIUS)
    head = (-6, -4, -6, 4) if up == 0 else (-4, -7, 4, -7)
    corners = f"{tip[0] + (6 if up == 0 else 0):g},{tip[1]:g} "
    shift = 6 if up == 0 else 0
    corners += f"{tip[0] + head[0] + shift:g},{tip[1] + head[1]:g} "
    corners += f"{tip[0] + head[2] + shift:g},{tip[1] + head[3]:g}"
    return [
        f'<path d="{path}" fill="none" stroke="{INK}"/>',
        f'<polygon points="{corners}" fill="{INK}"/>',
        label(*middle, text, size=12, text_anchor="middle", font_family="monospace"),
    ]


def masks(tokens: Sequence[str], rows: Mapping[str, Collection[int]]) -> Figure:
    """A row for each text so far, a square for each token: blue if it may follow.

    `rows` maps the text to the indices of `tokens` that are allowed.
    """
    parts, lines = [], []
    wide = max(map(len, rows), default=0)
    for i, (title, allowed) in enumerate(rows.items()):
        y = 10 + i * ROW
        parts.append(
            label(NAMES - 10, y + 18, title, text_anchor="end", font_family="monospace")
        )
        for j, token in enumerate(tokens):
            may = j in allowed
            fill = TINTS[0] if may else "#f2f2f2"
            stroke = COLOURS[0] if may else "#dddddd"
            x = NAMES + j * CELL
            parts.append(rect(x, y, CELL - 4, ROW - 5, fill, stroke=stroke, rx=3))
            ink = INK if may else "#aaaaaa"
            parts.append(
                label(x + CELL / 2 - 2, y + 17, token, fill=ink, text_anchor="middle")
            )
        cells = (tokens[j] if j in allowed else "." for j in range(len(tokens)))
        lines.append(f"{title:>{wide}}  " + " ".join(f"{cell:>6}" for cell in cells))
    alt = "Which tokens may follow each text: " + escape(", ".join(rows))
    size = NAMES + len(tokens) * CELL + 6, 14 + len(rows) * ROW
    return Figure(page(*size, parts), "\n".join(lines), alt)
