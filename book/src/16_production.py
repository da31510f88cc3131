# %% [markdown]
# # 16 · In production
#
# [← 15 Measure](15_measure.ipynb) · [17 Reading vLLM →](17_vllm.ipynb)
#
# An engine has run for a week. Then somebody adds the time of day to the top of the
# system prompt, a friendly touch, one line. Nothing fails, every test is green, and
# every prompt is computed in full again. In the same week somebody else gives half of
# the KV memory to another program. Nothing fails there, either. **Which numbers, out of
# all that the server offers, would have told you, and what do the flags that you set
# on the first day cost?**
#
# The other chapters say how the parts work. This one is for whoever gets the call. It
# sets the flags that matter to bad values on purpose, counts what happens, and then
# reads the same thing from outside, on a server that is running.

# %% [markdown]
# ## The obvious way: more of everything
#
# A flag with *max* in its name invites a large number. `run_dry` lets the real
# scheduler serve the mixed workload of chapter 05 (64 requests, 9,467 prompt tokens,
# 5,843 of answers) without a model. It counts steps, tokens computed, the tokens of
# the longest step, preemptions, and how many ran at once.

# %%
from pagedattn.bench.dry import run_step
from pagedattn.bench.workloads import mixed_lengths
from pagedattn.viz.gantt import Job, continuous_batches, new_scheduler, requests_of

USUAL = {
    "block_size": 16,
    "num_blocks": 1001,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}
HEAD = (
    f"{'':22}{'steps':>6}{'computed':>10}{'longest':>9}{'preempted':>11}{'at once':>9}"
)
JOBS = [Job(f"r{i}", *pair) for i, pair in enumerate(mixed_lengths())]


# %%
def run_dry(look=lambda scheduler: None, jobs=JOBS, **flags):
    scheduler = new_scheduler(**{**USUAL, **flags})
    for request in requests_of(jobs, scheduler):
        scheduler.add(request)
    steps, seats = [], []

    def while_it_runs():
        seats.append(len(scheduler.running))
        look(scheduler)

    while scheduler.has_requests():
        steps.append(run_step(scheduler, while_it_runs).num_tokens)
    return len(steps), sum(steps), max(steps), scheduler.preemptions, max(seats)


def row(name, counts):
    steps, computed, longest, preempted, at_once = counts
    text = f"{name:22}{steps:6,}{computed:10,}{longest:9,}{preempted:11}{at_once:9}"
    print(text)


# %% [markdown]
# ## Measure: three limits, one at a time
#
# Seats first (`--max-num-seqs`), then the budget of a step
# (`--max-num-batched-tokens`), then the pool (`--kv-cache-memory-bytes`, or
# `--num-gpu-blocks-override` for an exact number; one block of every pool is never
# used, hence 1001).

# %%
print(HEAD)
for seats in (1, 4, 16, 64):
    row(f"{seats} seats", run_dry(max_num_seqs=seats))
for budget in (64, 512, 2048, 8192):
    row(f"budget of {budget:,}", run_dry(max_num_batched_tokens=budget))
for blocks in (800, 400, 200, 100):
    row(f"64 seats, {blocks} blocks", run_dry(max_num_seqs=64, num_blocks=blocks + 1))

# %% [markdown]
# Seats are the cheapest speed there is: 64 seats finish in 217 steps what one takes
# 5,843 for. The budget, once above 64, does next to nothing for the number of steps,
# and the column of the longest step says what it does instead: with 8,192 one step
# computes 2,317 tokens, and whoever is in the middle of an answer waits for all of
# them. And the pool decides whether the seats are real. With 200 blocks the 64 seats
# are worth no more than the first table's sixteen: some twenty requests fit, and 33
# times one had to give its blocks back and compute its tokens again.
#
# Nothing in this table is an error. The server answers everybody, in every row.

# %% [markdown]
# ## Picture: a pool that is too small
#
# The same 64 requests on 64 seats, with 800 blocks and with 200. Above, the share of
# blocks that are taken; below, who runs and who waits.

# %%
from matplotlib.figure import Figure

from pagedattn.viz.figure import chart


def history(blocks):
    rows = []

    def look(scheduler):
        used = 1 - len(scheduler.pool.free) / blocks
        people = len(scheduler.running), len(scheduler.waiting)
        rows.append((used, *people, scheduler.preemptions))

    run_dry(look, max_num_seqs=64, num_blocks=blocks + 1)
    return rows


