# %% [markdown]
# # 15 · Measure
#
# [← 10 Grammars](10_grammars.ipynb) · [16 In production →](16_production.ipynb)
#
# Take one engine, one model, one machine and the same 256 requests. One benchmark says
# that a reader waits 0.34 seconds for the first token. Another says 6.4 seconds. Both
# are careful and neither has a bug. The paper on paged attention says that vLLM is 2 to
# 4 times as fast as others; its announcement said up to 24 times. Those are right, too.
# **Of what question is each of these numbers the answer?**
#
# Until now this book has counted: steps, tokens, blocks. Counts are the same on every
# machine and explain most of what happens. But in the end somebody waits, and waiting
# is seconds. This chapter is about seconds: how to ask for them, how they mislead, and
# what each idea of this book is worth in them on your own machine.

# %% [markdown]
# ## The obvious way: ask, wait, ask again
#
# Send a request, wait for the answer, note how long it took, send the next; in the end
# take the mean. To have the same numbers on every machine, this section and the next
# use the real scheduler with a clock that we move by hand. A step takes 40 ms to read
# the weights, and 2 ms for each token: about what the demo model takes on two cores.

# %%
from pagedattn.bench.dry import run_step
from pagedattn.bench.workloads import mixed_lengths
from pagedattn.viz.gantt import Job, new_scheduler, requests_of

lengths = mixed_lengths() * 4  # 256 requests
limits = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "block_size": 16}


def step_seconds(tokens):
    return 0.040 + 0.002 * tokens


# %%
def ask_wait_ask(lengths):
    scheduler, clock, first, whole = new_scheduler(**limits), 0.0, [], []
    for request in requests_of([Job("one", *pair) for pair in lengths], scheduler):
        scheduler.add(request)
        sent, heard = clock, None
        while scheduler.has_requests():
            plan = run_step(scheduler)
            clock += step_seconds(plan.num_tokens)
            heard = heard or (clock if plan.items[0].samples else None)
        first.append(heard - sent)
        whole.append(clock - sent)
    return sum(first) / len(first), sum(whole) / len(whole), len(lengths) / clock


first, whole, rate = ask_wait_ask(lengths)
print(f"first token after {first:.2f} s, answer after {whole:.2f} s (means)")
print(f"{rate:.2f} requests a second")

# %% [markdown]
# There is the 0.34. It looks like a property of the server. It is a property of a
# server with **one** polite client, who never speaks before the last answer has ended.
# The figure of 0.24 requests a second is worse still: it says how fast this client is,
# not what the machine can do.

# %% [markdown]
# ## Closed and open loops
#
# A benchmark where a fixed number of clients each wait for an answer before they ask
# again is a **closed loop**. Where requests come at a rate, whether or not the server
# is ready, it is an **open loop**. Batch jobs are closed loops. The public is an open
# one: people do not know how long the queue is before they join it.
#
# `serve` can do both. It keeps a `Timeline` for each request: when it was sent, when
# its tokens came. In an open loop a request counts as sent when it was *due*.

# %%
from collections import deque

from pagedattn.bench.timeline import Timeline, summary


def serve(dues, clients=None, pause=None):
    scheduler = new_scheduler(**limits)
    jobs = [Job(f"r{i}", *pair) for i, pair in enumerate(lengths[: len(dues)])]
    line = deque(zip(dues, requests_of(jobs, scheduler), strict=True))
    clock, lines = 0.0, {}
    while line or scheduler.has_requests():
        busy = len(scheduler.running) + len(scheduler.waiting)
        while line and (busy < clients if clients else line[0][0] <= clock):
            due, request = line.popleft()
            sent = clock if clients else due
            lines[request.id] = Timeline(request.prompt_len, sent)
            scheduler.add(request)
            busy += 1
        plan = run_step(scheduler)
        if plan is None:  # nobody is there: sleep until somebody comes
            clock = line[0][0]
            continue
        if pause and pause[0] <= clock:
            clock, pause = clock + pause[1], None
        clock += step_seconds(plan.num_tokens)
        for item in plan.items:
            if item.samples:
                lines[item.request_id].arrivals.append((clock, 1))
                lines[item.request_id].end = clock
    return list(lines.values()), clock


