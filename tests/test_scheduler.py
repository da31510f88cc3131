"""The scheduler's policy, plan by plan: who is computed, how much, and what a plan
says. A stand-in for the model says any token, so nothing here needs torch; that the
tokens come out right is shown with an exact model in `test_schedule_states`."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.cache.tables import group_layers
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import (
    LOOK_AHEAD,
    PATIENCE,
    Result,
    Sampled,
    Scheduler,
    Update,
)
from pagedattn.trace import Event, Recorder, silence


def make(windows=(0,), **config):
    settled = {"block_size": 4, "num_blocks": 50, "max_num_batched_tokens": 16}
    return Scheduler(EngineConfig(**{**settled, **config}), group_layers(windows))


def add(scheduler, name, prompt, max_tokens=5, priority=0, **params):
    """Queue a request; `prompt` is a list of tokens, or how many, unlike others'."""
    if isinstance(prompt, int):
        prompt = [1000 + ord(name)] * prompt
    limit = min(len(prompt) + max_tokens, scheduler.tables.capacity() + 1)
    wish = SamplingParams(**params)
    request = Request(name, list(prompt), wish, limit, priority=priority)
    scheduler.add(request)
    return request


def results(plan, token=1):
    return [Result(token if item.samples else None) for item in plan.items]


def step(scheduler, token=1):
    """Plan and commit; {request: tokens computed} of the plan."""
    plan = scheduler.plan()
    if plan is None:
        return None
    assert plan.num_tokens <= scheduler.config.max_num_batched_tokens
    scheduler.commit(plan, results(plan, token))
    scheduler.check()
    return sizes(plan)


def sizes(plan):
    return {item.request_id: len(item.tokens) for item in plan.items}


def names(requests):
    return [request.id for request in requests]


def drain(scheduler):
    """Step to the end, then look whether every block is free."""
    steps = []
    while scheduler.has_requests():
        steps.append(step(scheduler))
        scheduler.take_ended()
        assert len(steps) < 500
    assert len(scheduler.pool.free) == scheduler.pool.usable
    return steps


# The budget.
def test_budget_is_used_up_and_shared_in_order():
    scheduler = make(max_num_batched_tokens=10)
    for name, n in [("a", 4), ("b", 9), ("c", 3)]:
        add(scheduler, name, n, max_tokens=3)
    assert step(scheduler) == {"a": 4, "b": 6}
    assert step(scheduler) == {"a": 1, "b": 3, "c": 3}
    assert step(scheduler) == {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize("n", [7, 8, 9, 16, 17])
def test_prompts_around_the_budget(n):
    """A remainder that equals the budget is one chunk, not two."""
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "a", n, max_tokens=1)
    assert [s["a"] for s in drain(scheduler)] == [8] * (n // 8) + [n % 8] * (n % 8 > 0)


def test_long_prompts_take_turns():
    """`long_prefill` caps a chunk, and leaves the rest of the budget to others."""
    scheduler = make(max_num_batched_tokens=10, long_prefill=4)
    for name, n in [("a", 9), ("b", 3), ("c", 5)]:
        add(scheduler, name, n, max_tokens=2)
    assert step(scheduler) == {"a": 4, "b": 3, "c": 3}
    assert step(scheduler) == {"a": 4, "b": 1, "c": 2}
    assert step(scheduler) == {"a": 1, "c": 1}


def test_without_chunks_a_prompt_is_computed_whole_or_waits():
    scheduler = make(max_num_batched_tokens=10, chunked_prefill=False)
    for name, n in [("a", 6), ("b", 5), ("c", 1)]:
        add(scheduler, name, n, max_tokens=3)
    assert step(scheduler) == {"a": 6}  # 4 are left, b needs 5, and c is behind b
    assert step(scheduler) == {"a": 1, "b": 5, "c": 1}
    scheduler = make(max_num_batched_tokens=10, chunked_prefill=False)
    add(scheduler, "a", 10)
    assert step(scheduler) == {"a": 10}


def test_budget_counts_what_is_left_after_the_hit():
    """C44: the chunk is counted after the lookup."""
    scheduler = make(max_num_batched_tokens=10)
    add(scheduler, "a", list(range(9)), max_tokens=1)
    drain(scheduler)
    add(scheduler, "b", list(range(12)), max_tokens=1)
    add(scheduler, "c", 6, max_tokens=1)
    plan = scheduler.plan()
    assert sizes(plan) == {"b": 4, "c": 6}
    assert plan.items[0].start == 8 and plan.items[0].tokens == (8, 9, 10, 11)


def test_nothing_to_do_is_no_plan():
    scheduler = make()
    assert scheduler.plan() is None and not scheduler.has_requests()
    add(scheduler, "a", 3)
    first = scheduler.plan()
    second, third = scheduler.plan(), scheduler.plan()
    assert [plan.id for plan in (first, second, third)] == [0, 1, 2]
    for _ in range(2):
        scheduler.plan()
    assert scheduler.plan() is None  # its 5 tokens are all in flight
    scheduler.commit(first, results(first))
    assert scheduler.plan() is None


# The line: who is admitted, in which order.
def test_no_more_run_than_max_num_seqs():
    scheduler = make(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 2, max_tokens=2)
    assert step(scheduler) == {"a": 2, "b": 2}
    assert names(scheduler.waiting) == ["c"]
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"c": 2}


