# %% [markdown]
# # 00 · The map
#
# [01 What one token costs →](01_cost.ipynb)
#
# A client sends 24 characters, `The capital of France is`. It gets back seven, `
# Paris.`, and the connection closes. In between the text became 5 tokens, 2 of 10
# blocks of memory were taken, a model with 30 layers ran 3 times over 7 tokens, and 3
# tokens were chosen, the last of which nobody ever saw.
#
# Which parts did that, in which order, and how would you know? This chapter follows the
# request through the real engine, one object at a time. It also shows the house as it
# stands (every room, and who may know whom), the words that the whole book uses, the
# ideas it is made of, and how to work with the book.
#
# Every number above is printed by a cell below, and every cell runs the engine itself.

# %% [markdown]
# ## How to use this book
#
# The book is an engine, and the engine is the book: `pagedattn/` is what serves real
# clients, and chapters show its source and run it. Nothing is copied into a chapter. If
# the engine changes, the chapter changes or the build fails.
#
# The commands need GNU make and Python 3.11 or newer. Each does its own set-up the
# first time, from nothing.
#
# | command | what it does |
# | --- | --- |
# | `make lab` | opens this chapter in JupyterLab |
# | `make test` | runs the proofs; `PROFILE=long` digs deeper |
# | `make serve` | serves the demo model on port 8000 to any OpenAI client |
# | `make exercise N=3` | tests *your* file for chapter 03, ends with one hint |
# | `make hint N=3` | gives the hints of chapter 03, one at a time |
# | `make exercises` | shows which exercises are done |
# | `make book` | weaves the chapters: runs every cell, keeps the outputs |
# | `make book-check` | weaves again and compares with what is kept |
# | `make book-html` | builds the site, with search and an index |
#
# Read a chapter in JupyterLab with the engine's source open beside it. The caption of
# each listing, a file and a line, is a link. Run the cells, change them, break them. A
# chapter needs less than 20 seconds of one processor, or 60 where the real model runs.
#
# Each chapter has the same shape: a question with a number in it, the naive answer in
# at most 15 lines, a measurement, a picture, one idea, the engine's own code, a
# property that is checked in front of you and then broken on purpose, exercises, and a
# section on how vLLM does the same thing.
#
# | chapter | question |
# | --- | --- |
# | [01 What one token costs](01_cost.ipynb) | why keep keys and values? |
# | [02 Tokens](02_tokens.ipynb) | what does a model read? |
# | [03 Blocks](03_blocks.ipynb) | how is memory taken, shared, given back? |
# | [04 The prefix cache](04_prefix.ipynb) | how is finished work found again? |
# | [05 The scheduler](05_scheduler.ipynb) | who computes what in the next step? |
# | [06 Paged attention](06_attention.ipynb) | how are scattered blocks read? |
# | [07 Triton kernels](07_triton.ipynb) | what can be known of a GPU without one? |
# | [08 Sampling](08_sampling.ipynb) | how do scores become a token? |
# | [09 Engine and server](09_engine.ipynb) | how do clients share one loop? |
# | [10 Grammars](10_grammars.ipynb) | how can an answer be sure to be JSON? |
# | [15 Measure](15_measure.ipynb) | how fast is it, and how do you know? |
# | [16 In production](16_production.ipynb) | what goes wrong without an error? |
# | [17 Reading vLLM](17_vllm.ipynb) | where is all this in vLLM? |
#
# In this order each chapter needs only those before it. 02 and 08 can be read at any
# time, and 07 left out; whoever is in a hurry reads 03, 04 and 05, which are the heart.
#
# Numbers that are missing belong to chapters whose part of the engine is not built yet.
# They come with it. The words are in the [glossary](glossary.md), and [one
# page](names.md) says which chapter shows which function.

