"""A benchmark of any OpenAI-compatible server: streaming clients, and when they hear.

Knows HTTP and arrival times; knows nothing of the engine behind the server. Requests
come at a rate (a gamma process; burstiness 1 is Poisson's), which may ramp up, or all
at once; never more than `max_concurrency` are under way.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import httpx
from tqdm import tqdm

from pagedattn.bench.datasets import Sample
from pagedattn.bench.timeline import Timeline
from pagedattn.errors import UserError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
GAUGE = re.compile(r"^vllm:(\w+)\{[^}]*\} (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class Load:
    """How requests come. `request_rate` inf: all at once."""

    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ramp_up_strategy: str | None = None  # linear or exponential
    ramp_up_start_rps: float | None = None
    ramp_up_end_rps: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise UserError(
                f"request_rate={self.request_rate} must be above 0.", "request_rate"
            )
        if not self.burstiness > 0:
            raise UserError(
                f"burstiness={self.burstiness} must be above 0.", "burstiness"
            )
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UserError(
                f"max_concurrency={self.max_concurrency} must be at least 1.",
                "max_concurrency",
            )
        ends = self.ramp_up_start_rps, self.ramp_up_end_rps
        if self.ramp_up_strategy is not None and not all(e and e > 0 for e in ends):
            raise UserError(
                "ramp_up_strategy needs ramp_up_start_rps and ramp_up_end_rps above 0.",
                "ramp_up_strategy",
            )

    def rate(self, share: float) -> float:
        """Requests a second when that share of the requests has been sent."""
        if self.ramp_up_strategy is None:
            return self.request_rate
        low, high = self.ramp_up_start_rps, self.ramp_up_end_rps
        assert low is not None and high is not None
        if self.ramp_up_strategy == "linear":
            return low + (high - low) * share
        return low * (high / low) ** share

    def delays(self, n: int) -> Iterator[float]:
        """Seconds before each of `n` requests, counted from the one before."""
        draw = random.Random(self.seed)
        for i in range(n):
            rate = self.rate(i / max(1, n - 1))
            if i == 0 or rate == float("inf"):
                yield 0.0
            else:
                yield draw.gammavariate(self.burstiness, 1 / (rate * self.burstiness))


@dataclass(frozen=True, slots=True)
class Target:
    """The server: where, as what, and how requests are put."""

    base_url: str
    model: str
    backend: str = "openai"
    endpoint: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def url(self) -> str:
        """Where requests go."""
        return self.base_url.rstrip("/") + (self.endpoint or ENDPOINTS[self.backend])

    def body(self, sample: Sample, text: str) -> dict[str, Any]:
        """The request: ids for completions, text for a chat."""
        common = {
            "model": self.model,
            "max_tokens": sample.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extra),
        }
        if self.backend == "openai-chat":
            return {**common, "messages": [{"role": "user", "content": text}]}
        return {**common, "prompt": list(sample.prompt)}


async def run(
    target: Target,
    samples: Sequence[Sample],
    texts: Sequence[str],
    load: Load,
    progress: bool = True,
) -> tuple[list[Timeline], float]:
    """Send every sample as `load` says; timelines in the samples' order, seconds."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    turn = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    with tqdm(total=len(samples), unit="request", disable=not progress) as bar:
        async with httpx.AsyncClient(
            timeout=None, limits=limits, headers=dict(target.headers), trust_env=False
        ) as client:

            async def one(sample: Sample, text: str) -> Timeline:
                async with turn or nullcontext():
                    timeline = await _ask(client, target, sample, text)
                bar.update()
                return timeline

            start, tasks = time.perf_counter(), []
            delays = load.delays(len(samples))
            for sample, text, delay in zip(samples, texts, delays, strict=True):
                if delay:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(one(sample, text)))
            timelines = await asyncio.gather(*tasks)
            return timelines, time.perf_counter() - start


async def _ask(
    client: httpx.AsyncClient, target: Target, sample: Sample, text: str
) -> Timeline:
    """One request, streamed; what went wrong stands in its timeline."""
    timeline = Timeline(len(sample.prompt), time.perf_counter())
    try:
        body = target.body(sample, text)
        async with client.stream("POST", target.url, json=body) as response:
            if response.status_code != 200:
                answer = (await response.aread()).decode("utf-8", "replace")
                timeline.error = f"HTTP {response.status_code}: {answer[:300]}"
                return timeline
            await _listen(response, timeline)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        timeline.error = f"{type(error).__name__}: {error}"
    return timeline


async def _listen(response: httpx.Response, timeline: Timeline) -> None:
    """Note every piece of text; the server's own count of tokens settles them."""
    total = None
    async for event in _events(response):
        now = time.perf_counter()
        if "error" in event:
            timeline.error = json.dumps(event["error"])[:300]
            return
        if event.get("usage"):
            total = event["usage"].get("completion_tokens")
        if any(map(_says_something, event.get("choices", ()))):
            timeline.arrivals.append((now, 1))
    timeline.end = timeline.arrivals[-1][0] if timeline.arrivals else None
    if not timeline.arrivals:
        timeline.error = "the server sent no text"
    elif total is not None:  # a piece may hold several tokens, or half of one
        at = timeline.arrivals[-1][0]
        rest = total - (len(timeline.arrivals) - 1)
        timeline.arrivals[-1] = (at, max(0, rest))


def _says_something(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content"))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
            yield json.loads(data)


def server_metrics(base_url: str, headers: Sequence[tuple[str, str]]) -> dict:
    """What /metrics says now, by name; nothing, where a server has none."""
    try:
        answer = httpx.get(
            f"{base_url.rstrip('/')}/metrics", headers=dict(headers), timeout=10
        )
    except httpx.HTTPError:
        return {}
    return {name: float(value) for name, value in GAUGE.findall(answer.text)}


def cache_report(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """Hit rate in percent and preemptions during the run, where they are known."""

    def new(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    queries = new("prefix_cache_queries_total")
    return {
        "prefix_hit_rate": 100 * new("prefix_cache_hits_total") / queries
        if queries
        else None,
        "preemptions": int(new("num_preemptions_total")) if after else None,
    }


def first_model(base_url: str, headers: Sequence[tuple[str, str]]) -> str:
    """The first model that the server lists; UserError if it can't be asked."""
    url = f"{base_url.rstrip('/')}/v1/models"
    try:
        answer = httpx.get(url, headers=dict(headers), timeout=30)
        answer.raise_for_status()
        return answer.json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise UserError(f"{url} does not list a model: {error}", "base_url") from error
