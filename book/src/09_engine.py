# %% [markdown]
# # 09 · Engine and server
#
# [← 08 Sampling](08_sampling.ipynb) · [10 Grammars →](10_grammars.ipynb)
#
# ## Three blocks, and a lid that closes
#
# Ann asks a question and reads the first words of the answer. Then she closes her
# laptop. Three blocks of the pool hold her keys and values, and at every step the
# model computes one more token for her. Nobody will read it. **How many steps pass
# before the three blocks are free, and does anybody else notice?**
#
# The earlier chapters built the parts: blocks, prefix index, scheduler, kernels,
# sampler. This chapter puts them together (the *engine*) and puts the engine behind a
# socket (the *server*). The parts are single-minded and know little. What is left to
# get right is who calls them, when, from which thread, and what happens when a caller
# goes away, reads slowly, or asks for something on which the model chokes.

# %% [markdown]
# ## A server in a dozen lines
#
# A web server for Python runs an *event loop*: one thread that works on many requests
# by switching between them wherever one has to wait (`await`). The first handler that
# one would write takes a lock, so that requests don't disturb each other, and steps
# the engine until the answer is there. `hash_engine` is the real engine around the
# exact model of chapter 05; `run` gives a coroutine a loop of its own, since a
# notebook has one running already.

# %%
import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

from pagedattn.request import SamplingParams
from pagedattn.testing import hash_engine


def run(coroutine):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


# %%
engine, lock = hash_engine(block_size=4), asyncio.Lock()
steps = []  # one entry for each step


async def complete(name):
    async with lock:
        engine.add_request(name, [7] * 9, SamplingParams(max_tokens=12))
        while engine.has_unfinished_requests():
            outputs = engine.step()
            steps.append(len(outputs))
    return outputs[0].outputs[0].token_ids


async def health():
    return f"/health answered after {len(steps)} steps"


# %% [markdown]
# ## Measure: 96 steps where 12 would do
#
# Eight clients ask for twelve tokens each, and a load balancer asks whether the
# server is alive.


# %%
async def nine_callers():
    return await asyncio.gather(*[complete(f"r{i}") for i in range(8)], health())


*answers, verdict = run(nine_callers())
print(f"{len(answers)} answers in {len(steps)} steps; {verdict}")

for i in range(8):
    engine.add_request(f"r{i}", [7] * 9, SamplingParams(max_tokens=12))
steps = []
while engine.has_unfinished_requests():
    steps.append(len(engine.step()))
print(f"the same eight together: {len(steps)} steps, {min(steps)} tokens in each")

# %% [markdown]
# Two faults in one. The engine works on one request at a time, although a step for
# eight costs little more than a step for one (chapter 01). And while it works, the
# loop stands still: `step` is not something that waits, it computes, so the loop
# can't switch. A server that answers its health check after 96 steps has long been
# taken for dead.

# %% [markdown]
# ## Picture: one visit in three lanes
#
# Below, the real server with the demo model, and Ann. There is no network in between:
# `Visitor` speaks ASGI, the protocol between a web server and a Python application,
# so what the application sees is what it would see behind a socket. `watched` notes
# what passes the engine's edges. A `Turnstile` holds each plan until Ann has read
# what the last one gave; without it the lanes would interleave differently each time.
# She hangs up after two tokens, while the next plan is running.

# %%
from pagedattn.async_engine import AsyncEngine
from pagedattn.config import EngineArgs
from pagedattn.serve.app import build_app
from pagedattn.viz.lanes import lanes
from pagedattn.viz.visit import CLIENT, ENGINE, LOOP, Diary, Turnstile, Visitor, watched

serving = AsyncEngine.from_args(EngineArgs(max_model_len=256))  # what LLM() loads
app = build_app(serving)
question = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "stream": True,
    "temperature": 0,
}


