"""Schedule invariance, exactly: whatever the scheduler does, every request's tokens
are those it would have had alone. The real scheduler, tables and runner, with a model
whose tokens depend on every earlier one (`HashModel`)."""

from collections import deque

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pagedattn.cache.tables import group_layers
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.scheduler import Scheduler
from pagedattn.testing import HashModel, hash_runner, naive_generate

# Prompts share beginnings: each is a path through few tokens.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
WINDOWS = st.sampled_from([(0, 0), (0, 0), (0, 3), (5, 0), (4, 2), (1, 0), (6, 6)])


class Schedules(RuleBasedStateMachine):
    """Requests arrive, leave, are preempted, hit each other's blocks; plans run late
    or fail."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(9, 20),
        budget=st.integers(1, 14),
        max_num_seqs=st.integers(1, 5),
        policy=st.sampled_from(["fcfs", "priority", "lpm"]),
        prefix_caching=st.sampled_from([True, True, False]),
        long_prefill=st.sampled_from([0, 0, 3]),
        chunked=st.sampled_from([True, True, False]),
        windows=WINDOWS,
        depth=st.integers(1, 3),
    )
    def start(
        self,
        block_size,
        num_blocks,
        budget,
        max_num_seqs,
        policy,
        prefix_caching,
        long_prefill,
        chunked,
        windows,
        depth,
    ):
        groups = group_layers(windows)
        config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget if chunked else 64,
            max_num_seqs=max_num_seqs,
            policy=policy,
            prefix_caching=prefix_caching,
            long_prefill=long_prefill if chunked else 0,
            chunked_prefill=chunked,
        )
        self.windows, self.depth = windows, depth
        self.scheduler = Scheduler(config, groups)
        self.runner = hash_runner(HashModel(windows), groups, num_blocks, block_size)
        self.in_flight = deque()
        self.requests, self.got = {}, {}
        self.rng = np.random.default_rng(0)

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 10),
        sampled=st.booleans(),
        penalty=st.sampled_from([0.0, 1.5]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "", "a"]),
        scored=st.sampled_from([None, None, None, 1]),
    )
    def add(self, prompt, max_tokens, sampled, penalty, priority, salt, scored):
        capacity = self.scheduler.tables.capacity()
        prompt = prompt[:capacity]
        if not prompt:
            return
        name = f"r{len(self.requests)}"
        params = SamplingParams(
            temperature=1.0 if sampled else 0.0,
            max_tokens=max_tokens,
            presence_penalty=penalty,
            prompt_logprobs=scored,
        )
        request = Request(
            name,
            prompt,
            params,
            limit=min(len(prompt) + max_tokens, capacity + 1),
            seed=len(self.requests),
            priority=priority,
            first_block_keys=(("salt", salt),) if salt else (),
        )
        self.requests[name], self.got[name] = request, []
        self.scheduler.add(request)

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def plan(self):
        plan = self.scheduler.plan()
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.config.max_num_batched_tokens
            assert len(plan.items) <= self.scheduler.config.max_num_seqs
            self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule()
    def run(self):
        plan = self.in_flight.popleft()
        for update in self.scheduler.commit(plan, self.runner.run(plan)):
            self.got[update.request.id] += update.tokens
            assert update.error is None
        self._poison()

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail(self):
        plan = self.in_flight.popleft()
        self.in_flight.clear()
        for update in self.scheduler.fail(plan, "the machine is on fire"):
            assert update.error and update.request.finish_reason == "error"
            assert len(plan.items) == 1

    @rule(pick=st.integers(0, 30))
    def abort(self, pick):
        name = f"r{pick}"
        live = name in self.requests and self.requests[name].finish_reason is None
        assert (self.scheduler.abort(name) is not None) == live
        assert self.scheduler.abort(name) is None

    @invariant()
    def whole(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            assert not self.scheduler.take_ended()

    def _poison(self):
        """Free blocks that nobody may hit hold garbage, ever new."""
        if self.in_flight:
            return
        size = self.runner.block_size
        for block in self.scheduler.pool.free:
            if block.key is None:
                garbage = torch.from_numpy(self.rng.integers(0, 2**62, size))
                for cache in self.runner.caches:
                    cache.k[block.id * size : (block.id + 1) * size] = garbage

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        idle = 0
        while self.scheduler.has_requests():
            if not self.in_flight:
                self.plan()
            idle = 0 if self.in_flight else idle + 1
            assert idle < 3, "requests wait and nothing is planned"
            if self.in_flight:
                self.run()
            self.whole()
        while self.in_flight:
            self.run()
        for name, request in self.requests.items():
            tokens, reason = naive_generate(request, self.windows)
            got = self.got[name]
            if request.finish_reason in ("abort", "error"):
                assert got == tokens[: len(got)], name
            else:
                assert (got, request.finish_reason) == (tokens, reason), name
        assert len(self.scheduler.pool.free) == self.scheduler.pool.usable
        assert not self.scheduler.running and not self.scheduler.waiting


TestSchedules = Schedules.TestCase
