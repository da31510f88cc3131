"""A cache simulator: seeded arrivals through the real scheduler, slot by slot.

No model runs: what the tokens are makes no difference to where they lie. `simulate`
counts, `picture` draws, `cache_simulator` puts sliders before it. Knows schedulers and
how to draw counts; time is counted in steps. Used in chapters 03 and 04.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from pagedattn.bench.dry import run_step, scheduler_for
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Scheduler
from pagedattn.viz.figure import CACHED, FREE, Figure, label, legend, line, page, rect

USEFUL, EMPTY, RUNNING, WAITING = "#4477aa", "#ee6677", "#228833", "#aa3377"
COLUMNS = 100  # points in a picture, whatever the number of steps
LEFT, WIDTH, POOL, QUEUE = 56, 600, 170, 70  # pixels
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Moment:
    """One step: slots by what they hold, and requests by where they are.

    `useful`: keys and values that a running request reads. `empty`: held, nothing in
    it yet. `cached`: free, found again by who begins alike. `free`: the rest.
    """

    useful: int
    empty: int
    cached: int
    free: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """What happened: a moment for each step, and sums over all of them.

    `asked` and `found` are tokens that admitted requests brought and found cached.
    """

    block_size: int
    num_blocks: int
    moments: tuple[Moment, ...]
    asked: int
    found: int
    preemptions: int
    finished: int

    @property
    def slots(self) -> int:
        """Slots of the pool."""
        return self.block_size * self.num_blocks

    @property
    def hit_rate(self) -> float:
        """Share of the admitted requests' tokens that were found in the cache."""
        return self.found / max(1, self.asked)

    def share(self, part: str) -> float:
        """Average share of the pool that was `useful`, `empty`, `cached` or `free`."""
        total = sum(getattr(moment, part) for moment in self.moments)
        return total / (self.slots * len(self.moments))

    def average(self, part: str) -> float:
        """Requests `running` or `waiting`, on average."""
        total = sum(getattr(moment, part) for moment in self.moments)
        return total / len(self.moments)


def simulate(
    block_size: int = 16,
    num_blocks: int = 256,
    rate: float = 0.4,
    shared_prefix: int = 0,
    *,
    steps: int = 400,
    budget: int = 512,
    prefix_caching: bool = True,
    seed: int = 0,
) -> Simulation:
    """Run `steps` steps while `rate` requests arrive in each, on average.

    All begin with the same `shared_prefix` tokens, then go their own ways. A seed draws
    the same requests in the same order, whatever the other settings.
    """
    config = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks + 1,
        max_num_batched_tokens=budget,
        prefix_caching=prefix_caching,
    )
    scheduler = scheduler_for(config)
    coming = _arrivals(rate, shared_prefix, block_size * num_blocks, seed)
    arrival, request = next(coming)
    moments: list[Moment] = []
    admitted: list[Request] = []
    arrived = 0
    for step in range(steps):
        while arrival <= step:
            scheduler.add(request)
            arrived += 1
            arrival, request = next(coming)
        run_step(scheduler, lambda: moments.append(_moment(scheduler)))
        admitted += scheduler.take_admitted()
    return Simulation(
        block_size,
        num_blocks,
        tuple(moments),
        sum(one.prompt_len for one in admitted),
        sum(one.cached or 0 for one in admitted),
        scheduler.preemptions,
        arrived - len(scheduler.running) - len(scheduler.waiting),
    )


def _arrivals(
    rate: float, shared_prefix: int, capacity: int, seed: int
) -> Iterator[tuple[float, Request]]:
    """(step, request) for ever. Own prompts of about 60 tokens, answers of about 50."""
    draw, at, i = random.Random(seed), 0.0, 0
    while True:
        at += draw.expovariate(1.0) / rate
        own = round(draw.lognormvariate(log(45), 0.8)) + 1
        answer = round(draw.lognormvariate(log(40), 0.7)) + 1
        prompt = [*range(shared_prefix), *[shared_prefix + i] * own][: capacity - 1]
        params = SamplingParams(temperature=0, max_tokens=answer)
        limit = min(len(prompt) + answer, capacity)
        yield at, Request(f"r{i}", prompt, params, limit)
        i += 1


def _moment(scheduler: Scheduler) -> Moment:
    size, pool = scheduler.config.block_size, scheduler.pool
    used: dict[int, int] = {}
    for request in scheduler.running:
        full, rest = divmod(request.computed, size)
        table = scheduler.tables.ids(request)[0]
        used.update(dict.fromkeys(table[:full], size))
        if rest:
            used[table[full]] = rest
    useful, held = sum(used.values()), scheduler.tables.slots()
    cached = size * sum(block.key is not None for block in pool.free)
    free = size * len(pool.free) - cached
    running, waiting = len(scheduler.running), len(scheduler.waiting)
    return Moment(useful, held - useful, cached, free, running, waiting)


# The picture: where the slots were above, who ran and who waited below.
def picture(simulation: Simulation) -> Figure:
    """Useful, empty, cached and free slots, step by step; the queues below."""
    points = list(_averages(simulation))
    parts = [label(LEFT, 22, _headline(simulation), size=14, font_weight="bold")]
    parts += legend([(name, fill) for name, fill, _ in _LAYERS], LEFT, 46)
    parts += _pool(points, simulation.slots, 60)
    parts += _queues(points, 60 + POOL + 34)
    height = 60 + POOL + 34 + QUEUE + 30
    steps = len(simulation.moments)
    parts.append(label(LEFT, height - 8, f"steps 1 to {steps}", size=11))
    svg = page(LEFT + WIDTH + 16, height, parts)
    return Figure(svg, _text(simulation, points), "KV slots and requests, step by step")


