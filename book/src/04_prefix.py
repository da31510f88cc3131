# %% [markdown]
# # 04 · Prefix cache
#
# [← 03 Blocks](03_blocks.ipynb) · [05 Scheduler →](05_scheduler.ipynb)
#
# Thirty-two people ask about the same document of 1,024 tokens, each with a question of
# 32 tokens. **How many tokens have to be computed: 33,792 or 2,048?**
#
# Keys and values of a token depend on that token and those before it, and on nothing
# else. So two prompts that begin alike have equal keys and values as far as they are
# alike, and what one request has computed another may read. Chapter 03 made that
# possible: two tables may name the same block. What is missing is a way to *find* the
# block. This chapter builds it: an index from what a block holds to the block that
# holds it.
#
# Most traffic has such beginnings. A system prompt stands before every conversation;
# each turn of a conversation repeats all turns before it; an agent sends its
# instructions and its growing history dozens of times.

# %% [markdown]
# ## The naive way: remember whole beginnings
#
# A block's keys and values are those of *its* tokens in the context of *all* tokens
# before it. So the safe key for a block is everything up to its end.

# %%
cache: dict[tuple[int, ...], int] = {}  # all tokens up to a block's end -> the block


def remember(tokens: list[int], table: list[int], size: int) -> None:
    """Note each full block of a table."""
    for i in range(len(tokens) // size):
        cache.setdefault(tuple(tokens[: (i + 1) * size]), table[i])


def find(tokens: list[int], size: int) -> list[int]:
    """The blocks that hold the beginning of `tokens`."""
    ends = range(size, len(tokens) + 1, size)
    keys = [tuple(tokens[:end]) for end in ends]
    return [cache[key] for key in keys if key in cache]


# %%
from pagedattn.viz.story import SYSTEM, ids

remember(ids(f"{SYSTEM} rain on the roof"), table=[1, 2, 3], size=4)
print(find(ids(f"{SYSTEM} snow on a hill ?"), size=4))
print(find(ids("on a hill : You are a poet"), size=4))

# %% [markdown]
# Bob finds Ann's first two blocks. A prompt that ends in the same words finds nothing,
# as it must.

# %% [markdown]
# ## Measure: what is saved, and what the key costs
#
# First the gain. One plan of the real scheduler, with all 32 requests and a budget that
# fits them; `num_tokens` is what the model has to compute.

# %%
from pagedattn.cache.tables import LayerGroup
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Plan, Result, Scheduler

FULL = (LayerGroup(0, (0,)),)


def first_plan(prompts: list[list[int]], caching: bool) -> tuple[Plan, int]:
    """The first plan for all prompts at once, and the blocks it holds."""
    config = EngineConfig(
        num_blocks=2200, max_num_batched_tokens=40_000, prefix_caching=caching
    )
    scheduler = Scheduler(config, FULL)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=32)
        scheduler.add(Request(str(i), prompt, params, len(prompt) + 32))
    return scheduler.plan(), scheduler.tables.slots() // 16


document = list(range(1024))
questions = [document + [2000 + i] * 32 for i in range(32)]
for caching in (False, True):
    plan, blocks = first_plan(questions, caching)
    name = "on: " if caching else "off:"
    print(f"cache {name} {plan.num_tokens:6,} tokens computed, {blocks:5,} blocks held")

# %% [markdown]
# Sixteen times less work, and sixteen times less memory. (On two CPU cores this
# workload, with 32 tokens of answer each, takes 9.2 seconds, see W3 in
# `book/measured/LOG.md`.) Note that all 32 were planned *at once*, into an empty cache:
# a hit need not wait until somebody has finished. More on that below.
#
# Now the price of the naive key. Each block's key repeats everything before it, so
# hashing the keys of a prompt of n tokens reads about n² / 32 of them:

# %%
for n in (1024, 131_072):
    blocks = n // 16
    naive = 16 * blocks * (blocks + 1) // 2
    print(f"{n:7,} tokens: {naive:11,} tokens hashed and kept; chained {n:7,}")

# %% [markdown]
# Half a billion for a long document. The last column is what the rest of this chapter
# needs.

