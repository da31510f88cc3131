"""Pictures of what tokens cost: work with and without a KV cache, the roofline, and
what batching buys.

Draws what `bench.costs` counts; knows nothing of engines. Chapter 01 shows all of it,
and ends its roofline with a calculator that has sliders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pagedattn.bench.costs import (
    DEVICES,
    SHAPES,
    Cost,
    Device,
    Load,
    Shape,
    Step,
    concurrency,
    decode,
    knee,
    step,
)
from pagedattn.viz.figure import COLOURS, Figure, label, legend, line, page, rect

LEFT, TOP, WIDE, HIGH = 86, 22, 560, 300  # of a plot, in pixels
GREY, PALE = "#777777", "#e4e4e4"
MEMORY, ARITHMETIC = COLOURS[0], COLOURS[1]  # what a roof's two sides are made of
DOT = 9
Curve = Sequence[tuple[int, float]]  # (batch, tokens a second)


def si(x: float, unit: str, digits: int = 3) -> str:
    """A number with a prefix that keeps it short: si(13.2e9, "FLOP") = 13.2 GFLOP."""
    if not x:
        return f"0 {unit}"
    power = min(max(math.floor(math.log10(abs(x)) / 3), -3), 5)
    prefix = ("n", "µ", "m", "", "k", "M", "G", "T", "P")[power + 3]
    scaled = x / 1000**power
    places = max(0, digits - 1 - math.floor(math.log10(abs(scaled))))
    return f"{scaled:,.{places}f} {prefix}{unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Axes:
    """Two logarithmic axes over the plot's rectangle."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point; what lies outside is drawn at the edge."""
        across, up = _share(x, *self.x), _share(y, *self.y)
        return LEFT + across * WIDE, TOP + (1 - up) * HIGH

    def path(
        self, points: Sequence[tuple[float, float]], stroke: str, **more: Any
    ) -> str:
        """A line through points, in colour; other names are attributes."""
        xy = " ".join("{:g},{:.1f}".format(*self.at(*p)) for p in points)
        extra = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in more.items())
        return f'<polyline points="{xy}" fill="none" stroke="{stroke}"{extra}/>'

    def grid(self, name_x: str, name_y: str, base_x: int = 10) -> list[str]:
        """Lines and numbers at the powers, and the axes' names."""
        parts = [rect(LEFT, TOP, WIDE, HIGH, "none", stroke=GREY)]
        for value in _powers(*self.x, base_x):
            x, _ = self.at(value, self.y[0])
            parts.append(line(x, TOP, x, TOP + HIGH, stroke=PALE))
            text = f"{value:,g}"
            parts.append(label(x, TOP + HIGH + 17, text, size=11, text_anchor="middle"))
        for value in _powers(*self.y, 10):
            _, y = self.at(self.x[0], value)
            parts.append(line(LEFT, y, LEFT + WIDE, y, stroke=PALE))
            text = si(value, "", 1)
            parts.append(label(LEFT - 8, y + 4, text, size=11, text_anchor="end"))
        foot, middle = TOP + HIGH + 37, TOP + HIGH / 2
        turn = f"rotate(-90 20 {middle:g})"
        return [
            *parts,
            label(LEFT + WIDE / 2, foot, name_x, size=12, text_anchor="middle"),
            label(20, middle, name_y, size=12, text_anchor="middle", transform=turn),
        ]


def _share(value: float, low: float, high: float) -> float:
    share = math.log(value / low) / math.log(high / low)
    return min(max(share, 0.0), 1.0)


def _powers(low: float, high: float, base: int) -> Iterator[float]:
    first = math.ceil(math.log(low, base) - 1e-9)
    last = math.floor(math.log(high, base) + 1e-9)
    yield from (float(base) ** n for n in range(first, last + 1))


# The roofline: what a device can do at each intensity, and where the work stands.
def roofline(
    shape: Shape, device: Device, loads: Mapping[str, Sequence[Load]]
) -> Figure:
    """The device's roof, and on it, for each named step, its products (circles) and
    its attention (squares), at the speed that they can reach at best."""
    steps = {name: step(shape, load, device.width) for name, load in loads.items()}
    top = 10.0 ** math.ceil(math.log10(device.flops) + 0.1)
    axes = Axes((0.25, 16384), (top / 1e5, top))
    svg = [
        *axes.grid("intensity: FLOPs for each byte from memory", "FLOP/s"),
        *_roof(axes, device),
        *_dots(axes, device, list(steps.values())),
        *_key(steps, device),
    ]
    height = TOP + HIGH + 76 + 20 * len(steps)
    alt = f"The roofline of {device.name}, with {', '.join(steps)}"
    return Figure(
        page(LEFT + WIDE + 24, height, svg), roofline_text(steps, device), alt
    )


