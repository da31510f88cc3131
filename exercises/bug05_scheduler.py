# Exercise bug5 · The scheduler: find the bug.
#
# This is pagedattn/scheduler.py, with a mistake in it that a real
# engine made. What its users saw:
#
#     Once in a few days a step fails for lack of memory; the engine recovers and goes
#     on. For hours after that some answers are nonsense, always to prompts that begin
#     like one of those which were in the failed step. A restart, or an emptied prefix
#     cache, cures it.
#
# Find it and correct it, here, in this file. The rest is as it should be.
#
#     make exercise N=bug5    the engine's own tests on your file, and one hint
#     make hint N=bug5        a hint alone
#     make reset N=bug5       this file as it was; yours is kept beside it
#
# The idea is in book/05_scheduler.ipynb.
#
# Made from pagedattn/scheduler.py by exercises/tools.py. Untouched: 8a1630abf414

"""Which tokens to compute next, and what to do with what was sampled.

One rule serves prefill, chunks, prefix hits, decode and resuming: every request
computes the tokens it is behind by, within one budget. `plan()` returns frozen data,
`commit()` takes the results; several plans may be in flight, run in order. Knows
nothing of tensors, text or clocks. Built in chapter 05.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from pagedattn.cache.blocks import Block, BlockPool
from pagedattn.cache.prefix import PrefixIndex
from pagedattn.cache.tables import LayerGroup, Tables
from pagedattn.config import EngineConfig
from pagedattn.request import Request, SamplingParams
from pagedattn.trace import Emit, silence

LOOK_AHEAD = 16  # lpm: how many of the line are compared, however long it is
PATIENCE = 32  # lpm: admissions that may go before one that came earlier


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that is not known yet: what item `row` of plan `plan` will sample."""

    plan: int
    row: int


class Item(NamedTuple):
    """One request's part of a plan: compute `tokens`, the first at position `start`.

    `tables` holds one sequence of block ids for each layer group. If `samples`, the
    last token's logits choose the next token.
    """

    request_id: str
    epoch: int
    start: int
    tokens: tuple[int | Sampled, ...]
    tables: tuple[Sequence[int], ...]
    samples: bool


@dataclass(frozen=True, slots=True)
class Start:
    """What a runner must know of a request before its first item, or after a preempt:
    all tokens so far and how to choose the next ones."""

    request_id: str
    tokens: tuple[int, ...]
    prompt_len: int
    params: SamplingParams
    seed: int
    sibling: int
    eos_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...]
    pooling: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what to compute. `drops` are requests that a runner may forget."""

    id: int
    items: tuple[Item, ...]
    starts: tuple[Start, ...]
    drops: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that this plan computes."""
        return sum(len(item.tokens) for item in self.items)


class Result(NamedTuple):
    """What running one item gave: a token if it samples, log-probabilities if asked.

    `prompt_logprobs` are (position of the token scored, data). `error` says why no
    token could be chosen; that request alone ends. `ended`: nothing may follow the
    token, the answer is complete by its grammar. `pooled` is what the prompt's hidden
    states came to, where they and no token were asked for.
    """

    token: int | None = None
    logprobs: Any = None
    prompt_logprobs: tuple[tuple[int, Any], ...] = ()
    error: str | None = None
    ended: bool = False
    pooled: Any = None


class Update(NamedTuple):
    """What a step changed for one request: new tokens, scores, perhaps its end."""

    request: Request
    tokens: tuple[int, ...] = ()
    result: Result = Result()
    error: str | None = None


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    items: list[Item] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    indexed: list[Block] = field(default_factory=list)
    preempted: bool = False


