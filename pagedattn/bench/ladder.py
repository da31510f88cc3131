"""The ladder: one small greedy workload, run in nine ways, each adding one thing.

    pagedattn bench ladder

Every rung is real work of the real modules and must say the same tokens. The order is
that of the ideas: first what is computed (1 to 2), then who is computed together
(3 to 7), then how fast (8 and 9). So rungs 1 to 7 run on plain torch, `kernels/spec.py`
and `F.linear`, and the last two put the engine's packed products and its numba kernels
under the same schedule. All rungs share one pool of KV slots, `ROOM` requests of the
longest kind. Knows schedulers, runners and a clock. Chapter 15 climbs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm

from pagedattn.bench.report import machine, save
from pagedattn.bench.workloads import random_prompts
from pagedattn.cache.tables import LayerGroup, blocks_for, group_layers
from pagedattn.config import EngineConfig
from pagedattn.errors import UserError
from pagedattn.kernels import cpu, spec
from pagedattn.model import linear, loader
from pagedattn.model.batch import make_batch
from pagedattn.model.decoder import Decoder
from pagedattn.model.source import Source
from pagedattn.request import Request, SamplingParams
from pagedattn.runner import Runner
from pagedattn.scheduler import Item, Plan, Scheduler, Update

PATTERN = (
    (16, 6),
    (8, 24),
    (24, 4),
    (80, 14),
)  # own prompt and output tokens, repeated
ROOM = 4  # requests of the longest kind that the pool holds
SEATS = 8  # most requests at once where blocks are taken as they are needed
BLOCK = 16  # slots in a block
CHUNK = 32  # tokens in a step where prompts are cut
MARGIN = 1e-4  # two rungs may part where the best logit leads by less


class Rung(IntEnum):
    """What a rung adds; it has all that those before it have."""

    NAIVE = 1
    CACHE = 2
    STATIC = 3
    CONTINUOUS = 4
    PAGED = 5
    PREFIX = 6
    CHUNKED = 7
    PACKED = 8
    FUSED = 9

    @property
    def adds(self) -> str:
        """A few words for tables and pictures."""
        return NAMES[self - 1]

    def share(self, n: int) -> int:
        """How many of `n` requests it runs: slow rungs are bounded."""
        most = {Rung.NAIVE: 1, Rung.CACHE: len(PATTERN)}.get(self, n)
        return min(n, most)


NAMES = (
    "no cache",
    "KV cache",
    "static batches",
    "continuous",
    "paged",
    "prefix cache",
    "chunked prefill",
    "packed weights",
    "fused kernels",
)


# The work: the same for every rung.
@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt, and how many tokens it wants."""

    prompt: tuple[int, ...]
    output: int


def workload(n: int, prefix_len: int, vocab_size: int, seed: int = 0) -> list[Ask]:
    """`n` requests on one prefix of `prefix_len` random tokens, lengths by `PATTERN`.

    UserError unless there is at least one request and at least one token of prefix.
    """
    if n < 1 or prefix_len < 1:
        raise UserError(
            f"num_prompts={n} and prefix_len={prefix_len} must be at least 1.",
            "num_prompts",
        )
    lengths = [PATTERN[i % len(PATTERN)] for i in range(n)]
    own = [prompt for prompt, _ in lengths]
    head, *tails = random_prompts([prefix_len, *own], vocab_size, seed)
    asks = zip(tails, lengths, strict=True)
    return [Ask((*head, *tail), output) for tail, (_, output) in asks]


def longest(asks: Sequence[Ask]) -> int:
    """Slots that the longest possible request fills."""
    return max(len(ask.prompt) + ask.output for ask in asks)


