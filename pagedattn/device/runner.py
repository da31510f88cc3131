"""Runs plans on a device that works by itself, and lets the host plan ahead of it.

`launch` stages a plan and returns at once; `finish` waits for what it sampled, the one
time in a step that the host waits. Tokens stay on the device: a plan that refers to
what the one before samples finds them there. Knows machines by their interface alone.
Chapter 07 reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from pagedattn.cache.tables import LayerGroup
from pagedattn.device.buckets import Buckets, Shape, Way
from pagedattn.device.draws import Draw, fill_draws, on_host, sample_rows
from pagedattn.device.machine import Body, Machine
from pagedattn.device.prefix import worth_sharing
from pagedattn.device.staging import DEPTH, Fields, fields_of, fill, num_bytes
from pagedattn.model.batch import Batch, decodes_first, make_batch
from pagedattn.runner import SCORED_ROWS, Model, NewCache, Runner
from pagedattn.sampling.sampler import BROKEN, sample
from pagedattn.scheduler import Item, Plan, Result


@dataclass(slots=True)
class Held:
    """What a step leaves on the device until the next: hidden states, and logits of
    each request's last token."""

    hidden: Tensor | None = None
    logits: Tensor | None = None


@dataclass(slots=True)
class Flight:
    """A plan under way. `results` are None until someone has waited for them; `error`
    is what that came to, if it failed."""

    plan: Plan
    order: list[int]  # the plan's items as they stand in the batch
    draws: list[Draw | None]  # by place in the batch; None: nothing is sampled
    tokens: Tensor  # pinned: what each row sampled, once `mark` is passed
    held: Held
    shared: int = 0  # tokens that all contexts begin with, read once
    mark: object = None
    results: list[Result] | None = None
    error: Exception | None = None

    @property
    def items(self) -> list[Item]:
        """The items in the batch's order."""
        return [self.plan.items[i] for i in self.order]