# %%
async def visit(diary, gate):
    def read(chunk):
        word = json.loads(chunk[6:])["choices"][0]["delta"].get("content")
        diary.note(LOOP, "writes a chunk", ENGINE)
        diary.note(CLIENT, f"reads {word!r}", LOOP)
        if len(ann.chunks) == ann.leave_after:
            gate.meet()  # the next plan is running
            diary.note(CLIENT, "hangs up")
        elif word:
            gate.go()

    ann = Visitor(app, leave_after=3, on_chunk=read)
    with watched(serving, diary, gate):
        diary.note(CLIENT, "posts a question")
        gate.go()
        await ann.post("/v1/chat/completions", question)
        gate.go()
        while serving.parts.engine.has_unfinished_requests():
            await asyncio.sleep(0.01)


# %%
diary = Diary()
run(visit(diary, Turnstile()))
lanes(diary.moments)

# %% [markdown]
# The order is that of the clock, and the lanes are real threads:

# %%
threads = {
    lane: {m.thread for m in diary.moments if m.lane == lane}
    for lane in (CLIENT, LOOP, ENGINE)
}
times = [moment.at for moment in diary.moments]
print("in order of time:", times == sorted(times))
print("the engine's thread is called", *threads[ENGINE])
print("client and loop share another:", threads[CLIENT] == threads[LOOP])

# %% [markdown]
# So the answer to the question is: the step that was running when she left, and no
# other. The abort waits in the *inbox* until that step has ended. Then it is the next
# thing the engine does, and three blocks are free before anything else is planned.
# Others notice nothing but a pool with more room.
#
# ## The idea
#
# Scheduler, pool and tables are plain Python with many invariants and no locks. If
# two threads may call them, every method needs a lock and every sequence of calls
# needs a proof. If one thread may, none does. So one thread owns the engine. It
# repeats: take what has arrived, run one step, hand out what came of it. Everybody
# else writes to its inbox and reads from a queue.
#
# > **Takeaway.** One thread owns the engine; all others send it messages, which it
# > reads between steps. A step is plan, run, commit: a frozen plan goes to the
# > runner, results come back, and whatever arrives meanwhile (a new request, an
# > abort, a shutdown) finds the books in order.
#
# While a plan is running, the event loop is free. Hold one at the turnstile, and ask:


# %%
async def meanwhile():
    gate, ann = Turnstile(), Visitor(app)
    with watched(serving, Diary(), gate):
        asking = asyncio.create_task(ann.post("/v1/chat/completions", question))
        while not gate.busy:
            await asyncio.sleep(0.01)
        print("a plan is running, nothing was read:", ann.chunks == [])
        print("GET /health:", await Visitor(app).get("/health"))
        gate.open()
        await asking
    print("then she reads to the end:", ann.chunks[-1])


run(meanwhile())

# %% [markdown]
# This works because a step spends its time in kernels and matrix products, which
# release Python's global lock. Were they plain Python, the second thread would be of
# little use, and the engine would need a process of its own, as in vLLM.

# %% [markdown]
# ## The runner: a plan in, results out
#
# The data plane has one interface. `Runner` owns the model, the KV tensors, and for
# each request what sampling must remember (chapter 08). It never sees a scheduler: a
# plan could come from a file. `Model` is what it asks of a model: `forward` gives
# hidden states and writes keys and values, `logits` turns some of them into scores.
# `layer_caches` makes the tensors, one pair for each layer; layers of different
# groups share tensors, because they share one pool of blocks.
#
# `run` is the whole step: `_follow` forgets the requests that the plan drops and
# learns those that it starts (`_state` makes a sampler's state from a `Start`), the
# batch is built and run, tokens are chosen, results go back in the plan's order.
# `_known` fills in a token that was not known when the plan was made, because an
# earlier plan was to sample it. `_sample` looks only at items whose last token is the
# request's last, so that a chunk in the middle of a prompt draws nothing. `_result`
# packs an item's part, and `_score_prompt` adds log-probabilities of prompt tokens,
# 64 positions at a time, since logits of a whole prompt would be 100 MB for 512
# tokens. `_pool` is for those who want an embedding and no token: it takes in the
# hidden states of each chunk. `sleep` lets the KV tensors go, `wake_up` makes them
# anew.

