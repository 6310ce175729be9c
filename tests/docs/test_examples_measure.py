"""Every training of an example is measured: what is shown to newcomers says where its time goes."""

import ast
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def is_fit(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_call and node.func.attr == "fit"


def makes_measure(tree: ast.AST) -> bool:
    names = {"Measure"}
    return any(
        isinstance(node, ast.Call)
        and (getattr(node.func, "attr", "") in names or getattr(node.func, "id", "") in names)
        for node in ast.walk(tree)
    )


TREES = {path.name: ast.parse(path.read_text()) for path in sorted(EXAMPLES.glob("*.py"))}
THAT_FIT = [name for name, tree in TREES.items() if any(map(is_fit, ast.walk(tree)))]


def test_most_examples_train():
    assert len(THAT_FIT) >= 10


@pytest.mark.parametrize("name", THAT_FIT)
def test_the_training_is_measured(name):
    fits = [node for node in ast.walk(TREES[name]) if is_fit(node)]
    for fit in fits:
        assert "callbacks" in {each.arg for each in fit.keywords}
    assert makes_measure(TREES[name])
