"""The engine behind a server: the step loop in its own thread, answers as streams.

Callers live in asyncio; one thread owns the engine and takes their arrivals and
departures from a queue between steps. Knows nothing of HTTP. Built in chapter 09.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pagedattn.assembly import Assembled, assemble
from pagedattn.config import EngineArgs, EngineConfig
from pagedattn.engine import Engine
from pagedattn.errors import EngineDead, UserError
from pagedattn.intake import Ask, Prompt
from pagedattn.metrics import Metrics
from pagedattn.model.cores import pin_threads
from pagedattn.model.pooling import Pooling
from pagedattn.request import RequestOutput, SamplingParams
from pagedattn.text.template import ChatTemplate
from pagedattn.text.tokenizer import Tokenizer

T = TypeVar("T")
log = logging.getLogger("pagedattn")
LONG_TEXT = 4_000  # characters; longer prompts are tokenized off the event loop
POLL = 0.02  # seconds between looks at what is left while draining, or at a pause
PAUSES = ("abort", "wait", "keep")


@dataclass(frozen=True, slots=True)
class _Stream:
    """Where one request's outputs go: a queue in some event loop."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | Exception]

    def put(self, output: RequestOutput | Exception) -> None:
        """Hand over from any thread; a loop that is gone wants nothing."""
        try:
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, output)
        except RuntimeError:
            pass


_Delivery = tuple[asyncio.Queue[RequestOutput | Exception], RequestOutput]


def _put_all(deliveries: list[_Delivery]) -> None:
    for outputs, output in deliveries:
        outputs.put_nowait(output)


