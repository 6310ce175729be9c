"""One variable whose rows are on several parameter servers.

context                                        reads                     assignments
---------------------------------------------  ------------------------  -----------------------
an optimizer's update of part i (`of_part`)    part i                    part i
a lookup of rows (`sparse_read`)               rows of each part,
                                               gathered where it is
anywhere else                                  all parts, one after      each part its rows
                                               another: the whole

Note: gradients of what a loop reads
------------------------------------
The gradient of the whole is recorded on the gradient tape, as if it were one variable's. The body
of a loop (every RNN of Keras has one), or of a branch, is differentiated as a graph, in which only
its own part would count for each of the parts. So what a tape watches is read where the step is
traced, before the loop, and the loop takes it as an input.

An optimizer that treats every number alike runs once for each part, where the part is: neither
weights nor slots move. One that looks at the whole (`Adafactor`, `Lamb`, `Muon`) gets the whole.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.internals import (
    FuncGraph,
    distribute_lib,
    record,
    variable_accessed,
)
from tfparallel.internals.keras_trainer import is_exporting
from tfparallel.parameter_server.async_variables import HandedIn
from tfparallel.parameter_server.cut import cut_rows
from tfparallel.parameter_server.server_variables import (
    RowsOnServers,
    TellsOfChanges,
    WholeInCheckpoints,
)
from tfparallel.replicas.assigned_in_parts import AssignedInParts
from tfparallel.replicas.one_piece import InOnePiece
from tfparallel.replicas.variables import CentralVariable

_thread = threading.local()
_pieces: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # by the graphs that read them


@contextlib.contextmanager
def of_part(index: int) -> Iterator[None]:
    """Within it, partitioned variables are their part number `index`."""
    _thread.part = index
    try:
        yield
    finally:
        _thread.part = None


def _loops_around() -> tuple[list, tf.Graph]:
    """The graphs of loops and branches that a tape's gradients would pass, and that around them.

    Raises:
        NotImplementedError: in a `tf.function` inside of the step: it may be called in another step
            than it was traced in, and cannot take what is read before it.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    inner: list = []
    if tf.executing_eagerly() or not record.could_possibly_record():
        return inner, graph
    while getattr(graph, "is_control_flow_graph", False):
        inner.append(graph)
        graph = graph.outer_graph
    # Contexts of ours know the graph that is traced, and so do TensorFlow's threads of replicas.
    knows = (distribute_lib.get_replica_context(), threading.current_thread())
    step = next(filter(None, (getattr(each, "graph", None) for each in knows)), None)
    if step in _outer_graphs(graph):
        raise NotImplementedError(
            "A partitioned variable gets its gradient where the step itself, a loop or a branch "
            "reads it. Received: a read in a tf.function within the step. Remove the @tf.function: "
            "the step is compiled as a whole."
        )
    return inner, graph


def _outer_graphs(graph: object) -> Iterator[tf.Graph]:
    while isinstance(graph, FuncGraph):
        graph = graph.outer_graph
        yield graph


