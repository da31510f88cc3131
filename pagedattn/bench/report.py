"""Results as people read them: vLLM's table, a JSON file, a picture.

Knows dictionaries of numbers; knows nothing of how they came about.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pagedattn.bench.timeline import METRICS, Timeline

WIDTH = 50
COUNTS = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
    "kv_cache_usage": "Peak KV cache usage (%):",
    "kv_waste": "KV slots held but empty (%):",
    "prefix_hit_rate": "Prefix cache hit rate (%):",
    "preemptions": "Preemptions:",
}
MACHINE = ("numpy", "torch", "numba")


def table(result: Mapping[str, Any], title: str, shown: Sequence[str]) -> str:
    """The report as text; `shown` are the metrics to list. None is left out."""
    lines = [f" {title} ".center(WIDTH, "=")]
    for name, words in COUNTS.items():
        value = result.get(name)
        if value is not None:
            lines.append(_row(words, value))
    for metric in shown:
        lines.append(METRICS[metric].center(WIDTH, "-"))
        for name, value in result.items():
            if name.endswith(f"_{metric}_ms") and value is not None:
                what = name.removesuffix(f"_{metric}_ms").capitalize()
                lines.append(_row(f"{what} {metric.upper()} (ms):", value))
    return "\n".join([*lines, "=" * WIDTH])


def _row(words: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{words:<40}{shown:<10}".rstrip()


def machine() -> dict[str, str]:
    """What the figures were measured on: date, processor, versions."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": processor(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("pagedattn", *MACHINE)},
    }


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def draw(timelines: Sequence[Timeline], title: str, path: Path) -> None:
    """A PNG of the run: requests as bars over time, and how latencies spread."""
    from matplotlib.figure import Figure

    good = [t for t in timelines if t.ok]
    figure = Figure(figsize=(11, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(3, 2))
    start = min((t.sent for t in good), default=0.0)
    for row, t in enumerate(sorted(good, key=lambda t: t.sent)):
        first = t.arrivals[0][0]
        top.barh(row, first - t.sent, left=t.sent - start, color="#ccbb44")
        top.barh(row, t.end - first, left=first - start, color="#4477aa")
    top.set(title=title, xlabel="seconds", ylabel="request", ylim=(len(good), -1))
    top.legend(["waiting for the first token", "writing"], loc="lower right")
    for metric, colour in zip(METRICS, ("#ccbb44", "#228833", "#4477aa"), strict=False):
        values = sorted(v for t in good for v in t.values(metric))
        share = [100 * (i + 1) / len(values) for i in range(len(values))]
        bottom.plot(values, share, label=metric.upper(), color=colour)
    bottom.set(xlabel="milliseconds", ylabel="% at most", xscale="log")
    bottom.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
