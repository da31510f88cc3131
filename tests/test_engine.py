"""The engine with an exact model: arrivals, ends, limits, sharing and failures.

Each test ends with `engine.check()`: nothing under way, every block free."""

import pytest

from pagedattn.errors import UserError
from pagedattn.request import RequestOutputKind, SamplingParams
from pagedattn.testing import hash_engine, naive_generate

GREEDY = {"temperature": 0.0}


def drain(engine):
    """Step to the end; the last output of each request."""
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
        engine.scheduler.check()
    engine.check()
    return last


def truth(engine, prompt, params, windows=(0, 0)):
    """(tokens, reason) of the request alone in an endless machine."""
    ask = engine.intake.accept("truth", list(prompt), params)
    return naive_generate(ask.requests[0], windows)


def ids(output, i=0):
    return list(output.outputs[i].token_ids)


@pytest.mark.parametrize("n", [15, 16, 17, 32, 33])
def test_prompt_cached_to_its_end(n):
    """C42: hits are whole blocks, at most tokens − 1, and change nothing."""
    engine = hash_engine(block_size=16)
    params = SamplingParams(max_tokens=3, **GREEDY)
    seen = []
    for name in "ab":
        engine.add_request(name, list(range(n)), params)
        seen.append(drain(engine)[name])
    assert ids(seen[0]) == ids(seen[1]) == truth(engine, range(n), params)[0]
    assert seen[0].num_cached_tokens == 0
    assert seen[1].num_cached_tokens == (n - 1) // 16 * 16
    again = list(range(n)) + ids(seen[0])
    engine.add_request("c", again, params)
    assert ids(drain(engine)["c"]) == truth(engine, again, params)[0]