_LAYERS: tuple[tuple[str, str, Callable[[Moment], int]], ...] = (
    ("useful", USEFUL, lambda moment: moment.useful),
    ("empty", EMPTY, lambda moment: moment.empty),
    ("cached", CACHED, lambda moment: moment.cached),
    ("free", FREE, lambda moment: moment.free),
)
_LINES: tuple[tuple[str, str, Callable[[Moment], int]], ...] = (
    ("running", RUNNING, lambda moment: moment.running),
    ("waiting", WAITING, lambda moment: moment.waiting),
)


def _averages(simulation: Simulation) -> Iterator[Sequence[float]]:
    """(useful, empty, cached, free, running, waiting) of each column of the picture."""
    moments = simulation.moments
    columns = min(COLUMNS, len(moments))
    for i in range(columns):
        first = i * len(moments) // columns
        part = moments[first : (i + 1) * len(moments) // columns]
        yield [
            sum(value(moment) for moment in part) / len(part)
            for _, _, value in (*_LAYERS, *_LINES)
        ]


def _headline(simulation: Simulation) -> str:
    return (
        f"{simulation.slots} slots in blocks of {simulation.block_size}: "
        f"{simulation.share('useful'):.0%} useful, "
        f"{simulation.share('empty'):.1%} empty; "
        f"{simulation.hit_rate:.0%} hit, {simulation.preemptions} preempted, "
        f"{simulation.finished} finished"
    )


def _pool(points: Sequence[Sequence[float]], slots: int, top: float) -> Iterator[str]:
    """The layers, stacked from the bottom; slots that are free stay white."""
    below = [0.0] * len(points)
    for i, (_, fill, _) in enumerate(_LAYERS[:-1]):
        above = [b + point[i] for b, point in zip(below, points, strict=True)]
        yield _band(below, above, slots, top, fill)
        below = above
    yield rect(LEFT, top, WIDTH, POOL, "none", stroke="#888888")
    for share in (0, 50, 100):
        y = top + POOL * (1 - share / 100)
        yield label(LEFT - 8, y + 4, f"{share} %", size=11, text_anchor="end")


def _band(
    below: Sequence[float], above: Sequence[float], slots: int, top: float, fill: str
) -> str:
    def edge(values: Sequence[float]) -> list[str]:
        return [
            f"{LEFT + WIDTH * i / max(1, len(values) - 1):.4g} "
            f"{top + POOL * (1 - value / slots):.4g}"
            for i, value in enumerate(values)
        ]

    points = " ".join([*edge(above), *reversed(edge(below))])
    return f'<polygon points="{points}" fill="{fill}"/>'


def _queues(points: Sequence[Sequence[float]], top: float) -> Iterator[str]:
    """Running and waiting requests as lines on one scale."""
    most = max(1.0, *(max(point[4:]) for point in points))
    bottom = top + QUEUE
    yield line(LEFT, bottom, LEFT + WIDTH, bottom, stroke="#888888")
    yield label(LEFT - 8, top + 4, f"{most:.0f}", size=11, text_anchor="end")
    yield label(LEFT - 8, bottom + 4, "0", size=11, text_anchor="end")
    for i, (name, stroke, _) in enumerate(_LINES):
        track = " ".join(
            f"{LEFT + WIDTH * x / max(1, len(points) - 1):.4g} "
            f"{bottom - QUEUE * point[4 + i] / most:.4g}"
            for x, point in enumerate(points)
        )
        yield (
            f'<polyline points="{track}" fill="none" stroke="{stroke}" '
            'stroke-width="2"/>'
        )
        yield label(LEFT + 70 * i, top - 8, name, size=12, fill=stroke)


def _text(simulation: Simulation, points: Sequence[Sequence[float]]) -> str:
    """A line of bars for each layer and each line, after what the picture says."""
    columns = list(zip(*points, strict=True))
    rows = [_headline(simulation)]
    scales = [simulation.slots] * 4 + [max(1.0, *columns[4], *columns[5])] * 2
    for (name, _, _), values, most in zip(
        (*_LAYERS, *_LINES), columns, scales, strict=True
    ):
        rows.append(f"{name:>8} {_bars(values[::2], most)}")
    return "\n".join(rows)


def _bars(values: Iterable[float], most: float) -> str:
    return "".join(
        BARS[min(len(BARS) - 1, round(value / most * (len(BARS) - 1)))]
        for value in values
    )


# The widget: four sliders before the picture.
def cache_simulator() -> Any:
    """A widget: sliders for block size, pool, arrivals and shared prefix, and the
    picture of the simulation that they set."""
    import ipywidgets

    look = {
        "style": {"description_width": "110px"},
        "layout": {"width": "420px"},
        "continuous_update": False,
    }
    sliders = (
        ipywidgets.SelectionSlider(
            options=[8, 16, 32, 64, 128, 256],
            value=16,
            description="block size",
            **look,
        ),
        ipywidgets.IntSlider(4096, 512, 8192, 512, description="pool", **look),
        ipywidgets.FloatSlider(
            value=0.4, min=0.1, max=1.2, step=0.1, description="arrivals", **look
        ),
        ipywidgets.IntSlider(0, 0, 512, 32, description="shared prefix", **look),
    )
    shown = ipywidgets.HTML()

    def draw(_: Any = None) -> None:
        size, slots, rate, prefix = (slider.value for slider in sliders)
        shown.value = picture(simulate(size, slots // size, rate, prefix)).html()

    for slider in sliders:
        slider.observe(draw, "value")
    draw()
    return ipywidgets.VBox([*sliders, shown])
