"""The tests, graded: change one thing in a module, and one of its tests fails.

Graded are those of the control plane, detokenizer, sampler and kernels' specification.
Known mistakes are written by hand (`mutants.museum`), others made by rule from every
line (`mutants.operators`): a sample of them here, all with PROFILE=long. A mutant that
no test can notice stands with its reason in `mutants.equivalent`. Which test noticed
which mutant: `pytest -rP`, or the table that PROFILE=long leaves in build/.
"""

import ast
import hashlib
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings
from mutants.equivalent import EQUIVALENT
from mutants.killers import killer
from mutants.museum import BEYOND, ENGINE, EXHIBITS, Exhibit
from mutants.operators import (
    CONTROL,
    OPERATORS,
    TARGETS,
    Mutant,
    changed,
    generated,
    parse,
    path_of,
)

SAMPLE = {file: 7 if file in CONTROL else 5 for file in TARGETS}
SEED = b"1"

# Their tests are those of other files: one round without a change is enough.
ALIKE = {"cache/prefix.py", "scheduler.py", "request.py", "text/detokenizer.py"}
ALIKE |= {"sampling/filters.py", ENGINE}

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="no timer to stop an endless mutant with"
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failing steps are logged with their tracebacks; here they are meant to fail."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def rank(mutant: Mutant) -> bytes:
    """An order that depends on the mutant alone: edits elsewhere keep the sample."""
    return hashlib.sha256(SEED + repr((*mutant.key, mutant.path)).encode()).digest()


def place(mutant: Mutant) -> str:
    """A short name for a test's id."""
    return f"{mutant.file}:{mutant.line}-{mutant.operator}"


def chosen(file: str) -> list[Mutant]:
    """The sample of one file's mutants."""
    own = [mutant for mutant in MEANINGFUL if mutant.file == file]
    return sorted(own, key=rank)[: SAMPLE[file]]


MEANINGFUL = [m for m in generated() if m.key not in EQUIVALENT]
CHOSEN = [mutant for file in TARGETS for mutant in chosen(file)]


@pytest.fixture(scope="module")
def report() -> Iterator[list[str]]:
    """Lines of the report; PROFILE=long writes them down, a file for each worker."""
    lines: list[str] = []
    yield lines
    if os.environ.get("PROFILE") == "long":
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        path = Path(__file__).parents[1] / "build" / f"mutants{worker}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join([*lines, ""]), "utf-8")


def noticed(report: list[str], mutant: Mutant | Exhibit, tree: ast.Module | str) -> str:
    """The test that notices the mutant, noted in the report; fails if none does."""
    by = killer(mutant.file, tree)
    report.append(f"{mutant}\n    killed by {by}")
    print(report[-1])
    assert by is not None, f"no test notices {mutant}"
    return by


# The graders themselves: fair, and not out of work.
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=pytest.mark.long if file in ALIKE else ())
        for file in (*TARGETS, ENGINE)
    ],
)
def test_without_a_change_nothing_fails(file: str) -> None:
    assert killer(file, parse(file)) is None


def test_grading_leaves_no_trace() -> None:
    """Profile, modules, imports and signals are as they were, killed or not."""
    import_module("pagedattn.text.stop")
    before = surroundings()
    file = "text/stop.py"
    source = path_of(file).read_text("utf-8")
    for old, new in (("", ""), ("is not None", "is None"), ("state == 0", "False")):
        assert bool(old) == bool(killer(file, source.replace(old, new)))
        assert surroundings() == before


def surroundings() -> tuple[object, ...]:
    """What a mutant in place changes."""
    return (
        settings.get_current_profile_name(),
        settings().max_examples,
        settings().phases,
        [*sys.meta_path],
        signal.getsignal(signal.SIGVTALRM),
        signal.getitimer(signal.ITIMER_VIRTUAL),
        sys.modules["pagedattn.text.stop"],
        sys.modules["pagedattn.text"].stop,
        {n: m for n, m in sys.modules.items() if n.startswith("test_")},
    )


def test_every_line_has_mutants_and_the_sample_is_drawn_from_all() -> None:
    per_file = Counter(mutant.file for mutant in generated())
    assert set(per_file) == set(TARGETS)
    assert len(generated()) > 1600
    for file, only in TARGETS.items():
        assert per_file[file] >= (20 if only else len(statements(file)))
    operators = Counter(mutant.operator for mutant in MEANINGFUL)
    assert set(operators) == {operator.__name__ for operator in OPERATORS}
    assert 40 <= len(CHOSEN) == sum(SAMPLE.values()) < len(MEANINGFUL) / 5
    assert {mutant.file for mutant in CHOSEN} == set(TARGETS)
    assert len({mutant.operator for mutant in CHOSEN}) >= 8


def statements(file: str) -> list[ast.stmt]:
    """The statements of a file's functions that do something."""
    kinds = ast.Assign, ast.AugAssign, ast.Return, ast.If, ast.For, ast.While
    return [node for node in ast.walk(parse(file)) if isinstance(node, kinds)]


def test_every_function_has_mutants() -> None:
    for file, only in TARGETS.items():
        found = {m.where.split(".")[-1] for m in generated() if m.file == file}
        if only is None:
            assert functions(file) - found <= {"check", "__repr__"}


def functions(file: str) -> set[str]:
    """Names of a file's functions."""
    nodes = ast.walk(parse(file))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_the_museum_is_complete() -> None:
    numbers = {exhibit.number for exhibit in EXHIBITS} - {None}
    assert numbers == {*range(1, 27)} - set(BEYOND)


def test_equivalents_are_mutants_and_have_reasons() -> None:
    known = {mutant.key for mutant in generated()}
    assert not [key for key in EQUIVALENT if key not in known]
    assert all(len(reason) > 20 for reason in EQUIVALENT.values())
    assert len(MEANINGFUL) > 0.9 * len(generated())


# The mutants.
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=str)
def test_known_mistake_is_noticed(exhibit: Exhibit, report: list[str]) -> None:
    source = path_of(exhibit.file).read_text("utf-8")
    assert source.count(exhibit.old) == 1, "write this mutant anew"
    by = noticed(report, exhibit, source.replace(exhibit.old, exhibit.new))
    assert not by.startswith("import") and "NameError" not in by, "misspelt"


@pytest.mark.parametrize("mutant", CHOSEN, ids=place)
def test_generated_mutant_is_noticed(mutant: Mutant, report: list[str]) -> None:
    noticed(report, mutant, changed(mutant))


@pytest.mark.long
@pytest.mark.parametrize("mutant", MEANINGFUL, ids=place)
def test_every_generated_mutant_is_noticed(mutant: Mutant, report: list[str]) -> None:
    noticed(report, mutant, changed(mutant))


@pytest.mark.long
@pytest.mark.parametrize(
    "mutant", [m for m in generated() if m.key in EQUIVALENT], ids=place
)
def test_equivalent_mutant_changes_nothing(mutant: Mutant, report: list[str]) -> None:
    by = killer(mutant.file, changed(mutant))
    report.append(f"{mutant}\n    equivalent: {EQUIVALENT[mutant.key]}")
    assert by is None