class AsyncEngine:
    """Serves many callers at once; safe to call from any event loop."""

    def __init__(self, parts: Assembled) -> None:
        self.parts = parts
        self._engine = parts.engine
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # the step loop's
        self._open: set[_Stream] = set()  # the callers'
        self._error: Exception | None = None
        self._draining = False
        self._stopped = False
        self._paused = False  # new requests wait
        self._frozen = False  # and those under way as well
        self._asleep = False
        self.after_step: Callable[[Engine], None] | None = None  # in the loop's thread
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_args(cls, args: EngineArgs, show_progress: bool = False) -> AsyncEngine:
        """Load what `args` names and start the step loop."""
        return cls(assemble(args, show_progress))

    # What servers read.
    @property
    def args(self) -> EngineArgs:
        """What the engine was started with."""
        return self.parts.args

    @property
    def config(self) -> EngineConfig:
        """What the engine runs with."""
        return self._engine.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it brings one."""
        return self.parts.chat_template

    @property
    def metrics(self) -> Metrics:
        """What the engine counts."""
        return self._engine.metrics

    @property
    def model_name(self) -> str:
        """The served name."""
        return self.parts.model_name

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._engine.intake.vocab_size

    @property
    def facts(self) -> dict[str, str]:
        """What a start-up banner says."""
        return self.parts.facts

    @property
    def is_running(self) -> bool:
        """False once the step loop has ended, for whatever reason."""
        return self._error is None and not self._stopped

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    @property
    def pooling(self) -> Pooling | None:
        """How prompts become embeddings; None if this engine gives none."""
        return self.parts.pooling

    @property
    def generates(self) -> bool:
        """Whether it writes text; else it only embeds."""
        return self.args.runner != "pooling"

    @property
    def hidden_size(self) -> int:
        """How long an embedding is."""
        return self.parts.spec.hidden_size

    def default_sampling(self) -> dict[str, Any]:
        """What a caller's silence means, as `SamplingParams` fields."""
        return dict(self.parts.sampling_defaults)

    # One request: a stream of outputs.
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
        pooling: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs until the last; leaving early aborts the request.

        UserError before any work if the request can't be served; EngineDead if the
        engine is, or refuses new work.
        """
        self._check_open()
        ask = await self._accept(
            prompt, params, request_id, priority, add_special_tokens, pooling
        )
        while self._paused:
            self._check_open()
            await asyncio.sleep(POLL)
        self._check_open()
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        finished = False
        self._open.add(stream)
        try:
            self._enter(ask, stream)
            while not finished:
                output = await stream.outputs.get()
                if isinstance(output, Exception):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            self._open.discard(stream)
            if not finished:
                self._abort(request_id)

    async def embed(
        self, prompt: Prompt, request_id: str, *, priority: int = 0
    ) -> RequestOutput:
        """The prompt's `pooled` hidden states, as the scheduler comes to it; being
        cancelled aborts it. UserError before any work if it can't be served."""
        if self.pooling is None:
            raise UserError("This server gives no embeddings: it has --convert none.")
        params = SamplingParams(max_tokens=None, detokenize=False)
        type = self.pooling.type
        stream = self.generate(
            prompt, params, request_id, priority=priority, pooling=type
        )
        async with aclosing(stream):
            return await anext(stream)

    async def _accept(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        priority: int,
        add_special_tokens: bool,
        pooling: str | None,
    ) -> Ask:
        def accept() -> Ask:
            return self._engine.intake.accept(
                request_id,
                prompt,
                params,
                priority=priority,
                add_special_tokens=add_special_tokens,
                pooling=pooling,
            )

        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        size = len(text) if isinstance(text, str) else 0
        slow = params.bad_words or params.structured_outputs is not None
        if size > LONG_TEXT or slow:
            return await asyncio.to_thread(accept)
        return accept()

    def _enter(self, ask: Ask, stream: _Stream) -> None:
        def add() -> None:
            try:
                self._engine.add(ask)
            except Exception as error:
                stream.put(error)
            else:  # nothing is delivered before the next step
                self._streams[ask.id] = stream

        self._inbox.put(add)
        if self._stopped:  # set before the inbox is emptied: one of the two sees it
            stream.put(EngineDead("the engine has ended"))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with reason "abort"."""
        self._abort(request_id)

    def _abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._engine.abort_request(request_id))

    def _check_open(self) -> None:
        if self._error is not None:
            raise EngineDead(f"the engine has died: {self._error!r}")
        if self._stopped or self._draining:
            raise EngineDead("the engine is shutting down")

    # Pauses: new requests wait for the end of one.
    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume` or `wake_up`."""
        return self._paused

    @property
    def is_sleeping(self) -> bool:
        """Whether the KV tensors are gone until `wake_up`."""
        return self._asleep

    async def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Hold new requests back; those under way are aborted, waited for, or kept
        where they are. With nothing under way, `clear_cache` forgets all prefixes."""
        if mode not in PAUSES:
            raise UserError(f"mode={mode!r} is not among {', '.join(PAUSES)}.", "mode")
        self._paused = True
        self._frozen = mode == "keep"
        if mode == "abort":
            await self._call(self._abort_all)
        while mode != "keep" and self._busy():
            await asyncio.sleep(POLL)
        if clear_cache and mode != "keep":
            await self._call(self._engine.reset_prefix_cache)

    async def resume(self) -> None:
        """Go on after a pause; UserError while asleep."""
        if self._asleep:
            raise UserError("The engine sleeps: wake it up.")
        self._paused = self._frozen = False
        self.nudge()

    def nudge(self) -> None:
        """Have the step loop take a turn, though it may be waiting for work."""
        self._inbox.put(lambda: None)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause; from level 1 on the KV tensors go too, and all cached prefixes.

        Level 2 would drop the weights, which nothing here could bring back.
        """
        if level not in (0, 1):
            raise UserError(f"level must be 0 or 1, got {level}.", "level")
        if level == 1 and mode == "keep":
            raise UserError("mode='keep' needs level=0: sleep drops the KV.", "mode")
        await self.pause(mode)
        if level == 1 and not self._asleep:
            self._asleep = True
            await self._call(self._engine.sleep)

    async def wake_up(self) -> None:
        """Take the KV tensors back and go on."""
        if self._asleep:
            await self._call(self._engine.wake_up)
            self._asleep = False
        await self.resume()

    async def reset_prefix_cache(self, preempt: bool = False) -> bool:
        """Forget every cached prefix; False while requests run that may not be
        preempted for it."""
        return await self._call(lambda: self._engine.reset_prefix_cache(preempt))

    def _abort_all(self) -> None:
        for request_id in list(self._streams):
            self._engine.abort_request(request_id)

    async def _call(self, act: Callable[[], T]) -> T:
        """What `act` returns or raises, run by the step loop between two steps."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(act())
            except Exception as error:
                answer.set_exception(error)

        self._check_open()
        self._inbox.put(run)
        while not answer.done():
            if not self.is_running:
                raise EngineDead("the engine has ended")
            await asyncio.sleep(POLL / 10)
        return answer.result()

    # The end.
    async def drain(self, timeout: float) -> None:
        """Refuse new requests, wait for those under way, abort the rest after
        `timeout` seconds."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._busy() and time.monotonic() < deadline:
            await asyncio.sleep(POLL)
        for request_id in list(self._streams):
            self._abort(request_id)
        grace = time.monotonic() + 5
        while self._busy() and time.monotonic() < grace:
            await asyncio.sleep(POLL)

    def _busy(self) -> bool:
        return self.is_running and bool(self._open)

    def shutdown(self) -> None:
        """End the step loop and wait for it; streams still open get EngineDead."""
        self._draining = True
        self._inbox.put(None)
        self._thread.join()

    # The step loop, the only thread that touches the engine.
    def _loop(self) -> None:
        try:
            pin_threads(self.parts.cores)
            while self._take_messages():
                self._turn()
            self._close(EngineDead("the engine is shutting down"))
        except Exception as error:
            log.critical("The engine has died.", exc_info=True)
            self._error = error
            self._close(EngineDead(f"the engine has died: {error!r}"))

    def _turn(self) -> None:
        """One step, or while frozen the news of what was aborted."""
        outputs = self._engine.take_late() if self._frozen else []
        if not self._frozen and self._engine.has_unfinished_requests():
            outputs = self._engine.step()
        self._deliver(outputs)
        if self.after_step is not None:
            self.after_step(self._engine)

    def _take_messages(self) -> bool:
        """Act on what has arrived, waiting if there is nothing else to do; False at
        the end."""
        wait = self._frozen or not self._engine.has_unfinished_requests()
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            message()
            wait = False
        return True

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand over what a step made, waking each event loop once: a wake is a write
        to its socket and a turn of the interpreter's lock."""
        due: dict[asyncio.AbstractEventLoop, list[_Delivery]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                due.setdefault(stream.loop, []).append((stream.outputs, output))
                if output.finished:
                    del self._streams[output.request_id]
        for loop, deliveries in due.items():
            with suppress(RuntimeError):  # a loop that is gone wants nothing
                loop.call_soon_threadsafe(_put_all, deliveries)

    def _close(self, error: EngineDead) -> None:
        self._stopped = True
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()
        while not self._inbox.empty():  # arrivals that came too late
            message = self._inbox.get()
            if message is not None:
                with suppress(Exception):  # the engine may be broken
                    message()
        for stream in self._streams.values():
            stream.put(error)
