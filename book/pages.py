"""Make the book's glossary and indexes from its vocabulary and its woven chapters.

    python book/pages.py [--check]

`glossary.md`: every word of `vocabulary.toml`, what it means, where it is defined and
where it is used. `names.md`: every function and class that a chapter shows, and where.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

BOOK = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Chapter:
    """One woven chapter: its prose and the names of what it shows, by file."""

    stem: str
    title: str
    prose: str
    shown: tuple[tuple[str, str], ...]  # (file, name)

    @property
    def link(self) -> str:
        """Its number as a link."""
        return f"[{self.stem[:2]}]({self.stem}.ipynb)"


def chapters() -> list[Chapter]:
    """Every woven chapter, in order."""
    return [read(path) for path in sorted(BOOK.glob("[0-9][0-9]_*.ipynb"))]


def read(path: Path) -> Chapter:
    """One woven chapter."""
    cells = nbformat.read(path, as_version=4).cells
    prose = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    title = re.search(r"^# (.+)$", prose, re.M)
    shown = tuple(
        (listing["file"], name)
        for cell in cells
        for output in cell.get("outputs", [])
        if (listing := output.get("metadata", {}).get("pagedattn"))
        for name in listing["names"]
    )
    return Chapter(path.stem, title.group(1) if title else path.stem, prose, shown)


def vocabulary() -> dict[str, dict[str, Any]]:
    """Term → what it means, the chapter that defines it, its other forms."""
    with open(BOOK / "vocabulary.toml", "rb") as file:
        return tomllib.load(file)


def uses(term: str, entry: dict[str, Any], prose: str) -> bool:
    """Whether running text uses a term, in any of its forms."""
    forms = "|".join(re.escape(form) for form in (term, *entry["forms"]))
    return re.search(rf"(?<![\w-])(?:{forms})(?![\w-])", prose, re.I) is not None


def glossary(book: list[Chapter]) -> str:
    """The glossary as a page."""
    by_number = {chapter.stem[:2]: chapter for chapter in book}
    lines = [
        "# Glossary and index of terms",
        "",
        "One word for each idea, in code, prose and metrics. Made from "
        "`book/vocabulary.toml` by `make book`.",
        "",
        "| term | what it means | defined in | used in |",
        "| --- | --- | --- | --- |",
    ]
    words = vocabulary()
    for term in sorted(words, key=str.lower):
        entry = words[term]
        home = by_number.get(entry["chapter"])
        places = [c.link for c in book if c != home and uses(term, entry, c.prose)]
        lines.append(
            f"| **{term}** | {entry['means']} | {home.link if home else ''} | "
            f"{', '.join(places)} |"
        )
    return "\n".join(lines) + "\n"


def names(book: list[Chapter]) -> str:
    """Every function and class that is shown, by file, as a page."""
    where: dict[tuple[str, str], list[Chapter]] = {}
    for chapter in book:
        for key in dict.fromkeys(chapter.shown):
            where.setdefault(key, []).append(chapter)
    lines = [
        "# Where the engine's source is shown",
        "",
        "Every function and class that a chapter shows. Made from the chapters by "
        "`make book`.",
    ]
    for file in sorted({file for file, _ in where}):
        lines += ["", f"## [`{file}`](../{file})", "", "| name | shown in |"]
        lines.append("| --- | --- |")
        for (path, name), places in where.items():
            if path == file:
                links = ", ".join(chapter.link for chapter in places)
                lines.append(f"| `{name}` | {links} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the pages, or with --check compare them; exit 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args().check
    book, stale = chapters(), []
    for name, text in (("glossary.md", glossary(book)), ("names.md", names(book))):
        path = BOOK / name
        if not path.exists() or path.read_text("utf-8") != text:
            stale.append(name)
            if not check:
                path.write_text(text, "utf-8")
    if check and stale:
        sys.exit(f"book/{', book/'.join(stale)}: out of date; run `make book`.")


if __name__ == "__main__":
    main()
