"""Grammars as masks: against a plain filter, under every schedule, within bounds.

Knows the grammar room and the engine around an exact model; servers are tested in
`test_serve_structured`.
"""

import json
import sys
import time

import jsonschema
import numpy as np
import pytest
import regex
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagedattn.errors import NotSupported, UserError
from pagedattn.request import SamplingParams, StructuredOutputsParams, params_from
from pagedattn.sampling import grammar
from pagedattn.sampling.grammar import MAX_DEPTH, MAX_DIGITS, MAX_SIZE, Grammars
from pagedattn.sampling.sampler import sample
from pagedattn.sampling.state import SampleState
from pagedattn.testing import VOCABULARY, hash_engine, hash_grammars, naive_generate

# Every byte, some words, two end-of-text ids and one more special id.
WORDS = ["ab", "abc", "cab", "ca", "12", "1}", '":', '{"', '"}', "  ", "日本", "null"]
PIECES = [bytes([i]) for i in range(256)] + [w.encode() for w in WORDS] + [b"<x>"] * 3
EOS, OTHER_EOS, SPECIAL = range(256 + len(WORDS), len(PIECES))
V = len(PIECES) + 5  # logits have columns that the tokenizer doesn't know
GRAMMARS = Grammars(lambda: PIECES, (EOS, OTHER_EOS, SPECIAL), V, (EOS, OTHER_EOS))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "T": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/T"}},
            },
            "required": ["v", "kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/T",
}


def wish(**kinds):
    return StructuredOutputsParams(**kinds)


def state(params, output=(), seed=0):
    follows = GRAMMARS.matcher(params)
    eos = (EOS, OTHER_EOS)
    return SampleState(params, seed, V, [1], list(output), eos_ids=eos, grammar=follows)


def generate(params, seed, most=400):
    """(text, how it ended) of a model that says random things."""
    rng = np.random.default_rng(seed)
    own = state(params, seed=seed)
    while len(own.output_ids) < most:
        row = torch.from_numpy(rng.normal(0, 3, (1, V)).astype(np.float32))
        got = sample(row, [own])[0]
        assert got.error is None, got.error
        if got.token in (EOS, OTHER_EOS, *params.stop_token_ids):
            return text(own), "end"
        own.append(got.token)
        if own.ended:
            return text(own), "complete"
    return text(own), "length"


def text(own):
    return b"".join(PIECES[i] for i in own.output_ids).decode(errors="replace")


# Regular expressions: a plain filter that tries each token is the specification.
atoms = st.sampled_from(["a", "b", "c", "1", "[ab]", "[^a-z]", "ca", r"\}", "1*", "c?"])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda x: f"({'|'.join(x)})"),
        inner.map(lambda x: f"({x})*"),
        inner.map(lambda x: f"({x}){{1,3}}"),
    ),
    max_leaves=6,
)


def plain_filter(pattern, so_far):
    """Ids after which the text can still become a match, and ends if it is one."""
    found = set()
    for i, piece in enumerate(PIECES[:EOS]):
        try:
            longer = so_far + piece.decode("ascii")
        except UnicodeDecodeError:
            continue
        if regex.fullmatch(pattern, longer, partial=True):
            found.add(i)
    if regex.fullmatch(pattern, so_far):
        found |= {EOS, OTHER_EOS}
    return found


@given(patterns, st.integers(0, 2**32 - 1))
def test_masks_are_the_plain_filter(pattern, seed):
    rng = np.random.default_rng(seed)
    # The filter knows ASCII only, so let the expression's negations.
    ascii_only = pattern.replace("[^a-z]", "[0-9{}]")
    assume(regex.fullmatch(ascii_only, "", partial=True))
    matcher = GRAMMARS.matcher(
        SamplingParams(structured_outputs=wish(regex=ascii_only))
    )
    so_far = ""
    for _ in range(6):
        allowed = set(np.flatnonzero(matcher.allowed()).tolist())
        assert allowed == plain_filter(ascii_only, so_far)
        words = sorted(allowed - {EOS, OTHER_EOS})
        if not words:
            break
        token = int(rng.choice(words))
        matcher.advance(token)
        so_far += PIECES[token].decode()


