"""`pagedattn run-batch`: every line answered, in order, whatever is wrong with some."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_live import engine_for, write_model

from pagedattn.async_engine import AsyncEngine
from pagedattn.serve import batch
from pagedattn.serve.cli import main
from pagedattn.serve.front import Front, front_for
from pagedattn.serve.settings import ServeArgs

CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[AsyncEngine]:
    engine = engine_for(folder, max_num_seqs=4)
    yield engine
    engine.shutdown()


@pytest.fixture
def front(engine: AsyncEngine) -> Front:
    return front_for(engine, ServeArgs(max_body_bytes=4_096))


def line(i: int, url: str = CHAT, **body: object) -> str:
    if url == CHAT:
        body = {"messages": HI, "max_tokens": 4, "temperature": 0, **body}
    return json.dumps(
        {"custom_id": f"c{i}", "method": "POST", "url": url, "body": body}
    )


def answers(front: Front, lines: list[str], tmp_path: Path) -> list[dict]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    count, failed = asyncio.run(batch.run(front, source, target, False))
    found = [json.loads(text) for text in target.read_text("utf-8").splitlines()]
    assert count == len(found)
    assert failed == sum(a["error"] is not None for a in found)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    return found


def test_every_url(front: Front, tmp_path: Path) -> None:
    lines = [
        line(0),
        line(1, "/v1/completions", prompt="a", max_tokens=3),
        line(2, EMBED, input=["a", "b"]),
        line(3, "/v1/score", text_1="a", text_2=["a", "b"]),
        line(4, "/v1/rerank", query="a", documents=["b", "a"]),
    ]
    found = answers(front, lines, tmp_path)
    assert [a["custom_id"] for a in found] == [f"c{i}" for i in range(5)]
    assert all(a["response"]["status_code"] == 200 and not a["error"] for a in found)
    bodies = [a["response"]["body"] for a in found]
    assert bodies[0]["object"] == "chat.completion"
    assert bodies[1]["object"] == "text_completion"
    assert len(bodies[2]["data"]) == 2
    assert bodies[3]["data"][0]["score"] == pytest.approx(1)
    assert bodies[4]["results"][0]["index"] == 1


@pytest.mark.parametrize(
    ("bad", "status", "word"),
    [
        ("{", 400, "JSON"),
        ("[]", 400, "object"),
        ('{"url": "/v1/embeddings"}', 400, "custom_id"),
        (line(7, "/v1/nothing"), 400, "url"),
        (line(7).replace("POST", "GET"), 400, "method"),
        (line(7, stream=True), 400, "stream"),
        (line(7, model="other"), 404, "other"),
        (line(7, temperature=9), 400, "temperature"),
        (line(7, prompt="x" * 5_000), 413, "4096"),
        ('{"custom_id": "c7", "url": "/v1/embeddings", "body": 3}', 400, "object"),
    ],
)
def test_a_bad_line_fails_alone(
    front: Front, tmp_path: Path, bad: str, status: int, word: str
) -> None:
    first, middle, last = answers(front, [line(0), bad, line(1)], tmp_path)
    assert middle["response"]["status_code"] == status
    assert word in middle["error"]["message"]
    for i, answer in enumerate((first, last)):
        assert answer["custom_id"] == f"c{i}" and answer["error"] is None


def test_many_lines_keep_their_order_in_a_window(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = most = 0
    real = batch.answered

    async def counted(*args: object) -> dict:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await real(*args)
        finally:
            under_way -= 1

    monkeypatch.setattr(batch, "answered", counted)
    lines = [line(i, max_tokens=1 + i % 7) for i in range(40)]
    found = answers(front, [*lines, "", "  "], tmp_path)
    assert [a["custom_id"] for a in found] == [f"c{i}" for i in range(40)]
    for i, answer in enumerate(found):
        assert answer["response"]["body"]["usage"]["completion_tokens"] <= 1 + i % 7
    assert 4 <= most <= batch.AHEAD * 4


def test_a_failure_leaves_what_was_there(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line(0))
    target.write_text("before")

    async def broken(*args: object) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "answered", broken)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(batch.run(front, source, target, False))
    assert target.read_text() == "before" and len(list(tmp_path.iterdir())) == 2


@given(st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b""))))
def test_long_lines_are_cut_and_none_is_lost(lines: list[bytes]) -> None:
    read = io.BytesIO(b"".join(text + b"\n" for text in lines))
    found = list(batch._lines(read, 10))
    assert [f.rstrip(b"\n") for f in found] == [text[:11] for text in lines]


def test_the_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line(0) + "\n" + line(1, temperature=9))
    argv = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(folder)]
    assert main([*argv, "--num-gpu-blocks-override", "65", "--disable-tqdm"]) == 0
    assert "2 lines, 1 failed" in capsys.readouterr().out
    assert len(target.read_text().splitlines()) == 2


@pytest.mark.parametrize("which", ["input", "output"])
def test_missing_files_are_one_line(
    which: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "in"
    if which == "output":
        source.write_text("")
    target = tmp_path / "none" / "out"
    assert main(["run-batch", "-i", str(source), "-o", str(target)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and which in said
