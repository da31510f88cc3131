# %% [markdown]
# # 17 · Reading vLLM
#
# [← 16 In production](16_production.ipynb) · [00 The map](00_map.ipynb)
#
# vLLM has 201 engine flags (counted in `vllm/engine/arg_utils.py` in August 2026);
# this engine has the number below. You have read the small one. Where do you find its
# parts in the large one, what is different there and why, and what have you not seen
# yet?
#
# One part was saved for this chapter, because it shows best how much of a large
# engine is one small idea. Gemma 3 27B has 62 layers, of which 52 read only the last
# 1,024 tokens. When a request is 32,768 tokens long, what share of its keys and
# values will nobody ever read again?

# %%
from pagedattn.config import settings_table

layers, local, window, tokens = 62, 52, 1024, 32_768
unread = local * (tokens - window) / (layers * tokens)
print(len(settings_table()), "settings here, 201 engine flags in vLLM")
print(f"{unread:.0%} of the keys and values will never be read again")

# %% [markdown]
# vLLM's answer is called the hybrid KV cache manager. Here it is about a hundred
# lines of `pagedattn/cache/tables.py`. First the map, then these lines.

# %% [markdown]
# ## Room by room: where it is in vLLM
#
# All paths below are under `vllm/v1/` unless they begin with `vllm/`. Names are those
# of vLLM 0.26 to 0.30 (summer 2026). `csrc/` and `tests/` are at the root. They move,
# so search for the class, not for the line.
#
# | here | vLLM |
# | --- | --- |
# | `config.py` | `vllm/engine/arg_utils.py`, `vllm/config/` |
# | `request.py` | `vllm/sampling_params.py`, `request.py`, `vllm/outputs.py` |
# | `intake.py` | `engine/input_processor.py`, `engine/parallel_sampling.py` |
# | `text/tokenizer.py`, `template.py` | `vllm/tokenizers/`, `vllm/renderers/` |
# | `text/detokenizer.py`, `stop.py` | `engine/detokenizer.py` |
# | `cache/blocks.py: Block, FreeList` | `core/kv_cache_utils.py` |
# | `cache/blocks.py: BlockPool` | `core/block_pool.py: BlockPool` |
# | `cache/prefix.py: block_hash` | `core/kv_cache_utils.py: hash_block_tokens` |
# | `cache/prefix.py: PrefixIndex` | `core/block_pool.py: BlockHashToBlockMap` |
# | `cache/tables.py: Tables` | `core/kv_cache_manager.py: KVCacheManager` |
# | … its several groups | `core/kv_cache_coordinator.py` |
# | … its full and window cases | `core/single_type_kv_cache_manager.py` |
# | `cache/tables.py: LayerGroup` | `kv_cache_interface.py: KVCacheGroupSpec` |
# | `scheduler.py: Scheduler` | `core/sched/scheduler.py: Scheduler` |
# | `scheduler.py: Plan` | `core/sched/output.py: SchedulerOutput` |
# | `model/batch.py` | `worker/gpu_input_batch.py`, `worker/block_table.py` |
# | `model/decoder.py`, `families.py` | `vllm/model_executor/models/` |
# | `model/loader.py`, `gguf.py` | `vllm/model_executor/model_loader/` |
# | `kernels/` | `attention/backends/`, `attention/ops/`, root `csrc/` |
# | `sampling/` | `sample/sampler.py`, `sample/ops/` |
# | `runner.py` | `worker/gpu_model_runner.py`, `executor/` |
# | `engine.py` | `engine/core.py: EngineCore` |
# | `async_engine.py` | `engine/async_llm.py`, `engine/core_client.py` |
# | `output.py` | `engine/output_processor.py` |
# | `llm.py` | `vllm/entrypoints/llm.py` |
# | `serve/` | `vllm/entrypoints/openai/` |
# | `metrics.py` | `metrics/` |
# | `trace.py` | `vllm/distributed/kv_events.py`, a cousin |
# | `testing.py: HashModel` | nothing; `tests/v1/core/` tests the parts |
#
# Two rows need a word. `cache/tables.py` is *three* files in vLLM: a manager that the
# scheduler talks to, a coordinator that makes several groups agree, and one class for
# each kind of layer. And there are two runners: `worker/gpu_model_runner.py`, which
# is what most articles describe, and its successor in `worker/gpu/` ("Model Runner
# V2"), which this summer's versions choose for common dense models such as Llama and
# Qwen 3. The successor keeps its batch on the GPU, and its sampler draws noise as a
# function of seed and position (`worker/gpu/sample/gumbel.py`), as chapter 08 does.

