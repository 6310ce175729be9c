"""How long steps wait at the iterator of a `tf.data` pipeline, and how many rows come out of it.

Behind the iterator stands another one whose every element is taken from it, between two looks at
the clock, on the thread that asks:

    step's graph  ->  IteratorGetNext  ->  [clock, IteratorGetNext, clock, count rows]  ->  pipeline

So it is what a step waits for that counts, not what the pipeline does meanwhile.
"""

from typing import Any

import tensorflow as tf

from tfparallel.internals import ResourceVariable
from tfparallel.internals.datasets import (
    flat_output,
    iterator_over,
    let_go_beside,
    slowest_stage,
)

_ENDLESS = 1 << 62


class InputWait:
    """The clock at one training's iterators."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            # Not `tf.Variable`: under a strategy's scope it would be replicated.
            self._waited_s = ResourceVariable(tf.constant(0.0, tf.float64), trainable=False)
        self._shapes: list[ResourceVariable] = []  # of batches, summed: the first number is rows
        self._functions: dict[Any, Any] = {}
        self._known: tuple[Any, Any] = (None, None)

    @property
    def waited_s(self) -> float:
        """Seconds so far."""
        return float(self._waited_s.numpy())

    @property
    def rows(self) -> int:
        """Rows so far, of the first tensor of each batch."""
        return sum(int(each.numpy()[0]) for each in self._shapes)

    def around(self, iterator: object) -> tf.data.Iterator:
        """The measured iterator over `iterator`; the same one, as long as that is the same."""
        if self._known[0] is not iterator:
            self._known = (iterator, self._make(iterator))
            for each in self._known:
                let_go_beside(each)
        return self._known[1]

    def slowest_stage(self) -> dict[str, object]:
        """Of the last iterator, by tf.data's own figures: `kind`, `name`, `ms` an element."""
        return {} if self._known[0] is None else slowest_stage(self._known[0])

    def close(self) -> None:
        """Lets go of the iterators.

        This object is in a circle, and would keep them until the interpreter ends. That waits for
        their threads, which may read data that Python gives, and so wait for the interpreter.
        """
        self._known = (None, None)

    def _make(self, iterator: object) -> object:
        with tf.device("CPU:0"):
            return iterator_over(iterator, self._function(iterator), _ENDLESS)

    def _sum_of(self, shape: tf.TensorShape) -> ResourceVariable:
        """A variable, for another function."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._shapes.append(ResourceVariable(tf.zeros(shape, tf.int64), trainable=False))
        return self._shapes[-1]

    def _function(self, iterator: tf.data.Iterator) -> object:
        key = str(iterator.element_spec)
        if key not in self._functions:
            types, shapes = flat_output(iterator)

            def take(number: tf.Tensor, resource: tf.Tensor) -> list[tf.Tensor]:
                del number  # of the batch
                asked = tf.timestamp()
                with tf.control_dependencies([asked]):
                    batch = tf.raw_ops.IteratorGetNext(
                        iterator=resource, output_types=types, output_shapes=shapes
                    )
                with tf.control_dependencies(batch):
                    self._waited_s.assign_add(tf.timestamp() - asked)
                    counted = _shape_of(batch)
                    self._sum_of(counted.shape).assign_add(counted)
                return batch

            signature = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.resource)]
            self._functions[key] = tf.function(
                take, input_signature=signature, autograph=False
            ).get_concrete_function()
        return self._functions[key]


def _shape_of(batch: list[tf.Tensor]) -> tf.Tensor:
    """`[rows, ...]`, which takes an operation fewer than the rows alone."""
    dense = [each for each in batch if each.dtype != tf.variant and each.shape.rank != 0]
    if not dense:
        return tf.zeros([1], tf.int64)
    shape = tf.shape(dense[0], tf.int64)
    return shape if dense[0].shape.rank else shape[0][tf.newaxis]
