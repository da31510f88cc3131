"""Mutants made by rule: every place where an operator applies, changed once.

Knows syntax trees and files; knows nothing of what the code means. Left out by rule:
asserts and the methods called `check` (they are tests themselves), `__repr__`, trace
emission (pictures, not behaviour), docstrings, annotations and imports.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What is mutated: whole files, but of request.py only the class that schedules.
CONTROL: dict[str, str | None] = {
    "cache/blocks.py": None,
    "cache/prefix.py": None,
    "cache/tables.py": None,
    "scheduler.py": None,
    "request.py": "Request",
}
TARGETS: dict[str, str | None] = CONTROL | {
    "text/detokenizer.py": None,
    "text/stop.py": None,
    "sampling/filters.py": None,
    "sampling/penalties.py": None,
    "sampling/random.py": None,
    "sampling/sampler.py": None,
    "kernels/spec.py": None,
}

Rule = Callable[[ast.AST], Iterator[ast.AST]]
Step = tuple[str, int | None]  # a field of a syntax tree's node, an index in it


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: `old` is a statement (or a compound statement's head) of `where`."""

    file: str
    where: str  # qualified name of the function, or the class
    operator: str
    old: str
    new: str
    line: int
    path: tuple[Step, ...]
    replacement: ast.AST

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the table of equivalent mutants knows it by; free of line numbers."""
        return self.file, self.where, self.old, self.new

    def __str__(self) -> str:
        return f"{self.file}:{self.line} [{self.operator}] {self.old} -> {self.new}"


# Operators: each yields the replacements of one node.
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
}
BITS: dict[type, type] = {
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.RShift: ast.LShift,
    ast.LShift: ast.RShift,
}
BOOLEAN: dict[type, type] = {ast.And: ast.Or, ast.Or: ast.And}
NAMES = {
    "min": "max",
    "max": "min",
    "push_back": "push_front",
    "push_front": "push_back",
    "popleft": "pop",
    "argmax": "argmin",
    "cos": "sin",
    "sin": "cos",
}
COPIES = {"clone", "copy", "nan_to_num"}
UNMARKED = {"strict", "slots", "frozen", "eq"}  # keywords that only guard
COUNTS = {"len", "min", "max", "sum", "blocks_for"}


def compare(node: ast.AST) -> Iterator[ast.AST]:
    """< ↔ <=, > ↔ >=, == ↔ !=, is ↔ is not, in ↔ not in."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in SWAPS:
                ops = [*node.ops[:i], SWAPS[type(op)](), *node.ops[i + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)


def off_by_one(node: ast.AST) -> Iterator[ast.AST]:
    """n → n + 1 and n - 1, for whole constants, sums, products and counts."""
    match node:
        case ast.Constant(int(n)) if not isinstance(n, bool):
            yield from (ast.Constant(n + 1), ast.Constant(n - 1))
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant()):
            return  # its constant is changed instead
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not _joins(node):
            yield from _shifted(node)
        case ast.Call(ast.Name(name)) if name in COUNTS:
            yield from _shifted(node)


def scale(node: ast.AST) -> Iterator[ast.AST]:
    """x → 2 x and x / 2, for constants with a point; 0.0 → 1.0."""
    match node:
        case ast.Constant(0.0) if isinstance(node.value, float):
            yield ast.Constant(1.0)
        case ast.Constant(float(x)):
            yield from (ast.Constant(2 * x), ast.Constant(x / 2))


def _shifted(node: ast.expr) -> Iterator[ast.AST]:
    for op in (ast.Add(), ast.Sub()):
        yield ast.BinOp(node, op, ast.Constant(1))


def _joins(node: ast.BinOp) -> bool:
    """Whether a + b joins tuples or lists, which have no numbers to be off by."""
    inside = (type(n) for n in ast.walk(node))
    return not {ast.Tuple, ast.List, ast.ListComp}.isdisjoint(inside)


def arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    """+ ↔ -, // ↔ *, / → *, += ↔ -=, -x → x."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        if not _joins(node):
            yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand


def bits(node: ast.AST) -> Iterator[ast.AST]:
    """& ↔ |, ^ → |, >> ↔ <<, ~x → x."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in BITS:
            yield ast.BinOp(left, BITS[type(op)](), right)
        case ast.UnaryOp(ast.Invert(), operand):
            yield operand


def boolean(node: ast.AST) -> Iterator[ast.AST]:
    """and ↔ or, not x → x, True ↔ False."""
    match node:
        case ast.BoolOp(op, values):
            yield ast.BoolOp(BOOLEAN[type(op)](), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)


def rename(node: ast.AST) -> Iterator[ast.AST]:
    """min ↔ max, cos ↔ sin, argmax → argmin, push_back ↔ push_front, popleft → pop."""
    match node:
        case ast.Name(name) if name in NAMES:
            yield ast.Name(NAMES[name], node.ctx)
        case ast.Attribute(value, name) if name in NAMES:
            yield ast.Attribute(value, NAMES[name], node.ctx)


def order(node: ast.AST) -> Iterator[ast.AST]:
    """reversed(x) → x, sorted(x, …) → list(x)."""
    match node:
        case ast.Call(ast.Name("reversed"), [inner]):
            yield inner
        case ast.Call(ast.Name("sorted"), [inner]):
            yield ast.Call(ast.Name("list", ast.Load()), [inner], [])