# %% [markdown]
# ## Their scheduler, with ours open
#
# `Scheduler.schedule` in `core/sched/scheduler.py` is one function of several hundred
# lines. Put it on the left and our `scheduler.py` on the right, and read in this
# order.
#
# 1. The note at its top says "There's no 'decoding phase' nor 'prefill phase' in the
#    scheduler", and then our one rule: `num_computed_tokens` catches up with
#    `num_tokens_with_spec`. Draft tokens are in their sum from the start;
#    `num_output_placeholders` are our `pending`.
# 2. `while req_index < len(self.running) and token_budget > 0` is `_plan_running`.
#    The lines that cut `num_new_tokens` down (threshold, budget, context length) are
#    `_chunk`. Skip everything that mentions encoders, LoRA, Mamba, connectors: none
#    of it changes the shape.
# 3. `allocate_slots` inside `while True` is `_make_room`. It returns None when there
#    is no room, and then somebody is preempted. Under first come, first served the
#    victim is `self.running.pop()`, the last one, as here. Under the priority policy
#    vLLM searches for the least important one, and takes its part of this step back
#    if it was planned already. Our `running` is sorted by importance, so the victim
#    always stands behind the one that needs room.
# 4. `if not preempted_reqs` guards the second half, as in our `plan`: a step that had
#    to preempt admits nobody.
# 5. The waiting loop is `_plan_waiting` and `_admit`. `get_computed_blocks` is
#    `lookup`, capped at `num_tokens - 1`, with the reason in a comment.
#    `full_sequence_must_fit` is the `reserve` of our `Tables.admit` (their flag is
#    `scheduler_reserve_full_isl`): admit nobody whose whole prompt would not fit,
#    even if the first chunk does. Beyond that vLLM can keep a share of the pool free,
#    its `watermark`.
# 6. Requests that cannot run *yet*, because a grammar compiles or a remote cache
#    arrives, are set aside and the loop goes on. One that does not *fit* ends the
#    loop. We have only the second kind.
# 7. `NewRequestData` is our `Start`, `CachedRequestData` the deltas that we replace
#    by sending whole tables in every `Item`.
# 8. `_update_after_schedule` advances `num_computed_tokens` at once, before anything
#    has run. That is `request.computed += n` in `_add_item`, and it is what allows
#    plans in flight.
# 9. `_preempt_request` frees, sets computed to 0 and prepends to the waiting queue:
#    `_preempt`. Theirs counts preemptions; ours also gives the request a new epoch,
#    so that late results can be recognised.
# 10. `update_from_output` is `commit`; `check_stop` is `Request.ending`.
#
# What you will miss on their side is short functions. What you will miss on ours is
# everything in the skipped lines. The decisions are of the same kinds and come in the
# same order, and that is why the rest of this book is about vLLM as well.

# %% [markdown]
# ## The naive way: one table for all layers
#
# Now the part that was saved. A **sliding window** of *w* lets a layer read the last
# *w* tokens only, itself included. Mistral 7B made that popular; Gemma 2 and 3,
# gpt-oss and others mix such layers with *full* ones that read everything.
#
# An engine that knows nothing of windows still works. The attention kernel skips what
# lies outside; the table keeps it. The next cell runs `HashModel`, the test model
# whose every token depends on all that its layers read: layer 0 full, layer 1 with a
# window of 8. `one` is the naive grouping, both layers under one table.

