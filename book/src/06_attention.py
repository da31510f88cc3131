# %% [markdown]
# # 06 · Paged attention
#
# [← 05 Scheduler](05_scheduler.ipynb) · [00 Map](00_map.ipynb) · [07 Triton kernels
# →](07_triton.ipynb)
#
# Ann's conversation is fourteen words long. To choose the fifteenth, every layer of the
# model compares one query with fourteen keys and adds up fourteen values. They lie in
# blocks 1, 2, 3 and 8, because those were free.
#
# At 8,192 tokens instead of fourteen, the demo model reads 377 MB of keys and values to
# produce one token. **How do you read each of those bytes once, wherever it lies, and
# keep almost nothing?** The answer is three numbers per query, two of them plain
# scalars. This chapter derives them, then reads the kernels that keep them in
# registers.

# %%
layers, heads, kv_heads, head_dim = 30, 9, 3, 64  # SmolLM2-135M, the demo model
per_token = layers * 2 * kv_heads * head_dim * 4  # keys and values, float32
print(f"{per_token:,} bytes a token; {8192 * per_token / 1e6:.0f} MB for 8,192 tokens")

# %% [markdown]
# ## Softmax through a table
#
# A query q gives each position t of its context a **score** s(t) = q · k(t) / √d, where
# d is the length of a head. Softmax turns scores into weights that sum to one, and the
# output is the weighted mean of the values, with the sums over all t:
#
# ```text
#          Σ e^s(t) · v(t)
#   out = ─────────────────
#             Σ e^s(t)
# ```
#
# In float32, e^89 is already infinite, and infinity over infinity is not a number. But
# multiplying numerator and denominator by e^(−m) changes nothing, for any m. With m the
# largest score every exponent is at most zero, every term at most one, and one term
# exactly one, so that the denominator cannot vanish. That is **safe softmax**, and it
# is what engines use.

# %%
import torch

scores = torch.tensor([88.0, 89.0, 90.0])
print("e^s / sum:      ", scores.exp() / scores.exp().sum())
safe = (scores - scores.max()).exp()
print("e^(s - m) / sum:", safe / safe.sum())

# %% [markdown]
# Paging adds one look-up. Position t lies in block `table[t // block_size]` at offset
# `t % block_size`; the rest is the formula. `ann()` runs the book's example on the real
# scheduler for three steps, takes the table that Ann got, and fills her blocks with
# random keys and values (a seed, no model). Slots that hold nothing are filled with
# NaN, so that a wrong read cannot pass unnoticed.

# %%
from pagedattn.viz.tiles import ann, picture, steps, tile_stepper

scene = ann()
print("table", scene.table, "·", " ".join(scene.words))


