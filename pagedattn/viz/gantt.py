"""Who was computed in which step: the scheduler's plans as Gantt charts.

`schedule_of` reads plans, and nothing but plans; `continuous_batches` and
`static_batches` make them with the real scheduler; `gantt` draws them. Knows plans and
how to draw them; time is counted in steps. Used in chapter 05.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import Any

from pagedattn.bench.dry import run_step, scheduler_for
from pagedattn.config import EngineConfig
from pagedattn.errors import UserError
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Item, Plan, Scheduler
from pagedattn.viz.figure import INK, Figure, label, legend, line, page, rect

# What a request does in a step: colour, text square, words of the legend.
KINDS = {
    "prompt": ("#4477aa", "🟦", "prompt"),
    "again": ("#ccbb44", "🟨", "computed again"),
    "decode": ("#228833", "🟩", "one new token"),
    "failed": ("#ee6677", "🟥", "step failed"),
    "idle": ("#bbbbbb", "⬛", "seat kept, empty"),
    "wait": ("#f0ece4", "⬜", "waits"),
}
PREEMPTED, HIT = "#cc3311", "#aa3377"
WIDTH, CELL, ROW = 760, 26, 20  # pixels: all columns, the widest column, a row
STEP_COST = 8  # a step of n tokens is drawn as wide as n + this many
SQUARES, LINES = 60, 16  # columns and rows of the text form, at most


@dataclass(frozen=True, slots=True)
class Job:
    """A request to come: how many tokens it brings, and how many it wants.

    The first `shared` tokens of its prompt are the same for all jobs, the others are
    its own.
    """

    name: str
    prompt: int
    answer: int
    arrives: int = 0
    priority: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class Bar:
    """What one request did in one step: computed `tokens`, the first at `start`.

    `hit`: tokens that its admission in this step found in the cache.
    """

    step: int
    request: str
    kind: str
    start: int = 0
    tokens: int = 0
    hit: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who did what when. `tokens` has an entry for each step, computed by everybody."""

    bars: tuple[Bar, ...]
    tokens: tuple[int, ...]
    arrivals: Mapping[str, int]
    preempted: tuple[tuple[int, str], ...] = ()  # (step, request)

    @property
    def steps(self) -> int:
        """Steps from the first arrival to the last end."""
        return len(self.tokens)

    @property
    def busy(self) -> float:
        """Requests computed in a step, on average."""
        idle = ("wait", "idle")
        return sum(bar.kind not in idle for bar in self.bars) / max(1, self.steps)

    def first_tokens(self) -> dict[str, int]:
        """Steps from each request's arrival to its first token."""
        last: dict[str, int] = {}
        decoding = set()
        for bar in self.bars:
            if bar.kind == "decode":
                decoding.add(bar.request)
            elif bar.kind in ("prompt", "again") and bar.request not in decoding:
                last[bar.request] = bar.step
        return {name: at - self.arrivals[name] + 1 for name, at in last.items()}


# From plans to bars.
@dataclass(slots=True)
class _Life:
    """What the plans so far told of one request."""

    known: int = 0  # tokens at its last start: past them, it decodes
    reached: int = 0  # tokens ever computed
    dropped: int | None = None  # the step of its last drop
    fresh: bool = True  # no item since its last start
    bars: dict[int, Bar] = field(default_factory=dict)


def schedule_of(
    plans: Sequence[Plan | None],
    arrivals: Mapping[str, int] | None = None,
    failed: Collection[int] = (),
) -> Schedule:
    """The schedule that `plans` were, one for each step; None: nothing to compute.

    `arrivals` are the steps in which requests came, 0 where nothing is said; `failed`
    are the steps that were planned and did not run.
    """
    lives: dict[str, _Life] = {}
    preempted: list[tuple[int, str]] = []
    for step, plan in enumerate(plans):
        if plan is None:
            continue
        for name in plan.drops:
            lives[name].dropped = None if step - 1 in failed else step
        for start in plan.starts:
            life = lives.setdefault(start.request_id, _Life())
            if life.dropped is not None:
                preempted.append((life.dropped, start.request_id))
            life.known, life.fresh, life.dropped = len(start.tokens), True, None
        for item in plan.items:
            _compute(lives[item.request_id], step, item, step in failed)
    arrived = {name: 0 for name in lives} | dict(arrivals or {})
    bars = [bar for name in lives for bar in _row(lives[name], name, arrived[name])]
    return Schedule(
        tuple(bars),
        tuple(plan.num_tokens if plan else 0 for plan in plans),
        arrived,
        tuple(preempted),
    )


