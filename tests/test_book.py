"""The book keeps its promises: what it shows, how it is written, where it links.

Reads sources and woven notebooks; executes none of them (`make book-check` does).
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

from pagedattn.viz.house import modules

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "book"
sys.path.insert(0, str(BOOK))

import pages  # noqa: E402
import weave  # noqa: E402

SOURCES = sorted((BOOK / "src").glob("*.py"))
NOTEBOOKS = sorted(BOOK.glob("[0-9][0-9]_*.ipynb"))
DUE = (
    "00",
    "01",
    "02",
    "03",
    "04",
    "05",
    "06",
    "07",
    "08",
    "09",
    "10",
    "15",
    "16",
    "17",
)

# The book shows every function of these.
CONTROL = (
    *("errors.py", "request.py", "intake.py", "trace.py", "scheduler.py"),
    *("cache", "text"),
)


def cells(path: Path) -> list[Any]:
    """The cells of a woven notebook."""
    return nbformat.read(path, as_version=4).cells


def listings(path: Path) -> Iterator[tuple[str, list[str], str]]:
    """(file, names, prose of the same section before it) of each piece shown."""
    prose = ""
    for cell in cells(path):
        if cell.cell_type == "markdown":
            new_section = re.search(r"^## ", cell.source, re.M)
            prose = cell.source if new_section else prose + "\n" + cell.source
        for output in cell.get("outputs", []):
            listing = output.get("metadata", {}).get("pagedattn")
            if listing:
                yield listing["file"], listing["names"], prose


def functions(path: Path) -> Iterator[str]:
    """Qualified names of a file's functions and methods, and of classes without any."""

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name
            elif isinstance(child, ast.ClassDef):
                methods = list(walk(child, f"{prefix}{child.name}."))
                yield from methods or [prefix + child.name]

    yield from walk(ast.parse(path.read_text("utf-8")), "")


def must_show() -> list[Path]:
    """The control plane (`config.py` excepted) and the kernels."""
    found = []
    for name in CONTROL:
        path = ROOT / "pagedattn" / name
        found += sorted(path.glob("*.py")) if path.is_dir() else [path]
    return found + sorted((ROOT / "kernels").rglob("*.py"))


def test_chapters_that_are_due_are_there() -> None:
    assert [path.name[:2] for path in SOURCES] == list(DUE)
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in SOURCES]


def test_modules_name_chapters_that_are_there() -> None:
    for folder in ("pagedattn", "kernels"):
        for path in modules(ROOT / folder):
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            cited = re.findall(r"[Cc]hapters? (\d\d)(?: and (\d\d))?", text)
            assert {n for pair in cited for n in pair if n} <= set(DUE), path


@pytest.mark.parametrize("path", must_show(), ids=lambda p: p.name)
def test_every_function_is_shown(path: Path) -> None:
    file = path.relative_to(ROOT).as_posix()
    shown = {
        name
        for notebook in NOTEBOOKS
        for shown_file, names, _ in listings(notebook)
        if shown_file == file
        for name in names
    }
    assert set(functions(path)) <= shown, set(functions(path)) - shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_prose_names_what_is_shown(path: Path) -> None:
    unnamed = []
    for file, names, prose in listings(path):
        words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
        for name in names:
            owner, _, last = name.rpartition(".")
            if last.startswith("__"):
                last = owner.rpartition(".")[2]
            if last not in words:
                unnamed.append(f"{file}: {name}")
    assert not unnamed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_valid_and_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert not weave.faults(weave.Chapter(path.stem, notebook, 0.0))
    for cell in notebook.cells:
        assert cell.get("execution_count") is None
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert not any("widget" in mime for mime in output.get("data", {}))
    text = path.read_text("utf-8")
    assert "<style" not in text and "```mermaid" not in text


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.stem)
def test_notebook_has_its_sources_cells(path: Path) -> None:
    written = [cell.source for cell in jupytext.read(path).cells]
    assert [cell.source for cell in cells(BOOK / f"{path.stem}.ipynb")] == written


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_captions_name_the_line(path: Path) -> None:
    text = "\n".join(
        output["data"]["text/markdown"]
        for cell in cells(path)
        for output in cell.get("outputs", [])
        if "text/markdown" in output.get("data", {})
    )
    for file, line in re.findall(r"\]\(\.\./([\w/]+\.py)#L(\d+)\)", text):
        source = (ROOT / file).read_text("utf-8").splitlines()
        assert source[int(line) - 1].strip(), (file, line)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_links_resolve(path: Path) -> None:
    prose = "\n".join(c.source for c in cells(path) if c.cell_type == "markdown")
    headings = "\n".join(re.findall(r"^#+ (.+)$", prose, re.M)).lower()
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        if file:
            assert (BOOK / file).exists(), target
        elif anchor:
            assert anchor.replace("-", " ").lower() in headings, target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_shape_of_a_chapter(path: Path) -> None:
    prose = "\n".join(c.source for c in cells(path) if c.cell_type == "markdown")
    assert re.match(rf"# {path.stem[:2]} · \S", prose)
    assert len(re.findall(r"^> \*\*Takeaway", prose, re.M)) == 1
    assert "<details>" in prose and prose.count("<details>") == prose.count(
        "</details>"
    )
    for part in ("Build", "Find the bug", "Measure", "Question"):
        assert f"**{part}" in prose, part
    assert re.search(r"^## .*vLLM", prose, re.M)


def test_glossary_and_index_are_made_from_the_chapters() -> None:
    book = pages.chapters()
    assert (BOOK / "glossary.md").read_text("utf-8") == pages.glossary(book)
    assert (BOOK / "names.md").read_text("utf-8") == pages.names(book)


@pytest.mark.parametrize("term", pages.vocabulary())
def test_every_term_is_defined_where_the_glossary_says(term: str) -> None:
    entry = pages.vocabulary()[term]
    home = next(c for c in pages.chapters() if c.stem.startswith(entry["chapter"]))
    forms = "|".join(re.escape(form) for form in (term, *entry["forms"]))
    bold = re.search(rf"\*\*[`\w\s-]*?({forms})[`\w\s()-]*?\*\*", home.prose, re.I)
    assert bold, f"**{term}** is not in bold in {home.stem}"