# %% [markdown]
# When do people come in an open loop? `Load.delays` draws the gaps: exponential ones,
# as of people who do not know of each other (a **Poisson process**), or burstier or
# more even ones, by the `burstiness` of a gamma distribution. `Load.rate` lets the rate
# ramp up during a run. `pagedattn bench serve` sends by the same code.

# %%
from pagedattn.bench.online import Load
from pagedattn.book import show

show(Load.rate, Load.delays)

# %%
from itertools import accumulate

GOALS = {"ttft": 2000, "tpot": 150}  # milliseconds
HEAD = f"{'':11}{'req/s':>7}{'tok/s':>7}{'TTFT mean':>11}{'p50':>7}{'p99':>7}"
HEAD += f"{'ITL mean':>10}{'p99':>6}{'E2EL p99':>10}{'good/s':>8}"


def line_of(name, r):
    return (
        f"{name:11}{r['request_throughput']:7.2f}{r['output_throughput']:7.0f}"
        f"{r['mean_ttft_ms']:11.0f}{r['median_ttft_ms']:7.0f}{r['p99_ttft_ms']:7.0f}"
        f"{r['mean_itl_ms']:10.0f}{r['p99_itl_ms']:6.0f}{r['p99_e2el_ms']:10.0f}"
        f"{r['request_goodput']:8.2f}"
    )


def dues(rate, n=256):
    return list(accumulate(Load(request_rate=rate).delays(n)))


print(HEAD)
for clients in (1, 4, 16, 32):
    closed = summary(*serve([0.0] * 256, clients), (99,), GOALS)
    print(line_of(f"{clients} clients", closed))
rates = (0.5, 0.8, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 2.0)
runs = {rate: summary(*serve(dues(rate)), (99,), GOALS) for rate in rates}
for rate in (0.5, 1.0, 1.2, 1.4, 1.6, 2.0):
    print(line_of(f"{rate} /s", runs[rate]))

# %% [markdown]
# There is the 6.4: mean TTFT with 1.6 requests a second arriving. The closed loop with
# 16 clients had found the *capacity*, 1.39 requests a second, at a comfortable 0.58
# seconds. An open loop just above that capacity has no comfortable figure at all. The
# queue grows for as long as the benchmark runs, and so the answer depends on how long
# that is:

# %%
for n in (32, 64, 128, 256):
    r = summary(*serve(dues(1.6, n)))
    print(f"{n:4} requests: mean TTFT {r['mean_ttft_ms']:6.0f} ms")

# %% [markdown]
# A figure that grows with the length of the run is no figure. First find the rate
# that the machine can sustain, from a closed loop with enough clients or from "all at
# once" (`--request-rate inf`, the default, which measures throughput and nothing else).
# Then measure latency in an open loop *below* it.

# %% [markdown]
# ## What to note of each request
#
# The names are those of vLLM's benchmark, and `pagedattn/bench/timeline.py` defines
# them in a few lines. **TTFT** is the time to first token: queue and prompt. **ITL**,
# inter-token latency, is the gap between two arrivals, and each gap is one value.
# **TPOT**, time per output token, is the mean gap of one request, and each request is
# one value. E2EL is the whole. In `Timeline.values` each is a line; `output_tokens`
# counts tokens and not arrivals, since one arrival may bring several; `ok` says whether
# the request counts at all.

# %%
show(Timeline)

# %% [markdown]
# By hand: sent at 1 s, pieces at 1.5, 1.6 and 1.9 s, and the last piece has two tokens.

# %%
one = Timeline(10, 1.0, [(1.5, 1), (1.6, 1), (1.9, 2)], 1.9)
for metric in ("ttft", "itl", "tpot", "e2el"):
    print(f"{metric:5}", [round(value, 1) for value in one.values(metric)])

