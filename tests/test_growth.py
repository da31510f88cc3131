"""What a step does is what it was asked to do, however much stands around it: counts of
calls and of elements, never seconds."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.bench.growth import ROUND, Case, compare, series
from pagedattn.cache.ids import BlockIds
from pagedattn.cache.prefix import PrefixIndex
from pagedattn.engine import Engine
from pagedattn.model.batch import TableRows
from pagedattn.request import SamplingParams
from pagedattn.scheduler import Item, Plan
from pagedattn.testing import hash_engine

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def test_a_series_differs_in_what_grows() -> None:
    for running in (1, 64):
        for first, *others in series(running):
            assert first.running == running
            assert all(case != first and case.running == running for case in others)


def test_cases_are_what_they_say() -> None:
    cases = [Case(2, context=20), Case(2, waiting=5, context=20, turnover=True)]
    for bench in compare(cases, rounds=1):
        scheduler = bench.engine.scheduler
        assert len(bench.seconds) == ROUND and bench.overhead > 0
        assert len(scheduler.waiting) == bench.case.waiting
        bench.engine.check()


@st.composite
def histories(draw: st.DrawFn) -> list[list[Item]]:
    """Plans' items: requests come, go, change places, start anew; their tables grow and
    fall behind a window."""
    plans, tables, epochs = list[list[Item]](), dict[str, list[int]](), dict[str, int]()
    for _ in range(draw(st.integers(1, 12))):
        items = []
        for name in draw(st.permutations("abc"))[: draw(st.integers(1, 3))]:
            if draw(st.integers(0, 4)) == 0:
                epochs[name], tables[name] = epochs.get(name, 0) + 1, []
            table = tables.setdefault(name, [])
            table += draw(st.lists(st.integers(1, 99), max_size=20))
            leading = next((i for i, id in enumerate(table) if id), len(table))
            nulls = draw(st.integers(leading, len(table)))
            table[:nulls] = [0] * nulls
            both = (tuple(table), (7,))
            items.append(Item(name, epochs.get(name, 0), 0, (1,), both, True))
        plans.append(items)
    return plans


@settings(max_examples=60)
@given(histories())
def test_rows_follow_tables(plans: list[list[Item]]) -> None:
    rows = TableRows()
    for items in plans:
        array = rows.follow(items)
        assert array.dtype == np.int32 and array.shape[:2] == (2, len(items))
        for s, item in enumerate(items):
            for g, table in enumerate(item.tables):
                assert array[g, s, : len(table)].tolist() == list(table)
                assert array[g].flags.c_contiguous


def step(engine: Engine) -> Plan:
    """Step once; the plan that was run."""
    ran: list[Plan] = []
    run = engine.runner.run
    engine.runner.run = lambda plan: (ran.append(plan), run(plan))[1]
    engine.step()
    engine.runner.run = run
    return ran[0]


def long_contexts(running: int, context: int) -> Engine:
    """An engine that decodes; one token was made of each context."""
    engine = hash_engine(
        num_blocks=running * (context // 4 + 20),
        block_size=4,
        max_num_seqs=running,
        max_num_batched_tokens=running * context,
        max_model_len=context + 100,
    )
    for i in range(running):
        prompt = [1000 * i + j % 977 for j in range(context)]
        engine.add_request(str(i), prompt, LONG)
    step(engine)
    return engine


def test_a_step_writes_only_the_ids_that_are_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sixteen tokens of three contexts: a block in four steps for each, none copied."""
    engine = long_contexts(3, 400)
    step(engine)
    read: list[int] = []
    get = BlockIds.__getitem__

    def counted(self: BlockIds, i: int | slice) -> object:
        found = get(self, i)
        read.append(len(found) if isinstance(found, tuple) else 1)
        return found

    monkeypatch.setattr(BlockIds, "__getitem__", counted)
    monkeypatch.setattr(BlockIds, "__iter__", lambda _: pytest.fail("copied"))
    array = engine.runner._rows._ids
    for _ in range(16):
        step(engine)
    assert engine.runner._rows._ids is array
    assert sum(read) == 3 * 4 + 3 * 4  # new blocks, and is the first null yet?


def test_a_plan_says_the_same_later() -> None:
    """Its tables are views of lists that grow on; what it shows does not."""
    engine = long_contexts(2, 40)
    plans = [step(engine) for _ in range(3)]
    seen = [repr(plan) for plan in plans]
    copies = [pickle.loads(pickle.dumps(plan)) for plan in plans]
    while engine.has_unfinished_requests():
        step(engine)
    assert [repr(plan) for plan in plans] == seen
    assert copies == plans and isinstance(copies[0].items[0].tables[0], tuple)


def test_a_long_prompt_that_waits_is_looked_up_in_one_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not admitted for want of blocks, it asks again each step: up to the first gap."""
    engine = hash_engine(num_blocks=120, block_size=4, max_num_seqs=4)
    engine.add_request("runs", list(range(60)), LONG)
    engine.step()
    engine.add_request("waits", list(range(1000, 1440)), LONG)
    asked: list[bytes] = []
    get = PrefixIndex.get

    def counted(self: PrefixIndex, hash: bytes, group: int) -> object:
        asked.append(hash)
        return get(self, hash, group)

    monkeypatch.setattr(PrefixIndex, "get", counted)
    engine.step()
    assert [r.id for r in engine.scheduler.waiting] == ["waits"]
    assert len(asked) <= 2  # one for each group: HashModel's layers share theirs