def test_the_first_that_does_not_fit_holds_up_the_rest():
    scheduler = make(num_blocks=7, max_num_batched_tokens=99)
    for name, n in [("a", 12), ("b", 16), ("c", 2)]:
        add(scheduler, name, n, max_tokens=1)
    assert step(scheduler) == {"a": 12}
    assert step(scheduler) == {"b": 16, "c": 2}


@pytest.mark.parametrize("first, fits", [(8, True), (9, False)])
def test_all_of_a_prompt_must_fit_before_its_first_chunk_runs(first, fits):
    scheduler = make(num_blocks=6, max_num_batched_tokens=12)
    add(scheduler, "a", first, max_tokens=1)
    add(scheduler, "b", 12, max_tokens=1)  # 3 of 5 blocks, of which a chunk needs 1
    assert step(scheduler) == ({"a": 8, "b": 4} if fits else {"a": 9})


def test_order_of_arrival():
    scheduler = make(max_num_seqs=1)
    requests = [
        add(scheduler, name, 1, 2, priority=9 - i) for i, name in enumerate("xab")
    ]
    assert [r.arrival for r in requests] == [0, 1, 2]
    assert [list(s) for s in drain(scheduler)] == [[n] for n in "xxaabb"]


def test_order_of_priority_then_arrival():
    scheduler = make(max_num_seqs=1, policy="priority")
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", -1)]:
        add(scheduler, name, 1, 1, priority=priority)
    assert [list(s) for s in drain(scheduler)] == [["d"], ["b"], ["a"], ["c"]]


def test_cached_tokens_are_those_of_the_first_admission():
    scheduler = make()
    first = add(scheduler, "a", list(range(9)), max_tokens=1)
    drain(scheduler)
    assert first.cached == 0 and scheduler.take_admitted() == [first]
    second = add(scheduler, "b", list(range(9)), max_tokens=3)
    assert second.cached is None and scheduler.take_admitted() == []
    plan = scheduler.plan()
    assert second.cached == 8 and second.computed == 9
    assert scheduler.take_admitted() == [second]
    scheduler.fail(plan, "x")
    assert scheduler.take_admitted() == []


def test_no_hits_where_they_are_switched_off_or_prompts_are_scored():
    scheduler = make(prefix_caching=False)
    for name in "ab":
        request = add(scheduler, name, list(range(9)), max_tokens=6)
        drain(scheduler)
        assert request.cached == 0
    assert len(scheduler.tables.index) == 0
    scheduler = make()
    found = []
    for name, scored in [("a", 0), ("b", None), ("c", 0)]:
        request = add(scheduler, name, list(range(9)), 1, prompt_logprobs=scored)
        drain(scheduler)
        found.append(request.cached)
    assert found == [0, 8, 0]