# %%
from pagedattn import output, request, runner
from pagedattn.book import show

show(runner.Model, runner.layer_caches, runner.Runner)

# %% [markdown]
# ## One step
#
# An `Engine` knows every room and does no work of its own. It is made from its parts,
# so that tests can give it a hash model and a clock that they set.

# %%
from pagedattn.engine import Engine

show(Engine.__init__)

# %% [markdown]
# Arrivals come in two halves. `add_request` lets the intake check and tokenise, then
# calls `add`; a server does the first half in the loop's thread, where it may take
# its time, and sends only the second through the inbox. `abort_request` ends the
# sequences that still live, frees their blocks at once and keeps a last output for
# the caller. It sets the gauges itself, for if that was the last request there will
# be no step to do it. `has_unfinished_requests` counts such last outputs as work, and
# `take_late` hands them over; `get_num_unfinished_requests` counts callers.
# `reset_prefix_cache`, `sleep` and `wake_up` are for operators: an idle engine forgets
# its cache, or gives its KV memory back for a while.

# %%
show(Engine, section="Arrivals and departures")

# %% [markdown]
# `step` is the loop body: plan, run, commit, and text for whoever is due. Between the
# lines, `take_ended` collects requests that ended outside a commit (one that outgrew
# the pool), and requests in whose *text* a stop string has appeared are ended in the
# scheduler as well: the scheduler knows ids and can't see text. `_run` is where
# things go wrong, if they do; more below. `_note` tells clocks and metrics who was
# admitted and what is about to run, `_gauge` sets the three gauges, `check` asserts
# that the books agree and that an idle engine holds no block, and `get_metrics` reads
# it all.

# %%
show(Engine, section="One step")

# %% [markdown]
# A step can raise: a bug in a kernel, memory that runs out, a request that nobody
# foresaw. The step was for everybody, and the exception doesn't say whose fault it
# was. `_run` hands the plan back (`Scheduler.fail`, chapter 05): blocks that it would
# have filled leave the index, its requests go back to the line, and run one by one
# until each has shown itself harmless. Here is a model that chokes on token 666:

# %%
import logging

logging.getLogger("pagedattn").disabled = True  # tracebacks, in this notebook only
engine = hash_engine(block_size=4)
forward, run_plan = engine.runner.model.forward, engine.runner.run


def choking(batch, caches):
    if (batch.ids == 666).any():
        raise RuntimeError("token 666")
    return forward(batch, caches)


def told(plan):
    print("a plan for", *[item.request_id for item in plan.items])
    return run_plan(plan)


engine.runner.model.forward, engine.runner.run = choking, told
for name, prompt in {"Ann": [1, 2, 3], "Bob": [1, 666], "Cyd": [9]}.items():
    engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=3))
while engine.has_unfinished_requests():
    for done in (o for o in engine.step() if o.finished):
        print("   ", done.request_id, "ends:", done.outputs[0].finish_reason)
engine.check()

# %% [markdown]
# One failed step, then three alone, then Ann and Cyd go on together. Bob gets an
# error, the others get their answers, a few steps late.

# %% [markdown]
# ## From tokens to answers
#
# What leaves a step are token ids of sequences; what a caller wants is text for the
# request that was asked. First the shapes, which are vLLM's. `RequestOutputKind` says
# whether each output holds everything so far, only what is new, or comes once at the
# end. A `RequestOutput` has the prompt and one `CompletionOutput` for each sibling,
# whose `finished` asks for a reason to have ended; a `Logprob` is one candidate's
# value, rank and text; `RequestTimes` are clock readings, from which metrics are
# worked out.

# %%
show(request.RequestOutputKind, request.Logprob, request.CompletionOutput)
show(request.RequestTimes, request.RequestOutput)

