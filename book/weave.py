"""Weave chapters: book/src/NN_name.py → book/NN_name.ipynb, executed and cleaned.

    python book/weave.py [NN ...]           weave these chapters, or all
    python book/weave.py --check [NN ...]   weave again; fail if anything differs

Sources are percent-format scripts. A cell tagged `volatile` with a reason (what its
output depends on, `reason="clock"`) may print something else each time; every other
output must be the same on every machine. A chapter runs in a fresh kernel with one
thread and no way to a hub.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from tqdm import tqdm

BOOK = Path(__file__).resolve().parent
ROOT = BOOK.parent
WORDS = range(2500, 4501)
CODE_CELLS = 40
SECONDS, LONG_SECONDS = 20.0, 60.0  # of processor time; see LONG
LONG = "LLM(", "compile_all("  # a chapter that runs a real model, or a GPU's compiler
VOLATILE_SHARE = 0.10
METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python", "file_extension": ".py"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "PYTHONHASHSEED": "0",
}


class BadChapter(Exception):
    """What is wrong with a chapter."""


@dataclass(slots=True)
class Chapter:
    """One woven chapter and what it took."""

    name: str
    notebook: Any
    seconds: float
    faults: list[str] = field(default_factory=list)


def sources(wanted: list[str]) -> list[Path]:
    """The chapters whose file names start with one of `wanted`; all, if none is."""
    found = sorted((BOOK / "src").glob("[0-9][0-9]_*.py"))
    chosen = [p for p in found if not wanted or p.name.startswith(tuple(wanted))]
    if not chosen:
        raise SystemExit(f"No chapter starts with {', '.join(wanted)}.")
    return chosen


def weave(source: Path) -> Chapter:
    """Execute one chapter in a fresh kernel; clean; look for faults."""
    notebook = jupytext.read(source)
    os.environ.update(ENVIRONMENT)
    before = _children()
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(BOOK)}},
        allow_errors=False,
    )
    client.execute()
    chapter = Chapter(source.stem, notebook, _children() - before)
    clean(notebook)
    chapter.faults = faults(chapter)
    return chapter


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# Cleaning: what would differ each time, or means nothing to a reader.
def clean(notebook: Any) -> None:
    """Drop counts, times and widget views; name cells by what they hold."""
    meta = notebook.metadata.get("pagedattn", {})
    notebook.metadata = nbformat.from_dict({**METADATA, "pagedattn": meta})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for i, cell in enumerate(notebook.cells):
        cell.id = hashlib.sha256(f"{i} {cell.source}".encode()).hexdigest()[:8]
        for name in set(cell.metadata) - {"tags", "reason"}:
            del cell.metadata[name]
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [o for o in map(_cleaned, _joined(cell.outputs)) if o]


def _joined(outputs: list[Any]) -> list[Any]:
    """Outputs with neighbouring pieces of one stream put together."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if output.output_type == "stream" and last and last.get("name") == output.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _cleaned(output: Any) -> Any | None:
    if output.output_type == "execute_result":
        output.execution_count = None
    if WIDGET in output.get("data", {}):
        return None
    if output.output_type == "stream":
        output.text = re.sub(r"\x1b\[[0-9;]*m", "", output.text)
    return output


# Faults: the rules that every chapter keeps.
def faults(chapter: Chapter) -> list[str]:
    """What is wrong, a sentence each."""
    cells = chapter.notebook.cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    words = count_words(prose)
    volatile = [cell for cell in code if "volatile" in cell.metadata.get("tags", [])]
    limit = LONG_SECONDS if _is_long(chapter.notebook) else SECONDS
    found = []
    if words not in WORDS:
        found.append(f"{words} words, not {WORDS.start} to {WORDS.stop - 1}")
    if len(code) > CODE_CELLS:
        found.append(f"{len(code)} code cells, more than {CODE_CELLS}")
    if chapter.seconds > limit:
        found.append(f"{chapter.seconds:.1f} s of processor time, over {limit:.0f}")
    if len(volatile) > VOLATILE_SHARE * len(code):
        found.append(f"{len(volatile)} of {len(code)} code cells are volatile")
    for cell in volatile:
        if not cell.metadata.get("reason"):
            found.append(f"a volatile cell without a reason: {cell.source[:40]!r}")
    for cell in code:
        found += _bad_outputs(cell)
    return found


