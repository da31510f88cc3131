"""Tables against shadow KV: a dict from slot to the token prefix whose keys lie there.

A fake forward writes each computed position's prefix into its slot and then reads
every position that attention would, through the table. Whatever is wrong with sharing,
growth, trimming or eviction makes it read another prefix."""

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedattn.cache.blocks import BlockPool
from pagedattn.cache.prefix import ROOT, PrefixIndex, block_hash
from pagedattn.cache.tables import Tables, blocks_for, group_layers
from pagedattn.request import Request, SamplingParams

CHUNK = 6


class ShadowKV(RuleBasedStateMachine):
    """Requests over few tokens grow in chunks, extend, and leave."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(3, 24),
        windows=st.sampled_from([(0,), (0, 3), (4,), (0, 2, 5), (1, 0), (3, 3, 0, 0)]),
    )
    def start(self, block_size, num_blocks, windows):
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index.forget)
        self.groups = group_layers(windows)
        self.tables = Tables(self.pool, self.index, self.groups, block_size, CHUNK)
        self.size = block_size
        self.slots = {}
        self.live = []
        self.made = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from("xxxy"),
    )
    def admit(self, tokens, salt):
        tokens = tokens[: self.tables.capacity()]
        if not tokens:
            return
        request = Request(
            f"r{self.made}",
            list(tokens),
            SamplingParams(),
            limit=99,
            first_block_keys=(("salt", salt),),
        )
        self.made += 1
        hits = self.tables.lookup(request)
        assert hits.tokens % self.size == 0 and hits.tokens < len(tokens)
        n = min(CHUNK, len(tokens) - hits.tokens)
        before = self._state()
        if not self.tables.admit(request, hits, hits.tokens + n, len(tokens)):
            assert self._state() == before
            return
        self.live.append(request)
        request.computed = hits.tokens
        self._compute(request, n)

    @rule(pick=st.integers(0, 20), token=st.integers(0, 1))
    def go_on(self, pick, token):
        if not self.live:
            return
        request = self.live[pick % len(self.live)]
        if request.computed == len(request.tokens):
            if len(request.tokens) >= self.tables.capacity():
                return
            request.tokens.append(token)
        self.tables.trim(request)
        n = min(CHUNK, len(request.tokens) - request.computed)
        before = self._state()
        if self.tables.grow(request, request.computed + n):
            self._compute(request, n)
        else:
            assert self._state() == before
            assert len(self.live) > 1, "a request alone must never run out"

    @rule(pick=st.integers(0, 20))
    def release(self, pick):
        if self.live:
            self.tables.release(self.live.pop(pick % len(self.live)))

    def _compute(self, request, n):
        """Write every group's keys for the chunk, then read what attention reads."""
        first, request.computed = request.computed, request.computed + n
        tables = self.tables.ids(request)
        salt = request.first_block_keys
        for g, table in enumerate(tables):
            assert len(table) == blocks_for(request.computed, self.size)
            for p in range(first, request.computed):
                assert table[p // self.size] != 0
                prefix = (g, salt, tuple(request.tokens[: p + 1]))
                self.slots[table[p // self.size] * self.size + p % self.size] = prefix
        for g, (table, group) in enumerate(zip(tables, self.groups, strict=True)):
            for p in range(first, request.computed):
                start = max(0, p - group.window + 1) if group.window else 0
                for q in range(start, p + 1):
                    slot = table[q // self.size] * self.size + q % self.size
                    want = (g, salt, tuple(request.tokens[: q + 1]))
                    assert self.slots[slot] == want
        self.tables.index_computed(request)

    def _state(self):
        """Everything that an act that failed must leave alone, LRU order included."""
        return (
            [block.id for block in self.pool.free],
            [(block.refs, block.key) for block in self.pool.blocks],
            [self.tables.ids(request) for request in self.live],
        )

    @invariant()
    def whole(self):
        if hasattr(self, "tables"):
            self.tables.check(self.live)

    def teardown(self):
        for request in getattr(self, "live", []):
            self.tables.release(request)
        if hasattr(self, "pool"):
            assert len(self.pool.free) == self.pool.usable


TestShadowKV = ShadowKV.TestCase


def make(windows=(0,), num_blocks=30, block_size=4, chunk=8):
    index = PrefixIndex()
    pool = BlockPool(num_blocks, index.forget)
    return Tables(pool, index, group_layers(windows), block_size, chunk)


def run(tables, tokens, name="a", **more):
    """Admit and compute a request whole; its hit in tokens."""
    request = Request(name, list(tokens), SamplingParams(), limit=999, **more)
    hits = tables.lookup(request)
    assert tables.admit(request, hits, len(tokens), len(tokens))
    request.computed = len(tokens)
    tables.index_computed(request)
    return request, hits.tokens


def test_hit_is_whole_blocks_and_never_the_last_token():
    """C42: a prompt cached to its end recomputes its last block."""
    for n, hit in [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)]:
        tables = make()
        first, none = run(tables, range(n))
        tables.release(first)
        _, found = run(tables, range(n), "b")
        assert (none, found) == (0, hit), n


def test_salt_keeps_prefixes_apart():
    """C50: hits only within one salt, and the salt reaches every later block."""
    tables = make()
    found = []
    for name, salt in zip("abcd", ["a", "a", "b", None], strict=True):
        keys = (("salt", salt),) if salt else ()
        found.append(run(tables, range(13), name, first_block_keys=keys)[1])
    assert found == [0, 12, 0, 0]


def test_blocks_needed_at_exact_multiples():
    for tokens, blocks in [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]:
        tables = make()
        request, _ = run(tables, range(tokens))
        assert len(tables.ids(request)[0]) == blocks
        assert tables.slots() == blocks * 4


def test_head_of_a_chain_outlives_its_tail():
    tables = make(num_blocks=4)  # 3 usable
    request, _ = run(tables, range(12))
    tables.release(request)
    other, _ = run(tables, [7, 7], "other")  # takes the tail's block
    _, hit = run(tables, range(8), "again")
    assert hit == 4
    assert (
        tables.lookup(Request("x", list(range(12)), SamplingParams(), 99)).tokens == 8
    )


def test_window_group_needs_only_its_window():
    tables = make((3,), block_size=2, chunk=20)
    request, _ = run(tables, range(12))
    tables.trim(request)
    request.tokens.append(99)
    assert tables.grow(request, 13)
    held = [i != 0 for i in tables.ids(request)[0]]
    assert held == [False] * 5 + [True] * 2  # position 12 reads 10, 11, 12
    hits = tables.lookup(Request("b", list(range(11)), SamplingParams(), 99))
    # Position 10 reads 8 and 9: one block, the four before it are not needed.
    assert hits.tokens == 10
    assert [block.id != 0 for block in hits.blocks[0]] == [False] * 4 + [True]


def test_groups_of_equal_size():
    gemma = [0 if i % 6 == 5 else 512 for i in range(18)]
    groups = group_layers(gemma)
    assert [len(group.layers) for group in groups] == [3] * 6
    assert sorted(i for group in groups for i in group.layers) == list(range(18))
    assert [len(g.layers) for g in group_layers([0] * 9 + [8] * 10)] == [9, 10]
    assert group_layers([0, 0])[0].layers == (0, 1)


def test_capacity_is_reached_and_not_exceeded():
    for windows in [(0,), (0, 5), (5,), (0, 3, 3)]:
        tables = make(windows, num_blocks=13, block_size=3, chunk=4)
        capacity = tables.capacity()
        assert tables.most_blocks(capacity) <= tables.pool.usable
        if windows != (5,):
            assert tables.most_blocks(capacity + 3) > tables.pool.usable


def test_groups_at_the_edge_of_a_quarter():
    """Less than a quarter more layers of one kind: one group each; else cut."""
    for few, many, want in [(4, 5, [4, 4, 1]), (8, 9, [8, 9]), (5, 6, [5, 6])]:
        groups = group_layers([0] * few + [8] * many)
        assert [len(group.layers) for group in groups] == want
    assert [g.window for g in group_layers([8, 0, 3])] == [0, 3, 8]


def test_capacity_by_hand():
    """12 usable blocks of 3 slots; windows of 5 and 3 touch 4 and 3 of them."""
    want = {(0,): 36, (0, 0): 36, (0, 3, 0, 3): 27, (0, 5): 24, (5,): 36}
    for windows, capacity in want.items():
        tables = make(windows, num_blocks=13, block_size=3, chunk=4)
        assert tables.capacity() == capacity, windows
    assert make((0, 3, 5), num_blocks=3).capacity() == 0
    assert make((0, 3), num_blocks=3).capacity() == 4


def test_capacity_is_the_most_that_fits():
    """Against counting up, for many small pools."""
    for windows in [(0,), (0, 2), (0, 3, 5), (4, 9)]:
        for num_blocks in range(2, 14):
            tables = make(windows, num_blocks, block_size=2, chunk=3)
            usable = tables.pool.usable
            fits = [n for n in range(60) if tables.most_blocks(n) <= usable]
            assert tables.capacity() == min(fits[-1], usable * 2)


def test_most_blocks_of_a_window_are_enough_and_no_more():
    """A step touches window − 1 earlier tokens and a chunk, from any slot on."""
    size, chunk = 3, 4
    for window in range(1, 12):
        tables = make((window,), 40, size, chunk)
        n = window - 1 + chunk
        touched = max(blocks_for(at + n, size) for at in range(size))
        assert tables.most_blocks(90) == touched, window
        few = [tables.most_blocks(tokens) for tokens in (0, 1, 3, 4, 6)]
        assert few == [0, 1, 1, 2, 2]


def test_extra_keys_reach_every_block():
    """The adapter's KV differs at every position: no block is shared with another's,
    not even behind an equal parent."""
    tables, found = make(), []
    for name, load in zip("abcd", ["1", "1", "2", None], strict=True):
        keys = (("adapter", load),) if load else ()
        request, hit = run(tables, range(13), name, extra_keys=keys)
        found.append(hit)
    assert found == [0, 12, 0, 0]
    base, keys = [Request("x", list(range(13)), SamplingParams(), 99) for _ in "ab"]
    keys.extra_keys = (("adapter", "1"),)
    first = tables.hashes(base, 1)
    keys.hashes = list(first)
    assert tables.hashes(base, 2)[1] != tables.hashes(keys, 2)[1]


def test_a_hash_covers_every_token_before_and_in_its_block():
    """One hash for each prefix, whichever of its tokens differs."""
    tables = make()
    prompts = [[0] * 12] + [[i == at for i in range(12)] for at in range(12)]
    seen = {}
    for prompt in prompts:
        request = Request("x", [int(t) for t in prompt], SamplingParams(), 99)
        for n, hash in enumerate(tables.hashes(request, 3), 1):
            prefix = tuple(request.tokens[: n * 4])
            assert seen.setdefault(hash, prefix) == prefix
    assert len(seen) == len(set(seen.values())) == 3 + 4 * 3 + 4 * 2 + 4


def test_growing_to_what_is_there_changes_nothing():
    tables = make((0, 3))
    request, _ = run(tables, range(9))
    before = tables.ids(request)
    for upto in (0, 4, 9, 12):
        assert tables.grow(request, upto) and tables.ids(request) == before
    assert tables.grow(request, 13) and tables.ids(request) != before


def test_a_hit_needs_exactly_the_blocks_that_the_next_token_reads():
    """For each block: withdrawn from the index, it shortens the hit if the window
    reaches it, and is not missed if not."""
    for size in (1, 2, 3, 4):
        for window in (0, *range(2, 5 * size + 2)):  # 0: all of it
            tables = make((window,), 40, size, chunk=99)
            request, _ = run(tables, range(4 * size + 1))
            again = Request("b", list(range(4 * size + 1)), SamplingParams(), 99)
            hits, position = tables.lookup(again), 4 * size
            assert hits.tokens == position
            first = position - window + 1 if window else 0
            read = {q // size for q in range(max(0, first), position)}
            held = {
                i for i, b in enumerate(hits.blocks[0]) if b is not tables.pool.null
            }
            assert held == read, (size, window)
            for i, id in enumerate(tables.ids(request)[0][:4]):
                block = tables.pool.blocks[id]
                key = block.key
                tables.withdraw([block])
                assert (tables.lookup(again).tokens < position) == (i in held)
                tables.index.put(*key, block)


def test_trim_keeps_exactly_what_the_next_token_needs():
    """Its window's blocks and the one it is written to; also after a hit."""
    for size, window in itertools.product((1, 2, 3), (1, 2, 3, 4, 5, 6, 7, 19)):
        tables = make((window,), 90, size, chunk=4)
        for name, n in [("a", 20), ("b", 60)]:  # b begins with a's blocks
            request = Request(name, list(range(n)), SamplingParams(), 99)
            hits = tables.lookup(request) if name == "b" else tables.nothing()
            at = request.computed = min(hits.tokens + 4, n)
            assert tables.admit(request, hits, at, n)
            while at < n:
                tables.index_computed(request)
                tables.trim(request)
                (ids,) = tables.ids(request)
                first = max(0, at - window + 1) // size
                assert len(ids) == blocks_for(at, size)
                assert [i > 0 for i in ids] == [i >= first for i in range(len(ids))]
                at = request.computed = min(at + 3, n)
                assert tables.grow(request, at)
                tables.check([request])
            assert (hits.tokens > 0) == (name == "b")
            tables.release(request)
            assert len(tables.pool.free) == tables.pool.usable


def test_what_trim_releases_goes_tail_first():
    tables = make((2,), num_blocks=9, block_size=2, chunk=20)
    request, _ = run(tables, range(12))
    (ids,) = tables.ids(request)
    tables.trim(request)
    assert [block.id for block in tables.pool.free][-5:] == list(reversed(ids[:5]))


def test_hashes_are_those_of_blocks_behind_their_parents():
    tables, tokens = make(), list(range(13))
    request = Request("a", tokens, SamplingParams(), 99)
    request.first_block_keys = (("k", "v"),)
    first = block_hash(ROOT, tokens[:4], [("k", "v")])
    second = block_hash(first, tokens[4:8])
    third = block_hash(second, tokens[8:12])
    assert tables.hashes(request, 1) == [first]
    assert tables.hashes(request, 3) == [first, second, third]
    assert tables.hashes(request, 2) == [first, second]


def test_only_known_tokens_are_indexed():
    """Computed, but not known yet: a token in flight completes no block."""
    tables = make()
    request, _ = run(tables, range(3))
    assert tables.grow(request, 4)
    request.computed, request.pending = 4, 1
    assert tables.index_computed(request) == [] and len(tables.index) == 0
    request.tokens.append(3)
    request.pending = 0
    assert len(tables.index_computed(request)) == len(tables.index) == 1
    assert tables.index_computed(request) == []


def test_admission_that_fails_changes_nothing():
    """Whether what is reserved doesn't fit, or what is asked for now."""
    for upto, reserve in [(9, 99), (99, 9)]:
        tables = make(num_blocks=6)
        first, _ = run(tables, range(9))
        tables.release(first)
        request = Request("b", list(range(9)), SamplingParams(), 999)
        before = [block.id for block in tables.pool.free]
        assert not tables.admit(request, tables.lookup(request), upto, reserve)
        assert [block.id for block in tables.pool.free] == before
        tables.check([])