def alias(node: ast.AST) -> Iterator[ast.AST]:
    """x.copy() → x, and so for other ways to take a copy."""
    match node:
        case ast.Call(ast.Attribute(inner, name), [], []) if name in COPIES:
            yield inner


def branch(node: ast.AST) -> Iterator[ast.AST]:
    """a if c else b → a and b."""
    if isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)


def keyword(node: ast.AST) -> Iterator[ast.AST]:
    """f(…, name=x) → f(…), name by name."""
    if isinstance(node, ast.Call):
        for i, given in enumerate(node.keywords):
            if given.arg not in UNMARKED:
                left = [*node.keywords[:i], *node.keywords[i + 1 :]]
                yield ast.Call(node.func, node.args, left)


def result(node: ast.AST) -> Iterator[ast.AST]:
    """return x → return None, unless x is None or False: callers ask for truth."""
    match node:
        case ast.Return(ast.Constant(None | False)):
            return
        case ast.Return(ast.expr()):
            yield ast.Return(ast.Constant(None))


def delete(node: ast.AST) -> Iterator[ast.AST]:
    """A statement → pass; a loop or a condition goes with its body."""
    kinds = ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Continue, ast.Break
    if isinstance(node, (*kinds, ast.For, ast.While, ast.If)):
        yield ast.Pass()
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield ast.Pass()


OPERATORS: tuple[Rule, ...] = (
    compare,
    off_by_one,
    scale,
    arithmetic,
    bits,
    boolean,
    rename,
    order,
    alias,
    branch,
    keyword,
    result,
    delete,
)


# Places: nodes where an operator may apply, with the statement they stand in.
@dataclass(frozen=True, slots=True)
class Place:
    """One node: the way to it, the definition around it, its innermost statement."""

    path: tuple[Step, ...]
    where: str
    statement: ast.stmt


def _left_out(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name="check" | "__repr__"):
            return True
        case ast.Expr(ast.Constant(str())):  # a docstring
            return True
        case ast.Expr(ast.Call(ast.Attribute(attr="_emit"))):
            return True
        case ast.keyword(arg=str(name)) if name in UNMARKED:
            return True
    return False


def _children(node: ast.AST) -> Iterator[tuple[Step, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        if isinstance(value, ast.AST):
            yield (name, None), value
        elif isinstance(value, list):
            nodes = ((i, v) for i, v in enumerate(value) if isinstance(v, ast.AST))
            yield from (((name, i), v) for i, v in nodes)


def _places(node: ast.AST, place: Place) -> Iterator[Place]:
    for step, child in _children(node):
        if _left_out(child):
            continue
        where, statement = place.where, place.statement
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            where = f"{where}.{child.name}".strip(".")
        if isinstance(child, ast.stmt):
            statement = child
        here = Place((*place.path, step), where, statement)
        yield here
        yield from _places(child, here)


def _get(node: ast.AST, step: Step) -> ast.AST:
    value = getattr(node, step[0])
    return value if step[1] is None else value[step[1]]


def _set(node: ast.AST, step: Step, new: ast.AST) -> None:
    if step[1] is None:
        setattr(node, step[0], new)
    else:
        getattr(node, step[0])[step[1]] = new


def _head(node: ast.AST) -> str:
    """A statement's text; of a compound one its first line."""
    compound = isinstance(node, ast.For | ast.While | ast.If | ast.FunctionDef)
    if compound or isinstance(node, ast.ClassDef):
        shell = copy.copy(node)
        shell.body = [ast.Pass()]
        if hasattr(shell, "orelse"):
            shell.orelse = []
        return ast.unparse(shell).removesuffix("\n    pass")
    return ast.unparse(node)


def _mutants(file: str, tree: ast.Module, only: str | None) -> Iterator[Mutant]:
    for place in _places(tree, Place((), "", ast.Pass())):
        if only and place.where.split(".")[0] != only:
            continue
        parent: ast.AST = tree
        for step in place.path[:-1]:
            parent = _get(parent, step)
        node = _get(parent, place.path[-1])
        whole = node is place.statement
        old = _head(place.statement)
        for operator in OPERATORS:
            for new in operator(node):
                _set(parent, place.path[-1], new)
                text = _head(new if whole else place.statement)
                _set(parent, place.path[-1], node)
                at = place.statement.lineno
                name = operator.__name__
                yield Mutant(file, place.where, name, old, text, at, place.path, new)


@cache
def generated() -> tuple[Mutant, ...]:
    """Every mutant of every target."""
    return tuple(
        mutant
        for file, only in TARGETS.items()
        for mutant in _mutants(file, parse(file), only)
    )


def path_of(file: str) -> Path:
    """Where one of the package's files lies; the kernels have a folder of their own."""
    return ROOT / file if file.startswith("kernels/") else ROOT / "pagedattn" / file


def parse(file: str) -> ast.Module:
    """The syntax tree of one of the package's files."""
    return ast.parse(path_of(file).read_text("utf-8"))


def changed(mutant: Mutant) -> ast.Module:
    """The mutant's whole file, as a tree that can be compiled."""
    tree = parse(mutant.file)
    parent: ast.AST = tree
    for step in mutant.path[:-1]:
        parent = _get(parent, step)
    _set(parent, mutant.path[-1], copy.deepcopy(mutant.replacement))
    return ast.fix_missing_locations(tree)
