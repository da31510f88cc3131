"""The demo model against transformers' greedy tokens, however they are scheduled.

Products of other shapes sum in another order, so float32 may flip a near tie: tokens
are compared up to the first position whose decision margin is under 1e-4."""

import json
from pathlib import Path

import pytest

from pagedattn import LLM, SamplingParams

DATA = json.loads((Path(__file__).parent / "data" / "greedy.json").read_text())
PROMPTS = [{"prompt_token_ids": ids} for ids in DATA["prompts"]]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
TIE = 1e-4


def agree(outputs, tokens=DATA["tokens"]):
    """Assert agreement with the reference; how many stopped at a near tie."""
    ties = 0
    for want, output in zip(tokens, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        assert len(got) == 32
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            if a != b:
                first, second = list(output.outputs[0].logprobs[i].values())[:2]
                assert abs(first.logprob - second.logprob) < TIE, (i, a, b)
                ties += 1
                break
    return ties


def generate(llm, prompts=PROMPTS, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.check()
    return outputs


@pytest.fixture(scope="module")
def llm(demo_gguf):
    return LLM(str(demo_gguf), kv_cache_memory_bytes="512M")


def test_alone(llm):
    assert agree([generate(llm, [prompt])[0] for prompt in PROMPTS]) == 0


def test_batched_and_with_hits(llm):
    """The second time every prompt is hit to its last whole block."""
    llm.reset_prefix_cache()
    assert agree(generate(llm)) == 0
    again = generate(llm)
    assert agree(again) == 0
    for output, prompt in zip(again, DATA["prompts"], strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_chunked(demo_gguf, chunk):
    llm = LLM(
        str(demo_gguf),
        kv_cache_memory_bytes="512M",
        max_num_batched_tokens=chunk,
        enable_prefix_caching=False,
    )
    assert agree(generate(llm)) == 0


def test_preempted_all_the_time(demo_gguf):
    """Four of each shorter prompt in 19 blocks: half of them are preempted."""
    short = [i for i, prompt in enumerate(DATA["prompts"]) if len(prompt) <= 100] * 4
    llm = LLM(str(demo_gguf), num_gpu_blocks_override=20, enable_prefix_caching=False)
    outputs = generate(llm, [PROMPTS[i] for i in short])
    assert agree(outputs, [DATA["tokens"][i] for i in short]) == 0
    assert llm.llm_engine.scheduler.preemptions > 8
