# %% [markdown]
# # 08 · Sampling
#
# [← 07 Triton kernels](07_triton.ipynb) · [09 Engine and server →](09_engine.ipynb)
#
# ## One seed, nine different words
#
# A model does not say a word. For each token of its vocabulary it gives a score;
# SmolLM2 gives 49,152 of them. These scores are the **logits**. Something else has to
# turn them into one token, and that something is the *sampler*.
#
# Ann sends a request with `seed=42`. That is her way of asking for the same answer
# whenever she asks the same question. Twelve tokens come back. She sends the request
# again, and nine of the twelve are different. The model is the same, the prompt is
# the same, the seed is the same. What changed is that a stranger was in the batch for
# three steps.
#
# This chapter builds a sampler in which that can't happen. On the way it explains
# each wish that a caller may have (temperature, top-k, top-p, penalties and the
# others) and the order in which they are granted, because the order changes the
# answer.

# %% [markdown]
# ## A sampler in seven lines
#
# Ten words could follow "softly falls the". To be able to follow by eye we use these
# ten in place of 49,152, and let the model say the same at every position. *Softmax*
# turns logits into probabilities: divide by the temperature, raise e to that power,
# divide by the sum. A temperature under 1 makes likely words likelier. `top_p` keeps
# the likeliest words that together hold that share, and drops the tail.

# %%
import numpy as np
from numpy.random import default_rng

WORDS = "night rain snow stars sea hill roof cold bright page".split()
SHARES = np.array([0.30, 0.22, 0.14, 0.10, 0.08, 0.06, 0.04, 0.03, 0.02, 0.01], "f")
ROW = np.log(SHARES)  # logits: softmax gives the shares back