# %%
figure = Figure(figsize=(9, 4.4), layout="constrained")
upper, lower = figure.subplots(2, 1, sharex=True)
text = []
for blocks, colour in ((800, "#4477aa"), (200, "#ee6677")):
    rows = history(blocks)
    used, running, waiting, preempted = zip(*rows, strict=True)
    upper.plot(used, color=colour, label=f"{blocks} blocks")
    lower.plot(running, color=colour, label=f"running, {blocks} blocks")
    lower.plot(waiting, color=colour, linestyle=":", label=f"waiting, {blocks} blocks")
    falls = [i for i in range(1, len(rows)) if preempted[i] > preempted[i - 1]]
    upper.plot(falls, [used[i] for i in falls], "x", color="#222222", markersize=5)
    full = sum(share > 0.95 for share in used)
    text.append(
        f"{blocks} blocks: over 95 % full in {full} of {len(rows)} steps, "
        f"preemptions in {len(falls)} of them, at most {max(waiting)} waiting"
    )
upper.set(ylabel="blocks in use", ylim=(0, 1.05))
lower.set(ylabel="requests", xlabel="step")
upper.legend()
lower.legend(fontsize=8)
chart(figure, "\n".join(text), "A small pool stays full and preempts (crosses)")

# %% [markdown]
# Look at the shapes. A pool that is too small is not a little over its limit now and
# then. It is full in most of its steps, because whoever waits is let in as soon as
# there is room. So a *high* `kv_cache_usage_perc` says nothing: a
# well-chosen pool under load is full, too. The crosses tell the two apart.
#
# ## The idea
#
# > **Takeaway.** Three limits decide what a server can do: seats, tokens a step,
# > blocks. Raise the first until the third complains, choose the second by how long a
# > reader may be kept waiting, and watch three numbers that are zero when all is well:
# > waiting requests, preemptions, prompt tokens computed although somebody had computed
# > them before.
#
# How far may the first be raised? Take the pool of 200 blocks and go through the seats:

# %%
print(HEAD)
for seats in (8, 10, 12, 16, 24, 64):
    row(f"{seats} seats, 200 blocks", run_dry(max_num_seqs=seats, num_blocks=201))

# %% [markdown]
# Ten seats are free of preemptions; from 24 on another seat changes nothing, since
# nobody finds the blocks to sit on it. In between lies a bargain: sixteen seats take
# 480 steps instead of 651, and compute 16,542 tokens instead of 15,246 for it. A few
# preemptions are not a fault, as long as steps are fewer and tokens not many more. A
# storm is when the fourth column grows and the first no longer falls. As a rule of
# thumb, blocks ÷ (blocks of a typical request, prompt and answer) is about the number
# of seats that the pool can keep.
#
# Everything below is this idea with numbers: what goes wrong, and where it shows.

# %% [markdown]
# ## Flags that matter
#
# `pagedattn serve --help` lists them all. Most people need these.
#
# | flag | buys | costs |
# | --- | --- | --- |
# | `--max-num-seqs` | fewer steps | blocks: each seat fills some |
# | `--max-num-batched-tokens` | prompts in fewer steps | gaps in all streams |
# | `--max-model-len` | longer requests | one of them can take that much of the pool |
# | `--kv-cache-memory-bytes` | seats that are real | memory of the machine |
# | `--enable-prefix-caching` | prompts computed once | nothing worth naming: keep it |
# | `--scheduling-policy priority` | who goes first | somebody else goes last |
# | `--api-key` | strangers stay out | a header |
# | `--shutdown-timeout` | answers that end | a slower restart |
# | `--max-body-bytes` | memory when somebody is rude | very long prompts |
# | `--enable-dev-mode` | pause, sleep, empty cache | one key holder can stop all |
#
# *Length.* A limit takes nothing: blocks are taken as tokens come, not reserved. But
# it is a promise. This is what one request can take of a pool of 800 blocks:

# %%
for limit in (2048, 4096, 8192):
    most = -(-limit // 16)
    print(
        f"--max-model-len {limit}: one request may hold {most / 800:.0%} of 800 blocks"
    )

# %% [markdown]
# *Budget.* Eight people read their streams. In step 20 a prompt of 2,000 tokens comes.
# How many tokens does the longest step compute, which is how long the eight have to
# wait for one token, and how many steps until the newcomer has its first?

# %%
READERS = [Job(f"reader {i}", 16, 120) for i in range(8)]
NEW = Job("new", 2000, 8, arrives=20)
flags = {"block_size": 16, "num_blocks": 1001, "max_num_seqs": 16}
for budget in (64, 128, 512, 2048, 8192):
    done = continuous_batches([*READERS, NEW], max_num_batched_tokens=budget, **flags)
    after = done.first_tokens()["new"]
    longest = max(done.tokens[20:])
    print(f"budget {budget:5,}: longest step {longest:5,}, first token in step {after}")

# %% [markdown]
# Multiply a row by the time of a token and you have both sides of the bargain. Where
# prefill runs at 500 tokens a second, 2,008 tokens are four seconds of silence for
# eight people. The default is measured at the start: as many tokens as the machine
# needs to run at nearly its full rate, and no more, since beyond that the gaps grow and
# nothing else does.
#
# *Policy.* Forty long jobs of a nightly batch, 400 blocks, and in step 50 one short
# question from a person:

# %%
NIGHT = [Job(f"batch {i}", 200, 150, priority=1) for i in range(40)]
PERSON = Job("person", 30, 20, arrives=50)
for seats in (16, 48):
    pool = {"block_size": 16, "num_blocks": 401, "max_num_batched_tokens": 512}
    for policy in ("fcfs", "priority"):
        limits = {**pool, "max_num_seqs": seats, "policy": policy}
        done = continuous_batches([*NIGHT, PERSON], **limits)
        after, lost = done.first_tokens()["person"], len(done.preempted)
        print(f"{seats} seats, {policy:9} first token {after:3} steps in,", end=" ")
        print(f"{done.steps} steps in all, {lost} preemptions")

# %% [markdown]
# First come, first served makes the person wait behind the whole batch. So does
# *priority*, for as long as all sixteen seats are taken: a policy orders the line, and
# does not empty seats. It saves the line and not the wait for a seat, 101 steps instead
# of 254. With 48 seats there is always a seat, and blocks are what is short. There the
# policy can do more: whoever is least urgent loses its blocks first, and the person has
# a first token after 9 steps. So `priority` wants more seats than the batch will use,
# and the batch pays in preemptions. It pays them under both policies.

# %% [markdown]
# ## Pitfall: a word at the front
#
# Now with a real model, tokenizer and template. `Visitor` speaks to the application
# as a socket would (chapter 09). Six people ask one question each, under a system
# prompt of some length. In the first round the time stands before the instructions, in
# the second behind them; in the third it is left out.

# %%
import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor

from pagedattn.async_engine import AsyncEngine
from pagedattn.config import EngineArgs
from pagedattn.serve.app import build_app
from pagedattn.serve.settings import ServeArgs
from pagedattn.viz.visit import LOOP, Diary, Turnstile, Visitor, scope, watched

limits = {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 512}
args = EngineArgs(num_gpu_blocks_override=129, **limits)
serving = AsyncEngine.from_args(args)  # what LLM() loads
app = build_app(serving)


def run(coroutine):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def read(names, text=None):
    """Values of /metrics by name, as any scraper reads them."""
    visitor = Visitor(app)
    text = text or (run(visitor.get("/metrics")) and b"".join(visitor.chunks).decode())
    found = re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", text, re.M)
    return {name: float(value) for name, value in found if name in names}


# %%
RULES = "You help the customers of a bicycle shop. " + " ".join(
    f"Rule {i}: be brief, be kind, and never promise a date." for i in range(1, 9)
)
PLACES = {
    "time first": "It is 10:0{i}. {rules}",
    "time last": "{rules} It is 10:0{i}.",
    "no time": "{rules}",
}
SEEN = ("prefix_cache_queries_total", "prefix_cache_hits_total")


def ask(system, **more):
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Do you repair tandems?"},
    ]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, **more}
    return json.loads(run(Visitor(app).post("/v1/chat/completions", body)))


def round_of_six(template, **more):
    before = read(SEEN)
    for i in range(6):
        ask(template.format(i=i, rules=RULES), **more)
    asked, hits = (int(read(SEEN)[name] - before[name]) for name in SEEN)
    return f"{asked:5,} prompt tokens, {hits:5,} found, {asked - hits:5,} computed"


