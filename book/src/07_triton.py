# %% [markdown]
# # 07 · Triton kernels
#
# [← 06 Paged attention](06_attention.ipynb) · [00 Map](00_map.ipynb) · [08 Sampling
# →](08_sampling.ipynb)
#
# An H200 has 132 multiprocessors, each of which runs several programs at a time. The
# machine on which this chapter was written has two cores and no GPU at all. Even so
# there are kernels for a GPU here, and a test for every one of them. **How much can you
# know about a GPU kernel without a GPU?**
#
# Three things: *what it computes*, because Triton has an interpreter that runs a
# kernel's source on a CPU; *whether the hardware can start it*, because the compiler
# needs no card; and *what it cannot be faster than*, because bytes can be counted. One
# thing you cannot know: how fast it is. **No kernel in this chapter has been timed on a
# GPU by us, and no figure below is a measurement of one.** The same holds for the
# engine's runner on a GPU, at the chapter's end. What is here is proved, not raced.

# %%
import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported
warnings.filterwarnings("ignore", module="triton")  # 0 / 0, in rows that nobody wants

import torch
import triton
import triton.language as tl
from pagedattn.kernels import cpu, gpu, spec
from pagedattn.kernels.gpu import attention, launch, ragged, report
from pagedattn.kernels.gpu.launch import Config

from pagedattn.viz.programs import batch, picture, watching

# %% [markdown]
# ## A program is a body of a loop
#
# The naive way to write a kernel is a loop: for each row, for each number. Triton takes
# the outer loop away. You write what happens to *one* piece, and a launch runs it once
# for every place in a **grid**, at the same time as far as there is room, in no order
# that you may rely on. Each run is a **program**, and `tl.program_id` is all that tells
# it from the others. The inner loop goes, too. A program's values are **tiles**:
# arrays whose sizes are powers of two, known when the kernel is compiled.
#
# Rows of five numbers don't fill a tile of eight. So every load and store has a *mask*,
# the places that are wanted. Here is a kernel for rows of five, and what its programs
# really asked of memory. `watching` listens to the interpreter.


# %%
@triton.jit
def scale_row(out, x, factor, DIM: tl.constexpr, WIDE: tl.constexpr):
    row, d = tl.program_id(0), tl.arange(0, WIDE)
    values = tl.load(x + row * DIM + d, mask=d < DIM)
    tl.store(out + row * DIM + d, values * factor, mask=d < DIM)


x = torch.arange(15.0).view(3, 5)
out = torch.full_like(x, torch.nan)
with watching() as seen:
    scale_row[(3,)](out, x, 10.0, 5, 8)
for access in seen:
    first = (int(access.addresses[0]) - (out if access.stores else x).data_ptr()) // 4
    verb = "stores" if access.stores else "loads "
    print(f"program {access.program[0]} {verb} from {first:2}: {access.squares()}")
print(out.tolist())

# %% [markdown]
# Without the mask, program 0 would write three numbers into row 1, at the same time as
# program 1 writes them. On a GPU the result depends on who is last. The interpreter
# runs programs one after the other, so it shows what a program does, and hides races.
#
# ## Decode, drawn from a launch
#
# Ann, Bob and Cyd have run for three steps on the real scheduler: 14, 15 and 7 tokens,
# ten blocks, two blocks shared. The cell launches the engine's decode attention for
# their next tokens, in chunks of 8 positions. The picture is made from the addresses
# that were loaded.

# %%
this = batch(steps=3)
out, expected = torch.full_like(this.q, torch.nan), torch.empty_like(this.q)
call = this.q, this.k, this.v, this.tables, this.lengths, 8**-0.5, 0, 0.0
small = Config(dict(CHUNK=8, KEYS=4))
with watching() as seen:
    gpu.decode_attention.body(small, out, *call)
spec.decode_attention(expected, *call)
print("as the specification says:", torch.allclose(out, expected, atol=1e-5))
picture(seen, this)

# %% [markdown]
# A program is a place (c, h, s): chunk, KV head, sequence. The grid is a box, but
# requests are ragged, so its corners are empty: Cyd has no second chunk, and that
# program returns at once. Striped slots are read by two programs: the system prompt
# that Ann and Bob share. We come back to that.
#
# Inside a program keys are read a tile at a time, here 4 positions. This is the last
# tile of Ann's second chunk. A row is a position, a column a number of the key.

