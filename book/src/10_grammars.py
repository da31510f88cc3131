# %% [markdown]
# # 10 · Grammars
#
# [← 09 Engine and server](09_engine.ipynb) · [15 Measure →](15_measure.ipynb)
#
# ## The answer that no program can read
#
# A program asks a model a question, and a program will read the answer. It wants yes
# or no, a date, a JSON object with two fields. The model knows many more ways to say
# it. Here is the demo model, asked for a date as `YYYY-MM`, five times.

# %%
from pagedattn import LLM, SamplingParams, StructuredOutputsParams

llm = LLM(max_model_len=256)
ASK = "The war ended in May 1945. The date, written as YYYY-MM:"


def answers(wish, n=5, prompt=ASK, most=12):
    """What the model says to `n` seeds, and how each answer ended."""
    params = SamplingParams(n=n, seed=4, max_tokens=most, structured_outputs=wish)
    [out] = llm.generate([prompt], params, use_tqdm=False)
    return [(o.text, o.finish_reason) for o in out.outputs]


for text, _ in answers(None):
    print(repr(text))

# %% [markdown]
# One can ask politely, show examples, parse generously, and ask again when the parser
# fails. If the model gets it right in 95 of 100 cases, five programs of 100 crash.
# Here is the same model with a rule beside it:

# %%
date = StructuredOutputsParams(regex="(19|20)[0-9]{2}-(0[1-9]|1[0-2])")
for text, reason in answers(date):
    print(repr(text), reason)

# %% [markdown]
# Every answer is a date. Not every date is true: the rule decides the *form*, and the
# model still decides what is said. No weight has changed and nothing was asked twice.
# Before each token is chosen, every token that would break the rule gets the logit
# −∞, and the sampler of chapter 08 does the rest.
#
# That is the whole trick, and it hides one question. The rule speaks of characters.
# The model speaks in tokens, 49,152 of them, of which some are half a character and
# some are `"},`. *Which tokens may come next?* has to be answered for each token of
# each answer, in less time than the model needs to think of it. This chapter answers
# it for regular expressions in under 150 lines, and checks the answer, token by
# token, against the library that the engine uses.

# %% [markdown]
# ## Measure: trying every token
#
# The obvious way: for each token, put it behind the text so far and ask whether that
# can still become a match. Ordinary `re` can't be asked that; the `regex` package
# can, with `partial=True`.

# %%
import regex

tokenizer = llm.get_tokenizer()
WORDS = {
    i: piece
    for i, piece in enumerate(tokenizer.pieces())
    if i not in tokenizer.special_ids
}
DATE = date.regex


def try_all(so_far):
    """Ids of the tokens after which `so_far` can still become a date."""
    found = []
    for i, piece in WORDS.items():
        text = so_far + piece.decode(errors="replace")
        if regex.fullmatch(DATE, text, partial=True):
            found.append(i)
    return found


for so_far in ("", "19", "1945-1"):
    allowed = try_all(so_far)
    print(f"{so_far!r:9} {len(WORDS)} tries, allowed:", end=" ")
    print(*[tokenizer.token_str(i) for i in allowed])

# %% [markdown]
# It is right, and it is the specification that the tests hold the engine to. It is
# also 49,135 searches for ten survivors, and each search reads the text from its
# beginning. Where this was written, one such mask takes a third of a second. The demo
# model computes thirty tokens in a second.
#
# Two things are wasted. The text so far is read again and again, though the only
# thing that matters about it is *where in the rule* it has got to. And tokens are
# tried one by one, though hundreds of them begin with the same letter and fail there
# together. An automaton mends the first, a trie the second.

# %% [markdown]
# ## From an expression to an automaton
#
# An **automaton** is a table: for each state and each byte, the next state, or none.
# State 0 is the beginning; in some states the text may end. Whatever has been
# written, one number says all that the future can know of it.
#
# Expressions become automata in two steps, both from the 1960s. The first (Thompson,
# "Regular expression search algorithm", 1968) makes a loose one, in which a state may
# have several next states for a byte, and steps that need no byte at all. Each
# construct of the notation adds a few states between where it starts and where it
# ends. Bytes and not characters, because tokens are bytes: a letter outside ASCII is
# two to four steps in a row, and a token that ends in the middle of it is in a state
# like any other.