# What a plan says.
def test_plan_says_all_that_a_runner_needs():
    scheduler = make((0, 6), max_num_batched_tokens=6, num_blocks=9)
    params = SamplingParams(max_tokens=5)
    add(scheduler, "z", 1)
    scheduler.abort("z")
    request = Request(
        "a",
        [5, 6, 7, 8, 9, 10, 11],
        params,
        12,
        seed=3,
        sibling=2,
        eos_ids=frozenset({1}),
        bad_words_ids=((4, 5),),
    )
    scheduler.add(request)
    plan = scheduler.plan()
    (start,), (item,) = plan.starts, plan.items
    assert start.request_id == item.request_id == "a" and plan.drops == ()
    assert start.tokens == (5, 6, 7, 8, 9, 10, 11) and start.prompt_len == 7
    assert start.params is params and (start.seed, start.sibling) == (3, 2)
    assert start.eos_ids == {1} and start.bad_words_ids == ((4, 5),)
    assert item.start == 0 and item.tokens == (5, 6, 7, 8, 9, 10) and not item.samples
    assert [len(table) for table in item.tables] == [2, 2]
    assert len({i for table in item.tables for i in table}) == 4
    assert item.epoch == request.epoch
    assert scheduler.commit(plan, results(plan)) == [Update(request)]
    plan = scheduler.plan()
    assert plan.starts == () and plan.items[0].tokens == (11,)
    assert plan.items[0].start == 6 and plan.items[0].samples
    (update,) = scheduler.commit(plan, [Result(42, logprobs="scores")])
    assert update.request is request and update.tokens == (42,)
    assert update.result.logprobs == "scores" and update.error is None
    assert request.tokens[-1] == 42 and request.pending == 0


def test_tokens_in_flight_are_planned_by_reference():
    """What is not known yet is named by the plan and the row that sample it."""
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "b", 5)
    add(scheduler, "a", 4)
    plans = [scheduler.plan() for _ in range(4)]
    assert sizes(plans[0]) == {"b": 5, "a": 3}
    assert [item.tokens for item in plans[1].items][0] == (Sampled(0, 0),)
    assert [item.samples for item in plans[1].items] == [True, True]
    want = [(Sampled(1, 0),), (Sampled(1, 1),)]
    assert [item.tokens for item in plans[2].items] == want
    want = [(Sampled(2, 0),), (Sampled(2, 1),)]
    assert [item.tokens for item in plans[3].items] == want
    scheduler.commit(plans[0], results(plans[0], 77))
    scheduler.commit(plans[1], results(plans[1], 78))
    assert scheduler.plan().items[0].tokens == (Sampled(3, 0),)
    for plan in plans[2:]:
        scheduler.commit(plan, results(plan, 79))
    scheduler.check()


def test_results_of_an_older_life_are_dropped():
    """An abort edits no plan; what it sampled reaches nobody, a namesake included."""
    scheduler = make()
    add(scheduler, "a", 4)
    keep = add(scheduler, "b", 4)
    plan = scheduler.plan()
    scheduler.abort("a")
    again = add(scheduler, "a", 3)
    updates = scheduler.commit(plan, results(plan))
    assert [(u.request, u.tokens) for u in updates] == [(keep, (1,))]
    assert again.tokens[again.prompt_len :] == [] and again.pending == 0
    plan = scheduler.plan()
    assert plan.drops == ("a",) and [s.request_id for s in plan.starts] == ["a"]
    scheduler.commit(plan, results(plan))
    assert scheduler.plan().drops == ()


def test_an_item_that_cannot_be_sampled_ends_its_request_alone():
    scheduler = make()
    bad, good = add(scheduler, "a", 3), add(scheduler, "b", 3)
    plan = scheduler.plan()
    scored = Result(error="no token", prompt_logprobs=((1, "what position 1 scored"),))
    updates = scheduler.commit(plan, [scored, Result(7)])
    assert [(u.request, u.tokens, u.result, u.error) for u in updates] == [
        (bad, (), scored, "no token"),
        (good, (7,), Result(7), None),
    ]
    assert bad.finish_reason == "error" and bad.tokens == bad.tokens[:3]
    assert good.finish_reason is None and names(scheduler.running) == ["b"]


def test_ends_carry_their_reasons():
    scheduler = make()
    stop = add(scheduler, "a", 3, stop_token_ids=[1])
    long = add(scheduler, "b", 3, max_tokens=1, stop_token_ids=[2])
    assert step(scheduler, token=1) == {"a": 3, "b": 3}
    assert (stop.finish_reason, stop.stop_reason) == ("stop", 1)
    assert (long.finish_reason, long.stop_reason) == ("length", None)
    assert not scheduler.has_requests()


# Preemption.
def test_an_answer_that_is_complete_ends_with_its_token():
    """By its grammar: before max_tokens, at it, and whatever min_tokens says."""
    scheduler = make()
    early = add(scheduler, "a", 3, max_tokens=5, min_tokens=5)
    last = add(scheduler, "b", 3, max_tokens=1)
    goes_on = add(scheduler, "c", 3)
    plan = scheduler.plan()
    complete = Result(7, ended=True)
    scheduler.commit(plan, [complete, complete, Result(7)])
    for request in (early, last):
        assert (request.finish_reason, request.stop_reason) == ("stop", None)
        assert request.tokens[-1] == 7
    assert goes_on.finish_reason is None
    assert names(scheduler.running) == ["c"]


