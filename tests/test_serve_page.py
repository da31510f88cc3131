"""The page and the frames it draws; what a browser shows is tests/browser's."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_live import Live, engine_for, serving, write_model

from pagedattn.engine import Engine
from pagedattn.request import SamplingParams
from pagedattn.scheduler import Scheduler
from pagedattn.serve.page import FILE
from pagedattn.serve.settings import ServeArgs
from pagedattn.testing import hash_engine
from pagedattn.trace import silence
from pagedattn.viz.live import KEPT, STRIDE, WATCHED, Film, Frame

KEY = {"Authorization": "Bearer sesame"}
LONG = {"prompt": "a long story of many blocks", "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine = engine_for(write_model(tmp_path_factory.mktemp("tiny")))
    with serving(engine, ServeArgs(api_key=["sesame"])) as live:
        yield live
    engine.shutdown()


def test_the_page_is_open_and_asks_nothing_of_others(live: Live) -> None:
    reply = live.http.get("/")
    assert reply.status_code == 200 and reply.headers["content-type"][:9] == "text/html"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for kind in ("script", "style"):
        assert re.search(f"{kind}-src 'sha256-", policy)
        assert len(re.findall(f"<{kind}>", reply.text)) == 1
    assert not re.search(r"(src|href|action)=\"?(https?:)?//", reply.text)
    assert not re.search(r"\son\w+=|style=|innerHTML|eval\(", FILE.read_text())


def test_frames_need_the_key_and_a_number(live: Live) -> None:
    assert live.http.get("/live/frames").status_code == 401
    for after in ("-1", "x", "9" * 20):
        reply = live.http.get(f"/live/frames?after={after}", headers=KEY)
        assert reply.status_code == 400


def test_frames_of_a_live_engine(live: Live) -> None:
    first = live.http.get("/live/frames", headers=KEY).json()["frames"]
    assert first == [] or "books" in first[0]
    assert live.post("/v1/completions", LONG, headers=KEY).status_code == 200
    frames = frames_with(live, 200)
    steps = [frame["step"] for frame in frames]
    assert steps == sorted(set(steps)) and len(frames) > 100
    prompt = len(LONG["prompt"])
    plans = [[e[3] for e in f["events"] if e[0] == "compute"] for f in frames]
    assert [plan for plan in plans if plan] == [[prompt], *[[1]] * 199]
    follower = Follower()
    for frame in frames:
        follower.follow(frame)
        assert len(follower.running) == frame["running"]
    later = live.http.get(f"/live/frames?after={steps[-3]}", headers=KEY).json()
    assert [frame["step"] for frame in later["frames"]] == steps[-2:]


def frames_with(live: Live, steps: int) -> list[Frame]:
    """The film once it has so many: an answer is on its way before its last frame."""
    for _ in range(200):
        frames = live.http.get("/live/frames", headers=KEY).json()["frames"]
        if sum(any(e[0] == "compute" for e in f["events"]) for f in frames) >= steps:
            break
        time.sleep(0.05)
    return frames


def test_an_idle_engine_shows_its_books_to_who_looks(live: Live) -> None:
    for _ in range(200):
        frames = live.http.get("/live/frames", headers=KEY).json()["frames"]
        if frames:
            break
        time.sleep(0.05)
    assert frames[0]["books"]["pool"] >= frames[0]["free"] > 0


# A film follows the trace, and who follows the film knows the books.
@dataclass
class Follower:
    """What a page knows: requests as [prompt, tokens computed], and their blocks."""

    running: dict[int, list[int]] = field(default_factory=dict)
    waiting: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, list[list[int]]] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)

    def follow(self, frame: Frame) -> None:
        """Take a frame in; one with the whole books agrees with what was known."""
        frame = json.loads(json.dumps(frame))
        for kind, number, blocks, amount, _ in frame["events"]:
            {"keep": self.cached.update}.get(kind, self.cached.difference_update)(
                blocks
            )
            getattr(self, f"on_{kind}", lambda *_: None)(number, amount)
        for number, rows in frame["rows"].items():
            self.tables[int(number)] = self.grown(self.tables.get(int(number)), rows)
        if books := frame.get("books"):
            known = self.running, self.tables, self.cached
            self.open(books)
            if known[0]:
                assert known == (self.running, self.tables, self.cached)

    def open(self, books: Frame) -> None:
        """How things stand, whatever was known before."""
        self.running = {n: [prompt, c] for n, prompt, _, c in books["running"]}
        self.waiting = {n: [prompt, c] for n, prompt, _, c in books["waiting"]}
        self.tables = {int(n): self.grown(None, r) for n, r in books["tables"].items()}
        self.cached = set(books["cached"])

    def grown(self, old: list[list[int]] | None, rows: list[Any]) -> list[list[int]]:
        """Tables after their rows have come."""
        old = old or [[] for _ in rows]
        tables = [
            table[:start] + [*ids]
            for table, (start, _, ids) in zip(old, rows, strict=True)
        ]
        for table, (_, cut, _) in zip(tables, rows, strict=True):
            table[:cut] = [0] * cut
        return tables

    def on_add(self, number: int, amount: int) -> None:
        """A request joins the line."""
        self.waiting[number] = [amount, 0]

    def on_admit(self, number: int, amount: int) -> None:
        """It runs, with a hit."""
        prompt, _ = self.waiting.pop(number)
        self.running[number] = [prompt, amount]

    def on_compute(self, number: int, amount: int) -> None:
        """It computes."""
        self.running[number][1] += amount

    def on_preempt(self, number: int, amount: int) -> None:
        """Back to the line, with nothing."""
        self.waiting[number] = [self.running.pop(number)[0], 0]
        del self.tables[number]

    def on_finish(self, number: int, amount: int) -> None:
        """It is gone."""
        for known in (self.running, self.waiting, self.tables):
            known.pop(number, None)

    def holders(self) -> dict[int, list[list[int]]]:
        """Who holds each block, told apart by prompt and tokens computed."""
        found: dict[int, list[list[int]]] = {}
        for number, tables in self.tables.items():
            for id in chain(*tables):
                found.setdefault(id, []).append(self.running[number])
        return {id: sorted(who) for id, who in found.items() if id}


def holders(scheduler: Scheduler) -> dict[int, list[list[int]]]:
    """The same from the books."""
    found: dict[int, list[list[int]]] = {}
    for request in scheduler.running:
        for id in chain(*scheduler.tables.ids(request)):
            found.setdefault(id, []).append([request.prompt_len, request.computed])
    return {id: sorted(who) for id, who in found.items() if id}


def ask(engine: Engine, name: str, n: int, tokens: int) -> None:
    """A request whose prompt begins like all others'."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.add_request(name, {"prompt_token_ids": [*range(n - 1), 500 + n]}, params)


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 30), st.integers(1, 25)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.sampled_from(["preempt", "forget"]), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 9), st.just(0)),
    ),
    max_size=40,
)