def _compute(life: _Life, step: int, item: Item, failed: bool) -> None:
    """Note what the item computes in this step."""
    end = item.start + len(item.tokens)
    kind = "decode" if item.start >= life.known else "prompt"
    if item.start < life.reached or (life.fresh and life.reached):
        kind = "again"
    hit = item.start if life.fresh else 0
    life.bars[step] = Bar(
        step,
        item.request_id,
        "failed" if failed else kind,
        item.start,
        len(item.tokens),
        hit,
    )
    life.fresh = False
    if not failed:
        life.reached = max(life.reached, end)


def _row(life: _Life, name: str, arrival: int) -> Iterator[Bar]:
    """The request's bars in order, waiting in between."""
    for step in range(arrival, max(life.bars) + 1):
        yield life.bars.get(step) or Bar(step, name, "wait")


# From jobs to plans.
def requests_of(jobs: Sequence[Job], scheduler: Scheduler) -> list[Request]:
    """A request for each job; UserError if the scheduler could never finish one."""
    capacity, config = scheduler.tables.capacity(), scheduler.config
    made = []
    for i, job in enumerate(jobs):
        longest = job.prompt + job.answer - 1  # the last token is never computed
        if longest > capacity:
            raise UserError(f"{job.name} needs {longest} slots, there are {capacity}.")
        if not config.chunked_prefill and longest > config.max_num_batched_tokens:
            raise UserError(
                f"Without chunked prefill all {longest} tokens of {job.name} must fit "
                f"into one step, and the budget is {config.max_num_batched_tokens}."
            )
        prompt = [*range(job.shared), *[1000 + i] * (job.prompt - job.shared)]
        params = SamplingParams(temperature=0, max_tokens=job.answer)
        limit = job.prompt + job.answer
        made.append(Request(job.name, prompt, params, limit, priority=job.priority))
    return made


def new_scheduler(**config: Any) -> Scheduler:
    """The real scheduler with `EngineConfig` fields; blocks of four tokens, plenty."""
    settled = EngineConfig(**{"block_size": 4, "num_blocks": 4_000, **config})
    return scheduler_for(settled)


def continuous_batches(jobs: Sequence[Job], **config: Any) -> Schedule:
    """Whoever has arrived may join at every step."""
    scheduler = new_scheduler(**config)
    coming = dict(zip(jobs, requests_of(jobs, scheduler), strict=True))
    plans: list[Plan | None] = []
    while coming or scheduler.has_requests():
        for job in [job for job in coming if job.arrives <= len(plans)]:
            scheduler.add(coming.pop(job))
        plans.append(run_step(scheduler))
    return schedule_of(plans, {job.name: job.arrives for job in jobs})


def static_batches(jobs: Sequence[Job], **config: Any) -> Schedule:
    """Nobody joins until everybody of the batch has ended; a batch is the first
    `max_num_seqs` of those who have arrived."""
    scheduler = new_scheduler(**config)
    coming = dict(zip(jobs, requests_of(jobs, scheduler), strict=True))
    plans: list[Plan | None] = []
    batches: list[list[str]] = []
    ends: list[int] = []
    while coming or scheduler.has_requests():
        if not scheduler.has_requests():
            here = [job for job in coming if job.arrives <= len(plans)]
            batch = here[: scheduler.config.max_num_seqs]
            for job in batch:
                scheduler.add(coming.pop(job))
            batches.append([job.name for job in batch])
            ends.append(0)
        plans.append(run_step(scheduler))
        ends[-1] = len(plans)
    schedule = schedule_of(plans, {job.name: job.arrives for job in jobs})
    until = {n: end for names, end in zip(batches, ends, strict=True) for n in names}
    return _with_empty_seats(schedule, until)


def _with_empty_seats(schedule: Schedule, until: Mapping[str, int]) -> Schedule:
    """The schedule, every request keeping its seat to the end of its batch."""
    last = {bar.request: bar.step for bar in schedule.bars}
    bars = [
        bar
        for name, row in groupby(schedule.bars, lambda bar: bar.request)
        for bar in (
            *row,
            *(Bar(step, name, "idle") for step in range(last[name] + 1, until[name])),
        )
    ]
    return Schedule(tuple(bars), schedule.tokens, schedule.arrivals, schedule.preempted)


# From bars to a picture.
@dataclass(frozen=True, slots=True)
class _Scale:
    """Where steps and rows lie, the same for all panels of a figure."""

    left: int
    step: float  # pixels for a step
    token: float  # pixels for each of its tokens, 0: all steps are equally wide
    row: float

    def edges(self, schedule: Schedule) -> list[float]:
        """The x at which each step begins, and the last one ends."""
        x = [float(self.left)]
        for tokens in schedule.tokens:
            x.append(x[-1] + self.step + self.token * tokens)
        return x