# %% [markdown]
# ## Picture: blocks under their parents
#
# Ann, Bob and Cyd, five steps in. The picture shows the index: every block that can be
# found, joined to the block before it. Over each block stand the first digits of its
# hash, its number, and who holds it.

# %%
from pagedattn.viz.chain import chains
from pagedattn.viz.story import cast, play, stage

scheduler, camera = stage()
play(scheduler, camera, cast(), steps=5)
chains(camera.film().ends()[-1])

# %% [markdown]
# Look at the last block of Bob and the last of Cyd. Both hold `? softly the night`,
# four equal tokens. Their keys and values differ, because what stands before them
# differs; and so do their hashes, `fd82573a` and `a0870fe8`. In the player, a click on
# a block shows its chain.

# %%
from pagedattn.viz.player import player

player(camera.film())

# %% [markdown]
# ## The idea: a chain of hashes
#
# A hash function makes a short number out of a long text, such that equal texts give
# equal numbers and different texts practically never do. Let the **block hash** be that
# of a block's own tokens *and of the hash of the block before it*, its parent. The
# parent's hash covers its own parent, and so on: one number of 32 bytes stands for the
# whole beginning, and each block costs one short hash. An index from hashes to blocks
# is the **prefix cache**.
#
# > **Takeaway.** A block is known by the hash of its tokens and of its parent's hash.
# > Equal hashes mean equal beginnings, so the longest cached beginning is found by
# > walking the chain until it breaks.

# %% [markdown]
# ## A hash that covers everything before it
#
# `pagedattn/cache/prefix.py`, all of it. `block_hash` is the chain's link. What goes in
# is more than tokens: **extra keys** keep apart what equal tokens do not, such as two
# adapters (fine-tuned variants of the model that give other keys and values for the
# same text), two images that the same placeholder tokens stand for, or two customers
# who must not share (a *salt*, below). Each extra key has a tag, and each length is
# written before what it measures. Otherwise the salt `a` and the salt `ab` could run
# into what follows them and give equal inputs for different things.

# %%
from pagedattn.book import show
from pagedattn.cache.prefix import ROOT, PrefixIndex, block_hash

show(block_hash)

# %%
first = block_hash(ROOT, [7, 7, 7, 7])
for name, hash in {
    "first block": first,
    "same tokens after it": block_hash(first, [7, 7, 7, 7]),
    "same tokens, salted": block_hash(ROOT, [7, 7, 7, 7], [("salt", "ann")]),
    "tag and value shifted": block_hash(ROOT, [7, 7, 7, 7], [("sal", "tann")]),
}.items():
    print(f"{name:22} {hash.hex()[:16]}")

# %% [markdown]
# Why SHA-256, when faster hashes exist? Because nothing here compares the tokens again:
# a hit trusts the hash. Two prompts with equal hashes would read each other's keys and
# values, and an attacker who can *make* such a pair can read or steer what others get.
# vLLM used Python's built-in `hash` at first; in Python 3.12 parts of it became
# predictable, which was reported as a vulnerability (CVE-2025-25183), and SHA-256
# became the default later. The cost is small: vLLM's documentation puts it at 100 to
# 200 ns a token.
#
# The `PrefixIndex` is a dictionary from key to block. A key is a hash and a *layer
# group* (layers that share a table; most models have one group, chapter 06). `get`
# looks up, `forget` withdraws, `check` asserts that index and blocks agree. `put` has
# one rule of its own: of two equal blocks the first stays. Two requests may compute the
# same block side by side, each in its own; the second is not indexed, and will be
# reused first when it is free. If the second took the entry over, forgetting either
# block would remove the entry of the other.

# %%
show(PrefixIndex)

