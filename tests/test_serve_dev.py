"""Pauses, sleep and an emptied prefix cache, on the real engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serve_live import Live, engine_for, serving, write_model

from pagedattn.async_engine import AsyncEngine
from pagedattn.serve.settings import ServeArgs

COMPLETIONS = "/v1/completions"
PROMPT = "the same forty-eight characters, three blocks' worth"
LONG = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    engine = engine_for(write_model(tmp_path_factory.mktemp("tiny")), max_num_seqs=4)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def shared(engine: AsyncEngine) -> Iterator[Live]:
    with serving(engine, ServeArgs(enable_dev_mode=True)) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Iterator[Live]:
    """The server, awake and idle before and after."""
    yield shared
    assert shared.post("/wake_up", "").status_code == 200
    shared.wait_idle()


def cached(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def begin(live: Live, **body: Any) -> tuple[threading.Thread, list[dict[str, Any]]]:
    """Post a request in a thread; its answer comes into the list."""
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        answers.append(live.post(COMPLETIONS, {**LONG, **body}).json())

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def wait_running(live: Live) -> None:
    deadline = time.monotonic() + 10
    while not live.engine._engine.scheduler.running:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_routes_are_closed_unless_opened(engine: AsyncEngine) -> None:
    assert ServeArgs().dev_mode({}) is False
    assert ServeArgs().dev_mode({"VLLM_SERVER_DEV_MODE": "1"})
    with serving(engine, ServeArgs()) as live:
        for path in ("/sleep", "/pause", "/reset_prefix_cache", "/wake_up"):
            assert live.post(path, "").status_code == 404


def test_reset_prefix_cache(live: Live) -> None:
    live.complete(prompt=PROMPT, max_tokens=1)
    assert cached(live.complete(prompt=PROMPT, max_tokens=1)) == 48
    assert live.post("/reset_prefix_cache", "").status_code == 200
    assert cached(live.complete(prompt=PROMPT, max_tokens=1)) == 0


def test_reset_while_running_needs_leave_and_changes_no_token(live: Live) -> None:
    alone = live.complete(**LONG)["choices"][0]["text"]
    thread, answers = begin(live)
    wait_running(live)
    assert live.post("/pause?mode=keep", "").status_code == 200
    reply = live.post("/reset_prefix_cache", "")
    assert reply.status_code == 409 and "running" in reply.json()["error"]["message"]
    leave = "/reset_prefix_cache?reset_running_requests=true"
    assert live.post(leave, "").status_code == 200
    assert live.post("/resume", "").status_code == 200
    thread.join(30)
    assert answers[0]["choices"][0]["text"] == alone


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_and_resume(live: Live, mode: str) -> None:
    alone = live.complete(**LONG)["choices"][0]["text"]
    old, answers = begin(live)
    wait_running(live)
    assert live.post(f"/pause?mode={mode}", "").status_code == 200
    assert live.http.get("/is_paused").json() == {"is_paused": True}
    frozen = live.engine._engine.scheduler.running
    assert len(frozen) == (mode == "keep")
    computed = [request.computed for request in frozen]
    new, later = begin(live, max_tokens=3)
    time.sleep(0.2)
    assert not later and [request.computed for request in frozen] == computed
    assert live.http.get("/health").status_code == 200
    assert live.post("/resume", "").status_code == 200
    assert live.http.get("/is_paused").json() == {"is_paused": False}
    for thread in (old, new):
        thread.join(30)
    choice = answers[0]["choices"][0]
    if mode == "abort":
        assert choice["finish_reason"] == "abort"
    else:
        assert (choice["finish_reason"], choice["text"]) == ("length", alone)
    assert later[0]["usage"]["completion_tokens"] == 3
    assert alone.startswith(later[0]["choices"][0]["text"].rstrip("\ufffd"))


def test_a_client_that_leaves_during_a_pause_leaves_nothing(live: Live) -> None:
    begin_one, _ = begin(live)
    wait_running(live)
    assert live.post("/pause?mode=keep", "").status_code == 200
    with pytest.raises(Exception, match="timed out"):
        live.post(COMPLETIONS, LONG, timeout=0.2)
    assert live.post("/pause?mode=abort", "").status_code == 200
    begin_one.join(10)
    assert not begin_one.is_alive()
    live.engine._engine.check()
    assert live.post("/resume", "").status_code == 200


def test_sleep_drops_the_kv_and_waking_restores(live: Live) -> None:
    alone = live.complete(**LONG)["choices"][0]["text"]
    assert live.post("/sleep?level=1", "").status_code == 200
    runner = live.engine._engine.runner
    assert live.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert runner.caches == []
    assert live.post("/sleep", "").status_code == 200  # once more changes nothing
    gauge = (
        'vllm:engine_sleep_state{{engine="0",model_name="tiny",sleep_state="{}"}} {}'
    )
    text = live.http.get("/metrics").text
    assert gauge.format("awake", "0.0") in text
    assert gauge.format("weights_offloaded", "1.0") in text
    assert live.post("/resume", "").status_code == 400
    waiting, answers = begin(live)
    time.sleep(0.1)
    assert not answers
    assert live.post("/wake_up", "").status_code == 200
    waiting.join(30)
    assert answers[0]["choices"][0]["text"] == alone and cached(answers[0]) == 0
    assert live.http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert gauge.format("awake", "1.0") in live.http.get("/metrics").text


@pytest.mark.parametrize(
    "path",
    [
        *("/pause?mode=never", "/pause?clear_cache=perhaps", "/sleep?level=2"),
        *("/sleep?level=x", "/sleep?mode=keep", "/sleep?level=1&mode=no"),
        "/reset_prefix_cache?reset_running_requests=7",
    ],
)
def test_what_makes_no_sense_is_refused(live: Live, path: str) -> None:
    assert live.post(path, "").status_code == 400
    assert live.http.get("/is_paused").json() == {"is_paused": False}
