# %% [markdown]
# # 01 · What one token costs
#
# [← 00 The map](00_map.ipynb) · [02 Tokens →](02_tokens.ipynb)
#
# Llama-2-7B has 6,738,415,616 weights. To make one token, a piece of a word, it
# multiplies and adds with almost every one of them: 13.2 billion floating-point
# operations (FLOPs). An H100 can do 989,400 billion of those in a second. That is
# enough for 75,000 tokens a second. A reader who has the whole chip for herself gets
# 254 a second at the very most. **What is the chip doing in the other 99.7 % of the
# time?**
#
# The answer decides what an inference engine is for, and it takes no GPU to find it.
# Counting is enough. This chapter counts multiplications and bytes; the engine's module
# for that is `pagedattn/bench/costs.py`.

# %%
from pagedattn.bench.costs import DEVICES, SHAPES, decode

llama, h100 = SHAPES["Llama-2-7B"], DEVICES["H100 SXM"]
token = decode(llama, batch=1, context=1).products
print(f"{llama.weights:,} weights, {token.flops / 1e9:.1f} GFLOP a token")
print(f"by arithmetic: {h100.flops / token.flops:>7,.0f} tokens/s")
print(f"by memory:     {h100.bandwidth / token.bytes:>7,.0f} tokens/s")

# %% [markdown]
# ## The naive way: compute everything again
#
# A language model takes a row of tokens and gives back, for each position, a vector.
# From the last vector we choose the next token, append it, and ask again. A loop of
# seven lines does that. The model here is a stand-in from `pagedattn.testing`: two
# layers in which each position hashes everything that stands before it, in order. It
# speaks nonsense, but a wrong or missing earlier token changes every later one, so that
# it makes a strict judge. The engine's tests use it for the same reason.

# %%
from pagedattn.testing import hash_logits, naive_hidden


