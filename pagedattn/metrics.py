"""What the engine counts, under vLLM's metric names, and how Prometheus reads it.

Knows counts and seconds that others hand in; it reads no clock and knows nothing of
requests, blocks or HTTP. One registry per instance, so that two engines in a process
never mix. Built in chapter 09.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import prometheus_client as prom
from prometheus_client.metrics_core import Metric as Family

from pagedattn.request import RequestTimes

FINISH_REASONS = ("stop", "length", "abort", "error")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
RECENT = 1_000  # admissions over which the log line's hit rate is taken
PREFIX = "vllm:"

# Buckets in seconds, vLLM's.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (1, 2, 5, 10, 20)

_GAUGES = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests waiting to be admitted.",
    "kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests put back to wait because blocks ran out.",
    "prompt_tokens": "Prompt tokens processed, cached ones included.",
    "prompt_tokens_cached": "Prompt tokens whose keys and values were cached.",
    "generation_tokens": "Tokens generated.",
}
_SECONDS = {
    "time_to_first_token_seconds": (FIRST_TOKEN, "Arrival to first token."),
    "inter_token_latency_seconds": (PER_TOKEN, "From one token to the next."),
    "request_time_per_output_token_seconds": (
        PER_TOKEN,
        "Mean time per token after the first, per request.",
    ),
    "e2e_request_latency_seconds": (WHOLE_REQUEST, "Arrival to end."),
    "request_queue_time_seconds": (WHOLE_REQUEST, "Arrival to first step."),
    "request_prefill_time_seconds": (WHOLE_REQUEST, "First step to first token."),
    "request_decode_time_seconds": (WHOLE_REQUEST, "First to last token."),
    "request_inference_time_seconds": (WHOLE_REQUEST, "First step to last token."),
}


@dataclass(frozen=True, slots=True)
class Counter:
    """A number that only grows."""

    name: str
    labels: dict[str, str]
    value: int


@dataclass(frozen=True, slots=True)
class Gauge:
    """A number that is read as it stands now."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations in cumulative buckets: upper bound as text -> how many."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(slots=True)
class _Totals:
    """Plain sums for the log line; the Prometheus objects keep theirs private."""

    prompt: int = 0
    generated: int = 0
    preemptions: int = 0


