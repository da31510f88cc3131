"""Proofs run live: break one line, and let Hypothesis find the shortest way to see it.

Knows functions and tests; knows nothing of what they are about. Every chapter uses it.
"""

from __future__ import annotations
import __future__ as future

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


@contextmanager
def broken(function: Any, old: str, new: str) -> Iterator[None]:
    """Within, `function` reads `new` where it reads `old`, for everybody.

    `old` must stand exactly once in its source; else ValueError, nothing changed.
    """
    function = _inside(function)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(old) != 1:
        raise ValueError(f"{old!r} stands {source.count(old)} times in {function}.")
    whole = function.__code__
    function.__code__ = _compiled(source.replace(old, new), function)
    _forget(function)
    try:
        yield
    finally:
        function.__code__ = whole
        _forget(function)


def _inside(function: Any) -> Any:
    """The function in a property, a method or a Triton kernel; else itself."""
    places = (getattr(function, name, None) for name in ("fget", "__func__", "fn"))
    return next((found for found in places if found is not None), function)


def _forget(function: Any) -> None:
    """Triton's interpreter keeps a rewritten copy of each function: not of this one."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        interpreter.InterpretedFunction.rewritten_fn.pop(function, None)


def _compiled(source: str, function: Any) -> CodeType:
    """The code of `source`, which defines what takes the place of `function`."""
    name = f"<{function.__qualname__}, broken>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = compile(source, name, "exec", flags=future.annotations.compiler_flag)
    codes = [c for c in module.co_consts if isinstance(c, CodeType)]
    return next(c for c in codes if c.co_name == function.__name__)


def falsify(
    test: Callable[..., Any] | type[RuleBasedStateMachine],
    *strategies: Any,
    examples: int = 500,
    steps: int = 30,
) -> None:
    """Print the smallest example that fails `test`, and the error it ends with.

    `test` is a state machine, or a function of values drawn from `strategies`. What is
    found is the same each time. Raises AssertionError if nothing fails.
    """
    error = _failure(test, strategies, examples, steps)
    if error is None:
        raise AssertionError(f"{examples} examples, and all of them passed.")
    notes = "\n".join(getattr(error, "__notes__", []))
    print(notes.split("\nYou can reproduce")[0].strip())
    print(f"{type(error).__name__}: {error}".rstrip(": ").splitlines()[0])


def holds(
    test: Callable[..., Any] | type[RuleBasedStateMachine],
    *strategies: Any,
    examples: int = 100,
    steps: int = 30,
) -> None:
    """Run `test` on that many examples and print so; raises what a failing one does."""
    error = _failure(test, strategies, examples, steps)
    if error is not None:
        raise error
    print(f"{test.__name__}: {examples} examples passed.")


def _failure(
    test: Any, strategies: tuple[Any, ...], examples: int, steps: int
) -> Exception | None:
    quiet = settings(
        max_examples=examples,
        stateful_step_count=steps,
        database=None,
        deadline=None,
        derandomize=not inspect.isclass(test),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    try:
        if inspect.isclass(test):
            run_state_machine_as_test(seed(1)(test), settings=quiet)
        else:
            quiet(given(*strategies)(test))()
    except Exception as error:
        return error
    return None