@pytest.mark.parametrize("length", [3, 4, 5, 8])
def test_preemption_at_block_boundaries(length):
    """C45: nothing lost, doubled or reordered, streamed or not."""
    engine = hash_engine(block_size=4, num_blocks=9, max_num_batched_tokens=16)
    params = SamplingParams(
        max_tokens=12, output_kind=RequestOutputKind.DELTA, **GREEDY
    )
    prompts = {f"r{i}": [i] * length for i in range(5)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    streamed = {name: [] for name in prompts}
    while engine.has_unfinished_requests():
        for output in engine.step():
            streamed[output.request_id] += output.outputs[0].token_ids
    engine.check()
    assert engine.scheduler.preemptions > 0
    for name, prompt in prompts.items():
        assert streamed[name] == truth(engine, prompt, params)[0]


def test_preempted_then_hit_on_resume():
    """C44: the chunk is counted after the lookup."""
    engine = hash_engine(block_size=2, num_blocks=14, max_num_batched_tokens=8)
    params = SamplingParams(max_tokens=10, **GREEDY)
    prompts = {f"r{i}": [7, 7, 7, 7, 7, i] for i in range(8)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    last = drain(engine)
    assert engine.scheduler.preemptions > 0
    for name, prompt in prompts.items():
        assert ids(last[name]) == truth(engine, prompt, params)[0]


@pytest.mark.parametrize("chunk", [3, 8])
def test_no_token_before_the_prompt_is_done(chunk):
    """C56: lengths around the chunk; one output for each token, none for a part."""
    for n in (chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1):
        engine = hash_engine(block_size=4, max_num_batched_tokens=chunk)
        params = SamplingParams(max_tokens=2, **GREEDY)
        engine.add_request("a", list(range(n)), params)
        steps = -(-n // chunk)
        outputs = [engine.step() for _ in range(steps)]
        assert [len(o) for o in outputs] == [0] * (steps - 1) + [1]
        assert ids(drain(engine)["a"]) == truth(engine, range(n), params)[0]


@pytest.mark.parametrize("block_size", [1, 16, 64, 256])
def test_admission_counts_whole_blocks(block_size):
    """C59: prompts of k·B + 1 tokens that together need one block too many."""
    engine = hash_engine(
        block_size=block_size,
        num_blocks=7,
        max_model_len=4096,
        max_num_batched_tokens=4096,
    )
    params = SamplingParams(max_tokens=2, **GREEDY)
    sizes = {"a": block_size + 1, "b": 2 * block_size + 1, "c": block_size + 1}
    for k, (name, n) in enumerate(sizes.items()):
        engine.add_request(name, [k] * n, params)
    engine.step()
    assert len(engine.scheduler.running) == 2
    assert {len(ids(o)) for o in drain(engine).values()} == {2}


def test_prompt_that_can_never_fit_is_refused_with_the_numbers():
    """C54: refused at once, and the next one runs."""
    engine = hash_engine(block_size=16, num_blocks=8, max_model_len=512)
    with pytest.raises(UserError) as refused:
        engine.add_request("big", [1] * 200, SamplingParams())
    for number in ("200", "512", "112"):
        assert number in str(refused.value)
    assert not engine.has_unfinished_requests()
    params = SamplingParams(max_tokens=2, **GREEDY)
    engine.add_request("small", [1] * 5, params)
    assert len(ids(drain(engine)["small"])) == 2


def test_output_that_outgrows_the_pool_ends_with_length():
    """C54: a lone request is capped at what the pool allows."""
    engine = hash_engine(block_size=4, num_blocks=5, max_model_len=512)
    engine.add_request("a", [1] * 10, SamplingParams(max_tokens=100, **GREEDY))
    output = drain(engine)["a"].outputs[0]
    assert len(output.token_ids) == 7  # 16 slots hold 10 + 6; the 7th needs none
    assert output.finish_reason == "length" and engine.scheduler.preemptions == 0


def test_context_length_is_reached_exactly():
    engine = hash_engine(num_blocks=64, max_model_len=20)
    engine.add_request("a", [1] * 19, SamplingParams(max_tokens=None, **GREEDY))
    engine.add_request("b", [1] * 5, SamplingParams(max_tokens=None, **GREEDY))
    last = drain(engine)
    assert len(ids(last["a"])) == 1 and len(ids(last["b"])) == 15
    with pytest.raises(UserError, match="20 tokens"):
        engine.add_request("c", [1] * 20, SamplingParams())


def test_abort_everywhere():
    """C60: waiting, mid-prompt, running, finished, unknown, twice; others go on."""
    engine = hash_engine(
        block_size=4, num_blocks=40, max_num_batched_tokens=8, max_num_seqs=2
    )
    params = SamplingParams(max_tokens=4, **GREEDY)
    for i in range(4):
        engine.add_request(f"r{i}", [i] * 20, params)
    engine.step()  # r0 is in the middle of its prompt, r3 waits
    for name in ("r0", "r0", "r3", "nobody"):
        engine.abort_request(name)
    last = drain(engine)
    engine.abort_request("r1")
    assert not engine.has_unfinished_requests()
    for name in ("r0", "r3"):
        output = last[name].outputs[0]
        assert (list(output.token_ids), output.finish_reason) == ([], "abort")
    for i in (1, 2):
        assert ids(last[f"r{i}"]) == truth(engine, [i] * 20, params)[0]


def test_an_abort_ends_all_siblings():
    """C60 for n > 1: no sibling runs on, and no block stays taken."""
    engine = hash_engine(block_size=4, num_blocks=40)
    params = SamplingParams(n=3, max_tokens=50, temperature=1.0, seed=1)
    engine.add_request("r", [1] * 9, params)
    engine.step()
    assert len(engine.scheduler.running) == 3
    engine.abort_request("r")
    assert not engine.scheduler.has_requests()
    assert len(drain(engine)["r"].outputs) == 3
    engine.check()


def test_gauges_fall_on_abort():
    """C97: not only on the next step."""
    engine = hash_engine()
    for i in range(5):
        engine.add_request(f"r{i}", [i], SamplingParams(max_tokens=50))
    engine.step()
    assert gauges(engine)["vllm:num_requests_running"] == 5
    for i in range(5):
        engine.abort_request(f"r{i}")
    assert set(gauges(engine).values()) == {0.0}


def gauges(engine):
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
    return {f"vllm:{name}": found[f"vllm:{name}"] for name in names}


def test_a_failing_request_ends_alone():
    """Whatever a step raises: the culprit ends with an error, the others are exact."""
    engine = hash_engine(block_size=4, num_blocks=40)
    forward = engine.runner.model.forward

    def trip(batch, caches):
        if (batch.ids == 666).any():
            raise RuntimeError("cursed token")
        return forward(batch, caches)

    engine.runner.model.forward = trip
    params = SamplingParams(max_tokens=5, **GREEDY)
    prompts = {"a": [1, 2, 3], "bad": [1, 2, 666], "b": [1, 2, 3, 4, 5], "c": [9]}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    last = drain(engine)
    assert last.pop("bad").outputs[0].finish_reason == "error"
    for name, output in last.items():
        assert ids(output) == truth(engine, prompts[name], params)[0]


def test_common_prefix_is_computed_once_within_a_plan():
    """Idea 3: requests of one step share what the first of them writes."""
    engine = hash_engine(block_size=4, num_blocks=200, max_num_batched_tokens=512)
    params = SamplingParams(max_tokens=2, **GREEDY)
    prompts = {f"r{i}": [5] * 40 + [i] for i in range(32)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params)
    engine.step()
    assert len(engine.scheduler.running) == 32
    assert engine.scheduler.tables.slots() == 40 + 32 * 4
    last = drain(engine)
    for name, prompt in prompts.items():
        assert ids(last[name]) == truth(engine, prompt, params)[0]
    assert last["r0"].num_cached_tokens == 0 and last["r9"].num_cached_tokens == 40


def test_siblings():
    """n sequences of one prompt: different draws, each as it would be alone."""
    engine = hash_engine(block_size=4)
    params = SamplingParams(n=4, seed=5, max_tokens=6)
    ask = engine.intake.accept("x", [3, 1, 4], params)
    engine.add_request("a", [3, 1, 4], params)
    output = drain(engine)["a"]
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    for got, request in zip(output.outputs, ask.requests, strict=True):
        assert list(got.token_ids) == naive_generate(request)[0]
    assert len({tuple(o.token_ids) for o in output.outputs}) == 4


def test_seed_and_neighbours():
    """C31: a seeded request's tokens depend on nothing but itself."""
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=8)
    want = None
    for others in ([], [None], [7], [None, 7, None]):
        for first in (True, False):
            engine = hash_engine(block_size=2, num_blocks=24)
            names = [f"o{i}" for i in range(len(others))]
            if first:
                engine.add_request("a", [1, 2, 3], seeded)
            for name, seed in zip(names, others, strict=True):
                engine.add_request(name, [9], SamplingParams(seed=seed, max_tokens=20))
            if not first:
                engine.add_request("a", [1, 2, 3], seeded)
            got = ids(drain(engine)["a"])
            want = want or got
            assert got == want


def test_unseeded_requests_differ_but_engines_repeat():
    runs = []
    for _ in range(2):
        engine = hash_engine()
        for name in "ab":
            engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=12))
        last = drain(engine)
        runs.append([ids(last[name]) for name in "ab"])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_priority_policy_orders_and_preempts():
    engine = hash_engine(policy="priority", max_num_seqs=1)
    params = SamplingParams(max_tokens=2, **GREEDY)
    for name, priority in [("late", 5), ("first", -1), ("second", 0)]:
        engine.add_request(name, [1], params, priority=priority)
    order = []
    while engine.has_unfinished_requests():
        order += [o.request_id for o in engine.step() if o.finished]
    assert order == ["first", "second", "late"]
    with pytest.raises(UserError, match="priority"):
        hash_engine().add_request("a", [1], params, priority=1)


