"""What a chat template may spend: seconds, and the size of what it makes.

Knows jinja2's hooks for loops, calls and operators; templates run straight through
but for these, so a check at each of them bounds them all. Built in chapter 02.
"""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedattn.errors import UserError

SECONDS = 5.0  # of one rendering
LONGEST = 32 << 20  # characters of a prompt, or of a value made on the way
LARGEST = 1 << 20  # a number that says how often or how wide
BUDGET = "_budget"  # the template variable that holds the budget
_CLOCK_EVERY = 64  # steps
_WIDE = re.compile(r"\d{7}")


def _too_much(what: str) -> UserError:
    return UserError(f"the chat template {what}", param="messages")


class Budget:
    """The time of one rendering."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._steps = clock, 0
        self._until = clock() + SECONDS

    def tick(self) -> None:
        """Count one loop's turn or one call; UserError once the time is over."""
        self._steps += 1
        if self._steps % _CLOCK_EVERY == 0 and self._clock() > self._until:
            raise _too_much(f"took longer than {SECONDS:g} seconds")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which loops, calls and products are bounded. A template rendered
    without a budget is bounded in size alone."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["_ticking"] = _ticking
        for name in ("center", "indent", "format"):
            self.filters[name] = _narrow(self.filters[name])

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """The same template, every loop of which ticks."""
        for loop in tree.find_all(nodes.For):
            ticks = nodes.Filter(loop.iter, "_ticking", [], [], None, None)
            loop.iter = ticks.set_lineno(loop.lineno).set_environment(self)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        _tick(context)
        _check_numbers((*args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what a template computes."""
        _tick(context)
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)


def joined(pieces: Iterator[str]) -> str:
    """The pieces of a rendering as one text; UserError where it gets too long."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > LONGEST:
            raise _too_much(f"wrote more than {LONGEST} characters")
        kept.append(piece)
    return "".join(kept)


def _tick(context: Context) -> None:
    budget = context.parent.get(BUDGET)
    if budget is not None:
        budget.tick()


@pass_context
def _ticking(context: Context, items: Any) -> Iterator[Any]:
    for item in items:
        _tick(context)
        yield item


def _narrow(made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that refuses numbers out of proportion."""

    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args, *kwargs.values()))
        if isinstance(value, str) and made.__name__ == "do_format":
            _check_operands("%", value, args)
        return made(value, *args, **kwargs)

    return checked


def _check_numbers(values: tuple[Any, ...]) -> None:
    if any(isinstance(v, int) and abs(v) > LARGEST for v in values):
        raise _too_much(f"called something with a number above {LARGEST}")


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse what would take memory or time without bound."""
    sizes = [len(v) for v in (left, right) if hasattr(v, "__len__")]
    numbers = [abs(v) for v in (left, right) if isinstance(v, int)]
    if operator == "**" and max(numbers, default=0) > 1_000:
        raise _too_much("raised numbers to large powers")
    if operator == "*" and sizes and numbers and sizes[0] * numbers[0] > LARGEST:
        raise _too_much(f"repeated a value to more than {LARGEST}")
    if operator == "+" and sum(sizes) > LONGEST:
        raise _too_much(f"made a value of more than {LONGEST}")
    if operator == "%" and isinstance(left, str) and _WIDE.search(left):
        raise _too_much("formatted a value too wide")