# One rung, and what it took.
@dataclass(slots=True)
class Row:
    """Counts and seconds of one rung.

    `computed` are tokens that went through the model, `passes` forward passes; `held`
    and `empty` are slots, summed over passes: reserved or allocated, and of these not
    (yet) filled. `gap_tokens` and `gap_seconds` are the longest wait of a stream
    between two of its tokens. `parted` sequences took another token than an earlier
    rung where the best logit led by less than `MARGIN`.
    """

    rung: Rung
    requests: int
    output: int = 0
    computed: int = 0
    passes: int = 0
    held: int = 0
    empty: int = 0
    gap_tokens: int = 0
    gap_seconds: float = 0.0
    seconds: float = 0.0
    parted: int = 0
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Output tokens a second: what rungs are compared by."""
        return self.output / self.seconds if self.seconds else 0.0

    @property
    def together(self) -> float:
        """Output tokens of a forward pass."""
        return self.output / self.passes


@dataclass(slots=True)
class _Watch:
    """Notes what each step computed and when each stream got a token."""

    row: Row
    clock: Callable[[], float]
    last: dict[str, tuple[float, int]] = field(default_factory=dict)

    def look(self, plan: Plan, scheduler: Scheduler, reserved: int) -> None:
        """Note a plan and the slots while it runs: so many reserved, or blocks if 0."""
        running = scheduler.running
        self.row.passes += 1
        self.row.computed += plan.num_tokens
        if reserved:
            self.row.held += reserved
            self.row.empty += reserved - sum(r.computed for r in running)
        else:
            self.row.held += scheduler.tables.slots()
            self.row.empty += sum(-r.computed % BLOCK for r in running)

    def hear(self, updates: Sequence[Update]) -> None:
        """Take note of whose tokens have come."""
        now, row = self.clock(), self.row
        for update in updates:
            if not update.tokens:
                continue
            if update.request.id in self.last:
                then, computed = self.last[update.request.id]
                row.gap_seconds = max(row.gap_seconds, now - then)
                row.gap_tokens = max(row.gap_tokens, row.computed - computed)
            self.last[update.request.id] = now, row.computed


def config_for(rung: Rung, asks: Sequence[Ask], groups: int = 1) -> EngineConfig:
    """The engine's settings on a rung. The pool is the same on every rung."""
    slots = ROOM * blocks_for(longest(asks), BLOCK) * BLOCK
    seats = 1 if rung == Rung.CACHE else ROOM if rung < Rung.PAGED else SEATS
    return EngineConfig(
        block_size=BLOCK,
        num_blocks=groups * slots // BLOCK + 1,
        max_model_len=longest(asks),
        max_num_batched_tokens=CHUNK if rung >= Rung.CHUNKED else slots,
        max_num_seqs=seats,
        prefix_caching=rung >= Rung.PREFIX,
        chunked_prefill=rung >= Rung.CHUNKED,
    )


def runner_for(model: Decoder, asks: Sequence[Ask]) -> tuple[Runner, list[LayerGroup]]:
    """The real runner with an empty pool for `asks`, and the model's layer groups."""
    groups = group_layers(model.spec.windows)
    blocks = config_for(Rung.PAGED, asks, len(groups)).num_blocks
    shape = blocks, model.spec.kv_heads, BLOCK, model.spec.head_dim

    def new_cache() -> tuple[torch.Tensor, torch.Tensor]:
        return cpu.empty_kv(*shape, torch.float32)

    return Runner(model, groups, BLOCK, new_cache), groups


def run(
    rung: Rung,
    model: Decoder,
    asks: Sequence[Ask],
    clock: Callable[[], float] = time.perf_counter,
) -> Row:
    """Run the rung's share of `asks` from an empty pool to the end."""
    mine = asks[: rung.share(len(asks))]
    row = Row(rung, len(mine))
    runner, groups = runner_for(model, asks)
    start = clock()
    if rung == Rung.NAIVE:
        row.tokens = [_recompute(runner, len(groups), ask, row) for ask in mine]
    else:
        scheduler = Scheduler(config_for(rung, asks, len(groups)), groups)
        requests = [_request(i, ask) for i, ask in enumerate(mine)]
        _schedule(requests, scheduler, runner, _Watch(row, clock))
        row.tokens = [r.tokens[r.prompt_len :] for r in requests]
    row.seconds = clock() - start
    row.output = sum(map(len, row.tokens))
    return row