# %% [markdown]
# ## A server in thirteen lines
#
# A language model is a function from token ids to **logits**: one score for every token
# of its vocabulary, saying how well it would come next. Take the best, append it, ask
# again. That is text generation, and it needs no engine.
#
# The next cell loads the demo model (SmolLM2-135M in 32-bit floats, 30 layers) into an
# engine with exactly ten **blocks** of four **slots**. A slot is the place of one
# token's keys and values, which chapter 01 explains. Block 0 exists too, is never used,
# and is why the flag says 11.

# %%
import torch

from pagedattn import LLM, SamplingParams

llm = LLM(block_size=4, num_gpu_blocks_override=11)
engine = llm.llm_engine
tokenizer = llm.get_tokenizer()
engine.config.block_size, engine.config.num_blocks - 1, len(engine.runner.caches)

# %% [markdown]
# The naive server takes the model out of the engine and drives it by hand. `make_batch`
# turns one request into the flat tensors that the model reads; chapter 06 shows it.

# %%
from pagedattn.model.batch import make_batch
from pagedattn.scheduler import Item

model, caches = engine.runner.model, engine.runner.caches


@torch.inference_mode()
def naive(text, stop="\n"):
    """Yield text, token by token, computing every token again for each."""
    ids, table = tokenizer.encode(text), (tuple(range(1, 11)),)
    while True:
        item = Item("naive", 0, 0, tuple(ids), table, samples=True)
        batch = make_batch([item], [ids], block_size=4)
        hidden = model.forward(batch, caches)
        ids.append(int(model.logits(hidden[batch.rows]).argmax()))
        piece = tokenizer.decode(ids[-1:])
        yield len(batch.ids), piece
        if stop in piece:
            return


# %%
prompt = "The capital of France is"
steps = list(naive(prompt))
for computed, piece in steps:
    print(f"{computed} tokens computed → {piece!r}")

# %% [markdown]
# It works. It also has three faults that fill the rest of this book.
#
# ## What the thirteen lines cost

# %%
print(len(prompt), "characters,", len(tokenizer.encode(prompt)), "tokens in the prompt")
print(sum(n for n, _ in steps), "tokens computed for", len(steps), "answer tokens")
longest = range(5, 40)
print(sum(longest), "computed where the answer runs on to the last slot,", end=" ")
print(f"{sum(longest) / len(longest):.0f} for each of {len(longest)} answer tokens")

# %% [markdown]
# *Everything is computed again for each token.* Five tokens, then six, then seven: 18
# for three. Were the answer 35 tokens long, it would be 770, or 22 for each. An engine
# keeps the keys and values of earlier tokens and computes each token once: 7 for the
# same answer, as we shall count below. (Chapter 01.)
#
# *One request has all the memory.* Its table is all ten blocks from the first token on,
# whether it needs them or not. Nobody else can run. (Chapters 03 and 04.)
#
# *One request has the whole machine.* A model reads all its weights to compute one
# token, and reads them once to compute sixteen. Serving one request at a time leaves
# most of the machine idle. (Chapters 01 and 05.)
#
# Around these three it lacks what clients need: sampling, stop strings that span
# tokens, streaming, errors that name the fault, an end to a request whose client has
# gone.

# %% [markdown]
# ## The house
#
# Here is every room of the engine, on its floor. The picture is drawn from the source
# files; a module that has no room in it stops the build.

# %%
from pagedattn.viz.house import house, imports, sizes

house()

# %% [markdown]
# The **control plane** decides. It knows requests, tokens and blocks as plain Python
# objects, and imports no torch. All the bookkeeping that can go wrong is here, where it
# can be tested to death.
#
# The **data plane** computes. It holds the weights and the tensors. It is told what to
# do by frozen data, never asks why, and cannot call back.
#
# The **joins** put both into one loop: the engine, the text that leaves it, its clocks.
# The **leaves** are what people touch: the server, benchmarks, pictures, this book.
#
# One rule holds the house up: *an import goes down, never up, and never in a circle*.
# The next cell reads every import statement of every file. A test
# (`tests/test_repository.py`) does the same for each commit.

