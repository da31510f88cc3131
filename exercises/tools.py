"""The exercises: make readers' files from the engine, test them, help with one hint.

    python exercises/tools.py board | run N | hint N | reset N    for readers
    python exercises/tools.py generate | check                    for authors, CI

N is 3 for what chapter 3 has built, bug3 for its mistake to find. Knows syntax trees,
the recipes (`NN_name.toml`) and pytest's command line; knows nothing of the engine.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":  # nobody's unfinished work may stop these tools
    os.environ.pop("PAGEDATTN_STUDENT", None)

from pagedattn.errors import UserError
from pagedattn.student import (
    FOLDER,
    VARIABLE,
    Exercise,
    catalogue,
    exercises_folder,
    find,
)

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 88
SECONDS = 120  # for one test: an endless loop is a mistake, too
GREEN = "green"

Function = ast.FunctionDef | ast.AsyncFunctionDef


# The reference, and what is taken out of it or put into it.
def source_path(module: str) -> Path:
    """Where a module of the package stands in the repository."""
    parts = module.split(".")[1:]
    folder = ROOT if parts[0] == "kernels" else ROOT / "pagedattn"
    return folder.joinpath(*parts).with_suffix(".py")


def source(exercise: Exercise) -> str:
    """The text of the module that the exercise is made from."""
    return source_path(exercise.module).read_text("utf-8")


def function(tree: ast.Module, name: str) -> Function:
    """The function of that qualified name; LookupError unless there is just one."""
    nodes: list[ast.AST] = [tree]
    for part in name.split("."):
        nodes = [
            child
            for node in nodes
            for child in ast.iter_child_nodes(node)
            if getattr(child, "name", None) == part
        ]
    if len(nodes) != 1 or not isinstance(nodes[0], Function):
        raise LookupError(f"{name}: {len(nodes)} such functions")
    return nodes[0]


def body_lines(lines: Sequence[str], node: Function) -> slice:
    """The lines of a function's body: all that follows its header and docstring."""
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        start = first.end_lineno
    else:
        start = min([first.lineno, *_decorators(first)]) - 1
        while re.match(r"\s*(#|$)", lines[start - 1]):
            start -= 1
    if start < node.lineno or start == node.end_lineno:
        raise LookupError(f"{node.name}: its body has no lines of its own")
    return slice(start, node.end_lineno)


def _decorators(node: ast.stmt) -> list[int]:
    return [d.lineno for d in getattr(node, "decorator_list", [])]


def unwritten(exercise: Exercise, body: str) -> str:
    """What a body that is still to be written raises."""
    return f"exercise {exercise.key}: {body}"


def _raise(message: str, indent: int) -> list[str]:
    call = f'raise NotImplementedError("{message}")'
    if indent + len(call) > WIDTH:
        call = f'raise NotImplementedError(\n    "{message}"\n)'
    return textwrap.indent(call + "\n", " " * indent).splitlines(keepends=True)


def stub(exercise: Exercise) -> str:
    """The module without the bodies that the recipe lists, else byte for byte."""
    text = source(exercise)
    lines, tree = text.splitlines(keepends=True), ast.parse(text)
    nodes = {body: function(tree, body) for body in exercise.recipe["bodies"]}
    for body, node in sorted(nodes.items(), key=lambda item: -item[1].lineno):
        message = unwritten(exercise, body)
        lines[body_lines(lines, node)] = _raise(message, node.col_offset + 4)
    return "".join(lines)


def with_bug(exercise: Exercise) -> str:
    """The module with the recipe's mistake in it."""
    text, recipe = source(exercise), exercise.recipe
    if text.count(recipe["old"]) != 1:
        raise LookupError(f"`old` stands {text.count(recipe['old'])} times")
    return text.replace(recipe["old"], recipe["new"])


