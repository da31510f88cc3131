# Exercise 15 · Measure: build it.
#
# This is pagedattn/bench/timeline.py without these bodies:
#
#     Timeline.values
#     _spread
#     _keeps
#     _busiest_second
#     _most_at_once
#
# Each raises NotImplementedError. Its docstring is its contract: write the body here,
# in this file, and keep the signature.
#
#     make exercise N=15    the engine's own tests on your file, and one hint
#     make hint N=15        a hint alone
#     make reset N=15       this file as it was; yours is kept beside it
#
# The idea is in book/15_measure.ipynb.
# One solution is pagedattn/bench/timeline.py itself.
#
# Made from pagedattn/bench/timeline.py by exercises/tools.py. Untouched: 9e65497c6ffd

"""When each request was sent and when its tokens came, and what that adds up to.

Names and definitions are vLLM's: TTFT, time to first token; TPOT, the mean time per
token after the first; ITL, the gap between two arrivals; E2EL, the whole. Knows
seconds that others hand in; reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from pagedattn.errors import UserError

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(slots=True)
class Timeline:
    """One request. `arrivals` are (seconds, tokens that came); `error`: it failed."""

    prompt_tokens: int
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    end: float | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ended as it should, with something to show."""
        return self.error is None and self.end is not None and bool(self.arrivals)

    @property
    def output_tokens(self) -> int:
        """Tokens that came."""
        return sum(n for _, n in self.arrivals)

    def values(self, metric: str) -> list[float]:
        """What this request adds to a metric, in milliseconds."""
        raise NotImplementedError("exercise 15: Timeline.values")


def summary(
    timelines: Sequence[Timeline],
    duration: float,
    percentiles: Iterable[float] = (50, 90, 99),
    goals: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Everything a benchmark reports, under the names of vLLM's result files.

    `goals` are limits in milliseconds by metric: goodput counts the requests that keep
    all of them. Latencies are those of requests that succeeded; None where there is
    none.
    """
    good = [t for t in timelines if t.ok]
    prompt, output = (sum(getattr(t, n) for t in good) for n in TOKENS)
    met = [t for t in good if goals and _keeps(t, goals)]
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(timelines) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration,
        "request_goodput": len(met) / duration if goals else None,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": _most_at_once(good),
    }
    for metric in METRICS:
        values = [v for t in good for v in t.values(metric)]
        result |= _spread(metric, values, percentiles)
    return result


TOKENS = ("prompt_tokens", "output_tokens")


def _spread(
    metric: str, values: Sequence[float], percentiles: Iterable[float]
) -> dict[str, float | None]:
    """Mean, median, deviation and percentiles of some milliseconds."""
    raise NotImplementedError("exercise 15: _spread")


def _keeps(timeline: Timeline, goals: Mapping[str, float]) -> bool:
    """Whether a request keeps every goal; of several gaps, their mean counts."""
    raise NotImplementedError("exercise 15: _keeps")


def _busiest_second(timelines: Iterable[Timeline]) -> int:
    """The most tokens that came within one second of the run."""
    raise NotImplementedError("exercise 15: _busiest_second")


def _most_at_once(timelines: Iterable[Timeline]) -> int:
    """The most requests under way at one moment; one that ends makes room first."""
    raise NotImplementedError("exercise 15: _most_at_once")


def parse_goals(given: Sequence[str]) -> dict[str, float]:
    """`--goodput ttft:500 tpot:50`: metric → milliseconds; UserError if malformed."""
    goals = {}
    for pair in given:
        metric, _, limit = pair.partition(":")
        try:
            goals[metric] = float(limit)
        except ValueError:
            goals[metric] = -1.0
        if metric not in ("ttft", "tpot", "e2el") or not goals[metric] > 0:
            raise UserError(
                f"goodput={pair!r} is no NAME:MILLISECONDS of ttft, tpot or e2el.",
                "goodput",
            )
    return goals