# %% [markdown]
# ## What a hit is
#
# `Tables.lookup` turns hashes into a **hit**: leading blocks that are in the cache.
# Three rules bound it.
#
# 1. **Whole blocks.** A block that is not full may still be written to, and what is
#    shared must never change.
# 2. **At most tokens − 1.** Keys and values are cached; what the model says after the
#    last token is not. To sample, the last token has to be computed, so a prompt that
#    is cached to its very end still recomputes its last block. That is the `− 1` in the
#    first line.
# 3. **Every layer group.** A layer that attends to everything needs all blocks. A layer
#    with a sliding window of w tokens needs only those that hold the last w − 1 before
#    the first new token.
#
# `Hits` is the result: how many tokens, and which blocks for each group. `nothing` is
# the hit of a request that may not read the cache, because it wants the
# log-probabilities of its prompt and so has to compute all of it. `hashes` extends the
# request's list of block hashes as its tokens become known, so that a request waiting
# in line for a long time is hashed once.
#
# The third rule is the work of three helpers. `_agreed` goes through the possible
# lengths and keeps, for each group, how many cached blocks in a row end there; a length
# is good if every group has a run that reaches back to the `_first_needed` block.
# `_needed` then hands out the blocks from there on, and the null block before.

# %%
from pagedattn.cache.tables import Hits, Tables

show(Hits, Tables.lookup, Tables.nothing, Tables.hashes)
show(Tables._agreed, Tables._first_needed, Tables._needed)

# %% [markdown]
# The first two rules in numbers: each prompt is sent twice to a fresh engine with
# blocks of 16.


# %%
def serve(scheduler: Scheduler, request: Request) -> int:
    """Run one request to its end; the tokens that were found in the cache."""
    scheduler.add(request)
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, [Result(token=0)] * len(plan.items))
    return request.cached


def ask(name: str, prompt: list[int], answer: int = 1, **more) -> Request:
    """A request for `answer` tokens."""
    params = SamplingParams(temperature=0, max_tokens=answer)
    return Request(name, list(prompt), params, len(prompt) + answer, **more)


for n in (15, 16, 17, 32, 33):
    scheduler = Scheduler(EngineConfig(num_blocks=20), FULL)
    hits = [serve(scheduler, ask(name, range(n))) for name in "ab"]
    print(f"{n} tokens: first {hits[0]}, then {hits[1]} found, {n - hits[1]} computed")

# %% [markdown]
# The full hit deserves a picture. Ann's prompt is exactly three blocks; a second Ann
# sends it again.

# %%
from pagedattn.viz.story import request
from pagedattn.viz.strip import people, strip

scheduler, camera = stage()
play(scheduler, camera, [request("Ann", f"{SYSTEM} rain on the roof", 1)])
play(scheduler, camera, [request("Ann 2", f"{SYSTEM} rain on the roof", 2)], steps=1)
film = camera.film()
strip([film.ends()[-1]], film.block_size, people(film.frames))

# %% [markdown]
# Block 3 holds just what she needs and stays where it is, cached and free. She computes
# the four tokens again, into block 4, because computing into block 3 would mean writing
# to a block that others may be reading. Block 4 then equals block 3, and the index
# keeps block 3. Recomputing one token instead of four would be enough for the answer;
# vLLM does as we do, and says so in a comment (`get_computed_blocks`).
#
# And the third rule: a model whose layers see 3 tokens, in blocks of 2. Twelve tokens
# are cached; a prompt of eleven comes.

# %%
from pagedattn.cache.blocks import BlockPool

index = PrefixIndex()
tables = Tables(BlockPool(20, index.forget), index, (LayerGroup(3, (0,)),), 2, chunk=20)
old, new = ask("old", range(12)), ask("new", range(11))
tables.admit(old, tables.nothing(), 12, 12)
old.computed = 12
tables.index_computed(old)
hit = tables.lookup(new)
print(f"{hit.tokens} tokens found; blocks:", [block.id for block in hit.blocks[0]])

# %% [markdown]
# Token 10 reads tokens 8 and 9 and itself. One block is shared; for the four before it
# the table says 0, the null block, whether or not they are still cached.

# %% [markdown]
# ## Shareable from the plan that writes it
#
# When may a block enter the index? Not before its keys and values exist. But what does
# "exist" mean while the model is running? Within one forward pass, each layer writes
# the keys and values of *all* tokens of the plan and then lets *all* of them attend. A
# request later in the same plan can read, in every layer, what an earlier one has
# written in that layer. So a block may be shared from the plan that fills it, never
# earlier. This is how 31 of the 32 questions above hit a document that nobody had
# computed yet.