# %%
from pagedattn.cache.tables import LayerGroup, Tables, group_layers
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Scheduler
from pagedattn.testing import HashModel, hash_runner, naive_generate


def serve(groups, windows=(0, 8)):
    """23 tokens of one request: is the answer right, and what was held at most?"""
    config = EngineConfig(block_size=4, num_blocks=11, max_num_batched_tokens=4)
    scheduler = Scheduler(config, groups)
    runner = hash_runner(HashModel(windows), groups, 11, 4)
    params = SamplingParams(temperature=0, max_tokens=12)
    request, most = Request("a", list(range(12)), params, 24), 0
    scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, runner.run(plan))
        most = max(most, scheduler.tables.slots() // 4)
    right = request.tokens[12:] == naive_generate(request, windows)[0]
    return right, most * len(groups[0].layers)


one = (LayerGroup(0, (0, 1)),)
two = (LayerGroup(0, (0,)), LayerGroup(8, (1,)))
for groups in (one, two):
    right, held = serve(groups)
    print(len(groups), "table" + "s" * (len(groups) > 1), end=": ")
    print("right," if right else "wrong,", held, "blocks of one layer held at most")

# %% [markdown]
# ## What it costs
#
# Both give the right answer. One table keeps 12 blocks of one layer's keys and values
# at the end; two tables keep 9, since the second lets go of what its layer will never
# read again. On 23 tokens that is little. `Tables.most_blocks` says what a request
# can hold at most, so we can ask about Gemma 3 27B with blocks of 16 and steps of
# 2,048 tokens.


# %%
def layer_blocks(windows, tokens, groups):
    """The most that a request holds, in blocks of one layer; padding counts."""
    config = EngineConfig(num_blocks=2, max_num_batched_tokens=2048)
    tables = Scheduler(config, groups).tables
    return tables.most_blocks(tokens) * max(len(group.layers) for group in groups)


gemma = [0 if i % 6 == 5 else 1024 for i in range(62)]
everything = (LayerGroup(0, tuple(range(62))),)
print(" tokens  one table  groups  share")
for tokens in (1024, 4096, 32_768, 131_072):
    flat = layer_blocks(gemma, tokens, everything)
    grouped = layer_blocks(gemma, tokens, group_layers(gemma))
    print(f"{tokens:7} {flat:10} {grouped:7}  {grouped / flat:.0%}")
print([(group.window, len(group.layers)) for group in group_layers(gemma)])

# %% [markdown]
# At 32,768 tokens a request holds 25 % of what one table would hold, so the same
# memory serves four such requests instead of one; at 131,072 tokens it is 18 %. At
# 1,024 tokens grouping *costs* 13 %: nothing lies behind a window yet, and the last
# of the seven groups has 2 layers where the others have 10, so its blocks are mostly
# padding. Why groups must be of equal size, and why there are seven of them, is the
# next question.

# %% [markdown]
# ## A window that moves over ten blocks
#
# Here is the pool that the whole book uses: ten blocks of four tokens. The model has
# one full layer and one with a window of 8, the step budget is 4 tokens, and Ann asks
# for 12 words. Each row is a plan. A plan carries both tables, so the picture is
# drawn from plans alone.

# %%
from pagedattn.trace import Recorder
from pagedattn.viz import story
from pagedattn.viz.groups import ladder

recorder = Recorder()
config = EngineConfig(block_size=4, num_blocks=11, max_num_batched_tokens=4)
scheduler = Scheduler(config, two, recorder.emit)
ann = story.request("Ann", f"{story.SYSTEM} rain on the roof", answer=12)
scheduler.add(ann)
plans = []
while (plan := scheduler.plan()) is not None:
    scheduler.commit(plan, story.results(scheduler, plan))
    recorder.tick()
    plans.append(plan)
ladder(plans, "Ann", two)

# %% [markdown]
# The full table on the left grows to six blocks. The table on the right never holds
# more than three. Token 15, for example, reads tokens 8 to 15, so nothing needs the
# first two blocks any more, and they are gone (dashed). In their place stands the
# **null block**, block 0, so that position ÷ 4 still is the index into the table.
# Follow blocks 2 and 4. The window let go of both, and in step 11 block 2 comes back
# in the *full* table. There is one pool, and no share of it is set aside for either
# kind.
#
# The trace tells the same story from the side of the blocks:

# %%
from itertools import groupby

moved = [e for e in recorder.events if e.kind in ("take", "free") and e.step < 13]
for step, events in groupby(moved, key=lambda event: event.step):
    print(f"step {step}:", ", ".join(f"{e.kind} {e.blocks[0]}" for e in events))


# %%
def longest(groups, blocks):
    """Tokens that a request alone in the pool can have."""
    config = EngineConfig(4, num_blocks=blocks + 1, max_num_batched_tokens=4)
    return Scheduler(config, groups).tables.capacity()


for pool in (10, 20, 100, 1000):
    print(f"{pool} blocks of one layer:", longest(one, pool // 2), "tokens", end=" ")
    print("in one table,", longest(two, pool), "in two")

# %% [markdown]
# In the memory of ten one-layer blocks, a single table of two-layer blocks ends at 20
# tokens, and two tables reach 24. With a thousand it is 2,000 against 3,984: half of
# the layers cost next to nothing.

# %% [markdown]
# ## The idea
#
# A **layer group** is a set of layers that attend alike (to everything, or through a
# window of one width) and therefore always need the same tokens. They share one
# table. Three decisions make the rest easy.
#
# *All groups have the same number of layers.* A block then costs the same bytes in
# every group, any block can serve any group, and one pool with one free list is
# enough. Layers at the same place in different groups even share one tensor: block 7
# is used by one group at a time, so their layers never write the same rows.
#
# *The index key carries the group.* The hash of a prefix says nothing about who
# computed it, and the keys of a window layer are not those of a full layer. So the
# key is (hash, group).
#
# *A hit must satisfy every group.* A full group needs all blocks of the prefix. A
# window group needs those that the next token will read, the last *w* − 1 tokens
# before it. The rest of its row is null blocks.
#
# > **Takeaway.** Group the layers that forget alike, give each group its own table
# > over one pool of equal blocks, and let each release what no later token can read.
# > A cached prefix is then usable exactly at those lengths where every group still
# > has what the next token will look at.

# %% [markdown]
# ## The code: making groups
#
# `LayerGroup` is two fields. `group_layers` makes the groups from one number for each
# layer. The size of a group is that of the rarest kind, unless the most frequent kind
# is less than a quarter larger: then each kind is one group, and the smaller is
# padded. Five local layers for each full one, as in Gemma, then cut into pieces that
# waste little or nothing.
#
# `most_blocks` and `_most` say what one request can hold. For a window that is its
# last *w* − 1 tokens and one step's chunk, from any slot on. Admission uses that
# number, so that long requests are not refused for memory which they will never hold.
# `layer_caches` in the runner gives the layers their tensors: the *i*-th layers of
# all groups share one.

# %%
from pagedattn.book import broken, falsify, holds, show
from pagedattn.runner import layer_caches

show(LayerGroup, group_layers, Tables.most_blocks, Tables._most, layer_caches)

# %%
small = [0 if i % 6 == 5 else 512 for i in range(18)]  # Gemma 3 270M
print(
    len(group_layers(small)), "groups of", len(group_layers(small)[0].layers), "layers"
)
for full, windowed in ((12, 12), (13, 12), (19, 18), (20, 30)):
    groups = group_layers([0] * full + [128] * windowed)
    print(f"{full} full, {windowed} window:", [len(group.layers) for group in groups])

# %% [markdown]
# The last line shows where the rule is crude. Twenty full and thirty window layers
# would fit groups of ten without waste; the rule takes twenties and pads ten places.
# vLLM's function has the same rule and says so in a comment.

# %% [markdown]
# ## The code: what a hit needs
#
# `lookup` asks the index for every block of every group, and then for the longest
# length on which all agree. `_first_needed` is the whole theory of windows in one
# line. After *n* blocks the next token stands at position *n* × size. Its window
# begins *w* − 1 tokens earlier, and the block in which that lies is the first one
# needed. `_agreed` walks through the lengths once, keeping for each group how many
# cached blocks stand in a row; a length is good if every row reaches back far enough.
# `_needed` puts null blocks where nothing is needed.

# %%
show(Tables.lookup, Tables._agreed, Tables._first_needed, Tables._needed)

# %% [markdown]
# Ann has left, and her blocks are free but not forgotten, except those that were used
# again. At which lengths could somebody with the same words begin?

# %%
tables = scheduler.tables
again = Request("Bob", ann.tokens[:21], SamplingParams(), 99)
rows = [[tables.index.get(h, g) for h in tables.hashes(again, 5)] for g in (0, 1)]
runs = [0, 0]
for n in range(1, 6):
    runs = [run + 1 if row[n - 1] else 0 for run, row in zip(runs, rows, strict=True)]
    needs = [n - tables._first_needed(group, n) for group in two]
    good = "yes" if runs[0] >= needs[0] and runs[1] >= needs[1] else "no"
    print(f"{4 * n:2} tokens: full has {runs[0]} of {needs[0]} blocks, ", end="")
    print(f"window has {runs[1]}, needs {needs[1]}: {good}")
for length in (21, 17, 13):
    hits = tables.lookup(Request("x", ann.tokens[:length], SamplingParams(), 99))
    ids = [[block.id for block in row] for row in hits.blocks]
    print(f"{length} equal tokens: {hits.tokens} found, tables {ids}")

# %% [markdown]
# With 21 equal tokens, 20 are found, and the window's row is three null blocks and
# two real ones. With 13 equal tokens *nothing* is found, though the full layer still
# has all of them: the window layer would need its blocks 1 and 2, and block 1 is
# gone. This is what windows do to prefix caching. Full layers can be hit at any
# block; a window group only where its own last blocks survive. Here they survive at
# the end of what somebody computed, which is where conversations go on.

# %% [markdown]
# ## The code: letting go
#
# `trim` is called before the next plan of a request takes blocks. It counts what lies
# wholly behind the window of the next token, and `_cut` gives these blocks back, tail
# first, and puts the null block in their places. `ids` is what plans carry, so it is
# made anew; plans that were made earlier keep the tuple they have.
#
# The call stands in `_plan_one`, and its place is the argument for why it is safe. A
# plan never loses a block while it is being made. A block that is given back now can
# be written only by this plan or a later one, and plans run whole and in order, so
# whoever still reads it has read it by then.

# %%
show(Tables.trim, Tables._cut, Scheduler._plan_one)

# %% [markdown]
# ## Proved, then broken
#
# For any two windows, any prompts that begin alike, any step budget, in ten blocks:
# the tokens are those that `naive_generate` computes with no cache at all.
# `HashModel` makes this exact. If a block was released too early, its layer reads the
# null block or somebody else's keys, and says something else.

# %%
from hypothesis import strategies as st


def same_tokens(windows, prompts, budget):
    """Prompts that begin alike, one after the other, through one small pool."""
    groups = group_layers(windows)
    config = EngineConfig(block_size=4, num_blocks=11, max_num_batched_tokens=budget)
    scheduler = Scheduler(config, groups)
    runner = hash_runner(HashModel(windows), groups, 11, 4)
    most = scheduler.tables.capacity()
    for n in (min(n, most) for n in prompts):
        params = SamplingParams(temperature=0, max_tokens=5)
        request = Request("r", list(range(n)), params, min(n + 5, most + 1))
        scheduler.add(request)
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, runner.run(plan))
        truth, _ = naive_generate(request, windows)
        assert request.tokens[n:] == truth, f"another answer to a prompt of {n}"


a_window = st.integers(0, 9)
prompts = st.lists(st.integers(1, 16), min_size=1, max_size=3)
inputs = st.tuples(a_window, a_window), prompts, st.integers(4, 12)
holds(same_tokens, *inputs)

# %% [markdown]
# Now one token too greedy. First `trim` releases what lies behind the window *after*
# the next token:

# %%
early = "request.computed - group.window + 2"
with broken(Tables.trim, "request.computed - group.window + 1", early):
    falsify(same_tokens, *inputs)

# %% [markdown]
# A window of 2, blocks of four, a prompt of one token and five more to come. The
# fourth token fills the first block; the fifth still reads the last slot of it, and
# finds it gone. Then `_first_needed`, which decides what a hit must have:

# %%
late = "n * self.block_size - group.window + 2"
with broken(Tables._first_needed, "n * self.block_size - group.window + 1", late):
    falsify(same_tokens, *inputs)

# %% [markdown]
# One request, alone, in an empty cache. A layer with a window of 1 reads only its own
# token, so it truly needs nothing from before. With the broken line, the layer with a
# window of 2 seems to need nothing either. So both groups agree that the first block
# of the prompt was found, although nothing was ever computed, and the answer begins
# after four tokens that nobody read.
#
# Mistakes of this kind leave every count right. Reference counts agree, no block is
# lost, `check` passes; the only trace is a wrong word, perhaps far into a long
# answer. That is the reason for testing with a model that notices.

# %% [markdown]
# ## What is different, and why
#
# *They name, we number.* vLLM has a class for each kind of layer
# (`FullAttentionManager`, `SlidingWindowManager`, `ChunkedLocalAttentionManager`,
# `MambaManager`, …), since it has kinds that are not windows: the state of a
# linear-attention layer is no list of tokens. We have full and window, and
# `window = 0` is full.
#
# *They iterate, we scan.* Our `_agreed` tries all lengths in one pass and needs every
# block looked up. vLLM asks the full groups first, left to right, up to the first
# miss; then each window kind, right to left, down to the first run that is long
# enough; and repeats until no kind shortens the result. For long prompts with short
# hits that is less work.
#
# *They deal, we cut.* Of 52 local layers vLLM makes six groups of 9, 9, 9, 9, 8 and 8
# (`layers[i::num_groups]`), we make five of 10 and one of 2. Padding is the same.
# With layers spread over several machines, theirs gives each machine a fair part of
# each group.
#
# *They keep twins, we keep the first.* When two requests compute the same block in
# the same step, vLLM indexes both under one hash (`BlockHashToBlockMap` may hold a
# dict). Here the first stays indexed and the second is reused first. Neither changes
# a table that was handed out.
#
# *They take the step in flight into account, we take the order.* vLLM releases behind
# the window from `num_computed_tokens - num_in_flight_tokens` since [pull request
# 47728](https://github.com/vllm-project/vllm/pull/47728) (July 2026): with a
# scheduler that runs a step ahead, a released block could be filled by a copy from
# host memory while the step in flight still read it. Our plans run in order and
# nothing else writes blocks, so the order is enough. The day this engine loads blocks
# from elsewhere, it will need their rule.

# %% [markdown]
# ## What you have not seen
#
# These parts of vLLM have no counterpart here yet. Each is large; none changes the
# loop.
#
# - *Several devices*: tensor, pipeline, data, expert and context parallelism
#   (`vllm/distributed/`, `executor/multiproc_executor.py`). The scheduler stays one;
#   its output is sent to all workers.
# - *CUDA graphs and `torch.compile`* (`vllm/compilation/`): a step of a small model
#   is dominated by starting kernels, so whole forward passes are recorded for a set
#   of batch sizes and replayed. Batches are padded to the next recorded size.
# - *Attention backends* (`attention/backends/`): FlashAttention, FlashInfer, Triton,
#   CPU and many more, behind one interface. Ours is chapter 06's pair.
# - *Asynchronous scheduling*: plan *n* + 1 is made while *n* runs
#   (`EngineCore.step_with_batch_queue`, `core/sched/async_scheduler.py`). Our
#   scheduler allows it, and its tests use it; the engine does not yet.
# - *Speculative decoding* (`spec_decode/`), *structured output*
#   (`structured_output/`), *LoRA* (`vllm/lora/`), *images and sound*
#   (`vllm/multimodal/`), *embeddings and scoring* (pooling models).
# - *Caches beyond the GPU*: KV connectors (`vllm/distributed/kv_transfer/`) move
#   blocks to host memory, to disk, to other machines, and separate prefill machines
#   from decode machines.
# - *Quantisation* of weights and of the KV cache
#   (`vllm/model_executor/layers/quantization/`), and state-space models, whose cache
#   is a state and not a list.

# %% [markdown]
# ## Two more engines to compare
#
# **nano-vllm** is the shortest real relative: about 1,400 lines, Qwen 3, no server.
# Its `BlockManager` has our pool, index and tables in one class: blocks of 256
# tokens, hashed with xxhash, a deque of free ids, and a comparison of the tokens
# themselves when a hash is found, which a 64-bit hash needs. Its `Scheduler.schedule`
# returns either a batch of prompts or a batch of single tokens, never both, so a long
# prompt makes everybody wait: read it beside chapter 05 to see what mixing the two
# buys. Removing a block from the middle of a deque takes time in proportion to the
# pool, and the sign that a new block is needed is `len(seq) % block_size == 1`, which
# holds as long as a step adds one token. Both are fine there, and both are in our
# list of mistakes to find.
#
# **llama.cpp's server** comes from the other side. It has a fixed number of *slots*
# (`server_slot`), each a conversation with its own part of the context; what we call
# a slot is a *cell* there. `update_slots` in `tools/server/server-context.cpp` fills
# one batch: first a token for each slot that generates, then prompt tokens up to the
# batch size, which is continuous batching with chunked prefill under other names.
# Prefixes are found by looking for the idle slot whose text has the longest common
# beginning (`get_available_slot`), so reuse is to the token and not to the block, but
# a prefix lives in one slot and not in an index. Windows are where it meets this
# chapter: `llama_kv_cache_iswa` holds two caches, one for full layers and a small one
# for window layers. Because the small one forgets, a conversation cannot be taken up
# in its middle, and the server keeps checkpoints (`server_prompt_checkpoint`) at
# places where it may want to. That is the same loss that the 13 equal tokens suffered
# above, and another cure for it.

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex17_vllm.py` is `pagedattn/cache/tables.py` without
# `group_layers`, `_first_needed`, `_agreed`, `trim` and `_cut`. Write them, then
# `make exercise N=17`. The tests compare with a dictionary of what lies in each slot,
# for six patterns of windows, and with `HashModel`.
#
# **Find the bug.** `exercises/bug17_vllm.py` has a mistake that vLLM had until June
# 2026, in our names. Only models with several groups show it, only in a nearly full
# pool: a request that begins like an earlier one gets an answer to something else.
# `make exercise N=bug17` shows a test that fails. Which block is in two tables, and
# who put it there?
#
# **Measure.** A model has 30 layers with a window of 4,096, 10 with 2,048, 5 with
# 1,024, and a small helper model beside it adds a single full layer. How many groups
# does `group_layers` make, and how many places does it pad? Write a rule that makes
# at most 12 groups and pads at most 20 % of the places. What does your rule do with
# Gemma 3 27B?
#
# **Question.** A full layer's blocks are worth keeping from the head on, since every
# longer prefix needs them. Which blocks of a *window* group are worth keeping after a
# request has ended, and which could be forgotten at once without losing a single
# possible hit? What would you have to know about future requests?
#
# <details><summary>Discussion</summary>
#
# *Build.* The two halves must agree. `trim` releases what the next token does not
# read, and `_first_needed` demands what the next token reads: at *computed* = *n* ×
# size they are the same sum. If yours differ by one, a request can release a block
# and then refuse its own prefix, or the other way round.
#
# *Find the bug.* The reference takes all hits of all groups and all new blocks in one
# call of `BlockPool.grow`: hits first, for everybody. The mistake goes group by
# group. Group 0 shares its hits and takes new blocks from the head of the free list,
# where a hit of group 1 may be lying, not yet shared. That block is evicted, written
# by group 0, and then shared by group 1 as well. vLLM's version needed blocks loaded
# from outside to appear; [pull request
# 44409](https://github.com/vllm-project/vllm/pull/44409) describes it and makes two
# phases of it, first the hits of all groups, then the new blocks of all groups. Act
# at once or not at all, across groups too.
#
# *Measure.* The rarest kind has one layer, so all groups have one: 46 groups, nothing
# padded, and 46 tables to carry in every plan. vLLM met this with a draft model
# beside Qwen 3.6; [pull request
# 51742](https://github.com/vllm-project/vllm/pull/51742) reports 46 groups becoming
# 10 and the throughput of a single request doubling, because each group's metadata is
# built anew in every step. Groups of five give 10 groups and pad four places of
# fifty, 8 %.
#
# *Question.* Only the blocks that end at a length where somebody will continue. If
# requests only ever continue whole conversations, the last window's blocks of each
# are enough, and everything `trim` releases could be forgotten at once. If they
# branch from a common system prompt, the blocks before its end matter too, and
# nothing in the cache says where that is. vLLM has a flag for this trade,
# `--prefix-cache-retention-interval`: keep the window's blocks at every so many
# tokens, and at the end of the prompt.
#
# </details>

# %% [markdown]
# ## How vLLM does it: the hybrid KV cache manager
#
# `core/kv_cache_utils.py: _get_kv_cache_groups_uniform_page_size` is `group_layers`.
# Its docstring is the best description of the idea there is, with the assumptions
# spelled out: the same bytes for each block in all groups, the same number of layers.
# The threshold for padding instead of cutting was a quarter at first ([pull request
# 29303](https://github.com/vllm-project/vllm/pull/29303): 19 full and 18 window
# layers, where cutting would have wasted 17 places) and is a half today, because
# drafters add layers to one kind.
#
# `core/kv_cache_coordinator.py` has three coordinators: none (no prefix caching),
# `UnitaryKVCacheCoordinator` for one group, `HybridKVCacheCoordinator` for several.
# Its `find_longest_cache_hit` is `_agreed`, with its fixed point and the drafter's
# special case.
#
# `core/single_type_kv_cache_manager.py` has the kinds.
# `SlidingWindowManager.find_longest_cache_hit` searches from right to left for ⌈(*w*
# − 1) ÷ size⌉ blocks in a row, which is what `_first_needed` counts.
# `get_num_skipped_tokens` is the sum in `trim`, with a drawing, and
# `remove_skipped_blocks` is `_cut`: it walks back from the last skipped block and
# stops at the first null block. It is called from `KVCacheManager.allocate_slots`
# before new blocks are taken, where we call `trim` before `grow`.
#
# The tensors are made by the worker from a `KVCacheConfig`: the *i*-th layers of all
# groups share one `KVCacheTensor`, as in `layer_caches`.
# `--disable-hybrid-kv-cache-manager` goes back to one table for everything, the naive
# way of this chapter, and some features still need it.
#
# Left out here: groups with different block sizes (hits then end at a common
# multiple), layers whose cache is a state, layers that share another layer's cache,
# and retention intervals.
#
# You now have the map of a much larger house. Take one row of the table, open both
# files, and read.
#
# [← 16 In production](16_production.ipynb) · [00 The map](00_map.ipynb)
