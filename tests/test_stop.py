"""Stop strings against a slow reading of their contract."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pagedattn.text.stop import StopMatcher, StopStrings

SHORT = st.text("ab", min_size=1, max_size=5)
STOPS = st.lists(SHORT, min_size=1, max_size=4)
CHUNKS = st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=10)


def first_match(
    text: str, stops: list[str], armed: list[bool], include: bool
) -> tuple[str, str | None]:
    """The text up to the stop string that completes first at an armed character."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if armed[end - 1] and text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@given(STOPS, CHUNKS, st.booleans())
@example(["ab", "bc"], [("ab", False), ("c", True)], False)
def test_matches_and_releases_as_told(
    stops: list[str], chunks: list[tuple[str, bool]], include: bool
) -> None:
    """C01: what is released is a prefix of the answer, and all of it but what may
    still become a stop string; chunks and arming change nothing else."""
    text = "".join(chunk for chunk, _ in chunks)
    armed = [flag for chunk, flag in chunks for _ in chunk]
    want, want_stop = first_match(text, stops, armed, include)
    matcher, released, seen, stop = (
        StopMatcher(StopStrings(stops), include),
        "",
        "",
        None,
    )
    for chunk, flag in chunks:
        seen += chunk
        delta, stop = matcher.feed(chunk, flag)
        released += delta
        assert want.startswith(released)
        if stop is not None:
            break
        longest = max(
            (n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0
        )
        assert len(released) == len(seen) - longest
    released += matcher.flush()
    assert (released, stop) == (want, want_stop)


@pytest.mark.parametrize(
    "stops, want",
    [
        (["bcdef", "cd"], "cd"),  # completes first, though it starts later
        (["cd", "bcd"], "cd"),  # both complete at d: the first listed
        (["bcd", "cd"], "bcd"),
        (["bcd", "cd", "bcd"], "bcd"),  # listed twice is listed first
        (["d", "cdd", "bcd"], "d"),  # links are made nearest the root first
        (["xyz"], None),
    ],
)
def test_earliest_completion_then_list_order(
    stops: list[str], want: str | None
) -> None:
    released, stop = StopMatcher(StopStrings(stops)).feed("abcdefg")
    assert stop == want
    assert released == ("abcdefg" if want is None else "abcdefg"[: 4 - len(want)])


def test_holds_no_more_than_may_match() -> None:
    """Not max(len) - 1 characters always, and nothing once a match is ruled out."""
    matcher = StopMatcher(StopStrings(["Observation:"]))
    assert matcher.feed("I see an Obs") == ("I see an ", None)
    assert matcher.feed("tacle") == ("Obstacle", None)


def test_work_is_linear_in_the_text() -> None:
    """Against a text made of almost-matches: a step per character, twice at most."""
    stops = StopStrings(["a" * 500 + "b"])
    steps, step = 0, stops.step

    def counted(state: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return step(state, char)

    stops.step = counted
    matcher = StopMatcher(stops)
    for _ in range(2000):
        matcher.feed("a")
    assert steps == 2000 and len(matcher.flush()) == 500