@given(patterns, st.integers(0, 2**32 - 1))
def test_what_is_sampled_matches_the_expression(pattern, seed):
    params = SamplingParams(max_tokens=None, structured_outputs=wish(regex=pattern))
    said, how = generate(params, seed)
    if how != "length":
        assert regex.fullmatch(pattern, said), (pattern, said)


@given(
    st.lists(
        st.text(min_size=1, max_size=8).filter(lambda s: "\0" not in s), min_size=1
    ),
    st.integers(0, 2**32 - 1),
)
def test_one_of_the_choices_is_taken(choices, seed):
    params = SamplingParams(structured_outputs=wish(choice=choices))
    said, how = generate(params, seed)
    assert how in ("end", "complete") and said in choices


schemas = st.sampled_from([PERSON, TREE]) | st.recursive(
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": "boolean"},
            {"type": "string", "maxLength": 4},
            {"type": "string", "pattern": "^[ab]{1,3}$"},
            {"enum": ["x", 1, None]},
            {"const": {"a": [1]}},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda s: {"type": "array", "items": s, "maxItems": 2}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(
            lambda a, b: {
                "type": "object",
                "properties": {"a": a, "b": b},
                "required": ["a"],
                "additionalProperties": False,
            },
            inner,
            inner,
        ),
    ),
    max_leaves=4,
)


@given(schemas, st.booleans(), st.integers(0, 2**32 - 1))
def test_what_is_sampled_is_valid_json(schema, tight, seed):
    asked = wish(json=schema, disable_any_whitespace=tight)
    said, how = generate(SamplingParams(structured_outputs=asked), seed)
    if how != "length":
        jsonschema.validate(json.loads(said), schema)
        loose = json.dumps(json.loads(said), ensure_ascii=False)
        assert not tight or len(said) <= len(loose) + said.count("\\") * 6


@pytest.mark.parametrize(
    ("asked", "good"),
    [
        (wish(json_object=True), lambda s: isinstance(json.loads(s), dict)),
        (wish(json=json.dumps(PERSON)), lambda s: "name" in json.loads(s)),
        (wish(json={}), lambda s: json.loads(s) != 0.5),
        (wish(json=True), lambda s: json.loads(s) != 0.5),
        (wish(json="true"), lambda s: json.loads(s) != 0.5),
        (
            wish(grammar='start: "a" b\nb: /[0-9]+/'),
            lambda s: s[0] == "a" and int(s[1:]),
        ),
        (wish(grammar='root ::= "a" b\nb ::= [1-9]+'), lambda s: int(s[1:]) > 0),
        (wish(regex=r"[\x61-\u2e7f]{2}"), lambda s: len(s) == 2),
        (wish(json={"type": "integer", "maximum": 20_000_000_000}), lambda s: int(s)),
    ],
)
def test_each_kind(asked, good):
    ended = 0
    for seed in range(8):
        said, how = generate(SamplingParams(structured_outputs=asked), seed)
        ended += how != "length"
        assert how == "length" or good(said) is not False, said
    assert ended


def test_white_space_as_asked():
    asked = wish(json={"type": "array"}, whitespace_pattern=" ")
    matcher = GRAMMARS.matcher(SamplingParams(structured_outputs=asked))
    matcher.advance(ord("["))
    allowed = matcher.allowed()
    assert allowed[ord(" ")] and not allowed[ord("\n")]


def test_properties_that_are_not_listed():
    schema = {"properties": {"a": {"properties": {}}}, "type": "object"}
    loose = GRAMMARS.matcher(SamplingParams(structured_outputs=wish(json=schema)))
    asked = wish(json=schema, disable_additional_properties=True)
    tight = GRAMMARS.matcher(SamplingParams(structured_outputs=asked))
    for byte in b'{"':
        loose.advance(byte)
        tight.advance(byte)
    assert loose.allowed()[ord("z")] and not tight.allowed()[ord("z")]
    assert tight.allowed()[ord("a")]
    assert grammar.closed(schema)["properties"]["a"]["additionalProperties"] is False
    assert "additionalProperties" not in schema