def generate(prompt, answer):
    tokens, computed = list(prompt), 0
    for _ in range(answer):
        hidden = naive_hidden(tokens, windows=(0, 0))  # every position, both layers
        computed += len(hidden)
        tokens.append(int(hash_logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :], computed


prompt = list(range(12))
said, computed = generate(prompt, 6)
print(said, f"{computed} positions computed")

# %% [markdown]
# Twelve tokens of prompt and six of answer cost 12 + 13 + … + 17 = 87 computed
# positions. The sum grows with the square of the length.
#
# Now look at what is computed twice. Decoders are **causal**: position *p* reads
# positions 0 to *p*, never later ones. So what a layer has stored for position 3 is the
# same whether the text is five tokens long or five thousand, and need not be computed
# again. It must be kept. Here is the loop that keeps it. `cache` has one list for each
# layer.

# %%
import numpy as np

from pagedattn.testing import attend, embed


def generate_cached(prompt, answer):
    tokens, cache, computed = list(prompt), ([], []), 0
    for _ in range(answer):
        while computed < len(tokens):  # the positions that we are behind by
            at = np.array([computed], np.uint64)
            (value,) = embed(np.array([tokens[computed]]), at)
            for layer in cache:
                layer.append(value)
                value = attend(np.array(layer))
            computed += 1
        tokens.append(int(hash_logits(np.array([value])).argmax()))
    return tokens[len(prompt) :], computed


cached, computed = generate_cached(prompt, 6)
print(cached == said, f"{computed} positions computed")

# %% [markdown]
# The same six tokens, from 17 computed positions. The last sampled token is never
# computed, since nobody asks what follows it.
#
# In a real transformer, what a layer keeps of a position is two vectors for each head:
# a **key**, by which later positions find it, and a **value**, which they read. Hence
# the name **KV cache**. The `while` loop above holds the idea on which this engine's
# scheduler is built, too: a request is so many tokens *behind*, and a step computes
# them, whether that is a whole prompt or one sampled token. Computing a prompt is
# called **prefill**, computing one token at a time **decode**. The engine has one loop
# for both.

# %% [markdown]
# ## Measure: 370 times the arithmetic, 2.5 times the time
#
# First in positions, for answers of growing length.

# %%
print("prompt  answer  without a cache  with one   ratio")
for prompt_len, answer in ((12, 6), (12, 60), (12, 600), (500, 500), (2000, 2000)):
    again = sum(range(prompt_len, prompt_len + answer))
    once = prompt_len + answer - 1
    print(f"{prompt_len:6} {answer:7} {again:16,} {once:9,} {again / once:7,.1f}")

# %% [markdown]
# Then in FLOPs and in time, for Llama-2-7B on an H100: a prompt of 500 tokens and an
# answer of 500. `generation` lists the steps of such a request and what each must cost;
# the rest of this chapter explains how it knows.

# %%
from pagedattn.bench.costs import generation

for name, cached in (("without a cache", False), ("with one", True)):
    steps = generation(llama, 500, 500, cached)
    flops = sum(s.total.flops for s in steps)
    seconds = sum(s.seconds(h100) for s in steps)
    print(f"{name:16} {flops / 1e12:8,.1f} TFLOP, at least {seconds:.2f} s")

# %% [markdown]
# The cache removes 369 of 370 parts of the arithmetic, and the request becomes only
# two and a half times as fast. Without the cache a step is busy with arithmetic; with
# it the step waits for something else. The cache did not make the reader's chip fast.
# It made it idle, and an idle chip can serve others at the same time. That is where the
# other factors come from.

# %% [markdown]
# ## Picture: what is computed, what is kept
#
# Ann's request is the book's example: twelve words of prompt, six of answer. Each row
# is one step, each square one position, four positions to a block.

# %%
from pagedattn.viz.roofline import token_work

token_work(prompt=12, answer=6)

# %% [markdown]
# And this is where the kept positions lie in the engine: ten blocks of four slots, Ann
# in five of them at her last step. The real scheduler made this picture. Its plans,
# printed below, say how many positions each step computed.

# %%
from pagedattn.viz.story import cast, play, stage
from pagedattn.viz.strip import still

scheduler, camera = stage(num_blocks=10)
plans = play(scheduler, camera, cast()[:1])
print([plan.num_tokens for plan in plans], sum(plan.num_tokens for plan in plans))
last = [f for f in camera.film().frames if f.text == "Ann computes 1 token"][-1]
still(last, ["Ann"], block_size=4)

# %% [markdown]
# ## The weights of a 7B model
#
# A decoder of the Llama kind is a stack of equal layers. Nine numbers say all about its
# size; `Shape` holds them. A layer has two parts. **Attention** makes, from a vector of
# `hidden` numbers, queries, keys and values for its heads (three matrices), lets
# queries find keys, and sends the result through a fourth matrix. The **MLP** makes the
# vector longer (two matrices, gate and up), and short again (down). Before the first
# layer a table turns ids into vectors; after the last, the output head turns a vector
# into a score for each word of the vocabulary.
#
# `attention`, `mlp` and `head` count the weights of those matrices, `matrices` all that
# a token meets on its way through the layers, `vectors` the few that belong to norms
# and biases. `weights` is their sum: where `tied`, the head is the table itself and
# counts once.

# %%
from pagedattn.bench.costs import Shape
from pagedattn.book import show

show(Shape, section="Weights, counted")

# %%
for name in ("Llama-2-7B", "Llama-3-8B"):
    s = SHAPES[name]
    print(f"{name}: {s.layers} layers × ({s.attention:,} + {s.mlp:,})")
    print(f"  = {s.matrices:>13,} in the layers' matrices")
    print(f"  + {2 * s.head:>13,} in the embedding table and the head")
    print(f"  + {s.vectors:>13,} in norms")
    print(f"  = {s.weights:>13,}; in bfloat16 {2 * s.weights / 1e9:.1f} GB")

# %% [markdown]
# These are the numbers on the model cards, to the last digit. The tests ask more: for
# random shapes of five families they build transformers' own model, on torch's "meta"
# device where weights take no memory, and count.
#
# One multiplication and one addition for each weight of a matrix is two FLOPs. So a
# token costs about twice the number of weights: 13.2 GFLOP here. The embedding table is
# looked up, not multiplied, which is why it is not 13.5.

# %% [markdown]
# ## The keys and values of a 7B model
#
# For each token, each layer keeps one key and one value for each **KV head**.
# `kv_bytes` multiplies that out. `width` is the size of a number: 2 bytes in bfloat16
# or float16, 4 in float32.

# %%
show(Shape, section="Keys and values, counted")

# %% [markdown]
# In Llama-2-7B each of the 32 query heads has a KV head of its own. In Llama-3-8B four
# query heads share one: 32 query heads, 8 KV heads. That is **grouped-query attention**
# (Ainslie et al., 2023), and this is what it is for:

# %%
print(f"{'':14}{'weights':>9}{'query/KV':>10}{'KV a token':>13}{'even at':>16}")
for name, s in SHAPES.items():
    even = 2 * s.weights // s.kv_bytes()  # tokens whose KV weigh as much as the model
    print(
        f"{name:14}{2 * s.weights / 1e9:>6.1f} GB{s.heads:>7}/{s.kv_heads:<2}"
        f"{s.kv_bytes() / 1024:>9.1f} KiB{even:>9,} tokens"
    )

# %% [markdown]
# Half a mebibyte for one token, a few letters of text, in Llama-2-7B. At 25,700 tokens,
# little more than six conversations at its full length of 4,096, the keys and values
# are as large as the whole model. Llama-3-8B needs a quarter of that. Without sharing
# heads, the 70B model would need eight times what it does. (The 800 KiB of Llama-2-13B
# are the "800 KB" of the PagedAttention paper: its example, OPT-13B, has the same
# layers and heads.)
#
# The weights are there once, for everybody. Keys and values are there once for each
# reader. So they decide how many readers fit. `concurrency` does the sum: a share of
# the memory, minus the weights, divided by what one request needs.

# %%
from pagedattn.bench.costs import concurrency

show(concurrency)

# %%
for name in ("Llama-2-7B", "Llama-3-8B"):
    fits = [concurrency(SHAPES[name], h100, c) for c in (500, 1000, 2000, 4096)]
    print(f"{name} on an {h100.name}: {fits} requests of 500, 1000, 2000, 4096 tokens")

# %% [markdown]
# 27 readers with a context of 4,096 tokens on a chip of 80 GB. That holds if not a byte
# is lost to empty places; [chapter 03](03_blocks.ipynb) is about how easily two thirds
# of it are.
#
# The engine's demo model, SmolLM2-135M, stands in the same table. `Shape.of` reads a
# model's configuration, without its weights. Nine query heads share three KV heads, and
# as this engine computes in float32 on a CPU, a token takes twice what the table says:

# %%
from pagedattn.model.loader import load_config
from pagedattn.model.source import resolve

demo = Shape.of(load_config(resolve()))
print(demo == SHAPES["SmolLM2-135M"], demo)
print(
    f"{demo.kv_bytes(width=4):,} bytes a token, {4 * demo.weights / 1e6:.0f} MB weights"
)

# %% [markdown]
# ## Arithmetic against memory
#
# A processor does two things at once. It computes, at so many FLOPs a second, and it
# moves numbers from memory, at so many bytes a second. Whatever takes longer decides.
# (Williams, Waterman and Patterson called the picture of this the **roofline** in
# 2009.) Divide a piece of work's FLOPs by the bytes it must move: that is its
# **arithmetic intensity**. Divide the chip's FLOP/s by its bytes/s: that is its
# **ridge**. Work whose intensity lies under the ridge is bound by memory, and the
# arithmetic units wait. Above it, memory waits.
#
# `Cost` is one piece of work, with its `intensity`, the side that is its `bound` on a
# device, and the least `seconds` it can take; `+` puts one after the other. A `Step` of
# the model has two pieces, because their bytes are of different kinds: `products`,
# which read weights, and `attention`, which reads the KV cache. They run one after the
# other, as in nearly every engine, so `seconds` adds them; `total` adds their costs;
# `together` joins two steps into one.

# %%
from pagedattn.bench.costs import Cost, Step, step

show(Cost, Step)

# %% [markdown]
# `step` counts both for a list of requests, each with its new tokens and its context.
# Three lines carry the argument of this chapter. FLOPs of products grow with the
# *tokens*. Bytes of products don't grow at all: however many tokens share the step,
# each weight is read once. Bytes of attention grow with every request's *context*,
# because nobody shares it.

# %%
show(step)

# %% [markdown]
# At position *p* a token meets *p* + 1 keys, its own included. With *n* new tokens
# after *c* − *n* earlier ones that makes *n* (*c* − *n*) + *n* (*n* + 1) / 2 meetings:
# a rectangle and a triangle. The tests compare all of it with what torch counts while
# transformers' model runs.
#
# Four steps of Llama-2-7B on an H100, each reader with a context of 1,000 tokens:

# %%
from pagedattn.viz.roofline import roofline

roofline(
    llama,
    h100,
    {
        "decode, batch 1": [(1, 1000)],
        "decode, batch 32": [(1, 1000)] * 32,
        "decode, batch 256": [(1, 1000)] * 256,
        "prefill of 2,048": [(2048, 2048)],
    },
)

# %% [markdown]
# Read the circles first. A bfloat16 weight has 2 bytes and takes part in 2 FLOPs for
# each token. One token: 1 FLOP for each byte. The H100's ridge is 295. So a lone decode
# uses 1/295 of the arithmetic, and that is the 99.7 % we were looking for: the chip is
# reading 13.2 GB of weights, which takes 3.94 ms, for 0.01 ms of arithmetic. With 32
# readers the *same* 3.94 ms give 32 tokens, with 256 they give 256. A prefill of 2,048
# tokens shares each weight 2,048 times and is far on the other side: **decode is bound
# by memory, prefill by arithmetic.**
#
# Now the squares. A key is read by the query heads of its group, and by nobody else in
# the batch. In Llama-2-7B that is one query: 1 FLOP for each byte, whatever the batch.
# Grouped-query attention lifts it to the size of the group:

# %%
for name in ("Llama-2-7B", "Llama-3-8B", "Qwen2.5-7B"):
    rates = [decode(SHAPES[name], n, 1000).attention.intensity for n in (1, 32, 256)]
    print(f"{name}: {rates} FLOPs/byte in a batch of 1, 32, 256")

# %% [markdown]
# Attention in decode stays under the ridge of every GPU. Batching does not help
# it, since the readers have nothing in common. (Unless they have: a shared beginning of
# the prompt, which is [chapter 04](04_prefix.ipynb).) What helps is fewer bytes: fewer
# KV heads, smaller numbers, a sliding window.
#
# > **Takeaway.** A step reads every weight once, for all its tokens together, and every
# > reader's keys and values, for that reader alone. So one token costs as much as
# > hundreds, until arithmetic is full, or memory is. An engine exists to fill the step.

# %% [markdown]
# ## Batching helps until the knee
#
# The **knee** is the batch at which the products' arithmetic takes as long as reading
# the weights. `knee` finds the first batch beyond it: for numbers of 2 bytes, about the
# ridge.

# %%
from pagedattn.bench.costs import knee
from pagedattn.viz.roofline import batching

show(knee)
print(knee(llama, h100))

# %%
batching(llama, h100, contexts=[128, 1000, 4096])

# %% [markdown]
# Three different things end the growth.
#
# 1. *Arithmetic.* At a context of 128 tokens, batching helps almost in full until the
#    knee at 296, then no more.
# 2. *Keys and values read.* At 1,000 tokens the curve bends long before the knee. 25
#    readers of 1,000 tokens have as many bytes of keys and values as there are of
#    weights; from there on, most of a step is reading what nobody shares. The limit is
#    bandwidth divided by one reader's bytes: 3,350 GB / 0.52 GB, or 6,400 tokens a
#    second if products cost nothing.
# 3. *Keys and values stored.* At 4,096 tokens memory is full at 27 readers.
#
# The rule of thumb "batch up to the ridge" knows of the first only. On one chip of
# 80 GB, Llama-2-7B gets there in short conversations alone: of 500 tokens, 223 fit, as
# printed above, and the knee is at 296. Llama-3-8B, with a quarter of the bytes, fits
# 426 requests of 1,000:

# %%
llama3 = SHAPES["Llama-3-8B"]
batching(llama3, h100, contexts=[128, 1000, 4096])

# %% [markdown]
# There is a price. Alone, a reader of Llama-2-7B at 4,096 tokens gets a token every 4.6
# ms. Among 27 she gets one every 21.3 ms. All together get 5.8 times as many tokens;
# each gets them 4.6 times as slowly. Batch size is where throughput is traded against
# latency, and `--max-num-seqs` is its handle.

# %%
for n in (1, 27):
    took = decode(llama, n, 4096).seconds(h100)
    print(f"{n:2} at once: a token in {1e3 * took:4.1f} ms, {n / took:5,.0f} a second")

# %% [markdown]
# ## Any model, any chip
#
# The same for Llama-3-8B on every device of the table. `DEVICES` takes the peak of
# dense bfloat16 products from the datasheets; many print twice as much, "with
# sparsity", which no ordinary checkpoint can use. The last row is measured: the two CPU
# cores of `book/measured/LOG.md`, in float32.

# %%
print(f"{'':14}{'ridge':>6}{'knee':>6}{'alone':>9}{'fit':>8}{'together':>10}")
for d in DEVICES.values():
    alone = 1 / decode(llama3, 1, 1024, d.width).seconds(d)
    fits = concurrency(llama3, d, 1024) or 0
    most = fits / decode(llama3, fits, 1024, d.width).seconds(d) if fits else 0
    print(
        f"{d.name:14}{d.ridge:>6.0f}{knee(llama3, d):>6}{alone:>9,.1f}"
        f"{fits or '-':>8}{f'{most:,.0f}' if fits else '-':>10}"
    )

# %% [markdown]
# `alone` is a lone reader's tokens a second with 1,024 tokens of context, `fit` how
# many such readers fit, `together` their tokens a second. (A dash: in float32 the
# weights alone are larger than that machine's memory.)
#
# A lone reader's speed is bandwidth divided by bytes, on all of them. An RTX 4090 gives
# her half of an A100's speed, and a B200 gives her four times as much as the A100; but
# together, 1,087 readers on the B200 get 21 times what 41 get on the 4090. Large chips
# sell room. And what limits differs: A100 and H100 fit equally many readers, 416 of
# them, who are beyond the knee on both. There the H100's products gain by its 3.2 times
# the arithmetic, its attention by 1.6 times the bandwidth; together that is 2.1 times
# the tokens. The H200 has the arithmetic of the H100 and twice as many readers; they
# read faster, and get 1.3 times as much.
#
# In JupyterLab the next cell draws this with sliders. Its first picture:

# %%
from pagedattn.viz.roofline import calculator_picture, roofline_calculator

calculator_picture(llama3, h100, batch=16, context=1024)

# %%
roofline_calculator()

# %% [markdown]
# ## Is it true?
#
# A bound is worth something if real engines come near it. This engine, measured on two
# CPU cores of the table's kind with the demo model on 2026-11-30 (`book/measured/
# LOG.md`): one stream of 128 tokens in and 128 out decodes 32 to 39 tokens a second; 64
# requests at once, of 9,467 prompt and 5,843 output tokens, take 36 to 38 seconds. The
# bounds for both:

# %%
from pagedattn.bench.workloads import mixed_lengths

cores = DEVICES["2 CPU cores"]
alone = decode(demo, 1, 192, cores.width).seconds(cores)
work = [s.total.flops for p, a in mixed_lengths() for s in generation(demo, p, a)]
print(f"one stream: at most {1 / alone:.0f} tokens/s; knee at {knee(demo, cores)}")
print(f"64 requests: at least {sum(work) / cores.flops:.0f} s of arithmetic")

# %% [markdown]
# So the engine comes near the bound alone, and reaches two thirds of it in a crowd.
# (The memory of a shared machine gives more on one day than on another; measure yours
# with `pagedattn bench ceilings`.) A CPU has little arithmetic for its memory, hence a
# knee at 14 requests, and even so 64 requests at once are worth it: one after the
# other, at 36 tokens a second, the 5,843 output tokens alone would take 162 seconds.

# %% [markdown]
# ## The product itself
#
# Nearly all FLOPs above are products of some rows with a weight matrix, and most bytes
# are that matrix. To come near the bound, a program must read each weight once and in
# order, and multiply eight or sixteen numbers with every instruction, as many as a
# vector register holds. The order in the file suits neither: one output's weights stand
# together, but a register wants the weights of several *outputs* for the same input. So
# `pack` turns the matrix into **panels** of 16 or 32 outputs, two registers wide, when
# the model is loaded, and `linear` multiplies with panels. As in all of
# this engine, a kernel is written twice: in plain torch in `kernels/spec.py`, which
# says *what* is computed, and in numba in `kernels/cpu.py`, which computes it fast.

# %%
from pagedattn.kernels import cpu, spec

show(spec.pack, spec.linear)

# %% [markdown]
# In numba, `pack` leaves the turning to numpy, and `linear` deals out panels to the
# threads with `for_each`; `linear_panel` is one of them, and knows which comes next.
# `multiply_panel` takes up to six rows at a time (13 with AVX-512) and holds all their
# sums in registers, as attention does ([chapter 06](06_attention.ipynb)). One row of a
# decode streams the panel from memory and is gone; sixty-four rows find it in the
# processor's cache ten times more. One layout serves both ends of the roofline. And
# every sum runs over the inputs in order, whatever rows stand beside it: a request's
# product is the same to the last bit alone and in a crowd.
#
# The roofline says that arithmetic and memory take time *together*, not one after the
# other. The program has to see to that: while a panel is multiplied, each tile asks for
# its share of the next one (`stream_tile`). With 12 rows that took 30 % off (AVX2).

# %%
show(cpu.pack, cpu.linear, cpu.linear_panel, cpu.multiply_panel)

# %% [markdown]
# On two cores of the kind in our table it streams weights at 24 to 34 GB/s for one row
# (that day, memory gave more than the table's 22) and reaches 143 to 176 GFLOP/s from
# 64 rows on; oneDNN, the library that torch brings, took 1.06 to 1.95 times as long in
# the same run. On two with AVX-512 it was 38 GB/s and 277 to 299 GFLOP/s, and oneDNN
# took 0.99 to 1.8 times as long (`book/measured/LOG.md`).
#
# ## What else a forward pass does
#
# Between products and attention a layer does small things to each token's vector. Here
# they are, first as specification.
#
# `rms_norm` divides a vector by its root mean square, so that layers see numbers of one
# size, and multiplies with a learned weight (Zhang and Sennrich, 2019). `add_rms_norm`
# first adds what the last part of the layer has found to the **residual**, the vector
# that runs through the whole model, and then norms the sum.
#
# `rotary` is how position enters (Su et al., 2021). Attention compares a query with a
# key by their product, which knows nothing of order. So before that, each pair of
# numbers in a query or key is turned by an angle that grows with its position, fast for
# the first pairs and slowly for the last. The product of two turned vectors depends on
# the *difference* of their positions.
#
# `silu_mul` is the MLP's bend between its matrices: the gate, through a smooth step,
# times the other half. `gelu_tanh_mul` is the same with another step; Gemma uses it.
#
# Three more are two of these in one, so that nothing goes to memory and back between
# them: `rotary_write` turns keys and stores them in the cache, `silu_linear` and
# `gelu_tanh_linear` are the MLP's first product with its bend.

# %%
show(spec.rms_norm, spec.add_rms_norm, spec.rotary, spec.silu_mul, spec.gelu_tanh_mul)
show(spec.rotary_write, spec.silu_linear, spec.gelu_tanh_linear)

# %% [markdown]
# Now in numba. Every kernel has the same two parts. A wrapper, compiled when it is
# first called, asks how many threads the work is worth (`enough`: one, under 8,192
# numbers) and deals rows out to them with `for_each`. A function does one row. `head`
# and `stretch`, which chapter 06 explains, are views of memory over which LLVM can
# vectorise.
#
# The norms: `_rms_norm` deals out tokens and `norm_token` norms each head of one, or
# the whole vector; `rms_norm` in front accepts both shapes. `add_rms_norm` has its own
# `add_norm_row`, for a reason of bytes. Adding and norming apart would read *x*, read
# and write the residual, then read it again and write the result: five passes. Fused,
# the sum of squares is taken in the loop that adds, the second loop finds the row still
# in the processor's cache, and it is four.

# %%
show(cpu.enough, cpu.rms_norm, cpu._rms_norm, cpu.norm_token)
show(cpu.add_rms_norm, cpu.add_norm_row)

# %% [markdown]
# The rotation: `rotary` deals out tokens, `rotate_token` looks up one token's cosines
# and sines and hands them to `rotate_heads`, once for its queries and once for its
# keys. In `rotary_write`, `rotate_and_write_token` goes on with `write_token`, which
# chapter 06 shows.

# %%
show(cpu.rotary, cpu.rotate_token, cpu.rotate_heads)
show(cpu.rotary_write, cpu.rotate_and_write_token)

# %% [markdown]
# The activations: `silu` and `gelu_tanh`, of one stretch of numbers. By themselves they
# are dealt out in rows (`silu_mul` with `silu_row`, `gelu_tanh_mul` with `gelu_row`);
# behind the product in panels (`silu_linear` with `silu_panel`, `gelu_tanh_linear` with
# `gelu_tanh_panel`), where `gate_and_up` multiplies the two that meet. (They write to
# another array than they read: in place, LLVM could not prove the loop free of
# overlap, and computed one exponential at a time.) Both need `exp`,
# and the C library's works on one number at a time, so that a loop over it cannot use
# vector instructions. So `exp` is written out: the number is split into a whole power
# of two, which is a bit field of a float, and a rest so small that six coefficients are
# enough for single precision. Such a loop vectorises. `tanh` is made from it.

# %%
show(cpu.exp, cpu.tanh)
show(cpu.silu_mul, cpu.silu_row, cpu.silu, cpu.silu_linear, cpu.silu_panel)
show(cpu.gate_and_up, cpu.gelu_tanh_mul, cpu.gelu_row, cpu.gelu_tanh)
show(cpu.gelu_tanh_linear, cpu.gelu_tanh_panel)

# %% [markdown]
# Our bounds leave all of this out. How much is that? Count the numbers that each of
# these kernels reads and writes for one token in one layer:

# %%
moved = {
    "add_rms_norm, twice": 2 * 4 * llama.hidden,
    "rotary": 2 * (llama.heads + llama.kv_heads) * llama.head_dim,
    "silu_mul": 3 * llama.intermediate,
}
each = 2 * llama.layers * sum(moved.values())
print(moved, f"= {each / 1e6:.1f} MB a token")
for tokens in (1, 2048):
    share = tokens * each / step(llama, [(tokens, tokens)]).products.bytes
    print(f"{tokens:5} tokens: {1e3 * tokens * each / h100.bandwidth:.3f} ms, ", end="")
    print(f"{share:.2%} of the weights' bytes")

# %% [markdown]
# Nothing in a small decode; 3.2 ms in a prefill of 2,048 tokens, which takes 27.9 ms at
# best. These kernels do a few FLOPs for a byte, so on a roofline they lie with
# attention, far on the left: they cost what they move. That is why they are fused,
# and why it is worth a kernel to save one pass in five.

# %% [markdown]
# ## Two properties, and two broken lines
#
# A count is easy to get wrong in a way that looks right. So the tests state what must
# be true of *any* request. Here is one: a prompt may be computed in one step or in
# chunks ([chapter 05](05_scheduler.ipynb) does so all the time), and its attention must
# cost the same arithmetic. Each pair of positions meets once, wherever the cuts are.

# %%
from itertools import accumulate

from hypothesis import strategies as st

from pagedattn.book import broken, falsify, holds


def chunks_cost_the_same(sizes):
    ends = list(accumulate(sizes))
    chunks = [step(llama, [(n, end)]) for n, end in zip(sizes, ends, strict=True)]
    whole = step(llama, [(ends[-1], ends[-1])])
    assert sum(c.attention.flops for c in chunks) == whole.attention.flops


sizes = st.lists(st.integers(1, 500), min_size=1, max_size=5)
holds(chunks_cost_the_same, sizes)

# %% [markdown]
# Now count the triangle as a square, as if each new token met all of them. On the
# roofline above nobody would have noticed: of the 27.6 TFLOP of the prefill, 1.1 are
# attention's, and they would be 2.2. Hypothesis finds that the count contradicts
# itself, and shrinks the case to the smallest:

# %%
with broken(step, "new * (new + 1) // 2", "new * new"):
    falsify(chunks_cost_the_same, sizes)

# %% [markdown]
# Two chunks of one token each. The second property is of `rotary`: shift query and key
# by the same distance, and their product stays.

# %%
import torch

from pagedattn.model.rope import Rope, cos_sin_table

cos_sin = cos_sin_table(Rope(dim=8, theta=10_000.0), 1000)
query, key = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))


