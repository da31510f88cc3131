"""A pool's blocks as a grid: who holds each, and how full it is.

Knows the scheduler's books and how to draw them; changes nothing. The README's picture
is its example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedattn.bench.dry import run_step, scheduler_for
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Scheduler
from pagedattn.viz.figure import (
    CACHED,
    COLOURS,
    SHARED,
    Figure,
    label,
    legend,
    page,
    rect,
)

CELL, GAP, LEFT = 46, 8, 16  # pixels


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block as drawn: who holds it, and how many of its slots are used."""

    id: int
    holders: tuple[str, ...]
    used: int
    cached: bool


def block_views(scheduler: Scheduler) -> list[BlockView]:
    """Every block but the null block, of the first layer group."""
    size = scheduler.config.block_size
    holders: dict[int, list[str]] = {}
    used: dict[int, int] = {}
    for request in scheduler.running:
        for i, block in enumerate(scheduler.tables.ids(request)[0]):
            holders.setdefault(block, []).append(request.id)
            used[block] = min(size, max(0, request.computed - i * size))
    return [
        BlockView(
            block.id,
            tuple(holders.get(block.id, ())),
            used.get(block.id, size if block.key else 0),
            block.key is not None,
        )
        for block in scheduler.pool.blocks[1:]
    ]


def block_map_text(scheduler: Scheduler) -> str:
    """One character for each block: A, B, … held by the first, second, … running
    request, * shared, + cached but free, . free."""
    names = [request.id for request in scheduler.running]
    return "".join(_mark(view, names) for view in block_views(scheduler))


def _mark(view: BlockView, names: Sequence[str]) -> str:
    if len(view.holders) > 1:
        return "*"
    if view.holders:
        return chr(ord("A") + names.index(view.holders[0]) % 26)
    return "+" if view.cached else "."


def block_map(scheduler: Scheduler, columns: int = 12) -> Figure:
    """The pool as a grid: colour says who holds a block, height how full it is."""
    views = block_views(scheduler)
    names = [request.id for request in scheduler.running]
    colour = dict(zip(names, COLOURS * (len(names) // len(COLOURS) + 1), strict=False))
    size = scheduler.config.block_size
    parts = []
    for i, view in enumerate(views):
        parts += _cell(view, i % columns, i // columns, size, colour)
    bottom = LEFT + -(-len(views) // columns) * (CELL + GAP) + 22
    marks = [*colour.items(), ("shared", SHARED), ("cached, free", CACHED)]
    svg = page(
        2 * LEFT + columns * (CELL + GAP),
        bottom + 14,
        [*parts, *legend(marks, LEFT, bottom)],
    )
    return Figure(svg, block_map_text(scheduler), "Who holds which KV blocks")


def _cell(
    view: BlockView, column: int, row: int, size: int, colour: dict[str, str]
) -> list[str]:
    x, y = LEFT + column * (CELL + GAP), LEFT + row * (CELL + GAP)
    fill = SHARED if len(view.holders) > 1 else CACHED
    if len(view.holders) == 1:
        fill = colour[view.holders[0]]
    height = CELL * view.used / size
    return [
        rect(x, y + CELL - height, CELL, height, fill),
        rect(x, y, CELL, CELL, "none", stroke="#888888", rx=4),
        label(x + 5, y + 14, view.id, size=11),
    ]


def example() -> Scheduler:
    """Three chats on one system prompt and a stranger, a few steps in."""
    config = EngineConfig(block_size=16, num_blocks=37)
    scheduler = scheduler_for(config)
    system = list(range(70))
    prompts = {
        "chat A": [*system, *range(100, 125)],
        "chat B": [*system, *range(200, 218)],
        "chat C": [*system, *range(300, 341)],
        "essay": list(range(1000, 1090)),
    }
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0, max_tokens=40)
        scheduler.add(Request(name, prompt, params, len(prompt) + 40))
    for _ in range(12):
        run_step(scheduler)
    return scheduler