def test_the_last_in_line_gives_way_and_comes_back_first():
    scheduler = make(num_blocks=7, max_num_batched_tokens=20, prefix_caching=False)
    for name in "abc":
        add(scheduler, name, 8, max_tokens=4)
    add(scheduler, "d", 1, max_tokens=1)
    assert step(scheduler) == {"a": 8, "b": 8, "c": 4}
    assert step(scheduler) == {"a": 1, "b": 1}  # c is preempted for a, d waits
    assert scheduler.preemptions == 1 and names(scheduler.waiting) == ["c", "d"]
    assert step(scheduler) == {"a": 1, "b": 1}
    assert step(scheduler) == {"a": 1, "b": 1}
    plan = scheduler.plan()
    assert sizes(plan) == {"c": 8, "d": 1} and len(plan.starts) == 2


def test_nobody_is_admitted_by_a_plan_that_preempts():
    """Else the request just preempted would take the room that it made."""
    scheduler = make(num_blocks=5, max_num_batched_tokens=20)
    a = add(scheduler, "a", [1] * 8, max_tokens=8)
    b = add(scheduler, "b", [2] * 8, max_tokens=4)
    assert step(scheduler, 3) == {"a": 8, "b": 8}
    plan = scheduler.plan()
    assert sizes(plan) == {"a": 1} and plan.drops == ("b",)
    assert (b.computed, b.pending, a.computed) == (0, 0, 9)
    assert names(scheduler.waiting) == ["b"] and b.tokens[8:] == [3]
    scheduler.commit(plan, results(plan))
    scheduler.check()
    assert step(scheduler) == {"a": 1}
    while names(scheduler.running) == ["a"]:
        plan = scheduler.plan()
        scheduler.commit(plan, results(plan))
    plan = scheduler.plan()
    assert plan.starts[0].tokens == (2,) * 8 + (3,) and plan.starts[0].prompt_len == 8
    scheduler.commit(plan, results(plan))
    drain(scheduler)
    assert len(b.tokens) == 12 and b.finish_reason == "length"
    assert b.cached == 0  # as it was at first, though it hit its own blocks since


def test_the_one_that_needs_room_may_be_the_last():
    scheduler = make(num_blocks=5, max_num_batched_tokens=20)
    add(scheduler, "a", 5, max_tokens=8)
    b = add(scheduler, "b", 8, max_tokens=4)
    assert step(scheduler) == {"a": 5, "b": 8}
    assert step(scheduler) == {"a": 1}
    assert scheduler.preemptions == 1 and b.computed == 0
    assert names(scheduler.running) == ["a"] and names(scheduler.waiting) == ["b"]


def test_preemption_by_priority():
    scheduler = make(num_blocks=5, max_num_batched_tokens=20, policy="priority")
    add(scheduler, "a", 8, max_tokens=4, priority=1)
    add(scheduler, "b", 8, max_tokens=4, priority=0)
    assert step(scheduler) == {"b": 8, "a": 8}
    assert step(scheduler) == {"b": 1}
    assert names(scheduler.waiting) == ["a"]


def test_a_request_alone_that_runs_out_ends():
    """It never preempts itself; what was in flight arrives first."""
    scheduler = make(num_blocks=3, max_num_batched_tokens=20)
    request = add(scheduler, "a", 7)
    request.limit = 99  # more than the engine would allow
    first, second = scheduler.plan(), scheduler.plan()
    assert sizes(second) == {"a": 1}  # the last of 8 slots
    assert scheduler.plan() is None and request.finish_reason is None
    scheduler.commit(first, results(first))
    assert scheduler.plan() is None and scheduler.take_ended() == []
    scheduler.commit(second, results(second))
    assert len(request.tokens) == 9 and request.finish_reason is None
    assert scheduler.plan() is None and request.finish_reason == "length"
    assert scheduler.has_requests()  # its end is not reported yet
    assert scheduler.take_ended() == [Update(request)]
    assert scheduler.take_ended() == [] and not scheduler.has_requests()
    assert scheduler.preemptions == 0
    assert len(scheduler.pool.free) == 2