# %%
for floor, below in imports().items():
    print(f"{floor:<13} imports {', '.join(below)}")

# %% [markdown]
# The rule is worth more than tidiness. Because the scheduler cannot import the runner,
# what passes between them has to be data. Data can be printed, drawn, stored, replayed,
# and sent to another process. Because the control plane loads no torch, its tests need
# no model, and a test can run through many hundreds of schedules. This is how much
# stands on each floor today:

# %% tags=["volatile"] reason="the size of the source, which every edit changes"
for size in sizes():
    print(
        f"{size.floor:<13} {size.files:3} files {size.lines:5} lines "
        f"{size.functions:4} functions, half of them at most {size.median:.0f} lines"
    )

# %% [markdown]
# Read it from the ground up: `errors`, `config`, `request`, `intake`, `text`, `cache`,
# `scheduler`, then `kernels`, `model`, `sampling`, `runner`, then `engine` and
# `output`. With the chapters beside it, that is a weekend.

# %% [markdown]
# ## The words
#
# One word for one idea, in code, prose and metrics. The rest of the book uses these
# without explaining them again.
#
# - *block*: neighbouring slots, 4 in our pictures and 16 by default. The unit in which
#   memory is taken, shared and given back. (Never "page".)
# - *slot*: the place of one token's keys and values. Its number is block × block size +
#   offset.
# - *table*: a request's blocks, in the order of its tokens.
# - *computed*: how many of a request's tokens have keys and values, once the plans made
#   so far have run.
# - *behind*: tokens − computed. What a request still has to compute.
# - *budget*: the most tokens that one step may compute, over all requests.
# - *plan* and *commit*: what one step will compute, as frozen data; and taking its
#   results.
# - *hit*: leading blocks of a request that were found in the prefix cache.
# - *grow*, *share*, *release*: take blocks; hold a block that others hold too; give all
#   of them back.
# - *evict*: make a free block forget what it cached, because it is about to be reused.
# - *preempt*: take all blocks from a running request and put it back in line.
#
# Names that callers see (flags, `SamplingParams`, `LLM`, endpoints, metrics) are
# vLLM's.

# %% [markdown]
# ## Ten blocks and three people
#
# All pictures of the book play on one stage: ten blocks of four tokens. Token ids stand
# for words there, so that you can read what lies in a slot. *Ann* and *Bob* ask a poet
# whose system prompt is exactly two blocks long; *Cyd* asks something else. No model
# runs on this stage, since what a token says makes no difference to where it lies. The
# scheduler, the tables and the blocks are the real ones.

# %%
from pagedattn.viz.story import cast, play, stage, words
from pagedattn.viz.strip import strip

for request in cast():
    print(f"{request.id}: {words(request.tokens)!r}, {request.prompt_len} tokens")

# %%
scheduler, camera = stage()
plans = play(scheduler, camera, cast())
film = camera.film()
moments = film.ends()
strip([moments[i] for i in (0, 4, 5, 6)], film.block_size)

# %% [markdown]
# Each row of squares is the pool after a step. A block shows its number, who holds it,
# and the words in its slots; below stand the queues, and the free blocks in the order
# in which they will be reused.
#
# In step 0 all three prompts are computed together. The grey blocks are held by two
# people: Bob found Ann's system prompt in the very step that computed it. In step 4 the
# pool is full. In step 5 Ann needs one more block and there is none, so Cyd, who came
# last, is preempted: his last block, only partly full, goes to Ann, and the two full
# ones wait. Ann and Bob end in that step. In step 6 Cyd is back. His two full blocks
# still held their words, so he found 8 of his 10 tokens and computed the other two. At
# the end nobody runs, yet most blocks keep their words. They are free, and whoever
# begins with the same words will find them.

# %%
computed = sum(plan.num_tokens for plan in plans)
prompts = sum(request.prompt_len for request in cast())
print(len(plans), "steps,", computed, "tokens computed,", len(film.frames), "moments")
print(prompts, "tokens in three prompts, of which step 0 computed", plans[0].num_tokens)

