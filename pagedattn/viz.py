"""Pictures of the engine's state: who holds which KV blocks, as text and as SVG.

    python -m pagedattn.viz book/figures/blocks.svg

Knows the scheduler's books and how to draw them; changes nothing. The renderer of
traces grows here with the chapters (chapter 00).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pagedattn.cache.tables import LayerGroup
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Result, Scheduler

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
SHARED, CACHED, FREE = "#555555", "#d9d9d9", "#ffffff"
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


def block_map_svg(scheduler: Scheduler, columns: int = 12) -> str:
    """The pool as a grid: colour says who holds a block, height how full it is."""
    views = block_views(scheduler)
    names = [request.id for request in scheduler.running]
    colour = dict(zip(names, COLOURS * (len(names) // len(COLOURS) + 1), strict=False))
    size = scheduler.config.block_size
    cells = [
        _cell(view, i % columns, i // columns, size, colour)
        for i, view in enumerate(views)
    ]
    rows = -(-len(views) // columns)
    legend = [*colour.items(), ("shared", SHARED), ("cached, free", CACHED)]
    return _page(cells, columns, rows, legend)


def _cell(
    view: BlockView, column: int, row: int, size: int, colour: dict[str, str]
) -> str:
    x, y = LEFT + column * (CELL + GAP), LEFT + row * (CELL + GAP)
    fill = SHARED if len(view.holders) > 1 else CACHED
    if len(view.holders) == 1:
        fill = colour[view.holders[0]]
    height = CELL * view.used / size
    return (
        f'<rect x="{x}" y="{y + CELL - height:.1f}" width="{CELL}" '
        f'height="{height:.1f}" fill="{fill}"/>'
        f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" rx="4" fill="none" '
        f'stroke="#888888"/><text x="{x + 5}" y="{y + 14}" font-size="11" '
        f'fill="#222222">{view.id}</text>'
    )


def _page(
    cells: Sequence[str], columns: int, rows: int, legend: Sequence[tuple[str, str]]
) -> str:
    width = 2 * LEFT + columns * (CELL + GAP)
    bottom = LEFT + rows * (CELL + GAP) + 22
    marks, x = [], LEFT
    for name, fill in legend:
        marks.append(
            f'<rect x="{x}" y="{bottom - 12}" width="14" height="14" fill="{fill}"/>'
            f'<text x="{x + 20}" y="{bottom}" font-size="13" fill="#222222">'
            f"{escape(name)}</text>"
        )
        x += 40 + 8 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 14}" '
        f'width="{width}" font-family="sans-serif"><rect width="100%" height="100%" '
        f'fill="{FREE}"/>{"".join(cells)}{"".join(marks)}</svg>\n'
    )


def example() -> Scheduler:
    """Three chats on one system prompt and a stranger, a few steps in."""
    config = EngineConfig(block_size=16, num_blocks=37)
    scheduler = Scheduler(config, (LayerGroup(0, (0,)),))
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
        plan = scheduler.plan()
        scheduler.commit(plan, [Result(token=7) for _ in plan.items])
    return scheduler


def main() -> None:
    """Draw the example's blocks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the SVG file to write")
    args = parser.parse_args()
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text(block_map_svg(example()))


if __name__ == "__main__":
    main()
