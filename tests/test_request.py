"""`Request`: what it counts, and when its last token ends it."""

import pytest

from pagedattn.request import Request, SamplingParams


def make(tokens=(1, 2, 3), limit=10, eos=(), **params):
    return Request("a", list(tokens), SamplingParams(**params), limit, eos_ids=eos)


def test_a_new_request_has_done_nothing():
    request = make()
    counts = ("seed", "sibling", "priority", "arrival", "computed", "pending", "epoch")
    assert [getattr(request, name) for name in counts] == [0] * 7
    assert request.prompt_len == 3 and request.num_output == 0
    assert request.hashes == [] and request.extra_keys == request.first_block_keys == ()
    assert request.cached is request.finish_reason is request.stop_reason is None


def test_requests_are_equal_to_themselves_alone():
    assert make() != make()


def test_tokens_in_flight_count():
    request = make()
    request.computed, request.pending = 3, 1
    assert (request.num_tokens, request.behind, request.num_output) == (4, 1, 0)
    request.tokens.append(9)
    request.pending = 0
    assert (request.num_tokens, request.behind, request.num_output) == (4, 1, 1)
    request.computed = 4
    assert request.behind == 0


def test_behind_at_the_limit():
    """The token that reaches the limit is never computed: nothing follows it."""
    request = make(limit=5)
    request.computed, request.pending = 3, 1
    assert request.behind == 1
    request.computed, request.pending = 4, 1
    assert request.behind == 0
    request.computed, request.pending = 3, 2
    assert request.behind == 0


@pytest.mark.parametrize("scored, reads", [(None, True), (0, False), (5, False)])
def test_prompt_logprobs_read_no_cache(scored, reads):
    assert make(prompt_logprobs=scored).reads_cache == reads


def end(output, limit=99, eos=(), **params):
    request = make(limit=limit, eos=frozenset(eos), **params)
    request.tokens += output
    return request.ending()


def test_ending_by_end_of_text_stop_id_or_length():
    assert end([7]) is None
    assert end([7], eos=[7]) == ("stop", None)
    assert end([8], eos=[7]) is None
    assert end([8], eos=[7, 8]) == ("stop", None)
    assert end([7, 8], eos=[7]) is None  # only the last token counts
    assert end([7], eos=[7], ignore_eos=True) is None
    assert end([7], stop_token_ids=[5, 7]) == ("stop", 7)
    assert end([7], stop_token_ids=[5, 7], ignore_eos=True) == ("stop", 7)
    assert end([7], eos=[7], stop_token_ids=[7]) == ("stop", None)
    assert end([7, 7], limit=6) is None
    assert end([7, 7], limit=5) == ("length", None)
    assert end([7, 7], limit=5, eos=[7]) == ("stop", None)


@pytest.mark.parametrize(
    "min_tokens, ends", [(0, True), (1, True), (2, True), (3, False)]
)
def test_min_tokens_holds_every_end_back_but_the_length(min_tokens, ends):
    """C08: end-of-text and stop ids alike; the token that completes it may end."""
    want = ("stop", None) if ends else None
    assert end([6, 7], eos=[6, 7], min_tokens=min_tokens, max_tokens=50) == want
    want = ("stop", 7) if ends else None
    assert end([6, 7], stop_token_ids=[7], min_tokens=min_tokens) == want
    assert end([6, 5], min_tokens=min_tokens, limit=5) == ("length", None)
