"""Attention by tiles: one query walks its table, and m, l and acc after every chunk.

Computes the online softmax in plain Python on the numbers it is given and draws each
step over the book's ten blocks. Knows the formula; knows no kernel. Chapter 06 uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedattn.viz.figure import CACHED, COLOURS, TINTS, Figure, label, page, rect
from pagedattn.viz.story import cast, play, stage, word
from pagedattn.viz.strip import COLUMNS, GAP, HEIGHT, LEFT, SLOT

NOW, BEFORE, GREY = COLOURS[0], TINTS[0], "#777777"
CHUNKS = (1, 2, 4, 8, 16)
CELL, BAR = 64, 46  # pixels: width of a number's cell, height of a weight of 1


@dataclass(frozen=True, slots=True)
class Scene:
    """One query of one head, and the cache its table points into.

    q [head_dim]; k, v [num_blocks, block_size, head_dim]; `words` of the first `length`
    positions, whose query is the last one's. Block 0 is the null block.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    table: tuple[int, ...]
    words: tuple[str, ...]
    scale: float

    @property
    def length(self) -> int:
        """Positions of context, the query's own among them."""
        return len(self.words)

    def slot(self, position: int) -> tuple[int, int]:
        """(block, offset) of a position: the look-up that paging is."""
        i, offset = divmod(position, self.k.shape[1])
        return self.table[i], offset


@dataclass(frozen=True, slots=True)
class State:
    """What is kept of all scores so far: their maximum, sum and weighted values."""

    m: float
    l: float  # noqa: E741 (as in the formula)
    acc: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """One position as a step met it: weight = e^(score - m) with the step's new m."""

    position: int
    block: int
    offset: int
    score: float
    weight: float


@dataclass(frozen=True, slots=True)
class Step:
    """One chunk of context; `was` and `now` are the state before and after it."""

    scene: Scene
    number: int
    of: int
    first: int  # the first position that the query may read
    reads: tuple[Read, ...]
    was: State
    now: State

    @property
    def shrink(self) -> float:
        """What l and acc were multiplied by: e^(old m - new m)."""
        return math.exp(self.was.m - self.now.m)

    @property
    def out(self) -> tuple[float, ...]:
        """acc / l: the attention over all that has been read."""
        return tuple(x / self.now.l for x in self.now.acc)


def steps(
    scene: Scene, *, chunk: int = 4, window: int = 0, softcap: float = 0.0
) -> list[Step]:
    """The online softmax over `scene`, `chunk` positions at a time.

    `window` and `softcap` as in `kernels.spec`. The last step's `out` is the result.
    """
    first = max(0, scene.length - window) if window else 0
    starts = range(first, scene.length, chunk)
    state = State(-math.inf, 0.0, (0.0,) * len(scene.q))
    walked = []
    for number, start in enumerate(starts, 1):
        positions = range(start, min(start + chunk, scene.length))
        reads, now = _advance(scene, positions, state, softcap)
        walked.append(Step(scene, number, len(starts), first, reads, state, now))
        state = now
    return walked


def _advance(
    scene: Scene, positions: range, was: State, softcap: float
) -> tuple[tuple[Read, ...], State]:
    scores = [_score(scene, t, softcap) for t in positions]
    m = max(was.m, *scores)
    shrink = math.exp(was.m - m)
    weights = [math.exp(score - m) for score in scores]
    values = [scene.v[scene.slot(t)].tolist() for t in positions]
    acc = tuple(
        old * shrink + sum(w * x for w, x in zip(weights, column, strict=True))
        for old, column in zip(was.acc, zip(*values, strict=True), strict=True)
    )
    reads = tuple(
        Read(t, *scene.slot(t), score, weight)
        for t, score, weight in zip(positions, scores, weights, strict=True)
    )
    return reads, State(m, was.l * shrink + sum(weights), acc)


def _score(scene: Scene, position: int, softcap: float) -> float:
    key = scene.k[scene.slot(position)].tolist()
    pairs = zip(scene.q.tolist(), key, strict=True)
    score = scene.scale * sum(a * b for a, b in pairs)
    return softcap * math.tanh(score / softcap) if softcap else score


