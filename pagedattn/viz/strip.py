"""A film as still pictures: one frame with words in its slots, or a strip of many.

Knows frames and how to draw them; knows nothing of schedulers. `player.js` draws the
same picture for a film that moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedattn.viz.figure import (
    CACHED,
    COLOURS,
    SHARED,
    SQUARES,
    TINTS,
    Figure,
    label,
    page,
    rect,
)
from pagedattn.viz.film import BlockState, Frame

SLOT, HEIGHT, GAP, LEFT, COLUMNS = 46, 34, 14, 16, 5  # pixels; blocks in a row
SHARED_TINT = "#cccccc"


def people(frames: Iterable[Frame]) -> list[str]:
    """Everybody who appears, in order of appearance: their colours go by this."""
    seen: dict[str, None] = {}
    for frame in frames:
        for request in (*frame.running, *frame.waiting):
            seen.setdefault(request.id)
    return list(seen)


def still(frame: Frame, cast: Sequence[str], block_size: int) -> Figure:
    """One frame: every block with the words in its slots, and who holds it."""
    return strip([frame], block_size, cast)


def strip(frames: Sequence[Frame], block_size: int, cast: Sequence[str] = ()) -> Figure:
    """Frames below each other, each under the sentence that says what happened."""
    names = list(cast) or people(frames)
    columns = max(1, min(COLUMNS, 20 // block_size))
    width = 2 * LEFT + columns * (block_size * SLOT + GAP) - GAP
    parts: list[str] = []
    text: list[str] = []
    y = LEFT
    for frame in frames:
        title = f"step {frame.step}: {frame.text}"
        parts.append(label(LEFT, y + 14, title, size=14, font_weight="bold"))
        y += 26
        for row in range(0, len(frame.blocks), columns):
            for i, block in enumerate(frame.blocks[row : row + columns]):
                x = LEFT + i * (block_size * SLOT + GAP)
                parts += _block(block, x, y, block_size, names, frame.acted)
            y += HEIGHT + 26
        parts.append(label(LEFT, y + 2, _queues(frame), size=12, fill="#555555"))
        y += 26
        text += [title, *_text(frame, block_size, names), _queues(frame), ""]
    alt = frames[-1].text if len(frames) == 1 else f"{len(frames)} moments"
    return Figure(page(width, y, parts), "\n".join(text).rstrip(), alt)


def colour_of(holders: Sequence[str], cast: Sequence[str]) -> tuple[str, str, str]:
    """(strong colour, tint, text square) of a block that `holders` hold."""
    if not holders:
        return CACHED, "#f2f2f2", "⬛"
    if len(holders) > 1:
        return SHARED, SHARED_TINT, "🟫"
    i = cast.index(holders[0])
    return COLOURS[i % 6], TINTS[i % 6], SQUARES[i % 6]


def _block(
    block: BlockState,
    x: float,
    y: float,
    size: int,
    cast: Sequence[str],
    acted: Sequence[int],
) -> list[str]:
    strong, tint, _ = colour_of(block.holders, cast)
    parts = [_caption(block, x, y + 10, strong if block.holders else "#666666")]
    y += 14
    for i in range(size):
        word = block.words[i] if i < len(block.words) else None
        fill = "#ffffff" if word is None else tint
        parts.append(rect(x + i * SLOT, y, SLOT, HEIGHT, fill, stroke="#bbbbbb"))
        if word:
            parts.append(_word(word, x + i * SLOT + SLOT / 2, y + 21))
    edge = "#000000" if block.id in acted else strong
    weight = 3 if block.id in acted else 1.5
    parts.append(
        rect(x, y, size * SLOT, HEIGHT, "none", stroke=edge, stroke_width=weight, rx=4)
    )
    return parts


def _caption(block: BlockState, x: float, y: float, fill: str) -> str:
    who = " + ".join(block.holders) or ("cached, free" if block.hash else "free")
    text = f"{block.id}  {who}"
    return label(x + 2, y, text, size=11, fill=fill, font_weight="bold")


def _word(word: str, x: float, y: float) -> str:
    size = 12 if len(word) < 7 else 10 if len(word) < 9 else 8
    return label(x, y, word, size=size, text_anchor="middle")


def _queues(frame: Frame) -> str:
    running = ", ".join(f"{r.id} {r.computed}/{r.tokens}" for r in frame.running)
    waiting = ", ".join(f"{r.id} ({r.tokens})" for r in frame.waiting)
    free = " ".join(map(str, frame.free))
    return (
        f"running (computed/tokens): {running or 'nobody'}  ·  waiting: "
        f"{waiting or 'nobody'}  ·  reused next: {free or 'none'}"
    )


def _text(frame: Frame, size: int, cast: Sequence[str]) -> list[str]:
    return [
        " ".join(
            f"{block.id:>2}{'*' if block.id in frame.acted else ' '}"
            + colour_of(block.holders, cast)[2] * len(block.words)
            + "⬜" * (size - len(block.words))
            for block in frame.blocks[row : row + COLUMNS]
        )
        for row in range(0, len(frame.blocks), COLUMNS)
    ]