class Metrics:
    """Everything counted for one engine. Any thread may call any method."""

    def __init__(
        self, model_name: str, max_model_len: int, cache_info: dict[str, str]
    ) -> None:
        self.registry = prom.CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._gauges = {n: self._one(prom.Gauge, n, t) for n, t in _GAUGES.items()}
        self._counters = {
            n: self._one(prom.Counter, n, t) for n, t in _COUNTERS.items()
        }
        self._seconds = {
            n: self._one(prom.Histogram, n, t, buckets=b)
            for n, (b, t) in _SECONDS.items()
        }
        self._success = self._family(
            prom.Counter, "request_success", "Ended requests.", ("finished_reason",)
        )
        for reason in FINISH_REASONS:
            self._success.labels(*self._labels.values(), reason)
        self._add_sizes(max_model_len)
        self._add_info(cache_info)
        self._add_shapes(max_model_len)
        prom.ProcessCollector(registry=self.registry)
        self._state = (0, 0, 0.0)
        self._totals, self._logged = _Totals(), _Totals()
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)

    # Building: every metric carries the model's name and the engine's number.
    def _family(
        self,
        kind: type,
        name: str,
        text: str,
        extra: tuple[str, ...] = (),
        **more: object,
    ) -> prom.metrics.MetricWrapperBase:
        labels = (*self._labels, *extra)
        return kind(PREFIX + name, text, labels, registry=self.registry, **more)

    def _one(
        self, kind: type, name: str, text: str, **more: object
    ) -> prom.metrics.MetricWrapperBase:
        return self._family(kind, name, text, **more).labels(*self._labels.values())

    def _add_sizes(self, max_model_len: int) -> None:
        lengths = bucket_series(max_model_len)
        for name, buckets, text in (
            ("request_prompt_tokens", lengths, "Prompt tokens per request."),
            ("request_generation_tokens", lengths, "Generated tokens per request."),
            ("request_params_max_tokens", lengths, "max_tokens as asked for."),
            (
                "request_max_num_generation_tokens",
                lengths,
                "The longest answer per request.",
            ),
            (
                "request_prefill_kv_computed_tokens",
                lengths,
                "Prompt tokens computed, cached ones left out, per request.",
            ),
            ("request_params_n", SEQUENCES, "n as asked for."),
            ("iteration_tokens_total", STEP_TOKENS, "Tokens in one step."),
        ):
            self._seconds[name] = self._one(prom.Histogram, name, text, buckets=buckets)

    def _add_shapes(self, max_model_len: int) -> None:
        """Metrics with a label of their own, and what vLLM derives from others."""
        self._asleep = self._family(
            prom.Gauge, "engine_sleep_state", "1: so it is.", ("sleep_state",)
        )
        self.on_sleep(False)
        self._why = self._family(
            prom.Gauge,
            "num_requests_waiting_by_reason",
            "Requests waiting, and for what.",
            ("reason",),
        )
        self._from = self._family(
            prom.Counter,
            "prompt_tokens_by_source",
            "Prompt tokens, by where their keys and values came from.",
            ("source",),
        )
        for source in SOURCES:
            self._from.labels(*self._labels.values(), source)
        for reason in ("capacity", "deferred"):
            self._why.labels(*self._labels.values(), reason)

    def _add_info(self, cache_info: dict[str, str]) -> None:
        labels = {"engine": "0", **cache_info}
        prom.Gauge(
            PREFIX + "cache_config_info",
            "The KV cache's settings, as labels.",
            tuple(labels),
            registry=self.registry,
        ).labels(*labels.values()).set(1)

    # What the engine reports.
    def on_state(self, running: int, waiting: int, kv_usage: float) -> None:
        """Set the gauges; called after each step and after each abort."""
        self._state = (running, waiting, kv_usage)
        for gauge, value in zip(self._gauges.values(), self._state, strict=True):
            gauge.set(value)

        self._why.labels(*self._labels.values(), "capacity").set(waiting)

    def on_sleep(self, asleep: bool) -> None:
        """The engine fell asleep, or woke up."""
        for state in SLEEP_STATES:
            now = asleep if state == "weights_offloaded" else not asleep
            value = now and state != "discard_all"
            self._asleep.labels(*self._labels.values(), state).set(value)

    def on_step(
        self, tokens: int, prompt_tokens_computed: int, preemptions: int
    ) -> None:
        """A step ran `tokens` tokens; so many were prompt tokens run the first time."""
        self._seconds["iteration_tokens_total"].observe(tokens)
        self._count("prompt_tokens", prompt_tokens_computed)
        self._came("local_compute", prompt_tokens_computed)
        self._count("num_preemptions", preemptions)
        self._totals.prompt += prompt_tokens_computed
        self._totals.preemptions += preemptions

    def on_admitted(self, queried_tokens: int, hit_tokens: int) -> None:
        """A request was first admitted: looked up so many tokens, found so many."""
        self._count("prefix_cache_queries", queried_tokens)
        for name in ("prefix_cache_hits", "prompt_tokens_cached", "prompt_tokens"):
            self._count(name, hit_tokens)
        self._came("local_cache_hit", hit_tokens)
        self._seconds["request_prefill_kv_computed_tokens"].observe(
            queried_tokens - hit_tokens
        )
        self._totals.prompt += hit_tokens
        self._recent.append((queried_tokens, hit_tokens))

    def on_tokens(self, count: int) -> None:
        """A step generated `count` tokens."""
        self._count("generation_tokens", count)
        self._totals.generated += count

    def on_gap(self, gap: float | None, first: float | None) -> None:
        """A request received tokens, `gap` s after the last or `first` s in."""
        if gap is not None:
            self._seconds["inter_token_latency_seconds"].observe(gap)
        if first is not None:
            self._seconds["time_to_first_token_seconds"].observe(first)

    def on_finished(
        self,
        reason: str,
        prompt_tokens: int,
        output_tokens: int,
        n: int,
        max_tokens: int | None,
        times: RequestTimes,
    ) -> None:
        """A request ended; spans whose ends were never reached are left out."""
        self._success.labels(*self._labels.values(), reason).inc()
        self._seconds["request_prompt_tokens"].observe(prompt_tokens)
        self._seconds["request_generation_tokens"].observe(output_tokens)
        self._seconds["request_params_n"].observe(n)
        self._seconds["request_max_num_generation_tokens"].observe(output_tokens)
        if max_tokens is not None:
            self._seconds["request_params_max_tokens"].observe(max_tokens)
        for name, seconds in _spans(times, output_tokens):
            self._seconds[name].observe(max(seconds, 0.0))

    def _came(self, source: str, amount: int) -> None:
        if amount:
            self._from.labels(*self._labels.values(), source).inc(amount)

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self._counters[name].inc(amount)

    # What others read.
    def render(self) -> bytes:
        """The Prometheus text exposition of this registry."""
        return prom.generate_latest(self.registry)

    def snapshot(self) -> list[Counter | Gauge | Histogram]:
        """Every metric with its labels and value, as vLLM's `LLM.get_metrics`."""
        families = (f for f in self.registry.collect() if f.name.startswith(PREFIX))
        return [metric for family in families for metric in _read(family)]

    def line(self, seconds: float) -> str | None:
        """One line on the `seconds` since the last call; None if nothing happened."""
        now, before = self._totals, self._logged
        running, waiting, usage = self._state
        if now == before and not running and not waiting:
            return None
        self._logged = _Totals(now.prompt, now.generated, now.preemptions)
        recent = tuple(self._recent)
        looked_up = sum(q for q, _ in recent)
        rate = sum(h for _, h in recent) / looked_up if looked_up else 0.0
        preempted = now.preemptions - before.preemptions
        return (
            f"prompt {(now.prompt - before.prompt) / seconds:.1f} tokens/s, "
            f"generation {(now.generated - before.generated) / seconds:.1f} tokens/s, "
            f"running {running}, waiting {waiting}, KV usage {usage:.1%}, "
            f"prefix hit rate {rate:.1%}"
            + (f", preemptions {preempted}" if preempted else "")
        )


