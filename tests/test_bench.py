"""Benchmarks: what they send, what they make of arrival times, and that they run."""

import asyncio
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_live import engine_for, serving, write_model

from pagedattn.bench import offline, online, report
from pagedattn.bench.ceilings import Ceilings
from pagedattn.bench.datasets import Sample, Wanted, samples
from pagedattn.bench.profile import Profile, Span, Work
from pagedattn.bench.timeline import Timeline, parse_goals, summary
from pagedattn.errors import UserError
from pagedattn.serve.cli import main
from pagedattn.testing import hash_engine


class Bytes:
    """A tokenizer of bytes, with one special token."""

    vocab_size = 257
    special_ids = frozenset({256})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


# Datasets.
@given(st.integers(1, 20), st.integers(1, 30), st.floats(0, 0.9), st.integers(0, 2**31))
def test_random_samples_are_as_wanted(
    n: int, length: int, ratio: float, seed: int
) -> None:
    wanted = Wanted(
        num_prompts=n,
        input_len=length,
        output_len=length,
        random_range_ratio=ratio,
        random_prefix_len=3,
        seed=seed,
    )
    made = samples(wanted, Bytes())
    assert made == samples(wanted, Bytes()) and len(made) == n
    assert len({s.prompt[:3] for s in made}) == 1
    for s in made:
        low, high = max(1, int(length * (1 - ratio))), int(length * (1 + ratio))
        assert low <= len(s.prompt) - 3 <= high and low <= s.output_len <= high
        assert all(0 <= i < 256 for i in s.prompt)  # never a special token


def test_every_prefix_serves_equally_many() -> None:
    wanted = Wanted(
        "prefix_repetition",
        num_prompts=12,
        prefix_repetition_prefix_len=5,
        prefix_repetition_suffix_len=2,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_output_len=7,
    )
    made = samples(wanted, Bytes())
    heads = [s.prompt[:5] for s in made]
    assert len(set(heads)) == 3 and all(heads.count(h) == 4 for h in heads)
    assert {(len(s.prompt), s.output_len) for s in made} == {(7, 7)}


def test_sharegpt_keeps_what_vllm_keeps(tmp_path: Path) -> None:
    def talk(*turns: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": t} for t in turns]}

    good = talk("a question", "an answer", "more")
    bad = [talk("alone"), talk("abc", "too short"), talk("a" * 1025, "too long"), {}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*bad, good, talk("b" * 1000, "c" * 1100)]))
    wanted = Wanted("sharegpt", path, num_prompts=5)
    assert samples(wanted, Bytes()) == [Sample(tuple(b"a question"), 9)]
    path.write_text(json.dumps(bad))
    with pytest.raises(UserError, match="no conversation of a usable length"):
        samples(wanted, Bytes())


def test_a_custom_file_is_read_in_order(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "ab", "output_tokens": 3}\n{"prompt": "c"}\n')
    made = samples(Wanted("custom", path, num_prompts=9), Bytes())
    assert made == [Sample((97, 98), 3), Sample((99,), 256)]


@pytest.mark.parametrize(
    "wanted, message",
    [
        (Wanted(num_prompts=0), "num_prompts=0"),
        (Wanted(random_range_ratio=1.0), "random_range_ratio=1.0"),
        (Wanted("sharegpt"), "needs dataset_path"),
        (Wanted("custom", Path("nowhere.jsonl")), "nowhere.jsonl"),
        (Wanted("sonnet"), "none of random"),
        (Wanted("custom", Path("x"), input_len=5), "input_len=5 means nothing"),
        (Wanted("prefix_repetition", output_len=5), "output_len=5 means nothing"),
        (Wanted("random", Path("x")), "dataset_path=x means nothing"),
        (Wanted("prefix_repetition", num_prompts=3), "num_prefixes=10"),
    ],
)
def test_what_does_not_fit_is_named(wanted: Wanted, message: str) -> None:
    with pytest.raises(UserError, match=message):
        samples(wanted, Bytes())


# Timelines.
ARRIVALS = st.lists(
    st.tuples(st.floats(0.001, 5), st.integers(1, 4)), min_size=1, max_size=8
)


@st.composite
def timelines(draw: st.DrawFn) -> list[Timeline]:
    made = []
    for gaps in draw(st.lists(ARRIVALS, min_size=1, max_size=5)):
        sent = draw(st.floats(0, 10))
        times = np.cumsum([sent, *(gap for gap, _ in gaps)])[1:].tolist()
        arrivals = list(zip(times, (n for _, n in gaps), strict=True))
        made.append(Timeline(draw(st.integers(1, 99)), sent, arrivals, times[-1]))
    return made