def ann(head_dim: int = 8, seed: int = 40) -> Scene:
    """Ann's 14th token, in the blocks that the real scheduler gave her.

    Keys, values and the query are random numbers of that seed; unused slots hold NaN.
    """
    scheduler, camera = stage()
    play(scheduler, camera, cast(), steps=3)
    request = next(r for r in scheduler.running if r.id == "Ann")
    (table,) = scheduler.tables.ids(request)
    frame = camera.film().frames[-1]
    make = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, len(frame.blocks) + 1, 4, head_dim, generator=make)
    for block in frame.blocks:
        k[block.id, len(block.words) :] = v[block.id, len(block.words) :] = torch.nan
    k[0] = v[0] = torch.nan
    q = torch.randn(head_dim, generator=make) * 2
    words = tuple(map(word, request.tokens[: request.computed]))
    return Scene(q, k, v, table, words, head_dim**-0.5)


# Drawing: the pool, what this chunk scored, what is kept.
def picture(step: Step) -> Figure:
    """The pool with the slots that are read, their scores and weights, m, l and acc."""
    width = 2 * LEFT + COLUMNS * (step.scene.k.shape[1] * SLOT + GAP) - GAP
    parts = [label(LEFT, 30, _title(step), size=15, font_weight="bold")]
    rows, y = _pool(step, 44)
    parts += rows
    rows, y = _scores(step, y + 8)
    parts += rows
    rows, y = _state(step, y + 12)
    parts += rows
    return Figure(page(width, y + 8, parts), _text(step), _title(step))


def _title(step: Step) -> str:
    scene = step.scene
    blocks = sorted({read.block for read in step.reads})
    where = f"block{'s' * (len(blocks) > 1)} {', '.join(map(str, blocks))}"
    a, b = step.reads[0].position, step.reads[-1].position
    span = f"positions {a} to {b}" if a < b else f"position {a}"
    asks = f"“{scene.words[-1]}” at position {scene.length - 1}"
    return f"{asks}, step {step.number} of {step.of}: {span}, in {where}"


