"""The prefix index drawn as a tree: parents, equal words apart, what was evicted."""

from pagedattn.viz.chain import chains
from pagedattn.viz.story import cast, play, request, stage


def test_the_tree_is_the_index():
    scheduler, camera = stage()
    play(scheduler, camera, cast(), steps=5)
    frame = camera.film().ends()[-1]
    figure = chains(frame)
    lines = str(figure).splitlines()
    indexed = [block for block in frame.blocks if block.hash]
    assert lines[0] == "ROOT" and len(lines) == 1 + len(indexed) == 9
    assert figure.svg.count("<line") == len(indexed)
    # Two blocks of the same words, in two contexts.
    assert sum(line.endswith(": ? softly the night") for line in lines) == 2
    assert len({line.split("└── ")[1][:8] for line in lines[1:]}) == 8


def test_a_child_may_outlive_its_parent():
    """Sharing keeps a parent at least as long as its child, except where a duplicate
    of it is indexed: the place is drawn, and said to be evicted."""
    scheduler, camera = stage(num_blocks=3)
    play(scheduler, camera, [request("Ann", "You are a poet . Be brief : rain", 1)])
    first = scheduler.pool.blocks[1]
    scheduler.tables.index.forget(first)
    play(scheduler, camera, [request("Bob", "snow", 1)], steps=1)
    assert "evicted: You are a poet" in str(chains(camera.film().frames[-1]))


def test_an_empty_index():
    scheduler, camera = stage()
    play(scheduler, camera, [request("Ann", "snow", 1)])
    assert str(chains(camera.film().frames[0])) == "ROOT"
