"""The automaton's drawing holds every state and step; masks show what is allowed."""

import re
from xml.etree import ElementTree

from pagedattn.viz.automaton import levels, machine, masks, spans

STEPS = [{ord("y"): 1, ord("n"): 3}, {ord("e"): 2}, {ord("s"): 4}, {ord("o"): 4}, {}]
LOOP = [{byte: 1 for byte in b"0123456789"}, {byte: 1 for byte in b"0123456789"}]


def test_bytes_are_spelled_as_a_class_would() -> None:
    assert spans(b"0123456789") == "0-9"
    assert spans(b"ab x") == "␣ a b x"
    assert spans([0x80, 0x81, 0x82, 10]) == "x0a x80-x82"


def test_every_state_and_step_is_drawn() -> None:
    figure = machine(STEPS, {4})
    root = ElementTree.fromstring(figure.svg)
    circles = [e for e in root.iter() if e.tag.endswith("circle")]
    arrows = [e for e in root.iter() if e.tag.endswith("path")]
    assert len(circles) == 5 + 1 and len(arrows) == 5  # the last has two rings
    assert "0 --y--> 1" in figure.text and "may end in: 4" in figure.text
    assert levels(STEPS) == [[0], [1, 3], [2, 4]]


def test_a_loop_is_an_arc() -> None:
    figure = machine(LOOP, {1})
    assert len(re.findall(r" C\d", figure.svg)) == 1
    assert "1 --0-9--> 1" in figure.text


def test_masks_show_what_is_allowed() -> None:
    figure = masks(["ye", "s", "<no>"], {"": [0, 2], "ye": [1]})
    assert figure.text.splitlines()[1].split() == ["ye", ".", "s", "."]
    ElementTree.fromstring(figure.svg)
    assert figure.svg.count("#f2f2f2") == 3