def gantt(
    schedules: Mapping[str, Schedule] | Schedule, *, by_tokens: bool = False
) -> Figure:
    """Rows are requests, columns are steps; several schedules on one scale.

    With `by_tokens` a step is the wider, the more tokens it computes.
    """
    if isinstance(schedules, Schedule):
        schedules = {"": schedules}
    scale = _scale(list(schedules.values()), by_tokens)
    every = -(-max(schedule.steps for schedule in schedules.values()) // SQUARES)
    parts: list[str] = []
    text: list[str] = []
    y = 8.0
    for title, schedule in schedules.items():
        heading = f"{title}: {_summary(schedule)}" if title else _summary(schedule)
        parts.append(label(12, y + 14, heading, size=14, font_weight="bold"))
        y += 22
        parts += _panel(schedule, scale, y)
        y += len(_rows(schedule)) * scale.row + 30
        text += [heading, *_text(schedule, every), ""]
    marks, more = _marks(schedules.values())
    parts += legend(marks, 12, y + 12)
    if more:
        parts.append(label(12, y + 36, " · ".join(more), size=12, fill="#555555"))
        y += 20
    width = max(s for each in schedules.values() for s in scale.edges(each)) + 16
    squares = "  ".join(
        f"{KINDS[kind][1]} {KINDS[kind][2]}" for kind in _used(schedules)
    )
    alt = "; ".join(line for line in text if " steps, " in line)
    width = max(width, 40 + sum(40 + 8 * len(name) for name, _ in marks))
    return Figure(page(width, y + 26, parts), "\n".join([*text, squares]), alt)


def _scale(schedules: Sequence[Schedule], by_tokens: bool) -> _Scale:
    names = [name for schedule in schedules for name in _rows(schedule)]
    most = max(len(_rows(schedule)) for schedule in schedules)
    left = 20 + 8 * max(map(len, names))
    row = ROW if most <= 16 else max(5, 320 / most)
    if not by_tokens:
        return _Scale(left, min(CELL, WIDTH / max(s.steps for s in schedules)), 0, row)
    total = max(sum(s.tokens) + STEP_COST * s.steps for s in schedules)
    token = min(CELL / STEP_COST, WIDTH / total)
    return _Scale(left, STEP_COST * token, token, row)


def _rows(schedule: Schedule) -> dict[str, list[Bar]]:
    """Each request's bars, in order of arrival."""
    rows: dict[str, list[Bar]] = {name: [] for name in schedule.arrivals}
    for bar in schedule.bars:
        rows[bar.request].append(bar)
    return rows


def _summary(schedule: Schedule) -> str:
    preempted = len(schedule.preempted)
    more = f", {preempted} preempted" if preempted else ""
    computed = sum(bar.tokens for bar in schedule.bars if bar.kind != "failed")
    return f"{schedule.steps} steps, {computed:,} tokens computed{more}"


def _panel(schedule: Schedule, scale: _Scale, top: float) -> Iterator[str]:
    x, rows = scale.edges(schedule), _rows(schedule)
    at = {name: top + i * scale.row for i, name in enumerate(rows)}
    for name, bars in rows.items():
        if scale.row >= 12:
            yield label(12, at[name] + scale.row - 6, name, size=12)
        for run in _runs(bars, scale):
            yield from _bar(run, x, at[name], scale)
    for step, name in schedule.preempted:
        middle = (x[step] + x[step + 1]) / 2
        yield label(middle - 5, at[name] + scale.row - 5, "✕", size=14, fill=PREEMPTED)
    yield from _axis(schedule, x, top + len(rows) * scale.row, scale)


def _runs(bars: Sequence[Bar], scale: _Scale) -> Iterator[list[Bar]]:
    """Bars that are drawn as one: alike and side by side, where no number fits in."""
    if scale.token or scale.step >= 14:
        yield from ([bar] for bar in bars)
        return
    for _, run in groupby(bars, lambda bar: (bar.kind, bar.hit)):
        yield list(run)


def _bar(run: list[Bar], x: Sequence[float], y: float, scale: _Scale) -> Iterator[str]:
    first, last = run[0], run[-1]
    begin, end = x[first.step], x[last.step + 1]
    gap = 1 if scale.row >= 12 else 0.5
    yield rect(
        begin + gap / 2,
        y + gap,
        max(0.5, end - begin - gap),
        scale.row - 2 * gap,
        KINDS[first.kind][0],
        title=_hover(run),
    )
    if first.hit:
        yield rect(begin + gap / 2, y + gap, 3, scale.row - 2 * gap, HIT)
    if first.tokens > 1 and end - begin > 7 * len(str(first.tokens)):
        middle, light = (begin + end) / 2, INK if first.kind == "again" else "#ffffff"
        yield label(
            middle, y + 14, first.tokens, size=11, fill=light, text_anchor="middle"
        )


def _hover(run: list[Bar]) -> str:
    first, tokens = run[0], sum(bar.tokens for bar in run)
    steps = (
        f"step {first.step}" if len(run) == 1 else f"steps {first.step}–{run[-1].step}"
    )
    more = f", {first.hit} found in the cache" if first.hit else ""
    return f"{first.request}, {steps}: {KINDS[first.kind][2]}, {tokens} tokens{more}"


def _axis(
    schedule: Schedule, x: Sequence[float], y: float, scale: _Scale
) -> Iterator[str]:
    """Steps below the rows, and where each arrival after the first step lies."""
    yield line(x[0], y + 2, x[-1], y + 2, stroke="#888888")
    gap = 5 if scale.step >= 14 else 10 ** len(str(schedule.steps // 10))
    gap = max(gap // 2, 1) if schedule.steps < 3 * gap else gap
    for step in range(0, schedule.steps, gap):
        if step and x[step] - x[0] < 18:
            continue
        yield line(x[step], y + 2, x[step], y + 6, stroke="#888888")
        name = f"step {step}" if step == 0 else step
        yield label(x[step] + 2, y + 16, name, size=11, fill="#555555")


def _used(schedules: Mapping[str, Schedule]) -> list[str]:
    used = {bar.kind for schedule in schedules.values() for bar in schedule.bars}
    return [kind for kind in KINDS if kind in used]


def _marks(schedules: Collection[Schedule]) -> tuple[list[tuple[str, str]], list[str]]:
    """Squares of the legend, and sentences for what squares cannot say."""
    every = {str(i): schedule for i, schedule in enumerate(schedules)}
    marks = [(KINDS[kind][2], KINDS[kind][0]) for kind in _used(every)]
    if any(bar.hit for schedule in schedules for bar in schedule.bars):
        marks.append(("begins with a hit", HIT))
    more = ["✕ preempted"] if any(s.preempted for s in schedules) else []
    return marks, more


def _text(schedule: Schedule, every: int) -> list[str]:
    """A line for each request, one square for `every` steps; of many requests, some."""
    rows = _rows(schedule)
    some = -(-len(rows) // LINES)
    width = max(map(len, rows))
    crossed = {(step // every, name) for step, name in schedule.preempted}
    lines = []
    if every > 1 or some > 1:
        lines.append(f"(a square for {every} steps, a line for {some} requests)")
    for name, bars in list(rows.items())[::some]:
        squares = {bar.step // every: KINDS[bar.kind][1] for bar in bars}
        row = [
            "❌" if (i, name) in crossed else squares.get(i, "\u3000")
            for i in range(max(squares, default=-1) + 1)
        ]
        lines.append(f"{name:<{width}} {''.join(row)}")
    return lines


# With sliders.
EXAMPLE = (
    Job("Ann", 12, 10, shared=8),
    Job("Bob", 14, 6, shared=8),
    Job("Cyd", 5, 22),
    Job("Dan", 24, 5, arrives=2),
    Job("Eve", 6, 12, arrives=3),
    Job("Fay", 11, 4, arrives=6, shared=8),
    Job("Gus", 20, 8, arrives=9),
    Job("Hal", 4, 9, arrives=9),
)


def scheduler_gantt(jobs: Sequence[Job] = EXAMPLE) -> Any:
    """Sliders before the chart of `jobs`: budget, sequences, pool, chunks."""
    import ipywidgets

    def slider(name: str, value: int, low: int, high: int) -> Any:
        return ipywidgets.IntSlider(value, low, high, description=name)

    controls = {
        "budget": slider("budget", 16, 1, 64),
        "seqs": slider("max seqs", 4, 1, 8),
        "blocks": slider("block pool", 24, 9, 60),
        "chunked": ipywidgets.Checkbox(True, description="chunked prefill"),
    }
    picture = ipywidgets.HTML()

    def draw(_: object = None) -> None:
        picture.value = _page(jobs, **{k: c.value for k, c in controls.items()})

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    return ipywidgets.VBox([*controls.values(), picture])


def _page(
    jobs: Sequence[Job], budget: int, seqs: int, blocks: int, chunked: bool
) -> str:
    """What stands under the sliders: the chart, or why there is none."""
    config = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": seqs,
        "num_blocks": blocks + 1,
        "chunked_prefill": chunked,
    }
    try:
        schedule = continuous_batches(jobs, **config)
    except UserError as error:
        return f"<p>{escape(str(error))}</p>"
    first = schedule.first_tokens()
    mean = sum(first.values()) / len(first)
    return (
        f"{gantt(schedule).html()}<p>Longest step: {max(schedule.tokens)} tokens. "
        f"A first token comes after {mean:.1f} steps on average, "
        f"{max(first.values())} at most.</p>"
    )
