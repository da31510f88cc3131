"""Filters against a naive sort, transformers' warpers, and exact distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagedattn.request import SamplingParams
from pagedattn.sampling.filters import (
    NEGLIGIBLE,
    contenders,
    first,
    nucleus,
    ranked,
    survivors,
)
from pagedattn.sampling.sampler import pick, sample
from pagedattn.sampling.state import SampleState

rows = st.lists(
    st.one_of(st.integers(-6, 6), st.floats(-8, 8, width=32)), min_size=1, max_size=80
).map(lambda xs: np.array(xs, dtype=np.float32))


def in_order(values):
    """The one order, naively: larger first, of equal values the lower id."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def naive_support(row, params):
    """Ids that may be drawn, by the book, on a full sort; and top-p's closest call."""
    w = np.exp((row - row.max()) / np.float32(params.temperature)).astype(np.float64)
    kept, margin = in_order(row), 1.0
    kept = [i for i in kept if w[i] >= np.float32(params.min_p)]
    if params.top_k:
        kept = kept[: params.top_k]
    if params.top_p < 1:
        kept.sort(key=lambda i: (-w[i], i))  # exp may round two logits to one weight
        share = np.cumsum(w[kept]) / w[kept].sum()
        margin = np.abs(share - params.top_p).min()
        kept = kept[: np.count_nonzero(share < params.top_p) + 1]
    return sorted(kept), margin


def support(row, params):
    ids, weights = survivors(row, float(row.max()), params)
    ids = np.arange(len(row)) if ids is None else ids
    assert len(ids) == len(weights) >= 1
    assert weights.max() == 1
    return ids.tolist()


@settings(deadline=None, max_examples=200)
@given(
    rows,
    st.floats(0.4, 2),
    st.sampled_from([0, 1, 2, 3, 5, 20, 1000]),
    st.one_of(st.just(1.0), st.floats(1e-6, 1, exclude_max=True)),
    st.one_of(st.just(0.0), st.floats(0, 1)),
)
def test_support_is_the_naive_one(row, temperature, top_k, top_p, min_p):
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    expected, margin = naive_support(row, params)
    if margin > 1e-9:  # nearer, and the order of summing decides
        assert support(row, params) == expected


@settings(deadline=None, max_examples=100)
@given(rows, st.integers(1, 90))
def test_first_and_ranked_follow_the_one_order(row, n):
    assert ranked(row, n).tolist() == in_order(row)[:n]
    assert first(row, n).tolist() == sorted(in_order(row)[:n])


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.01, 0.5, 3.0, 9.0]),
    st.floats(0.01, 0.999),
)
def test_nucleus_of_a_wide_vocabulary(seed, spread, p):
    """Flat and peaked rows of 5,000, where drawers hold many tokens or one."""
    row = np.random.default_rng(seed).normal(0, spread, 5000).astype(np.float32)
    row = np.round(row * 64) / 64  # ties
    expected, margin = naive_support(row, SamplingParams(top_p=p))
    if margin > 1e-12:
        assert nucleus(np.exp(row - row.max()), p).tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 50, 2500, 4999])
def test_first_of_a_wide_vocabulary(n):
    row = np.random.default_rng(n).normal(0, 1, 5000).astype(np.float32)
    for values in (row, np.round(row * 8) / 8):  # few ties, many ties
        assert ranked(values, n).tolist() == in_order(values)[:n]


def test_the_token_that_crosses_p_is_kept():
    """Known fault C39: probabilities .1 .2 .3 .4 and top_p .6 leave .3 and .4."""
    row = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    params = SamplingParams(top_p=0.6)
    seen = [
        sample(row, [SampleState(params, seed, 4, [0])])[0].token
        for seed in range(1000)
    ]
    assert set(seen) == {2, 3}


def test_the_smallest_p_leaves_one_and_the_largest_leaves_all():
    row = np.random.default_rng(0).normal(0, 2, 300).astype(np.float32)
    assert support(row, SamplingParams(top_p=1e-9)) == [int(row.argmax())]
    assert support(row, SamplingParams(top_p=1 - 2**-53)) == list(range(300))
    assert support(row, SamplingParams(min_p=1.0)) == [int(row.argmax())]


def test_ties_go_to_the_lowest_ids():
    row = np.zeros(1000, dtype=np.float32)
    assert support(row, SamplingParams(top_k=3)) == [0, 1, 2]
    assert support(row, SamplingParams(top_p=0.0095)) == list(range(10))
    assert support(row, SamplingParams(min_p=1.0)) == list(range(1000))


def test_top_p_is_a_share_of_what_top_k_left():
    """.4 of the top two's .7 is over one half, so top_p=.5 keeps one token."""
    row = np.log(np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32))
    assert support(row, SamplingParams(top_k=2, top_p=0.5)) == [3]
    assert support(row, SamplingParams(top_p=0.5)) == [2, 3]


def test_left_out_contenders_weigh_nothing():
    """At a low temperature few can matter; the rest adds under float64's rounding."""
    row = np.random.default_rng(1).normal(0, 5, 50_000).astype(np.float32)
    peak = float(row.max())
    params = SamplingParams(temperature=0.1)
    ids = contenders(row, peak, params)
    assert ids is not None
    left_out = np.delete(row, ids).astype(np.float64)
    assert 1 + np.exp((left_out - peak) / 0.1).sum() == 1.0
    assert 2**18 * np.exp(-NEGLIGIBLE) < 2**-53


