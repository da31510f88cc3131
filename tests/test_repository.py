"""The rules of the house, read off the source: rooms, contracts, sizes, packaging.

Knows files and syntax trees, and the book's list of rooms; what an import brings in is
shown by a fresh interpreter.
"""

import ast
import re
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import version
from pathlib import Path

import pytest

from pagedattn.viz.house import FLOORS, modules

ROOT = Path(__file__).parents[1]
FOLDERS = {"pagedattn": ROOT / "pagedattn", "pagedattn.kernels": ROOT / "kernels"}

# Rooms in reading order: a room imports itself and what stands before it. The book's
# picture of the house is the list; the front door stands before the leaves.
RANKS = {room: i for i, (_, _, rooms) in enumerate(FLOORS) for room, _ in rooms}
LEAVES = len(FLOORS) - 1
RANKS |= {"": LEAVES - 0.5, "student": LEAVES - 0.5, "version": 0}
HEAVY = ("torch", "numba", "transformers", "triton", "safetensors", "gguf")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def module_name(path: Path) -> str:
    """The name under which a source file is imported."""
    for package, folder in reversed(FOLDERS.items()):
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            return ".".join((package, *parts))
    raise ValueError(path)


PATHS = {module_name(p): p for f in FOLDERS.values() for p in modules(f)}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in PATHS.items()}


def test_what_an_editor_keeps_beside_a_module_is_none(tmp_path: Path) -> None:
    """JupyterLab copies every source that a reader opens from a chapter's link."""
    for file in ("cache/blocks.py", "cache/.ipynb_checkpoints/blocks-checkpoint.py"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    assert modules(tmp_path) == [tmp_path / "cache" / "blocks.py"]


def imports(name: str) -> Iterator[tuple[int, str]]:
    """(line, imported module) for each import, wherever in the file it stands."""
    package = name if PATHS[name].stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: -(node.level - 1) or None]
                base = ".".join([*parents, base]).strip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in PATHS else base


def room(name: str) -> float:
    """The rank of a module's room."""
    first = (name.split(".") + [""])[1]
    assert first in RANKS, f"{name} belongs to no room: give it one in FLOORS"
    return RANKS[first]


def ours(imported: str) -> bool:
    """Whether a module is this project's, by either name of the kernels."""
    return imported.split(".")[0] in ("pagedattn", "kernels")


def run_python(code: str, cwd: Path) -> str:
    """The output of `code` in a fresh interpreter started in `cwd`."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Imports: each room knows itself and the rooms before it.
def test_imports_never_point_back() -> None:
    back = [
        f"{name}:{line} imports {imported}"
        for name in PATHS
        for line, imported in imports(name)
        if ours(imported) and room(imported) > room(name)
    ]
    assert not back


def test_kernels_import_nothing_of_ours() -> None:
    foreign = [
        f"{name}:{line} imports {imported}"
        for name in PATHS
        if name.startswith("pagedattn.kernels")
        for line, imported in imports(name)
        if ours(imported) and not imported.startswith("pagedattn.kernels")
    ]
    assert not foreign


def test_no_import_cycle() -> None:
    graph = {
        name: {i for _, i in imports(name) if i in PATHS and i != name}
        for name in PATHS
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_control_plane_is_plain_python() -> None:
    control = [name for name in PATHS if room(name) == 0]
    heavy = [
        f"{name}:{line} imports {imported}"
        for name in control
        for line, imported in imports(name)
        if imported.split(".")[0] in HEAVY
    ]
    assert control and not heavy


def test_control_plane_loads_nothing_heavy(tmp_path: Path) -> None:
    names = [name for name in PATHS if room(name) == 0]
    code = f"import sys, {', '.join(names)}\nprint(set({HEAVY}) & set(sys.modules))"
    assert run_python(code, tmp_path) == "set()"


def test_front_door_is_light_and_opens(tmp_path: Path) -> None:
    code = (
        "import sys, pagedattn\n"
        f"print(set({(*HEAVY, 'numpy', 'fastapi')}) & set(sys.modules))\n"
        "print([n for n in pagedattn.__all__ if getattr(pagedattn, n) is None])\n"
        "print(set(pagedattn.__all__) - set(dir(pagedattn)))"
    )
    assert run_python(code, tmp_path).split("\n") == ["set()", "[]", "set()"]


def test_unknown_name_at_the_front_door(tmp_path: Path) -> None:
    code = "import pagedattn\nprint(hasattr(pagedattn, 'Nothing'))"
    assert run_python(code, tmp_path) == "False"


# State: none at module level, so that two engines in one process do not meet.
def is_mutable(node: ast.expr | None) -> bool:
    """Whether an expression makes something that can be changed in place."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).split(".")[-1]
        return name in {
            *("list", "dict", "set", "bytearray", "deque", "defaultdict"),
            *("OrderedDict", "Counter", "count", "local"),
        }
    makers = ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp
    return isinstance(node, makers)