class Scheduler:
    """Owns every live request from `add` to its end, and their blocks in between.

    Waiting and running requests are sorted by importance: order of arrival, or under
    the priority policy (priority, arrival), smaller first; under lpm those with a long
    cached prefix may pass others in the line. Preempted requests so come
    back at the head of the line, and the last running one is the one to preempt.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: Sequence[LayerGroup],
        emit: Emit = silence,
    ) -> None:
        index = PrefixIndex()
        self.config = config
        self.pool = BlockPool(config.num_blocks, index.forget, emit)
        self.tables = Tables(
            self.pool, index, groups, config.block_size, config.max_num_batched_tokens
        )
        self.waiting: deque[Request] = deque()  # both ends O(1), however long
        self.running: list[Request] = []
        self.preemptions = 0
        self._key = _ORDERS[config.policy]
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[Plan, list[Block]]] = deque()
        self._drops: list[str] = []
        self._suspects: dict[str, Request] = {}
        self._ended: list[Update] = []
        self._admitted: list[Request] = []
        self._plans = 0
        self._arrivals = 0
        self._epochs = 0
        self._emit = emit

    def trace_to(self, emit: Emit) -> None:
        """Tell `emit`, and nobody else, of what happens from now on."""
        self._emit = emit
        self.pool.trace_to(emit)

    # Requests come and go.
    def add(self, request: Request) -> None:
        """Queue `request`. Its limit must fit model and pool; the engine sees to it."""
        assert request.id not in self._requests
        assert request.prompt_len <= self.tables.capacity()
        request.arrival = self._arrivals
        self._arrivals += 1
        self._renew(request)
        self._requests[request.id] = request
        insort(self.waiting, request, key=self._key)
        self._emit("add", request.id, amount=request.prompt_len)

    def abort(self, request_id: str, reason: str = "abort") -> Request | None:
        """End a request now, its blocks free; None if it has ended or never was."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def has_requests(self) -> bool:
        """Whether any request waits, runs, or has an end that was not reported."""
        return bool(self._requests or self._ended)

    # Plan: each request wants the tokens it is behind by.
    def plan(self) -> Plan | None:
        """The next step, or None if nothing can be computed now.

        Advances `computed`: the keys and values exist once the plan has run, and
        plans run whole and in order. So full blocks are indexed here already, and a
        later request of the same plan may hit them.
        """
        draft = _Draft(self.config.max_num_batched_tokens)
        if not self._plan_suspect(draft):
            self._plan_running(draft)
            if not draft.preempted:
                self._plan_waiting(draft)
        if not draft.items:
            return None
        plan = Plan(
            self._plans, tuple(draft.items), tuple(draft.starts), tuple(self._drops)
        )
        self._plans += 1
        self._drops.clear()
        self._in_flight.append((plan, draft.indexed))
        return plan

    def _plan_suspect(self, draft: _Draft) -> bool:
        """Plan one suspect alone, so that a second failure names the culprit."""
        for request in sorted(self._suspects.values(), key=self._key):
            if request in self.running:
                self._plan_one(request, draft)
            else:
                self._admit(request, draft)
            if draft.items:
                return True
        return False

    def _plan_running(self, draft: _Draft) -> None:
        # Running requests first: each wants the tokens it is behind by. What is
        # preempted for one of them stands after it, at the end of the line.
        i = 0
        while i < len(self.running) and draft.budget:
            self._plan_one(self.running[i], draft)
            i += 1

    def _plan_one(self, request: Request, draft: _Draft) -> None:
        n = self._chunk(request.behind, draft)
        if n == 0:
            return
        self.tables.trim(request)
        if self._make_room(request, request.computed + n, draft):
            self._add_item(request, n, draft)

    def _plan_waiting(self, draft: _Draft) -> None:
        # Then the line: the first that can't be admitted holds up those behind it.
        while self.waiting and draft.budget and not self._full():
            place = self._next_in_line()
            if not self._admit(self.waiting[place], draft):
                break
            for request in islice(self.waiting, place):
                request.passed += 1

    def _next_in_line(self) -> int:
        """Whose turn it is: the head's; under lpm, of the first few, that of the one
        with the longest cached prefix.

        The prefix that a running request computes counts as far as it is planned.
        Nobody passes a request that PATIENCE admissions have passed before.
        """
        if self.config.policy != "lpm":
            return 0
        best, longest = 0, -1
        for place, request in enumerate(islice(self.waiting, LOOK_AHEAD)):
            found = self._lookup(request).tokens
            if found > longest:
                best, longest = place, found
            if request.passed >= PATIENCE:
                break
        return best

    def _full(self) -> bool:
        return len(self.running) >= self.config.max_num_seqs

    def _admit(self, request: Request, draft: _Draft) -> bool:
        """Move a waiting request to running; False, changing nothing, if the budget,
        the pool or the number of sequences does not allow it now."""
        if self._full():
            return False
        hits = self._lookup(request)
        behind = request.num_tokens - hits.tokens
        n = self._chunk(behind, draft)
        if n < behind and not self.config.chunked_prefill:
            return False
        # All of its tokens must fit, or it would stop half-way and hold blocks.
        if not self.tables.admit(request, hits, hits.tokens + n, request.num_tokens):
            return False
        self.waiting.remove(request)
        insort(self.running, request, key=self._key)
        request.computed, request.passed = hits.tokens, 0
        if request.cached is None:
            request.cached = hits.tokens
            self._admitted.append(request)
        self._emit("admit", request.id, amount=hits.tokens)
        draft.starts.append(_start(request))
        self._add_item(request, n, draft)
        return True

    def _lookup(self, request: Request) -> Any:
        if self.config.prefix_caching and request.reads_cache:
            return self.tables.lookup(request)
        return self.tables.nothing()

    def _chunk(self, behind: int, draft: _Draft) -> int:
        return min(behind, draft.budget, self.config.long_prefill or behind)

    def _add_item(self, request: Request, n: int, draft: _Draft) -> None:
        start, draft.budget = request.computed, draft.budget - n
        request.computed += n
        if self.config.prefix_caching:
            draft.indexed += self.tables.index_computed(request)
        samples = request.computed == request.num_tokens
        draft.items.append(
            Item(
                request.id,
                request.epoch,
                start,
                self._tokens(request, start, n),
                self.tables.ids(request),
                samples,
            )
        )
        request.pending += samples
        self._emit("compute", request.id, amount=n)

    def _tokens(
        self, request: Request, start: int, n: int
    ) -> tuple[int | Sampled, ...]:
        """The tokens to compute; those still in flight by reference."""
        known = request.tokens[start : start + n]
        if len(known) == n:
            return tuple(known)
        waits = [
            Sampled(plan.id, row)
            for plan, _ in self._in_flight
            for row, item in enumerate(plan.items)
            if item.request_id == request.id and item.epoch == request.epoch
            if item.samples
        ]
        first = start + len(known) - len(request.tokens)
        return (*known, *waits[first : first + n - len(known)])

    # Preemption: the least important running request gives its blocks back.
    def _make_room(self, request: Request, upto: int, draft: _Draft) -> bool:
        while not self.tables.grow(request, upto):
            victim = self.running[-1]
            if len(self.running) > 1:
                self._preempt(victim)
                draft.preempted = True
            elif not request.pending:
                # Alone and out of blocks: it ends, it never preempts itself.
                self._finish(request, "length")
                self._ended.append(Update(request))
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the line, nothing computed; results still in flight are stale."""
        self.tables.release(request)
        self.running.remove(request)
        insort(self.waiting, request, key=self._key)
        request.computed = request.pending = 0
        self._renew(request)
        self.preemptions += 1
        self._drops.append(request.id)
        self._emit("preempt", request.id)

    def _renew(self, request: Request) -> None:
        """A new epoch, unlike any before: results of older ones are stale."""
        request.epoch = self._epochs
        self._epochs += 1

    # Commit: append what was sampled, end what has ended.
    def commit(self, plan: Plan, results: Sequence[Result]) -> list[Update]:
        """Take the results of the oldest plan in flight, one for each of its items.

        Results of requests that ended or were preempted since are dropped.
        """
        oldest, _ = self._in_flight.popleft()
        assert oldest is plan and len(results) == len(plan.items)
        updates = []
        for item, result in zip(plan.items, results, strict=True):
            request = self._requests.get(item.request_id)
            if request is not None and request.epoch == item.epoch:
                updates.append(self._commit_one(request, item, result))
        return updates

    def _commit_one(self, request: Request, item: Item, result: Result) -> Update:
        if result.error is not None:
            self._finish(request, "error")
            return Update(request, result=result, error=result.error)
        if not item.samples:
            return Update(request, result=result)
        if request.pooling is not None:
            self._finish(request, "stop")
            return Update(request, result=result)
        assert result.token is not None and request.pending > 0
        request.pending -= 1
        self._suspects.pop(request.id, None)
        request.tokens.append(result.token)
        self._index_settled(request)
        ending = ("stop", None) if result.ended else request.ending()
        if ending is not None:
            self._finish(request, *ending)
        return Update(request, (result.token,), result)

    def _index_settled(self, request: Request) -> None:
        """Index blocks that the token just learned completes, if they are computed.

        They may be written by the youngest plan in flight, so they stand or fall
        with it.
        """
        if self.config.prefix_caching:
            new = self.tables.index_computed(request)
            if self._in_flight:
                self._in_flight[-1][1].extend(new)

    def take_ended(self) -> list[Update]:
        """Requests that ended outside a commit since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_admitted(self) -> list[Request]:
        """Requests admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def fail(self, plan: Plan, error: str) -> list[Update]:
        """The oldest plan in flight did not run: withdraw it and all that follow it.

        Whatever those plans indexed was never written. A request alone in the failed
        plan ends with `error`; several are preempted, and then run one by one until
        they have shown themselves harmless. Nobody else is harmed.
        """
        suspects = self._live(plan)
        self.retract(plan)
        if len(plan.items) > 1:
            self._suspects |= {request.id: request for request in suspects}
            return []
        for request in suspects:
            self._finish(request, "error")
        return [Update(request, error=error) for request in suspects]

    def retract(self, plan: Plan) -> None:
        """The oldest plan in flight did not run: withdraw it and all that follow it.

        Whatever they indexed was never written. Their requests go back to the line.
        """
        assert self._in_flight[0][0] is plan
        plans = [in_flight for in_flight, _ in self._in_flight]
        for later, indexed in self._in_flight:
            pass
            self._drops += later.drops
        self._in_flight.clear()
        for request in dict.fromkeys(r for later in plans for r in self._live(later)):
            self._preempt(request)

    def _live(self, plan: Plan) -> list[Request]:
        """The requests of `plan` that have neither ended nor been preempted since."""
        found = [(self._requests.get(item.request_id), item) for item in plan.items]
        return [r for r, item in found if r is not None and r.epoch == item.epoch]

    def _finish(
        self, request: Request, reason: str, stop: int | str | None = None
    ) -> None:
        """End `request`: out of its line, its blocks free, later results dropped."""
        request.finish_reason, request.stop_reason = reason, stop
        del self._requests[request.id]
        self._suspects.pop(request.id, None)
        if request in self.running:
            self.tables.release(request)
            self.running.remove(request)
            self._drops.append(request.id)
        else:
            place = bisect_left(self.waiting, self._key(request), key=self._key)
            del self.waiting[place]
        self._emit("finish", request.id)

    def preempt_all(self) -> None:
        """Put every running request back in line; each keeps the tokens it has."""
        assert not self._in_flight
        for request in reversed(self.running[:]):
            self._preempt(request)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, changing nothing, while any is in use."""
        if self.running:
            return False
        cached = [block for block in self.pool.free if block.key is not None]
        self.tables.withdraw(cached)
        self._emit("evict", blocks=(block.id for block in cached))
        return True

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        assert sorted(self.waiting, key=self._key) == list(self.waiting)
        assert sorted(self.running, key=self._key) == self.running
        assert len(self.running) <= self.config.max_num_seqs
        live = {id(r) for r in self._requests.values()}
        assert live == {id(r) for r in (*self.waiting, *self.running)}
        assert len(live) == len(self.waiting) + len(self.running)
        self.tables.check(self.running)
        for request in self.waiting:
            assert request.computed == request.pending == 0
        for request in self.running:
            assert 0 < request.computed <= request.num_tokens <= request.limit


_ORDERS: dict[str, Callable[[Request], tuple[int, ...]]] = {
    "fcfs": lambda request: (request.arrival,),
    "priority": lambda request: (request.priority, request.arrival),
    "lpm": lambda request: (request.arrival,),
}


def _start(request: Request) -> Start:
    return Start(
        request.id,
        tuple(request.tokens),
        request.prompt_len,
        request.params,
        request.seed,
        request.sibling,
        request.eos_ids,
        request.bad_words_ids,
        request.pooling,
    )
