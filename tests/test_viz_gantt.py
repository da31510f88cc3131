"""Gantt charts say what the plans said: the same tokens, the same steps, and who was
preempted or waited. Drawn from the real scheduler's plans; nothing is invented."""

import re
from collections import Counter

import ipywidgets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.bench.dry import run_step
from pagedattn.errors import UserError
from pagedattn.viz.gantt import (
    EXAMPLE,
    KINDS,
    Job,
    Schedule,
    continuous_batches,
    gantt,
    new_scheduler,
    requests_of,
    schedule_of,
    scheduler_gantt,
    static_batches,
)

COMPUTING = {"prompt", "again", "decode"}
JOBS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(0, 6)),
    min_size=1,
    max_size=6,
).map(lambda rows: [Job(f"r{i}", *row) for i, row in enumerate(rows)])
CONFIG = st.fixed_dictionaries(
    {
        "max_num_batched_tokens": st.integers(1, 40),
        "max_num_seqs": st.integers(1, 4),
        "num_blocks": st.integers(8, 30),
    }
)


def plans_of(jobs, **config):
    """Plans of jobs that all come at once, and the scheduler that made them."""
    scheduler = new_scheduler(**config)
    for request in requests_of(jobs, scheduler):
        scheduler.add(request)
    plans = []
    while scheduler.has_requests():
        plans.append(run_step(scheduler))
    return plans, scheduler


def kinds(schedule: Schedule) -> dict[str, str]:
    """A letter for each step of each request, from its arrival."""
    rows: dict[str, str] = {}
    for bar in schedule.bars:
        rows[bar.request] = rows.get(bar.request, "") + bar.kind[0]
    return rows


@given(JOBS, CONFIG)
def test_bars_agree_with_the_plans(jobs, config):
    plans, scheduler = plans_of(jobs, **config)
    schedule = schedule_of(plans)
    computed, drawn = Counter(), Counter()
    for plan in plans:
        for item in plan.items:
            computed[item.request_id] += len(item.tokens)
    for bar in schedule.bars:
        drawn[bar.request] += bar.tokens
        assert (bar.tokens > 0) == (bar.kind in COMPUTING)
    assert drawn == computed
    assert schedule.tokens == tuple(plan.num_tokens for plan in plans)
    assert max(schedule.tokens) <= config["max_num_batched_tokens"]
    assert len(schedule.preempted) == scheduler.preemptions


@given(JOBS, CONFIG)
def test_each_token_is_computed_once_unless_preempted_or_hit(jobs, config):
    """Prompt and decode bars together cover each position of a request once."""
    schedule = continuous_batches(jobs, **config)
    for job in jobs:
        bars = [bar for bar in schedule.bars if bar.request == job.name]
        assert [bar.step for bar in bars] == list(
            range(job.arrives, job.arrives + len(bars))
        )
        new = [bar for bar in bars if bar.kind in ("prompt", "decode")]
        length = job.prompt + job.answer - 1  # the last token is never computed
        seen = [p for bar in new for p in range(bar.start, bar.start + bar.tokens)]
        assert len(seen) == len(set(seen)) and set(seen) <= set(range(length))
        if not any(bar.kind == "again" or bar.hit for bar in bars):
            assert len(seen) == length
            assert sum(bar.kind == "decode" for bar in bars) == job.answer - 1


@given(JOBS, st.integers(1, 4))
def test_static_batches_wait_for_their_slowest(jobs, seats):
    config = {"max_num_seqs": seats, "max_num_batched_tokens": 99}
    static, free = static_batches(jobs, **config), continuous_batches(jobs, **config)
    assert static.steps >= free.steps and sum(static.tokens) == sum(free.tokens)
    assert "idle" not in {bar.kind for bar in free.bars}
    begins, ends = {}, {}
    for bar in static.bars:
        if bar.kind != "wait":
            begins.setdefault(bar.request, bar.step)
            ends[bar.request] = bar.step
    together = Counter(begins.values())
    assert max(together.values()) <= seats
    for name, begin in begins.items():
        assert {ends[other] for other in begins if begins[other] == begin} == {
            ends[name]
        }


def test_what_each_step_was():
    jobs = [Job("a", 6, 3), Job("b", 2, 2), Job("c", 1, 4, arrives=3)]
    config = {"max_num_batched_tokens": 4, "max_num_seqs": 2}
    schedule = continuous_batches(jobs, **config)
    assert kinds(schedule) == {"a": "ppdd", "b": "wpd", "c": "pddd"}
    assert schedule.tokens == (4, 4, 2, 2, 1, 1, 1)
    assert schedule.first_tokens() == {"a": 2, "b": 2, "c": 1}
    assert schedule.busy == 10 / 7
    schedule = static_batches(jobs, **config)
    assert kinds(schedule) == {"a": "ppdd", "b": "wpdi", "c": "wpddd"}
    assert schedule.steps == 8


