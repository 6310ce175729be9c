"""Arguments of other types than a constructor's annotations are refused where they are given.

Python takes any object for any argument: `memory="full"` for a `MemoryPolicy` would fail far from
the line that is wrong, and `offload="none"`, which is true, not at all.
"""

import functools
import inspect
import re
from collections.abc import Sequence
from typing import TypeVar, get_type_hints

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from tfparallel.mistakes import MistakesError

C = TypeVar("C", bound=type)

_AS_THEY_ARE = (str, bytes, tuple)  # of sequences; a tuple with names is not one of what it has
_CONFIG = ConfigDict(arbitrary_types_allowed=True, strict=True)


class ArgumentTypeError(MistakesError, TypeError):
    """Arguments of other types than expected, all of them listed."""


def checks_types(cls: C) -> C:
    """A class whose constructor refuses arguments of other types than it is annotated with.

    It gets what it takes as it is: nothing is converted. NumPy's numbers count as Python's.

    Raises:
        ArgumentTypeError: from the constructor; it is a `TypeError` and a `ValueError`.
    """
    construct = vars(cls)["__init__"]
    signature = inspect.signature(construct)

    @functools.cache
    def annotations() -> dict[str, type]:
        return get_type_hints(construct)  # at the first call, when all that they name is there

    @functools.cache
    def adapter(name: str) -> TypeAdapter:
        return TypeAdapter(annotations()[name], config=_CONFIG)

    def problems(name: str, value: object) -> list[str]:
        try:
            adapter(name).validate_python(_plain(value))
        except ValidationError:
            kind = _readable(annotations()[name])
            return [
                f"{name}: expected {kind}. Received: {value!r}, of type {type(value).__name__}."
            ]
        return []

    @functools.wraps(construct)
    def checked(self: object, *args: object, **kwargs: object) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            return construct(self, *args, **kwargs)  # Python's error names the class, too
        found = [
            each for name in given if name in annotations() for each in problems(name, given[name])
        ]
        if found:
            raise ArgumentTypeError(found, cls.__name__)
        return construct(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def _plain(value: object) -> object:
    """What pydantic takes for it, which knows no numbers of NumPy and, strictly, no other lists."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    if type(value) is tuple or isinstance(value, Sequence) and not isinstance(value, _AS_THEY_ARE):
        return [_plain(each) for each in value]
    return value


def _readable(annotation: object) -> str:
    """An annotation without the modules of its names."""
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", inspect.formatannotation(annotation))