@dataclass(slots=True)
class Slot:
    """Pinned memory of one step in flight: its inputs, and the tokens it sampled."""

    inputs: Tensor
    tokens: Tensor
    flight: Flight | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that a step may have; `tokens` is no less than `seqs`."""

    tokens: int
    seqs: int

    @classmethod
    def of(cls, budget: int, max_num_seqs: int, max_model_len: int) -> Limits:
        """Those of an engine; its budget may be more than all requests can use."""
        tokens = min(budget, max_num_seqs * max_model_len)
        return cls(max(tokens, max_num_seqs), max_num_seqs)


class DeviceRunner(Runner):
    """A `Runner` on a machine: `run` as any runner's, or `launch` and `finish` apart.

    At most DEPTH plans are in flight, launched in the order they were made.
    """

    def __init__(
        self,
        model: Model,
        kernels: ModuleType | object,
        machine: Machine,
        groups: Sequence[LayerGroup],
        block_size: int,
        new_cache: NewCache,
        limits: Limits,
        buckets: Buckets,
        cascade: bool = False,
    ) -> None:
        super().__init__(model, groups, block_size, new_cache)
        self.machine = machine
        self.buckets = buckets
        self.limits = limits
        self.cascade = cascade  # read once what all contexts of a step share
        self._groups = len(groups)
        self._draw: Callable[..., None] = getattr(kernels, "sample", sample_rows)
        largest = Shape(limits.tokens, limits.seqs, buckets.widths[-1])
        size = num_bytes(largest, self._groups)
        self._inputs = torch.zeros(size, dtype=torch.uint8, device=machine.device)
        self._sampled = torch.zeros(
            limits.seqs, dtype=torch.int64, device=machine.device
        )
        self._slots = [self._slot(size) for _ in range(DEPTH)]
        self._turn = 0
        self._last: Flight | None = None
        self.recorded: dict[tuple[Shape, Way], tuple[Body, Held]] = {}
        self.pieces: dict[int, tuple[list[Body], Held]] = {}  # by number of tokens

    def _slot(self, size: int) -> Slot:
        pinned = self.machine.pinned
        return Slot(pinned(size, torch.uint8), pinned(self.limits.seqs, torch.int64))

    # One plan: staged, copied, run, and its tokens on their way back.
    def run(self, plan: Plan) -> list[Result]:
        """As `Runner.run`."""
        return self.finish(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Flight:
        """Start a plan; what it needs of the one before may still be on the device.

        A plan with rows that are sampled on the host is finished before this returns.
        """
        self._follow(plan)
        order = decodes_first(plan.items)
        items = [plan.items[i] for i in order]
        draws = [self._draw_of(item) for item in items]
        waits = self._waits(items, draws)
        if waits and self._last is not None:
            self.finish(self._last)
        slot = self._free_slot()
        shared = self._shared(items)
        shape, way = self._stage(items, draws, slot, not shared)
        flight = Flight(plan, order, draws, slot.tokens, Held(), shared)
        self._start(flight, slot, shape, way)
        if waits:
            self.finish(flight)
        return flight

    def _shared(self, items: Sequence[Item]) -> int:
        most = self.limits.seqs
        return worth_sharing(items, self.block_size, most) if self.cascade else 0

    def _draw_of(self, item: Item) -> Draw | None:
        if not item.samples or item.request_id in self._pools:
            return None
        return Draw(self._states[item.request_id], item.start + len(item.tokens))

    def _waits(self, items: Sequence[Item], draws: Sequence[Draw | None]) -> bool:
        """Whether the host has to see logits or hidden states before it can go on."""
        scores = any(
            item.request_id in self._pools
            or self._states[item.request_id].params.prompt_logprobs is not None
            for item in items
        )
        return scores or any(d is not None and on_host(d.state) for d in draws)

    def _free_slot(self) -> Slot:
        """The pinned memory of the step before the last, which is done with it."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % DEPTH
        if slot.flight is not None:
            self.finish(slot.flight)
        return slot

    def _stage(
        self,
        items: Sequence[Item],
        draws: Sequence[Draw | None],
        slot: Slot,
        whole: bool,
    ) -> tuple[Shape, Way]:
        """Write the inputs of a step; its shape, and how it runs."""
        tokens, sources = zip(*(self._tokens(item) for item in items), strict=True)
        batch = make_batch(items, tokens, self.block_size, self._rows)
        width = max(len(table) for item in items for table in item.tables)
        shape, way = self.buckets.choose([len(t) for t in tokens], width, whole)
        fields = fields_of(slot.inputs, shape, self._groups)
        fill(fields, batch, torch.tensor([s for row in sources for s in row]))
        fill_draws(fields, draws)
        there = (shape, way) in self.recorded or (
            way is Way.PIECES and shape.tokens in self.pieces
        )
        return shape, way if there else Way.EAGER

    def _tokens(self, item: Item) -> tuple[Sequence[int], Sequence[int]]:
        """(ids, sources): a token's id, or the row of the last step that samples it."""
        n = len(item.tokens)
        if isinstance(item.tokens[-1], int):
            return item.tokens, [-1] * n
        state = self._states[item.request_id]
        at = item.start - len(state.prompt_ids)
        known = state.output_ids[at : at + n]
        if len(known) == n:
            return known, [-1] * n
        assert self._last is not None and len(known) == n - 1
        row = [other.request_id for other in self._last.items].index(item.request_id)
        return [*known, 0], [*[-1] * len(known), row]

    def _start(self, flight: Flight, slot: Slot, shape: Shape, way: Way) -> None:
        """Tell the machine: inputs in, the step, tokens out."""
        size, m = num_bytes(shape, self._groups), self.machine
        decodes = sum(len(item.tokens) == 1 for item in flight.items)
        m.copy(self._inputs[:size], slot.inputs[:size])
        if way is Way.PIECES:
            self._run_pieces(flight, shape, decodes)
        elif way is Way.EAGER:
            m.run(self._body(shape, decodes, flight.held, flight.shared))
        else:
            body, flight.held = self.recorded[shape, way]
            m.run(body)
        m.copy(slot.tokens[: shape.seqs], self._sampled[: shape.seqs])
        flight.mark = m.mark()
        slot.flight = self._last = flight

    def _body(
        self, shape: Shape, num_decodes: int, held: Held, shared: int = 0
    ) -> Body:
        """A step of that shape on the device's inputs: tokens to sampled tokens."""
        fields = fields_of(self._inputs, shape, self._groups)

        def body() -> None:
            self._place_tokens(fields)
            batch = fields.batch(num_decodes, None, shared)
            held.hidden = self.model.forward(batch, self.caches)
            self._sample_rows(fields, held)

        return body

    def _sample_rows(self, fields: Fields, held: Held) -> None:
        """A token for each row, from the hidden states that `held` has."""
        assert held.hidden is not None
        held.logits = self.model.logits(held.hidden[fields.rows])
        self._draw(
            self._sampled[: len(fields.rows)],
            held.logits,
            fields.temperature,
            fields.top_k,
            fields.top_p,
            fields.min_p,
            fields.uniform,
        )

    # In pieces: graphs of the tokens' work, whosever they are; between them attention,
    # which alone depends on the requests.
    def _run_pieces(self, flight: Flight, shape: Shape, decodes: int) -> None:
        """A step of that shape: its graphs and reads in turn, then logits and draws."""
        fields = fields_of(self._inputs, shape, self._groups)
        tokens = sum(len(item.tokens) for item in flight.items)
        (*bodies, last), recorded = self.pieces[shape.tokens]
        m, model, under = self.machine, self.model, []

        def begin() -> None:
            batch = fields.batch(decodes, tokens, flight.shared)
            under.append(model.begin(batch, self.caches))

        def end() -> None:
            flight.held.hidden = recorded.hidden
            self._sample_rows(fields, flight.held)

        m.run(begin)
        for i, body in enumerate(bodies):
            m.run(body)
            m.run(lambda i=i: model.read(under[0], i))
        m.run(last)
        m.run(end)

    def _record_pieces(self, shape: Shape) -> None:
        """Record what lies between the reads of `shape.tokens` tokens."""
        fields, held = fields_of(self._inputs, shape, self._groups), Held()
        this = self.model.begin(fields.batch(0), self.caches)
        depth = len(self.model.spec.windows)

        def piece(i: int) -> Body:
            def body() -> None:
                if i == 0:
                    self._place_tokens(fields)
                held.hidden = self.model.dense(this, i)

            return body

        bodies = [self.machine.record(piece(i)) for i in range(depth + 1)]
        self.pieces[shape.tokens] = bodies, held

    def _place_tokens(self, fields: Fields) -> None:
        """Put what the step before sampled where it is wanted; 0 for a failed row."""
        sampled = self._sampled[fields.source.clamp(min=0)].clamp(min=0)
        ids = torch.where(fields.source < 0, fields.ids, sampled)
        fields.ids.copy_(ids)

    # Its results, once the device has come so far.
    @torch.inference_mode()
    def finish(self, flight: Flight) -> list[Result]:
        """Wait for a plan's results: one for each item, in the plan's order.

        A second call gives the same without waiting, a failure too: a device that
        has failed may answer a second question with anything.
        """
        if flight.results is not None:
            return flight.results
        self._wait(flight)
        tokens = flight.tokens[: len(flight.order)].tolist()
        by_host, pooled = self._sample_on_host(flight), self._pooled(flight)
        results: list[Result] = [Result()] * len(tokens)
        begin = 0
        for s, (i, item) in enumerate(zip(flight.order, flight.items, strict=True)):
            scores = self._scores(flight, item, begin)
            begin += len(item.tokens)
            draw = flight.draws[s]
            if item.request_id in pooled:
                results[i] = Result(pooled=pooled[item.request_id])
            elif s in by_host:
                chosen = by_host[s]
                results[i] = Result(chosen.token, chosen.logprobs, scores, chosen.error)
            elif draw is None:
                results[i] = Result(prompt_logprobs=scores)
            elif tokens[s] < 0:
                results[i] = Result(prompt_logprobs=scores, error=BROKEN)
            else:
                results[i] = Result(tokens[s], prompt_logprobs=scores)
            if draw is not None and results[i].token is not None:
                draw.state.append(results[i].token)
                if draw.state.ended:
                    results[i] = results[i]._replace(ended=True)
        flight.results = results
        flight.held = Held()
        return results

    def _wait(self, flight: Flight) -> None:
        if flight.error is not None:
            raise flight.error
        try:
            self.machine.wait(flight.mark)
        except Exception as error:
            flight.error = error
            raise

    def _sample_on_host(self, flight: Flight) -> dict[int, object]:
        """Samples of the rows that need their logits here, by place in the batch."""
        rows = [
            (s, draw.state)
            for s, draw in enumerate(flight.draws)
            if draw is not None and on_host(draw.state)
        ]
        if not rows:
            return {}
        logits = torch.stack([flight.held.logits[s] for s, _ in rows]).cpu()
        samples = sample(logits, [state for _, state in rows])
        return {s: chosen for (s, _), chosen in zip(rows, samples, strict=True)}

    def _pooled(self, flight: Flight) -> dict[str, Tensor]:
        """What the prompts that end in this batch came to, in float32 on the host."""
        if not self._pools or flight.held.hidden is None:
            return {}
        starts, hidden = [0], flight.held.hidden
        hidden = hidden.float() if hidden.itemsize == 2 else hidden
        for item in flight.items:
            starts.append(starts[-1] + len(item.tokens))
        pooled = self._pool(flight.items, hidden, starts)
        return {name: vector.cpu() for name, vector in pooled.items()}

    def _scores(self, flight: Flight, item: Item, begin: int) -> tuple:
        state = self._states.get(item.request_id)
        if state is None or state.params.prompt_logprobs is None:
            return ()
        return self._score_prompt(item, flight.held.hidden, begin)

    # Before the first plan: the largest step, and the shapes to record.
    @torch.inference_mode()
    def rehearse(
        self,
        shape: Shape,
        context: int = 1,
        decodes: int | None = None,
        shared: int = 0,
    ) -> None:
        """Run a step of `shape` that leaves nothing behind but compiled kernels,
        chosen configurations and memory in its largest size.

        Requests have `context` tokens, or as many as the step has of theirs; so many of
        those with one token go through decode attention, by default all; all of them
        through cascade attention where `shared` says how many tokens they share.
        """
        slot = self._free_slot()
        counts = spread(shape, shape.width * self.block_size)
        fields = fields_of(slot.inputs, shape, self._groups)
        known = torch.full((shape.tokens,), -1)
        fill(fields, self._dummy(counts, shape.width, context), known)
        fill_draws(fields, [])
        size = num_bytes(shape, self._groups)
        if decodes is None:
            decodes = sum(n == 1 for n in counts)
        self.machine.copy(self._inputs[:size], slot.inputs[:size])
        held = Held()
        self.machine.run(self._body(shape, decodes, held, shared))
        self.machine.run(lambda: self._rehearse_scores(held))
        self.machine.wait(self.machine.mark())

    def _rehearse_scores(self, held: Held) -> None:
        """Logits of as many rows as a prompt's scores take at a time: memory that grew
        later would move away from under the graphs that write it."""
        assert held.hidden is not None
        row = held.hidden[:1]
        self.model.logits(row.expand(SCORED_ROWS, *row.shape[1:]))

    def _dummy(self, counts: Sequence[int], width: int, context: int) -> Batch:
        """A batch of zeros that writes the null block and reads whatever there is."""
        n = torch.tensor(counts)
        starts = torch.cat((torch.zeros(1).int(), n.cumsum(0).int()))
        total, seqs = int(n.sum()), len(counts)
        zeros = torch.zeros(total, dtype=torch.int64)
        longest = width * self.block_size
        lengths = torch.maximum(n, torch.tensor(context)).clamp(max=longest).int()
        tables = torch.arange(seqs * width).view(1, seqs, width) % self._num_blocks()
        return Batch(
            ids=zeros,
            positions=zeros,
            slots=zeros.expand(self._groups, total),
            tables=tables.expand(self._groups, -1, -1).int(),
            query_starts=starts,
            lengths=lengths,
            num_decodes=0,
            rows=starts[1:].long() - 1,
        )

    def _num_blocks(self) -> int:
        return len(self.caches[0].v)

    @torch.inference_mode()
    def record(
        self,
        context: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Record every shape of the buckets; how many there are.

        Each is rehearsed first: what compiles or measures can't be recorded.
        """
        shapes = list(self.buckets.shapes())
        for done, (shape, way) in enumerate(shapes):
            decodes = shape.seqs if way is Way.DECODE else 0
            self.rehearse(shape, context, decodes)
            if way is Way.PIECES:
                self._record_pieces(shape)
            else:
                held = Held()
                body = self.machine.record(self._body(shape, decodes, held))
                self.recorded[shape, way] = (body, held)
            if progress:
                progress(done + 1, len(shapes))
        return len(shapes)

    @torch.inference_mode()
    def forget(self) -> None:
        """Give up what is in flight: its results were never wanted."""
        self.machine.wait(self.machine.mark())
        for slot in self._slots:
            slot.flight = None
        self._last = None


def spread(shape: Shape, longest: int) -> list[int]:
    """Token counts of a shape's requests: one each, the rest with the last of them,
    none above `longest`."""
    counts, left = [1] * shape.seqs, shape.tokens - shape.seqs
    for s in reversed(range(shape.seqs)):
        more = min(left, longest - 1)
        counts[s] += more
        left -= more
    assert left == 0, (shape, longest)
    return counts