# %%
class Nfa:
    """States are numbers. `free[s]`: states reached without a byte; `steps[s]`: pairs
    (some bytes, the state that one of them leads to)."""

    def __init__(self):
        self.free, self.steps = [], []

    def state(self):
        self.free.append([])
        self.steps.append([])
        return len(self.free) - 1


# %% [markdown]
# The `Reader` goes through the text once, from left to right. `either` reads what
# stands between bars, `sequence` things in a row, `repeated` one thing and how often
# it comes, `atom` the thing itself. A bounded repetition, `{2,5}`, reads its thing
# again for each copy: `self.at = begin` jumps back. That is also the first trap. An
# automaton can't count, it can only have more states: `x{1000}` is a thousand of
# them, and `(x{1000}){1000}` would be a million.


# %%
class Reader:
    """One expression, read from left to right into an `Nfa`.

    Each method reads one kind of thing that starts in state `s`, and returns the
    state in which it ends.
    """

    def __init__(self, text):
        self.text, self.at, self.nfa = text, 0, Nfa()

    def sees(self, character):
        return self.text[self.at : self.at + 1] == character

    def take(self):
        self.at += 1
        return self.text[self.at - 1]

    def either(self, s):  # a|b|c
        ends = [self.sequence(s)]
        while self.sees("|"):
            self.take()
            ends.append(self.sequence(s))
        end = self.nfa.state()
        for e in ends:
            self.nfa.free[e].append(end)
        return end

    def sequence(self, s):  # abc
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            s = self.repeated(s)
        return s

    def repeated(self, s):  # a, a*, a+, a?, a{2,5}
        begin, start = self.at, self.nfa.state()
        self.nfa.free[s].append(start)  # a loop must not catch what came before
        end = self.atom(start)
        low, high = self.bounds()
        after = self.at
        ends = [start] if low == 0 else []
        for i in range(1, max(low, high or low)):
            if i >= low:
                ends.append(end)
            self.at = begin
            end = self.atom(last := end)
        if high is None:
            again = start if low < 2 else last
            self.nfa.free[end].append(again)
        self.at, done = after, self.nfa.state()
        for e in [*ends, end]:
            self.nfa.free[e].append(done)
        return done

    def bounds(self):
        for sign, pair in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self.sees(sign):
                self.take()
                return pair
        if not self.sees("{"):
            return 1, 1
        close = self.text.index("}", self.at)
        low, comma, high = self.text[self.at + 1 : close].partition(",")
        self.at = close + 1
        return int(low), (int(high) if high else None) if comma else int(low)

    def atom(self, s):  # (…), [a-z], ., \d, a letter
        c = self.take()
        if c == "(":
            end = self.either(s)
            assert self.take() == ")", "a group is not closed"
            return end
        if c == "[":
            return self.step(s, self.members())
        if c == ".":
            return self.step(s, set(range(32, 127)))
        if c == "\\":
            c = self.take()
            if c == "d":
                return self.step(s, set(b"0123456789"))
        for byte in c.encode():  # a letter may be several bytes, one after the other
            s = self.step(s, {byte})
        return s

    def step(self, s, some_bytes):
        end = self.nfa.state()
        self.nfa.steps[s].append((some_bytes, end))
        return end

    def members(self):
        found, negated = set(), self.sees("^")
        if negated:
            self.take()
        while not self.sees("]"):
            low = high = ord(self.take())
            if self.sees("-"):
                self.take()
                high = ord(self.take())
            found |= set(range(low, high + 1))
        self.take()
        return set(range(128)) - found if negated else found


# %% [markdown]
# The second step (Rabin and Scott, 1959) makes it strict. Where the loose automaton
# could be in several states at once, the strict one is in *one* state that stands for
# that set. The list `sets` grows while the loop walks along it, and ends when no new
# set turns up. A state of the result has at most one next state for each byte.


# %%
def closure(nfa, states):
    """All states reached from `states` without a byte."""
    found, new = set(states), list(states)
    while new:
        fresh = set(nfa.free[new.pop()]) - found
        found |= fresh
        new += fresh
    return frozenset(found)