# %% [markdown]
# A `Sequence` follows one sibling. `_new_detokenizer` gives it a detokenizer (chapter
# 02) that starts from the prompt's last tokens; `_scored` asks whether
# log-probabilities were wanted, and `scores_from` and `_piece` make them readable.
# `add` takes one update: `_push` feeds the detokenizer and says which stop string
# completed, if one did. `end` is for those who end without a further token; `_end`
# notes the reason and flushes text that was held back, which may complete a stop
# string at the last moment. `output` and `_text` give what there is so far, or what
# is new since the last call.

# %%
show(output.scores_from, output._piece, output.Sequence)

# %% [markdown]
# An `Answer` is one caller's request with all its sequences: `params`, whether it is
# `finished`, and an `output` that is None while nothing is due. `_prompt_logprobs`
# waits until every chunk of the prompt has been scored. `Outputs` holds all answers.
# `add` expects updates for a request's sequences, `scheduled` notes its first step,
# `process` takes a step's updates through `_take` and `_clock` and returns what is
# due (`_due`), and, separately, whose stop string has completed. An update for an
# unknown id is dropped: its caller has gone. `abort` ends an answer from outside, and
# `_close` counts it, once, whatever its end was.

# %%
show(output.Answer, output.Outputs)

# %% [markdown]
# A stop string often spans tokens. `"\n\nThe"` is three tokens here. The engine must
# compute all three to find it, must not show the first two meanwhile, and counts all
# of them in the usage, because they were generated. On the wire this looks as
# follows; `created` is a clock reading, printed as 0.

# %%
import re