def module_level_mutables(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each mutable object assigned at module level."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, ast.unparse(target)) for target in targets)


def changes(tree: ast.Module, name: str) -> Iterator[int]:
    """Lines inside functions that change the object called `name` in place."""
    methods = {
        *("add", "append", "clear", "discard", "extend", "insert", "pop"),
        *("popitem", "remove", "setdefault", "update"),
    }
    functions = (node for node in ast.walk(tree) if isinstance(node, Function))
    for node in (inner for function in functions for inner in ast.walk(function)):
        match node:
            case ast.Subscript(ast.Name(id), ctx=ast.Store() | ast.Del()):
                changed = id == name
            case ast.Call(ast.Attribute(ast.Name(id), attr)):
                changed = id == name and attr in methods
            case ast.AugAssign(ast.Name(id)):
                changed = id == name
            case _:
                changed = False
        if changed:
            yield node.lineno


@pytest.mark.parametrize("name", PATHS)
def test_no_module_level_state(name: str) -> None:
    tree = TREES[name]
    for line, target in module_level_mutables(tree):
        constant = target == "__all__" or re.fullmatch(r"_?[A-Z][A-Z0-9_]*", target)
        assert constant, f"{name}:{line}: {target} is mutable and no constant"
        assert not list(changes(tree, target)), f"{name} changes {target}"
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno}: global"


@pytest.mark.parametrize("name", PATHS)
def test_no_type_checking_tricks(name: str) -> None:
    names = (node for node in ast.walk(TREES[name]) if isinstance(node, ast.Name))
    assert not [n.lineno for n in names if n.id == "TYPE_CHECKING"]


