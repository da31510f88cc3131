"""Runs of pytest by the dozen, in a process that has loaded torch once and forks.

    python tests/judge.py    # a JSON line in for each run, its exit code out

Knows processes and pytest's command line, and must know nothing of the engine: each
run loads that for itself. Where a fork is unsafe, a run is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FORKS = sys.platform == "linux"


class Judge:
    """Starts when it is first asked; `close` ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], env: Mapping[str, str]) -> tuple[int, str]:
        """pytest's exit code and output, for these arguments, in this environment."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            code = (self._forked if FORKS else _spawned)(arguments, env, output)
            return code, output.read_text("utf-8")

    def _forked(
        self, arguments: Sequence[str], env: Mapping[str, str], output: Path
    ) -> int:
        if self._process is None:
            pipe = subprocess.PIPE
            command = [sys.executable, __file__]
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT
            )
        job = {"arguments": [*arguments], "env": {**env}, "output": str(output)}
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def _spawned(arguments: Sequence[str], env: Mapping[str, str], output: Path) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    with output.open("w", encoding="utf-8") as file:
        return subprocess.run(
            command, cwd=ROOT, env={**env}, stdout=file, stderr=subprocess.STDOUT
        ).returncode


# The process that forks.
def serve() -> None:
    """Read jobs until there are no more; print the exit code of each."""
    for module in ("hypothesis.stateful", "numba", "torch"):
        import_module(module)
    assert "pagedattn" not in sys.modules
    sys.path.insert(0, str(ROOT))
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_run(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(arguments: list[str], env: dict[str, str], output: str) -> int:
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(env)
    try:
        return int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    serve()