class Partitioned(AssignedInParts, InOnePiece, RowsOnServers):
    """Reads and assignments of the table above.

    Args:
        strategy, parts, aggregation, var_policy: what a distributed variable takes, with the parts
            in the place of the copies.

    Attributes:
        parts: variables, in the order of their rows.
        rows: first row and end of each.
    """

    trainable: bool
    distribute_strategy: Any
    name: str

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        parts: Sequence,
        aggregation: object,
        var_policy: object = None,
    ):
        super().__init__(strategy, parts[:1], aggregation, var_policy)  # type: ignore[call-arg]
        self._read_before: weakref.WeakSet = weakref.WeakSet()  # graphs that take the whole
        self.parts = tuple(parts)
        ends = [sum(p.shape[0] for p in parts[: i + 1]) for i in range(len(parts))]
        self.rows = list(zip([0, *ends], ends, strict=False))

    @property
    def shape(self) -> tf.TensorShape:
        """Of the whole."""
        return tf.TensorShape([self.rows[-1][1], *self.parts[0].shape[1:]])

    def get_shape(self) -> tf.TensorShape:
        """Of the whole."""
        return self.shape

    def _current(self) -> tf.Variable | None:
        part = getattr(_thread, "part", None)
        return None if part is None else self.parts[part]

    def whole(self) -> tf.Tensor:
        """All rows. Gradients are recorded for `handle`, as if it were one variable's."""
        if not self.trainable:
            return self._joined()
        with self._where_the_step_is_traced():
            value = self._joined()
            variable_accessed(self.parts[0])
            handle = self.parts[0].handle
            record.record_operation("ReadParts", [value], [handle], lambda gradient: [gradient])
        return value

    def _joined(self) -> tf.Tensor:
        with record.stop_recording():
            return tf.concat([part.read_value() for part in self.parts], 0)

    def _where_the_step_is_traced(self) -> contextlib.AbstractContextManager:
        """The graph in which reads are recorded; see "gradients of what a loop reads"."""
        inner, outer = _loops_around()
        if not inner:
            return contextlib.nullcontext()
        self._read_before.update(inner)
        return outer.as_default()

    def _whole_of_files(self) -> tf.Tensor:
        # Not `read_value`, for which the function that is traced would own the parts, too.
        reads = [tf.raw_ops.ReadVariableOp(resource=p.handle, dtype=p.dtype) for p in self.parts]
        return tf.concat(reads, 0)

    def value(self) -> tf.Tensor:
        part = self._current()
        if part is None:
            return self._exported().read_value() if is_exporting() else self.whole()
        return part.read_value()

    read_value = value

    def _get(self) -> tf.Tensor:  # what operators such as `*` compute with
        return self.value()

    def _get_cross_replica(self) -> tf.Tensor:
        return self.value()

    def _dense_var_to_tensor(
        self, dtype: object = None, name: object = None, as_ref: bool = False
    ) -> object:
        del as_ref
        return tf.convert_to_tensor(self.value(), dtype, name=name)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Rows, each gathered on the server that has it: `[*indices, ...]`."""
        part = self._current()
        if part is not None:
            return part.sparse_read(indices, name=name)
        if is_exporting():
            return self._exported().sparse_read(indices, name=name)
        indices = tf.convert_to_tensor(indices)
        if self.trainable and _loops_around()[0]:
            return tf.gather(self.whole(), indices, name=name)
        flat = tf.reshape(indices, [-1])
        with record.stop_recording():
            value = self._gathered(flat)
            value = tf.reshape(value, tf.concat([tf.shape(indices), self.shape[1:]], 0))
            value.set_shape([*indices.shape, *self.shape[1:]])
        if self.trainable:
            variable_accessed(self.parts[0])
            handle, shape = self.parts[0].handle, tf.constant(self.shape.as_list(), flat.dtype)

            def backward(gradient: tf.Tensor) -> list:
                rows = tf.reshape(gradient, [-1, *self.shape[1:]])
                return [tf.IndexedSlices(rows, flat, shape)]

            record.record_operation("GatherParts", [value], [handle], backward)
        return value

    def _gathered(self, flat: tf.Tensor) -> tf.Tensor:
        """Rows `[len(flat), ...]` of the whole."""
        with tf.control_dependencies([self._check_rows(flat)]):
            starts = tf.constant([start for start, _ in self.rows], flat.dtype)
            number = tf.searchsorted(starts, flat, side="right") - 1  # of the part
            local = flat - tf.gather(starts, number)
        count = len(self.parts)
        places = tf.dynamic_partition(tf.range(tf.size(flat)), number, count)
        gathered = []
        for part, rows in zip(self.parts, tf.dynamic_partition(local, number, count), strict=True):
            with tf.device(part.device):
                gathered.append(part.sparse_read(rows))
        return tf.dynamic_stitch(places, gathered)

    def _check_rows(self, flat: tf.Tensor) -> tf.Operation:
        """The parts would say which of their own rows is missing."""
        count = self.shape[0]
        wrong = tf.boolean_mask(flat, (flat < 0) | (flat >= count))
        message = f"Expected indices in [0, {count}). Received others:"
        return tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [message, wrong])

    def _to_parts(self, name: str, value: tf.Tensor | tf.IndexedSlices) -> object:
        if tf.compat.v1.get_default_graph() in self._read_before:
            raise NotImplementedError(
                "A partitioned variable is read before the loop or branch that needs its gradient, "
                f"and cannot be assigned in it. Received: {name} of '{self.name}' in one. Move the "
                "loop out of strategy.run, or leave variable_partitioner out."
            )
        part = self._current()
        if part is not None:
            return getattr(part, name)(value)
        if not isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value, self.parts[0].dtype)
            value.shape.assert_is_compatible_with(self.shape)
        for part, rows in zip(self.parts, cut_rows(value, self.rows), strict=True):
            getattr(part, name)(rows)
        return self


class CentralPartitionedVariable(TellsOfChanges, WholeInCheckpoints, Partitioned, CentralVariable):
    """Under `mode="sync"`: replica 0 assigns for all."""


class AsyncPartitionedVariable(  # type: ignore[misc]
    WholeInCheckpoints, HandedIn, Partitioned, CentralVariable
):
    """Under `mode="async"`: a worker's step hands its assignments in."""

    def _server_value(self) -> tf.Tensor:
        return self.whole()

    def in_one_piece(self) -> tf.Variable:
        self._settle()
        return super().in_one_piece()
