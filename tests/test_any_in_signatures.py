"""What signatures leave to the reader: `Any` in them, which may only become less."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "tfparallel"

# Lower it with each `Any` that goes. A new signature says what it takes: `object` where it looks at
# nothing of it, a Protocol where it asks a little, the class of Keras or TensorFlow otherwise.
MOST = 176


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Of all arguments and results of all functions in a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
            found = [each.annotation for each in every if each is not None] + [node.returns]
            yield from (each for each in found if each is not None)


def num_any(annotation: ast.expr) -> int:
    """How often it says `Any`, also in a string."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    names = [
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(annotation)
        if isinstance(node, (ast.Name, ast.Attribute))
    ]
    return names.count("Any")


def counted(source: str) -> int:
    return sum(map(num_any, annotations(ast.parse(source))))


def test_what_is_counted():
    source = """
def f(a: Any, *b: list[Any], c: "dict[str, Any]" = {}, d: int = 0, **e: typing.Any) -> Any:
    x: Any = 0
    def g(h: Any): ...
class K:
    async def m(self, n: Any) -> tuple[Any, Any]: ...
"""
    assert counted(source) == 9


def test_any_only_becomes_less():
    by_file = {path: counted(path.read_text()) for path in ROOT.rglob("*.py")}
    count = sum(by_file.values())
    most = sorted(by_file, key=by_file.__getitem__, reverse=True)[:10]
    told = ", ".join(f"{path.relative_to(ROOT)} {by_file[path]}" for path in most)
    assert count <= MOST, f"{count} in signatures, of at most {MOST}. Most of them in: {told}"