# Aborts.
def test_abort_frees_at_once_wherever_the_request_is():
    scheduler = make(max_num_batched_tokens=6, max_num_seqs=2)
    requests = [add(scheduler, name, 4) for name in "abc"]
    step(scheduler)  # a is computed, b in the middle of its prompt, c waits
    for request in requests:
        assert scheduler.abort(request.id) is request
        assert request.finish_reason == "abort"
        assert scheduler.abort(request.id) is None
        scheduler.check()
    assert scheduler.abort("nobody") is None and not scheduler.has_requests()
    assert len(scheduler.pool.free) == scheduler.pool.usable
    d = add(scheduler, "d", 1)
    assert scheduler.plan().drops == ("a", "b")  # no runner has heard of c
    assert scheduler.abort("d", "stop") is d and d.finish_reason == "stop"


# Failures.
def test_failure_of_a_request_alone_ends_it():
    scheduler = make()
    request = add(scheduler, "a", list(range(9)))
    plan, after = scheduler.plan(), scheduler.plan()
    assert after is not None
    assert scheduler.fail(plan, "boom") == [Update(request, error="boom")]
    assert request.finish_reason == "error" and not scheduler.has_requests()
    scheduler.check()
    assert len(scheduler.pool.free) == scheduler.pool.usable
    again = add(scheduler, "b", list(range(9)), max_tokens=1)
    drain(scheduler)
    assert again.cached == 0  # what was never written is not found


def test_failure_of_several_singles_out_the_culprit():
    scheduler = make(max_num_batched_tokens=8)
    requests = {name: add(scheduler, name, 5, max_tokens=2) for name in "abc"}
    step(scheduler)  # a's prompt and 3 of b's
    late = add(scheduler, "d", 1, max_tokens=2)
    plan = scheduler.plan()
    assert sizes(plan) == {"a": 1, "b": 2, "c": 5}
    assert scheduler.fail(plan, "boom") == []
    assert scheduler.running == [] and names(scheduler.waiting) == ["a", "b", "c", "d"]
    assert scheduler.preemptions == 3
    plan = scheduler.plan()
    assert sizes(plan) == {"a": 2} and set(plan.drops) == {"a", "b", "c"}
    scheduler.commit(plan, results(plan))  # harmless
    plan = scheduler.plan()
    assert sizes(plan) == {"b": 5}
    assert [u.request.id for u in scheduler.fail(plan, "boom")] == ["b"]
    assert sizes(plan := scheduler.plan()) == {"c": 5}
    scheduler.commit(plan, results(plan))
    assert step(scheduler) == {"c": 1, "d": 1}  # all is well again
    drain(scheduler)
    assert requests["b"].finish_reason == "error"
    for request in (requests["a"], requests["c"], late):
        assert request.finish_reason == "length" and request.num_output == 2


def test_a_suspect_runs_alone_until_it_has_sampled():
    scheduler = make(max_num_batched_tokens=4)
    add(scheduler, "a", 2, max_tokens=3)
    add(scheduler, "b", 9, max_tokens=2)
    plan = scheduler.plan()
    assert sizes(plan) == {"a": 2, "b": 2}
    scheduler.fail(plan, "boom")
    add(scheduler, "c", 1, max_tokens=1)
    assert [step(scheduler) for _ in range(5)] == [
        {"a": 2},
        {"b": 4},
        {"b": 4},
        {"b": 1},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_an_aborted_suspect_is_forgotten():
    scheduler = make()
    for name in "ab":
        add(scheduler, name, 2)
    scheduler.fail(scheduler.plan(), "boom")
    scheduler.abort("a")
    scheduler.abort("b")
    for name in "cd":
        add(scheduler, name, 2)
    assert step(scheduler) == {"c": 2, "d": 2}


def test_failure_withdraws_the_plans_behind_it():
    """Those who appear only in later plans are computed again, and suspected of
    nothing; those who ended meanwhile stay ended."""
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "a", list(range(4)), max_tokens=9)
    add(scheduler, "b", list(range(50, 54)), max_tokens=9)
    first = scheduler.plan()
    c = add(scheduler, "c", list(range(90, 95)), max_tokens=9)
    scheduler.plan()
    scheduler.abort("b")
    assert scheduler.fail(first, "boom") == []
    assert names(scheduler.waiting) == ["a", "c"] and c.computed == c.pending == 0
    assert len(scheduler.tables.index) == 0
    plan = scheduler.plan()
    assert sizes(plan) == {"a": 4} and set(plan.drops) == {"a", "b", "c"}
    scheduler.commit(plan, results(plan))
    assert step(scheduler) == {"a": 1, "c": 5}


