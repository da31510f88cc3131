"""The recorder: events in order, each a snapshot, each in the step it happened in."""

from hypothesis import given
from hypothesis import strategies as st

from pagedattn.cache.tables import group_layers
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Result, Scheduler
from pagedattn.trace import Event, Recorder, silence

KINDS = st.sampled_from(["take", "free", "compute"])
CALLS = st.tuples(KINDS, st.none() | st.text(), st.lists(st.integers(0, 9)))


@given(st.lists(CALLS | st.none(), max_size=20))
def test_events_in_order_and_in_their_step(calls):
    """None ends a step."""
    recorder, want, step = Recorder(), [], 0
    for amount, call in enumerate(calls):
        if call is None:
            recorder.tick()
            step += 1
        else:
            kind, request, blocks = call
            recorder.emit(kind, request, blocks, amount)
            want.append(Event(step, kind, request, tuple(blocks), amount))
    assert recorder.events == want and recorder.step == step


def test_what_is_not_said_has_a_default():
    recorder = Recorder()
    recorder.emit("finish")
    assert recorder.events == [Event(0, "finish", None, (), 0)]
    assert silence("finish") is None


def test_an_event_is_a_snapshot():
    """What the caller does with its list afterwards, or that it can be read only
    once, makes no difference."""
    recorder, blocks = Recorder(), [1, 2]
    recorder.emit("take", "a", blocks)
    recorder.emit("share", "a", (i for i in blocks))
    blocks.append(3)
    taken, shared = recorder.events
    assert taken.blocks == shared.blocks == (1, 2) and hash(taken) != hash(shared)


def test_recorders_share_nothing():
    one, other = Recorder(), Recorder()
    one.emit("add", "a")
    one.tick()
    assert other.events == [] and other.step == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(6, 11))
def test_a_trace_tells_which_blocks_are_free(prompts, num_blocks):
    """After every step, for prompts that begin alike, preemptions included."""
    recorder, busy, seen = Recorder(), set(), 0
    config = EngineConfig(block_size=4, num_blocks=num_blocks)
    scheduler = Scheduler(config, group_layers((0,)), recorder.emit)
    for i, n in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=i + 2)
        scheduler.add(Request(f"r{i}", list(range(n)), params, n + i + 2))
    while (plan := scheduler.plan()) is not None:
        scheduler.commit(plan, [Result(7 if i.samples else None) for i in plan.items])
        for event in recorder.events[seen:]:
            if event.kind in ("take", "share"):
                busy.update(event.blocks)
            elif event.kind == "free":
                busy.difference_update(event.blocks)
        assert busy == {b.id for b in scheduler.pool.blocks if b.refs}
        assert {event.step for event in recorder.events[seen:]} == {recorder.step}
        seen = len(recorder.events)
        recorder.tick()