for name, template in PLACES.items():
    print(f"{name:11}", round_of_six(template))

# %% [markdown]
# A block is known by its tokens *and all tokens before them* (chapter 04). A different
# first block makes every block different. Behind the rules, the time spoils only what
# follows it. The counters above are the alarm: hits divided by queries, over an hour. A
# rate that was high and falls to nothing, with the same traffic, is somebody's edit of
# a prompt. The usual suspects are times, user names, ids of requests, a list of tools
# in an order that changes, and a retrieved document in front of the instructions.
#
# And some requests never look. Log-probabilities of a *prompt* need the logits at each
# of its positions, which the cache doesn't hold, so such a request computes everything
# (`reads_cache` says so). Log-probabilities of the answer cost no hit:

# %%
for more in ({"logprobs": True, "top_logprobs": 3}, {"prompt_logprobs": 1}):
    print(f"{next(iter(more)):16}", round_of_six("{rules}", **more))

# %% [markdown]
# ## Pitfall: the stop string that never comes
#
# A client sends `stop` and no `max_tokens`, because the answer ends at the stop string
# anyway. Until the model is exchanged for one that writes it differently. `tokens_of`
# serves eight such requests with the exact model of chapter 05, which never says what
# you hope for.

# %%
from pagedattn.request import SamplingParams
from pagedattn.testing import hash_engine


def tokens_of(max_tokens):
    engine = hash_engine(block_size=16, num_blocks=257, max_model_len=512)
    for i in range(8):
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        engine.add_request(f"r{i}", [i] * 16, params)
    steps = peak = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        peak = max(peak, 256 - len(engine.scheduler.pool.free))
    made = read(("generation_tokens_total",), engine.metrics.render().decode())
    return steps, peak, int(*made.values())


for limit in (64, None):
    steps, peak, made = tokens_of(limit)
    print(f"max_tokens={limit}: {steps} steps, up to {peak} blocks, {made:,} tokens")

# %% [markdown]
# Without a limit the answer is as long as the model's context. It is charged, it holds
# its seat, and its blocks are taken from all others. On the server it looks like this:
# `request_success_total` with `finished_reason="length"` rises where `"stop"` did. Set
# `--max-model-len` to what your users need rather than to what the model can, and
# `--override-generation-config '{"max_new_tokens": 512}'` for those who say nothing.

# %% [markdown]
# ## Pitfall: nobody is reading
#
# Ann closed her laptop in chapter 09, and her blocks were free after one step. That
# works if the server *hears* of it. A proxy that collects the answer before it passes
# it on, or keeps its own connection when the client's is gone, hears for the server and
# says nothing. Sixteen clients want 200 tokens each, and leave after five:

# %%


def for_nobody(told):
    engine = hash_engine(block_size=16, num_blocks=513)
    for i in range(16):
        engine.add_request(f"r{i}", [i] * 16, SamplingParams(max_tokens=200))
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        for i in range(16 if told and steps == 5 else 0):
            engine.abort_request(f"r{i}")
    text = engine.metrics.render().decode()
    pattern = r'^vllm:request_success_total\{.*finished_reason="(\w+)".*\} ([1-9]\S*)$'
    (end, n), *_ = re.findall(pattern, text, re.M)
    made = int(*read(("generation_tokens_total",), text).values())
    return f"{made:,} tokens for {16 * 5} that were read; {float(n):.0f} end by {end!r}"


print("a proxy that passes it on: ", for_nobody(told=True))
print("a proxy that does not:     ", for_nobody(told=False))

# %% [markdown]
# If your users stream and leave, and the counter of `"abort"` stays at zero, look at
# the proxy. Streams need it to pass bytes on as they come (in nginx,
# `proxy_buffering off`) and a read timeout longer than the longest gap between two
# tokens.

# %% [markdown]
# ## Pitfall: a queue without an end
#
# The server takes whoever comes: there is no flag that limits the queue. Here is one
# with sixteen seats that gets a request of the mixed lengths every fourth step, then
# every fifth, and so on. `waiting_after` says how many wait when so many have come.

# %%