def _pool(step: Step, y: float) -> tuple[list[str], float]:
    num_blocks, size = step.scene.k.shape[:2]
    parts = []
    for i in range(num_blocks - 1):
        x = LEFT + i % COLUMNS * (size * SLOT + GAP)
        parts += _block(step, i + 1, x, y + i // COLUMNS * (HEIGHT + 28))
    return parts, y + -(-(num_blocks - 1) // COLUMNS) * (HEIGHT + 28)


def _block(step: Step, block: int, x: float, y: float) -> Iterator[str]:
    scene, size = step.scene, step.scene.k.shape[1]
    place = scene.table.index(block) if block in scene.table else None
    caption = f"{block}" if place is None else f"{block}  = table[{place}]"
    fill = GREY if place is None else NOW
    yield label(x + 2, y + 12, caption, size=11, fill=fill, font_weight="bold")
    for i in range(size):
        t = None if place is None else place * size + i
        yield from _slot(step, t, x + i * SLOT, y + 16)
    edge = "#bbbbbb" if place is None else NOW
    yield rect(
        x, y + 16, size * SLOT, HEIGHT, "none", stroke=edge, stroke_width=1.5, rx=4
    )


def _slot(step: Step, t: int | None, x: float, y: float) -> Iterator[str]:
    words = step.scene.words
    if t is None or t >= len(words):
        yield rect(x, y, SLOT, HEIGHT, "#f6f6f6", stroke="#dddddd")
        return
    fill, ink = _shade(step, t)
    block, offset = step.scene.slot(t)
    title = f"position {t}, slot {block * step.scene.k.shape[1] + offset}"
    yield rect(x, y, SLOT, HEIGHT, fill, stroke="#bbbbbb", title=title)
    size = 12 if len(words[t]) < 7 else 10
    yield label(
        x + SLOT / 2, y + 21, words[t], size=size, fill=ink, text_anchor="middle"
    )


def _shade(step: Step, t: int) -> tuple[str, str]:
    """(fill, ink) of a position: out of the window, read before, now, or later."""
    if t < step.first:
        return CACHED, GREY
    if t < step.reads[0].position:
        return BEFORE, "#222222"
    if t <= step.reads[-1].position:
        return NOW, "#ffffff"
    return "#ffffff", GREY


def _scores(step: Step, y: float) -> tuple[list[str], float]:
    base = y + 38 + BAR
    names = ((y + 14, "word"), (y + 31, "score"), (base + 16, "e^(score − m)"))
    parts = [label(LEFT, at, name, fill=GREY) for at, name in names]
    for i, read in enumerate(step.reads):
        x = LEFT + 110 + i * CELL
        height = round(read.weight * BAR, 1)
        parts.append(rect(x + 8, base - height, CELL - 16, height, NOW))
        texts = (step.scene.words[read.position], _n(read.score), _n(read.weight))
        for (at, _), text in zip(names, texts, strict=True):
            parts.append(label(x + CELL / 2, at, text, text_anchor="middle"))
    return parts, base + 22


def _state(step: Step, y: float) -> tuple[list[str], float]:
    parts = []
    for name, numbers in _rows(step):
        parts.append(label(LEFT, y + 18, name, fill=GREY))
        for i, number in enumerate(numbers):
            parts += _number(number, LEFT + 210 + i * CELL, y)
        y += 28
    return parts, y


def _rows(step: Step) -> Iterator[tuple[str, tuple[float, ...]]]:
    """What is kept, line by line, for both tiers of the picture."""
    was, now = step.was, step.now
    yield "m  before, after", (was.m, now.m)
    yield "shrink = e^(m before − m after)", (step.shrink,)
    yield "l  before, after", (was.l, now.l)
    yield "acc  before", was.acc
    yield "acc  after", now.acc
    yield ("out = acc / l" if step.number == step.of else "acc / l so far"), step.out


def _number(x: float, left: float, top: float) -> Iterator[str]:
    """A number in a cell, red below zero and blue above, paler the smaller."""
    hue = COLOURS[0] if x >= 0 else COLOURS[1]
    strength = 0.0 if math.isinf(x) else round(min(abs(x) / 4, 1) * 0.6, 2)
    yield rect(left, top, CELL - 4, 24, hue, stroke="#bbbbbb", fill_opacity=strength)
    yield label(left + CELL / 2 - 2, top + 17, _n(x), text_anchor="middle")


def _n(x: float) -> str:
    """Two decimals, a true minus sign, and no negative zero."""
    text = "∞" if math.isinf(x) else f"{abs(x):.2f}"
    return f"−{text}" if x < 0 and text != "0.00" else text


def _text(step: Step) -> str:
    scene, size = step.scene, step.scene.k.shape[1]
    kinds = {CACHED: "⬛", BEFORE: "🟪", NOW: "🟦", "#ffffff": "⬜"}
    squares = [kinds[_shade(step, t)[0]] for t in range(scene.length)]
    table = [
        f"{block:>2} {''.join(squares[i * size :][:size])}"
        for i, block in enumerate(scene.table)
    ]
    scored = [
        f"{scene.words[r.position]} {_n(r.score)} → {_n(r.weight)}" for r in step.reads
    ]
    kept = [f"{name}: {' '.join(map(_n, row))}" for name, row in _rows(step)]
    return "\n".join([_title(step), "  ".join(table), ", ".join(scored), *kept])


def tile_stepper(scene: Scene | None = None) -> Any:
    """A widget: walk `scene` (or Ann's) step by step, in chunks of a chosen size."""
    import ipywidgets

    scene = scene or ann()
    step = ipywidgets.IntSlider(1, 1, 4, description="step")
    chunk = ipywidgets.SelectionSlider(options=CHUNKS, value=4, description="chunk")
    window = ipywidgets.IntSlider(0, 0, scene.length, description="window")
    clock = ipywidgets.Play(value=1, min=1, max=4, interval=1500)
    ipywidgets.jslink((clock, "value"), (step, "value"))
    shown = ipywidgets.HTML()

    def draw(_: Any = None) -> None:
        walked = steps(scene, chunk=chunk.value, window=window.value)
        step.max = clock.max = len(walked)
        shown.value = picture(walked[step.value - 1]).html()

    for control in (step, chunk, window):
        control.observe(draw, "value")
    draw()
    return ipywidgets.VBox([ipywidgets.HBox([clock, step, chunk, window]), shown])
