"""`LLM` on a tiny real model: order, batches, text, stops, scores, and sizes.

The model is random, so baselines come first: run greedy, then cut what is needed out
of the text that came."""

import gc
import json
import random
import sys

import pytest

from pagedattn import LLM, EngineArgs, SamplingParams
from pagedattn.assembly import assemble, fit_length, sampling_defaults
from pagedattn.errors import UserError
from pagedattn.model import loader
from pagedattn.testing import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), num_gpu_blocks_override=400)


def one(llm, prompt, params):
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    llm.llm_engine.check()
    return output.outputs[0]


def with_(params=GREEDY, **changes):
    fields = {name: getattr(params, name) for name in params.__slots__}
    return SamplingParams(**{**fields, **changes})


def test_outputs_come_in_input_order(llm):
    """C92: lengths shuffled, params per prompt, one object used again and again."""
    prompts = [f"prompt {i}" for i in range(25)]
    lengths = random.Random(0).sample(range(1, 26), 25)
    params = [with_(max_tokens=n) for n in lengths]
    for _ in range(3):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.prompt for o in outputs] == prompts
        assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
        assert all(o.finished for o in outputs)
    for _ in range(30):
        llm.generate(prompts[0], with_(max_tokens=1), use_tqdm=False)
    llm.llm_engine.check()


def test_a_bad_prompt_raises_before_any_starts(llm):
    for prompts, params in [
        (["good", ""], GREEDY),
        (["good", [999]], GREEDY),
        (["good", "x" * 600], GREEDY),
        (["good"], [GREEDY, GREEDY]),
    ]:
        with pytest.raises(UserError):
            llm.generate(prompts, params, use_tqdm=False)
        assert not llm.llm_engine.has_unfinished_requests()
    llm.llm_engine.check()


def test_kinds_of_prompts_agree(llm):
    ids = llm.get_tokenizer().encode("hello")
    want = list(one(llm, "hello", GREEDY).token_ids)
    for prompt in (ids, [ids], {"prompt": "hello"}, {"prompt_token_ids": ids}):
        assert list(one(llm, prompt, GREEDY).token_ids) == want
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize("many", [2, 5, 8])
def test_greedy_does_not_depend_on_the_batch(llm, many):
    """C41: alone, in a batch of mixed lengths, and with prefix hits."""
    prompts = [f"{i} " * (3 * i + 1) for i in range(many)]
    llm.reset_prefix_cache()
    alone = [list(one(llm, p, GREEDY).token_ids) for p in prompts]
    llm.reset_prefix_cache()
    for _ in range(2):  # cold, then with hits
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == alone