# The reader's file: a header, then the module. The header ends with the name of what
# the file was made from, and a digest by which an untouched file knows itself.
BUILD = """\
Exercise {key} · {title}: build it.

This is {file} without these bodies:

{bodies}

Each raises NotImplementedError. Its docstring is its contract: write the body here,
in this file, and keep the signature.

    make exercise N={key}    the engine's own tests on your file, and one hint
    make hint N={key}        a hint alone
    make reset N={key}       this file as it was; yours is kept beside it
{serve}
The idea is in {chapter}.
One solution is {file} itself.
"""
FIND = """\
Exercise {key} · {title}: find the bug.

This is {file}, with a mistake in it that a real
engine made. What its users saw:

{symptom}

Find it and correct it, here, in this file. The rest is as it should be.

    make exercise N={key}    the engine's own tests on your file, and one hint
    make hint N={key}        a hint alone
    make reset N={key}       this file as it was; yours is kept beside it

The idea is in {chapter}.
"""
MADE = "# Made from {file} by exercises/tools.py. Untouched: {digest}\n"
MADE_PATTERN = re.compile(r"^# Made from .* Untouched: (\w+)\n\n?", re.MULTILINE)


def header(exercise: Exercise) -> str:
    """What the reader is told at the top of the file, as a comment."""
    file = source_path(exercise.module).relative_to(ROOT).as_posix()
    name = re.sub(r"^[a-z]+(\d\d_.*)\.py$", r"\1", exercise.path.name)
    known = {"key": exercise.key, "title": exercise.title, "file": file}
    known["chapter"] = f"book/{name}.ipynb"
    if exercise.is_bug:
        symptom = " ".join(exercise.recipe["symptom"].split())
        wrapped = textwrap.fill(symptom, WIDTH - 2 - 4)
        text = FIND.format(symptom=textwrap.indent(wrapped, "    "), **known)
    else:
        bodies = "\n".join(f"    {body}" for body in exercise.recipe["bodies"])
        serve = f"    {serve_command(exercise)}    the server, on your code\n"
        serve = serve if is_served(exercise) else ""
        text = BUILD.format(bodies=bodies, serve=serve, **known)
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def is_served(exercise: Exercise) -> bool:
    """Whether the server runs this module, and so the reader's file in its place."""
    room = exercise.module.split(".")[1]
    return room not in ("kernels", "bench", "viz", "book", "testing")


def serve_command(exercise: Exercise) -> str:
    """How to serve on the reader's file."""
    return f"PAGEDATTN_STUDENT={exercise.key} make serve"


def generated(exercise: Exercise) -> str:
    """The reader's file as it is before the reader touches it."""
    file = source_path(exercise.module).relative_to(ROOT).as_posix()
    module = with_bug(exercise) if exercise.is_bug else stub(exercise)
    top = header(exercise) + "#\n"
    made = MADE.format(file=file, digest=digest(top + module))
    return f"{top}{made}\n{module}"


def digest(text: str) -> str:
    """A short name for exactly this text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def made_from(text: str) -> str | None:
    """The digest that a reader's file was made with."""
    found = MADE_PATTERN.search(text)
    return found[1] if found else None


def is_untouched(text: str) -> bool:
    """Whether a file is as it was made, from whatever version of the module."""
    return made_from(text) == digest(MADE_PATTERN.sub("", text, count=1))


def read(exercise: Exercise) -> str:
    """The reader's file; UserError if it isn't there."""
    if not exercise.path.is_file():
        raise UserError(
            f"{exercise.path} is not there: `make reset N={exercise.key}` makes it.",
            "N",
        )
    return exercise.path.read_text("utf-8")


def unfinished(exercise: Exercise, text: str) -> list[str]:
    """Bodies that are still to be written; none of a mistake to find."""
    bodies = exercise.recipe.get("bodies", [])
    return [b for b in bodies if re.search(f"{unwritten(exercise, b)}[\"']", text)]


# Making the files, and checking that they were made. What readers wrote is theirs.
def faults(exercise: Exercise) -> Iterator[str]:
    """What is wrong with a recipe."""
    recipe = exercise.recipe
    needed = ("symptom", "old", "new", "hint") if exercise.is_bug else ("bodies",)
    yield from (f"no `{name}`" for name in (*needed, "tests") if not recipe.get(name))
    if not source_path(exercise.module).is_file():
        yield f"{exercise.module} is no module with a file of its own"
        return
    for test in recipe.get("tests", []):
        if not test.startswith("-") and "tests/" in test:
            if not (ROOT / test.split("::")[0]).exists():
                yield f"{test} is not there"
    yield from (f"{b} has no hint" for b in _without_hint(exercise))
    try:
        ast.parse(generated(exercise))
    except (KeyError, LookupError, SyntaxError) as problem:
        yield f"{problem}"