def test_bad_prompts_name_what_is_wrong():
    """C09 and its neighbours: refused before anything is queued."""
    engine = hash_engine()
    for prompt, word in [
        ([], "empty"),
        ([1, "2"], "no token id"),
        ([True], "no token id"),
        ([-1], "vocabulary"),
        ([1 << 16], "vocabulary"),
        ("text", "tokenizer"),
        (7, "text or token ids"),
        ({"prompt_token_ids": [1], "multi_modal_data": {}}, "multi_modal_data"),
        ({"prompt_token_ids": [1], "cache_salt": ""}, "cache_salt"),
        ({"prompt_token_ids": [1], "cache_salt": 3}, "cache_salt"),
    ]:
        with pytest.raises(UserError, match=word):
            engine.add_request("a", prompt, SamplingParams())
    assert not engine.has_unfinished_requests()
    engine.add_request("a", [1], SamplingParams(max_tokens=1))
    with pytest.raises(UserError, match="already running"):
        engine.add_request("a", [1], SamplingParams())
    drain(engine)


def test_ends_on_eos_stop_ids_and_min_tokens():
    """C08: every ending id is masked until min_tokens, then all end it."""
    force = {"logit_bias": {11: 100.0}, **GREEDY}
    for eos, stops in [((10, 11), []), ((10,), [11])]:
        engine = hash_engine(eos_ids=eos)
        params = SamplingParams(
            min_tokens=4, max_tokens=32, stop_token_ids=stops, **force
        )
        engine.add_request("a", [1] * 50, params)
        output = drain(engine)["a"].outputs[0]
        assert len(output.token_ids) == 5 and output.token_ids[-1] == 11
        assert output.finish_reason == "stop"
        assert output.stop_reason == (None if 11 in eos else 11)
    engine = hash_engine(eos_ids=(11,))
    engine.add_request("a", [1], SamplingParams(ignore_eos=True, max_tokens=9, **force))
    output = drain(engine)["a"].outputs[0]
    assert list(output.token_ids) == [11] * 9 and output.finish_reason == "length"