# %%
plan, _ = first_plan(questions, caching=True)
for item in plan.items[:3]:
    computes = f"computes {len(item.tokens)}"
    print(f"request {item.request_id}: starts at {item.start}, {computes}")

# %% [markdown]
# `index_computed` is called when a plan is made and when a token becomes known: it
# indexes full blocks of tokens that are both computed and *known*. A token that is
# still being sampled has no id yet, so a block with such a token waits.
#
# What if the step fails, because the GPU ran out of memory or a kernel raised? Then
# blocks are in the index that were never written. Each plan remembers what it has
# indexed, and `withdraw` takes it out again; whoever hit those blocks starts over
# (chapter 05, `retract`).

# %%
show(Tables.index_computed, Tables.withdraw)

# %% [markdown]
# ## Who is forgotten first: vLLM's example, executed
#
# A cached block that nobody holds stands in the free list and keeps its keys and values
# until it is reused. Three choices of chapter 03 decide which one goes first: blocks
# that nobody can find go to the front; of the others, the one unused for longest is
# first (LRU); and within a request the tail is given back before the head.
#
# vLLM's documentation tells an example in seven moments, six of them with a picture
# (design document "Automatic Prefix Caching", section "Example"): blocks of 4, ten
# blocks. Request 0 has 15 prompt tokens. Request 1 has 14, the first 10 like request
# 0's. Request 2 has 29, the first 12 like request 0's. Here it is, run on our
# scheduler; tokens are letters, Z is whatever was sampled.

# %%
from string import ascii_letters

from pagedattn.viz.film import Camera, Film, Frame


def letters(name: str, text: str, answer: int) -> Request:
    """A request whose tokens are letters."""
    return ask(name, [ascii_letters.index(letter) for letter in text], answer)


def seven_times() -> Film:
    """Requests 0, 1 and 2 arrive at times 1, 4 and 7."""
    camera = Camera(lambda token: ascii_letters[token])
    config = EngineConfig(block_size=4, num_blocks=11)
    scheduler = Scheduler(config, FULL, camera.emit)
    camera.watch(scheduler)
    arriving = {1: letters("r0", "ABCDEFGHIJKLMNO", 4)}
    arriving[4] = letters("r1", "ABCDEFGHIJ" + "wxyz", 2)
    arriving[7] = letters("r2", "ABCDEFGHIJKL" + "abcdefghijklmnopq", 1)
    for time in range(1, 8):
        camera.tick()
        if time in arriving:
            scheduler.add(arriving[time])
        plan = scheduler.plan()
        if plan is not None and time < 7:
            scheduler.commit(plan, [Result(token=51)] * len(plan.items))
    return camera.film()


# %%
def moments(film: Film) -> list[Frame]:
    """The pictures of times 1, 3, 4, 5, 6 and 7 in vLLM's document."""
    computed = {frame.step: frame for frame in film.frames if frame.kind == "compute"}
    ended = [frame for frame in film.frames if frame.kind == "finish"]
    return [computed[1], computed[3], computed[4], *ended, computed[7]]


ours = seven_times()
strip(moments(ours), ours.block_size, people(ours.frames))

# %% [markdown]
# Moment by moment, with our numbers (vLLM's document counts from 0, we from 1, since
# our block 0 is the null block):
#
# - **Time 1.** Request 0 takes four blocks; three are full and indexed.
# - **Time 3.** Its 16th token has filled block 4, the 17th needs block 5.
# - **Time 4.** Request 1 hits blocks 1 and 2. Block 3 does not match: `IJwx` is not
#   `IJKL`, and two equal letters of four are no hit.
# - **Time 5.** Request 0 has ended. Blocks 1 and 2 are still held by request 1.
# - **Time 6.** Request 1 has ended. All ten blocks are free, five of them cached.
# - **Time 7.** Request 2 hits blocks 1, 2 and 3. They leave the free list from its
#   middle before anything is taken from its front.
#
# One thing differs from the document: the order of the free list at time 6, and so what
# request 2 takes. The document's order is 7 8 9 4 3 2 6 5 1 0, which is 8 9 10 5 4 3 7
# 6 2 1 in our numbers. There, unfinished blocks (5 and 7) queue up like all others, and
# request 2 has to **evict** block 4: it is taken, and the prefix it cached is
# forgotten. Here they go to the front and are reused
# first. One line makes that difference, so we can run the other policy as well:

# %%
from pagedattn.book import broken

LINE = "(self.free.push_back if indexed else self.free.push_front)(block)"
with broken(BlockPool.give_back, LINE, "self.free.push_back(block)"):
    theirs = seven_times()
for name, film in {"here": ours, "vLLM's document": theirs}.items():
    order = " ".join(str(id) for id in moments(film)[4].free)
    evicted = [frame.acted[0] for frame in film.frames if frame.kind == "evict"]
    print(f"{name:16} free at time 6: {order:21} evicted at time 7: {evicted}")

# %% [markdown]
# The second line is the document's, number for number. vLLM itself has since moved to
# the first (pull request 42656 of May 2026, "Apply LRU policy only to proper cache
# entries"), for the reason visible here: `MNOZ` survives.
#
# How much do these choices matter? Twelve documents of 48 tokens, some asked about more
# often than others, 400 questions one after another, and a pool of 32 blocks that holds
# fewer than three of the documents:


# %%
import random


def share_found(num_blocks: int = 32) -> float:
    """The share of prompt tokens that 400 questions find in the cache."""
    draw = random.Random(0)
    popular = [1 / (i + 1) for i in range(12)]
    scheduler = Scheduler(EngineConfig(block_size=4, num_blocks=num_blocks + 1), FULL)
    asked = found = 0
    for i in range(400):
        document = draw.choices(range(12), popular)[0]
        prompt = [document] * 48 + [100 + i] * draw.randint(4, 16)
        found += serve(scheduler, ask(str(i), prompt, draw.randint(2, 14)))
        asked += len(prompt)
    return found / asked


print(f"as it is:                            {share_found():.1%}")
with broken(BlockPool.give_back, LINE, "self.free.push_back(block)"):
    print(f"unfinished blocks wait like others:  {share_found():.1%}")
with broken(Tables.release, "reversed(table)", "table"):
    print(f"head given back before the tail:     {share_found():.1%}")
with broken(BlockPool.give_back, "push_back if indexed", "push_front if indexed"):
    print(f"the block freed last is reused first: {share_found():.1%}")

# %% [markdown]
# Each of the last two is a mistake that real engines made. No answer is wrong with
# them; the cache is slower than it should be, and no test of answers would notice.

# %% [markdown]
# ## Salts: what a fast answer gives away
#
# A hit makes the first token come sooner. Whoever can measure that learns whether
# *somebody* has sent that beginning before. Say that Ann has sent a private prompt. Eve
# cannot see it, but she can guess, and watch how much of her guess was computed:

# %%
SECRET = f"{SYSTEM} rain on the roof"
GUESSES = ("snow on the roof", "stars on the hill", "rain on the roof")


def found(guess: str, salted: bool) -> int:
    """Ann sends the secret, then Eve her guess; the tokens that Eve finds cached."""
    scheduler, camera = stage()
    sent = {"Ann": f"{SECRET} softly", "Eve": f"{SYSTEM} {guess} ?"}
    for name, text in sent.items():
        keys = (("salt", name),) if salted else ()
        one = request(name, text, 2, first_block_keys=keys)
        play(scheduler, camera, [one])
    return one.cached


for guess in GUESSES:
    print(f"{guess:18} {found(guess, False):2} found; with salts {found(guess, True)}")

# %% [markdown]
# Twelve found tokens instead of eight, and Eve knows Ann's line. She needs one guess
# for each candidate of the *next block* only, so long secrets fall block by block. This
# is no theory: Gu and others measured response times of commercial services and found
# caches shared between all users at seven of them (*Auditing Prompt Caching in Language
# Model APIs*, 2025, arXiv 2502.07776).
#
# The cure is a **salt**, the `cache_salt` of a request: a string that goes into the
# hash of its **first** block. Since every later hash contains the first, nothing is
# shared between different salts, and everything within one. A salt for each customer
# closes the channel between customers; a salt for each request turns the cache off. In
# the picture of the index above, Bob's branch would begin at ROOT.