def naive(row, temperature, top_p, rng):
    p = np.exp((row - row.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: np.searchsorted(np.cumsum(p[order]), top_p) + 1]
    reached = np.cumsum(p[kept]) / p[kept].sum()
    return kept[np.searchsorted(reached, rng.random())]


rng = default_rng(seed=42)
print(*[WORDS[naive(ROW, 1.0, 0.95, rng)] for _ in range(12)])

# %% [markdown]
# It works. Run it again with the same seed and the same twelve words come. The
# trouble starts when the generator `rng` serves more than one request. A generator is
# a state: each call moves it on, and what a request gets depends on who else has
# called.

# %% [markdown]
# ## Measure: what an event costs
#
# Three places where the random numbers may come from:
#
# - *shared*: one generator for the engine, seeded once;
# - *own*: one generator for each request, made when the request starts;
# - *counter*: no generator. The number is a function of the seed and the position.
#
# And three things that happen in every serving engine: a neighbour joins for a while;
# a prompt is computed in two chunks, and the sampler's work for the unfinished one is
# thrown away; a request is preempted and made again from its tokens. A script writes
# each as a line of letters. `A` is a token for Ann, `c` one for Cyd, `x` a draw of
# Ann's that is thrown away, `!` a preemption.

# %%
from pagedattn.sampling.random import Purpose, uniform
from pagedattn.sampling.sampler import pick

SCRIPTS = {
    "alone": "AAAAAAAAAAAA",
    "a neighbour for three steps": "AAAcAcAcAAAAAAA",
    "prompt in two chunks": "xAAAAAAAAAAAA",
    "preempted after five tokens": "AAAAA!AAAAAAA",
}


def words(draw, script, resume=lambda: None):
    """Ann's words; `draw(who, position)` gives the numbers."""
    said = []
    for act in script:
        if act == "!":
            resume()
            continue
        u = draw("Cyd" if act == "c" else "Ann", len(said))
        said += [pick(SHARES, u)] if act == "A" else []
    return said


# %%
def shared(script):
    rng = default_rng(42)
    return words(lambda who, position: rng.random(), script)


def own(script):
    rngs = {}

    def draw(who, position):
        return rngs.setdefault(who, default_rng(42)).random()

    return words(draw, script, resume=rngs.clear)


def counter(script):
    return words(lambda who, at: uniform(42, 0, at, Purpose.TOKEN), script)


print("of Ann's 12 words differ:      shared   own   counter")
for title, script in SCRIPTS.items():
    lost = [
        sum(a != b for a, b in zip(f(SCRIPTS["alone"]), f(script), strict=True))
        for f in (shared, own, counter)
    ]
    print(f"{title:30} {lost[0]:6} {lost[1]:5} {lost[2]:9}")

# %% [markdown]
# A generator for each request survives the neighbour and nothing else, unless
# somebody rewinds it after a chunk and keeps it through a preemption. Both are
# possible, and both have been forgotten in real engines (the last section names
# them). The counter needs no care, because there is nothing to take care of.

# %% [markdown]
# ## Picture: ten candidates, four cuts, one draw
#
# The book's ten blocks, each filled as high as its word is likely. Read it from top
# to bottom. Temperature moves probability and cuts nobody. `min_p` cuts what is less
# likely than a tenth of the likeliest. `top_k` keeps five. `top_p` keeps the shortest
# beginning that holds 80 % of what is left: two words hold 70 %, so the third, with
# which the sum crosses 80 %, stays as well. Last comes one number between 0 and 1. It
# falls somewhere on the line that the survivors share, and there stands the token.
#
# The engine's own filters do the cutting. Ann's prompt has 12 tokens and "softly
# falls the" three more, so the number is the one that belongs to position 15.

# %%
from pagedattn.request import SamplingParams
from pagedattn.viz.candidates import funnel

wish = SamplingParams(temperature=0.7, min_p=0.1, top_k=5, top_p=0.8)
funnel(ROW, WORDS, wish, uniform(42, 0, 15, Purpose.TOKEN))

# %% [markdown]
# Why so many ways to cut? Because a real distribution has another shape at each
# position. The demo model continues a story, greedily, and says after each word how
# likely it was, and how many of 49,152 tokens are needed to hold 90 %.

# %%
from pagedattn import LLM
from pagedattn.sampling.filters import nucleus

llm = LLM(max_logprobs=-1, max_model_len=256)
greedy = SamplingParams(temperature=0, max_tokens=12, logprobs=-1)
out = llm.generate(["Once upon a time there was a little"], greedy, use_tqdm=False)
for scores in out[0].outputs[0].logprobs:
    best = next(iter(scores.values()))
    weights = np.exp(np.array([s.logprob for s in scores.values()], "f"))
    held_by = len(nucleus(weights, 0.9))
    print(f"{best.decoded_token:12} {np.exp(best.logprob):5.0%} {held_by:6}")

# %% [markdown]
# After "was a little" a hundred tokens share the 90 %; after "surrounded", "by" has
# it alone. A fixed `top_k=40` would be too few in the first place and too many in the
# second. This is why `top_p` exists (Holtzman et al., "The curious case of neural
# text degeneration", 2020), and `min_p` is a cheaper answer to the same question.

# %% [markdown]
# ## The idea
#
# Three kinds of step, in one fixed order:
#
# | | what | fields | can it change the likeliest token? |
# | --- | --- | --- | --- |
# | 0 | note the raw log-probabilities, if asked | `logprobs` | |
# | 1 | allow some tokens only | `allowed_token_ids` | yes |
# | 2 | block the end of a bad word | `bad_words` | yes |
# | 3 | block every end while the answer is too short | `min_tokens` | yes |
# | 4 | add to some logits | `logit_bias` | yes |
# | 5 | penalise what was said | `repetition_`, `frequency_`, `presence_penalty` | yes |
# | 6 | take the likeliest, if greedy; else go on | `temperature=0` | |
# | 7 | divide by the temperature | `temperature` | no |
# | 8 | drop the unlikely | `min_p`, `top_k`, `top_p` | no |
# | 9 | draw one of the rest | `seed` | |
#
# Steps 7 and 8 never cost the likeliest token its place, so a greedy request skips
# them. And each request goes through the table alone, over its own row of logits.
#
# > **Takeaway.** A token is a pure function of one row of logits, the request's own
# > parameters and tokens, and (seed, sibling, position). Nothing is remembered that
# > is not in this list, so nobody's presence, and no chunk, preemption or retry, can
# > change a token.

# %% [markdown]
# ## The wish: every field is checked once, at the door
#
# A caller's wish is a `SamplingParams`. Names, defaults and limits are vLLM's, so
# that clients need no change. A bad value has to be refused before any work is done,
# and the refusal names the field, the value and the limit. Seven small functions do
# that. `_real` takes a number within limits; it asks whether the number is *not*
# inside, which is true of NaN as well, where "is it outside" would be false. `_whole`
# takes a whole number and `_flag` a true or false, since `True` is an `int` to Python
# and `n=True` is a mistake to us. `_items`, `_strings` and `_ids` take lists, with an
# upper bound on their length. `_top` reads how many log-probabilities are wanted:
# none, some, or `-1` for all.

# %%
from pagedattn import request as requests
from pagedattn.book import show

show(requests._real, requests._whole, requests._flag)
show(requests._items, requests._strings, requests._ids, requests._top)

# %% [markdown]
# The class `SamplingParams` is long because wishes are many. `_check_numbers` does
# the single numbers and ends with `_settle_temperature`: below 1e-5 means `greedy`,
# and the filters are reset, because they could not matter; a positive temperature
# under 0.01 is raised to it, as in vLLM, which fears for its numerics below.
# `_check_lengths` relates `min_tokens` to `max_tokens`. `_check_lists` copies and
# de-duplicates lists. What depends on the model waits for `check_model`: ids within
# the vocabulary, and no more log-probabilities than the server allows. `_bias` turns
# the keys of JSON, which are texts, into token ids and clips amounts to ±100.
# `params_from` makes all of it from a plain dictionary and refuses names that it does
# not know: a misspelt `temprature` that is silently ignored is worse than an error.

# %%
show(requests.SamplingParams, requests._bias, requests.params_from)

# %%
from pagedattn.errors import UserError

for given in (
    {"temperature": float("nan")},
    {"n": True},
    {"n": 2, "temperature": 0},
    {"min_tokens": 9, "max_tokens": 5},
    {"temprature": 0.7},
):
    try:
        requests.params_from(given)
    except UserError as refusal:
        print(refusal)

# %% [markdown]
# ## What a request remembers
#
# The sampler keeps no state of its own, but penalties and bad words look back at what
# was said. A `SampleState` holds one request's parameters, seed, and tokens, and what
# is worked out from them once. Its `position` is the number of tokens before the next
# one. `greedy` and `shaped` answer "can this row skip work?"; `holding` says whether
# `min_tokens` still applies, and `held_ids` are *all* ids that end a text. `_known`
# leaves out ids that the logits have no column for, and `_bias`, `_words` and
# `_counts` prepare bias, bad words and counts with it. `num_logprobs` and
# `num_prompt_logprobs` say how many candidates to report, and `_many` reads `-1` as
# the whole vocabulary. `append` takes note of a sampled token.
# `ended` and the field `grammar` belong to chapter 10.
#
# Counting must not cost more as the answer grows. `TokenCounts` keeps the distinct
# `ids` and their `counts` in two arrays; `add` is one dictionary look-up, and `_grow`
# doubles the arrays. Made again from the same tokens, after a preemption, both are
# what they were: nothing in them depends on how the tokens came about.

# %%
from pagedattn.sampling import filters, logprobs, penalties, random, sampler, state

show(state.TokenCounts, state.SampleState)

# %% [markdown]
# ## Shape: masks, bias and penalties
#
# `shape` grants wishes 1 to 5 of the table, on a copy, so that the raw row stays what
# the model said. A blocked token gets −∞, and neither bias nor penalty brings it
# back. `allow_only` blocks all but some. `block_bad_words` blocks the last token of a
# word, and only where its other tokens end the output: to block "New York", "York" is
# blocked after "New" and nowhere else. `penalize` is the repetition penalty: positive
# logits are divided and negative ones multiplied, so that both move down, for each
# token of prompt or output, however often it came. `discourage` is OpenAI's pair: it
# subtracts `frequency` for each time, and `presence` once, for tokens of the output.

# %%
show(penalties.shape, penalties.allow_only, penalties.block_bad_words)
show(penalties.penalize, penalties.discourage)

# %% [markdown]
# What the three penalties do to the ten words after the answer "night night rain".
# The first row is what the model says; logits of probabilities are negative, so the
# repetition penalty multiplies. Each of the three is set so that "rain", said once,
# drops by about the same.

# %%
heard = dict(seed=42, vocab_size=10, prompt_ids=[], output_ids=[0, 0, 1])
print(" " * 24, *[f"{word:>6}" for word in WORDS[:5]])
print(f"{'logits':24}", *[f"{x:6.2f}" for x in ROW[:5]])
for penalty, amount in (
    ("repetition_penalty", 1.5),
    ("frequency_penalty", 0.75),
    ("presence_penalty", 0.75),
):
    change = SamplingParams(**{penalty: amount})
    shaped = penalties.shape(ROW, state.SampleState(change, **heard))
    print(f"{penalty:18} {amount:5}", *[f"{x:6.2f}" for x in shaped[:5]])

# %% [markdown]
# The order is part of the contract. A logit of −1 gets a bias of 4, and its token was
# in the prompt with a repetition penalty of 2. Bias first, as here and in vLLM: 3,
# which is positive, is divided. Penalty first would give −2 + 4.

# %%
minus_one = np.full(10, -1, "f")
both = SamplingParams(logit_bias={2: 4.0}, repetition_penalty=2.0)
said = state.SampleState(both, seed=42, vocab_size=10, prompt_ids=[2])
print("bias, then penalty:", penalties.shape(minus_one, said)[2])
print("penalty, then bias:", minus_one[2] * 2 + 4)

# %% [markdown]
# ## Filters: who may still be drawn
#
# Everything that ranks tokens needs one order, or two of them will disagree about
# equal logits. Ours is: larger value first; of equal values, the lower id. `first`
# gives the `n` first ids without sorting (a partition is linear in the vocabulary),
# and `ranked` puts them in order. So "top k" is k tokens even where logits are equal.
#
# `contenders` cheapens the rest. After top-k, k tokens are left. Without top-k,
# tokens whose weight is under e⁻⁵⁰ of the largest are left out: 262,144 of them would
# weigh 5 × 10⁻¹⁷, less than float64's rounding of 1, and no draw could tell.
# `survivors` then computes weights, applies `min_p` and `top_p`, and keeps track of
# whose weights they are through `_narrow`. Min-p and top-k both keep a beginning of
# the one order, so it does not matter which comes first; top-p is a share of what
# they left, and comes last.

# %%
show(filters.first, filters.ranked, filters.contenders)
show(filters.survivors, filters._narrow)

# %% [markdown]
# Top-p asks for the likeliest tokens until their sum reaches p. The naive way sorts
# the vocabulary. `nucleus` avoids the sort with a fact about floats: those that are
# not negative are ordered as their bits are, read as whole numbers. The upper bits
# file each weight in a drawer, adding up the drawers finds the one in which the sum
# crosses p, and only that drawer is sorted. The one character to look for is the
# `+ 1` in the last line but one: it keeps the token that crosses.

# %%
show(filters.nucleus)
peaky = np.exp(default_rng(1).normal(0, 3, 49_152).astype("f"))
peaky /= peaky.max()
drawers = peaky.view(np.int32) >> filters.DRAWER_BITS
print("kept by top_p = 0.9:", len(nucleus(peaky, 0.9)), "of", len(peaky))
print(
    "drawers:",
    len(np.unique(drawers)),
    " the fullest holds",
    np.bincount(drawers).max(),
)

# %% [markdown]
# ## A number without a memory
#
# A stateful generator is a function that is applied to its own result: to know its
# millionth number you make a million. A *counter-based* generator is a function of
# the count. `philox` (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
# 2011) takes a counter of four 32-bit words and a key of two, and stirs them ten
# times with multiplications whose high and low halves are crossed. The paper reports
# that it passes BigCrush, the hardest of the usual test batteries, and any of its
# numbers costs the same. It is also PyTorch's generator on GPUs, where thousands of
# threads need numbers at once and none can wait for another.
#
# `uniform` is where a request's identity goes in. The key is the seed. The counter is
# position, sibling and `Purpose`, so the same seed gives an independent number for
# each position of each of the `n` answers, and for whatever else may need one: a
# `Purpose` has one member today, and speculative decoding will add its own.
# Arithmetic is in whole numbers, so the bits are equal on every platform; a test pins
# them.

# %%
show(random.Purpose, random.philox, random.uniform)

# %% [markdown]
# Why a sibling number, and not another seed for each? With `seed + i`, the second
# answer to a request with seed 5 is the first answer to a request with seed 6: two
# callers who chose neighbouring seeds get each other's answers. As counters they have
# nothing in common.

# %%
for title, number in [
    ("seed 5, sibling 1, as seed + 1 ", uniform(5 + 1, 0, 9, Purpose.TOKEN)),
    ("seed 6, sibling 0              ", uniform(6, 0, 9, Purpose.TOKEN)),
    ("seed 5, sibling 1, as a counter", uniform(5, 1, 9, Purpose.TOKEN)),
]:
    print(title, f"{number:.6f}")

# %% [markdown]
# So `n=3` is three requests that differ in one number, and sibling 0 gives what the
# caller would have got with `n=1`. The three share the prompt's blocks (chapter 04).

# %%
three = SamplingParams(n=3, seed=42, temperature=0.8, top_p=0.9, max_tokens=9)
one = SamplingParams(n=1, seed=42, temperature=0.8, top_p=0.9, max_tokens=9)
prompt = "Once upon a time there was a little"
[asked_three] = llm.generate([prompt], three, use_tqdm=False)
[asked_one] = llm.generate([prompt], one, use_tqdm=False)
for sibling in asked_three.outputs:
    print(sibling.index, sibling.text)
print("first of three = the only one:", end=" ")
print(asked_three.outputs[0].text == asked_one.outputs[0].text)

# %% [markdown]
# A caller without a **seed** still gets one: the intake draws it at arrival, once,
# and from then on the request is as repeatable within its life as any other. That is
# what lets a preempted answer continue as if nothing had happened.

# %% [markdown]
# ## The draw
#
# One number between 0 and 1, one line shared out among the survivors: `pick` finds
# whose part it falls in. A running sum over 262,144 weights is slow in numpy, so it
# sums chunks of 256 first and then looks into one chunk. `_passing` finds the first
# running sum above the goal, and is careful at the end, where rounding could pick a
# token that has no weight.
#
# `choose` is the whole decision for one shaped row: the greedy token, or the draw. It
# returns None where masks have blocked everything. `_sample_row` puts the pieces in
# order, with a way out for the commonest case (greedy, nothing to shape, no
# log-probabilities). `_greedy` finds every row's largest logit in one go. `sample` is
# the entrance: rows in, one `Sample` for each out. A row of NaN gives a `Sample` with
# an error and no token; its neighbours are unaffected, and chapter 09 shows how the
# engine ends that one request.

# %%
show(sampler.pick, sampler._passing, sampler.choose)
show(sampler.Sample, sampler.sample, sampler._greedy, sampler._sample_row)

# %% [markdown]
# GPU engines usually draw in another way, the exponential race: give each token a
# random number from the exponential distribution, divide its probability by it, and
# take the largest. The result has the same distribution (it is the Gumbel trick
# without logarithms), and needs no running sum, which suits a GPU. It needs a random
# number for each token of the vocabulary, 49,152 where we use one. On a CPU that is
# the dearer choice. Both ways, 6,000 draws each:

# %%
import torch

N = 6_000
anything = SamplingParams(temperature=1.0)
row = torch.from_numpy(ROW)
asks = [state.SampleState(anything, 42, 10, range(i)) for i in range(N)]
ours = np.bincount([s.token for s in sampler.sample(row.expand(N, -1), asks)])
race = (SHARES / default_rng(42).exponential(size=(N, 10))).argmax(axis=1)
for name, found in (("inverse", ours), ("race", np.bincount(race, minlength=10))):
    chi2 = ((found - N * SHARES) ** 2 / (N * SHARES)).sum()
    print(f"{name:8} {found.tolist()}  chi-square {chi2:.1f}")
print(f"expected {(N * SHARES).astype(int).tolist()}  over 27.9 once in 1,000 times")

# %% [markdown]
# ## What the model thought
#
# A caller may ask for the **logprob** (the logarithm of the probability) of each
# token and of the likeliest alternatives. Of which distribution: the model's, or what
# was left after masks, temperature and filters? vLLM's default,
# `--logprobs-mode raw_logprobs`, is the model's, and ours is the same. It makes
# answers comparable whatever the sampling, and it is what scoring needs. It also
# means that the reported token can be one that the model thought unlikely, as here,
# where a bias forces it:

# %%
forced = SamplingParams(temperature=0, logit_bias={8: 100.0}, logprobs=3)
[got] = sampler.sample(row[None], [state.SampleState(forced, 1, 10, [0])])
found = got.logprobs
print(WORDS[got.token], f"logprob {found.logprob:.2f} = log 0.02, rank {found.rank}")
print("the model's top 3:", *[WORDS[i] for i in found.top_ids])

# %% [markdown]
# A `Logprobs` holds one position: the token's own value and rank, whatever number was
# asked for, and the most likely tokens with theirs. `token_logprobs` works it out of
# one row: subtract the peak, so that nothing overflows, and sum in float64.
# `prompt_logprobs` does the same for prompt tokens, where row *i* is what the model
# said before it saw target *i*. That needs every position's logits, so such a request
# may not take its prompt from the prefix cache, in which there are keys and values
# but no logits.

# %%
show(logprobs.Logprobs, logprobs.token_logprobs, logprobs.prompt_logprobs)

# %% [markdown]
# ## Proof: the same in any company
#
# The takeaway, as a property. Five requests with different wishes, in any order, any
# of them repeated: each row must give what it gives alone.

# %%
from hypothesis import strategies as st

from pagedattn.book import broken, falsify, holds

WISHES = [
    dict(temperature=0),
    dict(),
    dict(temperature=0.5, top_p=0.9),
    dict(top_k=8),
    dict(min_p=0.1),
]


def ask(i):
    return state.SampleState(SamplingParams(**WISHES[i]), 42 + i, 50, range(9))


def same_in_any_company(rows, company):
    x = torch.from_numpy(default_rng(rows).normal(0, 3, (5, 50)).astype("f"))
    alone = [sampler.sample(x[i : i + 1], [ask(i)])[0].token for i in company]
    together = sampler.sample(x[company], [ask(i) for i in company])
    assert [s.token for s in together] == alone, "a neighbour changed a token"


company = st.lists(st.integers(0, 4), min_size=1, max_size=6)
holds(same_in_any_company, st.integers(0, 999), company)

# %% [markdown]
# Now let the seed be looked up by the row's place in the batch, which is a mistake
# that a released engine has made. Hypothesis finds the smallest batch that shows it:
# a greedy request in front of a random one.

# %%
with broken(
    sampler._sample_row,
    "chosen = choose(row, state)",
    "state.seed += i; chosen = choose(row, state)",
):
    falsify(same_in_any_company, st.integers(0, 999), company)

# %% [markdown]
# The second property is about the crossing token. `nucleus` must keep a beginning
# that holds p, and no token more than needed: without its lightest member it must
# hold less than p. Weights are whole numbers and p is in sixteenths, so that sums are
# exact.


# %%
def shortest_beginning(weights, sixteenths):
    w, p = np.array(weights, "f"), sixteenths / 16
    kept = w[nucleus(w, p)]
    assert kept.sum() >= p * w.sum(), f"{kept} of {w} is less than {p}"
    assert kept.sum() - kept.min() < p * w.sum(), "one more than needed"


weights = st.lists(st.integers(1, 99), min_size=1, max_size=12)
holds(shortest_beginning, weights, st.integers(1, 15))

# %%
with broken(
    filters.nucleus,
    "np.searchsorted(sums, missing) + 1",
    "np.searchsorted(sums, missing)",
):
    falsify(shortest_beginning, weights, st.integers(1, 15))

# %% [markdown]
# Without the `+ 1` a single candidate is enough to be left with none. An engine with
# this mistake and a separate rule "keep at least one" does not even fail; it is a
# little too careful for everybody, and nobody notices.
#
# Last, the whole engine with an exact model. Ann's request is seeded; neighbours
# come, her prompt is cut into chunks of two, the pool is so small that she is
# preempted in the middle of her answer.

# %%
from pagedattn.testing import hash_engine


def answer(others=0, **config):
    """Ann's tokens, and how often she was put back after she had begun."""
    engine, told, put_back = hash_engine(block_size=4, **config), {}, 0
    for i in range(others):
        engine.add_request(f"o{i}", [i] * 7, SamplingParams(max_tokens=12))
    engine.add_request("Ann", list(range(9)), SamplingParams(seed=42, max_tokens=12))
    while engine.has_unfinished_requests():
        told |= {output.request_id: output for output in engine.step()}
        put_back += any(
            r.id == "Ann" and r.num_output for r in engine.scheduler.waiting
        )
    return list(told["Ann"].outputs[0].token_ids), put_back


alone, _ = answer()
for title, setting in {
    "five neighbours": dict(others=5),
    "chunks of two tokens": dict(max_num_batched_tokens=2),
    "ten blocks for three": dict(others=2, num_blocks=11),
}.items():
    tokens, put_back = answer(**setting)
    equal = sum(a == b for a, b in zip(tokens, alone, strict=True))
    print(f"{title:22} {equal} of 12 equal; steps spent put back: {put_back}")

# %% [markdown]
# One honest limit. Sampling is exact in its inputs, and the logits are an input. A
# real model's products sum in another order when the batch has another shape, so the
# last bits of the logits may differ, and a draw that falls within a hair of a border
# may fall on the other side. `HashModel` has whole numbers and no such hair; with
# real weights in float32 it is rare, and the sampler never adds to it.

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex08_sampling.py` is `pagedattn/sampling/filters.py` without
# the bodies of `first`, `nucleus` and `survivors`. `make exercise N=8` runs the
# engine's tests on your file and ends with one hint; `make hint N=8` gives a hint
# alone. A full sort passes all tests; write that first. Then make it faster, with or
# without drawers. `PAGEDATTN_STUDENT=8 make serve` lets real clients draw through
# your filters.
#
# **Find the bug.** In `exercises/bug08_sampling.py` a mistake of a real engine is
# hidden; `make exercise N=bug8` shows what fails. What its users saw: with some
# models `min_tokens=100` worked as promised, with others answers of three tokens came
# back now and then.
#
# **Measure.** Take the cell with the story and count, for each position, how many
# tokens `min_p=0.05`, `top_k=40` and `top_p=0.9` would keep. Where do they agree?
# Then apply `temperature=1.5` first: by how much does each count grow, and why?
#
# **Question.** A client asks for `logprobs` and `temperature=0.2`, and computes from
# them how sure "the model" was of its answer. Is he right to use raw values? Which
# values would a training loop want that learns from sampled answers?
#
# <details><summary>Discussion</summary>
#
# *Build.* Ties are where first attempts fail: a threshold (`row >= kth value`) keeps
# more than k. In `survivors` the common mistake is to apply `top_p` to the weights of
# all tokens and not of those that top-k left.
#
# *Find the bug.* Models may have several ids that end a text; Llama 3 has
# `<|end_of_text|>` and `<|eot_id|>`. If `min_tokens` masks only the first of them,
# models with one are fine and models with two end early through the other. vLLM fixed
# it in V0 (pull request 5849, June 2024), again in V1 (15407, March 2025, where the
# set was lost on its way to the worker), and it was found a third time in Model
# Runner V2 (an automated review of 32163, January 2026). Three code paths, one rule:
# it belongs where all of them look.
#
# *Measure.* `top_p` and `min_p` agree where the model is sure: one token, or a few.
# `top_k` keeps forty wherever. A higher temperature lifts the tail's many small
# weights together, so the count of `top_p`, which adds them up, grows most. `min_p`
# compares each token with the peak and never adds, so its count grows much less. The
# count of `top_k` can't grow, but what the forty weigh does.
#
# *Question.* Raw values say what the model would have said at temperature 1,
# unmasked. For "how sure was the model" they are right. A training loop that weighs
# samples by how likely they were to be *sampled* needs the processed ones
# (`processed_logprobs` in vLLM): the policy that acted is the filtered one.
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# - **The pipeline** is `vllm/v1/sample/sampler.py: Sampler.forward`, whose docstring
#   lists the same steps in the same order. `apply_logits_processors` does our
#   `shape`: allowed ids, `ops/bad_words.py: apply_bad_words`, then the processors
#   that can change the likeliest token
#   (`logits_processor/builtin.py: MinTokensLogitsProcessor`,
#   `LogitBiasLogitsProcessor`), then `ops/penalties.py: apply_all_penalties`.
#   `Sampler.sample` takes the greedy pick, divides by the temperature, runs the
#   processors that declare `is_argmax_invariant` (`MinPLogitsProcessor`), and calls
#   `ops/topk_topp_sampler.py: TopKTopPSampler`. All of it is batched: one tensor
#   `[requests, vocabulary]`, and a `SamplingMetadata` with one entry of each
#   parameter for each row. We go row by row, which is right for a CPU and would be
#   wrong for a GPU.
# - **Ties.** `apply_top_k_top_p` masks logits *below* the k-th, so equal logits can
#   leave more than k. Ranks come from `batched_count_greater_than`, which counts
#   `x >= value`: equal logits share the worst rank. Ours share none.
# - **The draw** is `random_sample`: the exponential race, with `q.exponential_()` for
#   the batch and then again, row by row, for each request that has a generator of its
#   own. FlashInfer's rejection sampler replaces it where top-k or top-p is used and
#   no request in the batch is seeded.
# - **Seeds** in V1 are the *own* column of our table: `GPUModelRunner` gives a seeded
#   request a `torch.Generator`, and rewinds it by `set_offset(get_offset() - 4)`
#   after a partial prefill, a number that depends on how CUDA's Philox counts. The
#   column's weak places were all hit: V0 made a new generator after a preemption
#   (pull request 19940 describes it); on CPUs one unseeded neighbour made the sampler
#   ignore every seed in the batch (issue 51226, fixed by 51866 in August 2026).
#   TensorRT-LLM looked seeds up by a request's slot in the batch (its pull request
#   1742). vLLM's Model Runner V2 takes the counter's way:
#   `vllm/v1/worker/gpu/sample/gumbel.py` mixes seed and position with Triton's Philox
#   and draws a number for each token from that.
# - **Siblings** are `vllm/v1/engine/parallel_sampling.py: ParentRequest`; a child's
#   seed is `seed + index`.
# - **Left out here:** grammars (a mask before step 1: chapter 10), custom logits
#   processors, `logprobs_mode` other than raw, `logprob_token_ids`, thinking budgets.
#   llama.cpp has samplers that neither has (DRY, XTC, typical, mirostat) and lets the
#   caller choose their order; nano-vllm has temperature alone.
#
# Next: who calls `sample`, in which thread, and what happens when a client goes away.
# [09 Engine and server →](09_engine.ipynb)
