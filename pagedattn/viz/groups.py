"""One request's tables over its plans, a column for each layer group: which blocks each
step writes, reads, only holds, or has let go.

Reads plans, which carry the tables; knows nothing of schedulers. Chapter 17 shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pagedattn.cache.tables import LayerGroup
from pagedattn.scheduler import Item, Plan
from pagedattn.viz.figure import TINTS, Figure, label, legend, line, page, rect

WRITTEN, READ, HELD, GONE = "#4477aa", TINTS[0], "#eeeeee", "#ffffff"
MARKS = {WRITTEN: "🟦", READ: "🟪", HELD: "⬛", GONE: "⬜"}
NAMES = (
    (WRITTEN, "written by this plan"),
    (READ, "read by it"),
    (HELD, "held, no longer read"),
    (GONE, "the null block, or not yet there"),
)
SLOT, ROW, GAP, LEFT, TOP = 11, 26, 26, 150, 50  # pixels


@dataclass(frozen=True, slots=True)
class Cell:
    """One block of a table in one plan: its id, and each slot's colour."""

    id: int
    slots: tuple[str, ...]


def items_of(plans: Iterable[Plan], request_id: str) -> list[tuple[int, Item]]:
    """(plan id, item) of each plan that computes something of this request."""
    return [
        (plan.id, item)
        for plan in plans
        for item in plan.items
        if item.request_id == request_id
    ]


def cells(item: Item, group: int, window: int, block_size: int) -> list[Cell]:
    """The blocks of one table, as the item's plan uses them."""
    end = item.start + len(item.tokens)
    first = max(0, item.start - window + 1) if window else 0
    return [
        Cell(
            id,
            tuple(
                _colour(id, i * block_size + offset, first, item.start, end)
                for offset in range(block_size)
            ),
        )
        for i, id in enumerate(item.tables[group])
    ]


def _colour(id: int, position: int, first: int, start: int, end: int) -> str:
    if id == 0 or position >= end:
        return GONE
    return WRITTEN if position >= start else READ if position >= first else HELD


def ladder(
    plans: Sequence[Plan],
    request_id: str,
    groups: Sequence[LayerGroup],
    block_size: int = 4,
) -> Figure:
    """A row for each plan that has the request, a column for each group's table."""
    found = items_of(plans, request_id)
    widest = max(len(item.tables[0]) for _, item in found)
    across = widest * (block_size * SLOT + 4) + GAP
    parts, text = _titles(groups, across)
    y = TOP
    for plan, item in found:
        title = f"step {plan}: {_tokens(item)}"
        parts.append(label(10, y + 15, title, size=12))
        row = [f"{title:<22}"]
        for g, group in enumerate(groups):
            table = cells(item, g, group.window, block_size)
            parts += _table(table, LEFT + g * across, y)
            row.append(_text(table, widest, block_size))
        text.append(" ".join(row).rstrip())
        y += ROW
    parts += legend([(name, fill) for fill, name in NAMES], 10, y + 22)
    text.append("   ".join(f"{MARKS[fill]} {name}" for fill, name in NAMES))
    width = max(LEFT + len(groups) * across, 780)
    alt = f"{len(found)} plans of one request, {len(groups)} tables each"
    return Figure(page(width, y + 36, parts), "\n".join(text), alt)


def _tokens(item: Item) -> str:
    end = item.start + len(item.tokens) - 1
    return f"token {end}" if end == item.start else f"tokens {item.start}–{end}"


def _titles(groups: Sequence[LayerGroup], across: int) -> tuple[list[str], list[str]]:
    parts, text = [], []
    for g, group in enumerate(groups):
        title = f"group {g}: " + (f"window {group.window}" if group.window else "full")
        x = LEFT + g * across
        parts.append(label(x, 22, title, size=14, font_weight="bold"))
        parts.append(line(x, 32, x + across - GAP, 32, stroke="#bbbbbb"))
        text.append(title)
    return parts, [", ".join(text) + " (block id, then its slots)"]


def _table(table: Sequence[Cell], x: float, y: float) -> list[str]:
    parts = []
    for cell in table:
        width = len(cell.slots) * SLOT
        for i, fill in enumerate(cell.slots):
            parts.append(rect(x + i * SLOT, y, SLOT, 20, fill))
        edge = {"stroke_dasharray": "3 3"} if cell.id == 0 else {}
        grey = "#bbbbbb" if cell.id == 0 else "#555555"
        parts.append(rect(x, y, width, 20, "none", stroke=grey, rx=3, **edge))
        if cell.id:
            halo = {"stroke": "#ffffff", "stroke_width": 3, "paint_order": "stroke"}
            parts.append(label(x + 4, y + 14, cell.id, size=11, **halo))
        x += width + 4
    return parts


def _text(table: Sequence[Cell], widest: int, block_size: int) -> str:
    blocks = [
        f"{cell.id or '–':>3}" + "".join(MARKS[fill] for fill in cell.slots)
        for cell in table
    ]
    missing = widest - len(table)
    return "".join(blocks) + " " * (missing * (3 + 2 * block_size))
