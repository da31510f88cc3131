"""The exercises: what readers get fails, what they are to write passes, and it serves.

Knows the recipes, the tools and the finder that puts a reader's file in a module's
place. A reader is played by the reference: its bodies are pasted, one by one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from judge import Judge
from serve_live import write_model
from test_serve_process import Process

from pagedattn.errors import UserError
from pagedattn.student import FOLDER, VARIABLE, Exercise, catalogue, find, notice

ROOT = Path(__file__).parents[1]
EXERCISES = ROOT / "exercises"


def load_tools() -> ModuleType:
    """exercises/tools.py, which is a script in a folder that is no package."""
    spec = spec_from_file_location("exercise_tools", EXERCISES / "tools.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tools = load_tools()
Judges = Callable[[Exercise], tuple[int, str]]
KNOWN = catalogue(EXERCISES)
BUILDS = [key for key, exercise in KNOWN.items() if not exercise.is_bug]
BUGS = [key for key, exercise in KNOWN.items() if exercise.is_bug]


@pytest.fixture(autouse=True)
def nobody_is_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests choose the exercises and their folder themselves."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))  # where `unshrunk` is


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all exercises as they are made."""
    folder = tmp_path_factory.mktemp("fresh")
    for recipe in EXERCISES.glob("[0-9][0-9]_*.toml"):
        shutil.copy(recipe, folder)
    for exercise in catalogue(folder).values():
        exercise.path.write_text(tools.generated(exercise), "utf-8")
    return folder