def _schedule(
    requests: Sequence[Request], scheduler: Scheduler, runner: Runner, watch: _Watch
) -> None:
    """Plan, run, commit until all is said. Static batches let the next `ROOM` requests
    in when everybody has ended; else the scheduler decides."""
    rung, longest = watch.row.rung, scheduler.config.max_model_len
    line, seats = list(requests), 0
    while line or scheduler.has_requests():
        if not scheduler.has_requests():
            seats = min(len(line), ROOM if rung == Rung.STATIC else len(line))
            for request in line[:seats]:
                scheduler.add(request)
            del line[:seats]
        plan = scheduler.plan()
        assert plan is not None, "requests wait, but none of them can be planned"
        if rung != Rung.STATIC:
            seats = len(scheduler.running)
        watch.look(plan, scheduler, longest * seats if rung < Rung.PAGED else 0)
        watch.hear(scheduler.commit(plan, runner.run(plan)))


def _request(i: int, ask: Ask) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=ask.output, ignore_eos=True)
    prompt = list(ask.prompt)
    return Request(str(i), prompt, params, len(prompt) + ask.output)


def _recompute(runner: Runner, groups: int, ask: Ask, row: Row) -> list[int]:
    """The naive rung: the whole sequence again for every token."""
    ids = list(ask.prompt)
    for _ in range(ask.output):
        row.passes += 1
        row.computed += len(ids)
        ids.append(int(next_logits(runner, groups, ids).argmax()))
    return ids[len(ask.prompt) :]


@torch.inference_mode()
def next_logits(runner: Runner, groups: int, ids: Sequence[int]) -> torch.Tensor:
    """Logits [vocab] after `ids`, all of them computed; overwrites the pool."""
    n = blocks_for(len(ids), BLOCK)
    tables = tuple(tuple(range(1 + g * n, 1 + (g + 1) * n)) for g in range(groups))
    item = Item("alone", 0, 0, tuple(ids), tables, samples=True)
    batch = make_batch([item], [ids], BLOCK)
    hidden = runner.model.forward(batch, runner.caches)
    return runner.model.logits(hidden[batch.rows])[0]


# The whole ladder.
def climb(
    found: Source, n: int = 12, prefix_len: int = 48, progress: bool = False
) -> list[Row]:
    """Run every rung on `n` requests: a row each, after a warm-up of each model.

    Raises RuntimeError if two rungs differ where the model was sure.
    """
    asks = workload(n, prefix_len, loader.model_spec(found).vocab_size)
    rows: list[Row] = []
    said: dict[int, list[int]] = {}
    model: Decoder | None = None
    for rung in tqdm(Rung, unit="rung", disable=not progress):
        if rung in (Rung.NAIVE, Rung.PACKED, Rung.FUSED):
            model = None  # before the next one is read: only one is in memory
            model = model_for(rung, found, longest(asks))
            run(Rung.CHUNKED, model, [Ask(asks[0].prompt, 2)] * 2)
        assert model is not None
        row = run(rung, model, asks)
        row.parted = parted(row, said, model, asks)
        rows.append(row)
    return rows


# Kernels that read packed weights; all others of that rung are the specification's.
PACKED = {name: getattr(cpu, name) for name in ("silu_linear", "gelu_tanh_linear")}


def model_for(rung: Rung, found: Source, max_model_len: int) -> Decoder:
    """The model with the rung's products and kernels."""
    if rung < Rung.PACKED:
        with plain_products():
            return loader.load(found, spec, max_model_len)
    kernels = cpu if rung > Rung.PACKED else SimpleNamespace(**vars(spec) | PACKED)
    return loader.load(found, kernels, max_model_len)


@contextmanager
def plain_products() -> Iterator[None]:
    """Linears that are made within keep their weights as they are: `F.linear`."""
    chosen = linear.linear_backend
    linear.linear_backend = lambda: "F.linear"
    try:
        yield
    finally:
        linear.linear_backend = chosen


def parted(
    row: Row, said: dict[int, list[int]], model: Decoder, asks: Sequence[Ask]
) -> int:
    """How many of the row's sequences left what was `said` before, all of them at a
    narrow decision. Adds those that nobody has said to `said`.

    Raises RuntimeError where the best logit leads by `MARGIN` or more.
    """
    count = 0
    for i, tokens in enumerate(row.tokens):
        before = said.setdefault(i, tokens)
        if tokens == before:
            continue
        at = [a == b for a, b in zip(before, tokens, strict=True)].index(False)
        lead = _lead(model, asks, [*asks[i].prompt, *before[:at]])
        if lead >= MARGIN:
            raise RuntimeError(
                f"rung {row.rung.value}, {row.rung.adds}: request {i} says another "
                f"token {at}, and the best logit leads by {lead:.2g}"
            )
        count += 1
    return count