# Ends.
def test_c68_no_end_before_the_text_is_complete():
    """Every end-of-text id, and special stop ids, wait; then all are allowed."""
    params = SamplingParams(
        stop_token_ids=[SPECIAL], structured_outputs=wish(regex="[0-9]{2,}")
    )
    own, ends = state(params), [EOS, OTHER_EOS, SPECIAL]
    for digit in b"12":
        assert not own.grammar.allowed()[ends].any()
        own.append(digit)
    assert own.grammar.allowed()[ends].all() and not own.ended


def test_an_ordinary_stop_id_ends_where_the_caller_said():
    params = SamplingParams(
        stop_token_ids=[ord("b")], structured_outputs=wish(regex="ab")
    )
    own = state(params)
    assert np.flatnonzero(own.grammar.allowed()).tolist() == [ord("a"), 256]
    own.append(ord("a"))
    own.append(ord("b"))
    assert not own.ended  # the id's own rule ends it, and hides its text


def test_special_ids_are_no_text():
    """A text that reads like a special token is spelled in letters."""
    params = SamplingParams(structured_outputs=wish(choice=["<x>"]))
    allowed = np.flatnonzero(state(params).grammar.allowed())
    assert allowed.tolist() == [ord("<")]


def test_the_grammar_ends_what_min_tokens_and_ignore_eos_would_not():
    for more in ({"min_tokens": 9}, {"ignore_eos": True}):
        params = SamplingParams(structured_outputs=wish(choice=["abc"]), **more)
        assert generate(params, 1) == ("abc", "complete")
    params = SamplingParams(ignore_eos=True, structured_outputs=wish(regex="a*"))
    assert generate(params, 1, most=50)[1] == "length"


def test_a_row_that_allows_nothing_fails_alone():
    stuck = SamplingParams(
        allowed_token_ids=[5], structured_outputs=wish(choice=["abc"])
    )
    free = SamplingParams(structured_outputs=wish(choice=["abc"]))
    row = torch.zeros(2, V)
    bad, good = sample(row, [state(stuck), state(free)])
    assert bad.token is None and "structured_outputs" in bad.error
    assert PIECES[good.token] in (b"a", b"ab", b"abc")


def test_a_forbidden_token_is_an_error_of_that_request():
    own = state(SamplingParams(structured_outputs=wish(choice=["abc"])), [ord("z")])
    got = sample(torch.zeros(1, V), [own])[0]
    assert got.token is None and "grammar" in got.error


def test_numbers_and_white_space_come_to_an_end():
    """C66: where a model only wants digits, or only spaces."""
    for asked, wanted in ((wish(json={}), b"7"), (wish(json_object=True), b" ")):
        params = SamplingParams(temperature=0, structured_outputs=asked)
        own, row = state(params), torch.zeros(1, V)
        row[0, wanted[0]] = 9.0
        row[0, 256:] = -9.0
        for _ in range(3 * MAX_DIGITS):
            token = sample(row, [own])[0].token
            own.append(token)
            if token in (EOS, OTHER_EOS):
                break
        said = b"".join(PIECES[i] for i in own.output_ids[:-1])
        assert max(map(len, regex.findall(rb"\d+|\s+", said))) <= MAX_DIGITS, said


def test_c26_logprobs_are_finite():
    params = SamplingParams(
        logprobs=V, top_k=1, structured_outputs=wish(choice=["abc"])
    )
    row = torch.from_numpy(np.random.default_rng(0).normal(0, 9, (1, V)))
    got = sample(row.float(), [state(params)])[0]
    assert np.isfinite(got.logprobs.logprob)
    assert np.isfinite(got.logprobs.top_logprobs).all()


# Schedules: what the exact model says, whatever happens around it.
HASH_EOS = 11
WISHES = [
    wish(regex=r"(?s).{6,30}"),
    wish(regex=r"[a-m0-9 ]{4,40}"),
    wish(json={"type": "array", "items": {"type": "string"}}),
    wish(choice=["yes", "no", "perhaps not"]),
]


