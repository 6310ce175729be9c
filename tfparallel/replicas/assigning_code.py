"""Whether code that is not Keras's mentions an assignment to a variable."""

import functools
import types
from collections.abc import Iterator

_ASSIGNMENTS = ("assign", "scatter", "batch_scatter")  # beginnings of names of methods
_STEPS = ("train_step", "test_step", "predict_step")
_OF_LIBRARIES = ("keras.src.", "tensorflow.", "builtins")


def class_mentions_assignment(own_class: type) -> bool:
    """Whether a class, or one that it is derived from, does, other than in a step."""
    return _class_mentions(own_class)


@functools.cache
def _class_mentions(own_class: type) -> bool:
    classes = [c for c in own_class.__mro__ if not c.__module__.startswith(_OF_LIBRARIES)]
    functions = [f for c in classes for name, f in vars(c).items() if name not in _STEPS]
    return any(function_mentions_assignment(f) for f in functions)


def function_mentions_assignment(function: object) -> bool:
    """Whether a function, or one in it, does; anything else does not."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return code is not None and any(name.startswith(_ASSIGNMENTS) for name in _names_in(code))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
