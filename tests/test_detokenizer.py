"""Text in progress: whatever the tokens, the deltas are the text, and no more."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_text import demo, ids_of, tiny

from pagedattn.text.detokenizer import Detokenizer, TextStream
from pagedattn.text.tokenizer import Tokenizer

CASES = st.sampled_from(["demo", "tiny", "tiny without prefix"]).flatmap(
    lambda name: st.tuples(st.just(name), ids_of(tokenizer(name)))
)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=24)


def tokenizer(name: str) -> Tokenizer:
    """One of the shared vocabularies."""
    return demo() if name == "demo" else tiny(prefix=name == "tiny")


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` in pieces of the given sizes, over and over."""
    parts, at, turn = [], 0, 0
    while at < len(ids):
        parts.append(ids[at : at + sizes[turn % len(sizes)]])
        at, turn = at + len(parts[-1]), turn + 1
    return parts


def deltas(output: Detokenizer, parts: list[list[int]]) -> list[str]:
    """What a client sees, one entry per push and one for the end."""
    seen = []
    for part in parts:
        stop = output.push(part)
        seen.append(output.take())
        if stop is not None:
            break
    output.finish()
    return [*seen, output.take()]


# Without stop strings: the stream is the decoded text.


@given(CASES, SIZES, st.booleans(), st.booleans())
def test_deltas_are_the_full_decode(
    case: tuple[str, list[int]], sizes: list[int], skip: bool, spaces: bool
) -> None:
    """C19, C20, C21, for any ids at all: skipped and shown special tokens, parts of
    characters, bytes that are no character."""
    name, ids = case
    output = Detokenizer(tokenizer(name), skip_special_tokens=skip)
    seen = deltas(output, chunks(ids, sizes))
    full = tokenizer(name).decode(ids, skip, spaces)
    assert "".join(seen) == output.text == full
    assert output.num_tokens == len(ids) and output.stopped is None


@given(CASES, st.integers(0, 24), st.booleans())
def test_output_continues_the_prompt(
    case: tuple[str, list[int]], cut: int, skip: bool
) -> None:
    """Prompt text and output text together are the text of all ids, unless the prompt
    ends inside a character; then the output has the whole character (or its U+FFFD)."""
    name, ids = case
    prompt, rest = ids[:cut], ids[cut:]
    full = tokenizer(name).decode(ids, skip)
    before = TextStream(tokenizer(name), skip_special_tokens=skip)
    certain = "".join(map(before.push, prompt))
    output = Detokenizer(tokenizer(name), prompt, skip_special_tokens=skip)
    assert certain + "".join(deltas(output, chunks(rest, [1]))) == full


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_no_delta_holds_part_of_a_character(name: str, size: int) -> None:
    """C19, with two requests interleaved: what is pending is each one's own."""
    text = "🦙🔥 dáď 你好"
    ids = tokenizer(name).encode(text, False)
    parts = chunks(ids, [size])
    one, two = Detokenizer(tokenizer(name)), Detokenizer(tokenizer(name), ids[:1])
    seen, other = [], []
    for part in parts:
        one.push(part), two.push(part)
        seen.append(one.take()), other.append(two.take())
    assert not any("\ufffd" in delta for delta in seen)
    assert "".join(seen) == text
    assert "".join(other).endswith(text[1:])


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_truncated_tail_and_invalid_middle(name: str) -> None:
    """C20: a cut character is held to the end and reads as one U+FFFD; invalid bytes
    in the middle are replaced once and the text after them flows at once."""
    vocabulary = tokenizer(name)
    fire = vocabulary.encode("🔥", False)
    cut = Detokenizer(vocabulary)
    assert deltas(cut, [[i] for i in fire[:-1]])[-1] == "\ufffd"
    assert cut.text.count("\ufffd") == 1

    cat = vocabulary.encode("cat", False)
    output = Detokenizer(vocabulary, cat)
    seen = deltas(output, [[fire[-1]], cat, cat])
    assert seen[0] == "\ufffd" and seen[1].strip() == "cat" and seen[3] == ""


