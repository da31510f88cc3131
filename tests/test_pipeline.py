"""Planning ahead of a lazy device changes no token, and waits once a step at most.

The real scheduler, engine and device runner around `HashModel`, on a device that does
nothing before somebody waits (`fake_device`): an input overwritten too early, a graph
that reads another's memory, or a token taken from the wrong step gives other tokens
than the request has alone.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagedattn.cache.tables import group_layers
from pagedattn.config import EngineConfig
from pagedattn.device.buckets import (
    Buckets,
    Shape,
    Way,
    capture_sizes,
    table_widths,
)
from pagedattn.device.machine import Host
from pagedattn.device.memory import GIB
from pagedattn.device.runner import DeviceRunner, Limits
from pagedattn.device.start import Parts, measure, room_for_kv, start
from pagedattn.errors import UserError
from pagedattn.intake import Intake
from pagedattn.metrics import Metrics
from pagedattn.pipeline import PipelinedEngine
from pagedattn.request import SamplingParams
from pagedattn.scheduler import Scheduler
from pagedattn.testing import (
    POISON,
    VOCABULARY,
    HashModel,
    hash_engine,
    naive_generate,
)


class Watched(DeviceRunner):
    """A runner whose pinned memory must not be written while a copy reads it."""

    plans = 0

    def _stage(self, items, draws, slot, whole):
        self.plans += 1
        if isinstance(self.machine, FakeDevice):
            assert not self.machine.busy(slot.inputs)
        return super()._stage(items, draws, slot, whole)


def pipelined(
    machine=None, windows=(0, 0), sizes=(), widths=None, tokens=(), most=0, **config
):
    """An engine that plans ahead, around a `HashModel`, with the shapes recorded."""
    settled = EngineConfig(**config)
    groups = group_layers(windows)
    scheduler = Scheduler(settled, groups)
    blocks, size = settled.num_blocks, settled.block_size

    def new_cache():
        k = torch.full((blocks * size,), POISON, dtype=torch.int64)
        return k, torch.empty(blocks)

    room = scheduler.tables.capacity() + size
    runner = Watched(
        HashModel(windows),
        SimpleNamespace(),
        machine or FakeDevice(),
        groups,
        size,
        new_cache,
        Limits.of(settled.max_num_batched_tokens, settled.max_num_seqs, room),
        Buckets(sizes, widths or table_widths(room, size), tokens, most),
    )
    runner.record()
    intake = Intake(settled, scheduler.tables.capacity(), VOCABULARY, (), None)
    metrics = Metrics("hash", settled.max_model_len, {})
    return PipelinedEngine(settled, scheduler, runner, intake, metrics)


def drain(engine):
    """Step to the end; the last output of each request."""
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            last[output.request_id] = output
        engine.scheduler.check()
    engine.check()
    assert not engine.runner.machine.queue
    return last


def tokens(output):
    return [list(c.token_ids) for c in output.outputs]


def wish(n, temperature, **others):
    """Several answers need a draw."""
    return SamplingParams(n=n, temperature=0.8 if n > 1 else temperature, **others)


wishes = st.builds(
    wish,
    max_tokens=st.integers(1, 7),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 3),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    logprobs=st.sampled_from([None] * 6 + [1]),
    min_tokens=st.sampled_from([0] * 6 + [1]),
    repetition_penalty=st.sampled_from([1.0] * 6 + [1.5]),
    prompt_logprobs=st.sampled_from([None] * 9 + [1]),
)


class Pipeline(RuleBasedStateMachine):
    """Requests come, leave, stop, are preempted and fail while plans are in flight."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(12, 24),
        budget=st.integers(1, 14),
        seqs=st.integers(1, 5),
        caching=st.booleans(),
        windows=st.sampled_from([(0, 0), (0, 0), (0, 3), (4, 2)]),
        sizes=st.sampled_from([(), (1, 2, 4, 8), (3,)]),
        narrow=st.booleans(),
        tokens=st.sampled_from([(), (1, 3, 8), (6,)]),
        whole=st.booleans(),
    )
    def begin(
        self,
        block_size,
        num_blocks,
        budget,
        seqs,
        caching,
        windows,
        sizes,
        narrow,
        tokens,
        whole,
    ):
        self.windows = windows
        self.machine = FakeDevice()
        sizes = tuple(sorted({min(n, seqs) for n in sizes}))
        widths = (2, num_blocks) if narrow else (num_blocks,)
        self.engine = pipelined(
            self.machine,
            windows,
            sizes,
            widths,
            tuple(sorted({min(n, 2 * seqs, budget) for n in tokens})),
            seqs if whole else 0,
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            prefix_caching=caching,
            max_model_len=64,
        )
        self.waits = self.machine.counts["wait"]  # while recording
        self.truth, self.doubtful, self.number = {}, set(), 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        params=wishes,
        stop=st.none() | st.integers(0, 6),
    )
    def add(self, prompt, params, stop):
        name = f"r{self.number}"
        try:
            truth = self.alone(name, prompt, params)[1]
        except UserError:  # longer than this pool
            return
        if stop is not None and stop < len(truth[0]):
            params = replace(params, stop_token_ids=[truth[0][stop]])
        ask, self.truth[name] = self.alone(name, prompt, params)
        self.number += 1
        self.engine.add(ask)

    def alone(self, name, prompt, params):
        """What the intake makes of it, and the tokens that its requests have alone."""
        ask = self.engine.intake.accept(name, prompt, params)
        return ask, [naive_generate(r, self.windows)[0] for r in ask.requests]

    @rule(data=st.data())
    def abort(self, data):
        live = sorted(name for name in self.truth if name in self.engine.outputs)
        if live:
            name = data.draw(st.sampled_from(live))
            self.doubtful.add(name)
            self.engine.abort_request(name)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            if self.engine.has_unfinished_requests():
                self.take(self.engine.step())

    @precondition(lambda self: self.machine.queue)
    @rule()
    def the_device_fails(self):
        def broken():
            self.machine.queue.clear()  # what stood behind it is lost
            self.machine.reading.clear()
            raise RuntimeError("an illegal memory access")

        self.machine.queue[0] = (self.machine.queue[0][0], broken)
        self.doubtful |= set(self.truth)  # whoever is alone in the plan ends

    def take(self, outputs):
        self.engine.scheduler.check()
        waits = self.machine.counts["wait"] - self.waits
        assert waits <= self.engine.runner.plans + 2 * self.engine._failures
        for output in outputs:
            if output.finished:
                expected, found = self.truth[output.request_id], tokens(output)
                if output.request_id not in self.doubtful:
                    assert found == expected
                for a, b in zip(found, expected, strict=True):
                    assert a == b[: len(a)]

    def teardown(self):
        if hasattr(self, "engine"):
            while self.engine.has_unfinished_requests():
                self.take(self.engine.step())
            self.engine.check()


