"""`make gpu-check`: each part with a limit of its own, on to the next if one fails.

A card may be lent for minutes, so a part that hangs or fails must not take the others'
time: it is ended, with all that it started, and the report says so. Run as a script;
writes `build/gpu-check/report.json` and `.md` anew after every part.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MAIN = "import sys; from pagedattn.serve.cli import main; sys.exit(main(sys.argv[1:]))"
ENVIRONMENT = {"TRITON_INTERPRET": "0", "CI": "true", "PYTHONUNBUFFERED": "1"}
TAIL = 12_000  # characters of a part's output that the report keeps


@dataclass(frozen=True, slots=True)
class Part:
    """A command, and the seconds after which it is ended."""

    name: str
    command: tuple[str, ...]
    limit: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended; `code` is None where its limit did it."""

    name: str
    code: int | None
    seconds: float
    tail: str


def parts(bench: Sequence[str] = ()) -> list[Part]:
    """Within 8 minutes: tests by themselves, as the first may hang, then the bench."""
    run, card = (sys.executable, "-m"), "tests/gpu/test_card.py"
    tests = ("every_kernel", "graphs_and_planning")
    return [
        Part("card", ("nvidia-smi",), 20),
        *(Part(name, (*run, "pytest", card, "-k", name), 110) for name in tests),
        Part("bench", (sys.executable, "-c", MAIN, "bench", "gpu", *bench), 240),
    ]


def run(part: Part) -> Outcome:
    """Run it to its end or its limit; what it started ends with it."""
    begin = time.monotonic()
    try:
        process = subprocess.Popen(
            part.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # CI: a skipped test is a failed one. Unbuffered: what was said stays said.
            env=os.environ | ENVIRONMENT,
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(part.name, 127, 0.0, str(error))
    try:
        said, _ = process.communicate(timeout=part.limit)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        (said, _), code = process.communicate(), None
    text = said.decode(errors="replace")[-TAIL:]
    return Outcome(part.name, code, time.monotonic() - begin, text)


def write(outcomes: Sequence[Outcome], folder: Path) -> None:
    """report.json and report.md: a line for each part, then what each said last."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(outcome) for outcome in outcomes]
    (folder / "report.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = ["| part | ended | seconds |", "| --- | --- | --- |"]
    lines += [f"| {o.name} | {word(o)} | {o.seconds:.1f} |" for o in outcomes]
    for o in outcomes:
        lines += ["", f"## {o.name}", "", "```", o.tail.rstrip(), "```"]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def word(outcome: Outcome) -> str:
    """How it ended, in words."""
    if outcome.code is None:
        return "over its limit"
    return "passed" if outcome.code == 0 else f"failed ({outcome.code})"


def check(todo: Sequence[Part], folder: Path) -> int:
    """Run all of them; 0 if all passed."""
    done: list[Outcome] = []
    for part in todo:
        print(f"{part.name}: at most {part.limit:.0f} s", flush=True)
        done.append(run(part))
        print(f"{done[-1].tail}\n{part.name}: {word(done[-1])}", flush=True)
        write(done, folder)
    return int(any(outcome.code != 0 for outcome in done))


if __name__ == "__main__":
    sys.exit(check(parts(sys.argv[1:]), Path("build/gpu-check")))