# %% [markdown]
# TPOT leaves out the first token, whose time is TTFT. Otherwise a long prompt would
# look like slow writing. Over all requests `summary` takes totals, and `_spread` takes
# the mean, the median, the deviation and **percentiles**: p99 is the value that 99 % do
# not exceed. `_keeps` asks whether one request met all goals, and the requests that did
# are counted as **goodput**.

# %%
from pagedattn.bench import timeline

show(summary, timeline._spread, timeline._keeps)

# %% [markdown]
# ## Why means lie
#
# Look back at the row of 1.2 requests a second: TTFT has a mean of 743 ms, a median of
# 496 and a p99 of 3,516. Half of the readers had at most two thirds of the mean, and
# one in a hundred had more than four times as much. Latencies are never spread evenly
# around their mean, because a queue can only make things worse. And ITL: the mean gap
# is 94 ms and p99 is 668. A stream of 200 tokens has 199 gaps, so its reader meets two
# such gaps on average. The tail of ITL is everybody's experience.
#
# A high load hides in totals, too. Throughput only ever rises with the rate. The
# requests that anybody was happy with do not:

# %%
from matplotlib.figure import Figure

from pagedattn.viz.figure import chart

through = [r["request_throughput"] for r in runs.values()]
good = [r["request_goodput"] for r in runs.values()]

figure = Figure(figsize=(8, 3.4), layout="constrained")
axes = figure.subplots()
axes.plot(rates, through, "o-", color="#4477aa", label="answered")
axes.plot(
    rates, good, "s-", color="#228833", label="goodput: TTFT ≤ 2 s, TPOT ≤ 150 ms"
)
axes.set(xlabel="requests that come in a second", ylabel="a second", ylim=(0, 1.5))
axes.legend()
rows = zip(rates, through, good, strict=True)
text = "\n".join(f"{rate:4}/s: {t:.2f} answered, {g:.2f} good" for rate, t, g in rows)
chart(figure, text, "Answered requests level off at 1.39; goodput peaks and falls")

# %% [markdown]
# The peak of the green curve is what this machine is worth to these readers: about one
# request a second. At 2.0 it answers 1.38 a second, seven of eight too late. A
# benchmark that reports the blue curve alone would call that its best run.

# %% [markdown]
# ## Coordinated omission
#
# Let the server stop for 30 seconds, once, at second 100. Sixty-four requests, the same
# mean rate of arrival in both loops:

# %%
_, alone = serve([0.0] * 64, clients=1)
loops = {"closed": ([0.0] * 64, 1), "open": (dues(64 / alone, 64), None)}
for name, (when, clients) in loops.items():
    for pause in (None, (100.0, 30.0)):
        lines, _ = serve(when, clients, pause)
        slow = sum(t.values("e2el")[0] > 15_000 for t in lines)
        r = summary(lines, 1.0, (99,))
        print(
            f"{name:7}{'paused' if pause else '':7} TTFT mean {r['mean_ttft_ms']:5.0f}"
            f" p99 {r['p99_ttft_ms']:6.0f}   over 15 s: {slow} of 64"
        )

# %% [markdown]
# In the closed loop one request of 64 noticed, and its TTFT was over already when the
# pause came: not a digit of the column changes. The client stopped asking for as long
# as the server was stopped. Gil Tene named this **coordinated omission**: the measured
# and the measurer have agreed to skip the bad moments. In the open loop people go on
# coming, and their waiting counts from when they came.
#
# The mistake also creeps into open loops. A client that is limited to so many
# connections holds back what is due and starts the watch when it sends. Then the queue
# is in the client, where nobody looks. `--max-concurrency` of `bench serve` does that,
# here as in vLLM. It is good for finding capacity, and wrong for TTFT under load.

