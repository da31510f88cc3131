"""An encoder behind a server: texts queue, one thread runs them in packed batches.

Has the face of the asynchronous engine, as far as it makes sense without a KV cache.
Callers live in asyncio; one that is cancelled leaves the queue. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from pagedattn.assembly import load_tokenizer, use_threads
from pagedattn.config import EngineArgs, EngineConfig
from pagedattn.errors import EngineDead, NotSupported, UserError
from pagedattn.intake import Prompt
from pagedattn.kernels import cpu
from pagedattn.metrics import Metrics
from pagedattn.model import source
from pagedattn.model.encoder import Encoder, encoder_config, is_encoder, load_encoder
from pagedattn.model.linear import linear_backend
from pagedattn.model.pooling import Pool, Pooling, read_pooling
from pagedattn.model.source import Source
from pagedattn.request import RequestOutput, RequestTimes, SamplingParams
from pagedattn.text.template import ChatTemplate
from pagedattn.text.tokenizer import Tokenizer

log = logging.getLogger("pagedattn")
BATCH = 2_048  # tokens of one batch, where no budget is given
POLL = 0.02  # seconds between looks at what is left while draining


def wants_encoder(args: EngineArgs) -> bool:
    """Whether `args` name an encoder; UserError if it is asked to generate, and
    NotSupported if it is to run on a GPU."""
    found = source.resolve(args.model, args.revision)
    if not is_encoder(found):
        return False
    if args.runner == "generate":
        raise UserError(
            f"model {found.name!r} is an encoder: it embeds and generates no text; "
            "leave out --runner generate.",
            "runner",
        )
    if args.device == "cuda":
        raise NotSupported(
            f"model {found.name!r} is an encoder: its attention has no kernel for "
            "device='cuda' yet; device='cpu' or 'auto' runs it.",
            "device",
        )
    return True


@dataclass(slots=True, eq=False)
class _Job:
    """One text in the queue, and the loop in which its caller waits."""

    id: str
    ids: list[int]
    priority: int
    number: int
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[RequestOutput]
    times: RequestTimes

    def end(self, result: RequestOutput | Exception) -> None:
        """Hand over from any thread; whoever is gone wants nothing."""

        def settle() -> None:
            if self.done.done():
                return
            if isinstance(result, Exception):
                self.done.set_exception(result)
            else:
                self.done.set_result(result)

        try:
            self.loop.call_soon_threadsafe(settle)
        except RuntimeError:
            pass


class EncoderEngine:
    """Embeds for many callers at once; safe to call from any event loop."""

    generates = False
    chat_template: ChatTemplate | None = None

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        pooling: Pooling,
        config: EngineConfig,
        args: EngineArgs,
        facts: dict[str, str],
    ) -> None:
        self.encoder = encoder
        self.tokenizer: Tokenizer | None = tokenizer
        self.pooling: Pooling | None = pooling
        self.config, self.args, self.facts = config, args, facts
        self.model_name = (args.served_model_name or [facts["model"]])[0]
        self.metrics = Metrics(self.model_name, config.max_model_len, facts)
        self.vocab_size = encoder.config.vocab_size
        self.hidden_size = encoder.config.hidden_size
        self._queue: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._numbers = itertools.count()
        self._change = threading.Condition()
        self._draining = self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="encoder", daemon=True)
        self._thread.start()

    @classmethod
    def from_args(cls, args: EngineArgs, show_progress: bool = False) -> EncoderEngine:
        """Load the encoder that `args` names; UserError if it can't be done."""
        found = source.resolve(args.model, args.revision)
        config = _settle(args, found)
        pooling = read_pooling(found.path, "CLS", args.pooler_config)
        threads = use_threads(args.num_threads)
        words = source.resolve(args.tokenizer) if args.tokenizer else found
        cpu.compile_all(lambda name, done, total: None)
        with tqdm(desc="Weights", disable=not show_progress, leave=False) as bar:
            encoder = load_encoder(found, lambda done, total: _show(bar, done, total))
        facts = _facts(found, encoder, pooling, config, threads)
        tokenizer = load_tokenizer(words)
        return cls(encoder, tokenizer, pooling, config, args, facts)

    @property
    def is_running(self) -> bool:
        """False once its thread has ended."""
        return not self._stopped

    def default_sampling(self) -> dict[str, Any]:
        """Nothing: it samples nothing."""
        return {}

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """UserError: encoders read, they don't write."""
        raise UserError(f"{self.model_name} is an encoder and generates no text.")
        yield  # a generator, as callers expect

    async def embed(
        self, prompt: Prompt, request_id: str, *, priority: int = 0
    ) -> RequestOutput:
        """The prompt's `pooled` hidden states; being cancelled takes it from the
        queue. UserError before any work if it can't be served."""
        ids = self._checked(prompt)
        loop = asyncio.get_running_loop()
        times = RequestTimes(time.monotonic())
        number = next(self._numbers)
        job = _Job(request_id, ids, priority, number, loop, loop.create_future(), times)
        with self._change:
            if self._draining or self._stopped:
                raise EngineDead("the engine is shutting down")
            self._queue.append(job)
            self._gauge()
            self._change.notify()
        try:
            return await job.done
        finally:
            self._leave(job)

    def _checked(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt", ""))
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(
                    f"input holds token id {i}; the vocabulary has {self.vocab_size}.",
                    "input",
                )
        if not 0 < len(ids) <= self.config.max_model_len:
            raise UserError(
                f"the input has {len(ids)} tokens; this model takes 1 to "
                f"{self.config.max_model_len}. truncate_prompt_tokens=-1 cuts it.",
                "input",
            )
        return ids

    def _leave(self, job: _Job) -> None:
        """Take a job that nobody waits for out of the queue."""
        with self._change:
            if job in self._queue:
                self._queue.remove(job)
                self._count(job, "abort")
                self._gauge()

    async def abort(self, request_id: str) -> None:
        """Take a text out of the queue; its caller gets EngineDead."""
        for job in [j for j in list(self._queue) if j.id == request_id]:
            self._leave(job)
            job.end(EngineDead("the request was aborted"))

    # The end.
    async def drain(self, timeout: float) -> None:
        """Refuse new texts and wait for those there are, up to `timeout` seconds."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while (self._queue or self._running) and time.monotonic() < deadline:
            await asyncio.sleep(POLL)
        self._fail_waiting()

    def shutdown(self) -> None:
        """End the thread; callers that still wait get EngineDead."""
        with self._change:
            self._draining = self._stopped = True
            self._change.notify()
        self._thread.join()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        with self._change:
            jobs = list(self._queue)
        for job in jobs:
            self._leave(job)
            job.end(EngineDead("the engine is shutting down"))

    # The thread: batch after batch.
    def _loop(self) -> None:
        while True:
            with self._change:
                self._running = []
                self._gauge()
                while not self._queue and not self._stopped:
                    self._change.wait()
                if self._stopped:
                    return
                self._running = self._take()
                self._gauge()
            try:
                self._run(self._running)
            except Exception as error:  # whatever it is, others must not suffer
                log.exception("A batch of %d texts failed.", len(self._running))
                for job in self._running:
                    self._count(job, "error")
                    job.end(error)

    def _take(self) -> list[_Job]:
        """The next batch: as many as the budget allows, in order; one at least."""
        if self.config.policy == "priority":
            order = sorted(self._queue, key=lambda job: (job.priority, job.number))
            self._queue = deque(order)
        taken: list[_Job] = []
        tokens = 0
        while self._queue and len(taken) < self.config.max_num_seqs:
            tokens += len(self._queue[0].ids)
            if taken and tokens > self.config.max_num_batched_tokens:
                break
            taken.append(self._queue.popleft())
        return taken

    def _run(self, jobs: list[_Job]) -> None:
        now = time.monotonic()
        tokens = sum(len(job.ids) for job in jobs)
        states = self.encoder.forward([job.ids for job in jobs])
        self.metrics.on_step(tokens, tokens, 0)
        for job, hidden in zip(jobs, states, strict=True):
            job.times.scheduled = now
            pool = Pool(self.pooling.type)
            pool.add(hidden)
            self._count(job, "stop")
            job.end(
                RequestOutput(
                    job.id, None, job.ids, None, [], True, 0, job.times, pool.vector()
                )
            )

    def _count(self, job: _Job, reason: str) -> None:
        job.times.finished = time.monotonic()
        self.metrics.on_finished(reason, len(job.ids), 0, 1, None, job.times)

    def _gauge(self) -> None:
        self.metrics.on_state(len(self._running), len(self._queue), 0.0)


def _show(bar: Any, done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


def _settle(args: EngineArgs, found: Source) -> EngineConfig:
    """What the encoder runs with; UserError for a length that it has no places for."""
    model = encoder_config(found)
    length = args.max_model_len or model.max_model_len
    if length > model.positions - model.first_position:
        raise UserError(
            f"max_model_len={length} is more than this model's "
            f"{model.positions - model.first_position} positions.",
            "max_model_len",
        )
    config = EngineConfig(
        max_model_len=length,
        max_num_batched_tokens=args.max_num_batched_tokens or BATCH,
        max_num_seqs=args.max_num_seqs,
    )
    return replace(config, policy=args.scheduling_policy, seed=args.seed)


def _facts(
    found: Source,
    encoder: Encoder,
    pooling: Pooling,
    config: EngineConfig,
    threads: int,
) -> dict[str, str]:
    return {
        "model": found.name,
        "architecture": encoder.config.architecture,
        "dtype": "float32",
        "linear": linear_backend(),
        "threads": str(threads),
        "pooling": pooling.type + (", normalised" if pooling.normalize else ""),
        "hidden_size": str(encoder.config.hidden_size),
        "max_model_len": str(config.max_model_len),
    }