def _roof(axes: Axes, device: Device) -> list[str]:
    low, high = axes.x
    edge = (device.ridge, device.flops)
    x, y = axes.at(*edge)
    slope = [(axes.y[0] / device.bandwidth, axes.y[0]), edge]
    if slope[0][0] < low:
        slope[0] = (low, low * device.bandwidth)
    return [
        axes.path(slope, MEMORY, stroke_width=3),
        axes.path([edge, (high, device.flops)], ARITHMETIC, stroke_width=3),
        line(x, y, x, TOP + HIGH, stroke=GREY, stroke_dasharray="3 4"),
        label(x + 5, TOP + HIGH - 8, f"ridge {device.ridge:,.0f}", size=12, fill=GREY),
        label(
            x - 70, y - 8, si(device.bandwidth, "B/s"), fill=MEMORY, text_anchor="end"
        ),
        label(
            LEFT + WIDE - 8,
            y - 8,
            si(device.flops, "FLOP/s"),
            fill=ARITHMETIC,
            text_anchor="end",
        ),
    ]


def _dots(axes: Axes, device: Device, steps: Sequence[Step]) -> list[str]:
    """A numbered mark for each part of each step; where two meet, one hangs below."""
    parts, taken = [], []
    for n, one in enumerate(steps):
        for cost, corner in ((one.products, DOT), (one.attention, 2)):
            speed = min(device.flops, cost.intensity * device.bandwidth)
            x, y = axes.at(cost.intensity, speed)
            while any(abs(x - a) < 2 * DOT and abs(y - b) < 2 * DOT for a, b in taken):
                y += 2 * DOT + 2
            taken.append((x, y))
            colour = COLOURS[(n + 2) % len(COLOURS)]
            side = 2 * DOT
            parts.append(rect(x - DOT, y - DOT, side, side, colour, rx=corner))
            text = {"size": 11, "fill": "#ffffff", "text_anchor": "middle"}
            parts.append(label(x, y + 4, n + 1, font_weight="bold", **text))
    return parts


def _key(steps: Mapping[str, Step], device: Device) -> list[str]:
    y = TOP + HIGH + 62
    parts = [
        rect(LEFT, y - 10, 12, 12, GREY, rx=6),
        label(LEFT + 18, y, "products with weights", size=12),
        rect(LEFT + 170, y - 10, 12, 12, GREY, rx=2),
        label(LEFT + 188, y, "attention, which reads the KV cache", size=12),
    ]
    for n, (name, one) in enumerate(steps.items()):
        y += 20
        colour = COLOURS[(n + 2) % len(COLOURS)]
        text = (
            f"{name}: products {_brief(one.products, device)}; "
            f"attention {_brief(one.attention, device)}"
        )
        parts.append(label(LEFT + 2, y, n + 1, fill=colour, font_weight="bold"))
        parts.append(label(LEFT + 18, y, text, size=12))
    return parts


def _brief(cost: Cost, device: Device) -> str:
    return f"{_intensity(cost)} FLOPs/byte, {si(cost.seconds(device), 's')}"


def _intensity(cost: Cost) -> str:
    return f"{cost.intensity:,.{0 if cost.intensity >= 9.95 else 1}f}"


def roofline_text(steps: Mapping[str, Step], device: Device) -> str:
    """The same as a table: both parts of each step, and what bounds them."""
    wide = max(map(len, steps)) + 2
    rows = [
        f"{device.name}: {si(device.flops, 'FLOP/s')}, {si(device.bandwidth, 'B/s')}, "
        f"ridge {device.ridge:,.0f} FLOPs/byte",
        f"{'':{wide}}{'':11}{'FLOPs':>8}{'bytes':>9}{'per byte':>10}{'at least':>10}"
        "  bound by",
    ]
    for name, one in steps.items():
        for part, cost in (("products", one.products), ("attention", one.attention)):
            rows.append(
                f"{name:{wide}}{part:11}{si(cost.flops, ''):>8}{si(cost.bytes, ''):>9}"
                f"{_intensity(cost):>10}{si(cost.seconds(device), 's'):>10}"
                f"  {cost.bound(device)}"
            )
            name = ""
    return "\n".join(rows)