def automaton(pattern):
    """(steps, accepting): state -> byte -> state, 0 the first; where it may end."""
    reader = Reader(pattern)
    first = reader.nfa.state()
    last = reader.either(first)
    nfa = reader.nfa
    sets, steps = [closure(nfa, {first})], []
    number = {sets[0]: 0}
    for here in sets:  # grows while we walk
        to = {}
        for state in here:
            for some_bytes, end in nfa.steps[state]:
                for byte in some_bytes:
                    to.setdefault(byte, set()).add(end)
        steps.append({})
        for byte, ends in sorted(to.items()):
            there = closure(nfa, ends)
            if there not in number:
                number[there] = len(sets)
                sets.append(there)
            steps[-1][byte] = number[there]
    return steps, {i for i, s in enumerate(sets) if last in s}


# %% [markdown]
# ## Picture: yes, no, perhaps
#
# Circles are states, arrows are bytes, a double ring means that the text may end
# here. The bounds of a repetition are copies; an open end is an arrow back.

# %%
from pagedattn.viz.automaton import machine, masks

machine(*automaton("yes|no+|[0-9]{2}"))

# %% [markdown]
# Is it the same language? `regex` must agree, for every text of up to six of these
# letters. The expressions are chosen to be nasty: loops in loops, empty options, an
# end that is also a middle.


# %%
from itertools import product

NASTY = ["(a|b)*abb", "(a*)*b", "x?(a{0,2}|b+)x", "(ab?|c){2,3}", "a{2,}", "[^a]x"]


def matches(table, text):
    """Whether an automaton takes the whole text."""
    (steps, accepting), state = table, 0
    for byte in text.encode():
        if byte not in steps[state]:
            return False
        state = steps[state][byte]
    return state in accepting


texts = ["".join(t) for n in range(7) for t in product("abcx", repeat=n)]
for pattern in NASTY:
    table = automaton(pattern)
    wrong = sum(matches(table, t) != bool(regex.fullmatch(pattern, t)) for t in texts)
    print(f"{pattern:16} {len(table[0]):3} states, {wrong} of {len(texts)} texts wrong")

# %% [markdown]
# ## From states to token masks
#
# A token is allowed in a state if the automaton can follow its bytes from there. To
# ask that of all tokens at once, put them into a *trie*: a tree in which a path of
# bytes from the root spells a token, so that tokens with the same beginning share the
# path. Then walk automaton and trie side by side. Where the automaton has no step for
# a byte, the whole branch below is out, a thousand tokens at a time. What is left is
# the **token mask** of the state.


# %%
def make_trie(pieces):
    """Nodes are pairs: byte -> node, and the ids of tokens that end here."""
    root = ({}, [])
    for i, piece in pieces.items():
        node = root
        for byte in piece:
            node = node[0].setdefault(byte, ({}, []))
        node[1].append(i)
    return root


def mask(steps, state, trie):
    """(ids of the tokens that keep the automaton going, nodes looked at)."""
    ids, looked, todo = [], 0, [(trie, state)]
    while todo:
        (children, own), here = todo.pop()
        looked += 1
        ids += own
        for byte, child in children.items():
            if byte in steps[here]:
                todo.append((child, steps[here][byte]))
    return ids, looked


trie = make_trie(WORDS)
steps, accepting = automaton(DATE)
for so_far in ("", "19", "1945-1"):
    state = 0
    for byte in so_far.encode():
        state = steps[state][byte]
    ids, looked = mask(steps, state, trie)
    same = sorted(ids) == try_all(so_far)
    print(f"{so_far!r:9} {looked} nodes looked at, {len(ids)} allowed, same: {same}")

# %% [markdown]
# Eighteen looks in place of 147,405, and the same masks. That is all: `Nfa`, `Reader`,
# `closure`, `automaton`, `make_trie` and `mask`, 150 lines. What remains of a step is
# to follow the chosen token's bytes, one look-up each.
#
# Below are masks after some beginnings of an answer. Look at the third row. After
# `ye` the next token may be `s`, or `s` and more if the rule goes on; it may not be
# `yes`. A filter that compares whole words would get this wrong; the automaton can't,
# because it was never told where tokens begin.

