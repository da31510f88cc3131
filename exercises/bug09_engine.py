# Exercise bug9 · Engine and server: find the bug.
#
# This is pagedattn/engine.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     Clients that ask for several answers at once and hang up in the middle leave
#     something behind: the log says that their requests were aborted, but the machine
#     goes on computing for nobody, and kv_cache_usage_perc does not fall. Clients that
#     ask for one answer leave nothing.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug9    the engine's own tests on your file, and one hint
#     make hint N=bug9        a hint alone
#     make reset N=bug9       this file as it was; yours is kept beside it
#
# The idea is in book/09_engine.ipynb.
#
# Made from pagedattn/engine.py by exercises/tools.py. Untouched: 4372889350f7

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
        live, output = self.outputs.abort(request_id, self._clock())
        self.scheduler.abort(request_id)
        if output is not None:
            self._late.append(output)
        self._gauge()

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
        due = self.take_late()
        plan = self.plan = self.scheduler.plan()
        updates = self.scheduler.take_ended()
        if plan is not None:
            self._note(plan)
            updates += self._run(plan)
        elif self.scheduler.has_requests() and not updates:
            raise RuntimeError("requests wait, but none of them can be planned")
        for update in updates:
            if update.error is not None:
                log.warning("Request %s ended: %s", update.request.id, update.error)
        outputs, stopped = self.outputs.process(updates, self._clock())
        for request_id in stopped:
            self.scheduler.abort(request_id, "stop")
        self._gauge()
        return due + outputs

    def _run(self, plan: Plan) -> list[Update]:
        try:
            results = self.runner.run(plan)
        except Exception as error:  # whatever it is, others must not suffer
            log.exception("A step of %d requests failed.", len(plan.items))
            return self.scheduler.fail(plan, f"{type(error).__name__}: {error}")
        except BaseException:  # Ctrl-C: nobody's fault, but nothing was computed
            self.scheduler.retract(plan)
            raise
        return self.scheduler.commit(plan, results)

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
