# %% [markdown]
# # 03 · Blocks
#
# [← 02 Tokens](02_tokens.ipynb) · [04 Prefix cache →](04_prefix.ipynb)
#
# A model of 13 billion parameters in 16-bit numbers fills 26 of the 40 GB of an A100.
# Of what remains, 12 GB can hold keys and values. Each token of OPT-13B needs 800 KB of
# them, so there is room for 15,700 tokens. A conversation, question and answer
# together, is 500 tokens long on average. **How many conversations can run at once: 7,
# or 33?**
#
# Both answers come from the same GPU and the same model. What differs is how the memory
# for keys and values is handed out. This chapter builds the part of the engine that
# hands it out, and reproduces the two figures that made paged memory famous: in systems
# that reserve memory in one piece, 20 to 38 % of it holds anything; in blocks, 96 %
# does (Kwon et al., *Efficient Memory Management for Large Language Model Serving with
# PagedAttention*, SOSP 2023, figure 2).
#
# Two words first. A **slot** is the place of one token's keys and values, in every
# layer. A **block** is a fixed number of neighbouring slots: 16 in practice, 4 in the
# book's pictures.

# %% [markdown]
# ## The naive way: a place for the longest
#
# Nobody knows how long an answer will be before it has been given. The safe choice is
# to reserve, for each request, as many slots as the longest request could need. Memory
# is then cut into places of that length, and a request gets a place or waits.