def test_a_block_settled_in_flight_stands_or_falls_with_its_plan():
    """The token that completes a block is known before the plan that computes it has
    run: if that fails, nobody may hit the block."""
    scheduler = make()
    add(scheduler, "a", [1, 2, 3], max_tokens=9)
    first, second = scheduler.plan(), scheduler.plan()
    scheduler.commit(first, results(first, 4))
    assert len(scheduler.tables.index) == 1
    scheduler.fail(second, "boom")
    assert len(scheduler.tables.index) == 0
    scheduler = make()
    add(scheduler, "a", [1, 2, 3], max_tokens=9)
    for _ in range(2):
        step(scheduler, 4)
    assert len(scheduler.tables.index) == 1
    hit = add(scheduler, "b", [1, 2, 3, 4, 5])
    scheduler.plan()
    assert hit.cached == 4


def test_prefix_cache_is_reset_when_nothing_runs():
    scheduler = make()
    add(scheduler, "a", list(range(9)), max_tokens=2)
    step(scheduler)
    assert not scheduler.reset_prefix_cache() and len(scheduler.tables.index) == 2
    drain(scheduler)
    assert scheduler.reset_prefix_cache() and len(scheduler.tables.index) == 0
    scheduler.tables.index.check()
    b = add(scheduler, "b", list(range(9)), max_tokens=1)
    drain(scheduler)
    assert b.cached == 0


def test_whoever_listens_hears_of_scheduler_and_blocks_from_then_on():
    recorder, scheduler = Recorder(), make()
    add(scheduler, "a", list(range(9)), max_tokens=2)
    step(scheduler)
    scheduler.trace_to(recorder.emit)
    drain(scheduler)
    heard = [(event.kind, event.request, event.blocks) for event in recorder.events]
    frees = [("free", None, (id,)) for id in (3, 2, 1)]
    assert heard == [("compute", "a", ()), *frees, ("finish", "a", ())]
    assert scheduler.reset_prefix_cache()
    assert recorder.events[-1] == Event(0, "evict", None, (2, 1), 0)
    scheduler.trace_to(silence)
    add(scheduler, "b", 3, max_tokens=1)
    drain(scheduler)
    assert len(recorder.events) == len(heard) + 1


def test_a_budget_of_one_token():
    scheduler = make(max_num_batched_tokens=1)
    add(scheduler, "a", 3, max_tokens=2)
    add(scheduler, "b", 1, max_tokens=1)
    assert drain(scheduler) == [{"a": 1}] * 4 + [{"b": 1}]


def test_hits_that_lie_free_are_no_room():
    """Admission reserves the whole prompt; sharing a free block uses it up, too."""
    scheduler = make(num_blocks=6, max_num_batched_tokens=5)
    add(scheduler, "a", list(range(9)), max_tokens=1)
    drain(scheduler)  # leaves 2 cached blocks among 5 free ones
    add(scheduler, "b", 5, max_tokens=4)
    assert step(scheduler) == {"b": 5}
    add(scheduler, "c", list(range(16)), max_tokens=1)  # 2 hits and 2 new: 4 of 3
    assert step(scheduler) == {"b": 1}
    add(scheduler, "d", 1)
    assert step(scheduler) == {"b": 1}
    assert step(scheduler) == {"b": 1}
    assert step(scheduler) == {"c": 5}


def test_one_plan_hits_what_it_fills_itself():
    """Idea 3: a block is shareable from the plan that writes it."""
    scheduler = make(max_num_batched_tokens=20)
    for name in "ab":
        add(scheduler, name, list(range(9)), max_tokens=1)
    plan = scheduler.plan()
    assert [(i.request_id, i.start, len(i.tokens)) for i in plan.items] == [
        ("a", 0, 9),
        ("b", 8, 1),
    ]
    assert plan.num_tokens == 10
    shared = [item.tables[0][:2] for item in plan.items]
    assert shared[0] == shared[1]


@given(st.integers(4, 40), st.integers(2, 6), st.integers(1, 30), st.integers(1, 5))
def test_a_common_prefix_is_computed_once_whatever_the_budget(
    prefix, sharers, budget, block_size
):
    """Also where it is longer than the budget: then the first computes it alone."""
    scheduler = make(
        max_num_batched_tokens=budget, num_blocks=400, block_size=block_size
    )
    for i in range(sharers):
        add(scheduler, "abcdef"[i], [*range(prefix), 500 + i], max_tokens=1)
    computed = sum(sum(plan.values()) for plan in drain(scheduler))
    own = prefix % block_size + 1  # whole blocks are shared, the last token never
    assert computed <= prefix - prefix % block_size + sharers * own


