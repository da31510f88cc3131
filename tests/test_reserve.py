"""Reserved in one piece, and paged: allocator, accounts, the paper's figure 2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn.bench.reserve import SCHEMES, SLOTS, Buddy, paged, power_of_two, reserved
from pagedattn.bench.workloads import ALPACA, SHAREGPT
from pagedattn.viz.shares import bars

LENGTHS = SHAREGPT.draw(500)

# Kwon et al., SOSP 2023, figure 2, in per cent: tokens, later, never, between.
PAPER = {
    "Max": (20.4, 13.3, 57.3, 8.9),
    "Pow2": (26.8, 17.9, 13.6, 41.6),
    "Oracle": (38.2, 25.2, 0.0, 36.6),
}


@given(
    slots=st.integers(1, 300),
    acts=st.lists(st.one_of(st.integers(1, 64), st.integers(-9, -1)), max_size=40),
)
def test_buddy_pieces_never_overlap_and_merge_again(slots, acts):
    """A positive act takes so many slots, a negative one gives a piece back."""
    pool, held = Buddy(slots), []
    for act in acts:
        if act > 0:
            piece = pool.take(act)
            if piece is not None:
                start, size = piece
                assert size == power_of_two(act) and start + size <= slots
                held.append(piece)
        elif held:
            pool.give_back(*held.pop(act % len(held)))
        taken = [s for start, size in held for s in range(start, start + size)]
        assert len(taken) == len(set(taken))
    for piece in held:
        pool.give_back(*piece)
    largest = 1 << slots.bit_length() - 1
    assert pool.take(largest) == (0, largest)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_figure_2_of_the_paper(scheme):
    """What is useful within 4 points; what lies between within 8 (Pow2 has least)."""
    shares = [100 * share for share in reserved(LENGTHS, scheme).shares]
    assert sum(shares) == pytest.approx(100)
    assert abs(shares[0] - PAPER[scheme][0]) < 4
    for ours, theirs in zip(shares, PAPER[scheme], strict=True):
        assert abs(ours - theirs) < 8


def test_seven_maxima_fit():
    shares = reserved(LENGTHS[:60], "Max")
    assert shares.at_once == SLOTS // 2048 == 7


def test_paged_wastes_less_than_four_per_cent():
    """Of the whole pool, free blocks included; half a block for each request."""
    shares = paged(LENGTHS[:200])
    tokens, later, never, between = shares.shares
    assert tokens > 0.96 and later == 0
    assert shares.never / shares.steps == pytest.approx(7.5 * shares.at_once, rel=0.1)
    assert between < 0.02


def test_short_answers_waste_more_of_a_block():
    """Alpaca's requests hold about 78 tokens: half a block of 16 is a tenth."""
    shares = paged(ALPACA.draw(1500))
    assert 0.08 < shares.shares[2] < 0.12


def test_lengths_have_the_published_means():
    for lengths, means in ((SHAREGPT, (161.31, 337.99)), (ALPACA, (19.31, 58.45))):
        drawn = lengths.draw(20_000)
        for column, mean in zip(zip(*drawn, strict=True), means, strict=True):
            assert sum(column) / len(drawn) == pytest.approx(mean, rel=0.03)
    assert max(prompt + output for prompt, output in drawn) <= 2048


def test_bars_say_the_same_in_both_tiers():
    figure = bars({"one": (0.5, 0.25), "two": (1.0, 0.0)}, ("this", "that"), "alt")
    assert str(figure).split() == [
        *("this", "that", "one", "50.0%", "25.0%", "two", "100.0%", "0.0%")
    ]
    assert "50.0" in figure.svg and "25.0" in figure.svg