# %% [markdown]
# The 8 tokens of difference are Bob's copy of the system prompt. The film has a moment
# for every event, not only for every step. In JupyterLab the next cell plays it: drag
# the slider, hover to see the line of the engine's code that acted, click a block to
# see the chain of prefixes that it stands for.

# %%
from pagedattn.viz.player import player

player(film)

# %% [markdown]
# ## At the door
#
# Back to the real model, and to one request. We give the engine a scheduler that is
# being filmed and then do by hand what `Engine.step` does in its loop.

# %%
from pagedattn.scheduler import Scheduler
from pagedattn.viz.film import Camera


def word(token):
    """A token as a picture shows it."""
    return "" if token is None else tokenizer.decode([token]).strip() or "⏎"


camera = Camera(word)
groups = engine.scheduler.tables.groups
engine.scheduler.trace_to(camera.emit)
camera.watch(engine.scheduler)

# %% [markdown]
# A caller can be disappointed in two ways, and `pagedattn/errors.py` has a class for
# each. A `UserError` is the caller's own mistake. It is raised before any work starts,
# and it names the parameter, the value and the limit. `NotSupported` is a `UserError`
# for what exists elsewhere but is not built here; nothing that we don't understand is
# accepted and ignored. `EngineDead` means that the loop itself has ended.

# %%
from pagedattn import errors
from pagedattn.book import broken, falsify, holds, show

show(errors.UserError, errors.NotSupported, errors.EngineDead)

# %% [markdown]
# The door is `pagedattn/intake.py`. A prompt and the caller's wishes come in; an `Ask`
# goes out: the accepted prompt and one `Request` for each sequence that the caller
# wants (`n=3` gives three *siblings*). `Intake` belongs to one model and one pool,
# whose limits it knows.
#
# `accept` finds everything that can be wrong before anything is done. What the checks
# of `SamplingParams` cannot know without a model (the vocabulary, the limit on
# logprobs) is checked here. Then it draws a **seed** for a request that brought none,
# once, at arrival; from here on every random choice is a function of seed and position,
# so that no neighbour and no preemption can change it (chapter 08). `_check_wish` has
# a grammar compiled, if the answer must keep one (chapter 10). `_request` makes
# the scheduler's view of one sibling. Its `limit` is the number of tokens at which it
# must end: what the caller asked for, and never more than the context length or than a
# request alone could hold in the pool.

# %%
from pagedattn.intake import Ask, Intake

show(Ask, Intake.__init__, Intake.accept, Intake._check_wish)
show(Intake._request)

# %% [markdown]
# The rest of the room takes prompts apart. A prompt is text, token ids, or a dict with
# either and a **salt** (chapter 04), and `_parts` sorts that out; `_checked_salt` looks
# at the salt. `_encode` turns text into ids. `_checked_ids` reads ids that came as ids,
# one by one: a `bool` is an `int` in Python, and an id beyond the vocabulary would fail
# deep inside the model, together with everybody else in that step. `_fit` cuts the
# prompt if the caller asked for that, and refuses what is empty or leaves no room for
# even one more token. `_check_priority` refuses a priority where the scheduler would
# not look at it. `_bad_words` spells each forbidden word twice, since `cat` and ` cat`
# are different tokens.

# %%
from pagedattn import intake

show(Intake, section="The prompt")
show(intake._checked_salt)

# %% [markdown]
# Three callers meet the door: ours, one who asks for too much, one who brings a strange
# id.

# %%
params = SamplingParams(temperature=0, max_tokens=16, stop="\n")
ask = engine.intake.accept("Ann", prompt, params)
for bad in ["The capital of France is " * 9, [504, 49_152]]:
    try:
        engine.intake.accept("Bob", bad, params)
    except errors.UserError as error:
        print(f"{error.param}: {error}")

