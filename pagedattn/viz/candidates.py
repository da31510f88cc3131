"""The tokens that could come next, as blocks: what each filter leaves, and the draw.

Knows the sampler's filters, which do the cutting, and how to draw what they left;
knows nothing of models or requests. Chapter 08 shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagedattn.request import SamplingParams
from pagedattn.sampling.filters import survivors
from pagedattn.sampling.sampler import pick
from pagedattn.viz.figure import COLOURS, INK, TINTS, Figure, label, line, page, rect

WIDE, HIGH, GAP, LEFT, ROW = 62, 44, 10, 140, 62  # pixels
FILTERS = ("temperature", "min_p", "top_k", "top_p")
STRONG, TINT, CUT = COLOURS[0], TINTS[0], TINTS[1]


@dataclass(frozen=True, slots=True)
class Stage:
    """What one more filter leaves: token id -> probability, and whom it cut."""

    title: str
    shares: dict[int, float]
    cut: frozenset[int] = frozenset()


def stages(row: np.ndarray, params: SamplingParams) -> list[Stage]:
    """The candidates of logits [V] as they come, then after each filter that
    `params` sets, in the sampler's order."""
    found = [Stage("as they come", _shares(row, {}))]
    wish: dict[str, float] = {}
    for name in FILTERS:
        value = getattr(params, name)
        if value == getattr(SamplingParams(), name):
            continue
        wish[name] = value
        shares = _shares(row, wish)
        cut = frozenset(found[-1].shares.keys() - shares.keys())
        found.append(Stage(f"{name} = {value:g}", shares, cut))
    return found


def _shares(row: np.ndarray, wish: dict[str, float]) -> dict[int, float]:
    ids, weights = survivors(row, float(row.max()), SamplingParams(**wish))
    ids = np.arange(len(row)) if ids is None else ids
    shares = weights.astype(np.float64) / weights.sum(dtype=np.float64)
    return dict(zip(ids.tolist(), shares.tolist(), strict=True))


def funnel(
    row: np.ndarray, words: Sequence[str], params: SamplingParams, u: float
) -> Figure:
    """One row of blocks for each stage, filled as likely as its token is; below them
    the unit interval as the last stage shares it out, and where `u` falls."""
    seen = stages(row, params)
    last = seen[-1].shares
    chosen = list(last)[pick(np.array(list(last.values()), dtype=np.float32), u)]
    parts, y = [], 30.0
    for stage in seen:
        parts += _row(stage, words, y)
        y += ROW
    parts += _interval(last, words, chosen, u, y)
    width = LEFT + len(words) * (WIDE + GAP) + 6
    text = _text(seen, words, chosen, u)
    alt = f"{len(words)} candidates, {len(last)} left, {words[chosen]!r} drawn"
    return Figure(page(width, y + 70, parts), text, alt)


def percent(share: float) -> str:
    """A share as whole per cents, tenths where it is less than one of them."""
    return f"{share:.1%}" if share < 0.01 else f"{share:.0%}"


def _row(stage: Stage, words: Sequence[str], y: float) -> list[str]:
    parts = [label(14, y + 26, stage.title, size=14, font_weight="bold")]
    top = max(stage.shares.values())
    for i, word in enumerate(words):
        x, share = LEFT + i * (WIDE + GAP), stage.shares.get(i)
        middle = {"text_anchor": "middle"}
        if share is None:
            fill = CUT if i in stage.cut else "#ffffff"
            dashes = {"stroke_dasharray": "4 3", "rx": 4}
            parts.append(rect(x, y, WIDE, HIGH, fill, stroke="#bbbbbb", **dashes))
            if i in stage.cut:
                parts.append(label(x + WIDE / 2, y + 27, "cut", size=12, **middle))
            continue
        filled = HIGH * share / top
        parts.append(rect(x, y, WIDE, HIGH, "#ffffff"))
        parts.append(rect(x, y + HIGH - filled, WIDE, filled, TINT))
        parts.append(
            rect(x, y, WIDE, HIGH, "none", stroke=STRONG, stroke_width=1.5, rx=4)
        )
        parts.append(label(x + WIDE / 2, y + 18, word, size=13, **middle))
        parts.append(label(x + WIDE / 2, y + 36, percent(share), size=12, **middle))
    return parts


def _interval(
    shares: dict[int, float], words: Sequence[str], chosen: int, u: float, y: float
) -> list[str]:
    length = len(words) * (WIDE + GAP) - GAP
    parts = [label(14, y + 26, f"u = {u:.3f}", size=14, font_weight="bold")]
    x = float(LEFT)
    for i, share in shares.items():
        fill = TINT if i == chosen else "#ffffff"
        parts.append(rect(x, y, share * length, HIGH, fill, stroke=STRONG))
        middle = x + share * length / 2
        parts.append(label(middle, y + 27, words[i], text_anchor="middle"))
        x += share * length
    at = LEFT + u * length
    parts.append(line(at, y - 8, at, y + HIGH + 8, stroke=INK, stroke_width=2))
    parts.append(label(LEFT, y + HIGH + 18, "0", size=12, text_anchor="middle"))
    parts.append(
        label(LEFT + length, y + HIGH + 18, "1", size=12, text_anchor="middle")
    )
    return parts


def _text(seen: Sequence[Stage], words: Sequence[str], chosen: int, u: float) -> str:
    """The same as a table; `x` where a stage cuts, `.` where an earlier one did."""
    wide = max(len(stage.title) for stage in seen) + 2
    lines = [" " * wide + "".join(f"{word:>7}" for word in words)]
    for stage in seen:
        cells = (
            f"{percent(stage.shares[i]):>7}"
            if i in stage.shares
            else f"{'x' if i in stage.cut else '.':>7}"
            for i in range(len(words))
        )
        lines.append(f"{stage.title:<{wide}}" + "".join(cells))
    return "\n".join([*lines, f"u = {u:.3f} falls on {words[chosen]!r}"])