def _without_hint(exercise: Exercise) -> set[str]:
    bodies = set(exercise.recipe.get("bodies", []))
    return bodies ^ exercise.recipe.get("hints", {}).keys()


def generate() -> int:
    """Write every file that no reader has touched, and the table of README.md."""
    known = catalogue(exercises_folder())
    wrong = []
    for exercise in known.values():
        found = [f"exercise {exercise.key}: {fault}" for fault in faults(exercise)]
        wrong += found
        if not found:
            _write(exercise)
    _write_table(known)
    print("\n".join(wrong) or f"{len(known)} exercises.")
    return bool(wrong)


def _write(exercise: Exercise) -> None:
    path, new = exercise.path, generated(exercise)
    old = path.read_text("utf-8") if path.is_file() else None
    if old is None or is_untouched(old):
        path.write_text(new, "utf-8")
    elif old != new:
        print(f"{path.name} holds a reader's work: left as it is.")


def check() -> int:
    """Whether all files are as `generate` writes them; a reader's own work may differ.

    Not in CI (CI=true), where every file has to be as it was made.
    """
    folder = exercises_folder()
    known = catalogue(folder)
    wrong = [f"exercise {k}: {f}" for k, e in known.items() for f in faults(e)]
    wrong += _left_over(folder, known)
    if not wrong:
        wrong = [f"{e.path.name}: {w}" for e in known.values() if (w := _differs(e))]
        wrong += _table_differs(known)
    print("\n".join(wrong) or f"{len(known)} exercises are as they should be.")
    return bool(wrong)


def _left_over(folder: Path, known: dict[str, Exercise]) -> Iterator[str]:
    made = {exercise.path for exercise in known.values()}
    for path in sorted([*folder.glob("ex*.py"), *folder.glob("bug*.py")]):
        if path not in made:
            yield f"{path.name}: no recipe makes this file"


def _differs(exercise: Exercise) -> str | None:
    if not exercise.path.is_file():
        return "not there; python exercises/tools.py generate"
    text = exercise.path.read_text("utf-8")
    if text == generated(exercise):
        return None
    if is_untouched(text):
        return "made from an older version; python exercises/tools.py generate"
    if os.environ.get("CI") == "true":
        return "edited by hand; make reset puts it right"
    print(f"{exercise.path.name} holds a reader's work.")
    return None


# The table in README.md.
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table(known: dict[str, Exercise]) -> str:
    """Every exercise in a Markdown table, a row for each chapter."""
    rows = ["| N | Chapter | Build | Find the bug |", "| --- | --- | --- | --- |"]
    for number, title, build, bug in chapters(known):
        rows.append(f"| {number} | {title} | {_task(build)} | {_task(bug)} |")
    return "\n".join(rows) + "\n"


def _task(exercise: Exercise | None) -> str:
    if exercise is None:
        return ""
    link = f"[`{exercise.path.name}`]({exercise.path.name})"
    if exercise.is_bug:
        return link
    n = len(exercise.recipe["bodies"])
    return f"{link}: {n} {'body' if n == 1 else 'bodies'} of `{exercise.module}`"


def chapters(
    known: dict[str, Exercise],
) -> Iterator[tuple[str, str, Exercise | None, Exercise | None]]:
    """Number, title, what to build and where to find a bug, for each chapter."""
    titles = {e.key.removeprefix("bug"): e.title for e in known.values()}
    for number, title in titles.items():
        yield number, title, known.get(number), known.get(f"bug{number}")


def _readme() -> Path:
    return exercises_folder() / "README.md"


def _write_table(known: dict[str, Exercise]) -> None:
    if _readme().is_file():
        text = TABLE.sub(lambda _: table(known), _readme().read_text("utf-8"))
        _readme().write_text(text, "utf-8")


def _table_differs(known: dict[str, Exercise]) -> Iterator[str]:
    if _readme().is_file() and table(known) not in _readme().read_text("utf-8"):
        yield "README.md: another table; python exercises/tools.py generate"