@pytest.mark.parametrize("budget", [1, 5, 16])
def test_greedy_does_not_depend_on_chunks_or_preemption(folder, llm, budget):
    prompts = [f"{i} " * (3 * i + 1) for i in range(6)]
    want = [list(one(llm, p, GREEDY).token_ids) for p in prompts]
    small = LLM(str(folder), num_gpu_blocks_override=5, max_num_batched_tokens=budget)
    outputs = small.generate(prompts, GREEDY, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == want
    assert budget == 1 or small.llm_engine.scheduler.preemptions > 0
    small.llm_engine.check()


def test_text_ids_and_scores_are_cut_at_the_stop(llm):
    """C07: a stop string ends everything at the token that completes it."""
    ascii_ids = list(range(94))
    base = with_(logprobs=1, allowed_token_ids=ascii_ids)
    whole = one(llm, "stop here", base)
    text = whole.text
    start = next(i for i in range(4, 20) if text.find(text[i : i + 3]) == i)
    stop = text[start : start + 3]
    for include in (False, True):
        params = with_(base, stop=["never", stop], include_stop_str_in_output=include)
        cut = one(llm, "stop here", params)
        assert cut.text == text[: start + 3 * include]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        n = len(cut.token_ids)
        assert list(cut.token_ids) == list(whole.token_ids)[:n] and n < 24
        assert len(cut.logprobs) == n
    assert stop in llm.get_tokenizer().decode(cut.token_ids)
    assert stop not in llm.get_tokenizer().decode(list(cut.token_ids)[:-1])


def test_stop_ids_and_eos_leave_no_text(llm):
    """C05: the ending token is counted; its text only if asked for."""
    for skip in (True, False):
        for include in (True, False):
            params = with_(
                stop_token_ids=[259],
                logit_bias={259: 100.0},
                min_tokens=2,
                skip_special_tokens=skip,
                include_stop_str_in_output=include,
            )
            output = one(llm, "x", params)
            assert len(output.token_ids) == 3 and output.token_ids[-1] == 259
            assert (output.finish_reason, output.stop_reason) == ("stop", 259)
            assert output.text.endswith("<|im_end|>") == (include and not skip)


def test_bad_words_never_appear(llm):
    """C38: with and without the space before it."""
    whole = one(llm, "words", GREEDY)
    banned = llm.get_tokenizer().decode(list(whole.token_ids)[3:4])
    if "\ufffd" in banned:
        banned = llm.get_tokenizer().decode(list(whole.token_ids)[4:5])
    assert banned in whole.text
    assert banned not in one(llm, "words", with_(bad_words=[banned])).text


def test_logprobs_do_not_depend_on_how_many(llm):
    """C27: the sampled token's own value is the same for every N."""
    seen = []
    for n in (0, 1, 5, 20):
        output = one(llm, "score", with_(logprobs=n))
        own = [s[t] for s, t in zip(output.logprobs, output.token_ids, strict=True)]
        assert all(len(s) == max(n, 1) for s in output.logprobs)  # greedy: rank 1
        seen.append([x.logprob for x in own])
        assert output.cumulative_logprob == pytest.approx(sum(seen[-1]))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    with pytest.raises(UserError, match="20"):
        one(llm, "score", with_(logprobs=21))


def test_chat(llm):
    messages = [{"role": "user", "content": "hi"}]
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    answer = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    ids = llm.get_tokenizer().encode(rendered, add_special_tokens=False)
    assert answer.prompt_token_ids == ids
    both = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [o.outputs[0].text for o in both] == [answer.outputs[0].text] * 2
    with pytest.raises(UserError):
        llm.chat([], GREEDY)


@pytest.mark.parametrize("where", ["run", "commit"])
def test_interrupting_generate_leaves_nothing_behind(folder, llm, monkeypatch, where):
    """Ctrl-C in the middle of a step: nothing that was not computed may be hit."""
    llm.reset_prefix_cache()
    prompt = "interrupted " * 6
    engine = llm.llm_engine
    owner = engine.runner if where == "run" else engine.outputs
    name = "run" if where == "run" else "process"
    work, calls = getattr(owner, name), iter(range(100))

    def interrupted(*args):
        if next(calls) == 0:
            raise KeyboardInterrupt
        return work(*args)

    monkeypatch.setattr(owner, name, interrupted, raising=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt, prompt + "b"], GREEDY, use_tqdm=False)
    monkeypatch.undo()
    engine.scheduler.check()
    assert not engine.scheduler.has_requests()
    got = list(one(llm, prompt, GREEDY).token_ids)
    fresh = LLM(str(folder), num_gpu_blocks_override=400)
    assert got == list(one(fresh, prompt, GREEDY).token_ids)


