"""Private names of TensorFlow and Keras are used in `tfparallel/internals/` only.

What is foreign: a private attribute that nothing in the package defines. Names of the classes that
we extend are ours to use on `self`: they are a part of what a subclass is given.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import tfparallel
from tfparallel.internals.supported import ATTRIBUTES

PACKAGE = Path(tfparallel.__file__).parent
INTERNALS = PACKAGE / "internals"
# Public in spite of their names: of named tuples, and of the standard library.
PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace", "_run_exitfuncs"}
HOOKS = {"hook_next_call", "hook_once", "shadowed", "wrapped"}
OF_ATTRIBUTES = {"delattr", "getattr", "hasattr", "setattr"}
# Ours too, on `self`; on anything else Keras's.
OF_VARIABLES = {"_value"}
# Of a class of Horovod's that we extend.
OF_HOROVOD = {"_host_messages"}


def _is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def _trees() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def _is_self(node: ast.expr) -> bool:
    """`self`, `cls`, `super()`, `type(self)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        is_of_self = node.func.id == "type" and all(map(_is_self, node.args))
        return node.func.id == "super" or is_of_self
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _defined(tree: ast.AST) -> Iterator[str]:
    """Methods, attributes of classes, and what is assigned to `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield each.name
                targets = each.targets if isinstance(each, ast.Assign) else []
                targets = [each.target] if isinstance(each, ast.AnnAssign) else targets
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif _is_set_on_self(node):
            yield node.attr


def _is_set_on_self(node: ast.AST) -> bool:
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and _is_self(node.value)


def _used(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line and name of each private attribute, and whether it is of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.lineno, node.attr, _is_self(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = getattr(node.args[1], "value", None)
            if node.func.id in OF_ATTRIBUTES and _is_private(name):
                yield node.lineno, str(name), _is_self(node.args[0])


def foreign_names(trees: list[tuple[Path, ast.AST]]) -> list[str]:
    """Uses of private names that are neither ours nor given to a subclass."""
    inherited = {name for names in ATTRIBUTES.values() for name in names} | OF_HOROVOD
    ours = {name for _, tree in trees for name in _defined(tree)} | PUBLIC
    return [
        f"{path}:{line}: {name}"
        for path, tree in trees
        if INTERNALS not in path.parents
        for line, name, of_self in _used(tree)
        if name not in ours or (name in OF_VARIABLES and not of_self)
        if not (of_self and name in inherited)
        if not name.startswith("_tfparallel")  # a mark of ours on what is others'
    ]


def test_no_private_name_of_others_is_used_outside_of_internals():
    assert not foreign_names(list(_trees()))


def test_a_private_name_of_others_is_found():
    code = "def f(layer):\n    return layer._losses, getattr(layer, '_inbound_nodes')\n"
    found = foreign_names([*_trees(), (Path("new.py"), ast.parse(code))])
    assert found == ["new.py:2: _losses", "new.py:2: _inbound_nodes"]


def test_frames_are_looked_at_in_internals_only():
    for path, tree in _trees():
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree)}
        looked_at = names & {"_getframe", "f_back", "currentframe", "f_locals"}
        assert not looked_at or INTERNALS in path.parents, (path, looked_at)


def test_private_modules_are_imported_in_internals_only():
    private = ("keras.src", "tensorflow.python", "tensorflow.core")
    for path, tree in _trees():
        for node in ast.walk(tree):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            is_private = any(name.startswith(private) for name in names)
            assert not is_private or INTERNALS in path.parents, (path, names)


def test_methods_that_are_hooked_are_checked_when_a_strategy_is_imported():
    from tfparallel.internals.supported import MODULES

    # Methods of a class's objects, and functions of a module.
    known = {name for names in (*ATTRIBUTES.values(), *MODULES.values()) for name in names}
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in HOOKS:
                name = getattr(node.args[1], "value", None)
                assert not _is_private(name) or name in known, (path, name)


def test_what_internals_import_and_use_is_checked_when_a_strategy_is_imported():
    from tfparallel.internals.supported import MODULES, NAMED_IN

    modules = set(MODULES)
    known = (ATTRIBUTES, MODULES, NAMED_IN)
    attributes = {name for each in known for names in each.values() for name in names}
    for path in INTERNALS.glob("*.py"):
        tree = ast.parse(path.read_text())
        ours = set(_defined(tree)) | PUBLIC | {"_getframe", "_tfparallel_device_names"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                ("keras.src", "tensorflow.python", "tensorflow.core")
            ):
                for each in node.names:
                    is_module = f"{node.module}.{each.name}" in modules
                    is_name = each.name in MODULES.get(node.module or "", ())
                    assert is_module or is_name, (path, node.module, each.name)
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                assert node.attr in attributes | ours, (path, node.attr)
