"""The engine's own source in a notebook, with the file and line where it stands.

Reads source files through `inspect`, so that a chapter can show nothing but what is
there, and fails loudly when what it wanted to show has gone. Every chapter uses it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pagedattn

ROOT = Path(pagedattn.__file__).parents[1]

# Where wrappers keep what they wrap: properties, methods, kernels, functions of numba
# and Triton.
INSIDE = (
    "fget",
    "func",
    "__func__",
    "__wrapped__",
    "body",
    "py_func",
    "_defn",
    "_pyfunc",
    "fn",
)


@dataclass(frozen=True, slots=True)
class Listing:
    """A piece of a source file. `names` are the functions and classes it holds."""

    file: str
    line: int
    title: str
    text: str
    names: tuple[str, ...]

    @property
    def caption(self) -> str:
        """Where it stands: file:line."""
        return f"{self.file}:{self.line}"

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        link = f"[`{self.caption}`](../{self.file}#L{self.line})"
        markdown = f"{link} · `{self.title}`\n\n```python\n{self.text}\n```"
        plain = f"# {self.caption} · {self.title}\n{self.text}"
        return (
            {"text/markdown": markdown, "text/plain": plain},
            {"pagedattn": {"file": self.file, "names": list(self.names)}},
        )


def show(*things: Any, section: str | None = None) -> None:
    """Display the source of functions, methods and classes; of one module or class,
    with `section`, the part under the comment that starts with these words, or the
    module's function of that name, for those that a decorator made something else.

    Raises LookupError when the section is not there, TypeError for what has no source.
    """
    from IPython.display import display

    for thing in things:
        display(listing(thing, section))


def listing(thing: Any, section: str | None = None) -> Listing:
    """The source of `thing`, or of its section, as a `Listing`."""
    thing = _plain(thing)
    if isinstance(thing, ModuleType) and section is None:
        raise TypeError(f"{thing.__name__} is a whole module: name a section of it.")
    path = Path(inspect.getsourcefile(thing) or "")
    if not path.is_relative_to(ROOT):
        raise TypeError(f"{thing!r} is not this project's.")
    lines, first = inspect.getsourcelines(thing)
    first = max(first, 1)
    title = getattr(thing, "__qualname__", None) or thing.__name__
    if section is not None:
        is_name = isinstance(thing, ModuleType) and section.isidentifier()
        find = _function if is_name else _section
        offset, lines, heading = find(lines, section, title)
        first, title = first + offset, f"{title}: {heading}"
    text = textwrap.dedent("".join(lines)).strip("\n")
    owner = "" if isinstance(thing, ModuleType) else thing.__qualname__
    names = tuple(_names(text, owner, section is not None))
    return Listing(path.relative_to(ROOT).as_posix(), first, title, text, names)


def _plain(thing: Any) -> Any:
    """The function behind a property, a bound method, or anything compiled from it."""
    while not isinstance(thing, type | ModuleType):
        inside = [name for name in INSIDE if hasattr(thing, name)]
        if not inside:
            break
        thing = getattr(thing, inside[0])
    return thing


def _function(lines: list[str], name: str, title: str) -> tuple[int, list[str], str]:
    """(offset, lines, name) of a module's function."""
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            begin = min(n.lineno for n in (node, *node.decorator_list)) - 1
            return begin, lines[begin : node.end_lineno], name
    raise LookupError(f"{title} has no function {name!r}.")


def _section(lines: list[str], section: str, title: str) -> tuple[int, list[str], str]:
    """(offset, lines, first sentence) of the part under the comment `# section…`."""
    starts = [
        i
        for i, line in enumerate(lines)
        if i and re.match(r" *# (-+ )?[A-Za-z]", line) and not lines[i - 1].strip()
    ]
    found = [i for i in starts if lines[i].strip("#- \n").startswith(section)]
    if len(found) != 1:
        raise LookupError(f"{title} has {len(found)} sections {section!r}.")
    begin = found[0]
    end = next((i for i in starts if i > begin), len(lines))
    while not lines[end - 1].strip():
        end -= 1
    return begin, lines[begin:end], lines[begin].strip("#- \n").split(":")[0]


def _names(text: str, owner: str, inside: bool) -> Iterator[str]:
    """Qualified names of every function and class in `text`, outermost first.

    `owner` is the qualified name of what `text` is, or, if `inside`, of what it is a
    section of.
    """
    prefix = owner if inside else owner.rpartition(".")[0]

    def walk(node: ast.AST, prefix: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                yield name
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, name)

    yield from walk(ast.parse(text), prefix)