(request,) = ask.requests
pieces = [tokenizer.decode([token]) for token in request.tokens]
print(dict(zip(request.tokens, pieces, strict=True)))
print("computed", request.computed, "behind", request.behind, "limit", request.limit)

# %% [markdown]
# The request is 5 tokens long and 5 tokens behind. Its limit is 21, the prompt and
# `max_tokens` together; the pool would have allowed more.

# %% [markdown]
# ## One step by hand
#
# `Engine.add` hands the requests of an `Ask` to the scheduler's line, and tells the
# output side to expect them. Then each `step` does the same four things: the scheduler
# makes a plan, the runner runs it, the scheduler commits what came back, and the
# outputs turn tokens into text. `_run` is where a failing step is caught, so that it
# harms nobody but the request at fault.

# %%
from pagedattn.engine import Engine

show(Engine.add, Engine.step, Engine._run)

# %%
engine.add(ask)
print("waiting:", [r.id for r in engine.scheduler.waiting])
plan = engine.scheduler.plan()
print("running:", [r.id for r in engine.scheduler.running])
print(
    "plan", plan.id, "computes", plan.num_tokens, "tokens in", len(plan.items), "item"
)
print(plan.items[0])

# %% [markdown]
# That is the whole plan for our request: compute these five tokens, the first at
# position 0, with the table `(1, 2)`, and sample from the last. The scheduler never saw
# a tensor. A plan is plain and frozen. It could be pickled here and run on another
# machine.
#
# The runner makes tensors of it: `ids` and `positions` go into the model, `slots` say
# where each token's keys and values are written, `rows` which tokens' logits are
# wanted.

# %%
batch = make_batch(plan.items, [plan.items[0].tokens], block_size=4)
for name in ("ids", "positions", "slots", "rows", "lengths"):
    print(f"{name:<10}{getattr(batch, name).tolist()}")
print(f"{'tables':<10}{batch.tables.tolist()}")

# %% [markdown]
# Position 0 lies in block 1, at offset 0: slot 1 × 4 + 0 = 4. Position 4 lies in the
# second block of the table, which is block 2: slot 8. Now the model runs. In each of
# its 30 layers the kernel `write_kv` stores 5 keys and 5 values, and then attention
# reads them through the table (chapter 06). Does each layer write exactly the slots
# that the plan named? We wipe the keys that the naive run left behind, and look.

# %%
for cache in caches:
    cache.k.zero_()  # [block, head, offset, dimension]
results = engine.runner.run(plan)
written = [(cache.k != 0).any(dim=3).any(dim=1).flatten() for cache in caches]
for layer in (0, 29):
    print("layer", layer, "wrote slots", written[layer].nonzero().flatten().tolist())
print("all 30 alike:", all(torch.equal(one, written[0]) for one in written))
print(results)

# %% [markdown]
# The result is a token id. `commit` appends it to the request; `process` turns what the
# step committed into what callers are due.

# %%
updates = engine.scheduler.commit(plan, results)
outputs, stopped = engine.outputs.process(updates, now=0.0)
camera.tick()
print(updates[0].tokens, "→", repr(outputs[0].outputs[0].text))
print("tokens", request.num_tokens, "computed", request.computed, end=" ")
print("behind", request.behind)

# %% [markdown]
# Now the request has 6 tokens and 5 are computed, so it is 1 behind. What does it need
# next? To compute the tokens it is behind by. That sentence also described the prompt,
# and it is the only rule the scheduler has: there is no prefill phase and no decode
# phase. The engine can do the rest alone.

# %%
counts = [plan.num_tokens]
while engine.has_unfinished_requests():
    counts.append(request.behind)
    for output in engine.step():
        answer = output.outputs[0]
        print(repr(answer.text), answer.token_ids, answer.finish_reason)
    camera.tick()
print("tokens computed in each step:", counts, "=", sum(counts))

# %% [markdown]
# Three runs of the model, 7 tokens computed where the naive server computed 18. The
# third token was the newline that ends the answer: counted, never shown, and never
# computed, since nobody needs what would come after it.