@pytest.fixture(scope="module")
def words():
    return hash_grammars([HASH_EOS])


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 20),
            st.none() | st.sampled_from(WISHES),
            st.sampled_from([0.0, 1.0]),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(4, 24),
    st.sampled_from([2, 4]),
    st.integers(0, 99),
)
def test_schedules_change_nothing(words, asks, budget, block, seed):
    """Tiny pools preempt, budgets cut prompts, equal prompts share blocks, siblings
    share grammars: the tokens are those of each request alone."""
    engine = hash_engine(
        eos_ids=[HASH_EOS],
        grammars=words,
        block_size=block,
        num_blocks=1 + 44 // block,
        max_num_batched_tokens=budget,
    )
    params = [
        SamplingParams(
            n=1 if not t else n,
            max_tokens=16,
            temperature=t,
            seed=seed,
            structured_outputs=asked,
        )
        for _, asked, t, n in asks
    ]
    for i, ((length, *_), p) in enumerate(zip(asks, params, strict=True)):
        engine.add_request(str(i), list(range(length)), p)
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
    engine.check()
    for i, ((length, *_), p) in enumerate(zip(asks, params, strict=True)):
        ask = engine.intake.accept("alone", list(range(length)), p)
        for sibling, out in zip(ask.requests, last[str(i)].outputs, strict=True):
            truth, reason = naive_generate(sibling, grammars=words)
            assert (list(out.token_ids), out.finish_reason) == (truth, reason)


def test_preemption_happens_in_these_pools(words):
    engine = hash_engine(
        eos_ids=[HASH_EOS],
        grammars=words,
        block_size=2,
        num_blocks=23,
        max_num_batched_tokens=8,
    )
    params = SamplingParams(max_tokens=16, seed=1, structured_outputs=WISHES[1])
    for i in range(6):
        engine.add_request(str(i), [i] * 9, params)
    engine.abort_request("5")
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.scheduler.preemptions > 0
    engine.check()


def test_one_request_fails_and_its_neighbour_does_not(words):
    engine = hash_engine(eos_ids=[HASH_EOS], grammars=words)
    asked = wish(choice=["yes"])
    bad = SamplingParams(allowed_token_ids=[5], structured_outputs=asked)
    engine.add_request("bad", [1, 2, 3], bad)
    engine.add_request("good", [1, 2, 3], SamplingParams(structured_outputs=asked))
    last = {}
    while engine.has_unfinished_requests():
        last |= {o.request_id: o for o in engine.step()}
    assert last["bad"].outputs[0].finish_reason == "error"
    assert last["good"].outputs[0].finish_reason == "stop"
    engine.check()


def test_an_engine_without_words_refuses():
    engine = hash_engine()
    params = SamplingParams(structured_outputs=wish(regex="a"))
    with pytest.raises(UserError, match="tokenizer"):
        engine.add_request("a", [1], params)


# What is refused, and how it is said.
def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


BAD = [
    ({"json": {"type": "strin"}}, "strin"),
    ({"json": {"type": "string", "pattern": "["}}, "unclosed"),
    ({"json": {"minLength": 5, "maxLength": 2, "type": "string"}}, "minLength"),
    ({"json": {"enum": []}}, "empty"),
    ({"json": {"type": "object", "properties": 5}}, "properties"),
    ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ({"json": {"not": {"type": "string"}}}, "not"),
    ({"json": {"$ref": "#/$defs/none"}}, "none"),
    ({"json": {"$ref": "http://127.0.0.1:1/x.json"}}, "fetch"),
    ({"json": {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}}, "no text"),
    (
        {
            "json": {
                "$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}},
                "$ref": "#/$defs/A",
            }
        },
        "no text",
    ),
    ({"json": False}, "no schema"),
    ({"json": "[1]"}, "no schema"),
    ({"json": '{"type": '}, "not valid JSON"),
    ({"json": nested(2_000)}, f"more than {MAX_DEPTH}"),
    ({"json": '{"anyOf":[' * 90_000}, str(MAX_SIZE)),
    ({"json": {"enum": ["x" * MAX_SIZE]}}, str(MAX_SIZE)),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "[a-z"}, "unclosed character"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"regex": "a" * (MAX_SIZE + 1)}, str(MAX_SIZE)),
    ({"grammar": "start: x"}, "unknown name"),
    ({"grammar": "nothing here"}, "can't be read"),
    ({"grammar": "start: start"}, "no text"),
    ({"choice": ["x" * 1000] * 500}, str(MAX_SIZE)),
]