def waiting_after(gap, counts=(64, 128, 256)):
    scheduler, found, step = new_scheduler(**USUAL), {}, 0
    jobs = [Job(f"r{i}", *pair) for i, pair in enumerate(mixed_lengths() * 4)]
    for n, request in enumerate(requests_of(jobs, scheduler), 1):
        scheduler.add(request)
        for _ in range(gap):
            run_step(scheduler)
            step += 1
        if n in counts:
            found[n] = len(scheduler.waiting)
    return found


print("a request every   waiting after 64, 128, 256 of them")
for gap in (4, 5, 6, 7, 8):
    print(f"{gap} steps {'':9}", *[f"{n:5}" for n in waiting_after(gap).values()])

# %% [markdown]
# Between five steps and six lies the capacity: 5,843 tokens on sixteen seats are 365
# steps, 5.7 for each of 64 requests. (The 447 of the first table include a tail in
# which there was nobody left to take a seat.) Below it there is no queue when we look.
# Above it, the queue grows for as long as the load lasts, every newcomer waits longer
# than the one before, and those who give up and ask again add to it. This is the figure
# of chapter 15 that grows with the length of the run. Limit it where you know what an
# answer is worth: in the proxy, by a number of requests under way (`GET /load` says how
# many) above which it answers 429. A refusal that comes at once is kinder than an
# answer that comes after its reader has gone.

# %% [markdown]
# ## Reading /metrics on a live server
#
# Now from outside. Eight people ask at the same moment, and the server has four seats
# and 128 blocks. A `Turnstile` (chapter 09) holds the plans, so that we can look in the
# middle.

# %%
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTS = ("prompt_tokens_total", "generation_tokens_total", "num_preemptions_total")


async def look(when):
    visitor = Visitor(app)
    await visitor.get("/metrics")
    found = read(GAUGES + COUNTS, b"".join(visitor.chunks).decode())
    running, waiting, used = (found[name] for name in GAUGES)
    print(f"{when:25} running {running:.0f}, waiting {waiting:.0f}, KV {used:.5f}")
    return found


async def eight_at_once():
    gate, diary = Turnstile(), Diary()
    body = {"prompt": "One, two,", "max_tokens": 6, "temperature": 0}
    with watched(serving, diary, gate):
        before = await look("nobody is here")
        posts = [Visitor(app).post("/v1/completions", body, f"v{i}") for i in range(8)]
        tasks = [asyncio.create_task(post) for post in posts]
        while sum(m.lane == LOOP for m in diary.moments) < 8 or not gate.busy:
            await asyncio.sleep(0.01)
        for _ in range(2):  # a plan for whoever was first, and one for all seats
            gate.go()
        while read(GAUGES, serving.metrics.render().decode())[GAUGES[0]] < 4:
            await asyncio.sleep(0.01)
        await look("four seats, eight people")
        gate.open()
        await asyncio.gather(*tasks)
        after = await look("all have their answers")
    for name in COUNTS:
        print(f"    {name:25} +{after[name] - before[name]:.0f}")


run(eight_at_once())
print(len({metric.name for metric in serving.metrics.snapshot()}), "metrics in all")

# %% [markdown]
# Four blocks of 128 are 0.03125, and in the end everything is back at zero. There are
# three kinds of lines. A **gauge** is how things stand now, and must come
# back to zero when nobody is there. A **counter** only grows (until the process
# starts again), so look at its rate. A **histogram** counts how many observations were
# at most so long. Its buckets add up over servers and over time, which percentiles
# never do, and a dashboard works its percentiles out of them. All names are vLLM's, so
# that its dashboards fit:
#
# | name, after `vllm:` | what it says |
# | --- | --- |
# | `num_requests_running` | seats taken |
# | `num_requests_waiting` | the queue: capacity is too small, or spent on something |
# | `kv_cache_usage_perc` | share of blocks held (0 to 1, whatever its name says) |
# | `num_preemptions_total` | requests that lost their blocks and began again |
# | `prefix_cache_queries_total`, `…_hits_total` | prompt tokens asked for, and found |
# | `prompt_tokens_total`, `generation_tokens_total` | work done |
# | `request_success_total` | ended requests, by reason: stop, length, abort, error |
# | `time_to_first_token_seconds` | queue and prompt, as a reader feels them |
# | `request_queue_time_seconds` | of that, the queue alone |
# | `inter_token_latency_seconds` | gaps in streams |
# | `e2e_request_latency_seconds` | all of it |
# | `iteration_tokens_total` | tokens in a step: is the budget what you think? |
#
# How did the eight's prompts count? `Metrics.on_admitted` and `Metrics.on_step` are
# where it is decided: tokens that were found count as processed, and are counted as
# cached too. `on_state` sets the gauges after every step and every abort.