# %%
strip(camera.film().ends(), 4)

# %% [markdown]
# The strip shows the journey as the blocks saw it. Two of ten were taken. In the last
# picture both are free again, and block 1, which is full, keeps its words for whoever
# comes next with the same four tokens.

# %%
player(camera.film())

# %% [markdown]
# ## What happened, event by event
#
# Where did the pictures come from? The blocks and the scheduler are given an *emitter*,
# a function that they call when something has happened. In a server that is `silence`,
# which does nothing, until somebody opens the page at `/`: then `trace_to` puts the
# page's ear in its place, while the engine runs. A `Recorder` keeps an `Event` for each
# call of `emit`, and `tick` starts the next step. The room `pagedattn/trace.py` holds
# no more than that. It knows neither what an event means nor how to draw one.

# %%
from pagedattn.trace import Event, Recorder, silence

show(Event, silence, Recorder)
show(Scheduler.trace_to, engine.scheduler.pool.trace_to)

# %%
for event in camera.recorder.events:
    print(event.step, event.kind, event.request or "", event.blocks or "", event.amount)

# %% [markdown]
# The journey again, in a dozen lines that the engine itself wrote: added with 5 tokens,
# blocks 1 and 2 taken, admitted with 0 tokens found in the cache, 5 computed, then 1,
# then 1, both blocks freed, ended. The camera listens to the same events and also looks
# at the books after each one. The line of code that acted is the caller of `emit`,
# which Python knows.
#
# Four kinds of event speak of blocks. `take`, `share` and `free` say that a block
# became busy, was shared by one more table, or became free; `evict` that a free block
# forgot what it cached. One thing is *not* said: that somebody let go of a block that
# others still hold. So a trace can tell which blocks are free at any time, but not how
# many hold each. Is the first half of that true?

# %% [markdown]
# ## The ideas
#
# The house is made of eleven ideas. The number behind each is the chapter that builds
# it.
#
# 1. **One rule for every request.** Compute the tokens you are behind by. Prompts,
#    chunks of prompts, cache hits, single tokens and resuming after a preemption are
#    all that. (05)
# 2. **Plan, run, commit.** Decisions are frozen data; the runner never meets the
#    scheduler. (05, 09)
# 3. **A block can be shared from the plan that writes it**, never earlier. Within a
#    step every layer writes its keys before any are read. (04)
# 4. **A hit is whole blocks, and at most tokens − 1**: something must be computed to
#    have logits. (04)
# 5. **Act at once or not at all.** `grow` shares hits and takes blocks in one act, or
#    changes nothing. (03)
# 6. **Preempt by computing again**, the least important first. Tails are released
#    before heads. (05)
# 7. **Layers that attend alike share a table**, and one pool serves all of them. (17)
# 8. **Sampling is a pure function** of logits, seed and position. (08)
# 9. **A specification beside each fast kernel**, with the same signature and the same
#    variable names. (06, 07)
# 10. **Whatever the schedule, the same tokens.** `HashModel`, a model made of hashes,
#     turns that into an exact test. (05)
# 11. **Time travel.** Real events are recorded, and one trace becomes text, picture and
#     player. (this chapter)
#
# > **Takeaway.** An inference engine is a loop of three acts: *plan* (who computes
# > which tokens, in which blocks), *run* (one pass of the model over all of them),
# > *commit* (append what was sampled, end what has ended). Everything else is
# > bookkeeping that makes the next plan possible, and bookkeeping can be proved.

# %% [markdown]
# ## Proved, then broken
#
# A *property* is a sentence that must hold for every input. Hypothesis, a library,
# draws inputs, tries to refute it, and shrinks what it finds to the smallest example.
# Ours says that following the trace gives the set of busy blocks after every step, for
# any number of requests whose prompts begin alike.

# %%
from hypothesis import strategies as st

from pagedattn.config import EngineConfig
from pagedattn.viz import story