@given(ACTS, st.sampled_from([(0, 0), (0, 6), (5, 9)]), st.integers(14, 30))
def test_frames_tell_what_the_books_say(
    acts: list[tuple[str, int, int]], windows: tuple[int, int], blocks: int
) -> None:
    """Hits, preemptions, aborts, windows and resets included."""
    engine = hash_engine(
        windows, num_blocks=blocks, block_size=4, max_num_batched_tokens=16
    )
    film, follower, seen, names = Film(), Follower(), 0, count()
    film.look()
    film.after_step(engine)
    for act, a, b in [*acts, ("step", 30, 0)]:
        if act == "ask" and a + b <= engine.scheduler.tables.capacity():
            ask(engine, f"r{next(names)}", a, b)
        elif act == "abort":
            engine.abort_request(f"r{a}")
        elif act == "preempt":
            engine.scheduler.preempt_all()
        elif act == "forget":
            engine.reset_prefix_cache()
        for _ in range(a if act == "step" else 0):
            if engine.has_unfinished_requests():
                engine.step()
            film.after_step(engine)
            for frame in film.look(seen):
                follower.follow(frame)
                seen = frame["step"]
            scheduler = engine.scheduler
            assert follower.holders() == holders(scheduler)
            assert follower.cached == {b.id for b in scheduler.pool.free if b.key}
            assert len(follower.waiting) == len(scheduler.waiting)


def test_shared_blocks_have_several_holders() -> None:
    film, follower = Film(), Follower()
    engine = hash_engine(num_blocks=20, block_size=4)
    film.look()
    film.after_step(engine)
    for name, n in (("a", 10), ("b", 11)):
        ask(engine, name, n, 4)
    engine.step()
    film.after_step(engine)
    for frame in film.look():
        follower.follow(frame)
    assert [len(who) for who in follower.holders().values()].count(2) == 2


def test_nobody_looking_nothing_heard_and_nothing_kept() -> None:
    now = [0.0]
    woken: list[float] = []
    film = Film(lambda: woken.append(now[0]), lambda: now[0])
    engine = hash_engine(num_blocks=20, block_size=4)
    ask(engine, "secret", 3, 99)
    film.after_step(engine)
    assert engine.scheduler._emit is engine.scheduler.pool._emit is silence
    assert film.look() == [] and woken == [0.0]
    for _ in range(2):
        engine.step()
        film.after_step(engine)
    first, second = film.look()
    assert first["step"] == 2 and "books" in first and "books" not in second
    assert "secret" not in str([first, second]) and len(woken) == 1
    now[0] = WATCHED + 1
    engine.step()
    film.after_step(engine)
    assert engine.scheduler._emit is engine.scheduler.pool._emit is silence
    assert film.look() == [] and not any(map(len, (film._numbers, film._tables)))


def test_a_long_film_is_cut_and_still_begins_with_the_books() -> None:
    film = Film(clock=lambda: 0.0)
    engine = hash_engine(num_blocks=300, block_size=4)
    ask(engine, "long", 3, 2 * KEPT + 3 * STRIDE)
    film.look()
    while engine.has_unfinished_requests():
        engine.step()
        film.after_step(engine)
        frames = film.look()
        assert len(frames) <= KEPT + STRIDE and "books" in frames[0]
    assert len(frames) > KEPT


def test_a_step_with_too_many_events_says_how_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagedattn.viz.live.MOST_EVENTS", 3)
    film, follower = Film(), Follower()
    engine = hash_engine(num_blocks=30, block_size=4)
    film.look()
    film.after_step(engine)
    for i in range(5):
        ask(engine, f"r{i}", 5, 4)
    engine.step()
    film.after_step(engine)
    _, last = film.look()
    assert len(last["events"]) == 3 and len(last["books"]["running"]) == 5
    follower.open(last["books"])
    assert follower.holders() == holders(engine.scheduler)
