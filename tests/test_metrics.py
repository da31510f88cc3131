"""Metrics: names, buckets and sums, read back through Prometheus' own parser."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedattn.metrics import Counter, Gauge, Histogram, Metrics, bucket_series
from pagedattn.request import RequestTimes


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("toy", 100, {"block_size": "16", "num_gpu_blocks": "64"})


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(sample name, its special label) -> value, from the rendered text."""
    text = metrics.render().decode()
    return {
        (s.name, s.labels.get("le") or s.labels.get("finished_reason", "")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_every_metric_exists_before_the_first_request(metrics: Metrics) -> None:
    found = samples(metrics)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found["vllm:" + name, ""] == 0
    for name in (
        "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens "
        "generation_tokens prompt_tokens_cached"
    ).split():
        assert found[f"vllm:{name}_total", ""] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert found["vllm:request_success_total", reason] == 0
    for name in (
        "request_prompt_tokens request_generation_tokens request_params_n "
        "request_params_max_tokens iteration_tokens_total time_to_first_token_seconds "
        "inter_token_latency_seconds request_time_per_output_token_seconds "
        "e2e_request_latency_seconds request_queue_time_seconds "
        "request_inference_time_seconds request_prefill_time_seconds "
        "request_decode_time_seconds"
    ).split():
        assert found[f"vllm:{name}_count", ""] == 0
    assert found["vllm:cache_config_info", ""] == 1


def test_labels_name_model_and_engine(metrics: Metrics) -> None:
    text = metrics.render().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="toy"} 0.0' in text
    assert 'block_size="16"' in text and 'num_gpu_blocks="64"' in text


def test_counts_add_up(metrics: Metrics) -> None:
    metrics.on_admitted(24, 16)
    metrics.on_step(10, 8, 1)
    metrics.on_tokens(1)
    metrics.on_gap(None, 0.03)
    metrics.on_tokens(2)
    metrics.on_gap(0.02, None)
    metrics.on_state(3, 2, 0.5)
    found = samples(metrics)
    assert found["vllm:prefix_cache_queries_total", ""] == 24
    assert found["vllm:prefix_cache_hits_total", ""] == 16
    assert found["vllm:prompt_tokens_cached_total", ""] == 16
    assert found["vllm:prompt_tokens_total", ""] == 24  # 16 cached, 8 computed
    assert found["vllm:generation_tokens_total", ""] == 3
    assert found["vllm:num_preemptions_total", ""] == 1
    assert found["vllm:iteration_tokens_total_bucket", "16.0"] == 1
    assert found["vllm:iteration_tokens_total_bucket", "8.0"] == 0
    assert found["vllm:time_to_first_token_seconds_bucket", "0.04"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket", "0.02"] == 0
    assert found["vllm:inter_token_latency_seconds_sum", ""] == pytest.approx(0.02)
    assert found["vllm:num_requests_running", ""] == 3
    assert found["vllm:num_requests_waiting", ""] == 2
    assert found["vllm:kv_cache_usage_perc", ""] == 0.5


def test_spans_of_a_finished_request(metrics: Metrics) -> None:
    times = RequestTimes(10.0, 11.0, 13.0, 17.0, 18.0)
    metrics.on_finished("stop", 7, 5, 2, None, times)
    found = samples(metrics)
    for name, seconds in (
        ("request_queue_time", 1),
        ("request_prefill_time", 2),
        ("request_decode_time", 4),
        ("request_inference_time", 6),
        ("e2e_request_latency", 8),
        ("request_time_per_output_token", 1),
    ):
        assert found[f"vllm:{name}_seconds_sum", ""] == seconds, name
    assert found["vllm:request_success_total", "stop"] == 1
    assert found["vllm:request_prompt_tokens_sum", ""] == 7
    assert found["vllm:request_generation_tokens_sum", ""] == 5
    assert found["vllm:request_params_n_sum", ""] == 2
    assert found["vllm:request_params_max_tokens_count", ""] == 0


def test_a_request_aborted_while_waiting_has_only_its_end(metrics: Metrics) -> None:
    metrics.on_finished("abort", 7, 0, 1, 16, RequestTimes(1.0, finished=2.0))
    found = samples(metrics)
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 1
    assert found["vllm:request_queue_time_seconds_count", ""] == 0
    assert found["vllm:request_params_max_tokens_sum", ""] == 16


def test_one_token_has_no_time_per_output_token(metrics: Metrics) -> None:
    metrics.on_finished("length", 1, 1, 1, 1, RequestTimes(0.0, 0.0, 1.0, 1.0, 1.0))
    found = samples(metrics)
    assert found["vllm:request_time_per_output_token_seconds_count", ""] == 0


def test_snapshot_reads_like_vllm(metrics: Metrics) -> None:
    metrics.on_tokens(3)
    metrics.on_gap(None, 0.5)
    metrics.on_state(1, 0, 0.25)
    by_name = {m.name: m for m in metrics.snapshot() if len(m.labels) == 2}
    labels = {"model_name": "toy", "engine": "0"}
    assert by_name["vllm:generation_tokens"] == Counter(
        "vllm:generation_tokens", labels, 3
    )
    assert by_name["vllm:kv_cache_usage_perc"] == Gauge(
        "vllm:kv_cache_usage_perc", labels, 0.25
    )
    first = by_name["vllm:time_to_first_token_seconds"]
    assert isinstance(first, Histogram)
    assert (first.count, first.sum) == (1, 0.5)
    assert first.buckets["0.25"] == 0 and first.buckets["0.5"] == 1
    assert first.buckets["+Inf"] == 1


def test_registries_are_separate() -> None:
    one, two = Metrics("a", 10, {}), Metrics("b", 10, {})
    one.on_tokens(5)
    assert samples(two)["vllm:generation_tokens_total", ""] == 0


def test_the_log_line_covers_the_interval(metrics: Metrics) -> None:
    assert metrics.line(10.0) is None
    metrics.on_admitted(40, 10)
    metrics.on_step(30, 30, 0)
    metrics.on_tokens(20)
    metrics.on_gap(None, 0.1)
    metrics.on_state(1, 2, 0.125)
    assert metrics.line(10.0) == (
        "prompt 4.0 tokens/s, generation 2.0 tokens/s, running 1, waiting 2, "
        "KV usage 12.5%, prefix hit rate 25.0%"
    )
    assert "generation 0.0 tokens/s" in (metrics.line(10.0) or "")
    metrics.on_state(0, 0, 0.0)
    assert metrics.line(10.0) is None


@pytest.mark.parametrize("top", [1, 2, 4, 9, 10, 99, 100, 8192])
def test_length_buckets_are_the_1_2_5_series(top: int) -> None:
    series = bucket_series(top)
    assert list(series) == sorted(set(series)) and series[-1] <= top
    assert all(str(b).rstrip("0") in ("1", "2", "5") for b in series)
    assert top < series[-1] * 2.5 or top == 1
