"""A film of the real scheduler: after every event, who held what, and which line acted.

`Camera.emit` goes where an emitter is wanted and, unlike `trace.Recorder`, looks at the
books each time, which costs time in proportion to the pool: for small pools and curious
people. Drawn by `strip` and `player`. Chapter 00 shows one.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pagedattn
from pagedattn.cache.tables import blocks_for
from pagedattn.request import Request
from pagedattn.scheduler import Scheduler
from pagedattn.trace import Recorder

ROOT = Path(pagedattn.__file__).parents[1]
SENTENCES = {
    "add": "{request} joins the line with {tokens}",
    "share": "block {blocks} is shared: one more table holds it",
    "evict": "block {blocks} forgets the prefix that it cached",
    "take": "block {blocks} is taken",
    "admit": "{request} is admitted with {tokens} found in the cache",
    "compute": "{request} computes {tokens}",
    "free": "block {blocks} is free",
    "preempt": "{request} is preempted and waits again",
    "finish": "{request} has ended",
}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source: where it stands, what it says, who called whom to get there."""

    file: str
    number: int
    text: str
    calls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block at one moment. `words` are those of its slots that are computed."""

    id: int
    holders: tuple[str, ...]
    words: tuple[str, ...]
    hash: str | None
    chain: tuple[tuple[str, str], ...]  # (hash, words) from the first block to this


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request at one moment."""

    id: str
    tokens: int
    computed: int


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment: what happened, which line did it, and how things stood after."""

    step: int
    kind: str
    text: str
    acted: tuple[int, ...]
    line: Line
    blocks: tuple[BlockState, ...]
    free: tuple[int, ...]  # in order of reuse
    running: tuple[RequestState, ...]
    waiting: tuple[RequestState, ...]


@dataclass(frozen=True, slots=True)
class Film:
    """Frames in order, of blocks of `block_size` slots."""

    block_size: int
    frames: tuple[Frame, ...]

    def data(self) -> dict[str, Any]:
        """The film as plain lists and dictionaries, for a page to play."""
        return asdict(self)

    def ends(self) -> list[Frame]:
        """The last frame of every step."""
        last = {frame.step: frame for frame in self.frames}
        return [last[step] for step in sorted(last)]


@dataclass(slots=True)
class _Known:
    """What a hash stands for: its parent and its words."""

    parent: bytes | None
    words: str


@dataclass(slots=True)
class Camera:
    """Films one scheduler. Give it `emit`, then `watch` it; `tick` ends a step."""

    word: Callable[[int | None], str] = str
    recorder: Recorder = field(default_factory=Recorder)
    frames: list[Frame] = field(default_factory=list)
    _scheduler: Scheduler | None = None
    _known: dict[bytes, _Known] = field(default_factory=dict)

    def watch(self, scheduler: Scheduler) -> None:
        """Film `scheduler`, whose emitter is this camera's."""
        self._scheduler = scheduler

    def tick(self) -> None:
        """The events that follow belong to the next step."""
        self.recorder.tick()

    def film(self) -> Film:
        """Everything so far."""
        assert self._scheduler is not None, "watch a scheduler first"
        return Film(self._scheduler.config.block_size, tuple(self.frames))

    def emit(
        self,
        kind: str,
        request: str | None = None,
        blocks: Iterable[int] = (),
        amount: int = 0,
    ) -> None:
        """Record an event and how things stand after it."""
        self.recorder.emit(kind, request, blocks, amount)
        if self._scheduler is None:
            return
        event = self.recorder.events[-1]
        names = ", ".join(map(str, event.blocks))
        tokens = f"{amount} token" + "s" * (amount != 1)
        text = SENTENCES[kind].format(request=request, blocks=names, tokens=tokens)
        self.frames.append(
            self._frame(event.step, kind, text, event.blocks, _line(sys._getframe(1)))
        )

    def _frame(
        self, step: int, kind: str, text: str, acted: tuple[int, ...], line: Line
    ) -> Frame:
        scheduler = self._scheduler
        assert scheduler is not None
        for request in (*scheduler.running, *scheduler.waiting):
            self._learn(request)
        return Frame(
            step,
            kind,
            text,
            acted,
            line,
            tuple(self._blocks(scheduler)),
            tuple(block.id for block in scheduler.pool.free),
            tuple(_state(request) for request in scheduler.running),
            tuple(_state(request) for request in scheduler.waiting),
        )

    def _learn(self, request: Request) -> None:
        """Note what each of the request's block hashes stands for."""
        size, parent = self._scheduler.config.block_size, None
        for i, digest in enumerate(request.hashes):
            tokens = request.tokens[i * size : (i + 1) * size]
            text = " ".join(map(self.word, tokens))
            self._known.setdefault(digest, _Known(parent, text))
            parent = digest

    def _blocks(self, scheduler: Scheduler) -> Iterable[BlockState]:
        holders: dict[int, list[str]] = {}
        words: dict[int, tuple[str, ...]] = {}
        for request, table in _held(scheduler):
            for i, id in enumerate(table):
                holders.setdefault(id, []).append(request.id)
                words[id] = tuple(self._words(request, i))
        for block in scheduler.pool.blocks[1:]:
            digest = block.key[0] if block.key else None
            yield BlockState(
                block.id,
                tuple(holders.get(block.id, ())),
                words.get(block.id) or self._cached(digest),
                digest.hex()[:8] if digest else None,
                tuple(self._chain(digest)),
            )

    def _words(self, request: Request, i: int) -> list[str]:
        size = self._scheduler.config.block_size
        end = min((i + 1) * size, request.computed)
        known = request.tokens[i * size : end]
        return [*map(self.word, known), *[""] * (end - i * size - len(known))]

    def _cached(self, digest: bytes | None) -> tuple[str, ...]:
        known = self._known.get(digest)
        return tuple(known.words.split(" ")) if known else ()

    def _chain(self, digest: bytes | None) -> list[tuple[str, str]]:
        chain = []
        while digest is not None and digest in self._known:
            known = self._known[digest]
            chain.append((digest.hex()[:8], known.words))
            digest = known.parent
        return chain[::-1]


def _held(scheduler: Scheduler) -> Iterable[tuple[Request, tuple[int, ...]]]:
    """Running requests with their tables; in the middle of an act some have none."""
    for request in scheduler.running:
        try:
            table = scheduler.tables.ids(request)[0]
        except KeyError:
            continue
        yield (
            request,
            table[: blocks_for(request.num_tokens, scheduler.config.block_size)],
        )


def _state(request: Request) -> RequestState:
    return RequestState(request.id, request.num_tokens, request.computed)


def _line(frame: FrameType) -> Line:
    """The line that `frame` is at, and our own functions on the way to it."""
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno).strip()
    return Line(_file(frame), frame.f_lineno, text, tuple(_calls(frame))[::-1])


def _file(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def _calls(frame: FrameType | None) -> Iterator[str]:
    """Qualified names of the engine's functions, innermost first."""
    while frame is not None and _file(frame).startswith("pagedattn/"):
        inner = "<" in frame.f_code.co_name  # a comprehension; some Pythons have none
        if not inner and "/viz/" not in _file(frame):
            yield frame.f_code.co_qualname
        frame = frame.f_back
