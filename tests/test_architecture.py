"""The rooms of the package, the arrows between them, and one name for one thing. Nothing runs."""

import ast
import collections
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tfparallel"

# From top to bottom: a room imports from rows below its own. In its own row it imports what stands
# behind it, but for methods, which know nothing of one another.
METHODS = (
    "central_storage",
    "data_parallel",
    "elastic",
    "parameter_server",
    "pipeline",
    "sharded",
    "tensor_parallel",
    "tpu",
)
LAYERS = (
    ("__main__", "launch", "selftest", "build_horovod"),
    ("__init__", "compression", "keras_distribution"),  # the public names
    ("callbacks", "planning"),
    ("strategies",),
    ("hybrid",),
    METHODS,
    ("segments", "replicas"),
    ("measure", "machine", "communication", "coordination"),
    ("checked_types", "mesh", "internals", "logical_devices", "mistakes", "version"),
)
# A module of a strategy and its room's of the same name are two sides of one thing, and every room
# has an `extended`.
TWICE = {"__init__", "extended"}


def modules() -> dict[str, Path]:
    """All modules of the package by name, within it: `replicas.base`."""
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in ROOT.rglob("*.py")}
    return {".".join(key.parts): path for key, path in paths.items()}


def module_of(imported: str, known: dict[str, Path]) -> str:
    """The module that `imported` names, or that it is a name in."""
    name = imported.removeprefix("tfparallel").removeprefix(".")
    while name not in known and f"{name}.__init__".removeprefix(".") not in known:
        name = name.rpartition(".")[0]
    return name if name in known else f"{name}.__init__".removeprefix(".")


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What of this package is imported, also in functions and for types only, and where."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] == "tfparallel":
                yield name, node.lineno


def arrows() -> Iterator[tuple[str, str, int]]:
    """Which module imports which, and in what line."""
    known = modules()
    for name, path in known.items():
        for imported, line in imports(ast.parse(path.read_text())):
            yield name, module_of(imported, known), line


def is_allowed(room: str, imported: str) -> bool:
    if room == imported:
        return True
    own, other = (
        next(i for i, row in enumerate(LAYERS) if each in row) for each in (room, imported)
    )
    row = LAYERS[own]
    return own < other or (
        own == other and row != METHODS and row.index(room) < row.index(imported)
    )


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_every_room_has_a_layer():
    assert {room_of(name) for name in modules()} <= {room for row in LAYERS for room in row}


def test_arrows_only_go_down():
    wrong = [
        f"{name}:{line} imports {imported}"
        for name, imported, line in arrows()
        if not is_allowed(room_of(name), room_of(imported))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("room", "imported", "expected"),
    [
        ("pipeline", "segments", True),
        ("pipeline", "parameter_server", False),
        ("elastic", "callbacks", False),
        ("communication", "coordination", True),
        ("coordination", "communication", False),
        ("internals", "replicas", False),
    ],
)
def test_arrows_are_read_from_the_layers(room, imported, expected):
    assert is_allowed(room, imported) == expected


def test_no_modules_import_one_another_in_a_circle():
    """The public names aside, which load late what they name."""
    graph = collections.defaultdict(set)
    for name, imported, _ in arrows():
        if "__init__" not in (name, imported):
            graph[name].add(imported)
    graphlib.TopologicalSorter(graph).prepare()  # raises, naming the circle


def test_no_strategy_imports_another():
    wrong = [
        (name, imported)
        for name, imported, _ in arrows()
        if room_of(name) == room_of(imported) == "strategies" and name != imported
    ]
    assert not wrong


def test_no_basename_stands_twice():
    found = collections.defaultdict(list)
    for name in modules():
        found[name.rpartition(".")[2]].append(name)
    twice = {key: names for key, names in found.items() if len(names) > 1 and key not in TWICE}
    for key, names in twice.items():
        assert f"strategies.{key}" in names, names
        rooms = {room_of(name) for name in names}
        assert len(names) == 2 and rooms & {*METHODS}, names


# Where a variable's own class, or what made it, asks for its copy 0; others ask `local_copies.py`.
ASKS_FOR_COPY_0 = {
    "internals/distribute.py": 1,
    "parameter_server/async_variables.py": 1,
    "pipeline/extended.py": 1,
    "pipeline/placed.py": 1,
    "replicas/keras_step.py": 1,
    "replicas/local_copies.py": 1,
    "sharded/sharded_variables.py": 1,
    "tensor_parallel/gradients.py": 1,
}


def test_copy_0_is_asked_for_in_one_place():
    found = {}
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        count = len(re.findall(r"[.]_?values\[0\][.](?!shape|dense)", text))
        count += len(re.findall(r"""getattr\([^"\n]*, "values", [\[(]""", text))
        if count:
            found[str(path.relative_to(ROOT))] = count
    assert found == ASKS_FOR_COPY_0


def test_no_class_and_no_public_function_stands_twice():
    found = collections.defaultdict(list)
    for name, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            is_class = isinstance(node, ast.ClassDef)
            is_public = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if is_class or (is_public and node.name != "main"):
                found[node.name].append(name)
    assert not {key: names for key, names in found.items() if len(names) > 1}
