"""The ladder: every rung says the same tokens, and counts what it must. No seconds."""

import json
from itertools import count
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
import torch
from pagedattn.kernels import cpu, spec

from pagedattn.bench import ladder
from pagedattn.bench.ladder import BLOCK, CHUNK, PATTERN, ROOM, SEATS, Row, Rung
from pagedattn.errors import UserError
from pagedattn.model import linear
from pagedattn.model.source import Source, resolve
from pagedattn.serve.cli import main
from pagedattn.testing import make_tiny_model
from pagedattn.viz.figure import chart

PREFIX = 48
N = 12


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return resolve(str(make_tiny_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def rows(found: Source) -> dict[Rung, Row]:
    return {row.rung: row for row in ladder.climb(found, N, PREFIX)}


def asks(n: int = N) -> list[ladder.Ask]:
    return ladder.workload(n, PREFIX, 260)


def test_every_rung_says_the_same(rows: dict[Rung, Row]) -> None:
    assert list(rows) == list(Rung)
    truth = rows[Rung.STATIC].tokens
    for rung, row in rows.items():
        assert row.requests == rung.share(N) and row.parted == 0
        assert row.tokens == truth[: row.requests], rung
        assert row.output == sum(len(t) for t in row.tokens)


def test_the_work_repeats_its_pattern() -> None:
    made = asks(9)
    assert len({ask.prompt[:PREFIX] for ask in made}) == 1
    lengths = [(len(ask.prompt) - PREFIX, ask.output) for ask in made]
    assert lengths == [*PATTERN, *PATTERN, PATTERN[0]]
    with pytest.raises(UserError, match="num_prompts=0"):
        asks(0)


def test_without_a_cache_every_token_costs_the_whole_row(rows: dict[Rung, Row]) -> None:
    row, (first, *_) = rows[Rung.NAIVE], asks()
    assert row.passes == first.output
    assert row.computed == sum(len(first.prompt) + i for i in range(first.output))
    assert row.held == row.gap_tokens == 0


def test_alone_every_token_is_a_pass(rows: dict[Rung, Row]) -> None:
    row, mine = rows[Rung.CACHE], asks()[: len(PATTERN)]
    assert row.passes == row.output == sum(ask.output for ask in mine)
    assert row.computed == sum(len(ask.prompt) + ask.output - 1 for ask in mine)
    assert row.gap_tokens == 1


def test_a_static_batch_is_as_long_as_its_longest_answer(
    rows: dict[Rung, Row],
) -> None:
    row = rows[Rung.STATIC]
    batches = [asks()[i : i + ROOM] for i in range(0, N, ROOM)]
    assert row.passes == sum(max(ask.output for ask in batch) for batch in batches)
    assert row.held == ROOM * ladder.longest(asks()) * row.passes


def test_reserving_computes_every_token_once(rows: dict[Rung, Row]) -> None:
    once = sum(len(ask.prompt) + ask.output - 1 for ask in asks())
    assert rows[Rung.STATIC].computed == rows[Rung.CONTINUOUS].computed == once
    assert rows[Rung.PAGED].computed >= once  # preempted requests compute again
    hits = PREFIX // BLOCK * BLOCK * (N - 1)
    assert rows[Rung.PREFIX].computed == once - hits


def test_each_idea_saves_passes_and_slots(rows: dict[Rung, Row]) -> None:
    passes = [rows[rung].passes for rung in Rung]
    assert sorted(passes[2:6], reverse=True) == passes[2:6]
    filled = [1 - row.empty / row.held for row in rows.values() if row.held]
    assert filled[1] < filled[2] < filled[3]  # static, continuous, paged
    assert all(0 <= row.empty <= row.held for row in rows.values())


def test_chunks_bound_the_gap(rows: dict[Rung, Row]) -> None:
    assert rows[Rung.PREFIX].gap_tokens > CHUNK == rows[Rung.CHUNKED].gap_tokens


def test_faster_kernels_change_no_count(rows: dict[Rung, Row]) -> None:
    lines = ladder.table([rows[r] for r in (Rung.CHUNKED, Rung.PACKED, Rung.FUSED)])
    chunked, packed, fused = (line[19:] for line in lines.splitlines()[1:])
    assert chunked == packed == fused


def test_one_pool_for_all() -> None:
    configs = [ladder.config_for(rung, asks()) for rung in Rung]
    assert len({config.num_blocks for config in configs}) == 1
    assert (configs[0].num_blocks - 1) * BLOCK >= ROOM * ladder.longest(asks())
    assert [c.max_num_seqs for c in configs[1:5]] == [1, ROOM, ROOM, SEATS]


def test_products_and_kernels_are_what_the_rung_says(found: Source) -> None:
    plain, packed, fused = (
        ladder.model_for(rung, found, 64)
        for rung in (Rung.NAIVE, Rung.PACKED, Rung.FUSED)
    )
    assert plain.kernels is spec and fused.kernels is cpu
    assert packed.kernels.silu_linear is cpu.silu_linear
    assert packed.kernels.add_rms_norm is spec.add_rms_norm
    assert plain.head.backend == "F.linear"
    assert packed.head.backend == fused.head.backend == linear.linear_backend()


def test_plain_products_end_with_their_block() -> None:
    chosen = linear.linear_backend
    with pytest.raises(ZeroDivisionError), ladder.plain_products():
        assert linear.linear_backend() == "F.linear"
        raise ZeroDivisionError
    assert linear.linear_backend is chosen


def test_rungs_may_part_only_where_the_model_wavers(
    found: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, work = ladder.model_for(Rung.FUSED, found, 200), asks(2)
    row = ladder.run(Rung.FUSED, model, work)
    said = {i: list(tokens) for i, tokens in enumerate(row.tokens)}
    assert ladder.parted(row, said, model, work) == 0
    said[1][2] = (said[1][2] + 1) % 260
    with pytest.raises(RuntimeError, match="request 1 says another token 2"):
        ladder.parted(row, said, model, work)
    monkeypatch.setattr(ladder, "MARGIN", float("inf"))
    assert ladder.parted(row, said, model, work) == 1


def test_gaps_are_told_by_the_clock(found: Source) -> None:
    ticks = count()
    model = ladder.model_for(Rung.FUSED, found, 200)
    row = ladder.run(Rung.CACHE, model, asks(2), lambda: float(next(ticks)))
    assert row.gap_seconds == 1.0 and row.seconds == row.passes + 1


def test_next_logits_are_those_of_the_schedule(found: Source) -> None:
    model, (ask, *_) = ladder.model_for(Rung.FUSED, found, 200), asks()
    (tokens,) = ladder.run(Rung.CACHE, model, [ask]).tokens
    runner, groups = ladder.runner_for(model, [ask])
    logits = ladder.next_logits(runner, len(groups), ask.prompt)
    assert logits.dtype == torch.float32 and int(logits.argmax()) == tokens[0]


def test_the_staircase_survives_a_data_uri(rows: dict[Rung, Row]) -> None:
    values = {row.rung.adds: row.together for row in rows.values()}
    figure = chart(ladder.staircase(values, "tokens a pass"), "text", "alt")
    address = figure.html().split('src="data:image/svg+xml,')[1].removesuffix('">')
    texts = [e.text or "" for e in ElementTree.fromstring(unquote(address)).iter()]
    assert any("× 1.00" in text for text in texts)  # the last rungs change no count


def test_ladder_from_the_command_line(
    found: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture = tmp_path / "ladder.json", tmp_path / "ladder.png"
    command = ["bench", "ladder", "--model", str(found.path), "--disable-tqdm"]
    command += ["--num-prompts", "5", "--output-json", str(out), "--plot", str(picture)]
    assert main(command) == 0
    saved = json.loads(out.read_text())
    assert [row["adds"] for row in saved["rungs"]] == list(ladder.NAMES)
    assert saved["processor"] and saved["rungs"][1]["passes"] == 48
    assert picture.read_bytes()[:4] == b"\x89PNG"
    text = capsys.readouterr().out
    assert "9 fused kernels" in text and "compare tokens/s" in text