def _is_long(notebook: Any) -> bool:
    code = (cell.source for cell in notebook.cells if cell.cell_type == "code")
    return any(word in source for source in code for word in LONG)


def count_words(prose: list[str]) -> int:
    """Words of prose, code fences and markup left out."""
    text = re.sub(r"```.*?```|</?[a-z][^<>]*>", " ", "\n".join(prose), flags=re.S)
    return len(re.findall(r"[A-Za-z0-9][\w'’.,%-]*", text))


def _bad_outputs(cell: Any) -> list[str]:
    found, where = [], cell.source.strip().splitlines()[-1][:50]
    for output in cell.outputs:
        text = str(output.get("text", "")) + str(output.get("data", ""))
        if output.get("name") == "stderr":
            found.append(f"stderr after {where!r}: {output.text[:200]}")
        for path in re.findall(r"/(?:home|root|tmp|Users|work|usr|opt)/\S*", text):
            found.append(f"an absolute path after {where!r}: {path[:60]}")
        for address in re.findall(r"0x[0-9a-f]{9,}", text):
            found.append(f"an address in memory after {where!r}: {address}")
    return found


# Comparing: sources and stable outputs.
def differences(name: str, new: Any, old: Any) -> list[str]:
    """Where a fresh weave and the committed notebook differ, a sentence each."""
    if [c.source for c in new.cells] != [c.source for c in old.cells]:
        return [f"book/{name}.ipynb has other cells than book/src/{name}.py"]
    found = []
    for fresh, kept in zip(new.cells, old.cells, strict=True):
        if fresh.cell_type != "code" or "volatile" in fresh.metadata.get("tags", []):
            continue
        if fresh.outputs != kept.outputs:
            found.append(
                f"another output after {fresh.source.strip().splitlines()[-1][:60]!r}:"
                f"\n    now  {_brief(fresh.outputs, kept.outputs)}"
                f"\n    then {_brief(kept.outputs, fresh.outputs)}"
            )
    return found


def _brief(outputs: list[Any], others: list[Any]) -> str:
    """The first piece of `outputs` that `others` does not have."""
    mine, theirs = (json.dumps(o, sort_keys=True) for o in (outputs, others))
    start = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
        min(len(mine), len(theirs)),
    )
    return repr(mine[max(0, start - 60) : start + 100])


def settle(chapter: Chapter, check: bool) -> list[str]:
    """Write a woven chapter, or compare it with the committed one; its faults."""
    path = BOOK / f"{chapter.name}.ipynb"
    if check:
        if not path.exists():
            return [*chapter.faults, f"book/{path.name} is missing"]
        old = nbformat.read(path, as_version=4)
        return chapter.faults + differences(chapter.name, chapter.notebook, old)
    nbformat.validate(chapter.notebook)
    nbformat.write(chapter.notebook, path)
    return chapter.faults


def main() -> None:
    """Weave or check; exit 1 if any chapter has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="numbers, 03 04; default: all")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--jobs", type=int, default=2, help="chapters at a time")
    args = parser.parse_args()
    failed = False
    paths = sources(args.chapters)
    with ProcessPoolExecutor(args.jobs, max_tasks_per_child=1) as pool:
        work = {pool.submit(weave, path): path for path in paths}
        for done in tqdm(as_completed(work), total=len(work), unit="chapter"):
            name = work[done].stem
            try:
                chapter = done.result()
            except Exception as error:
                failed = True
                tqdm.write(f"{name} did not run: {error}")
                continue
            found = settle(chapter, args.check)
            failed |= bool(found)
            tqdm.write(f"{name}: {chapter.seconds:.1f} s" + (":" if found else ""))
            for fault in found:
                tqdm.write(f"  {fault}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
