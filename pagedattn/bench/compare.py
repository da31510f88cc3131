"""Engines side by side on this machine, each in its own process, in turns.

    pagedattn bench compare

Knows how to start an engine, what to ask of it and how to write the table down. Ours
runs in this environment, the others in those that `make bench-peers` builds; one that
is missing or fails says so in its row. The works are in `works`, each engine's part in
`peer`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from pagedattn.bench import online, peer, waste
from pagedattn.bench.datasets import Sample
from pagedattn.bench.report import machine, save
from pagedattn.bench.timeline import summary
from pagedattn.bench.works import CLIENTS, WORKS, served, works_for
from pagedattn.errors import UserError

PEERS = Path("build/peers")
MEASURED = Path("book/measured")
MISSING = "not installed: make bench-peers"
LIMIT = 3600  # seconds after which a run is ended
LOOK = 0.5  # seconds between two looks at the memory
GREEDY = (("ignore_eos", True), ("temperature", 0.0))
BLOCK_SIZE, RESERVE = 16, 2048  # of the KV waste


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine: its adapter in `peer`, its environment (None: ours), the files that
    it reads, and the arguments of its server after the environment's `bin`."""

    adapter: str
    environment: str | None = None
    files: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    server: tuple[str, ...] = ()

    @property
    def bin(self) -> Path:
        """Where the environment's programs are."""
        if self.environment is None:
            return Path(sys.executable).parent
        return (PEERS / self.environment / "bin").absolute()

    def is_installed(self) -> bool:
        """Whether environment and files are there."""
        files = (PEERS / name for _, name in self.files)
        return (self.bin / "python").exists() and all(f.exists() for f in files)


MODEL = ("model", "model")
ENGINES = {
    "pagedattn": Peer("pagedattn", server=("pagedattn", "serve")),
    "openvino": Peer("openvino", "openvino", (("openvino", "openvino-model"),)),
    "vllm": Peer(
        "vllm",
        "vllm",
        (MODEL,),
        server=("vllm", "serve", str(PEERS / "model"), "--dtype", "float32"),
    ),
    "llama.cpp": Peer("llama.cpp", "llama-cpp", (("gguf", "model.gguf"),)),
    "transformers": Peer("transformers", "transformers", (MODEL,)),
    "transformers-1": Peer(
        "transformers", "transformers", (MODEL,), options=(("rows", "1"),)
    ),
}


@dataclass(slots=True)
class Row:
    """What one engine reached: for each figure, one value a run."""

    version: str = ""
    error: str | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, found: dict[str, float]) -> None:
        """Add a run's figures."""
        for name, value in found.items():
            self.figures.setdefault(name, []).append(value)


# One engine, one run.
def environment_for(engine: Peer) -> dict[str, str]:
    """The variables that an engine runs with: as many threads as there are cores."""
    cores = str(psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    threads = os.environ.get("OMP_NUM_THREADS", cores)
    variables = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    if engine.environment == "vllm":
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": "4",  # GB
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(_preloads(engine)),
        }
    return variables


def _preloads(engine: Peer) -> Iterator[str]:
    """The libraries that vLLM's manual has preloaded on CPUs, as far as installed."""
    folders = (Path("/usr/lib"), engine.bin.parent / "lib")
    names = ("libtcmalloc_minimal.so.4", "libiomp5.so")
    for folder, name in zip(folders, names, strict=True):
        yield from map(str, sorted(folder.rglob(name))[:1])