def test_every_known_end_of_text_ends(folder):
    """generation_config's ids and the tokenizer's own."""
    parts = assemble(EngineArgs(str(folder)))
    assert parts.engine.intake.eos_ids == {257, 259}
    config = {"eos_token_id": [259], "bos_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(config))
    try:
        again = assemble(EngineArgs(str(folder)))
        assert again.engine.intake.eos_ids == {257, 259}  # 257: the tokenizer's
    finally:
        make_tiny_model(folder)


@pytest.mark.parametrize("collects", [True, False])
def test_a_start_leaves_the_interpreter_as_it_was(folder, monkeypatch, collects):
    """Whether it ends well or not: the collector, and whose turn is how long."""
    (gc.enable if collects else gc.disable)()
    before = gc.isenabled(), sys.getswitchinterval()
    try:
        assemble(EngineArgs(str(folder)))
        assert (gc.isenabled(), sys.getswitchinterval()) == before
        monkeypatch.setattr(loader, "load", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            assemble(EngineArgs(str(folder)))
        assert (gc.isenabled(), sys.getswitchinterval()) == before
    finally:
        gc.enable()


def test_an_unknown_tokenizer_is_refused_before_weights_are_read(folder, monkeypatch):
    monkeypatch.setattr(loader, "load", lambda *_: pytest.fail("read"))
    with pytest.raises(UserError, match="no such file or folder"):
        assemble(EngineArgs(str(folder), tokenizer="./nowhere"))


# Sizes and settings.
def test_a_length_that_does_not_fit_is_refused_with_the_numbers(folder):
    with pytest.raises(UserError) as refused:
        LLM(str(folder), max_model_len=100, num_gpu_blocks_override=5)
    for number in ("100", "4 blocks", "16 tokens", "64 tokens"):
        assert number in str(refused.value)
    with pytest.raises(UserError, match="513"):
        LLM(str(folder), max_model_len=513)


def test_an_automatic_length_is_lowered(folder):
    llm = LLM(str(folder), num_gpu_blocks_override=5)
    assert llm.llm_engine.config.max_model_len == 64
    assert len(one(llm, "x" * 63, with_(max_tokens=9)).token_ids) == 1


def test_the_pool_follows_what_is_asked(folder):
    block = 2 * 2 * 2 * 16 * 8 * 4  # layers, k and v, KV heads, tokens, dim, bytes
    parts = assemble(EngineArgs(str(folder), kv_cache_memory_bytes=100 * block + 7))
    assert parts.engine.config.num_blocks == 100
    with pytest.raises(UserError, match="at least 2"):
        LLM(str(folder), kv_cache_memory_bytes=block)
    share = EngineArgs(gpu_memory_utilization=0.5).settle(512, block, 80 * block)
    assert share.num_blocks == 40
    auto = EngineArgs(max_num_seqs=2).settle(512, block, 10**12)
    assert auto.num_blocks == 2 * 33  # no more than two requests can ever hold


def test_fit_length_keeps_what_fits():
    config = EngineArgs(num_gpu_blocks_override=9).settle(128, 1, 0)
    assert fit_length(EngineArgs(), config, 128) is config
    assert fit_length(EngineArgs(), config, 100).max_model_len == 100


def test_without_chunks_a_context_fits_one_step():
    """Also when a preempted request comes back with all it has generated."""
    args = {"enable_chunked_prefill": False, "max_num_batched_tokens": 100}
    assert EngineArgs(**args).settle(512, 1, 10**6).max_model_len == 100
    assert EngineArgs(**args).settle(64, 1, 10**6).max_model_len == 64
    with pytest.raises(UserError, match="101 needs chunked prefill.* 100"):
        EngineArgs(max_model_len=101, **args).settle(512, 1, 10**6)


@pytest.mark.parametrize(
    ("given", "knee", "budget"),
    [
        ({}, 256, 256),
        ({}, 64, 128),  # every running sequence fits into a step
        ({"max_num_seqs": 8}, 64, 64),
        ({"max_num_batched_tokens": 40}, 256, 40),
        ({"enable_chunked_prefill": False}, 64, 512),
        ({"enable_chunked_prefill": False, "max_num_seqs": 600}, 64, 600),
    ],
)
def test_the_budget_is_the_knee(given: dict, knee: int, budget: int) -> None:
    config = EngineArgs(**given).settle(4096, 1, 10**8, knee=knee)
    assert config.max_num_batched_tokens == budget


def test_without_chunks_preempted_requests_come_back(folder, llm):
    prompts = [f"{i} " * 8 for i in range(6)]
    want = [list(one(llm, p, GREEDY).token_ids) for p in prompts]
    small = LLM(
        str(folder),
        num_gpu_blocks_override=6,
        max_num_batched_tokens=48,
        enable_chunked_prefill=False,
    )
    outputs = small.generate(prompts, GREEDY, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == want
    assert small.llm_engine.scheduler.preemptions > 0
    small.llm_engine.check()


def test_settings_name_what_is_wrong():
    for bad, word in [
        ({"dtype": "bfloat16"}, "float32"),
        ({"quantization": "awq"}, "not built"),
        ({"block_size": 0}, "block_size"),
        ({"max_model_len": "4q"}, "4q"),
        ({"scheduling_policy": "random"}, "fcfs"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_num_seqs": 2.5}, "fraction"),
        ({"enable_prefix_caching": "no"}, "true or false"),
        ({"served_model_name": []}, "served_model_name"),
        ({"no_such_thing": 1}, "no_such_thing"),
    ]:
        with pytest.raises(UserError, match=word):
            LLM("anything", **bad)


def test_sampling_defaults_of_the_model():
    model = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7, "eos_token_id": [2]}
    want = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 7}
    assert sampling_defaults(EngineArgs(), model) == want
    assert sampling_defaults(EngineArgs(generation_config="vllm"), model) == {}
    over = EngineArgs(override_generation_config={"top_p": 0.5})
    assert sampling_defaults(over, model)["top_p"] == 0.5
    assert sampling_defaults(EngineArgs(), {"do_sample": False}) == {"temperature": 0.0}
    for bad, word in [({"top_p": 7}, "top_p"), ({"top_kk": 5}, "top_kk"), ([1], "1")]:
        with pytest.raises(UserError, match=word):
            sampling_defaults(EngineArgs(override_generation_config=bad), {})
