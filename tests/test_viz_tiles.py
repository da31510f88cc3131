"""The tile stepper: its numbers are the specification's, its pictures follow its steps.

Needs ipywidgets for the last test only, as the stepper itself does.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagedattn.kernels import spec

from pagedattn.viz.tiles import Scene, Step, ann, picture, steps, tile_stepper

CLOSE = dict(rtol=1e-4, atol=1e-5)


def attention(scene: Scene, window: int, softcap: float) -> torch.Tensor:
    """The same query by the specification."""
    out = torch.empty(1, 1, len(scene.q))
    spec.decode_attention(
        out,
        scene.q[None, None],
        scene.k[:, None],
        scene.v[:, None],
        torch.tensor([scene.table], dtype=torch.int32),
        torch.tensor([scene.length], dtype=torch.int32),
        scene.scale,
        window,
        softcap,
    )
    return out[0, 0]


@given(
    chunk=st.integers(1, 20),
    window=st.integers(0, 16),
    softcap=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 99),
)
def test_last_step_is_decode_attention(
    chunk: int, window: int, softcap: float, seed: int
) -> None:
    scene = ann(seed=seed)
    walked = steps(scene, chunk=chunk, window=window, softcap=softcap)
    expected = attention(scene, window, softcap)
    torch.testing.assert_close(torch.tensor(walked[-1].out), expected, **CLOSE)


@given(chunk=st.integers(1, 16), window=st.integers(0, 16))
def test_each_position_is_read_once_through_the_table(chunk: int, window: int) -> None:
    scene = ann()
    walked = steps(scene, chunk=chunk, window=window)
    reads = [read for step in walked for read in step.reads]
    first = max(0, scene.length - window) if window else 0
    assert [read.position for read in reads] == list(range(first, scene.length))
    for read in reads:
        assert scene.table[read.position // 4] == read.block
        assert read.position % 4 == read.offset
    assert [step.number for step in walked] == list(range(1, walked[-1].of + 1))


def test_states_follow_each_other() -> None:
    walked = steps(ann(), chunk=3)
    assert walked[0].was.m == -math.inf and walked[0].shrink == 0
    for earlier, later in zip(walked, walked[1:], strict=False):
        assert later.was == earlier.now
        assert later.now.m >= later.was.m
        assert 0 < later.shrink <= 1


def test_ann_has_the_schedulers_blocks_and_nothing_in_unused_slots() -> None:
    scene = ann()
    assert scene.table == (1, 2, 3, 8)
    assert scene.words[-1] == "the" and scene.length == 14
    assert scene.k[0].isnan().all() and scene.k[8, 2:].isnan().all()


def told(step: Step) -> tuple[str, str]:
    figure = picture(step)
    return figure.text, figure.svg


def test_picture_says_what_is_read_and_kept() -> None:
    walked = steps(ann())
    text, svg = told(walked[1])
    assert "step 2 of 4: positions 4 to 7, in block 2" in text
    assert "2 🟦🟦🟦🟦" in text and "1 🟪🟪🟪🟪" in text
    assert f"{walked[1].shrink:.2f}" in text and f"{walked[1].shrink:.2f}" in svg
    assert "out = acc / l" in told(walked[-1])[0]
    assert len({told(step) for step in walked}) == 4
    assert "nan" not in svg.lower()


def test_picture_of_a_window_leaves_out_what_is_behind_it() -> None:
    (step,) = steps(ann(), chunk=16, window=5)
    text, _ = told(step)
    assert "positions 9 to 13, in blocks 3, 8" in text
    assert "1 ⬛⬛⬛⬛" in text and "3 ⬛🟦🟦🟦" in text


def test_sliders_change_the_picture() -> None:
    widgets = pytest.importorskip("ipywidgets")
    box = tile_stepper()
    controls, shown = box.children
    named = {c.description: c for c in controls.children if c.description}
    assert isinstance(shown, widgets.HTML)
    first = shown.value
    named["step"].value = 2
    assert "step 2 of 4" in shown.value != first
    named["step"].value = 4
    named["chunk"].value = 16  # one step is left: the slider follows
    assert named["step"].value == named["step"].max == 1
    assert "step 1 of 1" in shown.value
    named["window"].value = 5
    assert "positions 9 to 13" in shown.value