def trace_is_enough(lengths):
    """Who follows the trace knows which blocks are busy, after every step."""
    recorder, busy = Recorder(), set()
    follow = {"take": busy.update, "share": busy.update, "free": busy.difference_update}
    pool = EngineConfig(block_size=4, num_blocks=11)
    scheduler = Scheduler(pool, groups, recorder.emit)
    for i, n in enumerate(lengths):
        scheduler.add(story.request(f"r{i}", words(range(n)), answer=2 + i))
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, story.results(scheduler, plan))
        while recorder.events:
            event = recorder.events.pop(0)
            follow.get(event.kind, set)(event.blocks)
        held = {block.id for block in scheduler.pool.blocks if block.refs}
        assert busy == held, f"the trace says {busy}, the pool {held}"


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=4)
holds(trace_is_enough, lengths)

# %% [markdown]
# A test that never fails proves nothing. So we change one line of the engine, for
# everybody, and watch. In `give_back` a block goes to the free list when its last
# holder lets go, at zero references. Here it goes there at one:

# %%
from pagedattn.cache.blocks import BlockPool

with broken(BlockPool.give_back, "if block.refs == 0:", "if block.refs <= 1:"):
    falsify(trace_is_enough, lengths)

# %% [markdown]
# Two requests, of 4 and 5 tokens. Fewer cannot show it: two people must share one full
# block, and a hit never covers a prompt's last token, so one of them needs a fifth.
# Real engines have made this mistake, and there the symptom is an answer that turns
# into somebody else's.
#
# The door can be tested in the same way. Whatever the length of the prompt and whatever
# the caller asks to be cut: either the refusal names the prompt, or the request fits
# the model and leaves room for one more token.


# %%
def door(tokens, keep):
    """A prompt is refused by name, or fits with a token to spare."""
    door = Intake(EngineConfig(max_model_len=12), 40, 100, [], None)
    params = SamplingParams(max_tokens=None, truncate_prompt_tokens=keep)
    try:
        (request,) = door.accept("x", list(range(tokens)), params).requests
    except errors.UserError as error:
        assert error.param == "prompt"
    else:
        assert 0 < request.prompt_len < request.limit <= 12, request.prompt_len


inputs = st.integers(0, 30), st.sampled_from([None, -1, 5, 20])
holds(door, *inputs)
with broken(Intake._fit, "max_model_len - room", "max_model_len"):
    falsify(door, *inputs)

# %% [markdown]
# Hypothesis finds the one length at which it matters: 12 tokens in a context of 12.
# Every chapter from here on ends its argument like this. Code that is broken this way
# stays broken only inside the `with`.