def bucket_series(top: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, … up to and not above `top`; at least (1,)."""
    series, decade = [1], 1
    while decade <= top:
        series += [m * decade for m in (1, 2, 5) if 1 < m * decade <= top]
        decade *= 10
    return tuple(series)


def _spans(times: RequestTimes, tokens: int) -> Iterator[tuple[str, float]]:
    """(metric, seconds) for each span of `times` that has both ends."""
    start, first, last = times.scheduled, times.first_token, times.last_token
    if times.finished is not None:
        yield "e2e_request_latency_seconds", times.finished - times.arrival
    if start is not None:
        yield "request_queue_time_seconds", start - times.arrival
    if start is not None and first is not None:
        yield "request_prefill_time_seconds", first - start
    if start is not None and last is not None:
        yield "request_inference_time_seconds", last - start
    if first is not None and last is not None:
        yield "request_decode_time_seconds", last - first
        if tokens > 1:
            per_token = (last - first) / (tokens - 1)
            yield "request_time_per_output_token_seconds", per_token


def _read(family: Family) -> Iterator[Counter | Gauge | Histogram]:
    """The metrics of one family, one for each set of labels."""
    if family.type == "histogram":
        yield from _histograms(family)
        return
    for sample in family.samples:
        if family.type == "gauge":
            yield Gauge(family.name, sample.labels, sample.value)
        elif sample.name.endswith("_total"):
            yield Counter(family.name, sample.labels, int(sample.value))


def _histograms(family: Family) -> Iterator[Histogram]:
    groups: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        labels = {k: v for k, v in sample.labels.items() if k != "le"}
        part = sample.labels.get("le") or sample.name.removeprefix(family.name)
        groups.setdefault(tuple(labels.items()), {})[part] = sample.value
    for labels, parts in groups.items():
        count, total = int(parts.pop("_count")), parts.pop("_sum")
        parts.pop("_created", None)
        buckets = {bound: int(value) for bound, value in parts.items()}
        yield Histogram(family.name, dict(labels), count, total, buckets)