# %%
RULE = "(yes|no), (because|since) [a-z ]+"
SHOWN = ["y", "ye", "yes", "s", "no", ",", " be", "cause", " since", "!"]
steps, accepting = automaton(RULE)
rows = {}
for so_far in ("", "n", "ye", "yes", "no,", "no, since", "no, since s"):
    state = 0
    for byte in so_far.encode():
        state = steps[state][byte]
    allowed = set(
        mask(steps, state, make_trie(dict(enumerate(map(str.encode, SHOWN)))))[0]
    )
    rows[so_far or "(nothing yet)"] = allowed
masks(SHOWN, rows)

# %% [markdown]
# > **Takeaway.** A rule about characters becomes a rule about tokens by walking two
# > things side by side: the state that the text so far has led to, and a tree of all
# > tokens' bytes. A token may come next if its bytes can be followed; the end may
# > come if the state accepts.

# %% [markdown]
# ## Checked against the engine's parser
#
# The engine leaves this work to a library, llguidance, whose parser does more than
# automata can. On regular expressions the two must agree exactly. We let each rule be
# followed at random, ask both for the mask at every step, and compare all 49,152
# bits. End-of-text is one of them: it is in the mask where the state accepts.

# %%
from random import Random

RULES = [
    DATE,
    RULE,
    r"[a-z0-9._]{1,20}@[a-z]{2,10}\.(com|org)",
    r'\{"name": "[a-z]+", "age": [1-9][0-9]?\}',
    "(日本|🦙)+!",
]
grammars = llm.llm_engine.runner.grammars
EOS = tokenizer.eos_id


def agree(rule, seed, most=25):
    """Masks compared on one random walk; AssertionError where they differ."""
    (steps, accepting), state, rng = automaton(rule), 0, Random(seed)
    wish = StructuredOutputsParams(regex=rule)
    matcher = grammars.matcher(SamplingParams(structured_outputs=wish))
    for step in range(most):
        ids, _ = mask(steps, state, trie)
        ours = sorted([*ids, EOS] if state in accepting else ids)
        assert ours == matcher.allowed().nonzero()[0].tolist(), (rule, step)
        if not ids:
            return step + 1
        token = rng.choice(sorted(ids))
        matcher.advance(token)
        for byte in WORDS[token]:
            state = steps[state][byte]
    return most


for rule in RULES:
    print(sum(agree(rule, seed) for seed in range(4)), "masks equal:", rule)

# %% [markdown]
# Three things are easy to get wrong here, and each has been.
#
# *The end.* End-of-text belongs to the mask in accepting states only, and **all** of
# a model's end-of-text tokens do. An engine that knows of one and masks only that one
# lets the others cut a JSON object in two.
#
# *Special tokens.* `<|im_end|>` has a spelling. If the rule allows the characters
# `<`, `|` and so on, it must not allow the token, which would end the turn. They are
# left out of the trie.
#
# *Forced text.* Where the rule leaves one way to go on, as in `"name": "`, some
# engines skip the model and append the text, or allow only the tokens that the
# tokenizer itself would choose. That saves steps. It is an optimisation with a
# meaning: the model may have wanted the same text in other tokens. Ours is turned
# off, so that a mask is *every* token that the rule can go on with.

# %% [markdown]
# ## What an automaton can't do
#
# JSON nests. `[[1], [[2]]]` must close what it opened, in order, and a table of states
# has no place to note how deep it is. One can unroll the nesting, and pay for it:

# %%
inside = "[0-9]"
for depth in range(1, 7):
    inside = rf"\[({inside}(,{inside})*)?\]"
    if depth < 5:
        print(f"lists, {depth} deep: {len(automaton(inside)[0]):4} states,", end=" ")
        print(f"an expression of {len(inside):5} characters")
print(f"                 6 deep: an expression of {len(inside)} characters")

