"""What a step does is what it was asked to do, however much stands around it: counts of
calls and of elements, never seconds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn.bench.growth import ROUND, Case, compare, series
from pagedattn.cache.prefix import PrefixIndex
from pagedattn.model.batch import TableRows
from pagedattn.request import SamplingParams
from pagedattn.scheduler import Item
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
def histories(draw: st.DrawFn) -> list[Item]:
    """Items of one request over its plans: tables grow and fall behind a window."""
    items, epoch, table, nulls = list[Item](), 0, list[int](), 0
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.integers(0, 4)) == 0:
            epoch, table, nulls = epoch + 1, [], 0
        table += draw(st.lists(st.integers(1, 99), max_size=20))
        nulls = draw(st.integers(nulls, len(table)))
        table[:nulls] = [0] * nulls
        items.append(Item("a", epoch, 0, (1,), (tuple(table), (7,)), True))
    return items


@settings(max_examples=60)
@given(histories())
def test_rows_follow_tables(items: list[Item]) -> None:
    rows = TableRows()
    for item in items:
        for group, table in enumerate(item.tables):
            assert rows.follow(item, group).tolist() == list(table)
            assert rows.follow(item, group).dtype == np.int32
    rows.forget("a")
    rows.forget("a")  # nothing there, nothing to do


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
