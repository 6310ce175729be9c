"""What installed modules have, read from their code: names, attributes, local variables."""

import dis
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any


def found_at(path: str) -> Any:
    """What a dotted path of modules, classes and functions leads to; None if nothing."""
    module = path
    rest: list[str] = []
    while module:
        try:
            found: Any = importlib.import_module(module)
        except ImportError:
            module, _, name = module.rpartition(".")
            rest.insert(0, name)
            continue
        for name in rest:
            found = getattr(found, name, None)
        return found
    return None


def has(kind: object, name: str) -> bool:
    """Whether instances of a class have the attribute: of the class, or set by a method."""
    if hasattr(kind, name):
        return True
    classes = inspect.getmro(kind) if isinstance(kind, type) else ()
    codes = (code for each in classes for member in vars(each).values() for code in _codes(member))
    return any(name in code.co_names and _sets(code, name) for code in codes)


def _sets(code: types.CodeType, name: str) -> bool:
    return any(
        instruction.opname == "STORE_ATTR" and instruction.argval == name
        for instruction in dis.get_instructions(code)
    )


def names_in(member: object) -> set[str]:
    """Variables that a function has, and names that it asks for."""
    names: set[str] = set()
    for code in _codes(member):
        names.update(code.co_names, code.co_varnames, code.co_cellvars)
        names.update(each for each in code.co_consts if isinstance(each, str))
    return names


def _codes(member: object) -> Iterator[types.CodeType]:
    """The code of a method, static method or property, and of the functions in it."""
    member = member.fget if isinstance(member, property) else member
    member = getattr(member, "__func__", member)  # of a class or static method
    code = getattr(inspect.unwrap(member) if callable(member) else None, "__code__", None)
    rest = [code] if isinstance(code, types.CodeType) else []
    while rest:
        code = rest.pop()
        yield code
        rest += [each for each in code.co_consts if isinstance(each, types.CodeType)]