@pytest.mark.parametrize("temperature", [0.1, 1.0, 2.0])
def test_many_that_weigh_little_are_no_less_than_one(temperature):
    """50,000 tokens of weight exp(-45) add 1.4e-15, which float64 can tell."""
    row = np.full(2**18, -1e4, dtype=np.float32)
    row[:50_000] = -45 * temperature
    row[7] = 0
    ids = contenders(row, 0.0, SamplingParams(temperature=temperature))
    assert ids.tolist() == list(range(50_000))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.floats(0.5, 2))
def test_support_is_that_of_transformers(seed, temperature):
    """Top-k, top-p and min-p where no two logits are equal, as its warpers keep."""
    row = np.random.default_rng(seed).normal(0, 3, 200).astype(np.float32)
    scaled = torch.from_numpy(row)[None] / temperature
    for theirs, ours in (
        (TopKLogitsWarper(17), dict(top_k=17)),
        (TopPLogitsWarper(0.83), dict(top_p=0.83)),
        (MinPLogitsWarper(0.07), dict(min_p=0.07)),
    ):
        kept = torch.isfinite(theirs(None, scaled.clone())[0]).nonzero().flatten()
        params = SamplingParams(temperature=temperature, **ours)
        assert support(row, params) == kept.tolist(), ours


@pytest.mark.parametrize(
    "wish",
    [
        dict(temperature=0.7),
        dict(temperature=2.0),
        dict(top_k=5),
        dict(top_p=0.8),
        dict(min_p=0.2),
        dict(temperature=1.5, top_k=7, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(wish):
    """Chi-square of 6,000 seeded draws (a new position each) against softmax."""
    row = np.random.default_rng(4).normal(0, 1.2, 12).astype(np.float32)
    params = SamplingParams(**wish)
    kept, _ = naive_support(row, params)
    p = np.exp(row[kept].astype(np.float64) / params.temperature)
    n = 6_000
    states = [SampleState(params, 3, 12, range(i)) for i in range(n)]
    drawn = sample(torch.from_numpy(row).expand(n, -1), states)
    counts = np.bincount([s.token for s in drawn], minlength=12)
    assert counts.sum() == counts[kept].sum()
    expected = n * p / p.sum()
    chi2 = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi2 < 31  # 11 degrees of freedom: 1e-3; fewer, less likely still


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 0.25, 1.0]), min_size=1, max_size=700),
    st.one_of(
        st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53, 0.5])
    ),
)
def test_pick_is_the_inverse_cdf(weights, u):
    """Of exact sums, across chunks; a token without weight is never picked."""
    w = np.array([*weights, 1.0], dtype=np.float32)
    i = pick(w, u)
    sums = np.cumsum(w, dtype=np.float64)
    assert w[i] > 0
    goal, slack = u * sums[-1], 1e-12 * sums[-1]
    assert sums[i] >= goal - slack
    assert i == 0 or sums[i - 1] <= goal + slack


def test_pick_shares_out_the_unit_interval():
    """300 equal weights: u steps through each in turn, ends included."""
    w = np.ones(300, dtype=np.float32)
    picked = [pick(w, (i + 0.5) / 300) for i in range(300)]
    assert picked == list(range(300))
    assert pick(w, 0.0) == 0
    assert pick(w, 1 - 2**-53) == 299
    # Rounding may put u × total at the total itself: the last that has weight.
    assert pick(np.array([1, 1, 0, 0], dtype=np.float32), 1.0) == 1


@pytest.mark.parametrize("size", [255, 256, 257, 512, 600])
def test_pick_adds_up_in_double_precision(size):
    """Beside a weight of 1, 2^-25 is under float32's rounding but has its share."""
    w = np.full(size, 2.0**-25, dtype=np.float32)
    w[0] = 1
    ends = np.cumsum(w, dtype=np.float64)
    goals = ends - w / 2.0
    assert [pick(w, goal / ends[-1]) for goal in goals] == list(range(size))


def test_first_is_exact_for_every_n():
    """An nth value that is only nearly the nth goes wrong in few of 2,392 cases."""
    for seed in range(8):
        row = np.random.default_rng(seed).normal(0, 1, 300).astype(np.float32)
        order = np.argsort(-row, kind="stable")
        for n in range(1, 300):
            assert first(row, n).tolist() == sorted(order[:n].tolist())


@pytest.mark.parametrize("p, kept", [(0.5, [1]), (0.75, [1, 3]), (0.875, [0, 1, 3])])
def test_a_share_reached_exactly_needs_no_more(p, kept):
    weights = np.array([0.125, 0.5, 0.125, 0.25], dtype=np.float32)
    assert nucleus(weights, p).tolist() == kept


def test_nucleus_adds_up_in_double_precision():
    """In float32 a total is off by more than a rare token's weight, and a running sum
    of equal weights by whole tokens."""
    for seed in range(30):
        row = np.random.default_rng(seed).normal(0, 3, 300).astype(np.float32)
        assert len(support(row, SamplingParams(top_p=1 - 2**-53))) == 300
    weights = np.full(200_000, 0.1, dtype=np.float32)
    for n in (10_000, 150_000):
        assert nucleus(weights, (n - 0.5) / 200_000).tolist() == list(range(n))
