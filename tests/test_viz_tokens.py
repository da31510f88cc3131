"""Pictures of tokens: every byte drawn once, coloured by what really came out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_text import demo

from pagedattn.text.template import ChatTemplate
from pagedattn.viz.tokens import STATES, in_blocks, release, rows, spelling, visible

TEXTS = st.text("Obs \n你🦙é", min_size=1, max_size=12)
SQUARE = {name: square for name, (_, square, _) in STATES.items()}


@given(TEXTS, st.sampled_from([(), ("bs",), ("\nO", "🦙b")]))
def test_every_byte_is_held_or_shown_once(text: str, stop: tuple[str, ...]) -> None:
    """The deltas are the text up to a stop string; a byte is `now` in one row and
    `shown` ever after; the states of a row stand in the order of `STATES`."""
    found = rows(demo(), demo().encode(text), stop)
    want = min((text[: text.find(s)] for s in stop if s in text), key=len, default=text)
    assert "".join(row.delta for row in found) == want
    shown, order = 0, ["shown", "now", "maybe", "cut", "part", "coming"]
    for row in found:
        assert len(row.states) == len(text.encode())
        assert row.states.count("shown") == shown
        assert row.states.count("now") == len(row.delta.encode())
        assert list(row.states) == sorted(row.states, key=order.index)
        shown += row.states.count("now")
    assert shown == len(want.encode())
    assert ("cut" in found[-1].states) == (want != text)


def test_a_character_is_held_until_its_last_byte() -> None:
    states = [row.states for row in rows(demo(), demo().encode(" 🦙"))]
    assert [row[0] for row in states] == ["now", "shown", "shown", "shown"]
    assert [row[-1] for row in states] == ["coming", "coming", "now", "shown"]
    assert states[1][1:4] == ("part",) * 3


def test_pictures_say_the_same_in_text_and_svg() -> None:
    """One square a byte in every row, one rectangle a cell."""
    ids = demo().encode("Hot.\nObservation:")
    figure = release(demo(), ids, ["\nObservation:"])
    lines = figure.text.splitlines()
    assert sum(line.count(SQUARE["now"]) for line in lines) == len("Hot.") + 1
    assert lines[5].count(SQUARE["cut"]) == len("\nObservation:")
    assert figure.svg.count(STATES["cut"][0]) == len("\nObservation:") + 1
    assert figure.svg.count("“Hot”") == figure.text.count("“Hot”") == 1


def test_spelling_lays_tokens_over_bytes() -> None:
    figure = spelling(demo(), "Hi 🦙")
    assert figure.text.splitlines() == [
        "characters  H  i  ·  🦙",
        "bytes       48 69 20 f0 9f a6 99",
        "tokens      0──── 1─────── 2─ 3─",
    ]
    assert figure.alt == "4 characters are 7 bytes and 4 tokens."
    assert figure.svg.count("<rect") == 1 + 4 + 7 + 4


def test_tokens_are_shown_readably() -> None:
    assert [visible(demo(), i) for i in demo().encode("a b\n")] == ["a", "·b", "↵"]
    assert visible(demo(), demo().eos_id) == "<end>"
    assert visible(demo(), demo().encode(" 🦙")[0]) == "· f0 9f"


def test_half_a_character_is_refused() -> None:
    with pytest.raises(ValueError, match="whole characters"):
        release(demo(), demo().encode("🦙")[:1])


def test_shared_prefix_lies_in_shared_blocks() -> None:
    """Two chats with one system prompt of four whole blocks, in all ten blocks."""
    template = ChatTemplate(demo().chat_template)
    chats = {}
    for name, question in (("Ann", "rain on the roof"), ("Bob", "snow on a hill?")):
        system = {"role": "system", "content": "You are a poet. Be brief:"}
        messages = [system, {"role": "user", "content": question}]
        prompt = template.render(messages, tokenizer=demo())
        chats[name] = demo().encode(prompt, add_special_tokens=False)
    figure = in_blocks(demo(), chats)
    assert figure.text.count("🟫") == 16 and figure.svg.count("Ann + Bob") == 4
    assert figure.text.count("🟦") == len(chats["Ann"]) - 16
    assert figure.text.count("🟥") == len(chats["Bob"]) - 16