# %%
from pagedattn.book import show
from pagedattn.metrics import Metrics

show(Metrics.on_state, Metrics.on_step, Metrics.on_admitted)

# %% [markdown]
# **Three to wake somebody for.** If only three alerts may exist, let them be these:
#
# 1. *`num_requests_waiting` above zero for minutes.* Short queues are normal; a queue
#    that stays is load above capacity, whatever the cause. `request_queue_time_seconds`
#    says what it costs.
# 2. *the rate of `num_preemptions_total`, when it isn't about zero.* The pool is too
#    small for its seats. Fewer seats or more memory: the table in the beginning has
#    both.
# 3. *p99 of `time_to_first_token_seconds` over what you have promised.* It is the one
#    that users feel, and it includes whatever you have not thought of.
#
# Put on the wall, and don't wake anybody for: the hit rate, the share of `"length"`
# and `"abort"`, KV use. And one check from outside that no metric replaces: a real
# request every minute, of one token, with a timeout.

# %% [markdown]
# ## Keys, and what is open
#
# With `--api-key` every path needs one, except five. The `Gate` decides that before any
# route is looked up, from a short list of what is open, so that a path that nobody has
# thought of is shut. `_admit` is the rule, and `_opens` compares all keys in constant
# time.

# %%
from pagedattn.serve.gate import OPEN_PATHS, Gate

show(Gate._admit, Gate._opens)

# %%
locked = build_app(serving, ServeArgs(api_key=["s3cret"]))


def with_key(app, key):
    async def keyed(scope, receive, send):
        header = (b"authorization", f"Bearer {key}".encode())
        await app({**scope, "headers": [*scope["headers"], header]}, receive, send)

    return keyed


paths = (*sorted(OPEN_PATHS), "/v1/models", "/load", "/live/frames", "/docs", "/sleep")
print(f"{'':14} no key  wrong  right")
for path in paths:
    callers = locked, with_key(locked, "secret"), with_key(locked, "s3cret")
    statuses = [run(Visitor(caller).get(path)) for caller in callers]
    print(f"{path:14}", *[f"{status:6}" for status in statuses])

# %% [markdown]
# `/sleep` is not there at all without `--enable-dev-mode`, and a stranger can't tell.
# `/metrics` is open, since scrapers rarely have keys: don't let the world reach it. A
# checklist for the day before:
#
# - **Address.** The server listens on 127.0.0.1 unless told otherwise. `--host 0.0.0.0`
#   without a key is an open door.
# - **Keys.** One for each client, so that one can be taken back (`--api-key` may be
#   given several times); from the environment (`PAGEDATTN_API_KEY`), not from a
#   command line that `ps` shows.
# - **TLS.** `--ssl-keyfile` and `--ssl-certfile`, or a proxy that does it. Without
#   either, keys and texts travel in the clear.
# - **Dev mode** off. **CORS** (`--allowed-origins`) to the pages that are yours.
# - **Media.** The server fetches nothing that a request names: images and their URLs
#   are refused with a 400. So nobody can make it read an inner address.
# - **Templates** of requests stay refused (`--trust-request-chat-template` is off).
# - **Tenants.** One prefix cache for all means that the time to a first token shows
#   whether somebody has asked the same before. Where that matters, each tenant gets a
#   `cache_salt`, and loses the others' hits.
# - **Logs.** `--enable-log-requests` is off, and whoever turns it on should know who
#   reads the log.

# %% [markdown]
# ## The page at /
#
# Open the server's address in a browser. The page at `/` has a chat and, beside it, the
# engine as it runs: the block map with a colour for each request, the plan of the
# step, the queue, and the last steps to go back through. It is one file that asks for
# nothing from elsewhere; its headers tell the browser not to allow it, either. The page
# is open because it holds nothing. What it draws comes from `/live/frames`, which
# needs the key (the table above has both). It is the fastest way to *see* a pool that
# is too small, and no substitute for an alert.

# %%