TestPipeline = Pipeline.TestCase


@pytest.mark.parametrize("sizes", [(), (1, 2, 4, 8)])
def test_tokens_are_the_synchronous_engines(sizes):
    """Under preemption too: the pool holds half of what the requests need."""
    config = dict(block_size=4, num_blocks=12, max_num_batched_tokens=16)
    config |= dict(max_num_seqs=8)
    engines = hash_engine(**config), pipelined(sizes=sizes, **config)
    found = []
    for engine in engines:
        for i in range(6):
            params = SamplingParams(max_tokens=9, temperature=i % 2, seed=i)
            engine.add_request(f"r{i}", [i] * (4 + i), params)
        last = {}
        while engine.has_unfinished_requests():
            last |= {o.request_id: tokens(o) for o in engine.step()}
        engine.check()
        found.append(last)
    assert found[0] == found[1]
    assert engines[1].scheduler.preemptions > 0
    assert (engines[1].runner.machine.counts["replay"] > 0) == bool(sizes)


def test_a_step_copies_in_runs_copies_out_and_waits_once():
    engine = pipelined(sizes=(1, 2), num_blocks=40, block_size=4)
    machine = engine.runner.machine
    for name in "ab":
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=20))
    engine.step()  # prompts
    for _ in range(15):
        before = machine.counts.copy()
        engine.step()
        assert machine.counts - before == dict(copy=2, replay=1, wait=1)
        assert machine.queue  # the next plan is under way when results are out
    drain(engine)