# %% [markdown]
# ## Exercises
#
# **Build.** Open `exercises/ex00_map.py`: it is `pagedattn/trace.py` with the bodies of
# `Recorder.emit` and `Recorder.tick` taken out. Write them, run `make exercise N=0`,
# ask for `make hint N=0` when stuck. It is small, and it shows you the whole cycle.
# Chapters 03 and 05 are the real thing, and end in `PAGEDATTN_STUDENT=3,5 make serve`:
# your own allocator and scheduler behind a real client.
#
# **Find the bug.** `exercises/bug00_map.py` is `pagedattn/intake.py` with one mistake
# in it. As soon as one caller asks for two answers to one prompt, `n=2`, the engine
# dies a few steps later, for everybody: "requests wait, but none of them can be
# planned". With `n=1` all is well. `make exercise N=bug0` shows a failing test. Find
# the line without looking at the original.
#
# **Measure.** Give the stage 6 blocks, `stage(num_blocks=6)`, and play the same cast.
# How many steps does it take now, how many tokens are computed, and how many events say
# `preempt`? Who is preempted, and what does that person find in the cache afterwards?
#
# **Question.** The plan is frozen data, and the results are data. What would have to
# change for the runner to live in another process, or in four? What must *not* be in a
# plan for that to work?
#
# <details><summary>Discussion</summary>
#
# *Build.* `emit` must keep its own copy of `blocks`, in a form that nobody can change
# later: the caller may hand in a generator, which can be read once, or a list that it
# goes on using. `tuple(blocks)` is both the copy and the freeze. In `tick` there is one
# line.
#
# *Find the bug.* Think about what two siblings have in common. The same prompt, yes;
# but a request *appends* to its tokens. Sharing a list where a copy was meant is the
# most ordinary mistake in Python, and in a scheduler it hides well: one request is
# always right. With two, each step makes the list two tokens longer, one of the two
# passes its limit without having noticed its own end, and then it neither runs nor
# leaves.
#
# *Measure.* It takes 14 steps instead of 7 and 41 tokens instead of 38, with one
# preemption. Bob came after Ann, so he is the one who is preempted; he finds 12 of his
# 17 tokens when he comes back. Cyd is never preempted, because he is never admitted
# before both have left: whoever is first in line and does not fit holds up the line.
# That is a choice, and chapter 05 discusses it.
#
# *Question.* Little would have to change. A plan names requests by id, tokens by number
# and blocks by number, so it can be sent as it is; a runner remembers what it needs of
# a request from the plan that started it (`Plan.starts`) to the one that drops it
# (`Plan.drops`). It must not hold objects with an identity that the other side would
# need: no `Request`, no `Block`, no tensor. Four runners can be sent the same plan,
# each having a quarter of the heads; their block numbers agree because only one
# scheduler gives them out. vLLM does precisely that.
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# The journey is the same in vLLM's V1 engine, over more rooms and at least two
# processes. Names are those of its source in the summer of 2026.
#
# | here | vLLM, under `vllm/v1/` |
# | --- | --- |
# | `Intake.accept` → `Ask` | `engine/input_processor.py: InputProcessor` |
# | `Engine.add` | `engine/core_client.py`, over ZeroMQ to `EngineCoreProc` |
# | `Engine.step` | `engine/core.py: EngineCore.step` |
# | `Scheduler.plan` → `Plan` | `core/sched/scheduler.py: Scheduler.schedule` |
# | `Runner.run` | `GPUModelRunner.execute_model`, `sample_tokens` |
# | `Scheduler.commit` | `Scheduler.update_from_output` |
# | `Outputs.process` | `engine/output_processor.py: OutputProcessor` |
#
# What passes between them is an `EngineCoreRequest` on the way in, a `SchedulerOutput`
# where we have a `Plan`, and `EngineCoreOutputs` on the way back. The server above is
# in `vllm/entrypoints/openai/`.
#
# *Processes.* vLLM splits at the two arrows of data. Tokenising, detokenising and HTTP
# live in one process, scheduling in a second; with several GPUs each has a worker
# process of its own. Python runs one thread at a time, so this keeps a busy server's
# text work from delaying the next step. Here everything but HTTP is in one thread
# (chapter 09): with a small model on two cores there is little to gain, and one process
# is easier to look into.
#
# *Deltas.* Our plan carries each request's whole table. vLLM's `SchedulerOutput` says
# everything about a request once (`NewRequestData`), then only what is new
# (`CachedRequestData`), and the worker keeps the rest in a persistent batch. That saves
# time on every step, and it is state that both sides must agree on.
#
# *Traces.* vLLM has no film, but two of its features are relatives. Its block pool
# emits `BlockStored`, `BlockRemoved` and `AllBlocksCleared`
# (`vllm/distributed/kv_events.py`), which routers use to send a request to the server
# that has its prefix. And each request records when it was `QUEUED`, `SCHEDULED` and
# `PREEMPTED` (`EngineCoreEventType`), which becomes the latency metrics.
#
# *Left out here, so far:* several devices, LoRA adapters, images, speculative
# decoding, and moving caches between machines. Chapter 17 has the whole
# comparison, room by room.
#
# [01 What one token costs →](01_cost.ipynb)
