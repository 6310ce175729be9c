"""Writes `docs/hooks.md` and `docs/hooks_that_stay.md`: every hook, from the calls that put them.

python docs/hook_table.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "hooks.md"
LASTING = ROOT / "docs" / "hooks_that_stay.md"
_FOR_GOOD = {"hook_once": "the object's", "hook_next_call": "one call"}
# Ways of their own, with the file whose first lines tell of them.
_OTHERS = {
    "`strategy.stage(i)`": "tfparallel/internals/new_operations.py",
    "`tape.gradient`": "tfparallel/internals/gradients_asked_for.py",
}
_BEFORE = """\
# Hooks

Keras and `tf.distribute` do not let a strategy change all that has to be otherwise. Where they do
not, a method or an attribute of one object is replaced: of a model, a layer, a metric, an optimizer
that was made or trains under our strategies. No class is ever changed, so what is not ours notices
nothing.

What was on the object before comes back, also what you set there yourself. [Hooks that
stay](hooks_that_stay.md) call what was there.

These pages are made from the code, by `python docs/hook_table.py`.

| object and name | lives | why | where |
|---|---|---|---|
"""
_BEFORE_LASTING = """\
# Hooks that stay

As long as the object lives, or until it is called once. What they are for is on the page of
[all other hooks](hooks.md).

| object and name | lives | why | where |
|---|---|---|---|
"""
_BETWEEN = """
## Other ways

| for | how | where |
|---|---|---|
| `variable.handle` under `TPUStrategy` | A variable of TensorFlow's gets a subclass of its own \
class when it is created in the scope. | `tfparallel/tpu/spmd_extended.py` |
"""


class Hook(NamedTuple):
    """One call that puts a hook."""

    path: str
    name: str
    life: str
    why: str


def hooks() -> Iterator[Hook]:
    """Every call of `shadowed`, `hook_once` and `hook_next_call` in the package."""
    for path in sorted((ROOT / "tfparallel").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            kind = getattr(getattr(node, "func", None), "id", None)
            if isinstance(node, ast.Call) and kind in ("shadowed", *_FOR_GOOD):
                yield _hook(path.relative_to(ROOT).as_posix(), str(kind), node)


def _hook(path: str, kind: str, call: ast.Call) -> Hook:
    """A call as a row; a name that is not written out stands in angle brackets.

    Raises:
        ValueError: for a reason that is no literal: the table could not tell of it.
    """
    options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    which = call.args[1]
    name = which.value if isinstance(which, ast.Constant) else f"<{ast.unparse(which)}>"
    life = _FOR_GOOD.get(kind) or options["during"]
    return Hook(path, f"`{ast.unparse(call.args[0])}.{name}`", life, options["why"])


def page() -> str:
    """The text of `docs/hooks.md`."""
    others = [f"| {what} | {_first_lines(path)} | `{path}` |\n" for what, path in _OTHERS.items()]
    return "".join([_BEFORE, *_rows(is_lasting=False), _BETWEEN, *others])


def lasting_page() -> str:
    """The text of `docs/hooks_that_stay.md`."""
    return "".join([_BEFORE_LASTING, *_rows(is_lasting=True)])


def _rows(is_lasting: bool) -> Iterator[str]:
    for hook in hooks():
        if (hook.life in _FOR_GOOD.values()) == is_lasting:
            yield f"| {hook.name} | {hook.life} | {hook.why} | `{hook.path}` |\n"


def _first_lines(path: str) -> str:
    """The docstring of a file without its first line and its drawing, in one line."""
    docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    _, text, *_ = docstring.split("\n\n")
    return " ".join(text.split())


if __name__ == "__main__":
    PAGE.write_text(page())
    LASTING.write_text(lasting_page())
