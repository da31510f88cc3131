"""The cache simulator: slots add up, a seed repeats, every slider moves something."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.viz.simulator import cache_simulator, picture, simulate


@settings(max_examples=15)
@given(
    block_size=st.sampled_from([1, 3, 16, 64]),
    num_blocks=st.integers(2, 40),
    rate=st.floats(0.05, 2.0),
    shared_prefix=st.integers(0, 100),
)
def test_slots_add_up_in_every_step(block_size, num_blocks, rate, shared_prefix):
    """Whatever the settings, pool too small for a prompt included."""
    simulation = simulate(block_size, num_blocks, rate, shared_prefix, steps=60)
    assert len(simulation.moments) == 60
    for moment in simulation.moments:
        parts = (moment.useful, moment.empty, moment.cached, moment.free)
        assert all(part >= 0 for part in parts)
        assert sum(parts) == block_size * num_blocks == simulation.slots
        assert moment.empty <= (block_size - 1) * moment.running
    assert 0 <= simulation.found <= simulation.asked


def test_a_seed_repeats_and_another_differs():
    first, again = simulate(rate=0.8, seed=3), simulate(rate=0.8, seed=3)
    assert first == again
    assert picture(first).html() == picture(again).html()
    assert simulate(rate=0.8, seed=4) != first


def test_settings_do_not_change_who_comes():
    """The same requests arrive at the same steps into any pool."""

    def present(simulation):
        last = simulation.moments[-1]
        return simulation.finished + last.running + last.waiting

    runs = [simulate(8, 512), simulate(64, 16), simulate(64, 16, prefix_caching=False)]
    assert abs(present(runs[0]) - present(runs[1])) <= 1
    assert abs(present(runs[1]) - present(runs[2])) <= 1


def test_a_shared_prefix_is_found_only_with_the_cache():
    hit = simulate(shared_prefix=256)
    assert hit.hit_rate > 0.7
    assert simulate(shared_prefix=256, prefix_caching=False).hit_rate == 0
    assert simulate(shared_prefix=0).hit_rate == 0
    # What is found need not be computed: more requests finish.
    assert hit.finished > simulate(shared_prefix=256, prefix_caching=False).finished


def test_bigger_blocks_hold_more_that_is_empty():
    empty = [simulate(n, 4096 // n).share("empty") for n in (4, 16, 64, 256)]
    assert empty == sorted(empty) and empty[0] < 0.02 < 0.3 < empty[-1]


def test_text_says_what_the_picture_says():
    figure = picture(simulate(rate=1.0))
    lines = str(figure).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [
        *("useful", "empty", "cached", "free", "running", "waiting")
    ]
    assert lines[0] in figure.svg.replace("&#x27;", "'")
    assert figure.svg.count("<polygon") == 3 and figure.svg.count("<polyline") == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("block size", 128), ("pool", 1024), ("arrivals", 1.0), ("shared prefix", 256)],
)
def test_every_slider_changes_the_picture(name, value):
    widget = cache_simulator()
    *sliders, shown = widget.children
    before = shown.value
    assert before.startswith("<img")
    slider = next(s for s in sliders if s.description == name)
    slider.value = value
    assert shown.value.startswith("<img") and shown.value != before