stopping = {
    "prompt": "The capital of France is",
    "stop": ["\n\nThe"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
}
raw = run(Visitor(app).post("/v1/completions", stopping, request_id="ann-1"))
print(re.sub(r'"created":\d+', '"created":0', raw.decode()))

# %% [markdown]
# ## On the wire
#
# These are **server-sent events**: the body of one HTTP response, of type
# `text/event-stream`, that stays open. An event is a line `data: …` and an empty
# line; both newlines count, since a client waits for the empty one. Each event
# carries one JSON object in OpenAI's shape, and the text in it is a *delta*: what is
# new. The last choice names its `finish_reason`; if asked, a chunk without choices
# brings the usage; then comes `[DONE]`, which is no JSON.
#
# `frame` makes an event. It writes ASCII, for U+2028 in an answer would end a line in
# some clients. `frames` turns outputs into events, and a failure in mid-stream into
# an event too: the status 200 is long gone. `says_nothing` suppresses chunks whose
# text is held back. `EventStream` sends them, and closes both ends however it is
# left. `until_gone` runs work while `_gone` listens for the client's disconnect;
# whichever is first cancels the other. That is how a closed lid reaches the engine.

# %%
from pagedattn.serve import completions, front, gate, wire

show(wire.frame, completions.frames, completions.says_nothing)
show(wire.EventStream, wire.until_gone, wire._gone)

# %% [markdown]
# Before a stream begins, a status has to be chosen, and after that nothing can be
# taken back. `opened` therefore asks for the first output and waits up to a second:
# what is wrong from the start is still a 400 or a 503. In front of every route stands
# the `Gate`, whose `_admit` refuses callers without a key, and new work once the
# server is shutting down. `Front` has `generate`: several prompts in one body become
# several requests of the engine, merged as they come, each under an id that no client
# can choose.

# %%
show(wire.opened, gate.Gate._admit, front.Front.generate)

# %% [markdown]
# Every visit so far was counted. `/metrics` speaks Prometheus' text format under
# vLLM's names, so that dashboards made for vLLM work. Seconds differ each time; these
# do not:

# %%
NAMES = "prefix_cache_hits_total|prompt_tokens_total|generation_tokens_total"
NAMES += "|request_success_total|num_requests_running|kv_cache_usage_perc"
for text in serving.metrics.render().decode().splitlines():
    if re.match(f"vllm:({NAMES}){{", text):
        print(
            re.sub(r',?(engine="0"|model_name="[^"]*"),?', "", text).replace("{}", "")
        )

# %% [markdown]
# Ann asked twice, 37 prompt tokens each time; the second time 32 of them, two blocks,
# were found in the cache. Of the generated tokens one was for nobody. One request
# ended by abort, and the gauges are at zero. A gauge that stays up after an abort is
# a common mistake of engines, and an operator who trusts it adds machines for nobody.

# %% [markdown]
# ## One answer, many protocols
#
# Clients speak five dialects: OpenAI's chats, completions and responses, Anthropic's
# messages, Ollama's lines. A server that implements each of them has five places for
# every fault. Here there is one: `chat.whole` gives an answer and `chat.chunks` its
# pieces, as plain dicts, and a further protocol is two translations on top, of a body
# into a chat's and of chunks into events. `messages.create`, with `_frames`, is all of
# Anthropic's protocol that is not translation.

# %%
from pagedattn.serve import chat
from pagedattn.serve.messages import answer as messages

show(chat.whole, chat.chunks, messages.create, messages._frames)

# %% [markdown]
# The same question, asked in two dialects. Neither ends with `[DONE]`: their events
# have names, and the last one says that it is the last.

# %%
question = [{"role": "user", "content": "Name a colour."}]
asked = {"stream": True, "temperature": 0}
dialects = {
    "/v1/messages": {"messages": question, "max_tokens": 3},
    "/v1/responses": {"input": question, "max_output_tokens": 3},
}
for path, body in dialects.items():
    raw = run(Visitor(app).post(path, {**body, **asked}, request_id="ann-2"))
    print(path)
    for name in re.findall(r"^event: (.*)$", raw.decode(), re.M):
        print("   ", name)

# %% [markdown]
# ## Calls in a text that is still being written
#
# A model calls a tool by writing text in the format it was trained on. Clients want
# the call as fields, piece by piece, while it is being written. The usual solution is
# a state machine for each format that is fed with deltas, and the usual fault is a
# marker that a token boundary cut in two. Here a parser is a pure function of **the
# text so far**, and keeps one promise: what it says of a text it never takes back for
# a longer one. `Deltas` then sends the difference between what a text says now and
# what was sent before, and is the same for all formats: `take` looks at reasoning and
# content, `_call` at one call.
#
# A parser so written can be tested without a model: cut each sample at every place,
# in all ways, and the joined deltas must equal what the whole text says. Watch it
# hold back a `<` that may become a marker, and name the call only when it is one.

# %%
from pagedattn.serve.deltas import Deltas, Said
from pagedattn.serve.tools import TOOL_PARSERS

written = 'Is 1 <2? <tool_call>\n{"name": "less", "arguments": {"a": 1, "b": 2}}\n'
written += "</tool_call>"
parse, deltas = TOOL_PARSERS["hermes"].parse, Deltas(lambda: "call_1")
for end in range(6, len(written) + 6, 6):
    parsed = parse(written[:end], end >= len(written), {})
    delta = deltas.take(Said(parsed.content, parsed.calls))
    print(f"{written[end - 6 : end]!r:12}", delta or "")

# %% [markdown]
# A format is a `_read`, which says what a marker begins, and a `parse` that hands it
# to what formats share.

# %%
from pagedattn.serve.tools import hermes

show(hermes.parse, hermes._read, Deltas.take, Deltas._call)

# %% [markdown]
# The price is that the text is read again at every token. For a call of 2,000
# characters that is a few milliseconds over the whole answer, and what it buys is that
# no state can be wrong. Where `tool_choice` names a tool or requires one, there is
# nothing to recognise: a grammar (chapter 10) allows no other text, and all of it is
# the call.

# %% [markdown]
# ## One thread owns the engine
#
# `AsyncEngine` has three pieces of state that threads share: an inbox
# (`queue.SimpleQueue`, safe by itself), for each caller a `_Stream`, and a flag or
# two that are only ever set. A `_Stream` names a queue and the event loop it belongs
# to; `put` goes through `call_soon_threadsafe`, the one method of a loop that other
# threads may call, and shrugs if the loop has gone. `from_args` loads a model and
# starts.

# %%
from pagedattn import async_engine

show(async_engine._Stream, AsyncEngine.__init__, AsyncEngine.from_args)

# %% [markdown]
# A caller's side. `generate` checks that the engine lives (`_check_open`), lets the
# intake do its part (`_accept`; long texts go to a worker thread, since tokenising a
# megabyte would block the loop), puts an `add` into the inbox (`_enter`) and yields
# outputs. The `finally` is the most important line: however the caller leaves, by
# `aclose`, by an exception, by being cancelled, an unfinished request is aborted
# (`_abort`; `abort` is its public form). Nothing above this generator has to think of
# it. `embed` is such a caller whose only output is an embedding.

# %%
show(AsyncEngine, section="One request: a stream of outputs")

# %% [markdown]
# The engine's side. `_loop` is the thread, `_turn` what it does once: a step, or
# nothing while an operator has frozen it. `_take_messages` acts on all that has
# arrived and blocks only if there is nothing else to do, so an idle server costs
# nothing. `_deliver` hands an output to its stream. `_close` tells everybody when the
# loop has ended, those included whose `add` was put into the inbox a moment too late:
# `_enter` looks at `_stopped` after it has put, `_close` sets `_stopped` before it
# empties, so one of the two always sees the other.

# %%
show(AsyncEngine, section="The step loop")

# %% [markdown]
# What a server reads of an engine, for completeness: `args`, `config`, `facts` and
# `model_name` (what it runs with), `tokenizer`, `chat_template` and `vocab_size` (the
# model's), `default_sampling` (what silence means), `metrics`, the two questions
# `is_running` and `is_draining`, and of embeddings `pooling`, `hidden_size`, and
# whether it `generates` text at all.

# %%
show(AsyncEngine, section="What servers read")

# %% [markdown]
# ## Who gets the blocks of one who left
#
# The book's ten blocks. Ann and Bob share a system prompt, Cyd asks something else,
# and Dan waits: his fourteen tokens need four blocks, and three are free. Now Bob
# hangs up.

# %%
from pagedattn.viz.story import cast, play, stage
from pagedattn.viz.story import request as ask
from pagedattn.viz.strip import strip

scheduler, camera = stage()
dan = ask(
    "Dan", "blocks tables cache keys values each one page maps to slot free rain snow"
)
play(scheduler, camera, [*cast(), dan], steps=1)
before = camera.film().frames[-1]
scheduler.abort("Bob")  # what `abort_request` calls
left = camera.film().frames[-1]
play(scheduler, camera, [], steps=1)
strip([before, left, camera.film().frames[-1]], 4)

# %% [markdown]
# Bob's two blocks are free at once; the two that he shared stay, since Ann's table
# holds them. His full block is still *cached*: had he come back with the same
# question, he would have found it. His half-filled one is worth nothing to anybody
# and goes to the front. Ann takes it for her next token, Dan is admitted in the same
# plan, and Bob's cached block is the last that he takes.

# %% [markdown]
# ## A reader who is too slow
#
# A client on a bad line reads slower than the engine writes. Somebody must give way,
# and **back-pressure** is the name for who. If the engine waited, one slow phone
# would hold up a batch of sixty-four. So the engine never waits: it puts outputs into
# the stream's queue and goes on. Below, a reader takes one output and then stops
# reading.

# %%
from pagedattn.assembly import Assembled
from pagedattn.request import RequestOutputKind

made = hash_engine(block_size=4)
hashed = AsyncEngine(Assembled(made, EngineArgs(), "hash", None, None, {}, {}))
deltas = SamplingParams(max_tokens=12, output_kind=RequestOutputKind.DELTA)


async def slow_reader():
    reading = hashed.generate([1, 2, 3], deltas, "slow")
    await anext(reading)
    while hashed._streams:  # until the engine has done its part
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)
    [stream] = hashed._open
    pool = made.scheduler.pool
    print("read: 1, waiting:", stream.outputs.qsize(), end=", ")
    print("blocks held:", pool.usable - len(pool.free))
    print("read later:", len([output async for output in reading]))


