"""Counts the package: lines, lengths of functions, `Any` in signatures.

    python tools/count_code.py [PACKAGE]

A function's length is that of its code: signature and body without the docstring.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    """All functions of a module, those within others too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines of `function`, without its docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def anys_in_signature(function: Function) -> int:
    """How often `Any` stands in the annotations of arguments and result."""
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    annotations = [each.annotation for each in arguments if each is not None]
    nodes = [n for a in [*annotations, function.returns] if a is not None for n in ast.walk(a)]
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)


def main(package: str = "tfparallel") -> None:
    """Prints the counts of all modules under `package`."""
    sources = [path.read_text() for path in sorted(Path(package).rglob("*.py"))]
    found = [each for source in sources for each in functions(ast.parse(source))]
    lengths = sorted(map(length, found))
    print(f"files                {len(sources)}")
    print(f"lines                {sum(source.count(chr(10)) for source in sources)}")
    print(f"functions            {len(found)}")
    print(f"median, p90 length   {statistics.median(lengths):g}, {lengths[len(lengths) * 9 // 10]}")
    print(f"Any in signatures    {sum(map(anys_in_signature, found))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
