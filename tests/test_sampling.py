"""The sampler as a whole: purity, greedy, failures, log-probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.request import SamplingParams
from pagedattn.sampling.logprobs import prompt_logprobs, token_logprobs
from pagedattn.sampling.sampler import BROKEN, NOTHING_LEFT, Sample, sample
from pagedattn.sampling.state import SampleState

V = 1037  # odd, so that rows start at every alignment

WISHES = [
    dict(temperature=0),
    dict(temperature=0, logprobs=3),
    dict(temperature=0, repetition_penalty=1.4),
    dict(),
    dict(temperature=0.3, top_p=0.9),
    dict(temperature=0.8, top_k=40, logprobs=5),
    dict(min_p=0.1, top_p=0.95, presence_penalty=1.0, logprobs=0),
    dict(allowed_token_ids=list(range(0, V, 7)), logit_bias={14: 3.0}),
    dict(min_tokens=9, stop_token_ids=[3, 4], logprobs=-1),
]


def logits(seed, rows, size=V):
    g = np.random.default_rng(seed)
    return torch.from_numpy(g.normal(0, 3, (rows, size)).astype(np.float32))


def state(i, wish):
    return SampleState(
        SamplingParams(**wish),
        seed=1000 + i,
        vocab_size=V,
        prompt_ids=range(i),
        output_ids=[i, 2 * i, i],
        sibling=i % 3,
        eos_ids=[5],
        bad_words_ids=[(i, 2 * i), (6,)],
    )


def plain(s):
    """A sample as comparable data, log-probabilities bit for bit."""
    lp = s.logprobs
    if lp is not None:
        lp = (lp.token, lp.logprob, lp.rank, lp.top_ids.tolist())
        lp += (s.logprobs.top_logprobs.tolist(),)
    return s.token, s.error, lp


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 17), min_size=1, max_size=12))
def test_neighbours_change_nothing(seed, chosen):
    """Known fault C31: alone, shuffled, repeated, in any company: the same bits."""
    n = 2 * len(WISHES)
    x = logits(seed, n)
    states = [state(i, WISHES[i % len(WISHES)]) for i in range(n)]
    alone = [plain(sample(x[i : i + 1].clone(), [states[i]])[0]) for i in range(n)]
    together = sample(x[chosen], [states[i] for i in chosen])
    assert [plain(s) for s in together] == [alone[i] for i in chosen]


def test_threads_and_ambient_seeds_change_nothing():
    x, states = logits(3, 9), [state(i, w) for i, w in enumerate(WISHES)]
    before = [plain(s) for s in sample(x, states)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        torch.manual_seed(1)
        assert [plain(s) for s in sample(x, states)] == before
    finally:
        torch.set_num_threads(threads)


def test_neither_logits_nor_states_change():
    x, states = logits(3, 9), [state(i, w) for i, w in enumerate(WISHES)]
    before, outputs = x.clone(), [list(s.output_ids) for s in states]
    sample(x, states)
    assert torch.equal(x, before)
    assert [s.output_ids for s in states] == outputs


def test_seed_sibling_and_position_each_change_the_draw():
    """Of 200 draws over 1,037 near-equal tokens hardly two are alike."""
    row = torch.zeros(1, V)

    def draw(seed, sibling, position):
        s = SampleState(SamplingParams(), seed, V, range(position), sibling=sibling)
        return sample(row, [s])[0].token

    for vary in range(3):
        base = [7, 1, 20]
        drawn = set()
        for i in range(200):
            base[vary] = i
            drawn.add(draw(*base))
        assert len(drawn) > 150


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=300))
def test_greedy_ties_go_to_the_lowest_id(values):
    row = torch.tensor([values], dtype=torch.float32)
    s = SampleState(SamplingParams(temperature=0), 0, len(values), [0])
    assert sample(row, [s])[0].token == values.index(max(values))


def test_greedy_is_top_1():
    """The draw from one token is the greedy pick, ties included."""
    x = torch.round(logits(5, 50))
    greedy = SampleState(SamplingParams(temperature=0), 0, V, [0])
    top_1 = SampleState(SamplingParams(top_k=1), 0, V, [0])
    assert sample(x, [greedy] * 50) == sample(x, [top_1] * 50)


class Elsewhere(torch.Tensor):
    """Logits as if on another device: numpy can't read them before `cpu`."""

    @property
    def device(self):
        return torch.device("cuda")

    def cpu(self):
        return self.as_subclass(torch.Tensor)

    def numpy(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_logits_may_lie_on_another_device():
    x, states = logits(3, 9), [state(i, w) for i, w in enumerate(WISHES)]
    states[0] = states[1] = SampleState(SamplingParams(temperature=0), 0, V, [0])
    x[1, [30, 31]], x[2, 7], x[3, 8], x[4] = 50.0, torch.nan, -torch.inf, -torch.inf
    here = [plain(s) for s in sample(x, states)]
    assert [plain(s) for s in sample(x.as_subclass(Elsewhere), states)] == here
    assert here[1][0] == 30
    errors = [s[1] for s in here]
    assert errors == [None, None, BROKEN, None, BROKEN, *[None] * 4]


def test_greedy_honours_masks_and_logprobs():
    """Only a row that asks for nothing else is the argmax alone."""
    x = logits(12, 1)
    best, second = x[0].topk(2).indices.tolist()
    greedy = dict(temperature=0)
    plain = SampleState(SamplingParams(**greedy), 0, V, [0])
    assert sample(x, [plain])[0] == Sample(best)
    asking = SampleState(SamplingParams(logprobs=2, **greedy), 0, V, [0])
    got = sample(x, [asking])[0]
    assert got.token == got.logprobs.token == best
    assert got.logprobs.top_ids.tolist() == [best, second]
    masked = SampleState(SamplingParams(**greedy), 0, V, [0], bad_words_ids=[[best]])
    assert sample(x, [masked])[0] == Sample(second)


def test_no_rows():
    assert sample(torch.empty(0, V), []) == []


# Failures: one row's end, never its neighbours'.


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_broken_logits_fail_their_row_alone(wish, value):
    x = logits(8, 3)
    expected = sample(x, [state(i, WISHES[4]) for i in range(3)])
    if value is None:
        x[1] = -torch.inf
    else:
        x[1, 700] = value
    states = [state(0, WISHES[4]), state(1, wish), state(2, WISHES[4])]
    samples = sample(x, states)
    assert samples[1].token is None
    assert samples[1].error == BROKEN
    assert [samples[0], samples[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_block_everything_fail_their_row(temperature):
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=[5], min_tokens=1, logprobs=1
    )
    s = SampleState(params, 0, V, [1], eos_ids=[5])
    assert sample(logits(0, 1), [s])[0].error == NOTHING_LEFT
    s.append(1)
    assert sample(logits(0, 1), [s])[0].token == 5


def test_minus_infinity_everywhere_else_leaves_that_token():
    x = torch.full((1, V), -torch.inf)
    x[0, 77] = -3.0
    for wish in (*WISHES[:7], dict(top_p=1e-6, min_p=0.5)):
        assert sample(x, [state(0, wish)])[0].token == 77


@pytest.mark.filterwarnings("error")
def test_finite_masks_are_quiet():
    """-3e38, some models' mask, overflows to -inf under a temperature: as meant."""
    x = torch.full((1, V), torch.finfo(torch.float32).min)
    x[0, :3] = 1.0
    for wish in WISHES[:7]:
        assert sample(x, [state(0, wish)])[0].token in (0, 1, 2)


# Log-probabilities.


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(0, V - 1), st.integers(0, V))
def test_logprobs_are_log_softmax(seed, token, n):
    row = torch.round(logits(seed, 1)[0] * 8) / 8  # ties
    exact = row.double().log_softmax(0)
    order = sorted(range(V), key=lambda i: (-row[i].item(), i))
    got = token_logprobs(row.numpy(), token, n)
    assert got.logprob == pytest.approx(exact[token].item(), abs=1e-5)
    assert order[got.rank - 1] == token
    assert (type(got.logprob), type(got.rank)) == (float, int)  # as JSON wants them
    assert got.top_ids.tolist() == order[:n]
    np.testing.assert_allclose(got.top_logprobs, exact[got.top_ids], atol=1e-5)


@pytest.mark.parametrize("n", [0, 1, 5, 20, V])
def test_the_tokens_logprob_does_not_depend_on_n(n):
    """Known fault C27; and where the token is among the top, the values agree."""
    row = logits(2, 1)[0].numpy()
    for token in (int(row.argmax()), 17):
        got = token_logprobs(row, token, n)
        alone = token_logprobs(row, token, 0)
        assert (got.logprob, got.rank) == (alone.logprob, alone.rank)
        inside = got.top_ids.tolist().index(token) if token in got.top_ids else None
        assert inside == (got.rank - 1 if got.rank <= n else None)
        assert inside is None or got.top_logprobs[inside] == got.logprob


def test_logprobs_are_raw():
    """Known fault C26: of the model's logits, whatever masks and filters did."""
    x = logits(6, 1)
    wish = dict(
        temperature=0.5,
        top_k=1,
        allowed_token_ids=[900, 901],
        logit_bias={900: -100.0},
        repetition_penalty=2.0,
        logprobs=2,
    )
    got = sample(x, [state(1, wish)])[0]
    assert got.token == 901
    exact = x[0].log_softmax(0)
    assert got.logprobs.logprob == pytest.approx(exact[901].item(), abs=1e-5)
    assert got.logprobs.top_ids.tolist() == exact.topk(2).indices.tolist()
    assert np.isfinite(got.logprobs.top_logprobs).all()


def test_only_who_asks_gets_logprobs():
    x = logits(1, 4)
    wishes = [None, 0, 2, -1]
    states = [state(1, dict(logprobs=n)) for n in wishes]
    got = [s.logprobs for s in sample(x, states)]
    assert got[0] is None
    assert [len(lp.top_ids) for lp in got[1:]] == [0, 2, V]


def test_prompt_logprobs_whole_or_in_chunks():
    x, targets = logits(9, 12), list(range(3, 15))
    whole = prompt_logprobs(x, targets, 4)
    chunks = [
        lp
        for i in range(0, 12, 5)
        for lp in prompt_logprobs(x[i : i + 5], targets[i : i + 5], 4)
    ]
    exact = x.log_softmax(1)
    for i, (a, b) in enumerate(zip(whole, chunks, strict=True)):
        assert (a.token, a.logprob, a.rank) == (b.token, b.logprob, b.rank)
        assert (
            a.top_ids.tolist()
            == b.top_ids.tolist()
            == exact[i].topk(4).indices.tolist()
        )
        assert a.logprob == pytest.approx(exact[i, targets[i]].item(), abs=1e-5)


def test_ruled_out_tokens_have_minus_infinity():
    x = logits(4, 1)[0]
    x[10:] = -torch.inf
    got = token_logprobs(x.numpy(), 20, 12)
    assert got.logprob == -np.inf
    assert got.top_logprobs[10:].tolist() == [-np.inf, -np.inf]
    assert got.top_ids[10:].tolist() == [10, 11]