def test_leading_space_is_the_prompts() -> None:
    """The space before a word belongs to the text unless the text begins there."""
    the = tiny().token_id("▁the")
    assert "".join(deltas(Detokenizer(tiny()), [[the]])) == "the"
    assert "".join(deltas(Detokenizer(tiny(), [1]), [[the]])) == "the"
    assert "".join(deltas(Detokenizer(tiny(), [1, the]), [[the]])) == " the"
    shown = Detokenizer(tiny(), [1], skip_special_tokens=False)
    assert "".join(deltas(shown, [[the]])) == " the"


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_prompt_that_ends_inside_a_character(cut: int) -> None:
    """The output that completes it has the whole character."""
    fire = tiny(prefix=False).encode("🔥", False)
    output = Detokenizer(tiny(prefix=False), [*fire, *fire[:cut]])
    assert len(fire) == 4 and deltas(output, [fire[cut:]]) == ["🔥", ""]


def test_ids_of_a_padded_head_add_no_text() -> None:
    the, pad = tiny().token_id("the"), tiny().vocab_size + 5
    output = Detokenizer(tiny())
    assert deltas(output, [[the, pad], [pad]])[0] == "the" and output.num_tokens == 3
    first_outside = Detokenizer(tiny())
    assert "".join(deltas(first_outside, [[tiny().vocab_size]])) == ""


def test_an_id_below_zero_adds_no_text() -> None:
    output = Detokenizer(tiny())
    assert "".join(deltas(output, [[-1], [tiny().token_id("the")]])) == "the"


class Recent(Sequence[int]):
    """A long prompt of which only the last few ids may be read."""

    def __init__(self, ids: list[int], size: int, readable: int) -> None:
        self.ids, self.size, self.readable = ids, size, readable

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: Any) -> Any:
        assert self.size - self.readable <= at < self.size, "reads the whole prompt"
        return self.ids[at % len(self.ids)]


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_a_long_prompt_costs_as_much_as_its_end(name: str) -> None:
    """A character has at most four bytes: of the text before, three matter."""
    cat = tokenizer(name).encode("cat", False)
    prompt = Recent(cat, 10**9, readable=8)
    output = Detokenizer(tokenizer(name), prompt)
    assert "".join(deltas(output, [cat])).strip() == "cat"


def test_a_stop_string_may_complete_in_the_first_token() -> None:
    output = Detokenizer(tiny(), stop=["the"])
    assert output.push([tiny().token_id("the")]) == "the"


# Stop strings.


@given(CASES, SIZES, st.data(), st.booleans())
def test_text_ends_at_the_stop_string(
    case: tuple[str, list[int]], sizes: list[int], data: st.DataObject, include: bool
) -> None:
    """C01, C07, C08: any substring of the text stops it where it first completes after
    min_tokens, however the tokens came, and the count says in which token."""
    name, ids = case
    vocabulary = tokenizer(name)
    text = vocabulary.decode(ids)
    cuts = data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=2))
    stop = text[min(cuts) : max(cuts)][:8] or "absent"
    min_tokens = data.draw(st.integers(0, 3))
    want, count, found = slow_stop(vocabulary, ids, stop, min_tokens, include)

    output = Detokenizer(
        vocabulary,
        stop=[stop],
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
    )
    seen = deltas(output, chunks(ids, sizes))
    assert "".join(seen) == want
    assert output.num_tokens == count
    assert (output.stopped is not None) == found


def slow_stop(
    vocabulary: Tokenizer, ids: list[int], stop: str, min_tokens: int, include: bool
) -> tuple[str, int, bool]:
    """Text, tokens and whether it stopped, by decoding every prefix from scratch."""
    stream, text = TextStream(vocabulary), ""
    for count, piece in enumerate([*map(stream.push, ids), stream.finish()], 1):
        count = min(count, len(ids))
        start = len(text) if count > min_tokens else len(text) + len(piece)
        text += piece
        for end in range(start + 1, len(text) + 1):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], count, True
    return text, len(ids), False


def test_stop_string_that_spans_tokens_never_shows() -> None:
    """C01: three tokens and a start in mid-token."""
    ids = demo().encode("The quick brown fox jumps over the lazy dog")
    text, stop = demo().decode(ids), "ick brown fox ju"
    output = Detokenizer(demo(), stop=[stop])
    seen = deltas(output, [[i] for i in ids])
    assert "".join(seen) == text[: text.index(stop)] == "The qu"
    assert output.stopped == stop and output.num_tokens == 5