@pytest.mark.parametrize(("kinds", "words"), BAD, ids=range(len(BAD)))
def test_bad_grammars_are_refused(kinds, words):
    start = time.perf_counter()
    with pytest.raises(UserError, match=regex.escape(words)) as refusal:
        GRAMMARS.check(wish(**kinds, source="response_format"))
    assert refusal.value.param == "response_format"
    assert str(refusal.value).startswith("response_format ")
    assert len(str(refusal.value)) < 700
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice"),
        ({"choice": []}, "empty choice"),
        ({"choice": [""]}, "non-empty"),
        ({"choice": [1]}, "non-empty"),
        ({"choice": ["a"] * 2_000}, "limit"),
        ({"regex": " "}, "blank"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": 5}, "string"),
        ({"grammar": ""}, "blank"),
        ({"json": ""}, "blank"),
        ({"json": [1]}, "list"),
        ({"json_object": False}, "json_object"),
        ({"json_object": True, "disable_any_whitespace": 1}, "true or false"),
        ({"json_object": True, "whitespace_pattern": 1}, "string"),
    ],
)
def test_bad_wishes_are_refused(kinds, words):
    with pytest.raises(UserError, match=words) as refusal:
        wish(**kinds)
    assert refusal.value.param == "structured_outputs"


def test_params_from_plain_values():
    params = params_from({"structured_outputs": {"regex": "a", "json": None}})
    assert params.structured_outputs == wish(regex="a")
    with pytest.raises(NotSupported, match="structural_tag"):
        params_from({"structured_outputs": {"structural_tag": "x"}})
    with pytest.raises(UserError, match="StructuredOutputsParams"):
        SamplingParams(structured_outputs="a")


def test_hard_grammars_do_not_hold_the_engine_up():
    """C106: work is bounded at compile time and at each mask."""
    for pattern in (
        "((a{0,200}){0,200}){0,200}",
        "(a|b|ab)*c{1000}(a|b|ab)*d{1000}",
        "(.*a){30}.*",
        "[a-z]{0,5000}[0-9]{0,5000}x",
    ):
        start = time.perf_counter()
        own = state(SamplingParams(structured_outputs=wish(regex=pattern)))
        for byte in b"aab":
            if own.grammar.error or not own.grammar.allowed()[byte]:
                break
            own.append(byte)
        assert time.perf_counter() - start < 5, pattern


def test_a_model_without_an_end_is_refused():
    endless = Grammars(lambda: PIECES, (), V, ())
    with pytest.raises(UserError, match="end-of-text"):
        endless.check(wish(regex="a"))


def test_few_grammars_are_kept(monkeypatch):
    monkeypatch.setattr(grammar, "CACHED", 3)
    small = Grammars(lambda: PIECES, (EOS,), V, (EOS,))
    for i in range(9):
        small.check(wish(choice=[f"a{i}"]))
    assert len(small._compiled) == 3
    small.check(wish(choice=["a6"]))  # used again: the youngest
    small.check(wish(choice=["b"]))
    assert any("a6" in source for source in small._compiled)


def test_without_the_library_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    fresh = Grammars(lambda: PIECES, (EOS,), V, (EOS,))
    with pytest.raises(NotSupported, match="pip install llguidance"):
        fresh.check(wish(regex="a"))


def test_hash_vocabulary_is_whole():
    assert len(hash_grammars([0])._pieces()) == VOCABULARY
