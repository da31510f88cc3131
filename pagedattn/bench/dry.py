"""The real scheduler without a model: what tokens are makes no difference to where
they lie or to when they are computed.

Knows schedulers; what runs them dry decides who comes and what is counted.
"""

from __future__ import annotations

from collections.abc import Callable

from pagedattn.cache.tables import LayerGroup
from pagedattn.config import EngineConfig
from pagedattn.scheduler import Plan, Result, Scheduler
from pagedattn.trace import Emit, silence


def scheduler_for(config: EngineConfig, emit: Emit = silence) -> Scheduler:
    """A scheduler for a model whose layers all attend to everything."""
    return Scheduler(config, (LayerGroup(0, (0,)),), emit)


def run_step(
    scheduler: Scheduler, look: Callable[[], None] = lambda: None
) -> Plan | None:
    """Plan a step and commit it, the same token for everybody; None if there is
    nothing to compute. `look` is called while the plan runs."""
    plan = scheduler.plan()
    look()
    if plan is not None:
        scheduler.commit(plan, [Result(token=7)] * len(plan.items))
    return plan
