"""Engines side by side: what they are asked, who is missing, what is written down."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagedattn.bench import compare, peer
from pagedattn.bench.compare import ENGINES, MISSING, Row, best_first, markdown, slug
from pagedattn.bench.workloads import mixed_lengths
from pagedattn.bench.works import WORKS, served, works_for
from pagedattn.errors import UserError
from pagedattn.serve.cli import main


def test_works_are_the_same_for_all_and_new_in_each_run() -> None:
    chosen = ["W1", "W2", "W3"]
    first, second = works_for(chosen, 0), works_for(chosen, 1)
    assert first == works_for(chosen, 0) != second
    for requests in (first["W1"]["requests"], served(0)):
        lengths = [(len(r["prompt"]), r["max_tokens"]) for r in requests]
        assert lengths == mixed_lengths()
    heads = {tuple(r["prompt"][:1024]) for r in first["W3"]["requests"]}
    assert len(heads) == 1
    assert first["W3"]["cold"]["prompt"][:1024] == first["W3"]["warm"]["prompt"][:1024]
    assert set(works_for(["W2"], 0)) == {"first", "W2"}


class Counting:
    """A peer that answers at once."""

    version = "1"

    def batch(self, requests: list[peer.Wanted]) -> list[int]:
        return [r["max_tokens"] for r in requests]

    def stream(self, prompt: list[int], n: int) -> Any:
        yield from range(n)


def test_every_offline_work_gives_its_figures() -> None:
    works = works_for(["W1", "W2", "W3"], 0)
    assert set(peer.WORKS) == set(WORKS) - {"W4"}
    shown = set(compare.HEADINGS)
    for work, run in peer.WORKS.items():
        found = run(Counting(), works[work])
        assert {f"{work} {name}" for name in found} <= shown
        assert all(value > 0 for value in found.values())


def test_an_engine_that_stops_short_is_no_engine() -> None:
    class Short(Counting):
        def batch(self, requests: list[peer.Wanted]) -> list[int]:
            return [1 for _ in requests]

    with pytest.raises(AssertionError, match="not as many tokens"):
        peer.many(Short(), works_for(["W1"], 0)["W1"])


def test_who_is_missing_or_fails_says_so_and_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "peer.py"
    script.write_text(
        "import sys\nif sys.argv[1] == 'transformers': sys.exit('no weights')\n"
        'print(\'{"version": "9"}\\n{"W2": {"first_ms": 5.0}}\')\n'
    )
    monkeypatch.setattr(peer, "__file__", str(script))
    broken = compare.Peer("transformers")
    monkeypatch.setitem(ENGINES, "transformers", broken)
    path = compare.compare(["pagedattn", "vllm", "transformers"], ["W2"], 2)
    found = json.loads(path.with_suffix(".json").read_text())["engines"]
    assert found["pagedattn"]["W2 first_ms"] == [5.0, 5.0]
    assert found["vllm"]["error"] == MISSING
    assert found["transformers"]["error"] == "failed: no weights"
    table = path.read_text()
    assert "| pagedattn 9 | 5 (5, 5) |" in table and f"vllm: {MISSING}" in table


def test_the_best_run_stands_first() -> None:
    assert best_first("W2 tokens_per_s", [1.0, 3.0, 2.0])[0] == 3.0
    assert best_first("W1 seconds", [2.0, 1.0])[0] == 1.0
    row = Row("1.0", None, {"W1 seconds": [40.0, 39.5]})
    text = markdown({"x": row, "y": Row(error="gone")}, {"processor": "P"}, (0.1, 0.9))
    assert "| x 1.0 | 39.5 (39.5, 40) |" in text and "| y: gone | – |" in text
    assert slug("AMD EPYC(tm) 7B13") == "amd-epyc-tm-7b13"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--engines", "sglang"], "engines='sglang'"),
        (["--works", "W9"], "works='W9'"),
        (["--runs", "0"], "runs=0"),
    ],
)
def test_what_is_unknown_is_named(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compare", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_bad_name_is_the_callers_mistake() -> None:
    with pytest.raises(UserError):
        compare.compare(["pagedattn"], ["W5"], 1)