@pytest.fixture
def desk(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fresh exercises to work on, in the place of the repository's folder."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "desk"))
    return shutil.copytree(fresh, tmp_path / "desk")


def at(folder: Path, key: str) -> Exercise:
    """An exercise whose file is in that folder."""
    return catalogue(folder)[key]


def reference_body(exercise: Exercise, body: str) -> str:
    """The reference's lines for one body."""
    text = tools.source(exercise)
    lines = text.splitlines(keepends=True)
    node = tools.function(tools.ast.parse(text), body)
    return "".join(lines[tools.body_lines(lines, node)])


def paste(exercise: Exercise, body: str, text: str | None = None) -> None:
    """Write one body into the reader's file: the reference's, or `text`."""
    lines = exercise.path.read_text("utf-8").splitlines(keepends=True)
    node = tools.function(tools.ast.parse("".join(lines)), body)
    lines[tools.body_lines(lines, node)] = [text or reference_body(exercise, body)]
    exercise.path.write_text("".join(lines), "utf-8")


def solve(exercise: Exercise) -> None:
    """Paste all bodies, or put the bug right."""
    for body in exercise.recipe.get("bodies", ()):
        paste(exercise, body)
    if exercise.is_bug:
        text = exercise.path.read_text("utf-8")
        old, new = exercise.recipe["old"], exercise.recipe["new"]
        exercise.path.write_text(text.replace(new, old, 1), "utf-8")


def tool(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """exercises/tools.py as make calls it."""
    command = [sys.executable, str(EXERCISES / "tools.py"), *argv]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def judge() -> Iterator[Judges]:
    """pytest's exit code and output on a reader's file."""
    process = Judge()

    def run(exercise: Exercise) -> tuple[int, str]:
        arguments = ["-p", "unshrunk", *tools.arguments(exercise)]
        return process.run(arguments, tools.environment(exercise) | {"PROFILE": "fast"})

    yield run
    process.close()


# The files, and what they are made from.
def test_files_are_as_generated(capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.check() == 0, capsys.readouterr().out


@pytest.mark.parametrize("key", KNOWN)
def test_recipe_is_sound(key: str) -> None:
    assert list(tools.faults(KNOWN[key])) == []
    assert 1 <= KNOWN[key].recipe.get("museum", 1) <= 26


@pytest.mark.parametrize("key", KNOWN)
def test_file_is_the_module_but_for_the_exercise(key: str, desk: Path) -> None:
    """Solved, the file is the module byte for byte, under a comment."""
    exercise = at(desk, key)
    solve(exercise)
    text, module = exercise.path.read_text("utf-8"), tools.source(exercise)
    assert text.endswith(f"\n\n{module}")
    top = text.removesuffix(module).strip().splitlines()
    assert all(line.startswith("#") and len(line) <= 88 for line in top)
    assert f"make exercise N={key} " in text


@pytest.mark.parametrize("key", BUILDS)
def test_stub_fails(key: str, desk: Path, judge: Judges) -> None:
    exercise = at(desk, key)
    code, output = judge(exercise)
    assert code in (1, 2), output
    bodies = "|".join(map(re.escape, exercise.recipe["bodies"]))
    assert re.search(rf"NotImplementedError: exercise {key}: ({bodies})\b", output)


@pytest.mark.parametrize("key", BUGS)
def test_bug_is_noticed(key: str, desk: Path, judge: Judges) -> None:
    exercise = KNOWN[key] if compiled_already(KNOWN[key]) else at(desk, key)
    code, output = judge(exercise)
    assert code == 1, output
    assert "NotImplementedError" not in output


def compiled_already(exercise: Exercise) -> bool:
    """Whether machine code may be there for the file itself, where it stands."""
    kernels = exercise.module.startswith("pagedattn.kernels.")
    return kernels and tools.is_untouched(tools.read(exercise))


@pytest.mark.long
@pytest.mark.parametrize("key", KNOWN)
def test_solved_file_passes(key: str, desk: Path, judge: Judges) -> None:
    """The fast profile leaves it at exercise 3, below: the suite itself runs these
    tests on the modules, which the solved files are."""
    exercise = at(desk, key)
    solve(exercise)
    code, output = judge(exercise)
    assert code == 0, output


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "body"), [(k, b) for k in BUILDS for b in KNOWN[k].recipe["bodies"]]
)
def test_no_body_may_be_left_out(
    key: str, body: str, desk: Path, judge: Judges
) -> None:
    exercise = at(desk, key)
    for other in exercise.recipe["bodies"]:
        if other != body:
            paste(exercise, other)
    code, output = judge(exercise)
    assert code in (1, 2) and f"exercise {key}: {body}" in output, output


# Cutting bodies out.
SAMPLE = '''\
"""A module."""


class Thing:
    # Before.
    @property
    def plain(
        self,
    ) -> int:
        # A comment in the body goes.

        @staticmethod
        def inner() -> int:
            return 1

        return inner()
    # After.

    async def told(self) -> int:
        """One line."""
        return 2


def a_function_whose_name_is_as_long_as_a_name_can_be() -> None:
    """Two
    lines."""
    while True:
        pass


def other() -> int: return 3
'''
STUB = '''\
"""A module."""


class Thing:
    # Before.
    @property
    def plain(
        self,
    ) -> int:
        raise NotImplementedError("exercise 7: Thing.plain")
    # After.

    async def told(self) -> int:
        """One line."""
        raise NotImplementedError("exercise 7: Thing.told")


def a_function_whose_name_is_as_long_as_a_name_can_be() -> None:
    """Two
    lines."""
    raise NotImplementedError(
        "exercise 7: a_function_whose_name_is_as_long_as_a_name_can_be"
    )


def other() -> int: return 3
'''
LONG_NAME = "a_function_whose_name_is_as_long_as_a_name_can_be"


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one module and one chapter; its exercises."""
    (tmp_path / "pagedattn").mkdir()
    (tmp_path / "pagedattn" / "sample.py").write_text(SAMPLE)
    (tmp_path / "exercises").mkdir()
    monkeypatch.setattr(tools, "ROOT", tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path / "exercises"))
    return tmp_path / "exercises"


def recipe(folder: Path, *bodies: str, module: str = "pagedattn.sample") -> Exercise:
    """An exercise of chapter 7 that takes out these bodies."""
    names = ", ".join(f'"{body}"' for body in bodies)
    hints = "\n".join(f'"{body}" = "Think about {body}."' for body in bodies)
    (folder / "07_sample.toml").write_text(
        f'title = "Sample"\nmodule = "{module}"\nbodies = [{names}]\n'
        f'tests = ["-k", "nothing"]\n[hints]\n{hints}\n'
    )
    return at(folder, "7")


def test_bodies_are_cut_out_and_nothing_else(sample: Path) -> None:
    exercise = recipe(sample, "Thing.told", "Thing.plain", LONG_NAME)
    assert list(tools.faults(exercise)) == []
    assert tools.stub(exercise) == STUB
    text = tools.generated(exercise)
    assert tools.unfinished(exercise, text) == exercise.recipe["bodies"]
    assert tools.is_untouched(text) and not tools.is_untouched(text + "#")


@pytest.mark.parametrize(
    ("bodies", "module", "word"),
    [
        (("Thing.gone",), "pagedattn.sample", "Thing.gone: 0 such"),
        (("Thing",), "pagedattn.sample", "Thing: 1 such"),
        (("other",), "pagedattn.sample", "no lines of its own"),
        (("other",), "pagedattn.nothing", "no module"),
        ((), "pagedattn.sample", "no `bodies`"),
    ],
)
def test_wrong_recipes_are_told(
    sample: Path, bodies: tuple[str, ...], module: str, word: str
) -> None:
    assert any(word in f for f in tools.faults(recipe(sample, *bodies, module=module)))
    assert tools.generate() == 1 and tools.check() == 1
    assert not list(sample.glob("ex*.py"))


def test_a_mistake_stands_once(sample: Path) -> None:
    (sample / "07_sample.toml").write_text(
        'title = "Sample"\n[bug]\nmodule = "pagedattn.sample"\nsymptom = "s"\n'
        'old = "return"\nnew = "yield"\nhint = "h"\ntests = ["-k", "nothing"]\n'
    )
    assert list(catalogue(sample)) == ["bug7"]
    assert list(tools.faults(at(sample, "bug7"))) == ["`old` stands 4 times"]


def test_readers_work_is_kept_and_never_passes_for_ours(
    sample: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exercise = recipe(sample, "Thing.told", LONG_NAME)
    (sample / "README.md").write_text("# E\n<!-- table -->\n<!-- end -->\nwords\n")
    monkeypatch.delenv("CI", raising=False)
    assert tools.check() == 1 and "not there" in capsys.readouterr().out
    assert tools.generate() == 0 and tools.check() == 0
    assert (
        "| 7 | Sample | [`ex07_sample.py`](ex07_sample.py): 2 bodies of"
        in (sample / "README.md").read_text()
    )
    mine = exercise.path.read_text("utf-8").replace("Two\n", "Zwei\n")
    exercise.path.write_text(mine, "utf-8")
    assert tools.generate() == 0 and exercise.path.read_text("utf-8") == mine
    assert tools.check() == 0 and "a reader's work" in capsys.readouterr().out
    monkeypatch.setenv("CI", "true")
    assert tools.check() == 1 and "edited by hand" in capsys.readouterr().out
    assert tools.reset(exercise) == 0 and tools.check() == 0
    assert (sample / "ex07_sample.py.1.bak").read_text("utf-8") == mine


def test_files_of_another_version_are_noticed(
    sample: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exercise = recipe(sample, "Thing.told")
    assert tools.generate() == 0
    recipe(sample, "Thing.told", LONG_NAME)
    monkeypatch.delenv("CI", raising=False)
    assert tools.check() == 1 and "older version" in capsys.readouterr().out
    assert tools.generate() == 0 and tools.check() == 0
    exercise.path.with_name("ex08_gone.py").touch()
    assert tools.check() == 1 and "ex08_gone.py" in capsys.readouterr().out


# A reader's walk through exercise 3: from the stub to green, and back.
def test_walk_from_stub_to_green(desk: Path) -> None:
    exercise = at(desk, "3")
    first, *rest = exercise.recipe["bodies"]
    assert on_board() == "not started"
    done = tool("run", "3")
    assert done.returncode == 1
    assert hint_of(done).startswith(f"0 of {len(rest) + 1} bodies written. Next, ")
    paste(exercise, first)
    assert on_board() == f"1 of {len(rest) + 1} bodies"
    assert rest[0] in tool("hint", "03").stdout
    for body in rest:
        paste(exercise, body)
    assert on_board() == "not run since the last edit"
    done = tool("run", "ex3", **{VARIABLE: "no such exercise"})
    assert done.returncode == 0, done.stdout
    assert hint_of(done).endswith("PAGEDATTN_STUDENT=3 make serve")
    assert on_board() == "green"
    paste(exercise, "BlockPool.grow", "        return []\n")
    done = tool("run", "3")
    assert done.returncode == 1 and hint_of(done).startswith("Hint, "), done.stdout
    assert on_board() == "red"
    assert "ex03_blocks.py.1.bak" in tool("reset", "3").stdout
    assert on_board() == "not started"
    assert tools.generated(exercise) == exercise.path.read_text("utf-8")


def on_board() -> str:
    """What the board says of exercise 3."""
    (row,) = re.findall(r"^ *3  (.*)$", tool("board").stdout, re.M)
    return re.split(r"  +", row)[1]


def hint_of(done: subprocess.CompletedProcess[str]) -> str:
    """What a run says last: its last paragraph, in one line."""
    return " ".join(done.stdout.strip().split("\n\n")[-1].split())


def test_hint_for_what_failed(sample: Path) -> None:
    exercise = recipe(sample, "Thing.told", LONG_NAME)
    text = tools.header(exercise) + SAMPLE
    line = text.splitlines().index("    while True:") + 1
    frames = "somewhere/ex07_sample.py:{}: in told\ntests/x.py:3: in test\n"
    inside = frames.format(line)
    assert tools.failing_body(exercise, text, inside) == LONG_NAME
    outside = frames.format(1) + "assert thing.told() == 4"
    assert tools.failing_body(exercise, text, outside) == "Thing.told"
    lost = "ex07_sample.py:4: in check"
    assert tools.failing_body(exercise, text, lost) is None
    assert "shows in `check`, line 4" in tools.verdict(exercise, text, 1, lost)
    assert tools.verdict(exercise, text, 0, "").startswith("Green")
    assert "Think about Thing.told" in tools.verdict(exercise, text, 1, outside)
    assert "contracts" in tools.verdict(exercise, text, 1, "nothing")
    assert "pytest ended with 4" in tools.verdict(exercise, text, 4, "")
    assert "ex07_sample.py, line 1" in tools.verdict(exercise, "def", 2, "")


def test_a_mistake_gets_a_first_step_and_then_its_hint(desk: Path) -> None:
    exercise = at(desk, BUGS[0])
    text = exercise.path.read_text("utf-8")
    assert "failing test above" in tools.verdict(exercise, text, 1, "")
    worked_on = tools.verdict(exercise, text + "#\n", 1, "")
    assert worked_on == tools.said("Hint", exercise.recipe["hint"])
    assert tools.verdict(exercise, text + "#\n", 0, "").startswith("Green")


# The finder.
def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`code` in an interpreter with these variables."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


BOTH = next((k, b) for k in BUILDS for b in BUGS if KNOWN[k].module == KNOWN[b].module)


@pytest.mark.parametrize(
    ("wanted", "folder", "words"),
    [
        ("99", None, f"PAGEDATTN_STUDENT=99: no such exercise. There are: {BUILDS[0]}"),
        ("blocks", None, "no such exercise"),
        ("3,", "no/such/folder", "An installed package has none: work in a clone"),
        (",".join(BOTH), None, f"exercises {BOTH[0]} and {BOTH[1]} both replace"),
    ],
)
def test_mistakes_are_told_at_import(
    wanted: str, folder: str | None, words: str
) -> None:
    more = {} if folder is None else {FOLDER: folder}
    done = python("import pagedattn", **{VARIABLE: wanted}, **more)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pagedattn: ") and words in last
    assert "Traceback" not in done.stderr


def test_missing_and_broken_files_are_told(desk: Path) -> None:
    at(desk, "3").path.unlink()
    done = python("import pagedattn", **{VARIABLE: "3"})
    assert "`make reset N=3` makes it" in done.stderr
    (desk / "03_blocks.toml").write_text("title = ")
    done = python("import pagedattn", **{VARIABLE: "5"})
    assert "03_blocks.toml" in done.stderr.strip().splitlines()[-1]


def test_readers_files_replace_modules_and_say_so(desk: Path) -> None:
    code = (
        "import sys, pagedattn, pagedattn.cache.blocks as blocks\n"
        "from pagedattn.student import active\n"
        "import pagedattn.errors as errors\n"
        "print(blocks.__file__, errors.__file__, active(), sep='\\n')"
    )
    done = python(code, **{VARIABLE: " 03,3"})
    theirs, ours, keys = done.stdout.splitlines()
    assert Path(theirs) == at(desk, "3").path and keys == "('3',)"
    assert Path(ours) == ROOT / "pagedattn" / "errors.py"
    assert "runs on a reader's code: exercise 3" in done.stderr
    assert not (desk / "__pycache__").exists()


@pytest.mark.parametrize("wanted", [None, ""])
def test_without_the_variable_nothing_is_replaced(wanted: str | None) -> None:
    code = "import sys, pagedattn; print('pagedattn.student' in sys.modules)"
    done = python(code, **({} if wanted is None else {VARIABLE: wanted}))
    assert done.stdout == "False\n" and done.stderr == ""


def test_names_of_exercises() -> None:
    assert find(" Bug03 ", KNOWN, "N") is KNOWN["bug3"]
    assert find("ex3", KNOWN, "N") is find("3", KNOWN, "N") is KNOWN["3"]
    with pytest.raises(UserError, match="N=: no such"):
        find("", KNOWN, "N")
    assert notice(["3"]) == "exercise 3" and notice(["3", "5"]) == "exercises 3, 5"


# Serving on the reader's code.
@pytest.fixture
def served(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Process]:
    """A server for the tiny model, on a solved exercise 3 that says it is there."""
    exercise = at(desk, "3")
    solve(exercise)
    with exercise.path.open("a", encoding="utf-8") as file:
        file.write('print("the reader\'s blocks are loaded", flush=True)\n')
    monkeypatch.setenv(VARIABLE, "3")
    pool = ("--num-gpu-blocks-override", "65", "--served-model-name", "tiny")
    process = Process(str(write_model(tmp_path / "tiny")), *pool)
    yield process
    process.child.kill()
    process.child.wait()


def test_real_clients_are_served_on_the_readers_blocks(served: Process) -> None:
    said = "\n".join(served.lines)
    assert "the reader's blocks are loaded" in said
    assert re.search(r"reader's code +exercise 3$", said, re.M)
    body = {"prompt": "x" * 40, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with served.client() as client:
        first = client.post("/v1/completions", json=body).json()
        again = client.post("/v1/completions", json=body).json()
    assert first["usage"]["completion_tokens"] == 20
    assert first["choices"][0]["text"] == again["choices"][0]["text"]
