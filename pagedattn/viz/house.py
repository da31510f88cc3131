"""The house as a picture: its floors, its rooms, and which floor imports which.

Reads the project's source files, so that a module without a room, or an import that
climbs, is an error and not a wrong map. Knows files and syntax trees. Chapter 00 shows
it.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pagedattn
from pagedattn.viz.figure import Figure, label, page, rect

PACKAGE = Path(pagedattn.__file__).parent
ROOT = PACKAGE.parent

# From the ground up: a floor stands on those before it. Rooms in reading order.
FLOORS = (
    (
        "control plane",
        "plain Python, no tensors",
        (
            ("errors", "a mistake, or a dead engine"),
            ("config", "every setting, once"),
            ("request", "what a caller asks for"),
            ("intake", "prompts become requests"),
            ("text", "tokens, templates, stops"),
            ("cache", "blocks, index, tables"),
            ("scheduler", "plan() and commit()"),
            ("trace", "what happened, in order"),
        ),
    ),
    (
        "data plane",
        "tensors, no policy",
        (
            ("kernels", "hot loops: spec, numba, Triton"),
            ("model", "batch, decoder, loaders"),
            ("sampling", "from logits to a token"),
            ("runner", "runs a plan"),
            ("device", "a GPU that works by itself"),
        ),
    ),
    (
        "joins",
        "one loop over both",
        (
            ("engine", "step(): plan, run, commit"),
            ("output", "results become text"),
            ("metrics", "counters and clocks"),
            ("pipeline", "step() on a device, one ahead"),
            ("assembly", "builds an engine"),
            ("llm", "for scripts"),
            ("async_engine", "for servers"),
            ("encoder_engine", "encoders, for servers"),
        ),
    ),
    (
        "leaves",
        "nothing below knows them",
        (
            ("serve", "HTTP, OpenAI's protocol"),
            ("bench", "counts and clocks"),
            ("viz", "pictures and films"),
            ("book", "what chapters import"),
            ("testing", "HashModel, tiny models"),
        ),
    ),
)
# The front door, on no floor: the package itself, its number, readers' own modules.
ENTRANCE = ("", "version", "student")
TINTS = ("#c6d8ec", "#bfe0c6", "#efe8c0", "#e6c3da")
WIDTH, HEIGHT, GAP, LEFT, COLUMNS = 208, 44, 10, 16, 4  # pixels; rooms in a row


@dataclass(frozen=True, slots=True)
class Size:
    """What stands on one floor: files, lines, functions, lines of the median one."""

    floor: str
    files: int
    lines: int
    functions: int
    median: float


def floor_of(room: str) -> int:
    """The floor a room is on, 0 the lowest; LookupError if it is on none."""
    for i, (_, _, rooms) in enumerate(FLOORS):
        if room in (name for name, _ in rooms):
            return i
    raise LookupError(f"{room!r} is in no room of FLOORS.")


def modules(folder: Path) -> list[Path]:
    """Python files below the folder; no copies that editors hide beside them."""
    files = ((p, p.relative_to(folder).parts) for p in folder.rglob("*.py"))
    return sorted(p for p, parts in files if not any(n[0] == "." for n in parts))


def sources() -> Iterator[tuple[str, Path]]:
    """(room, file) of every module that is on a floor."""
    for path in sorted((*modules(PACKAGE), *modules(ROOT / "kernels"))):
        below = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)
        room = below.parts[0].removesuffix(".py").replace("__init__", "")
        if room not in ENTRANCE:
            yield room, path


def imports() -> dict[str, list[str]]:
    """For each floor, the floors that its modules import, itself included."""
    found: dict[int, set[int]] = {i: set() for i in range(len(FLOORS))}
    for room, path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for name in _imported(node):
                found[floor_of(room)].add(floor_of(name))
    names = [name for name, _, _ in FLOORS]
    return {names[i]: [names[k] for k in sorted(found[i])] for i in found}


def _imported(node: ast.AST) -> Iterator[str]:
    """The rooms that one import statement names."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif modules == ["pagedattn"]:
        modules = [f"pagedattn.{alias.name}" for alias in node.names]
    for module in modules:
        package, _, rest = module.partition(".")
        room = rest.split(".")[0]
        if package == "pagedattn" and room in _rooms():
            yield room


def _rooms() -> set[str]:
    return {name for _, _, rooms in FLOORS for name, _ in rooms}


def sizes() -> list[Size]:
    """How much stands on each floor, today."""
    return [_size(i, name) for i, (name, _, _) in enumerate(FLOORS)]


def _size(floor: int, name: str) -> Size:
    texts = [p.read_text("utf-8") for room, p in sources() if floor_of(room) == floor]
    lengths = [
        node.end_lineno - node.lineno + 1
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = sum(text.count("\n") for text in texts)
    return Size(name, len(texts), lines, len(lengths), statistics.median(lengths))


def house() -> Figure:
    """Every room on its floor, the roof on top; an import goes down, never up."""
    imports()  # every module has its room, or this raises
    parts: list[str] = []
    text: list[str] = []
    y = LEFT
    for i in reversed(range(len(FLOORS))):
        name, what, rooms = FLOORS[i]
        title = f"{name}: {what}"
        rows = -(-len(rooms) // COLUMNS)
        deep = 30 + rows * (HEIGHT + GAP)
        parts.append(rect(LEFT - 6, y - 4, _across() + 12, deep, TINTS[i], rx=6))
        parts.append(label(LEFT + 2, y + 14, title, size=14, font_weight="bold"))
        for k, room in enumerate(rooms):
            parts += _room(room, k % COLUMNS, y + 24 + k // COLUMNS * (HEIGHT + GAP))
        y += deep + 8
        text += [title, *(f"    {room:<13} {noun}" for room, noun in rooms)]
    alt = "Four floors: leaves on joins, on the data plane, on the control plane"
    return Figure(page(_across() + 2 * LEFT, y + 4, parts), "\n".join(text), alt)


def _across() -> int:
    return COLUMNS * (WIDTH + GAP) - GAP


def _room(room: tuple[str, str], column: int, y: float) -> list[str]:
    name, noun = room
    x = LEFT + column * (WIDTH + GAP)
    return [
        rect(x, y, WIDTH, HEIGHT, "#ffffff", stroke="#888888", rx=4),
        label(x + 8, y + 18, name, size=13, font_weight="bold"),
        label(x + 8, y + 35, noun, size=12, fill="#555555"),
    ]
