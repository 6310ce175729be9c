"""The two pages of hooks are what the code says."""

import ast
import runpy
from pathlib import Path

import tfparallel

PACKAGE = Path(tfparallel.__file__).parent
TABLE = runpy.run_path(str(PACKAGE.parent / "docs" / "hook_table.py"))


def test_the_pages_are_current():
    assert TABLE["PAGE"].read_text() == TABLE["page"](), "run `python docs/hook_table.py`"
    assert TABLE["LASTING"].read_text() == TABLE["lasting_page"](), (
        "run `python docs/hook_table.py`"
    )


def test_every_hook_has_a_row():
    rows = TABLE["PAGE"].read_text() + TABLE["LASTING"].read_text()
    names = {hook.name for hook in TABLE["hooks"]()}
    assert {"`optimizer.apply`", "`metric.result`", "`model._symbolic_build`"} <= names
    assert all(f"| {name} |" in rows for name in names)


def _writes_attributes(node: ast.AST) -> bool:
    """`vars(x)[name] = y`, `vars(x).pop(...)`, `vars(x).update(...)`, `setattr` of a given name."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _is_vars(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return _is_vars(node.func.value) and node.func.attr in ("pop", "setdefault", "update")
    return False


def _is_vars(node: ast.AST) -> bool:
    is_vars = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars"
    return is_vars or (isinstance(node, ast.Attribute) and node.attr == "__dict__")


# What has a reason to write there: attributes of threads, copies of losses, metrics tried, marks.
_ALLOWED = {
    "internals/hooks.py",
    "pipeline/stage_calls.py",
    "pipeline/staged_model.py",
    "replicas/added_losses.py",
    "replicas/loss_kinds.py",
    "replicas/metric_states.py",
    "replicas/model_hooks.py",
}


def test_no_file_puts_hooks_in_a_way_of_its_own():
    for path in PACKAGE.rglob("*.py"):
        found = [node for node in ast.walk(ast.parse(path.read_text())) if _writes_attributes(node)]
        assert not found or path.relative_to(PACKAGE).as_posix() in _ALLOWED, (path, found)
