"""The replica of a step, or of a layer's call, that is traced for what it does and never runs."""

from collections.abc import Sequence
from typing import TypeVar

import tensorflow as tf

from tfparallel.internals import FuncGraph, ReplicaContext
from tfparallel.internals.distribute import first_replica_of_process

Nest = TypeVar("Nest")


class BuildContext(ReplicaContext):
    """The only replica of a step that is traced for the variables it makes: this worker's first.

    Args:
        strategy: of the model.
        graph: in which the step is traced.

    Attributes:
        is_asked: something was to be reduced or gathered.
        met: the ids of what came of it: the same on all replicas.
        gradients: what optimizers were given, in the place of an update.
    """

    def __init__(self, strategy: tf.distribute.Strategy, graph: FuncGraph):
        super().__init__(strategy, first_replica_of_process(strategy.extended))
        self.graph = graph
        self.is_asked = False
        self.met: set[int] = set()
        self.gradients: list[tf.Tensor | tf.IndexedSlices] = []

    def all_reduce(self, reduce_op: object, value: object, options: object = None) -> object:
        """`value`: there is no other replica."""
        del reduce_op, options
        return self.of_all(value)

    def all_gather(self, value: object, axis: int, options: object = None) -> object:
        """`value`: there is no other replica."""
        del axis, options
        return self.of_all(value)

    def all_rows(self, tensors: Sequence) -> list:
        """`tensors`: there is no other replica."""
        return self.of_all(list(tensors))

    def own_rows_of_sum(self, rows: tf.Tensor) -> tf.Tensor:
        """`rows`: there is no other replica."""
        self.is_asked = True
        return rows

    def of_all(self, own: Nest) -> Nest:
        """`own`, as what replicas have in common: other tensors, which `met` has."""
        self.is_asked = True
        every = tf.nest.map_structure(tf.identity, own, expand_composites=True)
        self.met.update(map(id, tf.nest.flatten(every, expand_composites=True)))
        return every