# %% [markdown]
# A *context-free* **grammar** names its parts and lets them contain each other, and
# its parser keeps a stack. llguidance's is Earley's (1970), which follows all ways to
# read the text at once, over a lexer of small automata which are built as they are
# needed. A JSON schema is translated to such a grammar: an object is its properties
# in the schema's order, a `$ref` is a name. What a parser may cost grows with what it
# is asked, so it is given *fuel*, and a rule that burns it up is refused, or ends the
# request that brought it, with an error, and nobody else's.
#
# We tried two libraries on the demo's vocabulary, on one core:
#
# | | llguidance 1.9.1 | xgrammar 0.2.9 |
# | --- | --- | --- |
# | brings with it | nothing | torch, triton, transformers, a runtime |
# | import | 10 ms | 1,600 ms |
# | vocabulary, once | 135 ms | 50 ms |
# | compile a person's schema | 0.9 ms | 6 ms |
# | compile 100 nested objects | 13 ms | 1,070 ms |
# | compile an e-mail address | 0.9 ms | 46 ms |
# | a mask in JSON, median | 7 µs | 9 µs |
# | a mask in the address, median / mean | 87 / 84 µs | 11 / 178 µs |
# | `enum: []`, `minLength` > `maxLength` | refused | refused |
# | `uniqueItems`, `not`, `contains` | refused by name | not compared |
#
# xgrammar prepares masks while it compiles, llguidance while it runs. A server whose
# clients each bring their own schema compiles often; that, and the absence of
# dependencies, decided. One token of the demo model takes some 30 ms, and a mask under
# a hundredth of that.

# %% [markdown]
# ## In the engine: a wish, checked at the door
#
# The wish is a `StructuredOutputsParams`, with vLLM's names: exactly one `kind` of
# `json`, `regex`, `choice`, `grammar` and `json_object`. `_check_texts` refuses what
# is empty or of another type. `fault` makes the error, under the name that the caller
# used: over HTTP the same wish may have come as OpenAI's `response_format`.
# `grammar_from` makes one from plain JSON and refuses names it doesn't know.

# %%
from pagedattn import request as requests
from pagedattn.book import show

show(requests.StructuredOutputsParams, requests.grammar_from)

# %% [markdown]
# `source_of` writes each kind in the library's notation, and the text is also the key
# under which the compiled grammar is kept. `_json_source` adds how much white space
# there may be: up to 64 characters in a row, where JSON says any number, because small
# models like to indent for ever. `_schema` reads the schema, `_check_size` and
# `_check_depth` bound it before anybody recurses into it (a schema of 2,000 nested
# `anyOf` overflows a parser's stack, and has killed servers), `closed` forbids
# properties that are not listed, if asked. `_literal` escapes a choice, `_lark` reads
# grammars in two notations, `_library` says how to install what is missing, and
# `reason_of` takes from the library's error what a caller can use.

# %%
from pagedattn.sampling import grammar

show(grammar.source_of, grammar._json_source, grammar._schema, grammar._check_size)
show(grammar._check_depth, grammar.closed, grammar._literal, grammar._lark)
show(grammar._library, grammar.reason_of)

# %%
from pagedattn.errors import UserError

ring = {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}
for given in (
    {"json": {"type": "strin"}},
    {"json": {"type": "array", "uniqueItems": True}},
    {"json": ring},
    {"regex": "[a-z"},
    {"regex": "(?=a)b"},
    {"choice": ["yes"], "regex": "no"},
):
    try:
        grammars.check(StructuredOutputsParams(**given))
    except UserError as refusal:
        print(str(refusal).splitlines()[0][:100])

# %% [markdown]
# The third is a schema that refers to itself and to nothing else. The library
# compiles it, without complaint, to a parser that can't take a step. So the first
# mask is computed at the door as well: a grammar that allows nothing, and is not
# complete either, is refused.

# %% [markdown]
# ## In the engine: compile once, follow many
#
# `Grammars` holds one vocabulary and the last 128 compiled grammars. `check` is what
# the intake calls, in another thread than the event loop's; `matcher` is what the
# runner calls when a request starts. Both go through `_machine`, which copies the
# compiled parser: 7 µs, where compiling takes a thousand. `_make_words` waits for the
# first request that needs it. `_Words` hands the vocabulary over, through `_Pieces`;
# its `compile` makes parsers and `mask` asks one for its bits.
#
# A `Matcher` follows one sequence. `allowed` is the mask: the parser's, without ending
# tokens, then with them if the text is complete. `block` puts it on a row of logits,
# before any other filter. `advance` takes note of the token that was chosen, and
# `_count_digits` of how many digits there have been in a row: a JSON number may be
# endless, and a model that likes sevens would see to it. `error` says why a parser
# gave up. `ended` is true when the last token completed the text and nothing can
# follow; the scheduler then ends the request at once, without a step for an
# end-of-text token that was the only choice anyway.

# %%
show(grammar.Grammars, grammar.Matcher)
show(grammar._Words, grammar._Pieces)

