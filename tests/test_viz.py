"""Films and their pictures: they show what the books say, moment by moment."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from urllib.parse import unquote

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.viz.figure import Figure, label, page, rect
from pagedattn.viz.film import ROOT, Film
from pagedattn.viz.player import player, script
from pagedattn.viz.pool import block_map, example
from pagedattn.viz.story import SYSTEM, cast, ids, play, request, stage, words
from pagedattn.viz.strip import people, still, strip

SVG = "{http://www.w3.org/2000/svg}"


def film_of(steps: int = 99) -> Film:
    scheduler, camera = stage()
    play(scheduler, camera, cast(), steps)
    return camera.film()


# Figures.
def test_the_image_in_the_page_is_the_svg() -> None:
    odd = page(
        20, 10, [rect(0, 0, 5, 5, "#abcdef"), label(1, 9, "a%b <c> & 'd' \"e\"")]
    )
    figure = Figure(odd, "text", 'an "alt" <text>')
    html = figure.html()
    source = re.fullmatch(
        r'<img alt="([^"]*)" src="data:image/svg\+xml,([^"]*)">', html
    )
    assert source and "<" not in source[1] + source[2]
    assert not re.search(r"#|%(?![0-9A-F]{2})", source[2])  # nothing ends the address
    kept = ET.fromstring(unquote(source[2]))
    assert ET.tostring(kept) == ET.tostring(ET.fromstring(odd.strip()))
    assert figure._repr_mimebundle_()["text/plain"] == str(figure) == "text"


def test_figures_can_be_saved(tmp_path: Path) -> None:
    block_map(example()).save(tmp_path / "new" / "blocks.svg")
    root = ET.parse(tmp_path / "new" / "blocks.svg").getroot()
    assert root.tag == SVG + "svg"


def test_the_readmes_picture_is_the_example() -> None:
    committed = ROOT / "book" / "figures" / "blocks.svg"
    assert committed.read_text("utf-8") == block_map(example()).svg


# Films.
@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_frames_are_what_the_books_say(
    sizes: list[tuple[int, int]], steps: int
) -> None:
    scheduler, camera = stage()
    system = ids(SYSTEM)
    people = [
        request(str(i), words((system * 2)[:n]), answer)
        for i, (n, answer) in enumerate(sizes)
    ]
    play(scheduler, camera, people, steps)
    frame = camera.film().frames[-1]
    assert frame.free == tuple(block.id for block in scheduler.pool.free)
    assert [r.id for r in frame.running] == [r.id for r in scheduler.running]
    assert [r.id for r in frame.waiting] == [r.id for r in scheduler.waiting]
    for block in frame.blocks:
        holders = [
            r for r in scheduler.running if block.id in scheduler.tables.ids(r)[0]
        ]
        assert list(block.holders) == [r.id for r in holders]
        for r in holders:
            i = scheduler.tables.ids(r)[0].index(block.id)
            end = min(i * 4 + 4, r.computed)
            assert " ".join(block.words) == words(r.tokens[i * 4 : end])
        assert (block.hash is None) == (scheduler.pool.blocks[block.id].key is None)
        if block.hash:
            assert block.chain[-1] == (block.hash, " ".join(block.words))


def test_the_line_that_acted_is_there() -> None:
    for frame in film_of().frames:
        source = (ROOT / frame.line.file).read_text("utf-8").splitlines()
        assert source[frame.line.number - 1].strip() == frame.line.text
        assert "_emit" in frame.line.text and f'"{frame.kind}"' in frame.line.text
        assert all("<" not in name for name in frame.line.calls)
        assert frame.line.calls[0].startswith("Scheduler.")


def test_the_story_shares_preempts_and_hits() -> None:
    """The ten blocks show every idea: what the chapters say of them holds."""
    kinds = {frame.kind for frame in film_of().frames}
    assert kinds >= {"add", "take", "share", "admit", "compute", "preempt", "finish"}
    shared = [b for f in film_of().ends() for b in f.blocks if len(b.holders) == 2]
    assert {b.words for b in shared} == {
        ("You", "are", "a", "poet"),
        (".", "Be", "brief", ":"),
    }


# Stills and the player.
def test_a_still_has_every_word_and_one_square_a_slot() -> None:
    film = film_of()
    for frame in film.ends():
        figure = still(frame, people(film.frames), film.block_size)
        drawn = [t.text for t in ET.fromstring(figure.svg).iter(SVG + "text")]
        for block in frame.blocks:
            assert set(block.words) - {""} <= set(drawn)
        assert len(re.findall("[🟦🟥🟩🟨🟪🟧🟫⬛⬜]", figure.text)) == 40


def test_a_strip_tells_every_moment_in_order() -> None:
    film = film_of()
    figure = strip(film.ends(), film.block_size)
    places = [figure.text.index(f"step {f.step}: {f.text}") for f in film.ends()]
    assert places == sorted(places)


def test_colours_stay_with_people() -> None:
    """Ann keeps her colour in a frame in which Bob has left."""
    film = film_of()
    names = people(film.frames)
    assert names == ["Ann", "Bob", "Cyd"]
    assert script(film)["colours"]["Cyd"][0] == "#228833"


def test_the_player_gets_plain_data() -> None:
    film = film_of()
    widget = player(film)
    assert json.loads(json.dumps(widget.film)) == json.loads(json.dumps(script(film)))
    assert len(widget.film["frames"]) == len(film.frames) and widget.frame == 0