# %%
tiles = [a for a in seen if a.program == (1, 0, 0) and a.touches(this.k)]
print(tiles[-1].squares())

# %% [markdown]
# Two positions of four, because Ann has 14 tokens. Eight columns of sixteen, because
# the hardware's matrix units want sixteen or more (`width`), and this example's heads
# have eight. Masked places become 0 and cost no memory traffic.
#
# `attend_chunk` is the program. It finds its chunk, loads the queries of one KV head as
# the rows of a tile, and lets `attend` do the work (`first_position` is where a window
# begins). **Query heads of a group are rows
# of one tile**, so that each key is loaded once for all of them. `rows_at` is the
# look-up through the table. `Shape` holds what is known when a kernel compiles;
# `shape_of` reads it off the tensors.

# %%
from pagedattn.book import broken, falsify, holds, show

show(attention.Shape, attention.shape_of, attention.width, attention.rows_at)
show(attention.attend_chunk, attention.first_position)

# %% [markdown]
# `attend` is the online softmax of chapter 06, a few lines that serve decode, prefill
# and cascade alike. What differs is `SEEN`, a function that hides scores: `before`
# (positions behind the chunk's end), `causal` (the future, and what left the window),
# or `every` (nothing to hide: no mask, no comparison). A function as a parameter is
# resolved when the kernel compiles, so a variant costs nothing in the loop. `scores`
# applies scale and soft cap, in powers of two: the hardware has an instruction for 2^x
# and none for e^x. `nothing_read` is where a state starts.

# %%
show(attention.attend, attention.before, attention.causal, attention.every)
show(attention.scores, attention.nothing_read)

# %% [markdown]
# ## The interpreter as a microscope
#
# Under the interpreter a tile is a numpy array (`.handle.data`), a kernel is a Python
# function, and `print` works inside. So do debuggers. `broken`, which other chapters
# use to put a mistake in, can put a lens in just as well: here one more statement
# behind the last line of the loop in `attend`, with Ann alone in the batch.

# %%
lens = "m = top; print('from', first, 'm', look(m), 'l', look(l))"
attention.look = lambda x: [round(y, 2) for y in x.handle.data[:2].tolist()]  # 2 heads
alone = [x[:1] for x in (this.q, this.tables, this.lengths)]
with broken(attention.attend, "m = top", lens):
    ann = out[:1].clone()
    gpu.decode_attention.body(
        small, ann, alone[0], this.k, this.v, *alone[1:], *call[5:]
    )
del attention.look
print("the same bits as in the batch:", torch.equal(ann, out[:1]))

# %% [markdown]
# Four tiles, two chunks: at 8 the state begins anew. `m` only grows within a chunk, and
# `l` shrinks when it does. The last line is a promise of the engine: what stands beside
# a request changes none of its bits.
#
# ## Split-KV, and the merge
#
# Why chunks at all? Count programs. One request, 8 KV heads: without chunks the grid
# has 8 programs, and 124 multiprocessors of an H200 have nothing to do, however long
# the context. Cutting the context is called **split-KV** (Flash-Decoding, 2023). It
# costs a second kernel, and a state for each chunk, written and read once.

