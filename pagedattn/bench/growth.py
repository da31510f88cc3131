"""What a step costs besides the model, while more and more stands around it.

    pagedattn bench growth

The real engine around a model that computes nothing: who waits, how many blocks there
are and how long the contexts are must not matter to a step that computes one token for
each of the running requests. Engines that differ in one of these are stepped in turns,
so that what disturbs the machine disturbs all of them. Chapter 15 reads the table.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pagedattn.engine import Engine
from pagedattn.model.batch import Batch, LayerCache
from pagedattn.request import RequestOutputKind, SamplingParams
from pagedattn.testing import VOCABULARY, HashModel, hash_engine

BLOCK = 16
ROUND = BLOCK  # steps in a row: every request starts one block in each round
ROUNDS = 8
WARM = 4  # steps that are not counted
SEEN = 512  # logits that sampling sees: fewer, so that what grows shows
WEIGHTS = 16 << 20  # 64 MB
CHUNK = 8192  # tokens in a step while contexts are filled
SHORT = 4  # output tokens of requests that come and go


@dataclass(frozen=True, slots=True)
class Case:
    """What there is: running and waiting requests, blocks, tokens of each context.

    With `turnover`, requests end after a few tokens and the line moves up.
    """

    running: int
    waiting: int = 0
    blocks: int = 1200
    context: int = 100
    turnover: bool = False


class ClockedModel(HashModel):
    """Adds up its own `seconds`, and computes no hashes.

    As any model it reads weights, and so leaves the processor's caches to nobody; and
    as cold beside a long context as beside a short one, which hashes would not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.ones(WEIGHTS)
        self.seconds = 0.0

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """The ids."""
        start = time.thread_time()
        self.weights.sum()
        self.seconds += time.thread_time() - start
        return batch.ids

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, SEEN]: 1 for the entry that each hash names, else 0."""
        start = time.thread_time()
        logits = torch.nn.functional.one_hot(hidden % SEEN, SEEN).float()
        self.seconds += time.thread_time() - start
        return logits


@dataclass(slots=True)
class Bench:
    """One case's engine, and what each step took, in the order of the steps."""

    case: Case
    engine: Engine
    model: ClockedModel
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    arrived: int = 0
    seconds: list[float] = field(default_factory=list)

    def fill(self) -> None:
        """Let the running ones compute their contexts and the others queue up."""
        scheduler = self.engine.scheduler
        self._arrive(self.case.running)
        while any(r.behind > 1 for r in (*scheduler.waiting, *scheduler.running)):
            self.engine.step()
        self._queue()
        for _ in range(WARM):
            self.step()
        self.seconds.clear()

    def step(self) -> None:
        """Step once, and note what it took outside the model."""
        start = time.thread_time() - self.model.seconds
        self.engine.step()
        self.seconds.append(time.thread_time() - self.model.seconds - start)
        self._queue()

    @property
    def overhead(self) -> float:
        """Seconds a step: of the first, the second, … of all rounds the median, and of
        these the mean, so that what comes once in a block is in it."""
        steps = (self.seconds[i::ROUND] for i in range(ROUND))
        return statistics.mean(statistics.median(step) for step in steps)

    def _queue(self) -> None:
        """Keep the line as long as the case wants it."""
        self._arrive(self.case.waiting - len(self.engine.scheduler.waiting))

    def _arrive(self, n: int) -> None:
        case = self.case
        params = SamplingParams(
            temperature=0.0,
            max_tokens=SHORT if case.turnover else None,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        for _ in range(n):
            # Several lengths: else all start a block in one step, none in others.
            length = case.context + self.arrived % BLOCK
            prompt = self.draw.choices(range(VOCABULARY), k=length)
            self.engine.add_request(str(self.arrived), prompt, params)
            self.arrived += 1


def bench_for(case: Case) -> Bench:
    """The case, ready to be stepped."""
    engine = hash_engine(
        num_blocks=case.blocks,
        block_size=BLOCK,
        max_num_seqs=case.running,
        max_num_batched_tokens=CHUNK,
        max_model_len=2 * case.context + 1000,
    )
    model = ClockedModel()
    engine.runner.model = model
    bench = Bench(case, engine, model)
    bench.fill()
    return bench


def compare(cases: Iterable[Case], rounds: int = ROUNDS) -> list[Bench]:
    """Step the cases in turns, so many rounds."""
    benches = [bench_for(case) for case in cases]
    for _ in range(rounds * ROUND):
        for bench in benches:
            bench.step()
    return benches


def series(running: int) -> list[list[Case]]:
    """What is compared with so many running: in each list, with the first."""
    one = Case(running)
    line = replace(one, waiting=1000, context=20, turnover=True)
    many = replace(one, blocks=max(200_000, 7000 * running))
    return [
        [
            one,
            replace(one, waiting=1000),
            replace(one, waiting=50_000),
            many,
            replace(many, context=100_000),
        ],
        [line, replace(line, waiting=50_000)],
    ]


def table(running: Iterable[int] = (1, 16, 64)) -> str:
    """Measure every series; microseconds a step, and the ratio to the series' first."""
    lines = [
        f"{'running':>7}{'waiting':>9}{'blocks':>9}{'context':>9}"
        f"{'line':>8}{'us/step':>10}{'ratio':>8}"
    ]
    for cases in (cases for n in running for cases in series(n)):
        benches = compare(cases)
        for bench in benches:
            lines.append(_line(bench, benches[0].overhead))
    return "\n".join(lines)


def _line(bench: Bench, base: float) -> str:
    case = bench.case
    return (
        f"{case.running:7,}{case.waiting:9,}{case.blocks:9,}{case.context:9,}"
        f"{'moves' if case.turnover else 'stands':>8}"
        f"{1e6 * bench.overhead:10.0f}{bench.overhead / base:8.2f}"
    )
