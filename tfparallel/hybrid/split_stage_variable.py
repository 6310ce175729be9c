"""Variables of pipelines whose copies are in parts, on the devices of their stage.

pipeline 0    parts[0][0] on CPU:0    parts[0][1] on CPU:1     the devices of the stage there
pipeline 1    parts[1][0] on CPU:4    parts[1][1] on CPU:5
"""

from collections.abc import Sequence

import tensorflow as tf

from tfparallel.hybrid.pieces_on_hosts import StoredInPieces
from tfparallel.internals import distribute_lib, values_util
from tfparallel.internals.distribute import become_part_of
from tfparallel.pipeline.stage_variables import InPartsOnStage, leave, moved, tell
from tfparallel.replicas.axis_of_processes import Gradient
from tfparallel.replicas.device_names import hosts_of
from tfparallel.tensor_parallel.known_parts import joined
from tfparallel.tensor_parallel.rows import Rows


class SplitStageVariable(StoredInPieces, InPartsOnStage):
    """As `StoredInPieces` reads and assigns, where a replica is a microbatch of a pipeline.

    The first microbatch of all assigns the first copy, and each part tells those of other copies.
    Slots of optimizers have one copy.
    """

    _is_copied_once_a_device = False  # copies have no device in common

    @property
    def num_parts(self) -> int:  # type: ignore[override]
        """Of each copy."""
        return len(self.stored.sizes)

    @property
    def _primary(self) -> tf.Variable:
        return self._values[self._copy() or 0]

    def _copy(self) -> int | None:
        copy = super()._copy()
        return copy if copy is None else min(copy, len(self.parts) - 1)

    def _replica(self) -> int | None:
        """The pipeline that the caller computes in; None outside of this strategy's replicas."""
        updated = distribute_lib.get_update_replica_id()
        if updated is not None or not self.is_own_context():
            return updated
        replica = values_util.get_current_replica_id_as_int()
        return self.distribute_strategy.extended.pipeline_of(replica)

    def _to_parts(self, name: str, value: tf.Tensor | tf.IndexedSlices | tf.Variable) -> object:
        if self._current() is not None:
            return super()._to_parts(name, value)
        changes = self.distribute_strategy.extended._changes
        if self.is_own_context() and changes is not None and changes.is_in_layer:
            raise ValueError(
                "A layer on a stage of several devices may assign variables that are whole. "
                f"Received: an assignment to a part of '{self._own_name()}', by its layer. Leave "
                "that out of the layout."
            )
        result = super()._to_parts(name, value)
        if self._copy() is not None and self.is_assigned_here():
            self.tell_copies()
        return result

    def is_assigned_here(self) -> bool:
        """Whether the caller is the first microbatch of the first pipeline that has the copy."""
        is_replica = distribute_lib.get_update_replica_id() is None and self.is_own_context()
        return super().is_assigned_here() and (not is_replica or self._is_assigned_here())

    def updated_copies(self) -> list[tuple]:
        """The first, which tells the others."""
        return self.parts[:1]

    def tell_copies(self) -> None:
        """Gives other copies each part's value, from its device to that of the part there."""
        copy = self._copy() or 0
        others = [*self.parts[:copy], *self.parts[copy + 1 :]]
        for i, part in enumerate(self.own_parts() if others else ()):
            tell(part, [other[i] for other in others])

    # ---- places ----------------------------------------------------------------------------------

    def copy_in(self, pipeline: int, like: tf.Variable) -> tf.Variable:
        """The same part of another pipeline's copy."""
        return self.parts[pipeline // self.shards][self.place_of(like)[1]]

    def places(self) -> list[Sequence[str]]:
        """The devices of what each pipeline stores."""
        return [
            tuple(part.device for part in copy[shard :: self.shards])
            for copy in self.parts
            for shard in range(self.shards)
        ]

    def homes(self) -> list[str]:
        """Of each piece the device where it is updated."""
        return [piece.device for piece in self.parts[0]]

    def _move_to(self, places: Sequence[Sequence[str]]) -> None:
        for index in range(len(self.parts)):
            sharing = places[index * self.shards : (index + 1) * self.shards]
            devices = [devices[k] for k in range(len(self.rows.sizes)) for devices in sharing]
            self._move_copy(index, hosts_of(devices) if self.is_on_host else devices)

    def _move_copy(self, index: int, devices: Sequence[str]) -> None:
        old = self.parts[index]
        new = tuple(moved(part, device) for part, device in zip(old, devices, strict=True))
        for each, before in zip(new, old, strict=True):
            if each is not before:
                become_part_of(self, each, before)
                leave(before)
        self.parts[index] = new
        self._values = tuple(copy[0] for copy in self.parts)

    # ---- gradients -------------------------------------------------------------------------------

    def place_of(self, part: tf.Variable) -> tuple[int, int]:
        """The number of the copy, and that in the copy, of the variable of a part."""
        return next(
            (index, number)
            for index, copy in enumerate(self.parts)
            for number, own in enumerate(copy)
            if own is part
        )

    def on_tape(self, copy: int) -> tf.Tensor:
        """The handle of the copy's first part."""
        return self.parts[copy][0].handle

    def gradient_of_whole(self, gradients: Sequence) -> Gradient | None:
        """Of the parts' gradients, each of which goes to where its part is.

        Where all are rows of a table, they are rows of the whole: one device has a row for each
        token too, which matters to norms.
        """
        present = [gradient for gradient in gradients if gradient is not None]
        if not present:
            return None
        if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
            return self.sparse_gradient(self.stored, gradients)
        pieces = []
        for part, gradient in zip(self.parts[0], gradients, strict=True):
            pieces.append(tf.zeros(part.shape, part.dtype) if gradient is None else gradient)
        return self._joined_where_they_are(pieces)

    def sparse_gradient(self, rows: Rows, gradients: Sequence) -> tf.IndexedSlices:
        """Sparse gradients of parts along `rows`, as one of the whole."""
        return _rows_of_whole(rows, gradients, self.shape.as_list())

    def _joined_where_they_are(self, gradients: Sequence) -> tf.Tensor:
        pieces = []
        for part, gradient in zip(self.own_parts(), gradients, strict=True):
            # Gradients of microbatches are added up on devices, also where pieces are on hosts.
            device = gradient.device if self.is_on_host else part.device
            with tf.device(device):
                dense = tf.convert_to_tensor(gradient)
                pieces.append(dense if dense.device == device else tf.identity(dense))
        return joined(pieces, self.rows.dim, self.rows.blocks)


def _rows_of_whole(rows: Rows, gradients: Sequence, shape: Sequence[int]) -> tf.IndexedSlices:
    """Gradients of parts `[own rows, ...]`, sparse, as one of the whole; in parts along columns
    they have the same rows."""
    dense_shape = tf.constant(list(shape), tf.int64)
    if rows.dim > 0:
        values = tf.concat([each.values for each in gradients], rows.dim)
        return tf.IndexedSlices(values, gradients[0].indices, dense_shape)
    starts = zip(gradients, rows.starts, strict=True)
    own = [(each, start) for each, start in starts if each is not None]
    indices = [tf.cast(each.indices, tf.int64) + start for each, start in own]
    values = tf.concat([each.values for each, _ in own], 0)
    return tf.IndexedSlices(values, tf.concat(indices, 0), dense_shape)