# Contracts: every public name says what it promises and of which types.
def public(tree: ast.Module | ast.ClassDef) -> Iterator[Function | ast.ClassDef]:
    """Public functions, classes, and their public methods."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and node.name[0] != "_":
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


def unannotated(function: Function) -> list[str]:
    """Parameters, and `return`, that carry no type."""
    a = function.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    bare = [arg.arg for arg in named if arg.annotation is None]
    return [name for name in bare if name not in ("self", "cls")] + (
        ["return"] if function.returns is None else []
    )


def is_setter_or_overload(node: Function | ast.ClassDef) -> bool:
    """Property setters and overloads: another function of that name has the words."""
    decorators = [ast.unparse(d) for d in node.decorator_list]
    return any(d.endswith((".setter", "overload")) for d in decorators)


def is_compiled(module: str, node: Function) -> bool:
    """Whether a kernel is compiled: its types stand in the decorator."""
    return module.startswith("pagedattn.kernels.") and bool(node.decorator_list)


@pytest.mark.parametrize("name", PATHS)
def test_public_names_are_documented(name: str) -> None:
    bare = [
        f"{node.name}:{node.lineno}"
        for node in public(TREES[name])
        if ast.get_docstring(node) is None and not is_setter_or_overload(node)
    ]
    assert ast.get_docstring(TREES[name]), f"{name} has no docstring"
    assert not bare


@pytest.mark.parametrize("name", PATHS)
def test_functions_are_annotated(name: str) -> None:
    bare = {
        f"{node.name}:{node.lineno}": unannotated(node)
        for node in public(TREES[name])
        if isinstance(node, Function) and not is_compiled(name, node)
    }
    for node in ast.walk(TREES[name]):
        if isinstance(node, Function) and node.name == "__init__":
            bare[f"__init__:{node.lineno}"] = unannotated(node)
    assert not {where: names for where, names in bare.items() if names}


# Sizes, in lines from `def` to the end, without the docstring.
def length(function: Function) -> int:
    """Lines of a function, its docstring and decorators left out."""
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def lengths(name: str) -> dict[str, int]:
    """Function -> lines, for every function of a module, inner ones included."""
    nodes = (node for node in ast.walk(TREES[name]) if isinstance(node, Function))
    return {f"{name}:{node.lineno} {node.name}": length(node) for node in nodes}


ESSAYS = [n for n in PATHS if ".kernels" not in n and not n.endswith(".cli")]


@pytest.mark.parametrize("name", ESSAYS)
def test_no_function_is_longer_than_a_screen(name: str) -> None:
    assert not {where: n for where, n in lengths(name).items() if n > 60}


def test_functions_are_short() -> None:
    every = [n for name in ESSAYS for n in lengths(name).values()]
    assert statistics.median(every) <= 8
    assert statistics.quantiles(every, n=10)[-1] <= 25


# What is committed stands alone: it names no machine and nothing outside of it.
def committed() -> list[Path]:
    """Files that git holds or would add; without git, those of the source folders."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        out = subprocess.run(git, cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        folders = (*FOLDERS.values(), ROOT / "tests", ROOT / "book", ROOT / ".ci")
        return [p for f in folders for p in f.rglob("*") if p.is_file()]
    paths = (ROOT / line for line in out.stdout.splitlines())
    return [path for path in paths if path.is_file()]


def test_nothing_points_outside() -> None:
    # Bracketed, so that the patterns do not find themselves.
    folders = r"(?<![\w.}])/(wor[k]|roo[t]|hom[e]/\w+|User[s]/\w+)/"
    pattern = re.compile(rf"{folders}|\.\./share[d]|\.librar[y]/".encode())
    found = [
        f"{path.relative_to(ROOT)}: {match.group().decode()}"
        for path in committed()
        if (match := pattern.search(path.read_bytes()))
    ]
    assert not found


def test_no_weights_or_large_files() -> None:
    large = [p for p in committed() if p.stat().st_size > 2 << 20]
    weights = [p for p in committed() if p.suffix in (".gguf", ".safetensors", ".bin")]
    assert not large + weights


# Packaging: what is installed is what stands here.
def test_version_is_the_installed_one(tmp_path: Path) -> None:
    stated = run_python("import pagedattn; print(pagedattn.__version__)", tmp_path)
    assert stated == version("pagedattn")


def test_every_package_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = [n for n, path in PATHS.items() if path.stem == "__init__"]
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(packages)


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"]]
    for extra in ("test", "lab", "clients", "otel"):
        wanted += extras[extra]
    pins = (ROOT / "constraints.txt").read_text("utf-8")
    pinned = set(re.findall(r"^([\w.-]+)[=>]=", pins, re.MULTILINE))
    names = {re.split(r"[<>=;\[ ]", w)[0].lower().replace("_", "-") for w in wanted}
    assert not names - pinned


def test_kernels_is_no_top_level_package(tmp_path: Path) -> None:
    code = (
        "from importlib.util import find_spec\n"
        "import pagedattn.kernels\n"
        "print(find_spec('kernels'), pagedattn.kernels.__version__)"
    )
    assert run_python(code, tmp_path) == "None 0"


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    code = (
        "from transformers.utils import is_kernels_available\n"
        "print(is_kernels_available())"
    )
    assert run_python(code, ROOT) == "False"
