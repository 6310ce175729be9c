"""Constructors refuse arguments of types that their annotations do not name."""

import collections
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

import tfparallel
from tfparallel import callbacks, compression
from tfparallel.checked_types import ArgumentTypeError, checks_types

# What users read, derive from or see made, and what says by itself which part of it is wrong.
CHECKED_OTHERWISE = {
    "ClusterConfig",
    "CompressionReport",
    "Compressor",
    "GradientCompression",
    "Schedule",
    "Transport",
    "VariableReport",
}


def constructed_by_users() -> dict[str, type]:
    """Public classes whose constructors take arguments, but for errors."""
    return {
        name: value
        for module in (tfparallel, callbacks, compression)
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name))
        and not issubclass(value, BaseException)
        and name not in CHECKED_OTHERWISE
        and "self" in (parameters := inspect.signature(value.__init__).parameters)
        and any(each.annotation is not each.empty for each in parameters.values())
    }


@pytest.mark.parametrize("name", constructed_by_users())
def test_every_argument_of_a_public_class_is_checked(name):
    constructor = constructed_by_users()[name]
    arguments = dict.fromkeys(inspect.signature(constructor).parameters, object())
    with pytest.raises(ArgumentTypeError) as raised:
        constructor(**arguments)
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [*arguments]


@checks_types
@dataclass(frozen=True)
class Options:
    names: Sequence[str] = ()
    sizes: Mapping[str, int] | None = None
    count: int = 1
    seconds: float | None = None
    is_fast: bool = False


def test_all_mistakes_are_listed():
    with pytest.raises(ArgumentTypeError) as raised:
        Options("a", count=1.5, is_fast="none", sizes={"data": "2"})
    assert str(raised.value).splitlines() == [
        "Options has 4 mistakes:",
        "  - names: expected Sequence[str]. Received: 'a', of type str.",
        "  - sizes: expected Mapping[str, int] | None. Received: {'data': '2'}, of type dict.",
        "  - count: expected int. Received: 1.5, of type float.",
        "  - is_fast: expected bool. Received: 'none', of type str.",
    ]


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_the_error_is_of_both_kinds(error):
    with pytest.raises(error):
        Options(count=True)


def test_what_is_taken_is_not_converted():
    names, sizes = collections.UserList(["a"]), {"data": np.int64(2)}
    options = Options(names, sizes, np.int32(3), 2, np.bool_(True))
    assert options.names is names and options.sizes is sizes
    assert type(options.count) is np.int32 and type(options.seconds) is int


def test_python_says_what_no_signature_has():
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        Options(colour=1)
