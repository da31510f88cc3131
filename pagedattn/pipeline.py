"""The engine's loop for a device that works by itself: the next plan while one runs.

`Engine.step` waits for each plan before it makes the next. Here the next is planned
and staged while the device computes; what is not known yet is referred to. Knows the
runner by `launch` and `finish`. Chapter 07 reads it.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from pagedattn.device.runner import DeviceRunner, Flight
from pagedattn.engine import Engine
from pagedattn.request import RequestOutput
from pagedattn.scheduler import Plan, Update

log = logging.getLogger("pagedattn")


class PipelinedEngine(Engine):
    """An `Engine` that keeps one plan ahead of the device (`--async-scheduling`)."""

    runner: DeviceRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flights: deque[tuple[Plan, Flight]] = deque()  # oldest first
        self._failures = 0

    def step(self) -> list[RequestOutput]:
        """Start one plan, if there is one, and take the results of the one before."""
        due, self._late = self._late, []
        plan = self.scheduler.plan()
        updates = self.scheduler.take_ended()
        if plan is not None:
            self._note(plan)
            updates += self._launch(plan)
        elif self._flights:
            updates += self._land()
        elif self.scheduler.has_requests() and not updates:
            raise RuntimeError("requests wait, but none of them can be planned")
        if len(self._flights) > 1:
            updates += self._land()
        outputs = self._take(updates)
        while self._flights and not self.scheduler.has_requests():
            outputs += self._take(self._land())  # nobody waits for these
        self._gauge()
        return due + outputs

    def _take(self, updates: list[Update]) -> list[RequestOutput]:
        for update in updates:
            if update.error is not None:
                log.warning("Request %s ended: %s", update.request.id, update.error)
        outputs, stopped = self.outputs.process(updates, self._clock())
        for request_id in stopped:
            self.scheduler.abort(request_id, "stop")
        return outputs

    def _launch(self, plan: Plan) -> list[Update]:
        """Start a plan. Where it can't start, the plan before it is settled first."""
        try:
            self._flights.append((plan, self.runner.launch(plan)))
        except Exception as error:
            before = self._failures
            updates = self._land() if self._flights else []
            if self._failures == before:
                updates += self._fail(plan, error)
            return updates
        except BaseException:
            self._give_up(self._flights[0][0] if self._flights else plan)
            raise
        return []

    def _land(self) -> list[Update]:
        """Wait for the oldest plan in flight and commit it."""
        plan, flight = self._flights.popleft()
        try:
            results = self.runner.finish(flight)
        except Exception as error:
            return self._fail(plan, error)
        except BaseException:
            self._give_up(plan)
            raise
        return self.scheduler.commit(plan, results)

    def _fail(self, plan: Plan, error: Exception) -> list[Update]:
        """The oldest plan did not run, and so nobody after it did."""
        log.error("A step of %d requests failed.", len(plan.items), exc_info=error)
        self._failures += 1
        self._flights.clear()
        self.runner.forget()
        return self.scheduler.fail(plan, f"{type(error).__name__}: {error}")

    def _give_up(self, oldest: Plan) -> None:
        """Ctrl-C: nobody's fault, but whatever is in flight is not to be trusted."""
        self._flights.clear()
        self.runner.forget()
        self.scheduler.retract(oldest)