# Batching: tokens a second against the number of requests in a step.
def batching(shape: Shape, device: Device, contexts: Sequence[int]) -> Figure:
    """The most tokens a second that decoding can give, for each context; dashed where
    the keys and values no longer fit into the device's memory."""
    sizes = [2**n for n in range(11)]
    fits = {c: concurrency(shape, device, c) for c in contexts}
    bend = knee(shape, device)
    curves = {
        c: [(n, _rate(shape, device, n, c)) for n in _shown({*sizes, bend, fits[c]})]
        for c in contexts
    }
    every = [rate for curve in curves.values() for _, rate in curve]
    low = 10.0 ** math.floor(math.log10(min(every)))
    axes = Axes((1, 1024), (low, 10.0 ** math.ceil(math.log10(max(every)))))
    svg = axes.grid("requests in the batch", "tokens/s, all together", 2)
    for i, (context, curve) in enumerate(curves.items()):
        svg += _curve(axes, curve, fits[context], COLOURS[i % 6])
    x, _ = axes.at(bend, low)
    svg.append(line(x, TOP, x, TOP + HIGH, stroke=GREY, stroke_dasharray="3 4"))
    svg.append(label(x + 5, TOP + HIGH - 8, f"knee {bend}", size=12, fill=GREY))
    marks = [(f"context {c:,}", COLOURS[i % 6]) for i, c in enumerate(contexts)]
    svg += legend(marks, LEFT, TOP + HIGH + 62)
    alt = f"Tokens a second against batch size on {device.name}"
    text = _batching_text(sizes, {c: dict(curve) for c, curve in curves.items()}, fits)
    return Figure(page(LEFT + WIDE + 24, TOP + HIGH + 80, svg), text, alt)


def _shown(batches: set[int | None]) -> list[int]:
    """The batches that the picture reaches, in order."""
    return sorted(n for n in batches if n and n <= 1024)


def _rate(shape: Shape, device: Device, batch: int, context: int) -> float:
    return batch / decode(shape, batch, context, device.width).seconds(device)


def _curve(axes: Axes, curve: Curve, fits: int | None, colour: str) -> list[str]:
    """A line, dashed beyond a mark where memory is full."""
    inside = [p for p in curve if p[0] <= (fits or 0)]
    outside = curve[max(0, len(inside) - 1) :]
    parts = [axes.path(outside, colour, stroke_width=2, stroke_dasharray="2 5")]
    if inside:
        parts.append(axes.path(inside, colour, stroke_width=3))
    if len(outside) > 1 and inside:
        x, y = axes.at(*inside[-1])
        parts.append(rect(x - 5, y - 5, 10, 10, colour, rx=5))
        text = {"size": 11, "fill": colour, "text_anchor": "end"}
        parts.append(label(x + 4, y - 10, f"{fits:,} fit", **text))
    return parts


def _batching_text(
    sizes: Sequence[int],
    rates: Mapping[int, Mapping[int, float]],
    fits: Mapping[int, int | None],
) -> str:
    rows = ["batch    " + "".join(f"{f'context {c:,}':>17} " for c in rates)]
    for n in sizes:
        cells = (f"{rates[c][n]:>17,.0f}{' *'[n > (fits[c] or 0)]}" for c in rates)
        rows.append(f"{n:<9}" + "".join(cells))
    table = "\n".join(row.rstrip() for row in rows)
    return f"{table}\ntokens/s at most; * does not fit into memory"


