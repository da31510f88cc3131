"""Where a step's time goes, beside the least that its bytes and FLOPs allow.

While a `Profile` is attached, the engine's parts, every kernel and every product are
wrapped in two readings of a clock; otherwise nothing is paid for it. Knows names and
shapes of kernels; changes no result.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import pagedattn.runner
from pagedattn.bench.ceilings import Ceilings, measure
from pagedattn.engine import Engine
from pagedattn.kernels import cpu
from pagedattn.model.linear import Linear
from pagedattn.output import Outputs
from pagedattn.runner import Runner
from pagedattn.scheduler import Scheduler

FLOAT = 4  # bytes


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs and bytes that a call can't avoid; `detail` tells calls apart."""

    flops: float = 0.0
    bytes: float = 0.0
    detail: str = ""


NOTHING = Work()


@dataclass(frozen=True, slots=True)
class Span:
    """One call: what, when (nanoseconds), and its work. Counting that took until
    `over`, which no other span is charged with."""

    name: str
    start: int
    end: int
    over: int
    work: Work


@dataclass(slots=True)
class Row:
    """All calls of one name, added up. `own` leaves out what was called inside."""

    calls: int = 0
    seconds: float = 0.0
    own: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


# What each kernel can't avoid, from its arguments.
def linear_work(linear: Linear, out: Tensor, x: Tensor) -> Work:
    """Every weight once, the inputs and outputs; 2 FLOPs a weight and row."""
    rows, n, k = len(x), linear.out_features, linear.in_features
    moved = FLOAT * (n * k + rows * (n + k))
    return Work(2.0 * rows * n * k, moved, f" {k} x {n}")


