"""The gradients of one optimizer, summed over ranks in compressed form."""

import math
import zlib
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfparallel.communication.bucketing import COMPRESSED_BUCKET_BYTES, plan_buckets
from tfparallel.communication.compression.buckets import Bucket, State, remember
from tfparallel.communication.compression.compression_report import (
    CompressionReport,
    VariableReport,
)
from tfparallel.communication.compression.compressor import Compressor
from tfparallel.communication.compression.names import as_compressor
from tfparallel.communication.compression.transport import Transport
from tfparallel.internals import ResourceVariable


class GradientCompression(tf.Module):
    """What a strategy calls in place of its all-reduce of gradients.

    It owns what compression remembers: one copy on each rank, where the residuals differ by rank
    and all else is equal. As a `tf.Module` it is saved by whatever tracks it: attach it to the
    optimizer, and `tf.train.Checkpoint(optimizer=...)` holds it.

    A gradient with a value that is not finite, on any rank, gives sums that are not finite on all
    ranks, and leaves the state as it was, as if the step had not been.

    Args:
        compressor: a `Compressor`, or its name.
        variables: what the gradients are of: anything with a `shape`, and `path` or `name`. Equal
            on all ranks, in the same order.
        bucket_bytes: gradients are reduced in buckets of so many bytes, the last layers' first.
        late_counts: whether what is sent a step late is worth as much to the optimizer: SGD adds up
            what comes; Adam divides it by what came.
    """

    def __init__(
        self,
        compressor: "Compressor | str",
        variables: Sequence[(keras.Variable | tf.Variable)],
        bucket_bytes: int = COMPRESSED_BUCKET_BYTES,
        late_counts: bool = True,
    ):
        super().__init__(name="gradient_compression")
        self.compressor = as_compressor(compressor)
        self._positions = {id(variable): i for i, variable in enumerate(variables)}
        self._names = tuple(_name(variable) for variable in variables)
        self._shapes = tuple(tuple(variable.shape) for variable in variables)
        self._buckets = self._planned_buckets(bucket_bytes)
        with tf.init_scope():
            self._loss_scale = ResourceVariable(1.0, name="compression/loss_scale")
            self._states = [self._new_state(i) for i in range(len(variables))]
            shapes = [[self._shapes[i] for i in bucket] for bucket in self._buckets]
            self._reducer = self.compressor.reducer(shapes, late_counts)

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        transport: Transport,
        variables: Sequence[(keras.Variable | tf.Variable)] | None = None,
        loss_scale: tf.Tensor | None = None,
    ) -> list:
        """Sums gradients over ranks. All ranks call it, with gradients of the same variables.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None, in the order of `variables`. Sparse
                gradients, integers, and tensors to which the compressor does not apply are summed
                as they are. Floating-point gradients are compressed in float32.
            transport: the collectives.
            variables: whose gradients these are, if not those of all.
            loss_scale: what the loss was multiplied with. Residuals follow when it changes.

        Returns:
            The sums: of the same types, dtypes and shapes, None where the gradient is None, the
            same bits on all ranks.
        """
        positions = self._positions_of(gradients, variables)
        if loss_scale is not None:
            self._follow(tf.cast(loss_scale, tf.float32))
        results: list = [None] * len(gradients)
        plain, compressed = [], {}
        for i, (gradient, position) in enumerate(zip(gradients, positions, strict=True)):
            if isinstance(gradient, tf.IndexedSlices):
                results[i] = _sum_of_sparse(gradient, transport)
            elif gradient is not None and self._is_compressed(position, gradient):
                compressed[position] = i
            elif gradient is not None:
                plain.append(i)
        chosen = [[compressed[p] for p in bucket if p in compressed] for bucket in self._buckets]
        buckets = [
            Bucket(
                [tf.cast(gradients[i], tf.float32) for i in bucket],
                [self._states[positions[i]] for i in bucket],
            )
            for bucket in chosen
        ]
        reduced = self._reducer.reduce(buckets, [gradients[i] for i in plain], transport)
        for bucket, reduction in zip([*chosen, plain], reduced, strict=True):
            for i, total in zip(bucket, reduction.sums, strict=True):
                results[i] = tf.cast(total, gradients[i].dtype)
        remember(reduced)
        return results

    def report(self, world_size: int) -> CompressionReport:
        """What each of `world_size` ranks sends of each gradient in one step, and why."""
        rows = [
            VariableReport.of(name, shape, self._sent_as(i), world_size)
            for i, (name, shape) in enumerate(zip(self._names, self._shapes, strict=True))
        ]
        return CompressionReport(repr(self.compressor), rows, self._reducer.decisions())

    # ---- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        """What this rank remembers, by name."""
        return {name: variable.numpy() for name, variable in self._named_variables().items()}

    def set_state(self, states: Sequence[Mapping[str, np.ndarray]], world_size: int) -> None:
        """Sets what `state` returned.

        Args:
            states: this rank's own; or, where another number of ranks saved them, those of all.
                Residuals then keep their sum over ranks, which is what gradients still lack. All
                else is equal on all ranks.
            world_size: how many ranks there are now.

        Raises:
            KeyError, ValueError: if `states` are of another compressor or model.
        """
        for name, variable in self._named_variables().items():
            value = states[0][name]
            if len(states) > 1 and name.endswith("/residual"):
                value = np.sum([state[name] for state in states], 0) / world_size
            variable.assign(value)

    def shared_variables(self) -> list[tf.Variable]:
        """What must be equal on all ranks: a rank that joins takes it from the others."""
        named = self._named_variables().items()
        return [variable for name, variable in named if not name.endswith("/residual")]

    def _named_variables(self) -> dict[str, tf.Variable]:
        named = {
            f"{i}/{key}": variable
            for i, state in enumerate(self._states)
            for key, variable in state.items()
        }
        reducer = {f"reducer/{i}": variable for i, variable in enumerate(self._reducer.variables)}
        return {**named, **reducer, "loss_scale": self._loss_scale}

    def _new_state(self, position: int) -> State:
        name, shape = self._names[position], self._shapes[position]
        if not self.compressor.applies_to(shape):
            return {}
        # Not of the name: Keras counts on in the names of a second model, which is to train alike.
        seed = zlib.crc32(f"{position} {shape}".encode())
        initial = self.compressor.initial_state(shape, seed)
        return {
            key: ResourceVariable(value, name=f"compression/{name}/{key}")
            for key, value in initial.items()
        }

    def _follow(self, loss_scale: tf.Tensor) -> None:
        """Residuals are parts of scaled gradients: they take on the scale of the next ones."""

        def rescale() -> tf.Tensor:
            factor = loss_scale / self._loss_scale
            for state in self._states:
                if "residual" in state:
                    state["residual"].assign(state["residual"] * factor, read_value=False)
            self._loss_scale.assign(loss_scale, read_value=False)
            return tf.constant(True)

        tf.cond(tf.equal(loss_scale, self._loss_scale), lambda: tf.constant(False), rescale)

    # ---- which gradient goes where ---------------------------------------------------------------

    def _positions_of(self, gradients: Sequence, variables: Sequence | None) -> list[int]:
        positions = list(range(len(self._names)))
        if variables is not None:
            unknown = [_name(v) for v in variables if id(v) not in self._positions]
            if unknown:
                raise ValueError(
                    "Expected gradients of the variables that this compression was made for: "
                    f"{list(self._names)}. Received gradients of others: {unknown}. Build the "
                    "optimizer with all variables that it will train."
                )
            positions = [self._positions[id(v)] for v in variables]
        if len(gradients) != len(positions):
            raise ValueError(
                f"Expected one gradient, or None, for each of {len(positions)} variables. "
                f"Received: {len(gradients)}."
            )
        return positions

    def _is_compressed(self, position: int, gradient: tf.Tensor) -> bool:
        is_known = gradient.shape.is_fully_defined()
        return (
            self.compressor.applies_to(self._shapes[position])
            and is_known
            and gradient.dtype.is_floating
        )

    def _planned_buckets(self, bucket_bytes: int) -> list[list[int]]:
        """Positions of the variables whose gradients are compressed, in the order of backward."""
        positions = [i for i, s in enumerate(self._shapes) if self.compressor.applies_to(s)][::-1]
        sizes = [4 * math.prod(self._shapes[i]) for i in positions]
        planned = plan_buckets(sizes, ["float32"] * len(sizes), bucket_bytes)
        return [[positions[j] for j in bucket] for bucket in planned]

    def _sent_as(self, position: int) -> Compressor | None:
        for number, bucket in enumerate(self._buckets):
            if position in bucket:
                return self._reducer.compressor_of(number)
        return None


def _sum_of_sparse(gradient: tf.IndexedSlices, transport: Transport) -> tf.IndexedSlices:
    """The rows of all ranks; equal indices are not merged."""
    return tf.IndexedSlices(
        transport.all_gather_rows(gradient.values),
        transport.all_gather_rows(gradient.indices),
        gradient.dense_shape,
    )


def _name(variable: keras.Variable | tf.Variable) -> str:
    return getattr(variable, "path", None) or variable.name
