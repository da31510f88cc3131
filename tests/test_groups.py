"""Several layer groups over one pool: whatever the windows, the tokens are those of a
model without any cache, and no group ever costs another its hits."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from pagedattn.cache.blocks import BlockPool
from pagedattn.cache.prefix import PrefixIndex
from pagedattn.cache.tables import Tables, group_layers
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Scheduler
from pagedattn.testing import HashModel, hash_runner, naive_generate

WINDOWS = st.tuples(st.integers(0, 9), st.integers(0, 9))
PROMPTS = st.lists(st.integers(1, 16), min_size=1, max_size=4)
OUTPUT = 5  # tokens that each request asks for


@given(WINDOWS, PROMPTS, st.integers(4, 12), st.booleans())
def test_windows_change_nothing_that_is_said(windows, prompts, budget, together):
    """Prompts that begin alike, one after the other or all at once, ten blocks."""
    groups = group_layers(windows)
    config = EngineConfig(block_size=4, num_blocks=11, max_num_batched_tokens=budget)
    scheduler = Scheduler(config, groups)
    runner = hash_runner(HashModel(windows), groups, 11, 4)
    longest = scheduler.tables.capacity()
    requests = [ask(f"r{i}", min(n, longest), longest) for i, n in enumerate(prompts)]
    for some in [requests] if together else [[r] for r in requests]:
        for request in some:
            scheduler.add(request)
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, runner.run(plan))
            scheduler.check()
    for request in requests:
        told = request.tokens[request.prompt_len :]
        assert told == naive_generate(request, windows)[0], request.id


def ask(name, tokens, longest):
    params = SamplingParams(temperature=0, max_tokens=OUTPUT)
    limit = min(tokens + OUTPUT, longest + 1)
    return Request(name, list(range(tokens)), params, limit)


def test_no_group_takes_the_hits_of_another():
    """Every group's hits are shared before any group takes a block: those of the
    window lie where the next block is taken."""
    index = PrefixIndex()
    pool = BlockPool(9, index.forget)
    tables = Tables(pool, index, group_layers((0, 3)), 2, chunk=8)
    for name, tokens in [("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8])]:
        request = Request(name, tokens, SamplingParams(), 99)
        assert tables.admit(request, tables.nothing(), 4, 4)
        request.computed = 4
        tables.index_computed(request)
        tables.release(request)
    again = Request("c", [1, 2, 3, 4, 9], SamplingParams(), 99)
    hits = tables.lookup(again)
    found = [[block.id for block in row] for row in hits.blocks]
    assert hits.tokens == 4 and found[1][0] == 0 and all(found[0])
    assert tables.admit(again, hits, 5, 5)
    ids = tables.ids(again)
    assert [list(row[:2]) for row in ids] == found
    held = [id for id in chain(*ids) if id]
    assert len(held) == len(set(held)) == 5


def test_a_block_moves_between_groups():
    """What a window let go is what the full group takes next: one pool for both."""
    groups = group_layers((0, 4))
    config = EngineConfig(block_size=2, num_blocks=11, max_num_batched_tokens=2)
    scheduler = Scheduler(config, groups)
    runner = hash_runner(HashModel((0, 4)), groups, 11, 2)
    scheduler.add(ask("a", 10, scheduler.tables.capacity()))
    seen = [set(), set()]
    while (plan := scheduler.plan()) is not None:
        for g, table in enumerate(plan.items[0].tables):
            seen[g] |= set(table) - {0}
        scheduler.commit(plan, runner.run(plan))
    assert seen[0] & seen[1]