# %% [markdown]
# ## Warm-up and noise
#
# The first requests of a real run meet what no later one does: kernels that are still
# to be compiled or read from the disk, memory that was never touched, an empty prefix
# cache. And a benchmark that sends the same prompts twice measures the prefix cache the
# second time. So `bench latency` runs ten batches before it counts (and empties the
# cache after each), `bench serve` has `--num-warmups`, and every model on the ladder
# below runs a little before its clock starts.
#
# Then there are the neighbours. A laptop throttles, a virtual machine shares its cores.
# Suppose that version B really is 3 % faster, on a machine whose speed wanders and
# sometimes halves for a while. Ten runs of each, 200 experiments: first all A and then
# all B, or A and B in turns, with the ratio taken of each pair.

# %%
import random
from statistics import median


def speeds(draw, n):
    busy = False
    for _ in range(n):
        busy = draw.random() < (0.85 if busy else 0.1)
        yield (0.5 if busy else 1.0) * draw.uniform(0.97, 1.03)


def ratios(in_turns, experiments=200):
    for seed in range(experiments):
        runs = list(speeds(random.Random(seed), 20))
        if in_turns:
            yield median(
                1.03 * b / a for a, b in zip(runs[::2], runs[1::2], strict=True)
            )
        else:
            yield 1.03 * median(runs[10:]) / median(runs[:10])


for name, in_turns in (("first A, then B", False), ("in turns", True)):
    found = sorted(ratios(in_turns))
    wrong = sum(ratio < 1 for ratio in found)
    print(f"{name:16} {found[20]:.2f} to {found[180]:.2f}; {wrong} of 200: A is faster")

# %% [markdown]
# The middle 80 % of the experiments are printed. One version after the other, they say
# anything between half and one and a half, and a third of them find the slower version
# faster. In turns, all 200 find the right one. So: **alternate, and quote the ratio**,
# not two numbers of seconds. Every figure in `book/measured/LOG.md` that we trust was
# taken in that way, and it lists what did not work, too.

# %% [markdown]
# ## The ladder
#
# What is each idea of this book worth? `pagedattn/bench/ladder.py` runs one small
# greedy workload in nine ways. A rung has all that those below it have, and one thing
# more; `Rung.adds` names it. All of it is the engine's own code: the scheduler with
# other settings, the runner, the model with other kernels. `Rung.share` bounds the slow
# ones: without a cache one request is enough. `config_for` is the whole difference
# between rungs 2 and 7.

# %%
from pagedattn.bench import ladder

show(ladder.Rung, ladder.config_for)

# %% [markdown]
# The pool is the same for all and holds four requests of the longest kind. Rungs 3 and
# 4 reserve that much for everybody, so four run at once. From rung 5 on blocks are
# taken one by one, and at most eight run. The loop is `_schedule`: plan, run, commit,
# as in chapter 09. The one thing that a static batch does is in its first `if`.

# %%
show(ladder._schedule)

# %% [markdown]
# Rungs 1 to 7 compute in plain torch, with the kernels' specification and `F.linear`.
# Rungs 8 and 9 change nothing about who computes what when. They put packed weights,
# then the compiled kernels, under the same schedule. `model_for` loads the model for a
# rung, and `plain_products` is the switch: it replaces one function of
# `model/linear.py` while a model is loaded.

# %%
show(ladder.model_for, ladder.plain_products)

# %% [markdown]
# What is packed? `pack` cuts a weight into panels of 16 outputs (32 with AVX-512),
# whose weights stand side by side for each input. `linear` multiplies panel by panel,
# so each weight is read from memory once, from end to end. In the numba version
# `multiply_panel` does one panel for all rows, with the sums in vector registers;
# panels are dealt out to threads, and `linear_panel` says which comes next, so that it
# is fetched meanwhile.

# %%
from pagedattn.kernels import cpu, spec

show(spec.pack, spec.linear)
show(cpu.pack, cpu.linear, cpu.linear_panel, cpu.multiply_panel)

# %% [markdown]
# A benchmark must first be right. `parted` compares every rung's tokens with those that
# the rungs before it said. They have to be the same, unless the best two logits were
# closer than 0.0001, where products that are summed in another order may decide
# otherwise. Whatever parts elsewhere is a bug, and ends the run.

# %%
show(ladder.parted)