def test_beginning_of_a_stop_string_is_released_at_the_end() -> None:
    """C01: once nothing follows it is text like any other."""
    output = Detokenizer(demo(), stop=["Observation:"])
    seen = deltas(output, [[i] for i in demo().encode("I see an Obs")])
    assert "".join(seen) == "I see an Obs" and seen[-1] == "Obs"
    assert output.stopped is None


def test_tokens_after_the_stop_in_one_push_do_not_count() -> None:
    """C07: as many tokens accepted in one step as one at a time."""
    ids = demo().encode("ha ha ha ha ha")
    once, single = (Detokenizer(demo(), stop=[" ha ha ha"]) for _ in range(2))
    assert once.push(ids) == " ha ha ha"
    deltas(single, [[i] for i in ids])
    assert once.text == single.text == "ha"
    assert once.num_tokens == single.num_tokens == 4


def test_min_tokens_lets_a_stop_string_pass() -> None:
    """C08: it stays in the text, and ends nothing until later tokens complete one."""
    ids = demo().encode("a\n\nb c\n\nd")
    output = Detokenizer(demo(), stop=["\n\n"], min_tokens=3)
    assert "".join(deltas(output, [ids])) == "a\n\nb c" and output.stopped == "\n\n"


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("skip", [True, False])
def test_stop_token(include: bool, skip: bool) -> None:
    """C05: shown at most once, only when asked, and a skipped one cuts nothing real."""
    output = Detokenizer(
        demo(), skip_special_tokens=skip, include_stop_str_in_output=include
    )
    ids = [*demo().encode("Hello!"), demo().eos_id]
    assert output.push(ids, stop_token=True) is None
    output.finish()
    assert output.text == "Hello!" + "<|im_end|>" * (include and not skip)
    assert output.num_tokens == len(ids)


def test_plain_stop_token_is_left_out_whole() -> None:
    """C05, with a stop token that has text of its own."""
    ids = demo().encode("one two three")
    for include, want in ((False, "one two"), (True, "one two three")):
        output = Detokenizer(demo(), include_stop_str_in_output=include)
        output.push(ids, stop_token=True)
        output.finish()
        assert output.text == want


def test_replaced_tail_can_complete_a_stop_string() -> None:
    """Streamed or not, the text is cut alike: the tail's U+FFFD is text too."""
    part = demo().encode("🦙")[:1]
    output = Detokenizer(demo(), stop=["a\ufffd"])
    assert output.push([*demo().encode("Oa"), *part]) is None
    assert output.take() == "O"
    assert output.finish() == output.finish() == "a\ufffd"
    assert output.text == "O" and output.take() == ""


def test_nothing_follows_a_stop_string() -> None:
    """Nor does half a character behind it in its own token."""
    piece = b" \xf0\x9f"  # a space and half of most emoji: one token of this model
    half = next(i for i in range(demo().vocab_size) if demo().token_bytes(i) == piece)
    output = Detokenizer(demo(), stop=["a "])
    assert output.push([*demo().encode("Oa"), half]) == "a "
    assert output.finish() == "a "
    assert output.text == "O"


def test_without_a_token_nothing_stops() -> None:
    """A stop string completes in a token of the output; the prompt's end is none."""
    fire = tiny(prefix=False).encode("🔥", False)
    output = Detokenizer(tiny(prefix=False), fire[:2], stop=["\ufffd"])
    assert not output.finished
    assert output.finish() is None and output.text == "\ufffd"
    assert output.finished


# Speed.


@pytest.mark.parametrize("stop", [(), ("\n\nUser:", "###", "Observation:")])
def test_cost_per_token_does_not_grow(stop: tuple[str, ...]) -> None:
    """Linear: sixteen times the tokens take less than 64 times as long, and a token
    takes 1 to 5 µs on an idle core (bound left loose for a busy machine)."""
    ids = demo().encode("The quick brown fox jumps over the lazy dog. ") * 2600
    spent = {}
    for n in (1600, 25600):
        output, start = Detokenizer(demo(), stop=stop), time.process_time()
        for token_id in ids[:n]:
            output.push([token_id])
            output.take()
        spent[n] = time.process_time() - start
    assert output.stopped is None and output.num_tokens == 25600
    assert spent[25600] < 64 * spent[1600] and spent[25600] / 25600 < 50e-6