def _lead(model: Decoder, asks: Sequence[Ask], ids: Sequence[int]) -> float:
    """By how much the best logit after `ids` leads the second."""
    runner, groups = runner_for(model, asks)
    first, second = next_logits(runner, len(groups), ids).topk(2).values.tolist()
    return first - second


# What people read.
def table(rows: Sequence[Row]) -> str:
    """Counts of every rung as text: the same on every machine."""
    lines = [
        f"{'':19}{'requests':>9}{'output':>8}{'computed':>10}{'passes':>8}"
        f"{'out/pass':>10}{'slots filled':>14}{'longest gap':>13}"
    ]
    for row in rows:
        filled = f"{1 - row.empty / row.held:.0%}" if row.held else ""
        gap = f"{row.gap_tokens} tokens" if row.gap_tokens else ""
        lines.append(
            f"{row.rung.value} {row.rung.adds:17}{row.requests:9}{row.output:8}"
            f"{row.computed:10,}{row.passes:8}{row.together:10.2f}{filled:>14}{gap:>13}"
        )
    return "\n".join(lines)


def timing(rows: Sequence[Row]) -> str:
    """Seconds of every rung as text, and how much each is faster than the one before
    and than the first."""
    lines = [
        f"{'':19}{'requests':>9}{'seconds':>9}{'tokens/s':>10}{'× before':>10}"
        f"{'× first':>9}{'longest gap':>13}"
    ]
    before = rows[0]
    for row in rows:
        gap = f"{1e3 * row.gap_seconds:.0f} ms" if row.gap_seconds else ""
        lines.append(
            f"{row.rung.value} {row.rung.adds:17}{row.requests:9}{row.seconds:9.2f}"
            f"{row.rate:10.2f}{row.rate / before.rate:10.2f}"
            f"{row.rate / rows[0].rate:9.1f}{gap:>13}"
        )
        before = row
    return "\n".join([*lines, *_remarks(rows)])


def _remarks(rows: Sequence[Row]) -> list[str]:
    whole = max(row.requests for row in rows)
    few = [f"{r.rung.adds} {r.requests}" for r in rows if r.requests < whole]
    lost = sum(row.parted for row in rows)
    return [
        f"Of {whole} requests, {', '.join(few)}: compare tokens/s, not seconds."
    ] * bool(few) + [f"{lost} sequences parted where two logits were within {MARGIN}."]


def staircase(values: Mapping[str, float], unit: str) -> Any:
    """A matplotlib figure: a step for each name, as high as its value, on a log scale;
    the factor to the step before stands on it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots()
    names, heights = list(values), list(values.values())
    axes.stairs(heights, baseline=min(heights) / 2, fill=True, color="#c6d8ec")
    axes.stairs(heights, baseline=min(heights) / 2, color="#4477aa", linewidth=2)
    factors = ["", *(f"\n× {b / a:.2f}" for a, b in pairwise(heights))]
    for i, (height, factor) in enumerate(zip(heights, factors, strict=True)):
        axes.text(i + 0.5, height * 1.05, f"{height:.3g}{factor}", ha="center")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda x, at: "")
    axes.set(ylim=(min(heights) / 2, 2.2 * max(heights)), ylabel=unit)
    labels = [f"{i}\n{name.replace(' ', chr(10))}" for i, name in enumerate(names, 1)]
    axes.set_xticks([i + 0.5 for i in range(len(names))], labels)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw(rows: Sequence[Row], path: Path) -> None:
    """The staircase of seconds as a PNG."""
    rates = {row.rung.adds: row.rate for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    staircase(rates, "output tokens a second").savefig(path, dpi=120)


def save_rows(rows: Sequence[Row], path: Path) -> None:
    """The rows as JSON, with the machine they were measured on."""
    save({**machine(), "rungs": [_as_json(row) for row in rows]}, path)


def _as_json(row: Row) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(row).items() if name != "tokens"}
    return {**kept, "adds": row.rung.adds, "tokens_per_second": row.rate}