@settings(max_examples=30)
@given(timelines())
def test_a_summary_is_what_its_definitions_say(made: list[Timeline]) -> None:
    broken = Timeline(5, 0.0, error="no")
    found = summary([*made, broken], 2.0, (50, 99))
    assert (found["completed"], found["failed"]) == (len(made), 1)
    tokens = sum(n for t in made for _, n in t.arrivals)
    assert found["output_throughput"] == tokens / 2
    ttft = [1e3 * (t.arrivals[0][0] - t.sent) for t in made]
    assert math.isclose(found["mean_ttft_ms"], sum(ttft) / len(ttft))
    assert math.isclose(found["p50_e2el_ms"], found["median_e2el_ms"])
    gaps = [b - a for t in made for (a, _), (b, _) in pairwise(t.arrivals)]
    if gaps:
        assert math.isclose(found["mean_itl_ms"], 1e3 * sum(gaps) / len(gaps))
    else:
        assert found["mean_itl_ms"] is None
    assert 1 <= found["max_concurrent_requests"] <= len(made)


def test_one_request_by_hand() -> None:
    """Sent at 1 s, pieces at 1.5, 1.6 and 1.9 s, the last of two tokens."""
    one = Timeline(10, 1.0, [(1.5, 1), (1.6, 1), (1.9, 2)], 1.9)
    found = summary([one], 0.9, goals={"ttft": 501, "tpot": 134})
    assert found["mean_ttft_ms"] == pytest.approx(500)
    assert found["mean_tpot_ms"] == pytest.approx(400 / 3)
    assert found["mean_itl_ms"] == pytest.approx(200)
    assert found["mean_e2el_ms"] == pytest.approx(900)
    assert found["request_goodput"] == pytest.approx(1 / 0.9)
    assert summary([one], 1.0, goals={"ttft": 499})["request_goodput"] == 0
    assert found["max_output_tokens_per_s"] == 4


def test_who_ends_makes_room_before_who_comes() -> None:
    pair = [Timeline(1, 0.0, [(1.0, 1)], 1.0), Timeline(1, 1.0, [(2.0, 1)], 2.0)]
    assert summary(pair, 2.0)["max_concurrent_requests"] == 1


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "itl:5", "tpot:0", "e2el:-1"])
def test_goals_are_checked(text: str) -> None:
    with pytest.raises(UserError, match=f"goodput='{text}'"):
        parse_goals([text])
    assert parse_goals(["ttft:5", "e2el:2.5"]) == {"ttft": 5, "e2el": 2.5}


# How requests come.
def test_all_at_once_or_at_a_rate() -> None:
    assert list(online.Load().delays(5)) == [0.0] * 5
    gaps = list(online.Load(request_rate=4.0).delays(20_000))
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.05)  # Poisson: as wide as long
    even = list(online.Load(request_rate=4.0, burstiness=100).delays(2000))
    assert np.std(even) < 0.05


def test_rates_ramp_up() -> None:
    linear = online.Load(
        ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=9
    )
    assert [linear.rate(s) for s in (0, 0.5, 1)] == [1, 5, 9]
    growing = online.Load(
        ramp_up_strategy="exponential", ramp_up_start_rps=1, ramp_up_end_rps=9
    )
    assert [growing.rate(s) for s in (0, 0.5, 1)] == pytest.approx([1, 3, 9])


@pytest.mark.parametrize(
    "given, message",
    [
        ({"request_rate": 0.0}, "request_rate=0.0"),
        ({"burstiness": -1.0}, "burstiness=-1.0"),
        ({"max_concurrency": 0}, "max_concurrency=0"),
        ({"ramp_up_strategy": "linear"}, "needs ramp_up_start_rps"),
    ],
)
def test_a_load_that_means_nothing_is_refused(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        online.Load(**given)


# The runs.
BATCH = [Sample(tuple(range(i, i + 20)), 5 + i % 3) for i in range(12)]


def test_offline_counts_what_the_engine_did() -> None:
    engine = hash_engine(num_blocks=12, block_size=4, max_num_seqs=4)
    before = offline.counters_of(engine)
    made, usage, seconds = offline.run(engine, BATCH, False, False)
    found = summary(made, seconds) | offline.cache_report(engine, usage, before)
    assert found["total_output_tokens"] == sum(s.output_len for s in BATCH)
    assert found["total_input_tokens"] == 12 * 20
    assert 50 < found["kv_cache_usage"] <= 100 and 0 <= found["kv_waste"] < 30
    assert found["preemptions"] == engine.scheduler.preemptions
    engine.check()


def test_online_against_a_live_server(tmp_path: Path) -> None:
    engine = engine_for(write_model(tmp_path))
    with serving(engine) as live:
        base, load = live.url, online.Load(max_concurrency=3)
        target = online.Target(base, online.first_model(base, ()), extra=EXACT)
        texts = [""] * len(BATCH)
        before = online.server_metrics(base, ())
        made, seconds = asyncio.run(online.run(target, BATCH, texts, load, False))
        after = online.server_metrics(base, ())
        bad = online.Target(base, "no-such-model")
        (failed,), _ = asyncio.run(online.run(bad, BATCH[:1], [""], load, False))
        live.wait_idle()
    engine.shutdown()
    assert [t.error for t in made] == [None] * len(BATCH)
    assert [t.output_tokens for t in made] == [s.output_len for s in BATCH]
    assert summary(made, seconds)["max_concurrent_requests"] <= 3
    assert online.cache_report(before, after)["preemptions"] == 0
    assert not failed.ok and "404" in (failed.error or "")


EXACT = (("ignore_eos", True), ("temperature", 0.0))


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="127.0.0.1:9/v1/models"):
        online.first_model("http://127.0.0.1:9", ())