# Longest prefix first.
def lpm(**config):
    return make(**{"policy": "lpm", "num_blocks": 400, **config})


def admissions(scheduler):
    """Names in the order of their admission, and the tokens computed for all."""
    order, computed = [], 0
    while scheduler.has_requests():
        plan = scheduler.plan()
        order += [start.request_id for start in plan.starts]
        computed += plan.num_tokens
        scheduler.commit(plan, results(plan))
        scheduler.check()
    return order, computed


def test_a_cached_prefix_goes_first():
    scheduler = lpm(max_num_seqs=1, max_num_batched_tokens=40)
    add(scheduler, "a", [*range(12), 1], max_tokens=1)
    add(scheduler, "b", 13, max_tokens=1)
    add(scheduler, "c", [*range(12), 2], max_tokens=1)
    add(scheduler, "d", [*range(8), 3], max_tokens=1)
    assert admissions(scheduler)[0] == ["a", "c", "d", "b"]


def test_a_prefix_that_is_being_computed_counts_as_far_as_it_is_planned():
    scheduler = lpm(max_num_batched_tokens=40, long_prefill=8)
    add(scheduler, "a", [*range(12), 1], max_tokens=1)
    add(scheduler, "b", 5, max_tokens=1)
    add(scheduler, "c", [*range(8), 2], max_tokens=1)
    assert list(sizes(scheduler.plan())) == ["a", "c", "b"]


@pytest.mark.parametrize("others", [PATIENCE - 1, PATIENCE, 3 * PATIENCE])
def test_nobody_is_passed_by_more_than_patience_allows(others):
    scheduler = lpm(max_num_seqs=1, max_num_batched_tokens=40)
    add(scheduler, "a", [*range(8), 1], max_tokens=1)
    step(scheduler)
    late = add(scheduler, "z", 9, max_tokens=1)
    for i in range(others):
        add(scheduler, f"{i}", [*range(8), 20 + i], max_tokens=1)
    order, _ = admissions(scheduler)
    assert order.index("z") == min(others, PATIENCE) and late.passed == 0


def test_few_of_a_long_line_are_looked_at():
    scheduler = lpm(max_num_seqs=1, max_num_batched_tokens=40)
    for i in range(200):
        add(scheduler, chr(200 + i), 9 + i % 7, max_tokens=1)
    looked = []
    lookup = scheduler.tables.lookup
    scheduler.tables.lookup = lambda request: looked.append(request) or lookup(request)
    step(scheduler)
    assert len(looked) == LOOK_AHEAD + 1  # and once more to admit
    add(scheduler, "x", 9, max_tokens=9)
    looked.clear()
    step(scheduler)
    step(scheduler)
    assert len(looked) <= 2 * (LOOK_AHEAD + 1)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    prefix=st.integers(1, 6),
    own=st.integers(1, 5),
    seqs=st.integers(1, 4),
    room=st.integers(0, 20),
)
def test_groups_of_one_prefix_cost_no_more_than_in_order_of_arrival(
    groups, prefix, own, seqs, room
):
    """Whatever the pool keeps; and nobody is passed by more than PATIENCE."""
    costs = {}
    for policy in ("fcfs", "lpm"):
        scheduler = make(
            policy=policy,
            max_num_seqs=seqs,
            max_num_batched_tokens=200,
            num_blocks=2 + seqs * (prefix + 3) + room,
        )
        for i, group in enumerate(groups):
            shared = [100 * group + j for j in range(4 * prefix)]
            name = f"{i % 10}{i}"
            add(scheduler, name, [*shared, *[1000 + i] * own], max_tokens=2)
        order, costs[policy] = admissions(scheduler)
        for place, name in enumerate(order):
            later = [n for n in order[:place] if int(n[1:]) > int(name[1:])]
            assert len(later) <= (PATIENCE if policy == "lpm" else 0)
    assert costs["lpm"] <= costs["fcfs"]


def test_what_lies_behind_the_window_is_released_as_it_runs():
    scheduler = make((4,), num_blocks=20)
    add(scheduler, "a", 3, max_tokens=50)
    while scheduler.has_requests():
        assert step(scheduler) is not None
        assert scheduler.pool.usable - len(scheduler.pool.free) <= 2


