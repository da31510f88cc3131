"""`make gpu-check` without a card: parts that fail or hang leave the others their time,
and the report names each."""

import json
import sys
import time

from gpu.parts import Part, check, parts


def python(name, code, limit=20.0):
    return Part(name, (sys.executable, "-c", code), limit)


def test_a_part_that_fails_or_hangs_does_not_end_the_others(tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', "
    child += "'import time; print(1, flush=True); time.sleep(60)'])"
    begin = time.monotonic()
    code = check(
        [
            python("bad", "raise SystemExit('no such luck')"),
            python("hangs", child, 1.5),
            Part("absent", (str(tmp_path / "nothing"),), 1),
            python("good", "import os; print(os.environ['TRITON_INTERPRET'])"),
        ],
        tmp_path / "new",
    )
    assert code == 1 and time.monotonic() - begin < 30
    rows = json.loads((tmp_path / "new/report.json").read_text())
    ends = {row["name"]: row["code"] for row in rows}
    assert ends == {"bad": 1, "hangs": None, "absent": 127, "good": 0}
    assert "no such luck" in rows[0]["tail"] and rows[3]["tail"] == "0\n"
    said = (tmp_path / "new/report.md").read_text()
    assert "| hangs | over its limit |" in said and "| good | passed |" in said


def test_all_pass_is_success(tmp_path):
    assert check([python("good", "")], tmp_path) == 0


def test_all_of_it_ends_within_eight_minutes():
    todo = parts(["--result-dir", "there"])
    assert sum(part.limit for part in todo) <= 480
    assert todo[-1].command[-2:] == ("--result-dir", "there")


def test_every_test_for_a_card_is_a_part():
    from gpu import test_card

    names = [name for name in dir(test_card) if name.startswith("test_")]
    wanted = [part.name for part in parts() if part.name not in ("card", "bench")]
    for name in names:
        assert sum(part in name for part in wanted) == 1, name
