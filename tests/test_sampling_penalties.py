"""Masks, bias and penalties against naive loops and transformers; state made again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from pagedattn.request import SamplingParams
from pagedattn.sampling.penalties import shape
from pagedattn.sampling.sampler import sample
from pagedattn.sampling.state import SampleState, TokenCounts

V = 40
tokens = st.lists(st.integers(0, V - 1), max_size=30)
seeds = st.integers(0, 2**32 - 1)


def logits(seed, rows=1):
    g = np.random.default_rng(seed)
    return torch.from_numpy(g.normal(0, 4, (rows, V)).astype(np.float32))


def blocked(row):
    return set(np.flatnonzero(row == -np.inf).tolist())


def naive(row, params, prompt, output, ends, words):
    """Every rule of `shape` as a plain loop over token ids, in float64."""
    x = row.astype(np.float64)
    for i in range(V):
        allowed = params.allowed_token_ids
        bad = any(
            w[-1] == i and list(w[:-1]) == output[len(output) - len(w) + 1 :]
            for w in words
            if len(w) - 1 <= len(output)
        )
        held = len(output) < params.min_tokens and i in ends
        if (allowed is not None and i not in allowed) or bad or held:
            x[i] = -np.inf
        x[i] += (params.logit_bias or {}).get(i, 0.0)
        if i in prompt or i in output:
            r = params.repetition_penalty
            x[i] = x[i] / r if x[i] > 0 else x[i] * r
        if i in output:
            x[i] -= params.frequency_penalty * output.count(i) + params.presence_penalty
    return x


wishes = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3, 3.0]),
    frequency_penalty=st.sampled_from([0.0, -1.5, 0.7, 2.0]),
    presence_penalty=st.sampled_from([0.0, -2.0, 0.3]),
    min_tokens=st.integers(0, 16),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=3),
    logit_bias=st.none() | st.dictionaries(st.integers(0, V - 1), st.floats(-9, 9)),
    allowed_token_ids=st.none()
    | st.lists(st.integers(0, V - 1), min_size=1, max_size=20),
)
some_words = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=3)
few = st.lists(st.integers(0, 3), max_size=12)  # ids so few that words do come up


@settings(deadline=None, max_examples=200)
@given(seeds, wishes, tokens, tokens | few, some_words, st.integers(0, V - 1))
def test_shape_is_the_naive_loop(seed, params, prompt, output, words, eos):
    state = SampleState(
        params, 0, V, prompt, output, eos_ids=[eos], bad_words_ids=words
    )
    raw = logits(seed)[0].numpy()
    before = raw.copy()
    expected = naive(raw, params, prompt, output, {eos, *params.stop_token_ids}, words)
    np.testing.assert_allclose(shape(raw, state), expected, rtol=1e-5, atol=1e-5)
    assert state.shaped or (expected == raw).all()
    np.testing.assert_array_equal(raw, before)


@settings(deadline=None, max_examples=60)
@given(seeds, wishes, tokens, tokens, some_words)
def test_a_state_made_again_is_the_same(seed, params, prompt, output, words):
    """Token by token, or rebuilt from all tokens (preemption): equal bit for bit."""
    words = [tuple(w) for w in words]
    grown = SampleState(params, 5, V, prompt, eos_ids=[1], bad_words_ids=words)
    for i, token in enumerate(output):
        again = SampleState(
            params, 5, V, prompt, output[:i], eos_ids=[1], bad_words_ids=words
        )
        row = logits(seed + i)
        assert sample(row, [grown]) == sample(row, [again])
        np.testing.assert_array_equal(
            shape(row[0].numpy(), grown), shape(row[0].numpy(), again)
        )
        assert grown.position == again.position == len(prompt) + i
        grown.append(token)
    assert grown.output_ids == output


def test_the_callers_list_is_not_the_states():
    output = [1, 2]
    state = SampleState(SamplingParams(), 0, V, [0], output)
    state.append(3)
    assert output == [1, 2]


@settings(deadline=None, max_examples=60)
@given(seeds, tokens.filter(len), tokens, st.sampled_from([0.6, 1.5, 4.0]))
def test_repetition_is_that_of_transformers(seed, prompt, output, penalty):
    row = logits(seed)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(
        torch.tensor([prompt + output]), row.clone()
    )
    params = SamplingParams(repetition_penalty=penalty)
    ours = shape(row[0].numpy(), SampleState(params, 0, V, prompt, output))
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6)


def test_penalty_scope():
    """Known fault C33: a repeated prompt word is not "generated", but is repeated."""
    row = np.linspace(-2, 2, V, dtype=np.float32)
    spoken = SamplingParams(presence_penalty=2, frequency_penalty=2)
    state = SampleState(spoken, 0, V, [39] * 8)
    np.testing.assert_array_equal(shape(row, state), row)
    state.append(39)
    state.append(39)
    assert shape(row, state)[39] == pytest.approx(2 - 2 * 2 - 2)
    repeated = SampleState(SamplingParams(repetition_penalty=1.5), 0, V, [39, 0] * 8)
    shaped = shape(row, repeated)
    assert shaped[39] == pytest.approx(2 / 1.5)
    assert shaped[0] == pytest.approx(-2 * 1.5)
    np.testing.assert_array_equal(shaped[1:39], row[1:39])


@settings(deadline=None, max_examples=60)
@given(tokens, st.lists(st.integers(0, 2**18), max_size=200))
def test_counts_are_the_naive_counts(prompt, output):
    counts = TokenCounts(prompt, output[: len(output) // 2])
    for token in output[len(output) // 2 :]:
        counts.add(token)
    assert counts.ids.tolist() == list(dict.fromkeys(prompt + output))
    assert counts.counts.tolist() == [output.count(t) for t in counts.ids.tolist()]


def generate(params, steps, prompt=(5, 6), row=None, **more):
    """Tokens of `steps` steps over the same logits each."""
    row = logits(1) if row is None else row
    state = SampleState(params, 0, V, prompt, **more)
    for _ in range(steps):
        state.append(sample(row, [state])[0].token)
    return state.output_ids


def test_min_tokens_holds_back_every_ending():
    """Known fault C08: two end-of-text ids, a stop id, bias, a prompt of 50."""
    params = SamplingParams(
        temperature=0, min_tokens=4, stop_token_ids=[9], logit_bias={8: 100, 9: 90}
    )
    output = generate(params, 6, prompt=range(50), eos_ids=[7, 8])
    assert not {7, 8, 9} & set(output[:4])
    assert output[4:] == [8, 8]


def test_min_tokens_holds_the_end_back_even_where_it_does_not_stop():
    params = SamplingParams(
        temperature=0, min_tokens=2, ignore_eos=True, logit_bias={8: 100}
    )
    assert [t == 8 for t in generate(params, 3, eos_ids=[8])] == [False, False, True]


def test_bad_words_block_the_last_token_after_their_beginning():
    """Known fault C38: one-token words always; phrases only once they began."""
    row = torch.zeros(1, V)
    row[0, :5] = torch.tensor([5.0, 4, 3, 2, 1])
    greedy = SamplingParams(temperature=0)
    assert generate(greedy, 3, row=row, bad_words_ids=[[0]]) == [1, 1, 1]
    phrase = generate(greedy, 5, row=row, bad_words_ids=[[0, 0]])
    assert phrase == [0, 1, 0, 1, 0]
    longer = generate(greedy, 6, row=row, bad_words_ids=[[0, 0, 0], [0, 1]])
    assert longer == [0, 0, 2, 0, 0, 2]


def test_a_bad_words_beginning_is_never_the_prompts():
    row = logits(0)[0].numpy()
    state = SampleState(SamplingParams(), 0, V, [3], bad_words_ids=[[3, 4]])
    assert blocked(shape(row, state)) == set()
    state.append(3)
    assert blocked(shape(row, state)) == {4}


def test_order_of_bias_and_penalty():
    """Bias first: a logit of -1 raised to 3 is divided, not multiplied."""
    row = np.full(V, -1, dtype=np.float32)
    params = SamplingParams(logit_bias={2: 4.0}, repetition_penalty=2.0)
    assert shape(row, SampleState(params, 0, V, [2]))[2] == 1.5


def test_bias_never_frees_a_blocked_token():
    params = SamplingParams(allowed_token_ids=[1, 2], logit_bias={7: 100.0})
    row = shape(np.zeros(V, dtype=np.float32), SampleState(params, 0, V, [0]))
    assert blocked(row) == set(range(V)) - {1, 2}


def test_ids_outside_the_vocabulary_are_left_out():
    """Placeholder prompt tokens, an eos id or word past the head: nothing to mask."""
    params = SamplingParams(
        repetition_penalty=2.0, min_tokens=3, stop_token_ids=[V + 1]
    )
    state = SampleState(
        params, 0, V, [V + 5, 1], eos_ids=[V], bad_words_ids=[[1, V], [V]]
    )
    row = shape(np.ones(V, dtype=np.float32), state)
    assert row.tolist() == [1, 0.5] + [1] * (V - 2)


class OnlyEven:
    """A grammar for tests: even ids, until it breaks."""

    ended = False

    def __init__(self, error=""):
        self.error = error
        self.heard = []

    def block(self, row):
        row[1::2] = -np.inf

    def advance(self, token):
        self.heard.append(token)


@given(seeds, tokens)
def test_a_grammar_blocks_first_and_hears_every_token(seed, output):
    params = SamplingParams(
        temperature=0, logit_bias={1: 100.0}, allowed_token_ids=[1, 2, 4]
    )
    follows = OnlyEven()
    state = SampleState(params, 0, V, [0], output, grammar=follows)
    assert follows.heard == output and state.shaped and not state.ended
    row = logits(seed)
    assert blocked(shape(row[0].numpy(), state)) == {*range(V)} - {2, 4}
    got = sample(row, [state])[0]
    assert got.token in (2, 4) and got.error is None
    state.append(got.token)
    assert follows.heard == [*output, got.token]
    follows.ended = True
    assert state.ended


def test_a_grammar_that_broke_is_the_error_of_its_row():
    wishes = SamplingParams(), SamplingParams()
    broke, fine = (
        SampleState(p, 0, V, [0], grammar=OnlyEven(error))
        for p, error in zip(wishes, ("out of fuel", ""), strict=True)
    )
    bad, good = sample(logits(1, 2), [broke, fine])
    assert bad.token is None and "out of fuel" in bad.error
    assert good.token % 2 == 0 and good.error is None