def turned(x, position):
    y = x.clone()
    spec.rotary(y, y.clone(), torch.tensor([position]), cos_sin)
    return y


def only_distance_counts(p, r, shift):
    here = (turned(query, p) * turned(key, r)).sum()
    there = (turned(query, p + shift) * turned(key, r + shift)).sum()
    assert abs(here - there) < 1e-3


# %%
positions = [st.integers(0, 499)] * 3
holds(only_distance_counts, *positions)
with broken(spec.rotary, "b * cos + a * sin", "b * cos - a * sin"):
    falsify(only_distance_counts, *positions)

# %% [markdown]
# One wrong sign, and position 1 no longer looks like position 0. And the numba kernels
# are held to the specification, on rows of any number and length:


# %%
def fast_is_the_same(rows, width, seed):
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed))
    weight = torch.linspace(0.5, 2, 2 * width)
    outs = [[torch.empty_like(x), torch.empty(rows, width)] for _ in range(2)]
    for kernels, (normed, bent) in zip((spec, cpu), outs, strict=True):
        kernels.rms_norm(normed, x, weight, 1e-5)
        kernels.silu_mul(bent, x)
    for slow, fast in zip(*outs, strict=True):
        torch.testing.assert_close(slow, fast, rtol=1e-5, atol=1e-6)


