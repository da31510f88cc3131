"""Runs plans: owns the model, its KV tensors, and what sampling must remember.

`run(plan)` is the whole interface: frozen data in, frozen data out. It never sees a
scheduler, and does the same for a plan that was printed, stored or sent. Built in
chapters 06 and 08.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedattn.cache.tables import LayerGroup
from pagedattn.model.batch import (
    Batch,
    LayerCache,
    TableRows,
    decodes_first,
    make_batch,
)
from pagedattn.model.pooling import Pool
from pagedattn.sampling.grammar import Grammars
from pagedattn.sampling.logprobs import prompt_logprobs
from pagedattn.sampling.sampler import Sample, sample
from pagedattn.sampling.state import SampleState
from pagedattn.scheduler import Item, Plan, Result, Start

SCORED_ROWS = 64  # prompt positions scored at once: 12 MB of logits at 49k tokens


class Model(Protocol):
    """What the runner asks of a model; T tokens, R rows, V entries of vocabulary.

    To be recorded in pieces it also has `begin`, `dense` and `read`, as the decoder.
    """

    spec: Any  # vocab_size, and windows: one for each layer

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Hidden states [T, …] of the batch; writes its keys and values."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [R, V] of hidden states [R, …]."""


NewCache = Callable[[], tuple[Tensor, Tensor]]


def layer_caches(groups: Sequence[LayerGroup], new_cache: NewCache) -> list[LayerCache]:
    """One cache for each layer; the i-th layers of all groups share their tensors."""
    shared = [new_cache() for _ in range(max(len(g.layers) for g in groups))]
    caches = {
        layer: LayerCache(*shared[i], group=g)
        for g, group in enumerate(groups)
        for i, layer in enumerate(group.layers)
    }
    return [caches[layer] for layer in sorted(caches)]


class Runner:
    """One model on one device. Plans must come in the order they were made."""

    def __init__(
        self,
        model: Model,
        groups: Sequence[LayerGroup],
        block_size: int,
        new_cache: NewCache,
        grammars: Grammars | None = None,
    ) -> None:
        self.model = model
        self.grammars = grammars
        self.block_size = block_size
        self._new_caches = lambda: layer_caches(groups, new_cache)
        self.caches = self._new_caches()
        self._states: dict[str, SampleState] = {}
        self._pools: dict[str, Pool] = {}
        self._rows = TableRows()

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Result]:
        """Compute every item of `plan`; one result each, in the plan's order.

        Every layer writes the plan's keys and values before any of its attention
        reads them, so items may hit blocks that others of the same plan fill.
        """
        self._follow(plan)
        order = decodes_first(plan.items)
        items = [plan.items[i] for i in order]
        known = [self._known(item) for item in items]
        batch = make_batch(items, known, self.block_size, self._rows)
        hidden = self.model.forward(batch, self.caches)
        starts = batch.query_starts.tolist()
        pooled = self._pool(items, hidden, starts) if self._pools else {}
        samples = self._sample(items, hidden[batch.rows])
        results: list[Result] = [Result()] * len(items)
        for s, (i, item) in enumerate(zip(order, items, strict=True)):
            if item.request_id in self._pools:
                results[i] = Result(pooled=pooled.get(item.request_id))
                continue
            scores = self._score_prompt(item, hidden, starts[s])
            ended = self._states[item.request_id].ended
            results[i] = _result(samples.get(item.request_id), scores, ended)
        return results

    def sleep(self) -> None:
        """Let go of the KV tensors; nothing may run before `wake_up`."""
        self.caches = []

    def wake_up(self) -> None:
        """Take KV tensors again, with nothing in them."""
        self.caches = self._new_caches()

    # What the runner remembers between plans: the tokens and wishes of each request.
    def _follow(self, plan: Plan) -> None:
        for request_id in plan.drops:
            self._states.pop(request_id, None)
            self._pools.pop(request_id, None)
        for start in plan.starts:
            if start.pooling is not None:
                self._pools[start.request_id] = Pool(start.pooling)
            self._states[start.request_id] = self._state(start)

    def _state(self, start: Start) -> SampleState:
        grammar = None
        if start.params.structured_outputs is not None:
            assert self.grammars is not None, "the intake refuses what can't be served"
            grammar = self.grammars.matcher(start.params)
        return SampleState(
            start.params,
            start.seed,
            self.model.spec.vocab_size,
            start.tokens[: start.prompt_len],
            list(start.tokens[start.prompt_len :]),
            start.sibling,
            start.eos_ids,
            start.bad_words_ids,
            grammar,
        )

    def _known(self, item: Item) -> Sequence[int]:
        """The item's token ids; what an earlier plan sampled is known by now."""
        if isinstance(item.tokens[-1], int):  # those still unknown stand last
            return item.tokens
        state = self._states[item.request_id]
        at = item.start - len(state.prompt_ids)
        return state.output_ids[at : at + len(item.tokens)]

    # Choosing tokens, and scoring prompts where asked.
    def _sample(self, items: Sequence[Item], hidden: Tensor) -> dict[str, Sample]:
        ids = [item.request_id for item in items if item.samples]
        if self._pools:  # these end without a token
            rows = [row for row, i in enumerate(ids) if i not in self._pools]
            ids, hidden = [ids[row] for row in rows], hidden[rows]
        if not ids:
            return {}
        states = [self._states[i] for i in ids]
        samples = sample(self.model.logits(hidden), states)
        for state, chosen in zip(states, samples, strict=True):
            if chosen.token is not None:
                state.append(chosen.token)
        return dict(zip(ids, samples, strict=True))

    def _pool(
        self, items: Sequence[Item], hidden: Tensor, starts: Sequence[int]
    ) -> dict[str, Tensor]:
        """What the prompts that end in this batch came to; the others' tokens are
        taken in."""
        done = {}
        for item, begin in zip(items, starts, strict=False):
            if (pool := self._pools.get(item.request_id)) is not None:
                pool.add(hidden[begin : begin + len(item.tokens)])
                if item.samples:
                    done[item.request_id] = pool.vector()
        return done

    def _score_prompt(
        self, item: Item, hidden: Tensor, begin: int
    ) -> tuple[tuple[int, Any], ...]:
        """(position, log-probabilities) of the prompt tokens that follow the item's,
        whose hidden states are the batch's from `begin` on."""
        state = self._states[item.request_id]
        n = state.params.prompt_logprobs
        if n is None:
            return ()
        n = state.vocab_size if n == -1 else n
        first = item.start + 1
        targets = state.prompt_ids[first : first + len(item.tokens)]
        scores: list[Any] = []
        for i in range(0, len(targets), SCORED_ROWS):
            some = targets[i : i + SCORED_ROWS]
            rows = hidden[begin + i : begin + i + len(some)]
            logits = self.model.logits(rows)
            scores += prompt_logprobs(logits, some, n)
        return tuple(enumerate(scores, first))


def _result(
    chosen: Sample | None, scores: tuple[tuple[int, Any], ...], ended: bool
) -> Result:
    if chosen is None:
        return Result(prompt_logprobs=scores)
    return Result(chosen.token, chosen.logprobs, scores, chosen.error, ended)