def test_nobody_there_is_a_step_without_tokens():
    schedule = continuous_batches([Job("a", 2, 1), Job("b", 2, 1, arrives=3)])
    assert schedule.tokens == (2, 0, 0, 2)
    assert schedule == static_batches([Job("a", 2, 1), Job("b", 2, 1, arrives=3)])


def test_hits_and_preemptions_are_marked():
    jobs = [Job("a", 8, 5), Job("b", 8, 4)]
    schedule = continuous_batches(jobs, num_blocks=5)
    assert schedule.preempted == ((1, "b"),)
    assert kinds(schedule) == {"a": "pdddd", "b": "pwwwwadd"}
    again = next(bar for bar in schedule.bars if bar.kind == "again")
    assert (again.hit, again.start, again.tokens) == (4, 4, 5)
    figure = gantt(schedule)
    assert "✕" in figure.svg and "❌" in figure.text and "1 preempted" in figure.text
    assert "begins with a hit" in figure.svg


def test_failed_steps_are_no_preemptions():
    scheduler = new_scheduler()
    for request in requests_of([Job("a", 3, 2), Job("b", 3, 2)], scheduler):
        scheduler.add(request)
    plans = [scheduler.plan()]
    scheduler.fail(plans[0], "boom")
    while scheduler.has_requests():
        plans.append(run_step(scheduler))
    schedule = schedule_of(plans, failed=[0])
    assert kinds(schedule) == {"a": "fpwd", "b": "fwpd"}
    assert schedule.preempted == ()
    assert KINDS["failed"][2] in gantt(schedule).text


def test_columns_are_as_wide_as_their_tokens():
    schedule = continuous_batches([Job("a", 40, 3), Job("b", 2, 6)])
    starts, widths = zip(
        *re.findall(
            r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*><title>b,',
            gantt(schedule, by_tokens=True).svg,
        ),
        strict=True,
    )
    assert sorted(map(float, starts)) == list(map(float, starts))
    first, second = float(widths[0]) + 1, float(widths[1]) + 1
    assert first / second == pytest.approx((8 + 42) / (8 + 2), abs=0.1)
    even = re.findall(r'width="([\d.]+)"[^>]*><title>b,', gantt(schedule).svg)
    assert len(set(even)) == 1


def test_many_steps_are_drawn_as_runs():
    jobs = [Job(f"r{i}", 9, 60 + i) for i in range(40)]
    figure = gantt({"few": continuous_batches(jobs, max_num_seqs=8)})
    assert figure.svg.count("<title>") < 200
    lines = figure.text.splitlines()
    assert len(lines) < 20 and max(map(len, lines)) < 80
    assert "a square for" in figure.text


def test_impossible_jobs_are_refused():
    with pytest.raises(UserError, match="r needs 45 slots, there are 36"):
        continuous_batches([Job("r", 40, 6)], num_blocks=10)
    with pytest.raises(UserError, match="budget is 16"):
        continuous_batches(
            [Job("r", 10, 8)], max_num_batched_tokens=16, chunked_prefill=False
        )


# The widget.
def parts(widget):
    """Its controls by name, and the picture."""
    *controls, picture = widget.children
    assert isinstance(picture, ipywidgets.HTML)
    return {control.description: control for control in controls}, picture


@pytest.mark.parametrize(
    "name, value",
    [("budget", 5), ("max seqs", 2), ("block pool", 12), ("chunked prefill", False)],
)
def test_moving_a_slider_changes_the_picture(name, value):
    controls, picture = parts(scheduler_gantt())
    before = picture.value
    controls[name].value, kept = value, controls[name].value
    assert picture.value != before
    controls[name].value = kept
    assert picture.value == before and "<img" in before


def test_every_setting_of_the_sliders_has_an_answer():
    controls, picture = parts(scheduler_gantt())
    for name in ("budget", "max seqs", "block pool"):
        for end in (controls[name].min, controls[name].max):
            controls[name].value = end
            assert "A first token comes after" in picture.value
        controls[name].value = 16 if name == "budget" else controls[name].min
    controls["chunked prefill"].value = False
    assert "Without chunked prefill" in picture.value
    controls["budget"].value = 64
    assert "<img" in picture.value
    assert all(f"{job.name}%3C" in picture.value for job in EXAMPLE)