# %%
group, dim, chunk = 4, 128, 256  # Qwen3-8B: 32 query heads on 8 KV heads
keys = 2 * chunk * dim * 2  # bytes of keys and values of one chunk, bfloat16
state = 2 * group * (dim + 2) * 4  # acc, m and l in float32: written, then read
print(f"states add {state / keys:.1%} to the bytes of a chunk")
for seqs, context in ((1, 512), (1, 8192), (8, 8192), (64, 8192)):
    chunks = -(-context // chunk)
    print(f"{seqs:2} x {context:5}: {seqs * 8:4} programs, {seqs * 8 * chunks:6,} cut")

# %% [markdown]
# `decode_attention` launches both kernels. Chunks are cut at fixed multiples, for the
# reason given in chapter 06. The grid must be known on the host, where lengths are not
# (asking the device would mean to wait for it), so it is made for the longest table;
# the rest return. `new_parts` makes room for the states, and `store_state` fills a
# program's rows of it.
#
# `merge_chunks` is the law of rescaling, 16 chunks at a time: reading one after the
# other would wait for memory once for each. `kind_of` says for what a choice of
# configuration holds, of which later.

# %%
show(gpu.decode_attention, attention.new_parts, attention.store_state)
show(attention.merge_chunks, attention.kind_of)

# %% [markdown]
# ## Three versions, side by side
#
# Every kernel exists three times, with one name, one signature and one set of
# variables. Take the smallest that has a reason to exist: a layer adds to the residual
# and norms the sum: `add_rms_norm`. First the specification, which calls `rms_norm`;
# then numba, where threads share a loop over rows and `add_norm_row` is two loops over
# numbers; then Triton, where the row is a tile and both loops are gone.

# %%
show(spec.add_rms_norm, spec.rms_norm)
show(cpu.add_rms_norm, cpu.add_norm_row)

# %% [markdown]
# In Triton, `add_rms_norm` starts one program a row, `add_norm_row`. The sum is rounded
# to the residual's type *before* it is normed, since the next layer will read it
# rounded. `normed` is the formula, in float32 whatever comes in; `rms_norm` has its own
# kernel, `norm_rows`, because heads are short and several fit a tile. `warps_for` says
# how many threads a row is worth: a **warp** is 32 threads in step.

# %%
from pagedattn.kernels.gpu import elementwise

show(gpu.add_rms_norm, elementwise.add_norm_row, elementwise.normed)
show(gpu.rms_norm, elementwise.norm_rows, elementwise.warps_for)

# %% [markdown]
# What differs is not the arithmetic but *who knows the order*. numba's loop says it and
# hopes for vectors. The tile says nothing, and the compiler deals numbers out to
# threads. What is the same is the traffic: read twice, write twice, chapter 01's count.
#
# The gated activations are one kernel, `gate_row`, that is given `silu` or `gelu_tanh`
# as a parameter; `gated` launches it for `silu_mul` and `gelu_tanh_mul`, and `kind_of`
# tells widths apart when a configuration is chosen.

# %%
show(gpu.silu_mul, gpu.gelu_tanh_mul, elementwise.gated, elementwise.gate_row)
show(elementwise.silu, elementwise.gelu_tanh, elementwise.kind_of)

# %% [markdown]
# Rotation and cache writes are one program a token. `write_kv` starts `write_token`:
# `layout` and `slot_row` say where a slot lies, `write_heads` copies all heads.
# `rotary` starts `rotate_token`, where `angles` loads a token's cosines and sines,
# `turned` turns some heads and `turn_heads` stores all of them. `rotary_write` does
# both in one kernel, `rotate_and_write_token`: turned keys go to the cache from
# registers, without a second read.
#
# `copy_blocks` (a program, `copy_block`, takes 4,096 numbers) is new in the
# specification: whole blocks, for engines that fork a sequence.

# %%
from pagedattn.kernels.gpu import write

show(gpu.write_kv, write.write_token, write.layout, write.slot_row, write.write_heads)
show(gpu.rotary, write.rotate_token, write.angles, write.turned, write.turn_heads)
show(gpu.rotary_write, write.rotate_and_write_token)
show(spec.copy_blocks, gpu.copy_blocks, write.copy_block)

# %% [markdown]
# ## Prefill: whose row is this?
#
# In prefill a program takes a tile of queries of one sequence. How many tiles has a
# sequence? Its length is on the device, and the host would have to wait. So nobody
# counts. Sequence g is given the tiles from `starts[g] // SIZE + g` on. That is never
# too few, and one too many at most; `tiles` says how many there are in all, from sizes
# that the host knows, and `owner` finds a tile's sequence by bisection. `rows_of` gives
# its rows.

# %%
show(ragged.tiles, ragged.owner, ragged.rows_of)
starts = torch.tensor([0, 5, 5, 21])  # three sequences, of 5, 0 and 16 rows
given = [[t for t in range(8) if t >= s // 8 + g] for g, s in enumerate(starts[:3])]
own = [sorted(set(a) - set(b)) for a, b in zip(given, [*given[1:], []], strict=True)]
print("tiles of 8 rows:", [[t for t in o if t < ragged.tiles(21, 3, 8)] for o in own])

# %% [markdown]
# `prefill_attention` starts `attend_tile`, last tiles first, as they have the longest
# contexts. `load_queries` lays (token, head) pairs out as rows, and `store_rows` writes
# them back. `attend_rows` saves masks. Positions that every row of the tile sees are
# read with `every`; only at the right edge, where time ends, and at the left, where the
# window cuts, scores are hidden. Both edges are one loop with a hole in it, since the
# law of rescaling allows any order.

# %%
show(gpu.prefill_attention, attention.attend_tile, attention.load_queries)
show(attention.attend_rows, attention.store_rows)

# %% [markdown]
# ## Cascade: what is shared, once
#
# Striped slots were read twice. On the CPU an order of tasks was enough to let all
# readers find shared keys in the cache (chapter 06). Programs of a GPU run together, so
# `cascade_attention` says it outright: all contexts begin with the same blocks.

# %%
show(spec.cascade_attention)

# %% [markdown]
# In Triton, `attend_prefix` takes any queries side by side, whoever's they are, and
# reads a chunk of the prefix for all of them: decode becomes as dense as prefill.
# `part_rows` says where their states go. Then `attend_own` starts from those states
# (`load_states` merges them) and goes on with each sequence's own blocks. An online
# softmax can start from any state; nothing is left to merge afterwards.

# %%
show(gpu.cascade_attention, attention.attend_prefix, attention.part_rows)
show(attention.attend_own, attention.load_states)

# %% [markdown]
# The engine takes this way where it is asked to (`--no-disable-cascade-attn`: vLLM has
# it off too) and vLLM's bounds say that it may pay: 8 requests, 256 shared tokens.
# What is shared is read off the tables of the plan (`common_prefix`): equal ids are
# equal blocks. `worth_sharing` holds it against the bounds. How many tokens that is
# changes from step to step, so the attention of such a step stays out of graphs. A step
# of more tokens than `max_num_seqs` reads as ever: the states that `attend_prefix`
# leaves would take more memory than the start has measured.

# %%
from pagedattn.device import prefix  # noqa: E402
from pagedattn.scheduler import Item  # noqa: E402

show(prefix.common_prefix, prefix.worth_sharing)
alike = [
    Item(f"r{i}", 0, 330, (7,), ([*range(1, 18), *range(100 * i, 100 * i + 4)],), True)
    for i in range(1, 9)
]
print(prefix.worth_sharing(alike, 16, 8), prefix.worth_sharing(alike[1:], 16, 8))

# %% [markdown]
# ## Experts, penalties, one draw
#
# In a mixture of experts each token meets a few of many matrices. `grouped_linear` gets
# rows sorted by expert, which makes experts ragged groups again: `multiply_tile` asks
# `rows_of` for its expert, reads that expert's weights once for all its rows, and
# fetches the rows from wherever their tokens stand. `kind_of` counts rows of an expert
# to a power of two: a choice that is right for 16 holds for 20.

# %%
from pagedattn.kernels.gpu import experts, sampling

show(spec.grouped_linear, gpu.grouped_linear, experts.multiply_tile, experts.kind_of)

# %% [markdown]
# `penalize` starts `penalize_row`, which touches only tokens that a row has seen.
# `sample` chooses a token as chapter 08 defines it. The specification sorts.

# %%
show(spec.penalize, gpu.penalize, sampling.penalize_row)
show(spec.sample)

# %% [markdown]
# A GPU can sort, but not within one program, and each filter needs just one number: the
# rank at which it cuts. Ranks are whole numbers in the order of the values: `by_logit`
# for top-k, where each token counts 1, and `by_weight` for top-p, where it counts its
# weight. `lowest_rank` finds the cut's 32 bits, four at a time: add up what lies above
# 16 candidates in one pass over the row, keep the best, refine. Eight passes, no
# scratch memory. `cut_at` then settles ties by the lower id, as the specification does;
# `is_kept` is the comparison, `block_of` and `total_of` walk the row.

# %%
show(sampling.by_logit, sampling.by_weight, sampling.is_kept, sampling.block_of)
show(sampling.total_of, sampling.lowest_rank, sampling.cut_at)

# %% [markdown]
# `sample_row` puts it together: `largest` first, which is the answer where temperature
# is 0; each filter only for rows that ask; then `drawn` walks the running sum to the
# uniform number. Sums are float64, so that blocks of another size choose the same
# token. `sample` starts a program a row; `kind_of` knows the vocabulary.

# %%
show(gpu.sample, sampling.sample_row, sampling.largest, sampling.drawn)
show(sampling.kind_of)

# %% [markdown]
# ## Launching, and choosing
#
# `launch` starts a kernel and nothing else: no environment variable, no hidden device
# switch. A `Config` is sizes, warps, and *stages*: how many loads may be under way in a
# loop. If an argument is on torch's "meta" device, which `_any_meta` and `_is_meta`
# find out, there are no numbers, and Triton compiles only. `cache_dir` names a folder
# after sources and compiler; `use_cache_dir` tells Triton.

# %%
show(launch.launch, launch.Config, launch._any_meta, launch._is_meta)
show(launch.cache_dir, launch.use_cache_dir)

# %% [markdown]
# Which configuration is fastest, nobody knows without the card. `tuned` therefore lists
# a few, and a `Tuned` function asks `choose` at each call: known for this kind of
# arguments, or measured now (`fastest`; what does not fit counts as infinitely slow).
# `Choices` keeps the answers on disk for each kind of GPU: `of` reads them once, `add`
# writes one more. While a CUDA graph is being recorded nothing may be measured, so the
# first of the list is taken, as here, where there is no card.

# %%
show(launch.Tuned, launch.tuned, launch.Choices)

# %% [markdown]
# ## What the compiler says
#
# A multiprocessor has 65,536 registers and, on an H200, 227 KiB of *shared memory* that
# a program may use. Both are divided among the programs that run there at a time. A
# thread can name 255 registers; a kernel that wants more puts some aside in memory,
# which is called a **spill**. All three numbers are known once a kernel is compiled,
# and compiling needs no card. `pagedattn download-kernels --arch sm_90` does it for all
# kernels, so that nothing compiles when the engine runs.
#
# `report` calls each function as the engine would, with tensors that hold no numbers.
# `Model` is the sizes of one, `empty` and `whole` make tensors. `calls` lists the
# functions with their arguments: `attention_calls` and `cache_calls` (for which
# `heads_of` cuts a fused product into views), and `sampling_calls`.

# %%
show(report.Model, report.calls, report.whole, report.heads_of)
show(report.attention_calls, report.cache_calls, report.sampling_calls)

# %% [markdown]
# `NoDevice` stands in for CUDA's driver. Triton asks it `get_current_target`,
# `get_current_device` and `get_current_stream`, and never notices that nothing is
# there. `compiling_for` puts it in place and listens at the compiler's door. `jobs`
# pairs functions with `configs_of` them, `compile_all` compiles, and `row` makes a
# `Row` of what `resources` reads out of the binary; `fits` is the verdict.

# %%
show(report.NoDevice, report.compiling_for, report.jobs, report.configs_of)
show(report.compile_all, report.row, report.resources, report.Row)

# %% [markdown]
# The interpreter is on in this process, so another one compiles: each function in its
# first configuration, for an H100 or H200 (`sm_90`), at the sizes of Qwen3-8B in
# bfloat16. The last column divides: how many programs a multiprocessor can hold, by
# registers, shared memory and its 2,048 threads.

# %% tags=["volatile"] reason="the compiler's version, which decides about registers"
import subprocess
import sys

TABLE = """
from pagedattn.kernels.gpu import report
print("kernel                  warps registers   shared spilled fits at once")
for r in report.compile_all("sm_90", most=1):
    held = report.REGISTERS // (r.registers * r.threads), 2048 // r.threads
    once = min(*held, report.SHARED[r.arch] // max(r.shared, 1))
    print(f"{r.kernel:23}{r.threads // 32:6}{r.registers:10}{r.shared:9,}"
          f"{r.spilled:8}{'yes' if r.fits else 'NO':>5}{once:8}")
"""
env = {**os.environ, "TRITON_INTERPRET": "0"}
command = [sys.executable, "-c", TABLE]
done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
print(done.stdout)

# %% [markdown]
# Read `attend_chunk`. With Triton 3.9 it has 122 registers for each of 128 threads, so
# registers allow 4 programs at a time; 38 KiB of shared memory, the keys and values
# under way, would allow 5. `attend_tile` holds a larger tile and has 250 registers,
# five below the limit: two programs. The small kernels use next to nothing, and how
# many run is limited by threads alone.
#
# What is it good for? A load takes hundreds of nanoseconds, and memory is busy only if
# enough bytes are under way meanwhile: bandwidth × latency. At 4,800 GB/s and an
# *assumed* 600 ns that is 2.9 MB, 22 KB for each of 132 multiprocessors. Four programs
# with two tiles of 64 keys under way (3 stages, one in use) hold 4 × 2 × 16 KB. So
# occupancy should not be what stops decode. That is an argument, not a measurement;
# the list of configurations exists because arguments fail.
#
# On `sm_80` the tests let a thread spill 128 bytes: there a product's operands pass
# through registers too, and prefill's tiles fill all 255.
#
# > **Takeaway.** A kernel can be known before it runs on its hardware: what it computes
# > (interpreter, against a specification), that it can start (the compiler's registers,
# > shared memory and spills), and what it can't beat (bytes over bandwidth). Only the
# > distance to that floor needs the card.

# %% [markdown]
# ## What the bytes predict
#
# Decode attention must read every key and value of every context once. Divide by a
# datasheet's bandwidth and you have a floor. **These are predictions of what no kernel
# can beat, not times of ours**: datasheets promise more than memory gives, and kernels
# reach less than memory gives.

# %%
from pagedattn.bench.costs import DEVICES, SHAPES, decode

qwen = SHAPES["Qwen3-8B"]
print("PREDICTED floors, Qwen3-8B, contexts of 2,048; attention of all 36 layers")
print(f"{'':14}{'batch':>6}{'KV bytes':>11}{'attention':>11}{'whole step':>12}")
for name in ("A100 80GB SXM", "H200 SXM"):
    for size in (1, 8, 64):
        step, device = decode(qwen, size, 2048), DEVICES[name]
        ms = 1e3 * step.attention.seconds(device), 1e3 * step.seconds(device)
        gb = step.attention.bytes / 1e9
        print(f"{name:14}{size:6}{gb:8.2f} GB{ms[0]:8.2f} ms{ms[1]:9.2f} ms")

# %% [markdown]
# For one request the weights are nearly everything: 3.16 of 3.22 ms on the H200.
# At 64 requests attention is more than half of it, and its kernel is the one that
# matters. A first run on a card will be held to these numbers: a decode kernel that
# needs twice its floor is not done.
#
# ## Graphs, and one step ahead
#
# A decode step of Qwen3-8B starts some 400 kernels, and starting one takes the host
# longer than many of them run. A **CUDA graph** is a recording of all of them that one
# call replays. It replays one shape, at fixed addresses. So `capture_sizes` lists
# numbers of sequences to record, `table_widths` the room for their contexts, and
# `Buckets.choose` takes the smallest recorded shape that holds a plan. `fill` makes the
# missing rows: tokens in the null block, which nobody reads.

# %%
from pagedattn.device import buckets, memory, staging
from pagedattn.pipeline import PipelinedEngine

show(buckets.capture_sizes, buckets.table_widths, buckets.Buckets.choose)
show(staging.fill)
recorded = buckets.Buckets(buckets.capture_sizes(256), buckets.table_widths(40_960, 16))
for sequences in (1, 3, 61, 250):
    print(sequences, *recorded.choose([1] * sequences, width=100))
print(recorded.choose([1, 1, 500], width=100))

# %% [markdown]
# A step with a prompt in it has no such graph: who owns which token differs each time.
# But only attention cares. All else, from the norm before a projection to the next
# layer's cache write, works on tokens, whosever they are. So `cudagraph_mode=PIECEWISE`
# records (`_record_pieces`) for a number of tokens what lies *between* two reads of
# attention, one graph more than there are layers; a step takes graphs and reads in
# turn, attention kernel by kernel (`_run_pieces`). `FULL_AND_PIECEWISE` does
# so where a step isn't of single tokens alone. `FULL` records attention too, all as
# prefill, for as many requests as there may be: prefill's tiles are found on the
# device, so a request without tokens costs a program that returns.

# %%
from pagedattn.device.runner import DeviceRunner

show(DeviceRunner._run_pieces, DeviceRunner._record_pieces)
pieces = buckets.Buckets((), recorded.widths, buckets.capture_sizes(512))
print(pieces.choose([1, 1, 500], width=100))

# %% [markdown]
# All inputs of a step lie in one piece of pinned memory, so that one copy brings them,
# and there are two such pieces: `PipelinedEngine` plans and fills the next while the
# device runs this one. What this one samples is not known on the host then, and need
# not be: a plan names the row that will sample it, and the device looks there. In its
# `step` the host waits once, for the plan before the one it has just started.

# %%
show(PipelinedEngine.step)

# %% [markdown]
# How large the pool may be is measured: the largest step runs once, and a `Profile`
# says what weights and libraries have `held` since and what the step took in passing.
# `kv_bytes` is what is left of the share that was asked for. None of this needs a card
# to be tested. `tests/fake_device.py` is a device that does nothing before somebody
# waits, so that an input that is overwritten too early gives wrong tokens.

# %%
show(memory.Profile, memory.kv_bytes)
GIB = 1 << 30
profile = memory.Profile(140 * GIB, 138 * GIB, 120 * GIB, 4 * GIB)
print(memory.gib(memory.kv_bytes(profile, share=0.9, graphs=35)))

# %% [markdown]
# ## Break it
#
# Two properties. First: for any ragged batch, the Triton kernel equals the
# specification. Small tiles (`KEYS` = 4) make short contexts have edges and a middle.


# %%
from hypothesis import strategies as st

QUARTERS = Config(dict(ROWS=16, KEYS=4))


def prefill_agrees(length, new, group, window):
    new = min(new, length)
    make = torch.Generator().manual_seed(length)
    k, v = torch.randn(2, 12, 1, 4, 16, generator=make)
    q = torch.randn(new, group, 16, generator=make)
    tables = (torch.randperm(11, generator=make) + 1).int()[None]
    starts = torch.tensor([0, new], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    rest = q, k, v, tables, starts, lengths, 0.25, window, 0.0
    outs = torch.full((2, *q.shape), torch.nan)
    spec.prefill_attention(outs[0], *rest)
    gpu.prefill_attention.body(QUARTERS, outs[1], *rest)
    assert torch.allclose(*outs, atol=1e-5)


sizes = st.integers(1, 40), st.integers(1, 20), st.integers(1, 4), st.integers(0, 20)
holds(prefill_agrees, *sizes, examples=40)

# %% [markdown]
# Now let the unmasked middle begin where the window of the *first* query begins instead
# of the last's. One word in `attend_rows`:

# %%
with broken(attention.attend_rows, "first_position(last,", "first_position(position,"):
    falsify(prefill_agrees, *sizes, examples=200)

# %% [markdown]
# The second query reads a key that has left its window. It takes a whole tile of keys
# that the first query sees, two new tokens and a window: contexts that a test by hand
# would hardly choose, and with `KEYS` at 64, as on the card, none under 64 tokens shows
# it.
#
# Second: every row belongs to exactly one tile, whatever the groups. A kernel of our
# own counts the visits.


# %%
@triton.jit
def visit(out, starts, groups, SIZE: tl.constexpr):
    group, first, end = ragged.rows_of(tl.program_id(0), starts, groups, SIZE)
    row = first + tl.arange(0, SIZE)
    seen = tl.load(out + row, mask=row < end)
    tl.store(out + row, seen + 1, mask=row < end)


def every_row_is_visited_once(groups, size):
    starts = torch.tensor([0, *groups]).cumsum(0)
    out = torch.zeros(sum(groups))
    grid = (ragged.tiles(sum(groups), len(groups), size),)
    launch.launch(visit, grid, Config(), out, starts, len(groups), size)
    assert (out == 1).all(), out.tolist()


groups = st.lists(st.integers(0, 9), min_size=1, max_size=5)
holds(every_row_is_visited_once, groups, st.sampled_from([1, 2, 4]))
with broken(ragged.tiles, "rows // size + groups", "-(-rows // size)"):
    falsify(every_row_is_visited_once, groups, st.sampled_from([1, 2, 4]))

# %% [markdown]
# Counting tiles as if all rows were one group is right for one request. Let an empty
# one come before it, and its only row is left as it was: on a card, whatever the last
# step left there.
#
# ## Exercises
#
# **Build.** `exercises/ex07_triton.py` is `kernels/gpu/attention.py` without the bodies
# of `attend`, decode's inner loop, and `merge_chunks`. `make exercise N=7` runs the
# tests under the interpreter, so `print` whatever you like; `make hint N=7` gives one
# hint.
#
# **Find the bug.** `exercises/bug07_triton.py` lacks a mask. Answers get vaguer, most
# of all in short conversations; at some lengths they are exact. `make exercise
# N=bug7`.
#
# **Measure.** Predict the byte floor of decode attention for Llama-3-8B in bfloat16, 32
# requests of 4,096 tokens, one layer, on a B200 (8,000 GB/s): first by hand, then with
# `costs.decode`. If you have a card, time `gpu.decode_attention` with
# `triton.testing.do_bench` and divide. What share of the floor's bandwidth do you get?
#
# **Question.** `attend_chunk` returns at once where a sequence has no such chunk. With
# tables for 32,768 tokens and all contexts under 256, 127 of 128 programs do that. When
# is that worth changing, and what would you have to know on the host to change it?
#
# <details><summary>Discussion</summary>
#
# *Build.* Usual stumbling blocks: rescaling `acc` but not `l`; taking the maximum of
# the tile alone and not of the tile and `m`; converting weights to the values' type
# *after* the product instead of before. In the merge, a chunk that is not there must
# weigh nothing: its m is −∞, and the running maximum must stay finite, or −∞ − (−∞)
# is NaN.
#
# *Find the bug.* Keys behind a chunk's end are loaded as 0, so their score is 0 and
# their weight e^0, not nothing. Their values are 0 as well, so `acc` is right and `l`
# too large: everything shrinks towards 0. The fewer real keys, the more the padding
# weighs; at multiples of the tile there is none. A mask on a load makes it *safe*; only
# a mask on the scores makes it *right*.
#
# *Measure.* 32 × 4,096 tokens × 2 × 8 heads × 128 numbers × 2 bytes = 0.54 GB, 67 µs.
#
# *Question.* A program that returns costs its start. With 8 heads, 128 chunks and 64
# sequences there are 65,536 programs, which may no longer be nothing beside a floor of
# a few microseconds: a thing to measure. The scheduler knows all lengths
# on the host anyway (it planned them), so the largest could come with the plan. But
# with CUDA graphs the grid is recorded, and must then hold for every later length.
#
# </details>
#
# ## How vLLM does it
#
# Paths relative to `vllm/`, as of 2026.
#
# *Attention.* `v1/attention/ops/triton_unified_attention.py`, described in chapter 06:
# one kernel for prefill and decode, and a second that merges segments. Its program,
# too, finds its sequence by bisection over `query_start_loc`, and its grid has one tile
# too many for each sequence at most; our `owner` is that idea. Chunks there are a fixed
# number for each context, ours have a fixed size.
#
# *Writing.* `v1/attention/ops/triton_reshape_and_cache_flash.py` is `write_kv` in
# Triton, beside the CUDA version in `csrc/cache_kernels.cu`.
#
# *Cascade.* `v1/attention/backends/flash_attn.py` runs attention twice, over the common
# prefix and over the rest, and `v1/attention/ops/triton_merge_attn_states.py` joins the
# two normalised outputs by their log-sum-exp. Ours goes on from the state, so the
# second kernel merges as it starts.
#
# *Experts.* `fused_moe_kernel` in `model_executor/layers/fused_moe/fused_moe.py`.
# `moe_align_block_size` sorts tokens by expert and pads each expert to whole tiles, so
# that a tile's expert is an array look-up; we pad nothing and bisect. Its
# configurations are JSON files in the repository, one for each shape and GPU.
#
# *Sampling.* `v1/sample/ops/topk_topp_triton.py` finds the cut by narrowing a pair of
# pivots over the values ("Qrita", arXiv 2602.01518), after gathering outliers; ours
# narrows bits, in a fixed number of passes. Penalties are
# `v1/worker/gpu/sample/penalties.py`.
#
# *Left out here:* quantised caches and weights, tensor descriptors and TMA, persistent
# programs, warp specialisation, attention sinks, and everything about AMD.
#
# Next: [08 Sampling](08_sampling.ipynb), from the scores over a vocabulary to one
# token.