# %% [markdown]
# Here is the ladder on a random model of six layers, small enough for a notebook.
# Counts first. They depend on the lengths alone, so the demo model has the same.

# %%
import tempfile
from pathlib import Path

from pagedattn.model.source import resolve
from pagedattn.testing import make_tiny_model

with tempfile.TemporaryDirectory() as folder:
    model = make_tiny_model(Path(folder), layers=6, width=512)
    rungs = ladder.climb(resolve(str(model)))
print(ladder.table(rungs))

# %% [markdown]
# Read it downwards.
#
# 1. One request of six tokens: 399 tokens go through the model for six that come out.
# 2. With a cache every token is computed once, and every pass gives one token.
# 3. Static batches of four: two tokens a pass, and under a third of the reserved slots
#    are filled, since those who have ended keep their seats. (Twelve requests from here
#    on; compare what is per pass.)
# 4. Continuous batching takes 44 passes instead of 72. A long prompt now arrives in the
#    middle of others' answers: the gap goes from 4 tokens to 194.
# 5. Paged: nearly all slots that are held are filled, so more requests run at once.
#    They do not all fit to their end, and 257 tokens are computed twice: preemption.
# 6. The prefix of 48 tokens is computed once instead of twelve times. Its blocks are
#    shared as well, so everybody fits, and nobody is preempted.
# 7. Chunks: no stream waits for more than 32 tokens. That is what they buy, and the
#    price is seven passes more.
#
# Rungs 8 and 9 cannot show here. In a picture, output tokens of a forward pass:

# %%
passes = {row.rung.adds: row.together for row in rungs[:7]}
chart(
    ladder.staircase(passes, "output tokens a forward pass"),
    ladder.table(rungs),
    "Output tokens of a forward pass, from 1 without batching to 5 with all ideas",
)

# %% [markdown]
# And now seconds, from the same runs, on the machine that made this page. The figures
# will differ on yours; run the cell.

# %% tags=["volatile"] reason="seconds, on the machine that ran it"
print(ladder.timing(rungs))
chart(
    ladder.staircase({r.rung.adds: r.rate for r in rungs}, "output tokens a second"),
    ladder.timing(rungs),
    "Output tokens a second on each rung",
)

# %% [markdown]
# Compare the two staircases. Where a step is high in one and low in the other, an idea
# saved passes that were cheap, or made passes cheaper. A random model of 14 million
# weights has passes that are bound by small operations rather than by memory, so
# batching brings less here than the counts promise. And blocks (rung 5) bring little in
# a pool this small: the 257 tokens that are computed twice cost about what ten passes
# fewer save. `pagedattn bench ladder --plot
# ladder.png` climbs with the demo model, which takes about a minute on an idle machine.
#
# Restricted to one core of the reference machine, the demo model climbed from 2.8 to
# 34.9 tokens a second, 12.5 times: × 2.7 for the cache, 1.2 static, 1.3 continuous, 1.3
# paged, 1.7 prefix, 0.8 chunks (which took the longest gap from 460 to 308 ms), 1.3
# packed, 1.4 fused. Larger pools and longer lines of requests move all of these up.
#
# Each rung runs once, one after the other: just what the last section warned of. We
# once ran it while another program used the same two cores. It said that chunked
# prefill halved the speed and that packed weights cost a further factor of nearly
# three. The tokens and the counts were the same as ever. A step of less than a third
# means nothing here until you have repeated it.
#
# > **Takeaway.** A speed-up is a ratio of two answers to one question. Fix the work,
# > the loop and the percentile; count before you time; measure both sides in turns. A
# > figure without its question is an advertisement.