def gated_work(out: Tensor, x: Tensor, panels: Tensor) -> Work:
    """As linear_work, of two maps whose outputs meet."""
    (rows, k), n = x.shape, 2 * out.shape[1]
    return Work(
        2.0 * rows * n * k, FLOAT * (n * k + rows * (n // 2 + k)), f" {k} x {n}"
    )


def decode_work(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor,
    lengths: Tensor, scale: float, window: int, softcap: float,
) -> Work:  # fmt: skip
    """Keys and values of every context, once."""
    seen = sum(min(n, window) if window else n for n in lengths.tolist())
    return _attention_work(q, k_cache, seen, seen)


def prefill_work(
    out: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor,
    query_starts: Tensor, lengths: Tensor, scale: float, window: int, softcap: float,
) -> Work:  # fmt: skip
    """Every context once; two products for each pair of a query and what it sees."""
    new = np.diff(query_starts).tolist()
    pairs = read = 0
    for length, n in zip(lengths.tolist(), new, strict=True):
        reach = [
            min(p + 1, window) if window else p + 1 for p in range(length - n, length)
        ]
        pairs += sum(reach)
        read += min(length, n + window) if window else length
    return _attention_work(q, k_cache, pairs, read)


def _attention_work(q: Tensor, k_cache: Tensor, pairs: int, read: int) -> Work:
    heads, dim = q.shape[1:]
    moved = FLOAT * dim * (2 * read * k_cache.shape[1] + 2 * len(q) * heads)
    return Work(4.0 * pairs * heads * dim, moved)


def _moving(*passes: int) -> Callable[..., Work]:
    """Argument i is read or written `passes[i]` times."""

    def work(*args: Any) -> Work:
        used = zip(args, passes, strict=False)
        return Work(0.0, FLOAT * sum(n * prod(array.shape) for array, n in used))

    return work


KERNELS: dict[str, Callable[..., Work]] = {
    "write_kv": _moving(2, 2),
    "decode_attention": decode_work,
    "prefill_attention": prefill_work,
    "rms_norm": _moving(1, 1),
    "add_rms_norm": _moving(1, 2, 1),
    "rotary": _moving(2, 2),
    "rotary_write": _moving(2, 2, 2),
    "silu_mul": _moving(1, 1),
    "gelu_tanh_mul": _moving(1, 1),
    "silu_linear": gated_work,
    "gelu_tanh_linear": gated_work,
}


@dataclass(slots=True)
class Profile:
    """The spans of the steps run within `attached`."""

    ceilings: Ceilings = field(default_factory=measure)
    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def attached(self, engine: Engine) -> Iterator[None]:
        """Within, every step of `engine` is recorded. One profile at a time."""
        model = type(engine.runner.model)
        places: list[tuple[Any, str, str, Any]] = [
            (Engine, "step", "step", None),
            (Scheduler, "plan", "schedule", None),
            (Scheduler, "commit", "commit", None),
            (Runner, "run", "run", None),
            (pagedattn.runner, "make_batch", "batch", None),
            (model, "forward", "forward", None),
            (model, "logits", "head", None),
            (Runner, "_sample", "sample", None),
            (Outputs, "process", "output", None),
            (Linear, "into", "linear", linear_work),
            *((cpu, name, name, work) for name, work in KERNELS.items()),
        ]
        before = [getattr(owner, attribute) for owner, attribute, _, _ in places]
        try:
            for owner, attribute, name, work in places:
                inner = getattr(owner, attribute)
                setattr(owner, attribute, self._timed(inner, name, work))
            yield
        finally:
            for (owner, attribute, _, _), inner in zip(places, before, strict=True):
                setattr(owner, attribute, inner)

    def _timed(
        self, inner: Any, name: str, work: Callable[..., Work] | None
    ) -> Callable[..., Any]:
        clock, keep = time.perf_counter_ns, self.spans.append

        @functools.wraps(inner, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = inner(*args, **kwargs)
            end = clock()
            todo = work(*args) if work else NOTHING
            keep(Span(name, start, end, clock(), todo))
            return result

        return timed

    # What people read.
    def rows(self) -> dict[str, Row]:
        """Calls, seconds and work by name; of nested spans each has its own time."""
        rows: dict[str, Row] = {}
        open_spans: list[tuple[int, Row]] = []  # (end, row) of those around
        for span in sorted(self.spans, key=lambda s: (s.start, -s.end)):
            row = rows.setdefault(span.name + span.work.detail, Row())
            seconds = (span.end - span.start) / 1e9
            while open_spans and open_spans[-1][0] <= span.start:
                open_spans.pop()
            if open_spans:
                open_spans[-1][1].own -= (span.over - span.start) / 1e9
            open_spans.append((span.end, row))
            row.calls += 1
            row.seconds += seconds
            row.own += seconds
            row.flops += span.work.flops
            row.bytes += span.work.bytes
        return rows

    def table(self) -> str:
        """Own time a step of each part, its floor, and how near the floor it comes."""
        rows = self.rows()
        steps = rows["step"].calls if "step" in rows else 1
        whole = sum(row.own for row in rows.values()) or 1.0
        most = self.ceilings
        lines = [
            f"{steps} steps, {1e3 * whole / steps:.2f} ms each; floors from "
            f"{most.gflops:.0f} GFLOP/s and {most.read_gbps:.1f} GB/s",
            f"{'part':26}{'calls/step':>11}{'ms/step':>9}{'share':>8}"
            f"{'floor ms':>10}{'reached':>9}",
        ]
        for name, row in sorted(rows.items(), key=lambda item: -item[1].own):
            floor = most.floor(row.flops, row.bytes)
            reached = f"{floor / row.own:8.0%}" if floor else ""
            lines.append(
                f"{name:26}{row.calls / steps:11.1f}{1e3 * row.own / steps:9.3f}"
                f"{row.own / whole:8.1%}"
                + (f"{1e3 * floor / steps:10.3f}{reached:>9}" if floor else "")
            )
        return "\n".join(lines)

    def save(self, path: Path) -> None:
        """Write a Chrome trace: chrome://tracing or ui.perfetto.dev open it."""
        first = min((span.start for span in self.spans), default=0)
        events = [
            {
                "name": span.name + span.work.detail,
                "ph": "X",
                "ts": (span.start - first) / 1e3,
                "dur": (span.end - span.start) / 1e3,
                "pid": 0,
                "tid": 0,
                "args": {"flops": span.work.flops, "bytes": span.work.bytes},
            }
            for span in self.spans
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events}), "utf-8")
