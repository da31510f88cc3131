"""The tests of the control plane, run against a mutant in this process.

The mutant and every module that depends on it are imported afresh, the test files as
well, and their tests called one by one until one fails: it is the tests that are
graded. Two things differ from a run by pytest: state machines draw fewer examples and
do not shrink, and a mutant that does not end is stopped after some seconds of
processor time.
"""

import ast
import inspect
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from mutants.operators import PACKAGE

TESTS = Path(__file__).parents[1]

# The tests that may kill a mutant of a file: examples, then state machines, then
# examples with the whole engine, which are the slowest.
LIGHT = {
    "cache/blocks.py": ("test_blocks", "test_tables", "test_scheduler"),
    "cache/prefix.py": ("test_blocks", "test_tables", "test_scheduler"),
    "cache/tables.py": ("test_tables", "test_scheduler"),
    "scheduler.py": ("test_scheduler",),
    "request.py": ("test_request", "test_scheduler"),
}
MACHINES = {
    "cache/blocks.py": ("test_blocks", "test_tables"),
    "cache/prefix.py": ("test_blocks", "test_tables"),
    "cache/tables.py": ("test_tables", "test_schedule_states"),
    "scheduler.py": ("test_schedule_states",),
    "request.py": ("test_schedule_states",),
}
HEAVY = {
    "cache/tables.py": ("test_engine",),
    "scheduler.py": ("test_engine",),
    "request.py": ("test_engine",),
    "engine.py": ("test_engine",),
}
EXAMPLES = {"test_schedule_states": 12}  # of each state machine; else 30

# Processor time after which a test counts as failed, twenty times what it takes:
# an example, a state machine or an example with the whole engine.
SHORT, LONG = 2.0, 15.0

Test = Callable[[], object]


class Endless(BaseException):
    """The mutant ran for too long."""


# A mutant in place of the file: a finder that serves its code, for a while.
class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, code: CodeType) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code


class _Finder(MetaPathFinder):
    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        self._loader = _Loader(name, str(path), code)

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname != self._loader.name:
            return None
        return spec_from_loader(fullname, self._loader)


@contextmanager
def in_place(file: str, tree: ast.Module | str) -> Iterator[None]:
    """Within, importing a test file gets everything that depends on `file` anew."""
    name = "pagedattn." + file.removesuffix(".py").replace("/", ".")
    path = PACKAGE / file
    finder = _Finder(name, path, compile(tree, str(path), "exec"))
    modules = {n: m for n, m in sys.modules.items() if n in _dependents(name)}
    for module in modules:
        del sys.modules[module]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in _dependents(name):
            _restore(module, modules.get(module))


def _restore(name: str, module: ModuleType | None) -> None:
    """Put `module` back, or nothing, where imports find it: by name and by parent."""
    imported = sys.modules.pop(name, None)
    package, _, child = name.rpartition(".")
    parent = sys.modules.get(package)
    if module is not None:
        sys.modules[name] = module
        if parent is not None:
            setattr(parent, child, module)
    elif parent is not None and getattr(parent, child, None) is imported is not None:
        delattr(parent, child)


@cache
def _dependents(name: str) -> frozenset[str]:
    """The module and all that import it, however far; packages stay as they are."""
    graph = dict(_imports())
    found, more = {name}, True
    while more:
        new = {n for n, needs in graph.items() if needs & found} - found
        found |= new
        more = bool(new)
    return frozenset(found)


def _imports() -> Iterator[tuple[str, set[str]]]:
    for path in (*PACKAGE.rglob("*.py"), *TESTS.glob("test_*.py")):
        if path.stem == "__init__":
            continue
        top = PACKAGE.parent if path.is_relative_to(PACKAGE) else TESTS
        name = ".".join(path.relative_to(top).with_suffix("").parts)
        text = path.read_text("utf-8")
        yield name, set(re.findall(r"^from (pagedattn\S*) import", text, re.M))


# The tests of a file, as plain calls.
def tests_for(file: str) -> Iterator[tuple[float, str, Test]]:
    """(time limit, name, call) of each test that may kill a mutant of `file`,
    cheapest first."""
    for suite in LIGHT.get(file, ()):
        for name, test in _examples(import_module(suite)):
            yield SHORT, name, test
    for suite in MACHINES.get(file, ()):
        for name, test in _machines(import_module(suite)):
            yield LONG, name, test
    for suite in HEAVY.get(file, ()):
        for name, test in _examples(import_module(suite)):
            yield LONG, name, test


def _machines(module: ModuleType) -> Iterator[tuple[str, Test]]:
    for machine in _own(module, RuleBasedStateMachine):
        yield machine.__name__, partial(_run_machine, machine, module.__name__)


def _examples(module: ModuleType) -> Iterator[tuple[str, Test]]:
    for name, value in vars(module).items():
        if name.startswith("test_") and inspect.isfunction(value):
            yield from _calls(value)


def _own(module: ModuleType, base: type) -> list[Any]:
    values = vars(module).values()
    classes = (v for v in values if isinstance(v, type) and issubclass(v, base))
    return [c for c in classes if c.__module__ == module.__name__]


def _run_machine(machine: type[RuleBasedStateMachine], name: str) -> None:
    few = settings(
        max_examples=EXAMPLES.get(name, 30),
        stateful_step_count=40,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(1)(machine), settings=few)


def _calls(test: Callable[..., object]) -> Iterator[tuple[str, Test]]:
    """The test once, or once for each value of its one `parametrize`."""
    marks = [m for m in getattr(test, "pytestmark", []) if m.name == "parametrize"]
    if not marks:
        yield test.__name__, test
    for mark in marks:
        names, values = re.split(r",\s*", mark.args[0]), mark.args[1]
        for value in values:
            row = value if len(names) > 1 else (value,)
            arguments = dict(zip(names, row, strict=True))
            yield f"{test.__name__}[{value}]", partial(test, **arguments)


def killer(file: str, tree: ast.Module | str) -> str | None:
    """The test that notices that `file` now reads `tree`; None if none does."""
    running = ["import"]
    try:
        with in_place(file, tree):
            for seconds, name, test in tests_for(file):
                running.append(name)
                with _limit(seconds):
                    test()
    except Endless:
        return f"{running[-1]} (no end)"
    except (Exception, pytest.fail.Exception) as error:
        return f"{running[-1]} ({type(error).__name__})"
    return None


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise `Endless` once so much processor time is spent."""

    def stop(*_: object) -> None:
        raise Endless

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