# %% [markdown]
# ## Where "2 to 4" and "24" come from
#
# The paper (Kwon et al., SOSP 2023) compares *sustained request rates at similar
# latency*, in an open loop with Poisson arrivals, against FasterTransformer and three
# versions of Orca, all with good kernels. Its abstract says 2 to 4 times. On ShareGPT
# it reports 1.7 to 2.7 times over Orca (Oracle) and 2.7 to 8 times over Orca (Max). The
# announcement of June 2023 compares *throughput* with Hugging Face Transformers: up to
# 24 times. The other side differs, so the number does.
#
# The shape can be counted. Chapter 03 ran 600 conversations through the three
# reservation schemes and through blocks, in the memory of the paper's A100. Here are
# 300, and with them the two ways of using transformers directly: one request at a time,
# and static batches of as many as fit when everybody reserves 2,048 slots.

# %%
from pagedattn.bench.reserve import LONGEST, SLOTS, paged, reserved
from pagedattn.bench.workloads import SHAREGPT

talks = SHAREGPT.draw(300)
answers = [answer for _, answer in talks]
wanted = sum(answers)
static = SLOTS // LONGEST  # requests in a batch
batches = [answers[i : i + static] for i in range(0, len(answers), static)]
at_once = {
    "one by one": 1.0,
    f"static batches of {static}": wanted / sum(map(max, batches)),
    "Orca (Max)": reserved(talks, "Max").at_once,
    "Orca (Oracle)": reserved(talks, "Oracle").at_once,
    "blocks": paged(talks).at_once,
}
print(f"{wanted:,} tokens wanted   at once   passes   blocks need fewer by")
for name, n in at_once.items():
    print(f"{name:22} {n:9.1f} {wanted / n:8,.0f} {at_once['blocks'] / n:8.1f} ×")

# %% [markdown]
# 2.6 and 4.6 against systems that batch continuously, 32 against a loop that serves one
# after the other. But a pass with 32 rows is not as quick as one with
# one row. It reads the same weights, and 32 contexts instead of one. Chapter 01 knows
# what that costs at least, for Llama-2-13B, which has the layers and heads of the
# paper's OPT-13B, on an A100 (the table there has the one of 80 GB):

# %%
from pagedattn.bench.costs import DEVICES, SHAPES, decode