# Running: the engine's own tests on the reader's file.
def run(exercise: Exercise) -> int:
    """Run an exercise's tests on the reader's file and end with one hint."""
    text = read(exercise)
    code, output = run_tests(exercise)
    remember(exercise, text, code == 0 and not unfinished(exercise, text))
    print(f"\n{verdict(exercise, text, code, output)}")
    return code


def run_tests(exercise: Exercise) -> tuple[int, str]:
    """pytest's exit code and output, which is shown while it comes."""
    color = ["--color=yes"] if sys.stdout.isatty() else []
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", *color, *arguments(exercise)],
        cwd=ROOT,
        env=environment(exercise),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        lines = []
        for line in child.stdout or ():
            print(line, end="", flush=True)
            lines.append(re.sub(r"\x1b\[[\d;]*m", "", line))
    return child.returncode, "".join(lines)


def arguments(exercise: Exercise) -> list[str]:
    """What pytest is told: the exercise's tests, up to the first that fails."""
    quiet = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    return [*quiet, f"--timeout={SECONDS}", *exercise.recipe["tests"]]


def environment(exercise: Exercise) -> dict[str, str]:
    """Our environment, with the reader's file in the module's place."""
    here = {VARIABLE: exercise.key, FOLDER: str(exercise.path.parent)}
    return {**os.environ, **here}


def verdict(exercise: Exercise, text: str, code: int, output: str) -> str:
    """The one thing to say after a run."""
    if (wrong := syntax_error(exercise, text)) is not None:
        return wrong
    if (next_body := next_hint(exercise, text)) is not None:
        return next_body
    if code == 0:
        return praise(exercise)
    if code not in (1, 2):
        return f"pytest ended with {code}: nothing was judged."
    if exercise.is_bug and is_untouched(text):
        return first_step(exercise)
    if exercise.is_bug:
        return said("Hint", exercise.recipe["hint"])
    body = failing_body(exercise, text, output)
    if body is None:
        return said("Hint", where_it_shows(exercise, output))
    return said(f"Hint, {body}", exercise.recipe["hints"][body])


def said(title: str, words: str) -> str:
    """A title and the words that a recipe has for it, in lines."""
    return textwrap.fill(f"{title}: {' '.join(words.split())}", WIDTH)


def syntax_error(exercise: Exercise, text: str) -> str | None:
    """Where the reader's file is no Python; None if it is."""
    try:
        ast.parse(text)
    except SyntaxError as problem:
        return f"{exercise.path.name}, line {problem.lineno}: {problem.msg}."
    return None


def next_hint(exercise: Exercise, text: str) -> str | None:
    """The hint for the first body that is to be written; None if all are."""
    left = unfinished(exercise, text)
    if not left:
        return None
    all_of_them = len(exercise.recipe["bodies"])
    done = f"{all_of_them - len(left)} of {all_of_them} bodies written."
    return said(f"{done} Next, {left[0]}", exercise.recipe["hints"][left[0]])


def first_step(exercise: Exercise) -> str:
    """Where to begin with a mistake."""
    words = (
        "the failing test above shows what goes wrong. Play it through in "
        f"{exercise.path.name}, step by step. `make hint N={exercise.key}` says more."
    )
    return said("Hint", words)


def praise(exercise: Exercise) -> str:
    """What to do when all is well."""
    if exercise.is_bug:
        return "Green: found, and corrected. The chapter's discussion says more."
    if not is_served(exercise):
        return "Green: all of it is yours. The chapter's discussion says more."
    return f"Green. Serve real clients on your code: {serve_command(exercise)}"


def failing_body(exercise: Exercise, text: str, output: str) -> str | None:
    """The body that a failure points at: the innermost that was running, else the one
    that the failure's text names last."""
    tree, bodies = ast.parse(text), exercise.recipe["bodies"]
    spans = {b: function(tree, b) for b in bodies}
    frames = re.findall(rf"{re.escape(exercise.path.name)}:(\d+): in ", output)
    for line in map(int, reversed(frames)):
        for body, node in spans.items():
            if node.lineno <= line <= (node.end_lineno or 0):
                return body
    last = {b: _last_mention(b.split(".")[-1], output) for b in bodies}
    best = max(bodies, key=lambda body: last[body])
    return best if last[best] >= 0 else None


