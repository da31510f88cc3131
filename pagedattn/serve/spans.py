"""One OpenTelemetry span for each request, with the attributes that vLLM's carry.

Knows outputs, their times and the SDK's names, which it imports only when asked to.
The engine's clock is not the wall's: spans are placed so that they end when the last
output came.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from pagedattn.errors import UserError
from pagedattn.request import RequestOutput, RequestTimes, SamplingParams

NAME = "llm_request"


class Spans:
    """Makes spans with `tracer`, an OpenTelemetry tracer."""

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer

    @classmethod
    def to(cls, endpoint: str) -> Spans:
        """Spans that go to an OTLP collector over HTTP, in batches; UserError without
        the packages."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise UserError(
                "otlp_traces_endpoint needs: pip install 'pagedattn[otel]'.",
                "otlp_traces_endpoint",
            ) from None
        provider = TracerProvider(
            resource=Resource.create({"service.name": "pagedattn"})
        )
        exporter = OTLPSpanExporter(endpoint=endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider.get_tracer("pagedattn"))

    async def around(
        self,
        stream: AsyncGenerator[RequestOutput, None],
        request_id: str,
        model: str,
        params: SamplingParams,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The same outputs; once they have ended, or nobody reads on, a span."""
        begun, tokens, last = time.time_ns(), 0, None
        try:
            async for output in stream:
                last = output
                tokens += sum(len(out.token_ids) for out in output.outputs)
                yield output
        finally:
            await stream.aclose()
            attributes = _asked(request_id, model, params)
            if last is not None:
                attributes |= _used(last, tokens, params)
            span = self._tracer.start_span(
                NAME, start_time=begun, attributes=attributes
            )
            span.end()


def _asked(request_id: str, model: str, params: SamplingParams) -> dict[str, Any]:
    asked = {
        "gen_ai.request.id": request_id,
        "gen_ai.request.n": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.response.model": model,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _used(output: RequestOutput, tokens: int, params: SamplingParams) -> dict[str, Any]:
    used = {
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.completion_tokens": tokens,
        "gen_ai.usage.num_sequences": params.n,
    }
    return used | (_latencies(output.metrics) if output.metrics else {})


def _latencies(times: RequestTimes) -> dict[str, float]:
    """Seconds of each span of `times` that has both ends."""
    ends = {
        "time_in_queue": (times.arrival, times.scheduled),
        "time_to_first_token": (times.arrival, times.first_token),
        "time_in_model_prefill": (times.scheduled, times.first_token),
        "time_in_model_decode": (times.first_token, times.last_token),
        "time_in_model_inference": (times.scheduled, times.last_token),
        "e2e": (times.arrival, times.finished),
    }
    return {
        f"gen_ai.latency.{name}": end - start
        for name, (start, end) in ends.items()
        if start is not None and end is not None
    }
