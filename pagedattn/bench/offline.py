"""Benchmarks of the engine in this process: most throughput, and one batch's latency.

Steps the real engine and notes after each step what came and how full the cache is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from pagedattn.bench.datasets import Sample
from pagedattn.bench.timeline import Timeline
from pagedattn.engine import Engine
from pagedattn.metrics import Counter
from pagedattn.request import RequestOutputKind, SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(slots=True)
class Usage:
    """How the cache was used: slot-steps held and empty, and the fullest moment."""

    held: int = 0
    empty: int = 0
    fullest: float = 0.0

    def look(self, engine: Engine) -> None:
        """Take note of how things stand after a step."""
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        size, groups = scheduler.config.block_size, len(scheduler.tables.groups)
        self.held += scheduler.tables.slots()
        # Only the last block of a table is ever partly empty.
        self.empty += groups * sum(-r.computed % size for r in scheduler.running)
        self.fullest = max(self.fullest, 1 - len(pool.free) / pool.usable)


def params_for(sample: Sample, detokenize: bool = True, **more: Any) -> SamplingParams:
    """Exactly `output_len` tokens, each reported as it comes."""
    return SamplingParams(
        **{"temperature": 0.0, **more},
        max_tokens=sample.output_len,
        ignore_eos=True,
        detokenize=detokenize,
        output_kind=RequestOutputKind.DELTA,
    )


def run(
    engine: Engine,
    samples: Sequence[Sample],
    detokenize: bool = True,
    progress: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Timeline], Usage, float]:
    """Queue every sample at once and run to the end: timelines, usage, seconds."""
    start = clock()
    timelines = {str(i): Timeline(len(s.prompt), start) for i, s in enumerate(samples)}
    for i, sample in enumerate(samples):
        prompt = {"prompt_token_ids": list(sample.prompt)}
        engine.add_request(str(i), prompt, params_for(sample, detokenize))
    usage = Usage()
    with tqdm(total=len(samples), unit="request", disable=not progress) as bar:
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = clock()
            for output in outputs:
                timeline = timelines[output.request_id]
                new = len(output.outputs[0].token_ids)
                if new:
                    timeline.arrivals.append((now, new))
                if output.finished:
                    timeline.end = now
                    bar.update()
            usage.look(engine)
    return list(timelines.values()), usage, clock() - start


def cache_report(
    engine: Engine, usage: Usage, before: dict[str, int]
) -> dict[str, Any]:
    """The cache's part of a report, in percent; `before` are counters at the start."""
    counters = counters_of(engine)
    new = {name: value - before.get(name, 0) for name, value in counters.items()}
    queries = new["vllm:prefix_cache_queries"]
    return {
        "kv_cache_usage": 100 * usage.fullest,
        "kv_waste": 100 * usage.empty / usage.held if usage.held else 0.0,
        "prefix_hit_rate": 100 * new["vllm:prefix_cache_hits"] / queries
        if queries
        else 0.0,
        "preemptions": new["vllm:num_preemptions"],
    }


def counters_of(engine: Engine) -> dict[str, int]:
    """The engine's counters now, by name."""
    return {m.name: m.value for m in engine.get_metrics() if isinstance(m, Counter)}


def latency(
    engine: Engine,
    batch: Sequence[Sample],
    warmups: int,
    iterations: int,
    detokenize: bool = True,
    progress: bool = True,
) -> dict[str, Any]:
    """Seconds that one batch takes, over and over: their mean and percentiles."""
    seconds = []
    for i in tqdm(range(warmups + iterations), unit="batch", disable=not progress):
        took = run(engine, batch, detokenize, progress=False)[2]
        engine.scheduler.reset_prefix_cache()
        if i >= warmups:
            seconds.append(took)
    found = np.percentile(seconds, PERCENTILES)
    return {
        "avg_latency": float(np.mean(seconds)),
        "latencies": seconds,
        "percentiles": dict(zip(map(str, PERCENTILES), map(float, found), strict=True)),
    }
