"""The page and the frames it draws; what a browser shows is tests/browser's."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from serve_live import Live, engine_for, serving, write_model

from pagedattn.request import SamplingParams
from pagedattn.serve.page import FILE
from pagedattn.serve.settings import ServeArgs
from pagedattn.testing import hash_engine
from pagedattn.viz.live import KEPT, WATCHED, Film

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
    live.http.get("/live/frames", headers=KEY)
    assert live.post("/v1/completions", LONG, headers=KEY).status_code == 200
    frames = live.http.get("/live/frames", headers=KEY).json()["frames"]
    steps = [frame["step"] for frame in frames]
    assert steps == sorted(set(steps)) and len(frames) > 100
    busy = [frame for frame in frames if frame["running"]]
    [[number, prompt, tokens, computed]] = busy[-1]["running"]
    assert (number, prompt) == (1, len(LONG["prompt"])) and computed <= tokens
    assert busy[0]["plan"] == [[1, prompt]] and busy[5]["plan"] == [[1, 1]]
    held = [block for block in busy[-1]["blocks"] if block[1]]
    assert sum(used for _, _, used, _ in held) == computed
    later = live.http.get(f"/live/frames?after={steps[-3]}", headers=KEY).json()
    assert [frame["step"] for frame in later["frames"]] == steps[-2:]


def test_nobody_looking_nothing_kept() -> None:
    now = [0.0]
    film = Film(lambda: now[0])
    engine = hash_engine(num_blocks=20, block_size=4)
    engine.add_request("secret", {"prompt_token_ids": [1, 2, 3]}, SamplingParams())
    film.after_step(engine)
    assert film.look() == []
    engine.step()
    film.after_step(engine)
    [frame] = film.look()
    assert frame["step"] == 2 and "secret" not in str(frame)
    now[0] = WATCHED + 1
    film.after_step(engine)
    assert len(film.look()) == 1
    for _ in range(2 * KEPT):
        film.after_step(engine)
    assert len(film.look()) == KEPT


def test_shared_blocks_have_several_holders() -> None:
    film = Film(time.monotonic)
    film.look()
    engine = hash_engine(num_blocks=20, block_size=4)
    for name in ("a", "b"):
        prompt = {"prompt_token_ids": [*range(9), ord(name)]}
        engine.add_request(name, prompt, SamplingParams(max_tokens=4))
    engine.step()
    film.after_step(engine)
    [frame] = film.look()
    assert [b[1] for b in frame["blocks"] if len(b[1]) > 1] == [[1, 2], [1, 2]]
    assert frame["pool"] - frame["free"] == len([b for b in frame["blocks"] if b[1]])