def test_in_pieces_attention_stands_between_graphs():
    """Prompts and single tokens alike, with as many graphs whoever is in the step."""
    engine = pipelined(tokens=(4, 8), num_blocks=40, block_size=4)
    machine = engine.runner.machine
    assert machine.counts["record"] == 2 * 3
    for name in "ab":
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=20))
    for _ in range(10):  # the first step is two prompts of three tokens
        before = machine.counts.copy()
        engine.step()
        seen = machine.counts - before
        # Begin, two reads, and the end with its draws; three graphs.
        assert (seen["copy"], seen["run"], seen["replay"]) == (2, 4, 3)
    drain(engine)


def test_the_host_waits_only_for_the_plan_before():
    """The step just launched is still to be run when its predecessor's tokens come."""
    engine = pipelined(num_blocks=40, block_size=4)
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=5, temperature=0))
    assert engine.step() == [] and len(engine.runner.machine.queue) == 3
    (output,) = engine.step()
    assert len(output.outputs[0].token_ids) == 1
    assert len(engine.runner.machine.queue) == 3
    drain(engine)


def test_a_row_of_no_numbers_ends_alone():
    engine = pipelined(num_blocks=40, block_size=4)
    good, model = engine.runner.model.logits, engine.runner.model

    def logits(hidden):
        found = good(hidden)
        if len(found) > 1:
            found[0] = torch.nan
        return found

    model.logits = logits
    params = SamplingParams(max_tokens=4, temperature=0)
    for name in "ab":
        engine.add_request(name, [3, 4, ord(name)], params)
    last = drain(engine)
    reasons = {name: last[name].outputs[0].finish_reason for name in "ab"}
    assert reasons == {"a": "error", "b": "length"}
    ask = engine.intake.accept("truth", [3, 4, ord("b")], params)
    assert tokens(last["b"])[0] == naive_generate(ask.requests[0])[0]


def test_a_launch_that_fails_spares_the_plan_before():
    engine = pipelined(num_blocks=40, block_size=4)
    params = SamplingParams(max_tokens=6, temperature=0)
    for name in "ab":
        engine.add_request(name, [3, 4, ord(name)], params)
    engine.step()
    launch, calls = engine.runner.launch, []

    def failing(plan):
        calls.append(plan)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no")
        return launch(plan)

    engine.runner.launch = failing
    last = drain(engine)
    for name in "ab":
        ask = engine.intake.accept("truth", [3, 4, ord(name)], params)
        assert tokens(last[name])[0] == naive_generate(ask.requests[0])[0]


def test_interrupted_it_goes_on_from_what_it_knows():
    engine = pipelined(num_blocks=40, block_size=4)
    params = SamplingParams(max_tokens=6, temperature=0)
    engine.add_request("a", [3, 4, 5], params)
    engine.step()
    engine.step()
    finish = engine.runner.finish

    def interrupted(flight):
        engine.runner.finish = finish
        raise KeyboardInterrupt

    engine.runner.finish = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    ask = engine.intake.accept("truth", [3, 4, 5], params)
    assert tokens(drain(engine)["a"])[0] == naive_generate(ask.requests[0])[0]


def test_the_processor_is_a_machine_too():
    """A plain loop over `run`: any runner's interface, and no waiting at all."""
    engine = pipelined(Host(), sizes=(1, 2), num_blocks=40, block_size=4)
    engine.runner.machine.queue = ()
    params = SamplingParams(max_tokens=6, temperature=0)
    engine.add_request("a", [3, 4, 5], params)
    ask = engine.intake.accept("truth", [3, 4, 5], params)
    assert tokens(drain(engine)["a"])[0] == naive_generate(ask.requests[0])[0]


# ------------------------------------------------------------------- start on a card


