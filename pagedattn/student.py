"""A reader's files in place of the package's modules: PAGEDATTN_STUDENT=3,bug5.

Knows the exercises' recipes (`exercises/NN_name.toml`) and Python's import system;
knows nothing of what the modules do. Put to work by the package itself, before it
loads anything else, when that variable is set.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pagedattn.errors import UserError

log = logging.getLogger("pagedattn")

VARIABLE = "PAGEDATTN_STUDENT"  # the exercises to run: "3,bug5"
FOLDER = "PAGEDATTN_EXERCISES"  # where they are, if not in the repository's folder


@dataclass(frozen=True, slots=True)
class Exercise:
    """One file of the reader's, and the module whose place it takes.

    `key` is "3" for what chapter 3 has built, "bug3" for its mistake to find; `recipe`
    is the part of the chapter's TOML file that says so.
    """

    key: str
    title: str
    module: str
    path: Path
    recipe: Mapping[str, Any]

    @property
    def is_bug(self) -> bool:
        """Whether there is a mistake to find, rather than bodies to write."""
        return self.key.startswith("bug")


# The recipes: which exercises there are.
def exercises_folder() -> Path:
    """$PAGEDATTN_EXERCISES, else the repository's; UserError if there is none."""
    chosen = os.environ.get(FOLDER)
    folder = Path(chosen or Path(__file__).parents[1] / "exercises").absolute()
    if not folder.is_dir():
        raise UserError(
            f"The exercises' folder is not there: {folder}. An installed package has "
            f"none: work in a clone (pip install -e .), or set {FOLDER} to the folder.",
            FOLDER,
        )
    return folder


def catalogue(folder: Path) -> dict[str, Exercise]:
    """Every exercise of the folder by its key, in the order of the chapters."""
    found = (e for path in sorted(folder.glob("[0-9][0-9]_*.toml")) for e in _in(path))
    return {exercise.key: exercise for exercise in found}


def _in(path: Path) -> list[Exercise]:
    """What one chapter's file holds: something to build, a mistake to find, or both."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
        number, name = int(path.stem[:2]), path.stem[3:]
        title = table["title"]
        kinds = [("", "ex", table)] if "bodies" in table else []
        kinds += [("bug", "bug", table["bug"])] if "bug" in table else []
        return [
            Exercise(
                f"{prefix}{number}",
                title,
                recipe["module"],
                path.with_name(f"{start}{number:02}_{name}.py"),
                recipe,
            )
            for prefix, start, recipe in kinds
        ]
    except (KeyError, ValueError) as problem:
        raise UserError(f"{path}: {problem!r}") from problem


def find(wanted: str, known: Mapping[str, Exercise], param: str) -> Exercise:
    """The exercise that `wanted` names: "3", "03", "ex3", "bug3".

    UserError with the list of those there are, if it names none.
    """
    match = re.fullmatch(r"(?:ex)?(bug)?0*(\d+)", wanted.strip().lower())
    key = (match[1] or "") + match[2] if match else ""
    if key not in known:
        there = ", ".join(known) or "none"
        raise UserError(
            f"{param}={wanted}: no such exercise. There are: {there}. "
            "`make exercises` lists them.",
            param,
        )
    return known[key]


# Importing: a finder that is asked before all others.
class _Loader(SourceFileLoader):
    """Compiles at each start: a bytecode file goes by the second of the last edit."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class _KernelLoader(_Loader):
    """`__file__` stays in the kernels' folder, whose text names the compiled code."""

    def __init__(self, fullname: str, path: str, folder: str) -> None:
        super().__init__(fullname, path)
        self._own = Path(folder) / f"{fullname.rpartition('.')[2]}.py"

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._own)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, exercises: Sequence[Exercise]) -> None:
        self.exercises = {exercise.module: exercise for exercise in exercises}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in self.exercises:
            return None
        file = str(self.exercises[fullname].path)
        loader = _Loader(fullname, file)
        if path and fullname.startswith("pagedattn.kernels."):
            loader = _KernelLoader(fullname, file, path[0])
        return spec_from_file_location(fullname, file, loader=loader)


def install() -> None:
    """From now on, import the readers' files that PAGEDATTN_STUDENT asks for.

    Says so in the log. UserError, changing nothing, for an exercise that isn't there
    and for two that replace the same module.
    """
    chosen = _chosen(os.environ[VARIABLE], catalogue(exercises_folder()))
    sys.meta_path.insert(0, _Finder(chosen))
    log.warning("pagedattn runs on a reader's code: %s", notice(active()))


def _chosen(wanted: str, known: Mapping[str, Exercise]) -> list[Exercise]:
    found = (find(name, known, VARIABLE) for name in wanted.split(",") if name.strip())
    by_key = {exercise.key: exercise for exercise in found}
    by_module: dict[str, Exercise] = {}
    for exercise in by_key.values():
        first = by_module.setdefault(exercise.module, exercise)
        if first is not exercise:
            raise UserError(
                f"{VARIABLE}={wanted}: exercises {first.key} and {exercise.key} both "
                f"replace {exercise.module}. Choose one of them.",
                VARIABLE,
            )
        if not exercise.path.is_file():
            raise UserError(
                f"{VARIABLE}={wanted}: {exercise.path} is not there. "
                f"`make reset N={exercise.key}` makes it.",
                VARIABLE,
            )
    return list(by_key.values())


def active() -> tuple[str, ...]:
    """Keys of the exercises whose files stand in for modules in this process."""
    finders = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
    return tuple(e.key for f in finders for e in f.exercises.values())


def notice(keys: Sequence[str]) -> str:
    """Keys in words: "exercises 3, bug5"."""
    return f"exercise{'s' if len(keys) > 1 else ''} {', '.join(keys)}"
