"""The package's own tests, run against a mutant in this process.

The mutant and every module that depends on it are imported afresh, the test files as
well, and their tests called one by one until one fails: it is the tests that are
graded. Three things differ from a run by pytest: nothing is shrunk, state machines
draw fewer examples, and a mutant that does not end is stopped after some seconds of
processor time.
"""

import ast
import inspect
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_loader
from itertools import product
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from mutants.operators import ROOT, path_of

TESTS = Path(__file__).parents[1]

# The tests that may kill a mutant of a file: examples, then state machines, then
# examples that take seconds, with the whole engine or many numbers.
LIGHT = {
    "cache/blocks.py": ("test_blocks", "test_tables", "test_scheduler"),
    "cache/prefix.py": ("test_blocks", "test_tables", "test_scheduler"),
    "cache/tables.py": ("test_tables", "test_scheduler"),
    "scheduler.py": ("test_scheduler",),
    "request.py": ("test_request", "test_scheduler"),
    "text/stop.py": ("test_stop",),
    "sampling/random.py": ("test_sampling_random",),
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
    "text/stop.py": ("test_detokenizer",),
    "text/detokenizer.py": ("test_detokenizer",),
    "sampling/filters.py": ("test_sampling_filters", "test_sampling"),
    "sampling/penalties.py": ("test_sampling_penalties", "test_sampling"),
    "sampling/random.py": ("test_sampling",),
    "sampling/sampler.py": (
        "test_sampling",
        "test_sampling_filters",
        "test_sampling_penalties",
    ),
    "kernels/spec.py": ("test_kernels",),
}
EXAMPLES = {"test_schedule_states": 12}  # of each state machine; else 30

# Tests that grade nothing: they measure time, which a busy machine spoils, or look at
# no file that is mutated.
ASIDE = {
    "test_cost_per_token_does_not_grow",
    "test_the_folder_is_not_hugging_faces_package",
    "test_compile_all_reports_progress",
}

# Tests that take a second or more come after all others of their list.
SLOW = {
    "test_draws_follow_the_exact_distribution",
    "test_nucleus_of_a_wide_vocabulary",
    "test_spec_prefill_is_dense_softmax",
}

# Processor time after which a test counts as failed, ten times and more what it takes
# at the usual pace: an example, a state machine or an example that takes seconds.
SHORT, LONG = 2.0, 15.0
USUAL = 0.01  # seconds for 100,000 squares, on the machine of those two numbers

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
    path = path_of(file)
    finder = _Finder(name, path, compile(tree, str(path), "exec"))
    modules = {n: m for n, m in sys.modules.items() if n in _dependents(name)}
    for module in modules:
        _restore(module, None)
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
    package = ROOT / "pagedattn"
    for path in (*package.rglob("*.py"), *TESTS.glob("test_*.py")):
        if path.stem == "__init__" or path.parent.name.startswith("."):
            continue
        top = ROOT if path.is_relative_to(package) else TESTS
        name = ".".join(path.relative_to(top).with_suffix("").parts)
        yield name, set(_imported(path.read_text("utf-8")))


def _imported(text: str) -> Iterator[str]:
    """Modules that a file imports from; of a package also those it may name."""
    for module, names in re.findall(r"^from (pagedattn\S*) import (.*)", text, re.M):
        yield module
        yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))


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
    heavy = [
        example
        for suite in HEAVY.get(file, ())
        for example in _examples(import_module(suite))
    ]
    for name, test in sorted(heavy, key=lambda each: each[0].split("[")[0] in SLOW):
        yield LONG, name, test


def _machines(module: ModuleType) -> Iterator[tuple[str, Test]]:
    for machine in _own(module, RuleBasedStateMachine):
        yield machine.__name__, partial(_run_machine, machine, module.__name__)


def _examples(module: ModuleType) -> Iterator[tuple[str, Test]]:
    for name, value in vars(module).items():
        if name in ASIDE:
            continue
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
    """The test once for each row of its `parametrize` marks; never, if it wants
    fixtures."""
    marks = getattr(test, "pytestmark", [])
    if any(mark.name == "filterwarnings" for mark in marks):
        test = _strict(test)
    for rows in product(*(_rows(m) for m in marks if m.name == "parametrize")):
        arguments = {name: value for row in rows for name, value in row.items()}
        if set(inspect.signature(test).parameters) <= set(arguments):
            shown = "-".join(map(_shown, arguments.values()))
            name = f"{test.__name__}[{shown}]" if shown else test.__name__
            yield name, partial(test, **arguments)


def _strict(test: Callable[..., object]) -> Callable[..., object]:
    """The test, failed by a warning."""

    @wraps(test)
    def strict(**arguments: object) -> None:
        with warnings.catch_warnings(action="error"):
            test(**arguments)

    return strict


def _shown(value: object) -> str:
    return str(getattr(value, "__name__", value))[:40]


def _rows(mark: pytest.Mark) -> Iterator[dict[str, Any]]:
    """The arguments of each row of a `parametrize` mark."""
    names, values = mark.args
    if isinstance(names, str):
        names = re.split(r",\s*", names)
    for value in values:
        yield dict(zip(names, value if len(names) > 1 else (value,), strict=True))


def killer(file: str, tree: ast.Module | str) -> str | None:
    """The test that notices that `file` now reads `tree`; None if none does."""
    running, pace = ["import"], _pace(file)
    try:
        with _in_fast_profile(), in_place(file, tree):
            for seconds, name, test in tests_for(file):
                running.append(name)
                with _limit(seconds * pace):
                    test()
    except Endless:
        return f"{running[-1]} (no end)"
    except (Exception, pytest.fail.Exception) as error:
        return f"{running[-1]} ({type(error).__name__})"
    return None


def _pace(file: str) -> float:
    """How much slower than usual processor time passes now, with kernels compiled."""
    if file.startswith("kernels/"):
        _compile()
    start = time.process_time()
    sum(i * i for i in range(100_000))
    return max(1.0, (time.process_time() - start) / USUAL)


@cache
def _compile() -> None:
    import_module("pagedattn.kernels.cpu").compile_all()


@contextmanager
def _in_fast_profile() -> Iterator[None]:
    """Within, test files that are imported draw what they draw in the fast profile,
    whatever the profile is, and do not shrink what they find."""
    before = settings.get_current_profile_name()
    settings.register_profile(
        "mutants",
        settings.get_profile("fast"),
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
    )
    settings.load_profile("mutants")
    try:
        yield
    finally:
        settings.load_profile(before)


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