def naive(q, k_cache, v_cache, table, length, scale):
    block_size = k_cache.shape[1]
    slots = [(table[t // block_size], t % block_size) for t in range(length)]
    keys = torch.stack([k_cache[slot] for slot in slots])  # [length, head_dim]
    values = torch.stack([v_cache[slot] for slot in slots])
    scores = scale * keys @ q
    weights = (scores - scores.max()).exp()
    return weights @ values / weights.sum()


out = naive(scene.q, scene.k, scene.v, scene.table, scene.length, scene.scale)
print("out  ", [round(x, 2) for x in out.tolist()])

# %% [markdown]
# ## What it moves
#
# It works, and it copies. The keys are read from the cache, written side by side, and
# read again by the product: every byte moves three times. Most libraries also want one
# row of keys per *query* head. The demo model has three query heads for each KV head
# (chapter 01 called this grouped-query attention), so the copy is three times as large
# as the original: one read, then three written and three read.
#
# Count one layer for 64 sequences of 300 tokens, and divide by 20 GB/s, the speed at
# which the machine of [`book/measured/LOG.md`](measured/LOG.md) streams memory.

# %%
context = 64 * 300 * 2 * kv_heads * head_dim * 4  # bytes of keys and values, one layer
group = heads // kv_heads
ways = {"read where it lies": 1, "gather": 3, "gather, a row per head": 1 + 2 * group}
for name, times in ways.items():
    moved = times * context
    print(f"{name:24} {moved / 1e6:6.1f} MB, {moved / 20e9 * 1e3:5.1f} ms at 20 GB/s")
print(f"scores of a prompt of 8,192 tokens: {heads * 8192**2 * 4 / 1e9:.1f} GB a layer")

# %% [markdown]
# Measured on that machine before this engine was written: gathering and then calling
# torch's attention took 39 ms, and a plain first numba kernel that reads the blocks
# where they lie 3.3 to 5.5 ms. The floor is the 1.5 ms above.
#
# The last line is the other cost of taking the formula literally. For a prompt, scores
# are a square. Nobody wants to hold 2.4 GB of intermediate numbers per layer, so the
# scores have to be consumed as they are made. But softmax wants the maximum of all of
# them first.
#
# ## Four chunks, three numbers
#
# Suppose we read one chunk of the context at a time and never look back. Below, Ann's
# query has read block 1 (light blue) and is reading block 2 (dark blue). It keeps a
# running maximum `m`, a running sum `l` of e^(s − m), and a running weighted sum of
# values `acc`, eight numbers here because this example's head has eight.

# %%
walk = steps(scene, chunk=4)
picture(walk[1])

# %% [markdown]
# The full stop scores 2.66, more than anything in block 1. All that was added up so far
# was measured against the old maximum, 1.55. So it is multiplied by e^(1.55 − 2.66) =
# 0.33, and from there on everything is measured against 2.66. Block 3 brings no new
# maximum: its factor is 1. Block 8 does, and holds two words only; the NaNs behind them
# are not read.

# %%
picture(walk[3])

# %% [markdown]
# `acc / l` at the end equals what the naive version printed above. In JupyterLab the
# next cell is a widget: step through it, change the chunk to 1 or 16, and draw the
# window in. The last line of the picture does not depend on the chunk.

# %%
tile_stepper()

# %% [markdown]
# ## The law of rescaling
#
# Any part A of a context can be summed up in three quantities:
#
# ```text
#   m_A   = the largest s(t)
#   l_A   = Σ e^(s(t) − m_A)
#   acc_A = Σ e^(s(t) − m_A) · v(t)
# ```
#
# Take a second part B and let m be the larger of m_A and m_B. Because e^(s − m) = e^(s
# − m_A) · e^(m_A − m), one factor moves a whole part to the new maximum:
#
# ```text
#   l   = l_A   · e^(m_A − m)  +  l_B   · e^(m_B − m)
#   acc = acc_A · e^(m_A − m)  +  acc_B · e^(m_B − m)
# ```
#
# One position by itself is the part (s(t), 1, v(t)), and adding positions or chunks one
# after another is **online softmax** (Milakov and Gimelshein, 2018, arXiv 1805.02867).
# The factors are at most 1: nothing overflows, in whatever order scores arrive. And
# since the merged triple is again the triple of a part, merging is associative and
# commutative. It makes no difference who merges what first.
#
# > **Takeaway.** Attention over any part of a context is a triple (m, l, acc), and two
# > triples merge into one: rescale both to the larger m, add. So the context can be
# > read in any order, in any chunks, by any number of threads, straight from the
# > blocks.
#
# FlashAttention (Dao et al., 2022, arXiv 2205.14135) is this law with tiles chosen to
# fit on-chip memory. Flash-Decoding (2023) is this law with the chunks given to
# different processors. PagedAttention (Kwon et al., 2023, arXiv 2309.06180) adds the
# table.

# %%
from functools import reduce
from math import exp, inf, isclose

from hypothesis import strategies as st

from pagedattn.book import broken, falsify, holds, show


def merge(a, b):
    m = max(a[0], b[0])
    x, y = exp(a[0] - m), exp(b[0] - m)
    return m, a[1] * x + b[1] * y, a[2] * x + b[2] * y


def alike(a, b):
    return a[0] == b[0] and isclose(a[1], b[1]) and isclose(a[2], b[2], abs_tol=1e-6)


def merge_is_associative(a, b, c):
    assert alike(merge(merge(a, b), c), merge(a, merge(b, c)))


part = st.tuples(st.floats(-300, 300), st.floats(1, 99), st.floats(-99, 99))
holds(merge_is_associative, part, part, part, examples=300)

# %% [markdown]
# Ann's context in two parts, the system prompt (blocks 1 and 2) and the rest (3 and 8):

# %%
parts = walk[1].now, steps(scene, chunk=16, window=6)[0].now, walk[3].now
triples = [(x.m, x.l, x.acc[0]) for x in parts]  # the first of acc's eight numbers
for name, (m, l, acc) in zip(("A", "B", "A and B"), triples, strict=True):
    print(f"{name:8} m {m:5.2f}   l {l:5.2f}   acc[0] {acc:5.2f}")
print("merge(A, B) gives the last line:", alike(merge(*triples[:2]), triples[2]))

# %% [markdown]
# The neutral part is (−∞, 0, 0): nothing read yet, e^(−∞ − m) = 0. Two of those must
# not be merged, since −∞ − (−∞) is NaN; kernels that can meet a chunk in which every
# position is masked need a guard, and we shall see ours.
#
# Now the property that matters, for scalar values: one pass equals two passes. Leave
# out one factor and let Hypothesis look for the shortest context that shows it.


# %%
def one_pass_is_two_passes(context):
    _, l, acc = reduce(merge, [(s, 1.0, v) for s, v in context], (-inf, 0.0, 0.0))
    m = max(s for s, _ in context)
    weights = [exp(s - m) for s, _ in context]
    mean = sum(w * v for w, (_, v) in zip(weights, context, strict=True)) / sum(weights)
    assert isclose(acc / l, mean, abs_tol=1e-6)


contexts = st.lists(st.tuples(st.floats(-300, 300), st.floats(-99, 99)), min_size=1)
holds(one_pass_is_two_passes, contexts, examples=300)
with broken(merge, "a[2] * x", "a[2]"):
    falsify(one_pass_is_two_passes, contexts)

# %% [markdown]
# Two positions, and the later score is the larger one. Had the largest score come
# first, the missing factor would have been 1 and the mistake invisible. So would it be
# to a test whose context fits one chunk.
#
# ## The specification
#
# The engine states every kernel twice: as a short torch function in `kernels/spec.py`,
# which nobody runs in production and everybody tests against, and as numba code in
# `kernels/cpu.py`. They share names, arguments and layout.
#
# The layout first. `empty_kv` makes one layer's cache: `[num_blocks, kv_heads,
# block_size, head_dim]`, twice. One head's part of a block is then one run of memory,
# 16 × 64 × 4 = 4,096 bytes at the default block size. `torch.empty` only reserves
# addresses; a page costs nothing until something is written to it. `write_kv` puts each
# token's rows at its **slot**, block × block size + offset; the runner computed the
# slots when it turned the plan into tensors.

# %%
from pagedattn.kernels import cpu, spec, threads, tiles

show(spec.empty_kv, spec.write_kv)

# %% [markdown]
# `prefill_attention` is the whole definition: any number of sequences, any number of
# new tokens each, over contexts of any length. Four things are worth a pause.
#
# *Positions.* `lengths` includes this plan's tokens, so the i-th of n new rows stands
# at position `length − n + i`. A chunked prompt, a decode and a prefix hit differ in
# two numbers, and the kernel need not know which is which.
#
# *Causal and windowed.* Position p sees 0..p. With a **sliding window** of w it sees
# the last w, itself included: p − w + 1 .. p.
#
# *Grouped heads.* `_context` gathers the blocks of the table (the copy we decided
# against: here clarity wins) and repeats each KV head for the query heads that read it.
# Blocks behind a window may have been released, and then the table has the null block
# there. Whatever it holds gets weight 0; but 0 × NaN is NaN, hence `nan_to_num`.
#
# *Soft cap.* Gemma 2 bends scores with 50 · tanh(s / 50), so that none exceeds 50
# (arXiv 2408.00118). It happens before the mask and before softmax.

# %%
show(spec.prefill_attention, spec._context)

# %% [markdown]
# `decode_attention` is the special case of one new token a sequence. It has a name of
# its own because it deserves another kernel: one query of three heads cannot fill the
# tiles that ninety-six can.

# %%
show(spec.decode_attention)

# %% [markdown]
# Ann's query through the specification, as one of one sequence with one head, and the
# two masks of a prompt of six tokens. A row is a query, a column a key.

# %%
out = torch.empty(1, 1, 8)
table = torch.tensor([scene.table], dtype=torch.int32)
length = torch.tensor([scene.length], dtype=torch.int32)
k_cache, v_cache = scene.k[:, None], scene.v[:, None]  # with a dimension for KV heads
call = (scene.q[None, None], k_cache, v_cache, table, length, scene.scale)
spec.decode_attention(out, *call, window=0, softcap=0.0)
print("out", [round(x, 2) for x in out.flatten().tolist()])

p = torch.arange(6)[:, None]
full, window = p.T <= p, (p.T <= p) & (p.T > p - 3)
for left, right in zip(full.tolist(), window.tolist(), strict=True):
    print("".join("⬜🟦"[x] for x in left), "  ", "".join("⬜🟦"[x] for x in right))

# %% [markdown]
# ## A kernel is a function with one signature
#
# numba compiles a Python function to machine code through LLVM, the compiler library
# behind clang. A `Kernel` wraps such a function: its signature is written down, so
# there is one machine code and a wrong dtype is refused. `compiled` makes or loads it
# on the first call, without holding Python's lock while it runs (`nogil`). `kernel` is
# the decorator. `cache_dir` names a folder after everything the code depends on: our
# sources, the versions of numba and LLVM, and the processor, because a binary built for
# AVX-512 does not run elsewhere. `compile_all` is what `make setup` calls, with a
# progress bar: nothing then compiles while a user waits. numba wants numpy arrays, and
# to make one over a tensor's memory takes a microsecond, eight for some calls, two
# hundred calls a step. So the decoder makes them once, with `native` (the
# specification's leaves tensors as they are).

# %%
show(cpu.cache_dir, cpu.Kernel, cpu.kernel, cpu.compile_all)
show(cpu.native, spec.native)

# %% [markdown]
# The smallest example is the numba `write_kv`. It loops over tokens with `for_each`,
# which we come to under threads; `write_token` is the loop's body. `head` hides a trick
# that all kernels need: `q`, `k` and `v` are views of one fused matrix, so rows are
# strided, yet each head's 64 numbers are contiguous. Said so, the compiler copies eight
# at a time.

# %%
show(cpu.write_kv, cpu.write_token, cpu.head)

# %% [markdown]
# ## Decode: chunks by themselves, then merged
#
# One query per head and thousands of keys: the only parallelism is along the context.
# The numba `decode_attention` cuts every context at multiples of `CHUNK` = 256
# positions. A task is one chunk and one KV head, with the three query heads that read
# it: **keys are loaded once for the group**. `first_chunks` numbers the tasks;
# `first_position` skips what lies before the window.
#
# `chunks_in_step` puts them in order: the first chunks of all sequences, then the
# second ones. Thirty-two requests with one system prompt have its blocks in common. In
# this order its first 256 keys come from memory once, and all thirty-two read them
# while they are in the cache. Engines on GPUs need a kernel of its own for that
# (*cascade attention*), because their tasks run at once; here an order is enough, and
# nobody's sums change.

# %%
show(cpu.decode_attention, cpu.first_chunks, cpu.first_position, cpu.chunks_in_step)

# %% [markdown]
# Count the tasks: one long context is enough to keep two threads busy, or sixty.

# %%
for n in (14, 300, 8192):
    chunks = -(-n // cpu.CHUNK)
    print(f"{n:5} tokens: {chunks:2} chunks, {chunks * kv_heads:2} tasks")

# %% [markdown]
# The chunk is fixed. Dividing each context by the number of threads would balance
# better, but then a sequence's sums, and in the last digits its result, would depend on
# the machine and on its neighbours. A test demands the same bits alone and in a batch.
#
# `attend_chunk` is one task: scale the queries, score, exponentiate, weigh the values.
# The result is the chunk's triple. Then it draws a ticket from an atomic counter;
# whoever draws the last ticket of a (sequence, head) merges. There is no second loop,
# and nobody waits.

# %%
show(cpu.attend_chunk)

# %% [markdown]
# `merge_chunks` is the law of rescaling for many parts at once: find the top m, add up
# with weights e^(m − top), divide at the end.

# %%
show(cpu.merge_chunks)

# %% [markdown]
# Now the parts. `scale_queries` multiplies the scale in once per query instead of once
# per score. `scores` walks block by block; `place` is the look-up from above, `(block ×
# kv_heads + h) × block_size + offset` in units of rows. `scores` also finds out which
# block comes next (behind the last one: the first values), and `fetch` asks for it: the
# processor foresees addresses that follow each other, but the next block lies anywhere.
# This is what paging costs in a kernel, one table read and one prefetch per block.

# %%
show(cpu.scale_queries, cpu.scores, cpu.place, cpu.fetch)

# %% [markdown]
# `score_tiles` computes three heads × four tokens at a time, as we shall see under
# registers, and before each tile asks for as much of the next block with `fetch`. All
# of that block at once would be more requests than a core keeps under way, and the
# multiplications would wait for the last of them: a tile's worth at a time took 12 to
# 25 % off (LOG). A tile may run over unused slots at the end of a block, and what it
# finds there lands in columns that nobody reads; it may not run over the block's end.
# Leftovers, and heads whose length is no multiple of a vector's, go through `dot`.
# `softmax_part` is safe softmax over one chunk: the soft `cap`, the `largest`, then the
# `powers` and their sum. Within a chunk two passes are fine, because 256 scores stay in
# the nearest cache. `weigh` walks the blocks again, now over the values, eight at a
# time with those of two steps later on their way.

# %%
show(cpu.score_tiles, cpu.dot, cpu.softmax_part, cpu.cap, cpu.largest, cpu.powers)
show(cpu.weigh)

# %% [markdown]
# Weighing is a small matrix product, three rows of weights times a block of values.
# `product` cuts it into register tiles, and `product_rest` handles columns that fill
# none.

# %%
show(cpu.product, cpu.product_rest)

# %% [markdown]
# ## Prefill: tiles of queries
#
# With many new tokens the parallelism is in the queries. `prefill_attention` makes
# tasks of about `QUERIES` = 96 rows: `tile_queries` says how many tokens that is (32
# for three heads a group), and `first_tiles` numbers the tiles. `attend_tile` takes the
# last tiles of the last sequence first: they have the longest context, and a long task
# that starts late would leave the other thread idle at the end.

# %%
show(cpu.prefill_attention, cpu.tile_queries, cpu.first_tiles, cpu.attend_tile)

# %% [markdown]
# `attend_rows` is FlashAttention's loop. Sixty-four positions at a time, `copy_context`
# copies keys and values out of their blocks, the keys transposed, into 32 KB that stay
# in cache. A copy after all; but each number copied is now used by 96 rows. Then scores
# by `product`, one `softmax_step` per row, and a second `product` that adds to `acc`.
#
# `softmax_step` is the law once more, for a running triple and a new part: where the
# new part's maximum is smaller, the new part shrinks; where it is larger, what was kept
# shrinks. Its first lines are the promised guard: a row that may see nothing of this
# piece (its window starts later) keeps its triple untouched.

# %%
show(cpu.attend_rows, cpu.copy_context, cpu.softmax_step)

# %% [markdown]
# ## Tiles in registers
#
# A core with AVX2 has 16 vector registers of eight floats, one with AVX-512 has 32 of
# sixteen. Either can multiply and add all lanes at once, twice per cycle, if the
# operands are in registers; and it can load two vectors per cycle. So a loop that loads
# two vectors for each multiply-add runs at half the speed or less. The remedy is a
# **tile**: hold several rows and several columns, and use each loaded vector several
# times. Count it, in vectors:


# %%
def count(name, rows, columns):
    sums, held, streamed = rows * columns, min(rows, columns), max(rows, columns)
    loads = (held + streamed) / sums
    print(
        f"{name:32}{sums:3} sums {sums + held + 1:3} registers  {loads:.2f} loads each"
    )


count("one dot product", 1, 1)
count("dot 3 heads x 4 tokens", 3, 4)
count("product 6 x 16, AVX2", 6, 2)
count("product 3 x 32, AVX2", 3, 4)
count("product 13 x 32, AVX-512", 13, 2)
count("product 6 x 64, AVX-512", 6, 4)

# %% [markdown]
# Many sums also hide latency: on one such processor (Zen 3, by AMD's optimisation
# guide) a multiply-add takes four cycles to finish, and two start in each, so at least
# eight independent sums must be under way.
#
# Why not leave this to numba? Its vectoriser finds the vectors, but not the tile.
# Written as a loop nest, the sums of a tile live in an array, and an array lives in
# memory: each step loads and stores every sum. So a few functions write LLVM's code
# directly, with sums named one by one (`kernels/tiles.py`). `_product_tile` writes `c
# += a @ b` for fixed numbers of rows and columns; `_stream_tile` starts from zero and
# has one instruction more in its loop, which asks for a cache line of the weights that
# come next (two for AVX-512). `_emit_product` is what both share. `_shorter_side_held`
# orders its multiply-adds so that the shorter side stays in registers while the longer
# one streams through. With 12 sums, 3 held and 1 streaming, AVX2's 16 are in use; a
# 17th would be **spilled**, written to memory and read back at every step. A profile of
# 64 requests found decode attention doing that, and reading keys and values at 7.6 GB/s
# where memory gives 17 to 20 (`book/measured/LOG.md`, "Decode attention"; LOG from here
# on).

# %%
show(tiles._product_tile, tiles._stream_tile, tiles._emit_product)
show(tiles._shorter_side_held)

# %% [markdown]
# `_dot_tile` computes scores. Here the lanes run along the head, so each sum is a
# vector that must be added up at the end. `_across` folds four vectors of eight into
# four numbers at once, by way of `_fold`: eleven instructions instead of four times
# six. (`_halved` makes eight of sixteen first.)

# %%
show(tiles._dot_tile, tiles._across, tiles._halved, tiles._fold)

# %% [markdown]
# The vocabulary below them: `_vector_at` is the address of a vector, `_sum_from` a
# register that starts at zero or at what is there, `_multiply_add` one fused
# instruction, `_spread` one number in all lanes, `_prefetch` the request for a cache
# line.
#
# A tile has a fixed size, but a kernel knows only when it runs how many rows there are.
# So tiles come in families: `_sizes` makes one for each number of rows, `_family` gives
# them one name in Python, and `_switch` jumps to the right one. `_plain` and `_data`
# find the arrays' memory. `_function` makes each tile a function that is never inlined
# and is optimised for size, not speed. That is no mistake: optimised for speed, LLVM
# unrolls the loop, moves the copies' loads together, and runs out of registers. A 3 ×
# 32 tile lost 11 of its 12 sums that way (LOG).

# %%
show(tiles._vector_at, tiles._sum_from, tiles._multiply_add, tiles._spread)
show(tiles._prefetch)
show(tiles._sizes, tiles._family, tiles._plain, tiles._switch)
show(tiles._data, tiles._function)

# %% [markdown]
# Five more functions tell LLVM what Python cannot say. `stretch` is a piece of flat
# memory whose indices need no test for being negative; with rows as stretches, 512
# norms fell from 479 to 63 µs (LOG, "Small kernels"). `prefetch` asks for a cache line.
# `take_ticket` is the atomic counter. `power_of_two` writes a float's exponent field,
# the last step of chapter 01's exponential. And `largest_of` is a maximum in vectors:
# for a plain loop LLVM will not have them, since a NaN could tell the difference.

# %%
show(tiles.stretch, tiles.prefetch, tiles.take_ticket, tiles.power_of_two)
show(tiles.largest_of)

# %% [markdown]
# ## Where the bytes go
#
# All of it took one layer's attention for 32 contexts of 256 tokens, on one thread with
# cold caches, from 1.56 to 0.99 ms (LOG). What is that as a share of what the memory
# gives?

# %%
moved = 32 * 256 * 2 * kv_heads * head_dim * 4  # bytes: every key and value once
flops = 32 * 256 * 2 * heads * head_dim * 2  # q·k and weight·v: a multiply and an add
for when, ms in ("before", 1.56), ("after", 0.99):
    print(f"{when:7}{moved / ms / 1e6:5.1f} GB/s {flops / ms / 1e6:5.1f} GFLOP/s")
for name, h, kvh, size in ("SmolLM2, float32", 9, 3, 4), ("Llama 3 8B, bf16", 32, 8, 2):
    print(
        f"{name}: {2 * h * 2 / (2 * kvh * size):.1f} FLOPs for each byte of the cache"
    )
print(f"H100: {989e12 / 3.35e12:.0f} FLOPs for each byte of memory it can read")

# %% [markdown]
# For each token of context and each head, decode does one product with a key and one
# with a value: 4 × heads × d operations on 2 × kv_heads × d numbers. The length of the
# head cancels. In 16-bit numbers the arithmetic intensity of decode attention *is* the
# group size: 4 for Llama 3 8B. An H100 could do 295 (989 TFLOP/s over 3.35 TB/s,
# NVIDIA's data sheet for the SXM version) while the byte arrives. Batching does not
# help, since every sequence brings its own cache. This is the difference from the
# linear layers, whose weights a batch shares.
#
# So three things make decode attention faster: fewer KV heads, smaller numbers, and
# reading each byte once at the full speed of memory. Our 12.7 GB/s on one thread
# compares with the 17 to 20 that the machine's memory gives (LOG). The tile matters not
# for its arithmetic, 19 GFLOP/s where matrix products reach over 100, but so that
# arithmetic is not in the way.
#
# Prefill is the opposite case. Its 96 rows share each key, and the copy pays for
# itself.
#
# ## One pool of threads
#
# numba has parallel loops of its own. We used them, and removed them: they start a
# second OpenMP library beside torch's. (OpenMP is the usual way to run a loop on
# several threads.) Threads that wait for work spin for a while, so that they can start
# fast, and each pool's idle threads spun on the cores that the other pool needed. So
# our loops run in torch's own pool. `openmp_path` finds the library that torch has
# loaded, among the files mapped into the process, and `load_fork` tells LLVM where its
# `GOMP_parallel` is: the function that a compiler calls for `#pragma omp parallel`.
# Where there is none, `serial_fork` stands in and one thread does all the work.
# `get_num_threads` and `set_num_threads` are torch's setting, so there is one number to
# set. Compiling all kernels fell from 37.8 to 23.3 processor seconds as well (LOG, "One
# thread pool").

# %%
show(threads.openmp_path, threads.load_fork)
show(threads.get_num_threads, threads.set_num_threads)

# %% [markdown]
# `serial_fork` is made a C function by ctypes, so that LLVM can call it by address.

# %%
show(threads, section="serial_fork")

# %% [markdown]
# `for_each` is the loop. It packs count, batch and arguments into a record, and
# `_worker` is what every thread runs on it: add `batch` to a shared counter, do those,
# repeat until the count is reached. Work is not divided in advance: a core that is busy
# with somebody else's program delays one batch, not half of the loop.

# %%
show(threads.for_each, threads._worker)

# %% [markdown]
# Spinning still costs where clients share the cores. With OpenMP's default a server
# with sixteen streaming clients on the same two cores made 32.5 tokens/s; told to give
# up after about 0.1 ms, 57.5 (LOG, "Waiting threads"). `import pagedattn` sets that
# unless you did.
#
# ## Break it
#
# The property that carries the whole chapter: for any shape, the numba kernel equals
# the specification. Contexts up to 600 tokens have up to three chunks; blocks are
# shuffled.


# %%
def kernels_agree(length, block_size, kv_heads, group, window):
    make = torch.Generator().manual_seed(length)
    blocks = -(-length // block_size)
    k, v = torch.randn(2, blocks + 1, kv_heads, block_size, 8, generator=make)
    q = torch.randn(1, kv_heads * group, 8, generator=make)
    tables = (torch.randperm(blocks, generator=make) + 1).int()[None]
    lengths = torch.tensor([length], dtype=torch.int32)
    outs = torch.empty(2, *q.shape)
    for out, kernels in zip(outs, (spec, cpu), strict=True):
        kernels.decode_attention(out, q, k, v, tables, lengths, 8**-0.5, window, 0.0)
    assert torch.allclose(*outs, atol=1e-5)


sizes = (st.integers(1, 600), st.integers(1, 32), *[st.integers(1, 4)] * 2)
windows = st.integers(0, 300)
holds(kernels_agree, *sizes, windows, examples=60)

# %% [markdown]
# Now let the specification's window be one too wide, `>=` for `>`. The oracle is wrong
# and the kernel right; the test cannot know, and needs not.

# %%
with broken(spec.prefill_attention, "(j > p - window)", "(j >= p - window)"):
    falsify(kernels_agree, *sizes, windows)

# %% [markdown]
# Two tokens and a window of one: the smallest context in which a window hides anything.
# Off by one here is an easy mistake to make, because libraries count differently.
# FlashAttention is given the number of positions to the *left* of the query, w − 1.
#
# ## Exercises
#
# **Build.** `exercises/ex06_attention.py` is `kernels/spec.py` without the bodies of
# `write_kv`, `decode_attention`, `prefill_attention` and `_context`. `make exercise
# N=6` holds your version against formulas written anew and against the numba kernels;
# `make hint N=6` gives one hint.
#
# **Find the bug.** `exercises/bug06_attention.py` is `kernels/cpu.py` with a mistake
# that a real engine made. Short conversations are answered as always. Once one is
# longer than a few hundred tokens, its answers become vaguer than those of another
# engine on the same weights; there is no error, and prompts of any length are read
# correctly. `make exercise N=bug6`; each run compiles the kernel anew, so give it half
# a minute.
#
# **Measure.** With random scores, how often does `shrink` differ from 1 in a context of
# 4,096 positions and chunks of 1, 16 and 256? Count over many seeds. Which law does the
# count follow, and what does it say about the cost of rescaling?
#
# **Question.** Ann and Bob share blocks 1 and 2, and both are decoding. Each task reads
# these blocks for one sequence only, so they are read twice per step. What would a
# kernel have to look like that reads them once for both? Which part of this chapter
# already does the hard half? When would it be worth it?
#
# <details><summary>Discussion</summary>
#
# *Build.* The usual stumbling block is NaN. Masking weights after softmax is too late:
# the masked scores have taken part in the maximum and the sum. And zero weights do not
# silence a NaN value.
#
# *Find the bug.* The merge raised 2 to the power of differences that were measured in
# base e. With one chunk the difference is 0 and both functions give 1: right alone,
# wrong in mixture. It happens because GPUs compute powers of two faster, so kernels
# fold log2(e) into the scale and keep m in base 2, and then two kernels meet that
# disagree on the base. Weights come out too equal, which reads as vagueness. Name the
# base where m is stored.
#
# *Measure.* A factor differs from 1 when a chunk holds a new record. The n-th of random
# scores is a record with probability 1/n, so 4,096 single steps have about ln 4096 +
# 0.58 ≈ 8.9 records, the first included. The same holds for chunks, by their maxima:
# 256 chunks of 16 have about 6.1, 16 chunks of 256 about 3.4. Nearly all rescaling
# multiplies by 1, which is why `softmax_step` asks first.
#
# *Question.* Compute the shared prefix once with the queries of all who share it, as a
# prefill with many rows, and keep each row's triple; compute each suffix alone; merge.
# The law of rescaling is the hard half. vLLM calls it cascade attention. It pays when
# the prefix is long and its readers are many: the shared part then has the intensity of
# a prefill.
#
# </details>
#
# ## How vLLM does it
#
# *Slots and writing.* `vllm/v1/worker/block_table.py`:
# `BlockTable.compute_slot_mapping` turns positions into slots in a small Triton kernel;
# padding rows get slot −1, and `reshape_and_cache_flash` (our `write_kv`) skips those.
# Ours has no padding, since it captures no CUDA graphs.
#
# *Backends.* vLLM has many attention kernels behind one interface,
# `vllm/v1/attention/backends/`: FlashAttention (`flash_attn.py`), FlashInfer, Triton
# (`triton_attn.py`), CPU (`cpu_attn.py`) and more. All take what ours take:
# `query_start_loc`, `seq_lens`, `block_table`, `slot_mapping`, scale, window and soft
# cap.
#
# *The Triton kernel* (`vllm/v1/attention/ops/triton_unified_attention.py`) is the
# closest relative. `kernel_unified_attention` serves prefill and decode with one body;
# a program takes `BLOCK_M` rows, which are positions × the query heads of one KV head,
# and its `softmax_step` updates `M`, `L` and `acc` tile by tile. For small batches of
# decodes it runs in "3D": the context is split into `NUM_PAR_SOFTMAX_SEGMENTS` = 16
# segments and `reduce_segments`, a second kernel, merges them. The segments' size
# follows the context's length, and whether it splits at all follows the batch (at most
# 128 // KV heads sequences); the batch-invariant mode turns it off, for the reason that
# made our chunk fixed.
#
# *Merging.* `vllm/v1/attention/ops/merge_attn_states.py` merges normalised outputs by
# log-sum-exp, m + ln l, so that a part is described by one number instead of two. It is
# used by cascade attention (`flash_attn.py`: `cascade_attention`, off by default) among
# others.
#
# *The first kernels*, `paged_attention_kernel` in
# `csrc/attention/attention_kernels.cuh`, go back to the paper's. Version 2, added
# later, splits contexts into partitions of 512 tokens and has a reduce kernel. Keys are
# stored as `[blocks, kv_heads, head_size / x, block_size, x]` with x numbers in 16
# bytes, so that neighbouring GPU threads read neighbouring addresses.
#
# *On a CPU*, `csrc/cpu/cpu_attn_impl.hpp` keeps one KV head of a block together, as we
# do; its `AttentionScheduler` plans splits of the context for the threads at hand, and
# workers draw items from an atomic counter. It has variants for AMX, AVX-512, NEON and
# others, where ours leaves the choice of instructions to LLVM.
#
# *Left out here:* attention sinks, ALiBi, caches in 8 bits, multi-head latent
# attention, cross attention, tree masks for drafts, and attention both ways between the
# tokens of an image.
#
# Next: [07 Triton kernels](07_triton.ipynb), the same functions for a GPU, and what can
# be known of them without one.