run(slow_reader())

# %% [markdown]
# The answer waits as text; the blocks, which are scarce, are free. What bounds the
# queue is the request: one small output for each token, at most `max_tokens`, so a
# reader who never reads costs kilobytes. Behind a socket there is a second brake:
# uvicorn's `send` waits while the connection's buffer is full, so frames are made no
# faster than they leave. What is *not* bounded is the number of waiting requests. A
# proxy can refuse; `vllm:num_requests_waiting` tells it when.

# %% [markdown]
# ## The end: draining
#
# A deployment replaces servers while people read. `drain` refuses new requests, waits
# for those under way (`_busy`), and after a time limit aborts the rest, so that each
# client gets an end. `shutdown` puts a None into the inbox and waits for the thread.

# %%
show(AsyncEngine, section="The end")


# %%
async def last_minute():
    early = asyncio.create_task(last("early"))
    await asyncio.sleep(0.01)
    draining = asyncio.create_task(hashed.drain(timeout=10))
    await asyncio.sleep(0)
    print("late: ", await last("late"))
    print("early:", await early)
    await draining


async def last(name):
    try:
        outputs = [o async for o in hashed.generate([4, 5], deltas, name)]
        return f"{len(outputs)} outputs, {outputs[-1].outputs[0].finish_reason}"
    except async_engine.EngineDead as refusal:
        return f"refused: {refusal}"