@contextmanager
def process(
    command: Sequence[str], variables: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[str]]:
    """A process group that ends with the block, or after `LIMIT` seconds."""
    with log.open("w") as errors:
        child = subprocess.Popen(
            command,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    timer = threading.Timer(LIMIT, _end, (child,))
    timer.start()
    try:
        yield child
    finally:
        timer.cancel()
        _end(child)


def _end(child: subprocess.Popen[str]) -> None:
    """End a process and those that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
            child.wait(timeout=20)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    child.wait()


class Memory:
    """The most memory that a process and its children held, in GB, seen now and then.
    Pages that several of them share are counted once, where the system tells."""

    def __init__(self, pid: int) -> None:
        self.peak = 0.0
        self._root = psutil.Process(pid)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while psutil.pid_exists(self._root.pid):
            self.look()
            time.sleep(LOOK)

    def look(self) -> None:
        """Take note of how much it is now."""
        try:
            family = [self._root, *self._root.children(recursive=True)]
            held = (one.memory_full_info() for one in family)
            total = sum(getattr(info, "pss", info.rss) for info in held)
        except psutil.Error:  # one of them has just ended
            return
        self.peak = max(self.peak, total / 1e9)


def run_offline(engine: Peer, works: dict[str, Any], folder: Path) -> tuple[str, dict]:
    """(version, figures) of one run in a process of its own; RuntimeError if it
    fails."""
    files = {key: str((PEERS / name).absolute()) for key, name in engine.files}
    given = folder / "works.json", folder / "options.json"
    for path, data in zip(given, (works, files | dict(engine.options)), strict=True):
        path.write_text(json.dumps(data), "utf-8")
    command = [str(engine.bin / "python"), "-P", peer.__file__, engine.adapter]
    log, said, figures = folder / "log", dict[str, Any](), dict[str, float]()
    start = time.perf_counter()
    with process([*command, *map(str, given)], environment_for(engine), log) as child:
        memory = Memory(child.pid)
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                said |= json.loads(line)
                figures.setdefault("start_s", time.perf_counter() - start)
                memory.look()
        if child.wait() != 0:
            raise RuntimeError(_last_line(log))
    for work, found in said.items():
        if work in WORKS:
            figures |= {f"{work} {name}": value for name, value in found.items()}
    return said["version"], figures | {"peak_gb": memory.peak}


def _last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return f"failed: {lines[-1][:200]}" if lines else "failed, and said nothing"


def run_served(engine: Peer, run: int, folder: Path) -> dict[str, float]:
    """W4's figures of one run; RuntimeError if the server fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program, *rest = engine.server
    command = [str(engine.bin / program), *rest, "--port", port]
    base, log = f"http://127.0.0.1:{port}", folder / "log"
    command += ["--max-model-len", str(peer.LONGEST)]
    with process(command, environment_for(engine), log) as child:
        model = _wait_for(child, base, log)
        target = online.Target(base, model, extra=GREEDY)
        load = online.Load(max_concurrency=CLIENTS)
        samples = [Sample(tuple(r["prompt"]), r["max_tokens"]) for r in served(run)]
        _ask(target, samples[:4], load)
        timelines, seconds = _ask(target, samples, load)
    found = summary(timelines, seconds)
    if found["failed"]:
        raise RuntimeError(next(f"failed: {t.error}" for t in timelines if t.error))
    return {
        "W4 tokens_per_s": found["output_throughput"],
        "W4 first_ms": found["p50_ttft_ms"],
        "W4 gap_p50_ms": found["p50_itl_ms"],
        "W4 gap_p99_ms": found["p99_itl_ms"],
    }


def _ask(target: online.Target, samples: list[Sample], load: online.Load) -> Any:
    return asyncio.run(online.run(target, samples, [""] * len(samples), load, False))


def _wait_for(child: subprocess.Popen[str], base: str, log: Path) -> str:
    """The name of the model that the server serves, once it does."""
    while child.poll() is None:
        try:
            return online.first_model(base, ())
        except UserError:
            time.sleep(0.2)
    raise RuntimeError(_last_line(log))


# All of them, in turns.
def measure(
    engines: Sequence[str],
    works: Sequence[str],
    runs: int,
    say: Callable[[str], None] = print,
) -> dict[str, Row]:
    """Every engine's row. Each run asks one engine after the other."""
    rows = {name: Row() for name in engines}
    for run in range(runs):
        for name, row in rows.items():
            if row.error is None:
                say(f"run {run + 1} of {runs}: {name}")
                _run(ENGINES[name], works, run, row)
    return rows


def _run(engine: Peer, works: Sequence[str], run: int, row: Row) -> None:
    if not engine.is_installed():
        row.error = MISSING
        return
    offline = works_for([w for w in works if w != "W4"], run)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if len(offline) > 1:
                row.version, figures = run_offline(engine, offline, Path(folder))
                row.note(figures)
            if "W4" in works and engine.server:
                row.note(run_served(engine, run, Path(folder)))
    except (RuntimeError, OSError) as error:
        row.error = str(error)


# What is written down.
HEADINGS = {
    "W1 seconds": "W1, s",
    "W2 first_ms": "W2 first token, ms",
    "W2 tokens_per_s": "W2, tokens/s",
    "W3 seconds": "W3, s",
    "W3 cold_ms": "W3 cold, ms",
    "W3 warm_ms": "W3 warm, ms",
    "W4 tokens_per_s": "W4, tokens/s",
    "W4 first_ms": "W4 first token p50, ms",
    "W4 gap_p50_ms": "W4 gap p50, ms",
    "W4 gap_p99_ms": "W4 gap p99, ms",
    "start_s": "start, s",
    "peak_gb": "peak memory, GB",
}
ABOUT = """\
W1: 64 requests of mixed lengths at once, 9,467 tokens in and 5,843 out. W2: one request
of 128 in and 128 out, the best of three. W3: a prefix of 1,024 tokens, seen for the
first time (cold) and again (warm), then 32 requests on another one, 32 out. W4: W1's
requests from 16 streaming clients over HTTP. Start: from the process to its first
token. float32, greedy, random ids. Best run first, all runs in brackets."""


def best_first(name: str, values: Sequence[float]) -> list[float]:
    """The values of one figure, the best in front: rates high, all else low."""
    return sorted(values, reverse=name.endswith("tokens_per_s"))


def markdown(
    rows: dict[str, Row], about: dict[str, str], kv: tuple[float, float]
) -> str:
    """The table; `kv` is what is empty of allocated slots, paged and reserved."""
    shown = [n for n in HEADINGS if any(n in row.figures for row in rows.values())]
    titles = ["engine", *(HEADINGS[name] for name in shown)]
    lines = [
        f"# {about['processor']}",
        "",
        ", ".join(f"{name} {value}" for name, value in about.items()),
        "",
        ABOUT,
        "",
        _cells(titles),
        _cells(["---"] * len(titles)),
        *(_cells(_row(name, row, shown)) for name, row in rows.items()),
        "",
        f"KV slots that hold nothing, W1's requests: {kv[0]:.1%} of those in blocks of "
        f"{BLOCK_SIZE}; {kv[1]:.1%} had {RESERVE:,} been reserved for each request.",
    ]
    return "\n".join(lines) + "\n"


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(name: str, row: Row, shown: Sequence[str]) -> list[str]:
    title = f"{name} {row.version}".strip() + (f": {row.error}" if row.error else "")
    return [title, *(_cell(key, row.figures.get(key, [])) for key in shown)]


def _cell(name: str, values: Sequence[float]) -> str:
    if not values:
        return "–"
    best, *_ = texts = [f"{value:.4g}" for value in best_first(name, values)]
    return best if len(texts) == 1 else f"{best} ({', '.join(texts)})"


def slug(text: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def compare(engines: Sequence[str], works: Sequence[str], runs: int) -> Path:
    """Measure, and write the table for this processor; where the Markdown is."""
    _check(engines, ENGINES, "engines")
    _check(works, WORKS, "works")
    if runs < 1:
        raise UserError(f"runs={runs} must be at least 1.", "runs")
    rows, about = measure(engines, works, runs), machine()
    empty = waste.mixed(BLOCK_SIZE, RESERVE)
    kv = empty.paged_share, empty.reserved_share
    path = MEASURED / slug(about["processor"])
    engines_found = {
        name: {"version": row.version, "error": row.error, **row.figures}
        for name, row in rows.items()
    }
    shares = dict(zip(("kv_waste_paged", "kv_waste_reserved"), kv, strict=True))
    save({**about, **shares, "engines": engines_found}, path.with_suffix(".json"))
    text = markdown(rows, about, kv)
    path.with_suffix(".md").write_text(text, "utf-8")
    print(text)
    return path.with_suffix(".md")


def _check(given: Sequence[str], known: Sequence[str], name: str) -> None:
    for one in given:
        if one not in known:
            allowed = ", ".join(known)
            raise UserError(f"{name}={one!r} is none of {allowed}.", name)
