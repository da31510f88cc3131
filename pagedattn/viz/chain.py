"""The prefix index as a tree: every indexed block under its parent, words and hash.

Knows the frames of a film and how to draw them; knows nothing of schedulers. Used in
chapter 04.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagedattn.viz.figure import CACHED, FREE, Figure, label, line, page, rect
from pagedattn.viz.film import BlockState, Frame
from pagedattn.viz.strip import colour_of, people

LEFT, ROOT, WIDE, HIGH, GAP, BELOW = 16, 56, 170, 34, 46, 30  # pixels


@dataclass(slots=True)
class _Node:
    """A place in the tree: a block, or none if what stood there was evicted."""

    words: str
    hash: str
    block: BlockState | None = None
    children: dict[str, _Node] = field(default_factory=dict)


def chains(frame: Frame) -> Figure:
    """Every block that can be found, under the block that its hash covers as parent."""
    places, cast = list(_walk(_tree(frame))), people([frame])
    parts, text = [], ["ROOT"]
    for depth, row, parent, node in places:
        parts += [*_box(node, depth, row, cast), _edge(depth, row, parent)]
        text.append("    " * depth + "└── " + _caption(node) + ": " + node.words)
    parts.append(rect(LEFT, _y(0), ROOT, HIGH, FREE, stroke="#888888", rx=4))
    parts.append(label(LEFT + ROOT / 2, _y(0) + 22, "ROOT", text_anchor="middle"))
    columns = 1 + max((depth for depth, *_ in places), default=-1)
    rows = 1 + max((row for _, row, *_ in places), default=0)
    svg = page(_x(columns) - GAP + LEFT, _y(rows) - 6, parts)
    return Figure(svg, "\n".join(text), "The prefix index as a tree of blocks")


def _tree(frame: Frame) -> _Node:
    root = _Node("", "")
    for block in frame.blocks:
        node = root
        for digest, words in block.chain:
            node = node.children.setdefault(digest, _Node(words, digest))
        if block.chain:
            node.block = block
    return root


def _walk(
    node: _Node, depth: int = 0, row: int = 0
) -> Iterator[tuple[int, int, int, _Node]]:
    """(depth, row, the parent's row, node) of all below `node`, each leaf in a row of
    its own."""
    first = row
    for child in node.children.values():
        yield depth, row, first, child
        below = list(_walk(child, depth + 1, row))
        yield from below
        row = max([row, *(r for _, r, _, _ in below)]) + 1


def _x(depth: int) -> float:
    return LEFT + ROOT + GAP + depth * (WIDE + GAP)


def _y(row: int) -> float:
    return LEFT + 18 + row * (HIGH + BELOW)


def _box(node: _Node, depth: int, row: int, cast: list[str]) -> Iterator[str]:
    x, y = _x(depth), _y(row)
    strong, tint = CACHED, FREE
    if node.block is not None:
        strong, tint, _ = colour_of(node.block.holders, cast)
    yield label(x + 2, y - 5, _caption(node), size=11, fill="#555555")
    yield rect(x, y, WIDE, HIGH, tint, stroke=strong, stroke_width=1.5, rx=4)
    yield label(x + WIDE / 2, y + 22, node.words, text_anchor="middle")


def _edge(depth: int, row: int, parent: int) -> str:
    x, half = _x(depth), HIGH / 2
    return line(x - GAP, _y(parent) + half, x, _y(row) + half, stroke="#888888")


def _caption(node: _Node) -> str:
    if node.block is None:
        return f"{node.hash}, evicted"
    who = " + ".join(node.block.holders) or "free"
    return f"{node.hash}, block {node.block.id}, {who}"
