"""Steps that all workers share, none of which is done again: the loss of a worker ends `fit`."""

from collections.abc import Callable

import tensorflow as tf


class StepsOnce:
    """Stands in for `RepeatedSteps` where no copies are kept to go back to."""

    num_repeated = 0

    def __init__(self) -> None:
        self._generation = tf.constant(0, tf.int64)

    def guarded(self, step: Callable) -> Callable:
        """`step` as a function of a generation, which never changes, and its own argument."""
        return lambda generation, tensors: step(tensors)

    def cover(self, graph: object) -> None:
        """Nothing is copied."""

    def run(self, function: Callable, tensors: Callable[[], object]) -> object:
        """The outputs of one step."""
        return function(self._generation, tensors())

    def changed_elsewhere(self) -> None:
        """Nothing depends on it."""

    def forget(self) -> None:
        """Nothing is remembered."""