# %% [markdown]
# Where does the matcher live? In the `SampleState` of chapter 08, beside the counts
# for penalties, and under the same rule: made again from the same tokens, it is the
# same. A preempted request forgets it, and when it comes back its output is fed to a
# fresh copy. Each of `n` siblings has its own. An abort drops it. The prompt never
# meets it, so chunks and prefix hits can't touch it.

# %%
person = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
wish = StructuredOutputsParams(json=person, disable_any_whitespace=True)
story = "Ann is 42 years old. As JSON:"
for text, reason in answers(wish, n=3, prompt=story, most=32):
    print(reason, text)

# %% [markdown]
# ## Proof: whatever the model wants
#
# The promise is about the grammar, not the model, so the proof uses the worst model
# there is: logits drawn at random. Whatever they are, the text must match, or stop
# at the limit. Hypothesis chooses rule and seed.

# %%
import numpy as np
import torch
from hypothesis import strategies as st

from pagedattn.book import broken, falsify, holds
from pagedattn.sampling.grammar import Grammars, Matcher
from pagedattn.sampling.sampler import sample
from pagedattn.sampling.state import SampleState

SMALL = [bytes([b]) for b in range(32, 127)] + [b"ab", b"yes", b"no,", b"00", b"<end>"]
END = len(SMALL) - 1
small = Grammars(lambda: SMALL, {END}, len(SMALL), {END})


def said(rule, seed):
    """(text, whether it came to an end) of a model that says anything."""
    wish = StructuredOutputsParams(regex=rule)
    params = SamplingParams(max_tokens=60, structured_outputs=wish)
    matcher, rng = small.matcher(params), np.random.default_rng(seed)
    state = SampleState(params, seed, len(SMALL), [0], eos_ids=[END], grammar=matcher)
    while len(state.output_ids) < params.max_tokens:
        row = rng.normal(0, 3, (1, len(SMALL))).astype("f")
        state.append(sample(torch.from_numpy(row), [state])[0].token)
        if state.ended or state.output_ids[-1] == END:
            break
    words = [SMALL[i] for i in state.output_ids if i != END]
    return b"".join(words).decode(), state.ended or state.output_ids[-1] == END


def the_text_matches(rule, seed):
    text, finished = said(rule, seed)
    assert not finished or regex.fullmatch(rule, text), (rule, text)


rules = st.sampled_from(["(yes|no)+", "[0-9]{2,4}", "(ab)*c", "a?b?c?d", "x[^x]+x"])
holds(the_text_matches, rules, st.integers(0, 999))

# %% [markdown]
# Now let the end be allowed anywhere, which several engines did when a model had more
# than one end-of-text token. And let every other id go by
# unnoticed.

# %%
with broken(Matcher.allowed, "if self._machine.is_accepting():", "if True:"):
    falsify(the_text_matches, rules, st.integers(0, 999))

# %%
with broken(Matcher.advance, "not in self._never", "not in self._never and token % 2"):
    falsify(the_text_matches, rules, st.integers(0, 999))

# %% [markdown]
# And schedules: the exact model of chapter 05, a pool of eleven blocks, six requests
# with rules and without. Each must say what it says alone.

# %%
from pagedattn.testing import hash_engine, hash_grammars, naive_generate

exact = hash_grammars(eos_ids=[7])
free, bound = None, StructuredOutputsParams(regex="(?s).{6,30}")
engine = hash_engine(
    eos_ids=[7], grammars=exact, block_size=4, num_blocks=12, max_num_batched_tokens=6
)
asked = {}
for i in range(6):
    wish = bound if i % 2 else free
    params = SamplingParams(max_tokens=14, seed=i, structured_outputs=wish)
    asked[f"r{i}"] = engine.intake.accept(f"r{i}", list(range(9)), params)
    engine.add(asked[f"r{i}"])
told = {}
while engine.has_unfinished_requests():
    told |= {output.request_id: output.outputs[0] for output in engine.step()}
for name, ask in asked.items():
    alone, _ = naive_generate(ask.requests[0], grammars=exact)
    print(name, "as alone:", list(told[name].token_ids) == alone)
print("preempted:", engine.scheduler.preemptions > 0)

