"""Visits without a network, and their picture in lanes: real app, real threads."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagedattn.async_engine import AsyncEngine
from pagedattn.config import EngineArgs
from pagedattn.serve.app import build_app
from pagedattn.testing import make_tiny_model
from pagedattn.viz.lanes import lanes
from pagedattn.viz.visit import (
    CLIENT,
    ENGINE,
    LOOP,
    Diary,
    Turnstile,
    Visitor,
    tokens,
    watched,
)

BODY = {"prompt": list(range(40, 80)), "max_tokens": 12, "ignore_eos": True}
STREAMED = {**BODY, "stream": True, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    """The real engine around a tiny model, in blocks of 16."""
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    args = EngineArgs(str(folder), num_gpu_blocks_override=33, num_threads=1)
    engine = AsyncEngine.from_args(args)
    yield engine
    engine.shutdown()


async def leave(serving: AsyncEngine, diary: Diary, after: int) -> Visitor:
    """One visitor who leaves while the plan after chunk `after` is running."""
    gate = Turnstile()

    def read(chunk: bytes) -> None:
        diary.note(LOOP, "writes", ENGINE)
        diary.note(CLIENT, "reads", LOOP)
        if len(ann.chunks) == after:
            gate.meet()
            diary.note(CLIENT, "hangs up")
        else:
            gate.go()

    ann = Visitor(build_app(serving), leave_after=after, on_chunk=read)
    with watched(serving, diary, gate):
        diary.note(CLIENT, "posts")
        gate.go()
        await ann.post("/v1/completions", STREAMED)
        gate.go()
        while serving.parts.engine.has_unfinished_requests():
            await asyncio.sleep(0.01)
    return ann


@pytest.mark.parametrize("after", [1, 3])
def test_a_visit_goes_the_same_way_each_time(serving: AsyncEngine, after: int) -> None:
    diary = Diary()
    ann = asyncio.run(leave(serving, diary, after))
    assert len(ann.chunks) == after and ann.status == 200
    told = [(m.lane, m.text) for m in diary.moments]
    assert told[:3] == [
        (CLIENT, "posts"),
        (LOOP, "40 tokens into the inbox"),
        (ENGINE, "takes the request"),
    ]
    assert told[-4:] == [
        (CLIENT, "hangs up"),
        (LOOP, "an abort into the inbox"),
        (ENGINE, "runs a plan of 1 token"),
        (ENGINE, "takes the abort: 3 blocks free"),
    ]
    assert sum(text.startswith("runs") for _, text in told) == after + 1
    times = [m.at for m in diary.moments]
    assert times == sorted(times)
    assert {m.thread for m in diary.moments if m.lane == ENGINE} == {"engine"}
    assert "engine" not in {m.thread for m in diary.moments if m.lane != ENGINE}
    serving.parts.engine.check()


def test_watching_leaves_nothing_behind(serving: AsyncEngine) -> None:
    engine = serving.parts.engine
    before = [dict(vars(owner)) for owner in (serving, engine, engine.runner)]
    with watched(serving, Diary(), Turnstile()):
        assert "run" in vars(engine.runner)
    after = [vars(owner) for owner in (serving, engine, engine.runner)]
    assert [set(v) for v in after] == [set(v) for v in before]


def test_a_visitor_reads_what_a_client_would(serving: AsyncEngine) -> None:
    async def both() -> tuple[bytes, bytes, int]:
        app = build_app(serving)
        whole = await Visitor(app).post(
            "/v1/completions", {**STREAMED, "stream": False}
        )
        stream = await Visitor(app).post("/v1/completions", STREAMED, "mine")
        return whole, stream, await Visitor(app).get("/health")

    whole, stream, health = asyncio.run(both())
    frames = stream.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""] and health == 200
    chunks = [json.loads(f.removeprefix("data: ")) for f in frames[:-2]]
    assert {chunk["id"] for chunk in chunks} == {"cmpl-mine"}
    found = [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]
    assert found == json.loads(whole)["choices"][0]["token_ids"] and len(found) == 12


def test_lanes_draw_each_moment_and_an_arrow_for_each_cause() -> None:
    diary = Diary()
    diary.note("a", "asks")
    diary.note("b", "hears", after="a")
    diary.note("b", "works")
    diary.note("a", "has it", after="b")
    assert [m.cause for m in diary.moments] == [None, 0, None, 2]
    figure = lanes(diary.moments)
    assert figure.svg.count("<path") == 2 and "4 moments" in figure.alt
    assert figure.text.splitlines() == [
        " 1  a  asks",
        " 2    b  hears",
        " 3    b  works",
        " 4  a  has it",
    ]


def test_numbers_of_tokens_in_words() -> None:
    assert [tokens(n) for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