# Reports and profiles.
def test_the_table_lists_what_was_asked_for() -> None:
    one = Timeline(10, 1.0, [(1.5, 1), (1.9, 1)], 1.9)
    text = report.table(summary([one], 0.9, (90,)), "Result", ["ttft"])
    assert "Successful requests:                    1" in text
    assert "P90 TTFT (ms):" in text and "ITL" not in text and "goodput" not in text
    assert max(map(len, text.splitlines())) <= 52


def test_a_run_can_be_drawn(tmp_path: Path) -> None:
    one = Timeline(10, 1.0, [(1.5, 1), (1.9, 1)], 1.9)
    report.draw([one, Timeline(1, 0.0, error="no")], "a run", tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_own_time_leaves_out_what_was_called_inside() -> None:
    unit = Ceilings(1.0, 1.0, 1.0, 1.0, 1)
    work = Work(2e9, 1e9, " a")
    spans = [
        Span("inner", 10, 40, 45, work),
        Span("step", 0, 100, 100, Work()),
        Span("inner", 50, 60, 62, work),
    ]
    rows = Profile(unit, spans).rows()
    assert rows["step"].own == pytest.approx(53e-9)
    assert rows["inner a"].calls == 2 and rows["inner a"].own == pytest.approx(40e-9)
    assert unit.floor(2e9, 1e9) == 2.0 and unit.floor(1e9, 3e9) == 3.0


def test_a_profile_changes_nothing_and_goes_away(tmp_path: Path) -> None:
    def tokens(profile: Profile | None) -> list[list[tuple[float, int]]]:
        engine = hash_engine(num_blocks=40, block_size=4)
        if profile is None:
            made = offline.run(engine, BATCH, False, False, lambda: 0.0)[0]
        else:
            with profile.attached(engine):
                made = offline.run(engine, BATCH, False, False, lambda: 0.0)[0]
        return [t.arrivals for t in made]

    profile = Profile(Ceilings(1.0, 1.0, 1.0, 1.0, 1))
    plain = tokens(None)
    assert tokens(profile) == plain
    seen = len(profile.spans)
    assert tokens(None) == plain and len(profile.spans) == seen
    names = {span.name for span in profile.spans}
    assert names >= {"step", "schedule", "run", "batch", "forward", "sample", "output"}
    profile.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(trace) == seen and all(event["dur"] >= 0 for event in trace)
    assert f"{profile.rows()['step'].calls} steps" in profile.table()


# The command line.
def test_throughput_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    command = [
        *(
            "bench",
            "throughput",
            "--model",
            str(write_model(tmp_path)),
            "--num-prompts",
            "3",
        ),
        *("--input-len", "8", "--output-len", "4", "--disable-tqdm"),
        *("--output-json", str(out), "--goodput", "e2el:60000"),
        *("--kv-cache-memory-bytes", "4M"),
    ]
    assert main(command) == 0
    saved = json.loads(out.read_text())
    assert saved["completed"] == 3 and saved["total_output_tokens"] == 12
    assert saved["request_goodput"] > 0 and saved["processor"]
    assert "Throughput Benchmark Result" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--percentile-metrics", "ttft,xyz"], "percentile_metrics='xyz'"),
        (["--metric-percentiles", "101"], "metric_percentiles='101'"),
        (["--goodput", "itl:3"], "goodput='itl:3'"),
    ],
)
def test_wrong_flags_are_named_before_any_work(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("throughput", "serve"):
        assert main(["bench", kind, *flags]) == 2
        assert message in capsys.readouterr().err