def test_prompt_logprobs_under_chunks_and_preemption():
    """C29: the same values as in one go, one for each position but the first."""
    scored = SamplingParams(prompt_logprobs=1, max_tokens=4, **GREEDY)
    seen = []
    for budget, blocks in [(64, 60), (8, 18)]:
        engine = hash_engine(
            block_size=4, num_blocks=blocks, max_num_batched_tokens=budget
        )
        for i in range(3):
            params = SamplingParams(max_tokens=12, **GREEDY)
            engine.add_request(f"o{i}", [i] * 9, params)
        engine.add_request("a", list(range(30)), scored)
        output = drain(engine)["a"]
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 30
        assert output.num_cached_tokens == 0
        seen.append(output.prompt_logprobs)
    assert engine.scheduler.preemptions > 0
    assert seen[0] == seen[1]


def test_truncation_keeps_the_end():
    engine = hash_engine(max_model_len=20)
    for keep, want in [(3, [7, 8, 9]), (-1, list(range(10)))]:
        params = SamplingParams(truncate_prompt_tokens=keep, max_tokens=1)
        ask = engine.intake.accept("a", list(range(10)), params)
        assert ask.prompt_ids == want
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=1)
    assert engine.intake.accept("a", [1] * 99, params).prompt_ids == [1] * 19


def test_prefix_cache_can_be_reset_when_idle():
    engine = hash_engine(block_size=4)
    params = SamplingParams(max_tokens=1, **GREEDY)
    engine.add_request("a", list(range(9)), params)
    engine.step()
    assert engine.scheduler.reset_prefix_cache()
    engine.add_request("b", list(range(9)), params)
    assert drain(engine)["b"].num_cached_tokens == 0


def test_sibling_ids_never_collide_with_callers():
    engine = hash_engine()
    params = SamplingParams(n=2, max_tokens=3)
    engine.add_request("0_a", [1], SamplingParams(max_tokens=3))
    with pytest.raises(UserError, match="already running"):
        engine.add_request("a", [1], params)
    engine.add_request("b", [1], params)
    with pytest.raises(UserError, match="already running"):
        engine.add_request("1_b", [1], params)
    assert set(drain(engine)) == {"0_a", "b"}


def test_one_sibling_scores_the_prompt_for_all():
    engine = hash_engine(block_size=4)
    params = SamplingParams(n=3, seed=1, max_tokens=2, prompt_logprobs=1)
    engine.add_request("a", list(range(30)), params)
    output = drain(engine)["a"]
    assert len(output.prompt_logprobs) == 30 and len(output.outputs) == 3
    computed = engine.metrics.snapshot()
    prompt = next(m.value for m in computed if m.name == "vllm:prefix_cache_hits")
    assert prompt == 2 * 28  # the others hit what the first computed


def test_prompt_logprobs_are_streamed_once():
    engine = hash_engine()
    params = SamplingParams(
        max_tokens=4, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA, **GREEDY
    )
    engine.add_request("a", list(range(9)), params)
    seen = []
    while engine.has_unfinished_requests():
        seen += [o.prompt_logprobs is not None for o in engine.step()]
    assert seen == [True, False, False, False]