def test_a_plan_that_preempts_admits_nobody():
    """Not even who is first in line and small enough for what was freed."""
    scheduler = make(num_blocks=6, max_num_batched_tokens=30, policy="priority")
    add(scheduler, "a", 8, max_tokens=4)
    add(scheduler, "b", 12, max_tokens=4, priority=2)
    assert step(scheduler) == {"a": 8, "b": 12}
    add(scheduler, "c", 2, max_tokens=1, priority=1)
    assert step(scheduler) == {"a": 1}
    assert names(scheduler.waiting) == ["c", "b"]
    assert step(scheduler) == {"a": 1, "c": 2}


def test_what_an_earlier_life_sampled_is_neither_awaited_nor_kept():
    """C45: b is preempted with a token in flight, and runs again before it lands."""
    scheduler = make(num_blocks=5, max_num_batched_tokens=20)
    add(scheduler, "a", 8)
    b = add(scheduler, "b", 8)
    old = scheduler.plan()
    assert sizes(old) == {"a": 8, "b": 8}
    between = scheduler.plan()
    assert sizes(between) == {"a": 1} and scheduler.preemptions == 1
    scheduler.abort("a")
    again, after = scheduler.plan(), scheduler.plan()
    assert after.items[0].tokens == (Sampled(again.id, 0),)
    for plan in (old, between):
        assert scheduler.commit(plan, results(plan, 66)) == []
    assert b.tokens[8:] == []
    for plan in (again, after):
        scheduler.commit(plan, results(plan, 67))
    assert b.tokens[8:] == [67, 67] and b.pending == 0


def test_suspects_run_in_order_of_importance():
    scheduler = make(policy="priority")
    add(scheduler, "a", 2, priority=1)
    step(scheduler)
    add(scheduler, "b", 2, priority=0)
    plan = scheduler.plan()
    assert sizes(plan) == {"a": 1, "b": 2}
    scheduler.fail(plan, "boom")
    assert [step(scheduler), step(scheduler)] == [{"b": 2}, {"a": 3}]


def test_drops_of_a_failed_plan_are_said_again():
    """The runner never heard of them."""
    scheduler = make()
    for name in "ab":
        add(scheduler, name, 2)
    step(scheduler)
    scheduler.abort("a")
    plan = scheduler.plan()
    assert plan.drops == ("a",)
    scheduler.fail(plan, "boom")
    add(scheduler, "c", 2)
    assert set(scheduler.plan().drops) == {"a", "b"}


def test_a_block_settled_early_falls_with_the_plan_that_computes_it():
    """b sits out some plans: its token is known long before it is computed."""
    scheduler = make(max_num_batched_tokens=4, policy="priority")
    b = add(scheduler, "b", [1, 2], priority=1)
    plans = [scheduler.plan()]
    add(scheduler, "a", 20, priority=0)
    while b.computed < 4:
        plans.append(scheduler.plan())
    assert len(plans) == 7 and "b" not in sizes(plans[2])
    indexed = len(scheduler.tables.index)
    for plan in plans[:-1]:
        scheduler.commit(plan, results(plan, 9))
    assert len(scheduler.tables.index) == indexed + 1
    scheduler.fail(plans[-1], "boom")
    again = add(scheduler, "c", [1, 2, 9, 9, 9], priority=-1)
    scheduler.abort("b")
    scheduler.abort("a")
    scheduler.plan()
    assert again.cached == 0


def test_a_prompt_that_is_only_pooled_ends_with_its_result():
    scheduler = make()
    params = SamplingParams(max_tokens=None, detokenize=False)
    request = Request("a", [1, 2, 3], params, 4, pooling="LAST")
    scheduler.add(request)
    result = Result(pooled="a vector")
    [update] = scheduler.commit(scheduler.plan(), [result])
    assert update == Update(request, result=result) and update.result is result
    assert request.finish_reason == "stop" and not scheduler.has_requests()
    scheduler.check()


def test_all_are_preempted_and_keep_their_tokens():
    scheduler = make()
    for name in "abc":
        add(scheduler, name, 3)
    step(scheduler)
    scheduler.preempt_all()
    assert scheduler.running == [] and scheduler.preemptions == 3
    assert [(r.id, r.num_tokens, r.computed) for r in scheduler.waiting] == [
        (name, 4, 0) for name in "abc"
    ]
    scheduler.check()
    assert scheduler.plan().drops == ("c", "b", "a")
