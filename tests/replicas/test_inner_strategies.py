"""What is no strategy of one process is refused as `inner`, in words."""

import pytest

from tfparallel import HybridStrategy
from tfparallel.replicas.inner import made


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (lambda: None, "Received: a function that gives None"),
        (lambda count: HybridStrategy({"data": count}), "without arguments: .*'count'"),
        (HybridStrategy, "HybridStrategy.*, called without arguments: .*'mesh'. Write a lambda"),
        ({"data": 2}, "Received: {'data': 2}"),
    ],
)
def test_a_function_that_makes_no_strategy_is_told_what_it_gave(inner, message):
    with pytest.raises(TypeError, match=f"`inner` must be a strategy of tfparallel.*{message}"):
        made(inner)
