"""The block pool against a model made of plain lists: same blocks, same order."""

import sys

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagedattn.cache.blocks import Block, BlockPool, FreeList
from pagedattn.cache.prefix import ROOT, PrefixIndex, block_hash


class Pools(RuleBasedStateMachine):
    """Holders take, share and give back; the model keeps the free list as a list."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks):
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, self.index.forget)
        self.free = list(range(1, num_blocks))  # next to be reused first
        self.held = []  # each holder: a list of blocks
        self.keys = {}  # block id -> hash
        self.made = 0

    @rule(n=st.integers(0, 5), picks=st.lists(st.integers(0, 9), max_size=3))
    def grow(self, n, picks):
        indexed = sorted(self.keys)
        hits = list(dict.fromkeys(indexed[p % len(indexed)] for p in picks if indexed))
        idle = [i for i in hits if i in self.free]
        before = [block.id for block in self.pool.free]
        new = self.pool.grow([self.pool.blocks[i] for i in hits], n)
        if len(idle) + n > len(self.free):
            assert new is None
            assert [block.id for block in self.pool.free] == before
            return
        self.free = [i for i in self.free if i not in idle]
        want, self.free = self.free[:n], self.free[n:]
        assert [block.id for block in new] == want
        for i in want:
            self.keys.pop(i, None)
        self.held.append([self.pool.blocks[i] for i in hits] + new)

    @rule(pick=st.integers(0, 20))
    def give_back(self, pick):
        if not self.held:
            return
        blocks = self.held.pop(pick % len(self.held))
        still = {b.id for other in self.held for b in other}
        for block in reversed(blocks):
            if block.id in still:
                continue
            if block.id in self.keys:
                self.free.append(block.id)  # waits for a hit, oldest first
            else:
                self.free.insert(0, block.id)  # worthless: reused first
        self.pool.give_back(reversed(blocks))

    @rule(pick=st.integers(0, 20), same=st.booleans())
    def put(self, pick, same):
        """Index a held block, sometimes under a hash that is taken."""
        blocks = [b for holder in self.held for b in holder if b.id not in self.keys]
        if not blocks:
            return
        block = blocks[pick % len(blocks)]
        taken = sorted(set(self.keys.values()))
        hash = taken[pick % len(taken)] if same and taken else b"%d" % self.made
        self.made += 1
        assert self.index.put(hash, 0, block) == (hash not in taken)
        if hash not in taken:
            self.keys[block.id] = hash

    @invariant()
    def agree(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.held)
        self.index.check()
        assert [block.id for block in self.pool.free] == self.free
        assert {b.id for b in self.pool.blocks if b.key} == set(self.keys)
        assert len(self.index) == len(self.keys)
        for i, hash in self.keys.items():
            assert self.index.get(hash, 0) is self.pool.blocks[i]
            assert self.index.get(hash, 1) is None


TestPools = Pools.TestCase


def test_free_list_keeps_order():
    free, blocks = FreeList(), [Block(i) for i in range(5)]
    for block in blocks[:3]:
        free.push_back(block)
    free.push_front(blocks[3])
    free.remove(blocks[1])
    assert [block.id for block in free] == [3, 0, 2]
    assert free.pop() is blocks[3] and len(free) == 2


def test_null_block_is_never_handed_out():
    pool = BlockPool(3, lambda block: None)
    assert pool.usable == 2
    assert [block.id for block in pool.grow([], 2)] == [1, 2]
    assert pool.grow([], 1) is None
    pool.give_back([pool.null])
    assert len(pool.free) == 0


def test_hash_depends_on_everything_and_on_nothing_else():
    base = block_hash(ROOT, [1, 2, 3])
    assert block_hash(ROOT, (1, 2, 3)) == base
    others = [
        block_hash(base, [1, 2, 3]),
        block_hash(ROOT, [1, 2, 4]),
        block_hash(ROOT, [1, 2]),
        block_hash(ROOT, [1, 2, 3], [("salt", "a")]),
        block_hash(ROOT, [1, 2, 3], [("adapter", "a")]),
        block_hash(ROOT, [1, 2, 3], [("salt", "a"), ("salt", "a")]),
        block_hash(ROOT, [1, 2, 3], [("sal", "ta")]),
        block_hash(ROOT, [1, 2, 3], [("salta", "")]),
        block_hash(ROOT, [1, 2, 2**40]),
    ]
    assert len({base, *others}) == len(others) + 1


def test_hash_is_stable_across_processes_and_versions():
    """A stored or shared cache relies on it; change the version in ROOT with it."""
    digest = block_hash(block_hash(ROOT, [1, 2]), [3, 4], [("salt", "s")])
    assert digest.hex().startswith("ee10e2ff84afd78d")


def lines_run(call):
    """How many lines of Python `call()` runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_work_does_not_grow_with_the_pool():
    """Sharing a block out of the middle of the free list, taking and giving back:
    as many steps with 1000 blocks as with 10."""
    counts = []
    for num_blocks in (10, 1000):
        pool = BlockPool(num_blocks, lambda block: None)
        held = pool.grow([], 3)
        middle = pool.blocks[num_blocks // 2]
        acts = [
            lambda pool=pool, middle=middle: pool.grow([middle], 1),
            lambda pool=pool, held=held: pool.give_back(held),
            lambda pool=pool: len(pool.free),
        ]
        counts.append([lines_run(act) for act in acts])
    assert counts[0] == counts[1]