def headers_of(path):
    seen = {}

    async def listening(scope, receive, send):
        async def note(message):
            seen.update(message.get("headers", ()))
            await send(message)

        await app(scope, receive, note)

    run(Visitor(listening).get(path))
    return {name.decode(): value.decode() for name, value in seen.items()}


policy = headers_of("/")["content-security-policy"]
print(*[part for part in policy.split("; ") if "sha256" not in part], sep="\n")

# %% [markdown]
# ## Proof: shut unless open
#
# Vendors have had a rule of the other kind: what begins with `/v1` needs a key. Whoever
# adds a route elsewhere has to remember it. Here is our rule as a property, over
# paths of the server and paths of nobody:

# %%
from hypothesis import strategies as st

from pagedattn.book import broken, falsify, holds
from pagedattn.serve.problems import ApiError

guard = Gate(app, app.state.front, ["s3cret"])


def shut_unless_open(path):
    try:
        guard._admit(scope("POST", path, "visit"))
    except ApiError as refused:
        assert refused.status == 401
    else:
        assert path in OPEN_PATHS, f"{path} is open to everybody"


words = st.sampled_from(["v1", "tokenize", "health", "sleep", "metrics", ""])
PATHS = st.lists(words, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
holds(shut_unless_open, PATHS)
with broken(Gate._admit, "path in OPEN_PATHS", 'not path.startswith("/v1")'):
    falsify(shut_unless_open, PATHS)

# %% [markdown]
# And the gauges: whatever is asked and aborted, in the end they are zero. Without the
# call in `abort_request`, an abort of the last request leaves them standing, because no
# step follows that would set them.

# %%
from pagedattn.engine import Engine


def gauges_return(answers, leave_after):
    engine = hash_engine(block_size=4, num_blocks=41)
    for i, n in enumerate(answers):
        engine.add_request(f"r{i}", [i] * 5, SamplingParams(max_tokens=n))
    for _ in range(leave_after):
        if engine.has_unfinished_requests():
            engine.step()
    for i in range(len(answers)):
        engine.abort_request(f"r{i}")
    left = read(GAUGES, engine.metrics.render().decode())
    assert not any(left.values()), left


world = st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 4)
holds(gauges_return, *world)
with broken(Engine.abort_request, "self._gauge()", "pass"):
    falsify(gauges_return, *world)

# %% [markdown]
# ## Going down, and a rolling restart
#
# SIGTERM starts a drain. `Server._stop` sets one flag, and from then on `/health` says
# 503, new work is refused, and what runs has `--shutdown-timeout` seconds to end;
# `_drain` waits for it and for the last bytes to leave. A second signal makes it zero.
# `AsyncEngine.drain` aborts what is left when the time is over.

# %%
from pagedattn.serve.server import Server

show(Server._stop, Server._drain, AsyncEngine.drain)

# %% [markdown]
# Ann is in the middle of an answer when the signal comes, and Bob is too late:


# %%
async def going_down():
    gate, ann, bob = Turnstile(), Visitor(app), Visitor(app)
    body = {"prompt": "One, two,", "max_tokens": 6, "temperature": 0}
    with watched(serving, Diary(), gate):
        asking = asyncio.create_task(ann.post("/v1/completions", body))
        while not gate.busy:
            await asyncio.sleep(0.01)
        print("/health before:", await Visitor(app).get("/health"))
        app.state.front.draining = True  # what the signal does
        draining = asyncio.create_task(serving.drain(30))
        print("/health while it drains:", await Visitor(app).get("/health"))
        refused = json.loads(await bob.post("/v1/completions", body))
        print("Bob:", bob.status, refused["error"]["message"])
        gate.open()
        answer = json.loads(await asking)
        await draining
    choice, usage = answer["choices"][0], answer["usage"]
    print("Ann:", ann.status, usage["completion_tokens"], choice["finish_reason"])


run(going_down())
serving.shutdown()
print("the engine runs:", serving.is_running)