a100, llama = DEVICES["A100 80GB SXM"], SHAPES["Llama-2-13B"]
context = sum(prompt + answer // 2 for prompt, answer in talks) // len(talks)


def tokens_a_second(n):
    return n / decode(llama, round(n), context).seconds(a100)


best = tokens_a_second(at_once["blocks"])
for name, n in at_once.items():
    speed = tokens_a_second(n)
    print(f"{name:22} {speed:6.0f} tokens/s at best, blocks {best / speed:5.1f} ×")

# %% [markdown]
# That the first line comes so near to the announcement's figure is luck: other models,
# cards and baselines went into that. The shape is not. "Up to 24 times" is what filling
# the batch is worth against a server that does not batch well, and "2 to 4 times" is
# what memory without holes is worth against one that does. Neither is a property of the
# attention kernel, which the paper measured to be 20 to 26 % slower than
# FasterTransformer's, for its scattered blocks.
#
# On the mixed workload of chapter 05, on two cores, the same shape: one by one takes
# 5,843 passes, static batches of sixteen 744, this engine 447. In seconds, with
# transformers in static batches sorted by length, its kindest use: 202.5 against 39.0
# (`book/measured/LOG.md`). Passes explain at most 1.7 of that factor of 5.2. The rest
# is padding, and passes that are slower.

# %% [markdown]
# ## The step against its floor
#
# Ratios tell how far you have come. To know how far there is to go, one needs the
# **floor**: the least time that the machine needs for the bytes and FLOPs of a step.
# `pagedattn bench ceilings` measures two rates, products and memory, with nothing else
# in the way. `Ceilings.floor` is the roofline of chapter 01 in one line, and
# `linear_work` says what a product cannot avoid: every weight once, inputs, outputs.

# %%
from pagedattn.bench.ceilings import Ceilings
from pagedattn.bench.profile import Profile, linear_work

show(Ceilings.floor, linear_work)

# %% [markdown]
# While a `Profile` is attached, every part of a step is called between two readings of
# a clock. Spans contain one another: a step contains a forward pass, which contains
# products. `Profile.rows` gives each its *own* time, so that the column adds up to the
# whole. Here the demo model answers eight requests.

# %%
from pagedattn import LLM
from pagedattn.bench import offline
from pagedattn.bench.datasets import Sample
from pagedattn.bench.workloads import random_prompts

show(Profile.rows)

# %%
limits = {"max_model_len": 256, "max_num_batched_tokens": 512}
engine = LLM(**limits, enable_prefix_caching=False).llm_engine
batch = [Sample(tuple(p), 8) for p in random_prompts([32] * 8, 49152)]
offline.run(engine, batch[:1], progress=False)  # warm up
profile = Profile()
with profile.attached(engine):
    offline.run(engine, batch, progress=False)
parts = profile.rows()
for name in ("step", "linear 1536 x 576", "linear 576 x 49152", "decode_attention"):
    row = parts[name]
    print(f"{name:19} {row.calls:4} calls {row.flops / 1e9:6.2f} GFLOP", end=" ")
    print(f"{row.bytes / 1e6:8,.1f} MB")

# %% tags=["volatile"] reason="milliseconds, on the machine that ran it"
print(profile.table())

# %% [markdown]
# The first column of such a table to read is *share*, the second *reached*. A part with
# a large share and little reached is the next thing to work on. One with a small share
# may stay as it is, however little it reaches: nobody would notice. Everything that is
# not the model (schedule, batch, sample, output, commit) should be a few per cent at
# most. The floors are of float32 on a machine where nothing else runs, and a part that
# "reaches" more than 100 % finds its data in the processor's cache.
#
# `pagedattn bench latency --profile trace.json` and `bench throughput --profile` print
# this table for your work and write a trace that chrome://tracing opens. To measure a
# server from outside, as its clients see it:
#
# ```sh
# pagedattn serve --port 8000
# pagedattn bench serve --request-rate 1 --num-prompts 200 --num-warmups 4 \
#     --dataset-name random --input-len 128 --output-len 64 --ignore-eos \
#     --goodput ttft:2000 tpot:150 --plot run.png
# ```
#
# It prints vLLM's report and measures any server that speaks OpenAI's protocol, so that
# both sides of a comparison can be asked the same question.

# %% [markdown]
# ## Properties, and a broken line
#
# Definitions must fit together. However the tokens of a request arrive, TTFT and the
# gaps add up to the whole, and so do TTFT and TPOT times the tokens after the first:

# %%
from hypothesis import strategies as st

from pagedattn.book import broken, falsify, holds


def parts_make_the_whole(gaps):
    times = list(accumulate(gap for gap, _ in gaps))
    tokens = [n for _, n in gaps]
    t = Timeline(1, 0, list(zip(times, tokens, strict=True)), times[-1])
    (first,), (whole,) = t.values("ttft"), t.values("e2el")
    assert abs(first + sum(t.values("itl")) - whole) < 1e-6
    for mean in t.values("tpot"):
        assert abs(first + mean * (sum(tokens) - 1) - whole) < 1e-6


gaps = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=6)
holds(parts_make_the_whole, gaps)

# %% [markdown]
# Now divide by all tokens instead of those after the first, a mistake that any
# benchmark's first version makes. The means become a little smaller and nobody minds.

# %%
with broken(Timeline.values, "self.output_tokens - 1", "self.output_tokens"):
    falsify(parts_make_the_whole, gaps)

# %% [markdown]
# Two tokens are enough. The only gap is 1, and the broken line says that it is a half.
# And a closed loop of *c* clients must never have more than *c* requests under way.
# `_most_at_once` counts them by walking through comings and goings in order of time,
# and of two at the same moment the one who leaves goes first.

# %%
show(timeline._most_at_once)

# %%


def clients_wait(n, clients):
    lines, duration = serve([0.0] * n, clients)
    assert summary(lines, duration)["max_concurrent_requests"] == min(n, clients)


world = st.integers(1, 12), st.integers(1, 6)
holds(clients_wait, *world, examples=40)
with broken(
    timeline._most_at_once, "(t.end or t.sent, -1)", "((t.end or t.sent) + 1e-9, -1)"
):
    falsify(clients_wait, *world)

