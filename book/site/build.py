"""Build the book as a static site: chapters, glossary, index and the engine's source.

    python book/site/build.py [folder]      build/book if none is given

Copies the woven notebooks to a working folder, turns links to source files into links
to source pages with a line anchor each, and runs Sphinx. Needs no network; any warning
fails.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from tqdm import tqdm

SITE = Path(__file__).resolve().parent
BOOK, ROOT = SITE.parent, SITE.parents[1]
PAGES = ("glossary", "names", "measured/LOG")
LINK = re.compile(r"\[([^\]]*)\]\(\.\./([\w./-]+)(?:#L(\d+))?\)")


def page_of(file: str) -> str:
    """The name of a source file's page."""
    return "source/" + file.replace("/", "_").removesuffix(".py")


def relink(text: str, linked: set[str]) -> str:
    """`text` with links to Python files turned to their pages; others lose the link."""

    def new(match: re.Match[str]) -> str:
        words, file, line = match.groups()
        if not file.endswith(".py") or not (ROOT / file).is_file():
            return words
        linked.add(file)
        anchor = f"#L-{line}" if line else ""
        shown = re.sub(r"`([^`]*)`", r"<code>\1</code>", words)
        return f'<a href="{page_of(file)}.html{anchor}">{shown}</a>'

    return LINK.sub(new, text)


def stage_chapters(stage: Path) -> tuple[list[str], set[str]]:
    """Copy the notebooks and pages; their names, and the source files they link to."""
    names, linked = [], set()
    for path in sorted(BOOK.glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = relink(cell.source, linked)
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if "text/markdown" in data:
                    data["text/markdown"] = relink(data["text/markdown"], linked)
        nbformat.write(notebook, stage / path.name)
        names.append(path.stem)
    (stage / "measured").mkdir()
    for page in PAGES:
        text = (BOOK / f"{page}.md").read_text("utf-8")
        (stage / f"{page}.md").write_text(relink(text, linked), "utf-8")
    return names, linked


def stage_sources(stage: Path, files: set[str]) -> None:
    """One page for each source file; line n has the anchor L-n."""
    look = HtmlFormatter(lineanchors="L", linenos="inline", cssclass="highlight")
    (stage / "source").mkdir()
    for file in sorted(files):
        code = highlight((ROOT / file).read_text("utf-8"), PythonLexer(), look)
        (stage / f"{page_of(file)}.md").write_text(
            f"---\norphan: true\n---\n\n# {file}\n\n````{{raw}} html\n{code}\n````\n",
            "utf-8",
        )


def stage_index(stage: Path, names: list[str]) -> None:
    """The front page and the order of pages."""
    figure = (BOOK / "figures" / "blocks.svg").read_text("utf-8").strip()
    pages = "\n".join([*names, *PAGES])
    (stage / "index.md").write_text(
        "# pagedattn\n\n**A book that is an engine.** Every chapter runs the engine "
        "that it explains, and shows its source.\n\n"
        f"````{{raw}} html\n{figure}\n````\n\n"
        f"```{{toctree}}\n:maxdepth: 1\n\n{pages}\n```\n",
        "utf-8",
    )


def build(target: Path) -> None:
    """Build into `target`, replacing what is there."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        names, linked = stage_chapters(stage)
        stage_sources(stage, linked)
        stage_index(stage, names)
        shutil.rmtree(target, ignore_errors=True)
        command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going"]
        bar = tqdm(total=1, desc=f"{len(names)} chapters", unit="site")
        done = subprocess.run([*command, "-c", str(SITE), str(stage), str(target)])
        bar.update()
        bar.close()
    if done.returncode:
        raise SystemExit("Sphinx has complained: see above.")
    shutil.rmtree(target / ".doctrees", ignore_errors=True)
    where = target / "index.html"
    print(f"{where.relative_to(ROOT) if where.is_relative_to(ROOT) else where}")


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "book").resolve())