# %% [markdown]
# ## A radix tree beside it
#
# SGLang, the other well-known engine, keeps its cache as a *radix tree*: a tree whose
# edges carry runs of tokens, so that texts share a path as far as they agree and branch
# at the very token where they differ. A working one is short:


# %%
from os.path import commonprefix

Tree = dict  # an edge's first token -> (the edge's tokens, the tree below)


def match(tree: Tree, tokens: list[int]) -> int:
    """How many leading tokens are cached."""
    edge, below = tree.get(tokens[0], ([], tree)) if tokens else ([], tree)
    n = len(commonprefix([edge, tokens]))
    return n + match(below, tokens[n:]) if edge and n == len(edge) else n


def insert(tree: Tree, tokens: list[int]) -> None:
    """Cache `tokens`, splitting the edge on which they leave the tree."""
    if tokens:
        edge, below = tree.get(tokens[0], (tokens, Tree()))
        n = len(commonprefix([edge, tokens]))
        if n < len(edge):
            edge, below = edge[:n], Tree({edge[n]: (edge[n:], below)})
        tree[tokens[0]] = edge, below
        insert(below, tokens[n:])


tree = Tree()
insert(tree, [ascii_letters.index(c) for c in "ABCDEFGHIJKLMNO"])
print(match(tree, [ascii_letters.index(c) for c in "ABCDEFGHIJwxyz"]), "tokens found")

# %% [markdown]
# That is request 1 of vLLM's example: ten tokens, where blocks of 4 found eight. The
# difference is less than a block for each request. Now 300 prompts, each of them one of
# five system prompts of 100 to 400 tokens, one of four sets of examples, and a question
# of its own; nothing is ever evicted:


# %%
def in_blocks(prompts: list[list[int]], size: int) -> int:
    """Tokens that a hash chain over blocks of `size` finds."""
    known: set[bytes] = set()
    found = 0
    for prompt in prompts:
        parent, chain = ROOT, []
        for i in range(0, len(prompt) - size + 1, size):
            parent = block_hash(parent, prompt[i : i + size])
            chain.append(parent)
        most = chain[: (len(prompt) - 1) // size]
        found += size * next(
            (i for i, h in enumerate(most) if h not in known), len(most)
        )
        known.update(chain)
    return found


def in_tree(prompts: list[list[int]]) -> int:
    """Tokens that a radix tree finds, of each prompt all but the last at most."""
    tree, found = Tree(), 0
    for prompt in prompts:
        found += min(match(tree, prompt), len(prompt) - 1)
        insert(tree, prompt)
    return found


# %%
draw = random.Random(4)
systems = [draw.choices(range(999), k=draw.randint(100, 400)) for _ in range(5)]
examples = [draw.choices(range(999), k=draw.randint(40, 160)) for _ in range(4)]
prompts = [
    draw.choice(systems) + draw.choice(examples) + draw.choices(range(999), k=50)
    for _ in range(300)
]
total = sum(map(len, prompts))
print(f"radix tree:     {in_tree(prompts) / total:.1%} of {total:,} tokens found")
for size in (4, 16, 64, 256):
    print(f"blocks of {size:3}:  {in_blocks(prompts, size) / total:.1%}")

# %% [markdown]
# Blocks of 16 lose two points to the tree, half a block for each request; blocks of 256
# lose more than a quarter of all hits. That is one reason why 16 is a popular size. The
# tree has its own price. Reuse by the token needs blocks of one token, or copying part
# of a block; a lookup walks the tree instead of asking a dictionary; edges are split
# and joined; and only leaves may be evicted, so each eviction looks for the oldest
# leaf. The tree also knows something that the dictionary does not: what *all* waiting
# requests have in common. A scheduler can sort its line by the longest match, and let
# one request compute a shared beginning before it admits the others.
#
# Both are the same idea. The picture of the index above is a radix tree whose edges all
# have the length of one block.

# %% [markdown]
# ## Property: a hit changes nothing
#
# However much is reused, every request must say what it would have said alone. The
# book's `HashModel` makes that testable to the bit: a model whose next token is a hash
# of everything its attention reads through the tables, in order. One wrong block, and
# it says something else. The property sends prompts over three words, one after
# another, through a small engine, and compares with a loop that has no cache
# (`naive_generate`).

# %%
from hypothesis import strategies as st

from pagedattn.book import falsify, holds
from pagedattn.testing import hash_engine, naive_generate


def same_as_alone(prompts: list[list[int]]) -> None:
    """Each prompt's answer is what it is without a cache."""
    engine = hash_engine(block_size=2, num_blocks=9, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0, max_tokens=2)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                said = list(output.outputs[0].token_ids)
        alone = engine.intake.accept("alone", prompt, params).requests[0]
        assert said == naive_generate(alone)[0]


words = st.lists(st.integers(0, 2), min_size=1, max_size=8)
several = st.lists(words, min_size=1, max_size=4)
holds(same_as_alone, several)

# %% [markdown]
# Now leave the parent out of the hash.

# %%
with broken(block_hash, "sha256(parent)", "sha256(ROOT)"):
    falsify(same_as_alone, several)

# %% [markdown]
# Two prompts of two words. Without the parent, `1 1` at positions 2 and 3 of the first
# prompt has the same hash as `1 1` at the beginning of the second. So the second one
# hits that block, and reads keys made for other positions, in the light of two words it
# does not contain.
#
# And the `− 1` in `lookup`. This one is seen before any model runs: a plan with an item
# that computes nothing.


# %%
def something_is_left(prompts: list[list[int]]) -> None:
    """Whatever is cached, every item of every plan computes a token."""
    scheduler = Scheduler(EngineConfig(block_size=2, num_blocks=9), FULL)
    for i, prompt in enumerate(prompts):
        scheduler.add(ask(str(i), prompt, answer=2))
        while (plan := scheduler.plan()) is not None:
            assert all(item.tokens for item in plan.items)
            scheduler.commit(plan, [Result(token=0)] * len(plan.items))


holds(something_is_left, several)
with broken(Tables.lookup, "(len(request.tokens) - 1)", "len(request.tokens)"):
    falsify(something_is_left, several)

# %% [markdown]
# The first prompt, one token long, and its first answer fill a block; the second prompt
# is exactly that block. Two engines had this in their first versions, and it is easy to
# see why: it needs a prompt that is cached to its end *and* a length that is a multiple
# of the block size. With blocks of 16, fifteen of sixteen lengths never show it.

# %% [markdown]
# ## Under load
#
# The simulator of chapter 03, with a system prompt of 256 tokens before every request,
# first without the cache and then with it. The arrivals are the same.

# %%
from pagedattn.viz.simulator import cache_simulator, picture, simulate

picture(simulate(rate=0.4, shared_prefix=256, prefix_caching=False))

# %%
picture(simulate(rate=0.4, shared_prefix=256))

# %% [markdown]
# Without the cache the pool is full of copies of the same 256 tokens, and the line
# grows. With it they are held once, 80 % of all prompt tokens are found, and nobody
# waits. In JupyterLab, move "shared prefix" and watch the running line stay where it
# is: a longer beginning costs almost nothing.

# %%
cache_simulator()

# %% [markdown]
# ## Exercises
#
# **Build.** `exercises/ex04_prefix.py` is `pagedattn/cache/prefix.py` with four bodies
# missing: `block_hash`, and `put`, `get` and `forget` of `PrefixIndex`. `make exercise
# N=4` runs the engine's tests on your file, `make hint N=4` helps, and
# `PAGEDATTN_STUDENT=3,4 make serve` serves on your pool and your index together.
#
# **Find the bug.** `exercises/bug04_prefix.py` is `pagedattn/cache/tables.py` with a
# mistake. Its users saw this: two contracts with the same first page and, further on,
# the same standard clause, but different pages in between. Asked about one, the model
# now and then quotes the other. It happens only when both were asked about before.
# `make exercise N=bug4`.
#
# **Measure.** With `share_found(num_blocks)`, draw the share of tokens found against
# the size of the pool, from 16 to 240 blocks, for LRU and for the broken version that
# reuses the newest block first. The twelve documents fill 144 blocks. Predict where the
# LRU curve becomes flat, and explain why it does not.
#
# **Question.** Answers are cached as well as prompts: in a conversation, the next turn
# hits them. But a "thinking" model's thoughts are usually cut out of the history before
# the next turn is sent. What does that do to the hits of the next turn? What could a
# server do about it, and what would that cost?
#
# <details><summary>Discussion</summary>
#
# *Build.* Writing the hash is easy; writing it so that no two inputs run together is
# the exercise. The test `test_hash_depends_on_everything_and_on_nothing_else` lists
# eight neighbours that must differ. A second test holds the first bytes of one hash
# fixed: a cache that is stored or shared between machines relies on them.
#
# *Find the bug.* A hash chain is a list in which each link names the one before. Which
# link do you name if you are careless about which end of a list you take? A block's
# hash must depend on *all* blocks before it, not on some of them.
#
# *Measure.* One would expect it to end at about 150 blocks: twelve documents and one
# question. It is still rising at 240, because every question leaves its own full blocks
# in the cache. Nobody will ask for them again, and LRU cannot know: they are young, so
# they push out documents that are old and good. Databases call this *scan pollution*; a
# proposal to vLLM counts how often a block was hit (issue 40268). The newest-first
# curve is flat from the start, at the share of questions that follow a question about
# the same document.
#
# *Question.* The chain breaks where the thoughts were: everything before them is found,
# everything after them is computed again, including the visible answer, which stood
# behind the thoughts. A server could keep the thoughts in the context, which costs
# memory and attention for tokens the template wants gone; or compute the history
# without the thoughts once, right after the answer, while the machine is idle. Rotated
# positions make it impossible to move the cached keys instead: each key contains its
# position.
#
# </details>

# %% [markdown]
# ## How vLLM does it
#
# Paths are relative to `vllm/v1`, names as of 2026.
#
# - `block_hash` is `hash_block_tokens` in `core/kv_cache_utils.py`; the function is
#   chosen by `--prefix-caching-hash-algo` (`sha256` over pickled bytes by default,
#   `sha256_cbor`, `xxhash`, `xxhash_cbor`). Our `ROOT` is its `NONE_HASH`.
# - Extra keys come from `generate_block_hash_extra_keys`: adapter name, image hashes
#   with their offset in the block, the `cache_salt` in the first block only.
# - `PrefixIndex` is `BlockHashToBlockMap` in `core/block_pool.py`. It keeps *all*
#   blocks of equal hash, one or a dictionary of them; ours keeps the first. Neither
#   swaps a duplicate out of a table: tables only ever grow at their end.
# - `lookup` is `KVCacheManager.get_computed_blocks` with `find_longest_cache_hit` in
#   `core/single_type_kv_cache_manager.py` (one method for each kind of attention) and,
#   for several groups, the coordinators in `core/kv_cache_coordinator.py`. The cap is
#   `request.num_tokens - 1`, as here.
# - `index_computed` is `BlockPool.cache_full_blocks`, called from `allocate_slots`, so
#   also from the plan that writes the blocks.
# - Hashes are computed when a request arrives and when tokens are appended
#   (`Request.block_hashes`); ours when they are first looked up.
# - `POST /reset_prefix_cache` empties the cache; here it is
#   `Scheduler.reset_prefix_cache`.
#
# What we left out: hits inside a block by copying it (`prefix_match_unit`), blocks kept
# in CPU memory or fetched from other machines (KV connectors), events that tell a
# router which blocks an instance holds, and pinning of chosen prefixes.
#
# SGLang's tree is `RadixCache` in `python/sglang/srt/mem_cache/radix_cache.py`:
# `match_prefix` (which may split an edge), `insert`, `evict` (leaves only, by a choice
# of policies), and `inc_lock_ref` to protect a path in use. Its `cache_finished_req`
# frees duplicates and points the request's table at the tree's copy. Salts and adapters
# are an `extra_key` that separates whole trees.
#
# Next: [05 Scheduler](05_scheduler.ipynb) decides who gets to compute what, in which
# step.
