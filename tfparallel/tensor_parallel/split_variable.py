"""One variable whose parts are on the devices of a replica's group.

context                                            reads                  assignments
-------------------------------------------------  ---------------------  --------------------------
an optimizer's update of part i (`in_part`)        part i                 part i
a rule of a layer (`part_values`)                  every part, where
                                                   it is
anywhere else in a replica                         the whole              each part its rows
outside of replicas                                the whole, of the      each part its rows, in
                                                   first group            every group

Whoever reads the whole gets the right one; that it is in parts saves its memory only.
Saved files hold the whole under the variable's own name.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import (
    DistributedVariable,
    SaveSpec,
    device_util,
    distribute_lib,
    record,
    values_util,
    variable_accessed,
)
from tfparallel.internals.keras_layers import behind
from tfparallel.internals.keras_trainer import is_exporting
from tfparallel.replicas.assigned_in_parts import AssignedInParts
from tfparallel.replicas.tape_hooks import told_of_gradient
from tfparallel.replicas.variables import ReplicatedVariable, check_outside_of_replicas
from tfparallel.tensor_parallel.known_parts import joined_as, parts_of, put_together
from tfparallel.tensor_parallel.loops import before_loops
from tfparallel.tensor_parallel.rows import Rows
from tfparallel.tensor_parallel.whole_copy import OnePiece

_VALUE_KEY = "VARIABLE_VALUE"  # of a variable in TensorFlow's checkpoints
_thread = threading.local()


@contextlib.contextmanager
def in_part(index: int) -> Iterator[None]:
    """Within it, split variables are their part number `index`."""
    _thread.part = index
    try:
        yield
    finally:
        _thread.part = None


def split_of(variable: object) -> "SplitVariable | None":
    """The split variable behind a Keras variable or a `tf.Variable`, if it is one."""
    value = behind(variable) if isinstance(variable, keras.Variable) else variable
    return value if isinstance(value, SplitVariable) else None


def slices_of_part(
    slices: tf.IndexedSlices, rows: Rows, part: int, part_shape: Sequence
) -> tf.IndexedSlices:
    """What of a sparse gradient or value of the whole is for part number `part`."""
    shape = tf.constant(list(part_shape), slices.indices.dtype)
    if rows.dim > 0:
        return tf.IndexedSlices(parts_of(slices.values, rows)[part], slices.indices, shape)
    start, size = rows.starts[part], rows.sizes[part]
    is_own = (slices.indices >= start) & (slices.indices < start + size)
    own = tf.where(is_own)[:, 0]  # `boolean_mask` has a GPU send the host how many rows there are
    values = tf.gather(slices.values, own)
    return tf.IndexedSlices(values, tf.gather(slices.indices, own) - start, shape)


class SplitVariable(AssignedInParts, ReplicatedVariable):
    """Reads and assignments of the table above.

    Args:
        strategy, values, aggregation, var_policy: what a distributed variable takes, with all parts
            of replica 0, then those of replica 1 and so on as values.
        rows: of each replica's copy.
        shards: how many replicas, one behind the other, share a copy. Each stores a piece of every
            part.

    Attributes:
        rows: which dim is divided, and how, for those who compute with parts.
        stored: the same, as it is stored: in pieces of parts, where a copy is shared.
        parts: of each copy, variables, one for each of `stored`.
    """

    trainable: bool
    distribute_strategy: Any
    dtype: tf.DType
    name: str
    _values: Any

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        values: Sequence,
        aggregation: object,
        var_policy: object = None,
        *,
        rows: Rows,
        shards: int = 1,
    ):
        self.rows, self.shards, self.stored = rows, shards, rows.cut(shards)
        count = len(self.stored.sizes)
        super().__init__(strategy, values[::count], aggregation, var_policy)
        self.parts = [tuple(values[i : i + count]) for i in range(0, len(values), count)]
        for part in values:
            part._distributed_container = weakref.ref(self)
            part.handle._distributed_container = weakref.ref(self)
        shape = values[0].shape.as_list()
        shape[rows.dim] = sum(rows.sizes)
        self._whole_shape = tf.TensorShape(shape)
        self._piece = OnePiece(self._values_of_parts, self.stored, self._host())

    @property
    def here(self) -> tuple[int, ...]:
        """Which of `stored` the devices of this process have."""
        return tuple(range(len(self.stored.sizes)))

    @property
    def shape(self) -> tf.TensorShape:
        """Of the whole."""
        return self._whole_shape

    def get_shape(self) -> tf.TensorShape:
        """Of the whole."""
        return self._whole_shape

    # ---- reading ---------------------------------------------------------------------------------

    def _replica(self) -> int | None:
        """Whose parts the caller computes with; None outside of this strategy's replicas."""
        context = distribute_lib.get_replica_context()
        if context is not None and context.strategy is not self.distribute_strategy:
            return None  # outside of every scope TensorFlow's default replica has number 0
        return values_util.get_current_replica_id_as_int()

    def _copy(self) -> int | None:
        """Which of the copies the caller computes with; None outside of this strategy's replicas.

        In `extended.update` copies have numbers, not replicas.
        """
        replica = self._replica()
        is_update = distribute_lib.get_update_replica_id() is not None
        return replica if replica is None or is_update else replica // self.shards

    def is_assigned_here(self) -> bool:
        """Whether the caller assigns the copy that it computes with."""
        is_update = distribute_lib.get_update_replica_id() is not None  # of each copy
        return is_update or self._copy() is None or (self._replica() or 0) % self.shards == 0

    def assigned_copies(self) -> Iterator[tuple]:
        """What is stored of each copy that the caller assigns: outside of replicas these are all.

        While it has one of these, it is that copy that the caller computes with.
        """
        if self._copy() is not None:
            if self.is_assigned_here():
                yield self.own_parts()
            return
        for i in range(len(self.parts)):
            with distribute_lib.UpdateContext(i):
                yield self.own_parts()

    def own_parts(self) -> tuple:
        """What is stored of the copy that the calling replica computes with."""
        return self.parts[self._copy() or 0]

    def copies(self) -> list[tuple]:
        """What is stored of each copy."""
        return self.parts

    def updated_copies(self) -> list[tuple]:
        """Those that an update outside of replicas computes."""
        return self.parts

    def read_parts(self) -> list[tf.Tensor]:
        """The value of each part, where it is computed with, unknown to gradient tapes."""
        pieces = self.read_stored()
        if self.shards == 1:
            return pieces
        group, values = self.distribute_strategy.extended.own_group(), []
        with record.stop_recording():
            for k in range(len(self.rows.sizes)):
                with tf.device(group[k]):
                    own = slice(k * self.shards, (k + 1) * self.shards)
                    rows = Rows(self.rows.dim, self.stored.sizes[own], self.rows.blocks)
                    values.append(put_together(pieces[own], rows))
        return values

    def read_stored(self) -> list[tf.Tensor]:
        """The value of all that is stored, read where it is, unknown to gradient tapes."""
        values = []
        with record.stop_recording():
            for part in self.own_parts():
                with tf.device(part.device):
                    values.append(part.read_value())
        return values

    def _values_of_parts(self) -> list[tf.Tensor]:
        """Of the first group; not by `read_value`, for which a traced function would own them."""
        return [
            tf.raw_ops.ReadVariableOp(resource=part.handle, dtype=part.dtype)
            for part in self.parts[0]
        ]

    def part_values(self) -> list[tf.Tensor]:
        """The value of each part, where it is. Tapes see a read of this variable."""
        values = self.read_parts()
        self._note_read(values, lambda *gradients: [joined_as(gradients, self.rows)])
        return values

    def _note_read(self, values: list[tf.Tensor], backward: Callable[..., list]) -> None:
        """Tells gradient tapes that `values` were read, with a gradient by `backward`."""
        if self.trainable:
            variable_accessed(self._tape_variable())
            handles = [self._tape_variable().handle]
            record.record_operation("ReadParts", values, handles, backward)

    def _tape_variable(self) -> tf.Variable:
        """The part whose handle stands for the whole in `tape.gradient`: that of `handle`."""
        return self.own_parts()[0]

    def whole(self) -> tf.Tensor:
        """All parts as one; in a loop, read before it. A sparse gradient of it stays sparse."""
        if not self.trainable:
            return put_together(self.read_parts(), self.rows)
        with before_loops():
            with record.stop_recording():
                value = joined_as(self.read_parts(), self.rows)
            self._note_read([value], lambda gradient: [gradient])
        return value

    @property
    def handle(self) -> tf.Tensor:
        """What stands for the whole in `tape.gradient`."""
        if self.shards == 1:
            return super().handle
        told_of_gradient("weights in parts")
        check_outside_of_replicas(self)
        return self._tape_variable().handle

    def _get_replica(self, replica_id: int) -> tf.Variable:
        return super()._get_replica(replica_id) if self.shards == 1 else self.own_parts()[0]

    def _current(self) -> tf.Variable | None:
        part = getattr(_thread, "part", None)
        return None if part is None else self.own_parts()[part]

    def _get(self) -> tf.Tensor | tf.Variable:  # what operators such as `*` compute with
        part = self._current()
        return self.value() if part is None else part

    def _get_cross_replica(self) -> tf.Tensor:
        return self.value()

    def value(self) -> tf.Tensor:
        part = self._current()
        if part is not None:
            return part.read_value()
        if is_exporting():
            return self._piece.kept_by_graph(self._own_name(), self.trainable).read_value()
        return self.whole()

    read_value = value

    def _dense_var_to_tensor(
        self, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        del as_ref
        return tf.convert_to_tensor(self.value(), dtype, name=name)

    def numpy(self) -> np.ndarray:
        """The whole."""
        if not tf.executing_eagerly():
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")
        pieces = [np.split(p.numpy(), self.rows.blocks, self.rows.dim) for p in self.own_parts()]
        in_order = [piece for of_block in zip(*pieces, strict=True) for piece in of_block]
        return np.concatenate(in_order, self.rows.dim)

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Rows of the whole: `[*indices, ...]`."""
        return tf.gather(self.value(), indices, name=name)

    # ---- assigning -------------------------------------------------------------------------------

    def _refused(self, name: str) -> NoReturn:
        raise NotImplementedError(
            f"A variable in parts takes assign, assign_add, assign_sub, scatter_add, scatter_sub "
            f"and scatter_update. Received: {name} of '{self.name}'. Leave it out of the layout."
        )

    def scatter_max(self, *args: object, **kwargs: object) -> NoReturn:
        self._refused("scatter_max")

    def scatter_min(self, *args: object, **kwargs: object) -> NoReturn:
        self._refused("scatter_min")

    def scatter_mul(self, *args: object, **kwargs: object) -> NoReturn:
        self._refused("scatter_mul")

    def scatter_div(self, *args: object, **kwargs: object) -> NoReturn:
        self._refused("scatter_div")

    def _to_parts(self, name: str, value: tf.Tensor | tf.IndexedSlices | tf.Variable) -> object:
        part = self._current()
        if part is not None:
            return getattr(part, name)(value)
        if not self.is_assigned_here():
            return self
        own = self._copy()
        for copy in self.copies() if own is None else [self.own_parts()]:
            for target, piece in zip(copy, self.pieces(value), strict=True):
                with tf.device(target.device):
                    getattr(target, name)(piece)
        return self

    def pieces(self, value: tf.Tensor | tf.IndexedSlices | tf.Variable) -> list:
        """A value of the whole, dense or sparse, as one for each part that is here."""
        parts = self._cut(value, self.stored)
        return [parts[i] for i in self.here]

    def _cut(self, value: tf.Tensor | tf.IndexedSlices | tf.Variable, rows: Rows) -> list:
        if isinstance(value, tf.IndexedSlices) and rows.blocks > 1:
            value = tf.convert_to_tensor(value)
        if isinstance(value, tf.IndexedSlices):
            shapes = [self._shape_of_part(size) for size in rows.sizes]
            with record.stop_recording():
                return [slices_of_part(value, rows, i, shape) for i, shape in enumerate(shapes)]
        if isinstance(value, DistributedVariable):
            value = value.value()
        value = tf.convert_to_tensor(value, self.dtype)
        value.shape.assert_is_compatible_with(self.shape)
        if not value.shape.is_fully_defined():
            value = tf.ensure_shape(value, self.shape)
        with record.stop_recording():
            return parts_of(value, rows)

    def _shape_of_part(self, size: int) -> list[int]:
        shape = self.shape.as_list()
        shape[self.rows.dim] = size
        return shape

    # ---- saving ----------------------------------------------------------------------------------

    def _serialize_to_tensors(self) -> dict[str, SaveSpec]:
        def read() -> tf.Tensor:
            with tf.device(self._host()):
                return tf.identity(self.whole())

        return {_VALUE_KEY: SaveSpec(read, "", _VALUE_KEY, self.dtype, device=self._host())}

    def _host(self) -> str:
        """The full name of the CPU: a file for a shorter one would count as another task's."""
        return device_util.canonicalize("/device:CPU:0", self.parts[0][0].device)

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> object:
        return self.assign(tf.ensure_shape(restored_tensors[_VALUE_KEY], self.shape))

    def _export_to_saved_model_graph(
        self,
        object_map: dict,
        tensor_map: dict,
        options: tf.saved_model.SaveOptions | None = None,
        **kwargs: object,
    ) -> list:
        piece = self._piece.updated(self._own_name(), self.trainable)
        resources = piece._export_to_saved_model_graph(object_map, tensor_map, options, **kwargs)
        object_map[self], tensor_map[self] = object_map[piece], tensor_map[piece.handle]
        return [*resources, self]

    def _own_name(self) -> str:
        return self.name.split(":")[0]