run(last_minute())
hashed.shutdown()

# %% [markdown]
# If the loop itself fails, for a reason that no request can be blamed for, `_loop`
# catches it, every open stream raises `EngineDead`, and `/health` answers 503, so
# that whoever watches restarts the process. An engine that has lost count must not go
# on.

# %% [markdown]
# ## Proof: no block is lost
#
# Clients come, leave and let the engine step, in any order. A request may be aborted
# before its first step, in the middle of its prompt, after its end, twice, or without
# ever having existed; `n=2` makes two sequences of one request. After each act the
# books must agree, and once nothing is under way every block must be free: that is
# what `Engine.check` asserts.

# %%
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagedattn.book import broken, falsify, holds
from pagedattn.scheduler import Scheduler


class Clients(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.made = 0
        limits = dict(block_size=4, num_blocks=11, max_num_batched_tokens=8)
        self.engine = hash_engine(**limits)

    @rule(prompt=st.integers(1, 9), answer=st.integers(1, 6), n=st.integers(1, 2))
    def add(self, prompt, answer, n):
        wish = SamplingParams(max_tokens=answer, n=n)
        self.engine.add_request(f"r{self.made}", [prompt] * prompt, wish)
        self.made += 1

    @rule(i=st.integers(0, 5))
    def abort(self, i):
        self.engine.abort_request(f"r{i}")

    @rule()
    def step(self):
        self.engine.step()

    @invariant()
    def books_agree(self):
        self.engine.check()


holds(Clients, examples=60)

# %% [markdown]
# Now an abort that tells the caller "aborted" and forgets to tell the scheduler.

# %%
with broken(Engine.abort_request, "self.scheduler.abort(id)", "pass"):
    falsify(Clients)

# %% [markdown]
# Three acts: somebody comes, leaves, and the engine steps. The scheduler admits a
# request of which `Outputs` no longer knows. And an end, by abort or by itself, that
# gives no blocks back:

# %%
with broken(Scheduler._finish, "self.tables.release(request)", "pass"):
    falsify(Clients)

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex09_engine.py` is `pagedattn/engine.py` without the bodies of
# `step`, `_run` and `abort_request`, some forty lines that hold everything together.
# `make exercise N=9` runs the engine's tests on your file and ends with one hint;
# `make hint N=9` gives a hint alone. Then `PAGEDATTN_STUDENT=9 make serve` serves
# real clients with your step.
#
# **Find the bug.** In `exercises/bug09_engine.py`; `make exercise N=bug9` shows what
# fails. What was seen: clients that ask for several answers at once and hang up leave
# something behind. The log says "aborted", the machine computes on for nobody, and
# `kv_cache_usage_perc` does not fall. Clients that ask for one answer leave nothing.
#
# **Measure.** Start `make serve`. Let sixteen clients stream answers of 200 tokens
# and hang up after 5 chunks each. Compare `vllm:generation_tokens_total` with the
# chunks that were read: how many tokens were computed for nobody, per client? Predict
# the number from the picture in three lanes before you look.
#
# **Question.** The engine could merge what waits in a slow reader's queue into one
# output. What would the client notice, which requests must not be merged, and what
# would it save?
#
# <details><summary>Discussion</summary>
#
# *Build.* The order inside `step` matters twice. Late outputs of aborted requests
# come first, since their callers wait. Stop strings are known only after `process`,
# so the scheduler has to be told after the commit; one token too many was never
# computed, because the next plan has not been made yet. An engine that makes the next
# plan while the last one runs must throw that token away.
#
# *Find the bug.* A request with `n=3` is three sequences, called `0_id`, `1_id` and
# `2_id`. An abort that passes the caller's id to the scheduler finds the sequence if
# there is one, and nobody if there are three. vLLM's V0 engine had this mistake (pull
# request 14326, March 2025): its log said "Aborted request" and the sequences ran on.
#
# *Measure.* About one for each client: the step that was running. More, if a step
# takes less time than the disconnect needs to arrive.
#
# *Question.* Deltas can be concatenated, and log-probabilities with them; the client
# sees fewer, larger chunks. The last output's finish reason must survive, and outputs
# of different siblings must not be mixed. It saves memory and JSON for slow readers
# only, and costs code on the path of all. vLLM does it.
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# - **The step** is `vllm/v1/engine/core.py: EngineCore.step`: `scheduler.schedule`,
#   `model_executor.execute_model` (a future), the grammar's bitmask meanwhile,
#   `sample_tokens`, `scheduler.update_from_output`. Just before the update it calls
#   `_process_aborts_queue`, so an abort that came during the step drops that step's
#   token. `step_with_batch_queue` keeps several plans in flight; our scheduler can,
#   our `step` has one.
# - **The owner** is a process, not a thread: `EngineCoreProc.run_busy_loop`
#   alternates `_process_input_queue` and `_process_engine_step`, and threads beside
#   it move msgpack over ZMQ. The front end (HTTP, templates, tokenising,
#   detokenising) keeps another Python busy, without a lock to share. With one process
#   we save a serialisation and lose that core.
# - **Streams.** `vllm/v1/engine/async_llm.py: AsyncLLM.generate` has the shape of
#   ours, and aborts on `CancelledError` or `GeneratorExit`. A task, `output_handler`,
#   pulls outputs and splits large batches, so that the loop gets air. Each caller has
#   a `RequestOutputCollector` (`output_processor.py`): one slot, into which deltas
#   are merged if the reader is slow. That is their answer to back-pressure.
# - **Text and stop strings** are `OutputProcessor.process_outputs`, in the front end.
#   It returns `reqs_to_abort`, which travel back to the core; the core may have
#   computed a further token by then, and it is dropped.
# - **Disconnects.** Streams end through the generator; whole answers through the
#   decorator `with_cancellation` (for a long time in `vllm/entrypoints/utils.py`),
#   which races the handler against `listen_for_disconnect`, as `until_gone` does.
# - **A failing step** ends the engine: `log_error_detail` writes down the plan,
#   `run_engine_core` sends `ENGINE_CORE_DEAD`, every caller gets an
#   `EngineDeadError`, and `/health` turns 503. After a CUDA error nothing on the
#   device can be trusted, so that is sensible there. On a CPU the next step is as
#   good as the last, and we look for the culprit.
# - **Left out here:** several API servers, data parallel engines and their
#   coordinator, pausing and sleeping, weight updates, streaming input, gRPC.
#
# Next: an answer that a program can read, [10 Grammars →](10_grammars.ipynb)