holds(fast_is_the_same, st.integers(1, 9), st.integers(1, 99), st.integers(0, 999))

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex01_cost.py` is `pagedattn/bench/costs.py` with seven bodies
# missing, from `Shape.attention` to `concurrency`. `make exercise N=1` runs the tests
# on your file, against transformers' models and torch's own FLOP counter, and ends with
# one hint; `make hint N=1` gives a hint alone.
#
# **Find the bug.** `exercises/bug01_cost.py` has one mistake in it. Its user planned a
# cluster with it: for Llama-2-7B every figure was right, and for Llama-3-8B he bought
# four times as many machines as he needed. `make exercise N=bug1` says when you have
# found it.
#
# **Measure.** Find your own machine's two numbers. Time a product of two 2,048 × 2,048
# float32 matrices in torch (2 × 2,048³ FLOPs), and a sum over a tensor of a gigabyte,
# which only reads; take the best of five of each. Make a `Device` of them. Predict how
# fast the demo model decodes for one reader, and for 16; then let `LLM()` do both. What
# share of the bound do you reach?
#
# **Question.** You store the weights of Llama-2-7B as 8-bit integers. Arithmetic and KV
# cache stay in bfloat16. On an H100, with contexts of 100 tokens: what happens to a
# lone reader's speed, to the knee, to the speed of a batch of 512, and to the largest
# batch that fits?
#
# <details><summary>Discussion</summary>
#
# *Build.* Most first attempts fail in `step`: all tokens go through the output head
# there, or each token meets the whole context. The first costs a 2,048-token prefill of
# Llama-3-8B 2.2 TFLOP for scores that nobody reads, and real engines have done it.
#
# *Find the bug.* In what do Llama-2-7B and Llama-3-8B differ that the first cannot
# show? A test on one model, however exact, cannot see it; the random shapes of
# `test_kv_bytes_are_what_the_kernels_allocate` can.
#
# *Measure.* 60 to 75 % is what we got. Less for one reader often means that memory is
# read by one core only; less for 16, that the matrices are too small to keep the cores
# busy (576 × 576 here).
#
# *Question.* A lone reader's step reads 6.6 GB of weights instead of 13.2, and 0.05 GB
# of keys and values before and after: twice as fast. The knee is where n × 2 FLOPs a
# weight take as long as 1 byte a weight: half of 296. In a batch of 512 the products
# are bound by arithmetic before and after, and attention is what it was: nothing
# changes. The largest batch grows from 1,116 to 1,244, because 6.7 GB became free.
# Smaller weights buy latency, smaller keys and values buy throughput.
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# Names as of 2026, paths relative to `vllm/`.
#
# - The bytes of a block in one layer are `AttentionSpec.real_page_size_bytes` in
#   `v1/kv_cache_interface.py`: 2 × `block_size` × `num_kv_heads` × `head_size` × the
#   size of the type, our `kv_bytes`. `FullAttentionSpec` lets values have another size
#   than keys; `MLAAttentionSpec` drops the factor of 2, because DeepSeek's attention
#   keeps one compressed vector for both.
# - How many readers fit is not computed from a formula. `determine_available_memory` in
#   `v1/worker/gpu_worker.py` runs the model once on `max_num_batched_tokens` tokens of
#   nothing and looks how much memory that took at its peak. What
#   `--gpu-memory-utilization` (0.92; 0.9 until lately, as here) leaves goes to the
#   cache. Activations, which our `concurrency` ignores, are part of that peak.
# - The line "Maximum concurrency for 4,096 tokens per request: 27.00x" in the log comes
#   from `v1/core/kv_cache_utils.py`, `get_max_concurrency_for_kv_cache_config`: blocks
#   in all, divided by the blocks of one request of `max_model_len`.
# - `v1/metrics/perf.py` is vLLM's own `costs.py`. With `--enable-mfu-metrics` it turns
#   each scheduled step into FLOPs and bytes and exports them as counters, among them
#   `vllm:estimated_flops_per_gpu_total`. `AttentionMetrics`, `FfnMetrics` and
#   `UnembedMetrics` count, `ModelMetrics` adds up. It counts more than we do:
#   activations, experts, compressed attention, quantised weights, sliding windows, each
#   rank's part. In one place it counts more coarsely: attention is `num_tokens` ×
#   `context_len`, the square instead of the triangle. A prompt in one chunk counts
#   almost twice what the mask leaves, and the total depends on how it was chunked: the
#   line that we broke above.
# - Only rows that are sampled go through the head: `hidden_states[logits_indices]`,
#   then `compute_logits`, in `v1/worker/gpu_model_runner.py`.
# - `rms_norm` and `add_rms_norm` are `RMSNorm` in `model_executor/layers/layernorm.py`
#   with the CUDA kernels of `layernorm_kernels.cu`; `silu_mul` and `gelu_tanh_mul` are
#   `SiluAndMul` and `GeluAndMul` in `layers/activation.py` with
#   `activation_kernels.cu`; `rotary` is `RotaryEmbedding` in
#   `layers/rotary_embedding/base.py` with `pos_encoding_kernels.cu`. Where vLLM
#   compiles the model, Inductor can generate most of these instead, and passes in
#   `compilation/` fuse them with their neighbours, a norm with the quantisation that
#   follows it.
#
# What we left out: mixtures of experts, where a token meets a few of many MLPs and the
# bytes of a step depend on which; sliding windows, which cap a layer's context; several
# devices, whose exchange has a roofline of its own; and overlap. NanoFlow (Zhu et al.,
# 2024) runs attention of one half of a batch beside the products of the other, since
# one waits for memory and the other for arithmetic, and so gets below our sum of the
# two.
