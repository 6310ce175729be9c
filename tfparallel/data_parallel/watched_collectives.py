"""Counts TensorFlow's collectives as they begin and end, for the watch that ends what waits."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfparallel.coordination.agreement import Agreement
from tfparallel.coordination.collective_watch import CollectiveWatch, Count
from tfparallel.internals import ResourceVariable
from tfparallel.internals.eager import end_collectives


class WatchedCollectives:
    """The counters of one process. The watch begins with the first collective that is launched.

    Args:
        agreement: of the workers.
        limit_s: how long a collective may take; None for ever.
    """

    def __init__(self, agreement: Agreement, limit_s: float | None):
        self._agreement, self._limit_s = agreement, limit_s
        self._numbers: list[tuple[ResourceVariable, ResourceVariable, tuple[int, ...] | None]] = []
        self._watch: CollectiveWatch | None = None

    def counter(self, device: str, ranks: Sequence[int] | None = None) -> Callable:
        """A function `(launch, tensor, ...)` that counts what it launches, one after the other.

        Args:
            device: where that is. The host would wait there for all that a GPU was given before,
                so that counters are where collectives are, and the watch reads them.
            ranks: that take part in it; None for all. All workers ask for counters in one order.
        """
        with tf.init_scope(), tf.device(device):
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            begun, ended = (ResourceVariable(0, dtype=tf.int64) for _ in range(2))
        self._numbers.append((begun, ended, None if ranks is None else tuple(ranks)))

        def counted(
            launch: Callable, tensor: tf.Tensor, *args: object, **kwargs: object
        ) -> tf.Tensor:
            if not tf.compat.v1.executing_eagerly_outside_functions():
                return launch(tensor, *args, **kwargs)  # a session's graph has no such variables
            self._begin()
            # Beside the collective, which waits for no counter.
            with tf.device(device), tf.control_dependencies([tensor]):
                number = begun.assign_add(1, read_value=True)
            result = launch(tensor, *args, **kwargs)
            with tf.device(device), tf.control_dependencies([result]):
                ended.assign(number)  # not +1: one that has failed has no end
            return result

        return counted

    def stop(self) -> None:
        """Ends the watch."""
        if self._watch is not None:
            self._watch.stop()

    def _begin(self) -> None:
        if self._watch is None:
            numbers = self._numbers
            self._watch = CollectiveWatch(
                self._agreement,
                lambda: [Count(int(b.numpy()), int(e.numpy()), ranks) for b, e, ranks in numbers],
                self._limit_s,
                _end,
            )


def _end(text: str) -> None:
    tf.get_logger().error("%s", text)
    end_collectives(text)