def where_it_shows(exercise: Exercise, output: str) -> str:
    """What to look at where a failure points at no body."""
    name = exercise.path.name
    frames = re.findall(rf"{re.escape(name)}:(\d+): in (\w+)", output)
    if not frames:
        return "read the failing test, and the contracts of what it calls."
    line, inside = frames[-1]
    return f"it shows in `{inside}`, line {line} of {name}. What of yours ran before?"


def _last_mention(name: str, output: str) -> int:
    found = [match.start() for match in re.finditer(rf"\b{name}\b", output)]
    return found[-1] if found else -1


# Progress: what the last run said about a file that has not changed since.
def _progress() -> dict[str, dict[str, object]]:
    try:
        return json.loads((exercises_folder() / ".progress.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def remember(exercise: Exercise, text: str, green: bool) -> None:
    """Keep what a run said about this text."""
    progress = _progress() | {exercise.key: {"file": digest(text), "green": green}}
    file = exercises_folder() / ".progress.json"
    file.write_text(json.dumps(progress, indent=1) + "\n", "utf-8")


def state(exercise: Exercise | None) -> str:
    """How far a reader is with an exercise, in a few words; "" if there is none."""
    if exercise is None:
        return ""
    if not exercise.path.is_file():
        return "no file: make reset"
    text = exercise.path.read_text("utf-8")
    if is_untouched(text):
        return "not started"
    if left := unfinished(exercise, text):
        total = len(exercise.recipe["bodies"])
        return f"{total - len(left)} of {total} bodies"
    last = _progress().get(exercise.key, {})
    if last.get("file") != digest(text):
        return "not run since the last edit"
    return GREEN if last.get("green") else "red"


def board() -> int:
    """Print how far the reader is."""
    known = catalogue(exercises_folder())
    rows = [("N", "chapter", "build", "find the bug")]
    for number, title, build, bug in chapters(known):
        rows.append((number, title, state(build), state(bug)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())
    green = sum(row.count(GREEN) for row in rows)
    print(
        f"\n{green} of {len(known)} are green. make exercise N=3, or N=bug3, tests one."
    )
    return 0


# One exercise: a hint, and a new start.
def hint(exercise: Exercise) -> int:
    """Print a hint: for the next body; for all, once they are written."""
    text = read(exercise)
    if exercise.is_bug:
        print(said("Hint", exercise.recipe["hint"]))
    elif (next_body := next_hint(exercise, text)) is not None:
        print(next_body)
    else:
        print("All bodies are written. What each has to take care of:")
        for body, words in exercise.recipe["hints"].items():
            print(said(body, words))
    return 0


def reset(exercise: Exercise) -> int:
    """Put the reader's file back as it was made; keep what was there beside it."""
    path, new = exercise.path, generated(exercise)
    old = path.read_text("utf-8") if path.is_file() else None
    if old == new:
        print(f"{path.name} is as it was made. Nothing to do.")
        return 0
    path.write_text(new, "utf-8")
    print(f"{path.name} is as new.")
    if old is not None and not is_untouched(old):
        backup = _free_name(path)
        backup.write_text(old, "utf-8")
        print(f"What you had written is in {backup.name}.")
    return 0


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.name}.{number}.bak")).exists():
        number += 1
    return free


# The command line.
ALL: dict[str, Callable[[], int]] = {
    "board": board,
    "generate": generate,
    "check": check,
}
ONE: dict[str, Callable[[Exercise], int]] = {"run": run, "hint": hint, "reset": reset}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 2 for a mistake of the caller's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("command", choices=[*ALL, *ONE])
    parser.add_argument("n", nargs="?", default="", metavar="N")
    args = parser.parse_args(argv)
    try:
        if args.command in ALL:
            return ALL[args.command]()
        if not args.n:
            raise UserError("Say which: N=3, or N=bug3. `make exercises` lists them.")
        exercise = find(args.n, catalogue(exercises_folder()), "N")
        return ONE[args.command](exercise)
    except UserError as problem:
        print(problem, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