# %% [markdown]
# So the order of a rolling restart, one server at a time, is:
#
# 1. Start the new one. It listens when its model is loaded, so the first 200 from
#    `/health` means that it can serve.
# 2. Send it one real request, then give it its share of the load.
# 3. Take the old one out of the proxy's list. *Then* send SIGTERM. In between nothing
#    is lost; the other way round, those who come before the proxy has noticed get a 503
#    with `Retry-After: 1`, which a proxy may retry elsewhere, since nothing was done.
# 4. Wait for its end. Let the orchestrator's own patience (in Kubernetes,
#    `terminationGracePeriodSeconds`) be longer than `--shutdown-timeout`, or it kills
#    in mid-sentence what the server was waiting for.
# 5. Expect slow first tokens: a new process has an empty prefix cache. Exchange all
#    servers at once and every prompt of everybody is computed in full.
#
# `/health` says nothing about slowness, and must not: a liveness check that fails
# under load restarts the servers that are needed most.

# %% [markdown]
# ## What would have told you
#
# Back to the two edits of the first lines. With the time of day at the top, hits over
# queries fall to nothing, and with them every first token is as late as a whole prompt
# takes. With half of the memory given away, preemptions leave zero, the queue stays,
# and more tokens are computed for the same answers. Three counters and a gauge, of all
# that the server offers. None of it is an error, and so no log has a line about it as
# such.

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex16_production.py` is `pagedattn/serve/gate.py` without the
# rule of who may come in, the comparison of keys and the count of what is under way.
# `make exercise N=16` runs the server's tests on your file and ends with one hint;
# `make hint N=16` gives a hint alone.
#
# **Find the bug.** `exercises/bug16_production.py`: a server with a key, and a stranger
# who has none and counts tokens on it. `make exercise N=bug16`.
#
# **Measure.** Predict and check: 32 requests at once, each with 20 tokens of prompt and
# 100 of answer, on a pool of 64 blocks. How many preemptions with 32 seats, with 16,
# with 8? Say first whether each is nearer to 0, to 10 or to 100, and how many steps
# each takes. Then ask `run_dry(jobs=[Job(f"r{i}", 20, 100) for i in range(32)],
# num_blocks=65, max_num_seqs=32)`. Then start `pagedattn serve
# --num-gpu-blocks-override 65` with these seats, send it the same with `bench serve`,
# and compare `vllm:num_preemptions_total`.
#
# **Question.** A colleague wants to be woken when `kv_cache_usage_perc` exceeds 0.9 for
# five minutes. What will happen in the first busy week, and what would you offer
# instead?
#
# <details><summary>Discussion</summary>
#
# *Build.* The list names what is open, and everything else needs a key. The order
# matters as well: a stranger should learn nothing, not even that the server is about to
# go, so the key is asked for first. The count goes down in a `finally`, for a client
# that leaves is an exception, and a drain waits for that count.
#
# *Find the bug.* The rule asks what is to be guarded instead of what is to be open.
# Whole families of routes lie outside `/v1`, and a new one is open on the day it is
# written.
#
# *Measure.* A request ends with 119 tokens in 8 blocks, so the pool keeps 8 of them.
# But each begins with 2 blocks, and at admission nobody knows how long an answer will
# be: all 32 are let in, and lose their places later. Eight seats have no preemption and
# take the most steps. A live server takes requests as they arrive, not all before the
# first step, and so counts a little differently.
#
# *Question.* It will wake somebody each evening. A pool under load is full because
# waiting requests are let in while there is room; that is what it is for. Offer the
# rate of preemptions, and the queue.
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# - **Flags** have the same names; our defaults are those of a small machine. vLLM
#   measures the memory left on the card by a trial run (`gpu_memory_utilization`, 0.9)
#   and logs at the start how many requests of full length would fit.
# - **Metrics** are in `vllm/v1/metrics/`: `stats.py` collects them, `loggers.py` has
#   the log line and Prometheus' side. Ours have its names; it has many more
#   (speculation, adapters, KV connectors, several engines by the label `engine`).
# - **Preemption** in V1 means recomputing, as here. The number of preemptions is logged
#   and counted under the same name.
# - **Keys.** Hashes are compared in constant time, as here. What is guarded are paths
#   that start with `/v1`, `/v2`, `/inference` or `/cohere`; all others are open, and
#   want a proxy in front.
# - **Draining.** `--shutdown-timeout` is there, too; its default ends at once.
# - **Profiles, scaling, elastic restarts** are left out here, and so is anything with
#   more than one process.
#
# [← 15 Measure](15_measure.ipynb) · [17 Reading vLLM →](17_vllm.ipynb)