# Generation: which positions each step computes.
def token_work(prompt: int, answer: int, block_size: int = 4) -> Figure:
    """The positions that each step computes, a row for each sampled token: without a
    KV cache above, with one below. Positions stand in blocks of `block_size`."""
    parts: list[str] = []
    text: list[str] = []
    y = 16.0
    for title, cached in (("without a KV cache", False), ("with a KV cache", True)):
        rows = _work(prompt, answer, cached)
        total = sum(row.count("new") + row.count("again") for row in rows)
        parts.append(label(16, y + 12, f"{title}: {total} positions computed", size=14))
        text += [f"{title}: {total} positions computed", *_squares(rows, block_size)]
        for n, row in enumerate(rows):
            y += 22
            parts.append(label(16, y + 14, f"step {n + 1}", size=12))
            parts += _cells(row, y, block_size)
        y += 40
    marks = [(name, fill) for name, fill in WORK.values()]
    parts += legend(marks, 16, y + 6)
    text.append("🟦 computed   🟥 computed again   ⬜ read from the KV cache")
    last = prompt + answer - 1
    width = 84 + 20 * last + 6 * (last // block_size) + 20
    alt = f"Positions computed for {prompt} prompt tokens and {answer} sampled ones"
    return Figure(page(max(width, 480), y + 24, parts), "\n".join(text), alt)


WORK: Mapping[str, tuple[str, str]] = {
    "new": ("computed", COLOURS[0]),
    "again": ("computed again", COLOURS[1]),
    "kept": ("read from the KV cache", PALE),
}
MARKS: Mapping[str, str] = {"new": "🟦", "again": "🟥", "kept": "⬜"}


def _work(prompt: int, answer: int, cached: bool) -> list[list[str]]:
    """For each step what happens to each position: new, again or kept."""
    rows, known = [], 0
    for length in range(prompt, prompt + answer):
        old = "kept" if cached else "again"
        rows.append([old] * known + ["new"] * (length - known))
        known = length
    return rows


def _cells(row: Sequence[str], y: float, block_size: int) -> list[str]:
    return [
        rect(80 + 20 * i + 6 * (i // block_size), y, 17, 17, WORK[kind][1], rx=3)
        for i, kind in enumerate(row)
    ]


def _squares(rows: Sequence[Sequence[str]], block_size: int) -> list[str]:
    blocks = (
        [row[i : i + block_size] for i in range(0, len(row), block_size)]
        for row in rows
    )
    return [" ".join("".join(MARKS[k] for k in b) for b in row) for row in blocks]


# The calculator: the roofline with sliders.
def roofline_calculator(model: str = "Llama-3-8B", device: str = "H100 SXM") -> Any:
    """A widget: choose a model, a device, a batch and a context, and see the roofline,
    the numbers and every device beside it. Needs ipywidgets, which JupyterLab has."""
    import ipywidgets as w

    wide = {"layout": w.Layout(width="340px")}
    batches, contexts = [2**n for n in range(11)], [2**n for n in range(7, 18)]
    models = w.Dropdown(options=list(SHAPES), value=model, description="model", **wide)
    devices = w.Dropdown(
        options=list(DEVICES), value=device, description="device", **wide
    )
    batch = w.SelectionSlider(options=batches, value=16, description="batch", **wide)
    context = w.SelectionSlider(
        options=contexts, value=1024, description="context", **wide
    )
    picture, numbers = w.HTML(), w.HTML()
    controls = (models, devices, batch, context)

    def draw(_: Any = None) -> None:
        chosen = SHAPES[models.value], DEVICES[devices.value]
        picture.value = calculator_picture(*chosen, batch.value, context.value).html()
        numbers.value = calculator_table(*chosen, batch.value, context.value)

    for control in controls:
        control.observe(draw, "value")
    draw()
    choices = w.HBox([w.VBox([models, devices]), w.VBox([batch, context])])
    return w.VBox([choices, picture, numbers])


def calculator_picture(
    shape: Shape, device: Device, batch: int, context: int
) -> Figure:
    """The roofline of one decoding step, and of one request's whole prompt."""
    loads = {
        f"decode, {batch:,} × {context:,}": [(1, context)] * batch,
        f"prefill of {context:,}": [(context, context)],
    }
    return roofline(shape, device, loads)


def calculator_table(shape: Shape, device: Device, batch: int, context: int) -> str:
    """An HTML table: a decoding step on every device, `device` in bold."""
    names = ("device", "FLOP/s", "bytes/s", "memory", "ridge", "step at least")
    rows = [("th", (*names, "tokens/s at most", "knee", f"requests of {context:,}"))]
    for one in DEVICES.values():
        cells = _calculated(shape, one, batch, context)
        if one == device:
            cells = tuple(f"<b>{cell}</b>" for cell in cells)
        rows.append(("td", cells))
    body = "".join(
        "<tr>" + "".join(f"<{tag} align=right>{cell}</{tag}>" for cell in row) + "</tr>"
        for tag, row in rows
    )
    return f"<table style='border-spacing: 10px 2px'>{body}</table>"


def _calculated(
    shape: Shape, device: Device, batch: int, context: int
) -> tuple[str, ...]:
    fits = concurrency(shape, device, context)
    seconds = decode(shape, batch, context, device.width).seconds(device)
    return (
        escape(device.name),
        si(device.flops, ""),
        si(device.bandwidth, ""),
        si(device.memory, "B"),
        f"{device.ridge:,.0f}",
        si(seconds, "s"),
        f"{batch / seconds:,.0f}",
        f"{knee(shape, device):,}",
        "weights do not fit" if fits is None else f"{fits:,}",
    )