def parts(sizes=(1, 2, 4)):
    model = HashModel()
    return Parts(
        Rehearsed(model),
        SimpleNamespace(),
        group_layers((0, 0)),
        (2, 4, 8),
        torch.float32,
        Limits.of(32, 4, 64),
        Buckets(sizes, (4, 16)),
    )


class Rehearsed:
    """Notes the shapes it is asked for; its KV is what a real model's would be."""

    def __init__(self, model):
        self.spec, self.seen = model.spec, []

    def forward(self, batch, caches):
        assert caches[0].k.shape[1:] == (2, 4, 8)
        assert int(batch.tables.max()) < len(caches[0].k)
        assert batch.slots.eq(0).all()  # nothing but the null block is written
        shape = Shape(len(batch.ids), len(batch.lengths), batch.tables.shape[2])
        self.seen.append((shape, int(batch.lengths.max())))
        return torch.zeros(len(batch.ids), 1)

    def logits(self, hidden):
        return torch.zeros(len(hidden), 5)


def test_a_start_measures_the_largest_steps():
    card, made = FakeDevice(), parts()
    card.taken = 20 * GIB
    profile = measure(made, card, before=80 * GIB)
    assert profile.held == 20 * GIB and profile.transient == GIB
    assert [shape for shape, _ in made.model.seen] == [
        Shape(4, 4, 16),
        Shape(32, 4, 16),
    ]
    assert room_for_kv(made, card, 80 * GIB, 0.5) == 29 * GIB - (256 + 6 * 8 << 20)


def test_a_start_rehearses_before_it_records_every_shape():
    card, made = FakeDevice(), parts()
    runner = start(made, card, num_blocks=9)
    assert card.counts["record"] == 6
    assert set(runner.recorded) == set(made.buckets.shapes())
    seen = [shape for shape, _ in made.model.seen]
    assert {shape for shape, _ in made.buckets.shapes()} <= set(seen)
    assert Shape(4, 4, 4) in seen and Shape(32, 4, 16) in seen
    assert max(length for _, length in made.model.seen) == 64  # what a context can be


@pytest.mark.parametrize("stage", ["profile", "cache", "capture"])
def test_a_start_without_memory_says_what_to_lower(stage):
    card = FakeDevice()
    card.fail_at = stage
    with pytest.raises(UserError, match=f"ran out \\({stage}\\)"):
        room_for_kv(parts(), card, card.free, 0.5)
        start(parts(), card, 9)


def test_without_graphs_nothing_is_recorded():
    card = FakeDevice()
    start(parts(sizes=()), card, 9)
    assert card.counts["record"] == 0


def test_what_is_recorded_by_default_serves_every_decode_plan():
    sizes = capture_sizes(256)
    buckets = Buckets(sizes, table_widths(40_960, 16))
    for n in range(1, 257):
        shape, recorded = buckets.choose([1] * n, 2560)
        assert recorded is Way.DECODE and n <= shape.seqs < n + 8


def test_a_failure_that_the_next_launch_finds_is_the_older_plans():
    """A row that is sampled on the host waits for the step before; that it failed is
    not the fault of whoever noticed, and a second wait may not call it well."""
    machine = FakeDevice()
    config = dict(block_size=1, num_blocks=12, max_num_batched_tokens=4)
    engine = pipelined(machine, max_num_seqs=2, **config)

    def broken():
        machine.queue.clear()
        machine.reading.clear()
        raise RuntimeError("an illegal memory access")

    engine.add_request("old", [0], SamplingParams(max_tokens=1, temperature=0))
    engine.step()
    machine.queue[0] = (machine.queue[0][0], broken)
    penalised = SamplingParams(max_tokens=1, temperature=0, repetition_penalty=1.5)
    engine.add_request("new", [0], penalised)
    ask = engine.intake.accept("truth", [0], penalised)
    last = drain(engine)
    assert tokens(last["new"]) == [naive_generate(ask.requests[0], (0, 0))[0]]
    assert last["old"].outputs[0].finish_reason == "error"