# %% [markdown]
# Two honest limits. A rule makes the *form* sure, not the sense: force a model into a
# form that it would never write, and it says something it would never say. Show the
# form in the prompt, too. And an answer that meets `max_tokens` in the middle of an
# object is cut there, with `finish_reason` `length`; a program must look at it before
# it parses.

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex10_grammars.py` is `pagedattn/sampling/grammar.py` without the
# bodies of `allowed`, `advance`, `_check_depth` and `closed`. `make exercise N=10` runs
# the engine's tests on your file and ends with one hint; `make hint N=10` gives a hint
# alone. Then `PAGEDATTN_STUDENT=10 make serve` serves JSON through your masks.
#
# **Find the bug.** In `exercises/bug10_grammars.py`; `make exercise N=bug10` shows
# what fails. What was seen: with most models JSON is whole. With a few it stops in the
# middle of an object, now and then, `finish_reason` "stop".
#
# **Measure.** Walk the trie for `"[a-zA-Z ,.]{0,40}"` and count the nodes that are
# looked at for the first mask. Now count them for `[0-9]{4}`. A mask depends on the
# state alone: keep those that were computed, and count again over one answer of forty
# letters. How many different states does it see, and why does keeping them help so
# little here and so much for `[a-z]*`?
#
# **Question.** The first rule was a mask on tokens, and one renormalises what is left.
# Is an answer then drawn from the model's own distribution over *answers that match*?
# Think of a rule with two answers, one of which begins with a likely token and goes on
# with a very unlikely one.
#
# <details><summary>Discussion</summary>
#
# *Build.* `allowed` is where the ends belong: out of the mask first, whatever the
# parser says, and in again only if the text is complete. `_check_depth` must not
# recurse, or a deep schema breaks the check that was to keep it out.
#
# *Find the bug.* A model may list several end-of-text tokens. The mistake lets the
# second and later ones through at any time. vLLM had it in this form (pull request
# 49227, issue 52146); SGLang had the mirror image, a grammar that could never end,
# because the tokenizer's own end-of-text token was not in the model's configuration
# (issue 31533).
#
# *Measure.* Some 97,000 nodes for the letters, since nearly every token is letters;
# eleven for the digits. Forty letters are 41 states, each seen once, so there is
# nothing to keep; `[a-z]*` has one state for ever. This is why both libraries cut the
# vocabulary into slices that are surely allowed or surely not inside a string.
#
# *Question.* No. Suppose "no" starts with probability 0.9 and then needs a comma that
# has probability 0.01, while "yes." has 0.1 and then 1. Among matching answers the
# model holds 0.009 against 0.1. Masking token by token draws "no" nine times of ten.
# The exact way needs the probability of *all* continuations, which nobody has; one can
# sample several answers and weigh them. It is a good reason to keep rules loose where
# looseness does no harm.
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# - **The wish** is `vllm/sampling_params.py: StructuredOutputsParams`, with the same
#   kinds and one more, `structural_tag`: free text in which a tag opens a part that
#   has a schema, as tool calls do. The older `guided_json` and its kin are gone; our
#   server says what to use in their place.
# - **Compiling** is `vllm/v1/structured_output/__init__.py: StructuredOutputManager`:
#   a pool of threads, and a status `WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR` in which a
#   request waits, passed by others. Ours waits in its caller's thread, before it gets
#   into the line.
# - **Backends** are four: `backend_xgrammar.py` (the first choice of `auto`),
#   `backend_guidance.py`, `backend_outlines.py`, `backend_lm_format_enforcer.py`. The
#   server picks by what a schema needs; a request can't.
# - **Masks** are filled by the scheduler's process while the model runs,
#   `get_grammar_bitmask`, one row for each request and one more for each draft token,
#   and put on the logits on the GPU by a kernel, before the sampler. We have the CPU
#   do both. With 128 constrained requests vLLM fills them in several threads.
# - **Ends.** The grammar ends with an end-of-text token, which costs one step; ours
#   ends the request with its last token.
# - **Reasoning.** With a reasoning parser the grammar waits for the end of the
#   thinking (`enable_in_reasoning` turns that off).
# - **Left out here:** structural tags, choosing a backend, grammars under speculation.
#   llama.cpp has its own grammar notation, GBNF, which our `grammar` also reads.
#
# Next: how fast it is, and how one knows, [15 Measure →](15_measure.ipynb)
