# Exercise 9 · Engine and server: build it.
#
# This is pagedattn/engine.py without these bodies:
#
#     Engine.step
#     Engine._run
#     Engine.abort_request
#
# Each raises NotImplementedError. Its docstring is its contract: write the body here,
# in this file, and keep the signature.
#
#     make exercise N=9    the engine's own tests on your file, and one hint
#     make hint N=9        a hint alone
#     make reset N=9       this file as it was; yours is kept beside it
#     PAGEDATTN_STUDENT=9 make serve    the server, on your code
#
# The idea is in book/09_engine.ipynb.
# One solution is pagedattn/engine.py itself.
#
# Made from pagedattn/engine.py by exercises/tools.py. Untouched: 6e87301d9e84

"""The engine: plan, run, commit, and text for whoever asked.

`Engine.step()` is the whole loop body; everything else is arrivals and departures.
A failing request ends alone: what a step raises is the scheduler's to sort out. Knows
every room; does no work of its own. Built in chapter 09.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from pagedattn.config import EngineConfig
from pagedattn.errors import UserError
from pagedattn.intake import Ask, Intake, Prompt
from pagedattn.metrics import Metrics
from pagedattn.output import Outputs
from pagedattn.request import RequestOutput, SamplingParams
from pagedattn.runner import Runner
from pagedattn.scheduler import Plan, Scheduler, Update
from pagedattn.text.tokenizer import Tokenizer

log = logging.getLogger("pagedattn")


class Engine:
    """Many requests, one model. Not thread-safe: one thread calls everything here."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        intake: Intake,
        metrics: Metrics,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.intake = intake
        self.metrics = metrics
        self.tokenizer = tokenizer
        self.outputs = Outputs(tokenizer, metrics)
        self._clock = clock
        self._late: list[RequestOutput] = []  # last outputs of what was aborted
        self._preemptions = 0
        self.plan: Plan | None = None  # the last step's

    # Arrivals and departures.
    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> None:
        """Queue a prompt; UserError, with nothing changed, if it can't be served."""
        self.add(self.intake.accept(request_id, prompt, params, priority=priority))

    def add(self, ask: Ask) -> None:
        """Queue what the intake accepted; ids under way are refused."""
        if ask.id in self.outputs or any(r.id in self.outputs for r in ask.requests):
            raise UserError(f"request_id {ask.id!r} is already running.", "request_id")
        self.outputs.add(ask, self._clock())
        for request in ask.requests:
            self.scheduler.add(request)
        self._gauge()

    def abort_request(self, request_id: str) -> None:
        """End a request now; its blocks are free at once. Unknown ids are ignored.

        Its last output, with finish reason "abort", comes with the next step.
        """
        raise NotImplementedError("exercise 9: Engine.abort_request")

    def take_late(self) -> list[RequestOutput]:
        """Last outputs of what was aborted, without a step."""
        late, self._late = self._late, []
        return late

    def reset_prefix_cache(self, preempt: bool = False) -> bool:
        """Forget every cached prefix; False, changing nothing, while requests run,
        unless they may be preempted, which recomputes them from the start."""
        if preempt:
            self.scheduler.preempt_all()
        done = self.scheduler.reset_prefix_cache()
        self._gauge()
        return done

    def sleep(self) -> None:
        """Forget every cached prefix and let go of the KV tensors. Only when idle."""
        assert not self.has_unfinished_requests()
        assert self.scheduler.reset_prefix_cache()
        self.runner.sleep()
        self.metrics.on_sleep(True)

    def wake_up(self) -> None:
        """Take KV tensors again; the pool is as it was, its blocks hold nothing."""
        self.runner.wake_up()
        self.metrics.on_sleep(False)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._late) or len(self.outputs) > 0

    def get_num_unfinished_requests(self) -> int:
        """Callers' requests under way."""
        return len(self.outputs)

    # One step: plan, run, commit, and outputs for whoever is due.
    def step(self) -> list[RequestOutput]:
        """Compute one plan, if there is one; what callers are due now."""
        raise NotImplementedError("exercise 9: Engine.step")

    def _run(self, plan: Plan) -> list[Update]:
        raise NotImplementedError("exercise 9: Engine._run")

    def _note(self, plan: Plan) -> None:
        """Tell clocks and metrics of what is about to run."""
        now, computed = self._clock(), 0
        for request in self.scheduler.take_admitted():
            self.outputs.scheduled(request.id, now)
            hit = request.cached or 0
            self.metrics.on_admitted(request.prompt_len, hit)
            computed += request.prompt_len - hit
        preempted = self.scheduler.preemptions - self._preemptions
        self._preemptions = self.scheduler.preemptions
        self.metrics.on_step(plan.num_tokens, computed, preempted)

    def _gauge(self) -> None:
        pool = self.scheduler.pool
        self.metrics.on_state(
            len(self.scheduler.running),
            len(self.scheduler.waiting),
            1 - len(pool.free) / pool.usable,
        )

    def check(self) -> None:
        """Assert that the books agree; with nothing under way, that all blocks are
        free."""
        self.scheduler.check()
        if not self.has_unfinished_requests():
            assert not self.scheduler.has_requests()
            assert len(self.scheduler.pool.free) == self.scheduler.pool.usable

    def get_metrics(self) -> list[Any]:
        """Every metric, as vLLM's `LLM.get_metrics` gives them."""
        return self.metrics.snapshot()