# %%
class Places:
    """Slots cut into places of the longest length, one for each request."""

    def __init__(self, slots: int, longest: int) -> None:
        self.free = [i * longest for i in range(slots // longest)]

    def admit(self) -> int | None:
        """The first slot of a place; None if all are taken."""
        return self.free.pop(0) if self.free else None

    def leave(self, first: int) -> None:
        """Give a place back."""
        self.free.append(first)


# %% [markdown]
# Ten lines, and they work. Finding a token is one addition: position `p` lies in slot
# `first + p`. Attention kernels and tensor libraries like such memory, because it is
# one contiguous tensor for each request. FasterTransformer and Orca, the systems that
# the paper compares with, worked this way.
#
# The book has three people who return in every chapter. Ann and Bob ask about the same
# system prompt, Cyd asks something else. Their memory is ten blocks of four slots, 40
# in all. Say that no request may be longer than 20 tokens.

# %%
from pagedattn.viz.story import cast

places = Places(slots=40, longest=20)
for request in cast():
    first, asked, most = places.admit(), len(request.tokens), request.limit
    print(f"{request.id}: {asked:2} tokens now, at most {most}; first slot: {first}")

# %% [markdown]
# Cyd waits. Her five tokens would fit several times into what Ann and Bob have reserved
# and do not use: 40 slots reserved, 12 + 13 = 25 of them filled. The 15 others are of
# two kinds, and it pays to keep them apart. Some will be filled **later**, when the
# answer grows. The rest will **never** be filled: Ann may ask for at most 18 tokens and
# has reserved 20.

# %% [markdown]
# ## Measure: where the memory goes
#
# Three people are no evidence. The paper measured conversations from ShareGPT, whose
# lengths vary a lot, and instructions from Alpaca, which are short. It publishes the
# mean lengths (figure 11): 161 tokens in and 338 out for ShareGPT, 19 and 58 for
# Alpaca. The texts themselves are not in this repository, so we draw lengths from a
# log-normal distribution, the bell curve of the *logarithm*, which gives many short
# texts and a few very long ones. Requests over 2,048 tokens, OPT's limit, are left out.

# %%
from pagedattn.bench.workloads import ALPACA, SHAREGPT

conversations = SHAREGPT.draw(600)
asked, answered = zip(*conversations, strict=True)
print("the first five (in, out):", conversations[:5])
print(f"means: {sum(asked) / 600:.0f} in, {sum(answered) / 600:.0f} out")
print(f"longest in all: {max(a + b for a, b in conversations)}")

# %% [markdown]
# The paper compares three ways of reserving, all implemented by its authors in the
# style of Orca, an earlier serving system (section 6.1):
#
# - **Max** reserves 2,048 slots for everybody.
# - **Pow2** reserves the prompt and the next power of two above the answer's true
#   length: an answer of 25 gets 32. It needs to guess that length within a factor of
#   two.
# - **Oracle** reserves the true length. Nobody can build it; it shows the best that
#   reserving could ever do.
#
# Pieces of different sizes need an allocator. The paper assumes a *buddy allocator*:
# every piece is a power of two, a free piece is split in halves until it fits, and two
# free halves merge again. `pagedattn.bench.reserve` has one in thirty lines, and
# replays the 600 requests through each scheme: first come first served, one token for
# each running request in each step. It counts slots in every step in which somebody
# waits, since an idle server proves nothing.

# %%
from pagedattn.bench.reserve import SCHEMES, paged, reserved

measured = {name: reserved(conversations, name) for name in SCHEMES}
for name, result in measured.items():
    shares = "  ".join(f"{share:5.1%}" for share in result.shares)
    print(f"{name:6}  {shares}  {result.at_once:5.2f} requests at once")

# %% [markdown]
# The four columns are **tokens** (slots that hold keys and values), **later**,
# **never**, and **between**: what lies between requests, because a piece was rounded up
# to a power of two or because what is free is too small for the next request. The paper
# calls the last three reservation, internal fragmentation and external fragmentation.
#
# Now the same 600 requests through this engine's real scheduler and its real blocks of
# 16, with the prefix cache off so that nothing is shared.

# %%
in_blocks = paged(conversations)
print("  ".join(f"{share:5.1%}" for share in in_blocks.shares), end="  ")
print(f"{in_blocks.at_once:5.2f} requests at once")

# %%
from pagedattn.viz.shares import bars

PAPER = {
    "Max": (0.204, 0.133, 0.573, 0.089),
    "Pow2": (0.268, 0.179, 0.136, 0.416),
    "Oracle": (0.382, 0.252, 0.0, 0.366),
}
rows = {}
for name in SCHEMES:
    rows[f"{name}, paper"] = PAPER[name]
    rows[f"{name}, here"] = measured[name].shares
rows["blocks, paper"] = (0.963,)
rows["blocks, here"] = in_blocks.shares
bars(rows, ("tokens", "later", "never", "between"), "The paper's figure 2 beside ours")

# %% [markdown]
# Both figures come out: reserving leaves 20.7 to 38.8 % useful (the paper: 20.4 to 38.2
# %), blocks 97.3 % (96.3 %). So do the numbers of requests that run at once. The
# paper's figure 13 has 7.00, 9.81, 13.62 and 30.42; ours are 7.00, 10.24, 13.12 and
# 33.14.
#
# How honest is that? One of these numbers was used to make the trace. Means alone do
# not fix a log-normal distribution, it also has a spread. The paper does not print it,
# but figure 2 gives it away: 13.3 % reserved for later under Max fixes the spread of
# the outputs (how, the next cell shows). The spread of the prompts we guessed; other
# guesses move these shares by up to three points. Everything else is a prediction. The
# worst of them is Pow2, where we find 34 % between requests and the paper 42 %; that
# share depends on where lengths lie relative to powers of two, which a smooth curve
# does not know.
#
# Two of these numbers need no simulation. 15,700 // 2,048 = 7 places, which leaves 8.7
# % of the memory over. And a request that is seen at a random moment of its life has,
# on average, its prompt and a share of its answer. Long answers are seen more often
# than short ones, so that share is the mean of the square over twice the mean, not half
# the mean:

# %%
seen = sum(n * n for n in answered) / (2 * sum(answered))
held = sum(asked) / 600 + seen
print(f"an answer, seen at a random moment: {seen:.0f} tokens, and as many to come")
print(f"useful under Max: {7 * held / 15_700:.1%}; later: {7 * seen / 15_700:.1%}")
print(f"empty in blocks of 16: 7.5 of {held + 7.5:.0f} slots, {7.5 / (held + 7.5):.1%}")

# %% [markdown]
# The last line is the whole case for blocks. A request in blocks never holds more than
# one block that is not full, and that block is half full on average: (16 − 1) / 2 = 7.5
# empty slots, whatever the length. The waste no longer depends on the longest request
# that *could* come.
#
# The same line says when the promise of "under 4 %" fails: with requests of 70 tokens,
# half a block of 16 is a tenth.

# %%
instructions = ALPACA.draw(1000)
print(f"Alpaca, Max: {reserved(instructions, 'Max').shares[0]:.1%} useful")
for size in (8, 16, 32, 128):
    result = paged(instructions, size)
    empty = result.never / result.running
    print(f"blocks of {size:3}: {result.shares[2]:5.1%} empty,", end=" ")
    print(f"{empty:4.1f} slots for each request; half a block is {(size - 1) / 2}")

# %% [markdown]
# The formula holds as long as requests are longer than a block; blocks of 128 are more
# than half empty when most requests never fill one. Still, even they hold more than ten
# times as many tokens as reserving the maximum.
#
# Then why not blocks of one slot? Because a table entry, a hash and a jump in memory
# are paid for each block, and because attention reads faster where neighbours lie
# together. vLLM's paper finds 16 to 128 best on ShareGPT, and 16 and 32 on Alpaca
# (section 7.2); 16 became the default there, and here.
#
# One price is missing from these shares. Max never starts what it cannot finish. Blocks
# are handed out as they are needed, so the pool can run out in the middle of an answer;
# then somebody has to give everything back and compute it again.

# %%
print(f"{in_blocks.preemptions} preemptions while 600 requests ran")

# %% [markdown]
# That is what running a pool at 97 % looks like when everybody comes at once. Chapter
# 05 is about who gives way; chapter 04 makes coming back cheap, since preempted
# requests usually find their own blocks again.

# %% [markdown]
# ## Picture: ten blocks of four
#
# Ann, Bob and Cyd again, now in blocks. `stage()` gives the real scheduler over ten
# blocks, with a camera; `play` runs it. Two frames: the end of the first step and the
# end of the fifth.

# %%
from pagedattn.viz.story import play, stage
from pagedattn.viz.strip import people, strip

scheduler, camera = stage()
plans = play(scheduler, camera, cast())
film = camera.film()
ends = film.ends()
strip([ends[0], ends[4]], film.block_size, people(film.frames))

# %% [markdown]
# In the first step all three compute their prompts. Ann takes blocks 1, 2 and 3. Bob's
# prompt begins with the same eight words, so his table starts with Ann's blocks 1 and 2
# (grey: two tables hold them; how they were found is chapter 04) and goes on with 4 and
# 5. Cyd takes 6 and 7. Nobody has reserved anything: when Ann has filled block 3, she
#    takes block 8. At the end of the fifth step (the film counts from 0) every block is
#    taken, and 34 of 40 slots hold keys and values. In the naive way Cyd would still be
#    waiting.
#
# A block's number says nothing about its place in the text. Ann's blocks are 1, 2, 3,
# 8, and that list is her **table**. The plan of each step carries every request's
# table, and the slot of position `p` follows from it:
#
# `slot = table[p // block_size] * block_size + p % block_size`

# %%
filled = sum(len(block.words) for block in ends[4].blocks)
print(f"{filled} of {len(ends[4].blocks) * film.block_size} slots filled")
item = plans[4].items[0]
table, size = item.tables[0], film.block_size
print(f"{item.request_id}'s table: {table}")
for p in (0, 3, 4, 11, 12, 15):
    block, offset = table[p // size], p % size
    slot = block * size + offset
    print(f"position {p:2}: block {block}, offset {offset}, slot {slot:2}")

# %% [markdown]
# Positions 11 and 12 are neighbours in the text and sixteen slots apart in memory.
# Attention has to look every block up in the table; that is the price for never moving
# anything (chapter 06 shows what it costs). The player shows the whole film, event by
# event: hover over a frame for the line of code that acted.

# %%
from pagedattn.viz.player import player

player(film)

# %% [markdown]
# ## The idea
#
# An operating system met this problem in the 1960s. Programs want contiguous memory of
# unknown size; the answer was pages of one fixed size, and a table for each program
# that says where its pages lie. A request is the program, its table the page table, a
# block the page. What carries over is not the hardware but three consequences of equal
# sizes: any free block fits any need, so nothing is lost between requests; memory is
# taken when it is needed, so nothing is reserved; and two tables may name the same
# block, so what is equal need be stored once.
#
# > **Takeaway.** Hand memory out in small equal blocks, at the moment it is needed, and
# > keep a table for each request. A request then wastes less than one block, whatever
# > its length, and 15,700 slots serve 33 conversations instead of 7.

# %% [markdown]
# ## A block, and a ring of free ones
#
# From here on the chapter reads `pagedattn/cache/blocks.py`, all of it. It knows
# nothing of tokens, requests or tensors: it counts who holds what.
#
# A `Block` has an id and a count of the tables that hold it, `refs`. `key` is what the
# prefix index knows the block by (chapter 04), and `None` for a block that nobody could
# find again. The two last fields are its neighbours in the list of free blocks: a block
# carries its own links, so being free costs no memory.

# %%
from pagedattn.book import show
from pagedattn.cache.blocks import Block, BlockPool, FreeList

show(Block)

# %% [markdown]
# Free blocks stand in a line, and the line has an order: the next block to be reused
# stands in front. Three things happen to it. A block is taken from the front (`pop`). A
# block that has just become free is put at one of the ends (`push_back`, `push_front`).
# And a block leaves from *anywhere* (`remove`), because a free block may still hold
# keys and values that a new request can use; then it is taken out of the middle.
#
# The last one rules out a queue such as Python's `deque`, which has to look for what it
# removes:

# %%
from collections import deque


class Counted(Block):
    """A block that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return self is other


line = deque(Counted(i) for i in range(100_000))
line.remove(line[50_000])
print(f"{Counted.compared:,} comparisons to take one block out of the middle")

# %% [markdown]
# A large GPU holds tens of thousands of blocks, and this happens for every block of
# every hit. So `FreeList` is a doubly linked ring: each block knows its neighbours, and
# taking it out means connecting the two with each other. The ring has one block that is
# not a block, `_ends`, before the first and after the last. Because of it there is
# always a neighbour, and `_link` and `remove` need no case for an empty list or for an
# end.

# %%
show(FreeList)

# %% [markdown]
# Every operation is a handful of assignments. A test counts the lines that Python runs,
# with 10 and with 1,000 blocks, and wants equal numbers
# (`test_work_does_not_grow_with_the_pool`).

# %% [markdown]
# ## Take, share, give back
#
# The `BlockPool` owns all blocks. Block 0, the **null block**, is not for taking: it
# stands in tables where a block is not needed or does not exist, so that a table can be
# a plain array of numbers and a wrong read is harmless instead of someone else's text.
# `usable` is therefore one less than the number of blocks.

# %%
show(BlockPool.__init__, BlockPool.usable)

# %% [markdown]
# Everything that a request ever asks for is one call, **`grow`**: **share** these
# blocks, which were found in the cache, and take that many new ones. It counts first
# and acts after. If the blocks do not suffice it returns `None` and has changed
# nothing, the order of the free list included.
#
# The first line is the one that many engines got wrong. A hit may be held by somebody,
# then sharing it costs nothing; or it may lie in the free list, then sharing it uses up
# one free block. Those are counted as `idle`. Whoever asks "are `n` blocks free?" first
# and shares the hits afterwards will find, now and then, fewer than `n` left.
#
# `_share` takes a block out of the free list if it was there, and counts one more
# holder. `_take` takes the block that is to be reused next; if that block can still be
# found through the prefix index, the index is told to forget it. That is all that
# *eviction* is: no block is ever cleaned, its next owner writes over it.

# %%
show(BlockPool.grow, BlockPool._share, BlockPool._take)

# %% [markdown]
# The way back is `give_back`. A count falls by one, and at zero the block is free.
# Where it stands then depends on what it is worth. A block in the prefix index goes to
# the back of the line, so that among such blocks the one unused for longest is reused
# first (LRU, *least recently used*). A block that nobody can find again, usually the
# unfinished last block of a request, goes to the front: it is reused before anything of
# value.
#
# Callers hand blocks over **tail first**. A later block is useless without all the
# blocks before it, so the end of a text should be forgotten before its beginning.

# %%
show(BlockPool.give_back)

# %% [markdown]
# Counting is where such code goes wrong, quietly, and the damage shows up elsewhere: a
# block freed twice is owned twice, and two users read each other's text. So the pool
# can be audited. `check` is given all tables and asserts that they account for every
# count, that a block is free exactly if nobody holds it, and that free and held blocks
# add up.

# %%
show(BlockPool.check)

# %% [markdown]
# ## Tables: whose blocks are whose
#
# One floor up, `pagedattn/cache/tables.py` knows requests. How many blocks hold so many
# tokens is a division that rounds up, `blocks_for`. (Rounding up by adding one is a
# classic: it is right for 5 tokens and one block too many for 8.) A `_Row` is what
# `Tables` keeps for each running request: its blocks, their ids as plans carry them,
# and two counters for later chapters. A plan is frozen, but the table goes on growing,
# and a copy of it in every plan would cost a context of 100,000 tokens 6,250 ids a
# step. `BlockIds` looks like a tuple: it remembers how many ids it has of a list that
# only gets longer, and `grown` gives the longer one without a copy. Why a row has
# several tables, one for each *layer group*, is a matter for chapter 06; for most
# models there is one.

# %%
from pagedattn.cache.ids import BlockIds
from pagedattn.cache.tables import Tables, _leading_nulls, _Row, blocks_for

show(BlockIds)
show(blocks_for, _Row, Tables.__init__)

# %% [markdown]
# Before anything is admitted, two questions about a request *alone* in the pool:
# `most_blocks` says how many blocks it will hold at most, summed over the groups by
# `_most`; `capacity` says how many tokens fit, by bisection, since `most_blocks` only
# grows. A request that is longer than the capacity could never end, so it is refused at
# the door. (`_most` also knows sliding windows, which hold less; with `window` 0 it is
# `blocks_for`.)

# %%
show(Tables.most_blocks, Tables.capacity, Tables._most)

# %% [markdown]
# A request enters by `admit`. It gets a row that starts with the blocks that were found
# for it (`_leading_nulls` counts those that a window group does not need) and then
# blocks for its first tokens, `upto`. It is also asked what it will need soon: with
# `reserve` the whole prompt must fit, though only a part of it may be computed in this
# step. Otherwise a long prompt would be let in, stop half-way, and sit on its blocks.
#
# That looks like look-then-act, which we said goes wrong. It is safe here since nothing
# happens in between: the check changes nothing, and the act that follows can still say
# no. `_extend` is that act, one call of `BlockPool.grow` for all groups together. A
# running request calls it through `grow`, for each step in which it needs a new block.

# %%
show(_leading_nulls, Tables.admit, Tables.grow, Tables._extend)

# %% [markdown]
# **`release`** gives a request's blocks back, tail first. `ids` is what the plan
# carries. `slots` counts what is held, a shared block once: this is the number that the
# waste above was measured with. And `check` audits the whole floor: every row belongs
# to a request, the pool's counts agree with the rows, and the ids with the blocks.

# %%
show(Tables.release, Tables.ids, Tables.slots, Tables.check)

# %% [markdown]
# ## Property: all or nothing
#
# A test by example says that one case works. A **property** says what must hold in
# every case; Hypothesis draws cases, and when one fails it looks for the smallest that
# still fails. Here is the contract of `grow`: three cached blocks lie in the free list,
# some of them are hit, and `n` new ones are wanted.

# %%
from hypothesis import strategies as st

from pagedattn.book import broken, falsify, holds


def all_or_nothing(hit: set[int], new: int) -> None:
    """Either everything was given, each block once, or nothing has changed."""
    pool = BlockPool(4, forget=lambda block: setattr(block, "key", None))
    cached = pool.grow([], 3)
    for block in cached:
        block.key = "something that can be found again"
    pool.give_back(reversed(cached))
    before = list(pool.free)
    shared = [cached[i] for i in sorted(hit)]
    taken = pool.grow(shared, new)
    if taken is None:
        assert list(pool.free) == before
    pool.check([] if taken is None else [shared + taken])


hits = st.sets(st.integers(0, 2))
holds(all_or_nothing, hits, st.integers(0, 4))

# %% [markdown]
# Does the property see anything? Break one line of the engine and find out. First the
# mistake described above: hits that lie in the free list are not counted.

# %%
with broken(BlockPool.grow, "idle + n > len(self.free)", "n > len(self.free)"):
    falsify(all_or_nothing, hits, st.integers(0, 4))

# %% [markdown]
# Three free blocks, two of them hit, two new ones wanted: each number alone fits, the
# sum does not. The assertion that stopped it stands in `FreeList.remove`, which was
# asked for a block of an empty list. In an engine without that assertion the fourth
# block would have been the ring's own end, and a request would have written into block
# 0.
#
# Then a count that is forgotten, in a sequence of acts. `n ≥ 0` takes `n` blocks for a
# new holder, `n < 0` lets one holder go.


# %%
def books_balance(acts: list[int]) -> None:
    """After every act the audit finds every block exactly once."""
    pool, holders = BlockPool(5, forget=lambda block: None), []
    for n in acts:
        if n < 0 and holders:
            pool.give_back(reversed(holders.pop(n % len(holders))))
        elif n >= 0:
            holders.append(pool.grow([], n) or [])
        pool.check(holders)


acts = st.lists(st.integers(-3, 3), max_size=8)
holds(books_balance, acts)
with broken(FreeList.remove, "self._size -= 1", "pass"):
    falsify(books_balance, acts)

# %% [markdown]
# One act is enough: take a block, and the list's length no longer agrees with the list.
# The engine's own test of these files (`tests/test_blocks.py`) is a state machine that
# runs the pool beside a model made of plain Python lists, and compares block for block
# and place for place after each act.

# %% [markdown]
# ## Under load
#
# The same pool with arrivals: a simulator runs the real scheduler for 400 steps while
# new requests keep coming, 0.4 of them in each step, with prompts and answers of about
# 50 tokens. Blue slots are read by somebody; red ones are held and still empty; grey
# ones are free, and hold a text that could be found again.

# %%
from pagedattn.viz.simulator import cache_simulator, picture, simulate

picture(simulate(block_size=16, num_blocks=256, rate=0.4))

# %% [markdown]
# And with blocks of 128 in the same 4,096 slots:

# %%
picture(simulate(block_size=128, num_blocks=32, rate=0.4))

# %% [markdown]
# The red layer is the price of a large block: a third of the pool, and requests wait
# that did not wait before. In JupyterLab the sliders below run the simulation again;
# "shared prefix" belongs to the next chapter.

# %%
cache_simulator()

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex03_blocks.py` is this chapter's module with its contracts in
# place and nine bodies missing, among them `FreeList.remove`, `BlockPool.grow` and
# `BlockPool.give_back`. Write them; `make exercise N=3` runs the engine's own tests on
# your file and ends with one hint, `make hint N=3` gives a hint alone. Then serve real
# clients with your allocator: `PAGEDATTN_STUDENT=3 make serve`.
#
# **Find the bug.** `exercises/bug03_blocks.py` is a whole pool with one mistake that
# real engines have made. Its users saw this: the server runs for hours; once the pool
# is full of cached prompts, a long prompt that is partly cached stops it with an
# assertion deep inside the free list. `make exercise N=bug3` says when you have found
# it.
#
# **Measure.** With `simulate(..., steps=1000)` and its `average("waiting")`, find the
# arrival rate at which one request waits on average, in 4,096 slots cut into blocks of
# 16, and then into blocks of 128. Predict the ratio of the two rates first: the
# simulator's requests hold about 105 tokens when seen at a random moment.
#
# **Question.** A block of 16 slots wastes 7.5 on average. A colleague proposes blocks
# of *two* sizes, 16 and 128: large ones for the beginning of a text, small ones for its
# end. What is gained? What comes back that equal sizes had abolished?
#
# <details><summary>Discussion</summary>
#
# *Build.* The order within `give_back` is easy to get wrong without any test of answers
# noticing: a pool that reuses the wrong block first is correct and slow. The state
# machine notices, because it compares the order of the free list.
#
# *Find the bug.* Look for a condition that is right whenever hits are held by somebody
# else, which is what a small test does, and wrong when they lie in the free list. The
# property `all_or_nothing` above finds it.
#
# *Measure.* The pool is full when the requests at once, times what each of them holds,
# reach 4,096 slots; and requests at once are the rate times the steps that one stays.
# So the rates are as one over what a request holds: 105 + 7.5 in blocks of 16, 105 +
# 63.5 in blocks of 128. That predicts a ratio of two thirds, and the simulator agrees
# within a tenth. Beyond that rate the queue grows without end, whatever is preempted.
#
# *Question.* Longer runs of neighbouring slots, fewer table entries, fewer hashes. What
# comes back is fragmentation: a free small block is no use to who needs a large one, so
# either large blocks are cut (and must be merged again, the buddy allocator) or the two
# pools have fixed sizes and one runs out while the other has room. Engines with several
# kinds of layers meet this for real. vLLM's answer is to choose sizes so that all pages
# are equal in *bytes* (`kv_cache_utils.py`); so is ours (`group_layers`, chapter 06).
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# Paths below are relative to `vllm/v1`, names as of 2026. The shape is the same, and
# ours was learned from it.
#
# - `Block` is `KVCacheBlock` in `core/kv_cache_utils.py`, with `ref_cnt`, `block_hash`,
#   `prev_free_block` and `next_free_block`.
# - `FreeList` is `FreeKVCacheBlockQueue` in the same file: a doubly linked list between
#   a fake head and a fake tail. `popleft_n`, `append_n` and `prepend_n` move many at
#   once.
# - `BlockPool` is `BlockPool` in `core/block_pool.py`; block 0 is its `null_block`.
#   `_take`, `_share` and `give_back` are `get_new_blocks`, `touch` and `free_blocks`.
# - `Tables.admit` and `grow` are `KVCacheManager.allocate_slots` in
#   `core/kv_cache_manager.py`.
# - The tables of a `_Row` are `SingleTypeKVCacheManager.req_to_blocks` in
#   `core/single_type_kv_cache_manager.py`.
# - Slots are computed by `BlockTable.compute_slot_mapping` in `worker/block_table.py`,
#   a small Triton kernel; ours is one line of numpy in `make_batch` (`model/batch.py`).
#
# Differences. vLLM's `allocate_slots` also returns `None` without having touched the
# blocks it would take, but counts and acts in separate methods of the coordinator
# (`get_num_blocks_to_allocate`, then `allocate_new_computed_blocks` and
# `allocate_new_blocks`); ours counts and acts in one. Our `reserve` is its
# `scheduler_reserve_full_isl`, on by default in both. Blocks that nobody can find again
# go to the front of the line in vLLM since May 2026 (pull request 42656); before, all
# went to the back. And our `check` audits the whole pool, after every step of the
# tests.
#
# Left out here: `--watermark`, a share of blocks kept free at admission so that
# preemption becomes rarer (0 by default today; vLLM's first versions kept 1 %, which
# happens to be the distance between 96.3 and our 97.3, though we cannot show that this
# is why); slots held ahead for draft tokens (`num_lookahead_tokens`); blocks loaded
# from other machines (`num_external_computed_tokens`); events for outside routers
# (`kv_event_queue`); and swapping blocks to CPU memory, which vLLM's V1 engine does not
# do either when it preempts: it computes again. *Copy on write*, which the paper needs
# for beam search and for samples that share an unfinished block, does not occur here:
# only full blocks are ever shared, and a full block is never written again.
#
# Next: [04 Prefix cache](04_prefix.ipynb), which explains how Bob found Ann's blocks.
