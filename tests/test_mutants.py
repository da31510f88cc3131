"""The tests of the control plane, graded: change one thing, and one of them fails.

Known mistakes written by hand (`mutants.museum`), and mutants made by rule from every
line (`mutants.operators`): a sample here, all of them with PROFILE=long. A mutant that
no test can notice stands with its reason in `mutants.equivalent`.
"""

import ast
import hashlib
import logging
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
from mutants.equivalent import EQUIVALENT
from mutants.killers import killer
from mutants.museum import ENGINE, EXHIBITS, Exhibit
from mutants.operators import (
    OPERATORS,
    PACKAGE,
    TARGETS,
    Mutant,
    changed,
    generated,
    parse,
)

SAMPLE = 80
SEED = b"1"
BEYOND = {16, 17, 19, 23}  # known mistakes that the control plane can't make

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


MEANINGFUL = [m for m in generated() if m.key not in EQUIVALENT]
CHOSEN = sorted(MEANINGFUL, key=rank)[:SAMPLE]


# The graders themselves: fair, and not out of work.
@pytest.mark.parametrize("file", [*TARGETS, ENGINE])
def test_without_a_change_nothing_fails(file: str) -> None:
    assert killer(file, parse(file)) is None


def test_every_line_has_mutants_and_the_sample_is_drawn_from_all() -> None:
    per_file = Counter(mutant.file for mutant in generated())
    assert set(per_file) == set(TARGETS)
    assert len(generated()) > 800
    for file, only in TARGETS.items():
        assert per_file[file] >= (20 if only else len(statements(file)))
    operators = Counter(mutant.operator for mutant in MEANINGFUL)
    assert set(operators) == {operator.__name__ for operator in OPERATORS}
    assert len(CHOSEN) == SAMPLE < len(MEANINGFUL) / 5
    assert {mutant.file for mutant in CHOSEN} == set(TARGETS)
    assert len({mutant.operator for mutant in CHOSEN}) >= 6


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
    assert {exhibit.number for exhibit in EXHIBITS} == {*range(1, 27)} - BEYOND


def test_equivalents_are_mutants_and_have_reasons() -> None:
    known = {mutant.key for mutant in generated()}
    assert not [key for key in EQUIVALENT if key not in known]
    assert all(len(reason) > 20 for reason in EQUIVALENT.values())
    assert len(MEANINGFUL) > 0.9 * len(generated())


# The mutants.
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=str)
def test_known_mistake_is_noticed(exhibit: Exhibit) -> None:
    source = (PACKAGE / exhibit.file).read_text("utf-8")
    assert source.count(exhibit.old) == 1, "write this mutant anew"
    assert killer(exhibit.file, source.replace(exhibit.old, exhibit.new))


@pytest.mark.parametrize("mutant", CHOSEN, ids=place)
def test_generated_mutant_is_noticed(mutant: Mutant) -> None:
    assert killer(mutant.file, changed(mutant)), f"no test notices {mutant}"


@pytest.mark.long
@pytest.mark.parametrize("mutant", MEANINGFUL, ids=place)
def test_every_generated_mutant_is_noticed(mutant: Mutant) -> None:
    assert killer(mutant.file, changed(mutant)), f"no test notices {mutant}"


@pytest.mark.long
@pytest.mark.parametrize(
    "mutant", [m for m in generated() if m.key in EQUIVALENT], ids=place
)
def test_equivalent_mutant_changes_nothing(mutant: Mutant) -> None:
    assert killer(mutant.file, changed(mutant)) is None
