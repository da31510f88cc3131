"""The picture of ten candidates: it cuts whom the sampler cuts, and draws its token."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.request import SamplingParams
from pagedattn.sampling.filters import survivors
from pagedattn.sampling.sampler import pick
from pagedattn.viz.candidates import funnel, percent, stages

WORDS = "night rain snow stars sea hill roof cold bright page".split()
SHARES = np.array([0.3, 0.22, 0.14, 0.1, 0.08, 0.06, 0.04, 0.03, 0.02, 0.01], "f")
ROW = np.log(SHARES)
ALL = SamplingParams(temperature=0.7, min_p=0.1, top_k=5, top_p=0.8)


@given(
    st.floats(0.2, 2.0),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.integers(0, 9),
    st.floats(0.05, 1.0),
)
def test_the_last_stage_is_what_the_sampler_would_draw_from(
    temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(
        temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p
    )
    seen = stages(ROW, params)
    ids, weights = survivors(ROW, float(ROW.max()), params)
    kept = list(range(10)) if ids is None else ids.tolist()
    assert list(seen[-1].shares) == kept
    np.testing.assert_allclose(
        list(seen[-1].shares.values()), weights / weights.sum(), rtol=1e-5
    )
    for before, after in zip(seen, seen[1:], strict=False):
        assert before.shares.keys() == after.shares.keys() | after.cut
        assert not after.shares.keys() & after.cut
        assert sum(after.shares.values()) == pytest.approx(1)


def test_one_stage_for_each_filter_that_is_set() -> None:
    assert [s.title for s in stages(ROW, SamplingParams())] == ["as they come"]
    assert [s.title for s in stages(ROW, ALL)][1:] == [
        *("temperature = 0.7", "min_p = 0.1", "top_k = 5", "top_p = 0.8")
    ]
    assert [len(s.shares) for s in stages(ROW, ALL)] == [10, 10, 6, 5, 3]


@pytest.mark.parametrize("u", [0.0, 0.4, 0.6, 0.9, 0.999])
def test_both_tiers_name_the_token_that_the_sampler_picks(u: float) -> None:
    figure = funnel(ROW, WORDS, ALL, u)
    _, weights = survivors(ROW, float(ROW.max()), ALL)
    word = WORDS[pick(weights, u)]
    assert figure.text.endswith(f"falls on {word!r}") and repr(word) in figure.alt
    assert figure.svg.count(">cut</text>") == 7
    assert figure.text.count("x") - "".join(WORDS).count("x") == 7
    assert re.search(r"top_p = 0.8 +51% +32% +17% +x +x( +\.){5}", figure.text)


def test_small_shares_do_not_read_as_nothing() -> None:
    assert [percent(x) for x in (0.5, 0.014, 0.0031)] == ["50%", "1%", "0.3%"]