# %% [markdown]
# With those who come before those who leave, two requests of one client overlap by a
# moment, and the report says that two were under way. Small mistakes in a ruler are
# found like all others: by saying what must always be true.

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex15_measure.py` is `pagedattn/bench/timeline.py` without the
# definitions: what a request adds to each metric, their spread, goodput, the busiest
# second, and the most requests at once. `make exercise N=15` runs the engine's tests on
# your file and ends with one hint; `make hint N=15` gives a hint alone.
#
# **Find the bug.** `exercises/bug15_measure.py` reports a *peak* throughput below the
# mean, which cannot be, but only for servers that send several tokens in one piece.
# `make exercise N=bug15`.
#
# **Measure.** Start `make serve`. Find its capacity with `bench serve --request-rate
# inf`, then measure p99 TTFT at 50, 80, 95 and 110 % of it, in turns, twice. Before you
# look: at which of the four does the second round agree with the first?
#
# **Question.** A colleague has made the engine's kernels 20 % faster and shows that p99
# TTFT at one request a second fell by 60 %. Is that possible, and what would you ask
# to see?
#
# <details><summary>Discussion</summary>
#
# *Build.* A request of one token has no TPOT at all: not zero, none. In `_keeps` such a
# request keeps any TPOT goal. `_most_at_once` needs pairs that sort leaving before
# coming, and a −1 does that by itself.
#
# *Find the bug.* Pieces are not tokens. vLLM's `calculate_metrics` counts tokens from
# the server's own `usage`, and its comment says why: several may be bundled together.
# Its peak was built from the gaps between pieces all the same, one token for each, and
# so a run with speculative decoding had a peak of 28 % of its mean (pull request 50677,
# August 2026).
#
# *Measure.* At 50 and 80 % they agree. Near 100 % the queue's length is a matter of
# luck, and at 110 % it is a matter of how long you look.
#
# *Question.* It is possible, near capacity. If one request a second was 95 % of what
# the machine could do and is now 79 %, the queue is all but gone: in the table above,
# 1.2 a second instead of 1.4 takes mean TTFT from 2.5 to 0.7 seconds. Ask for the curve
# over several rates instead of one point, for goodput, and for both versions in turns.
# The gain is real for whoever runs that near the edge, and 20 % for everybody else.
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# Names as of summer 2026, under `vllm/benchmarks/`; `vllm bench serve`, `throughput`
# and `latency` run them.
#
# - `serve.py`: `benchmark` is our `online.run`, `get_request` our `Load.delays` (gamma
#   gaps and ramps; it then stretches them so that the last request is due exactly when
#   the rate says), `calculate_metrics` our `summary`. Our definitions, names and report
#   are meant to be the same, so that figures can be laid side by side.
# - `lib/endpoint_request_func.py` has a client function for each kind of endpoint. Its
#   forerunner, `benchmarks/backend_request_func.py`, had some for other engines' own
#   protocols as well: comparing was what the script was made for.
#   `lib/ready_checker.py` waits until the server answers.
# - `datasets/` has one class for each kind of workload: ShareGPT, random, prefix
#   repetition, recorded traces with their own times.
# - `throughput.py` and `latency.py` run in one process, as our `offline`. The first
#   version of the throughput script, `benchmarks/benchmark_throughput.py`, had the
#   other side built in: `run_hf` fills static batches for transformers' `generate` and
#   lets each run to its longest answer.
# - `sweep/` runs a server over a grid of settings and rates and draws the front of what
#   can be had: throughput against latency, instead of a single point.
#
# Its loop counts a request's time from when it is sent, after the wait for
# `--max-concurrency`, as ours does. Left out here: sweeps, probes that measure while
# the load runs, energy, and profiles from inside CUDA (`--profile`, which starts
# torch's profiler in the server).
#
# [← 10 Grammars](10_grammars.ipynb) · [16 In production →](16_production.ipynb)
