"""A Keras step as the one program that every replica runs: what a TPU can do of `keras_step.py`.

There, every replica has a graph of its own and the step begins and ends outside of them. Here all
replicas run the same compiled program, each on its rows: outputs are averaged inside of it, and
batches that may differ in size get rows of padding (`padded_batches.py`), so that one program does
for all. The mathematics are the same.
"""

import contextlib
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import tensorflow as tf

from tfparallel.internals import (
    PerReplica,
    ReduceOp,
    calling_trainer,
    distribute_lib,
    is_called_by_trainer,
    is_compiled_step,
    is_keras_step,
    is_predict_step,
    is_stock_step,
    is_train_step,
    model_of_predict_step,
    trainer_that_builds,
)
from tfparallel.internals.distribute import num_replicas
from tfparallel.replicas import checks, model_hooks
from tfparallel.replicas.all_rows import all_rows
from tfparallel.replicas.batch import OfRows, Rows, concat_rows, num_rows
from tfparallel.replicas.described_strategy import DescribedStrategy
from tfparallel.replicas.device_names import short_names
from tfparallel.replicas.long_starts import spoken_of
from tfparallel.replicas.remat_scopes import without_remat_of_keras
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step
from tfparallel.replicas.step_build import targets_by_row
from tfparallel.replicas.weighed_gradients import active_step
from tfparallel.replicas.weighted_losses import weighted_losses
from tfparallel.segments.memory_policy import MemoryPolicy
from tfparallel.segments.step_segments import StepSegments
from tfparallel.tpu.input_by_host import distributed_by_host
from tfparallel.tpu.padded_batches import (
    PaddedBatch,
    WholeBatch,
    batch_size_of,
    checked_at_most,
    checked_to_fit,
    know_rows,
    padded,
    parts_by_replica,
)
from tfparallel.tpu.padded_layers import (
    check_rows_are_apart,
    why_never_padded,
    without_padding,
)
from tfparallel.tpu.padded_step import PaddedStep, average_statistics

if TYPE_CHECKING:
    from tfparallel.measure.lanes import StepLanes

Nest = TypeVar("Nest")


class SpmdKerasSteps(DescribedStrategy):
    """Mixin, before a `tf.distribute.Strategy`: `run` of a Keras step is right for the whole batch.

    Its `extended` needs `SpmdExtended` as a mixin.
    """

    _batch_rows: int | None = None  # what a batch has at most, if the strategy was told
    _most_rows: int | None = None  # of the batches that `*_on_batch` had so far
    _memory = MemoryPolicy()

    def scope(self) -> contextlib.AbstractContextManager:
        """`tf.distribute.Strategy.scope`; entered by Keras to build a model, it helps with that."""
        model_hooks.build_as_keras_does_and_check(trainer_that_builds())
        return super().scope()

    def run(
        self,
        fn: Any,
        args: tuple = (),
        kwargs: dict | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """`tf.distribute.Strategy.run`; a batch that is not distributed yet is split."""
        if is_keras_step(fn):
            model = fn.__self__
            checks.check_model(self, model)
            checks.check_states_of_rows(self, model)
            batch = self._distributed(args[0], model)
            is_padded = isinstance(batch, PaddedBatch)
            hooks = without_padding(model) if is_padded else weighted_losses(model)
            kept = self._memory.during(model, in_xla=True)
            with spoken_of(self, fn), hooks, kept as segments:
                return super().run(_step_on_replica(fn, segments), (batch,), kwargs, options)
        if is_predict_step(fn):
            with spoken_of(self, fn), without_remat_of_keras(model_of_predict_step(fn)):
                return self._predict(fn, args[0], options)
        if is_compiled_step(fn) or is_called_by_trainer():
            checks.check_is_method(fn)
        with spoken_of(self, fn):
            return super().run(fn, args, kwargs, options)

    def _predict(
        self, fn: Callable, data: object, options: tf.distribute.RunOptions | None
    ) -> object:
        """Predictions of all rows of a batch, in its order, without those of padding."""
        model = model_of_predict_step(fn)
        batch = self._distributed(data, model)
        if not isinstance(batch, PaddedBatch):
            own_rows = batch.data if isinstance(batch, WholeBatch) else batch
            return self._rows_in_order(super().run(fn, (own_rows,), None, options), None)

        def on_replica(batch: PaddedBatch) -> object:
            with active_step(_padded_step(batch, weights_loss=False)):
                _check_rows_are_apart(model, batch)
                return fn(batch.data)

        with without_padding(model):
            outputs = super().run(on_replica, (batch,), None, options)
        return self._rows_in_order(outputs, batch.totals)

    def _rows_in_order(
        self, outputs: object, totals: tf.distribute.DistributedValues | None
    ) -> object:
        """The rows that all replicas have computed, but for those of padding.

        Replicas have them in their order, over all hosts. Keras would take another for a TPU's.
        """
        local = self.experimental_local_results
        with tf.device(self.extended._cutting_host):
            are_real = None if totals is None else [part > 0 for part in local(totals)]

            def joined(value: tf.distribute.DistributedValues) -> OfRows:
                parts = local(value)
                if are_real is not None:
                    parts = [_real_rows(*each) for each in zip(parts, are_real, strict=True)]
                return concat_rows(list(parts))

            return keras.tree.map_structure(joined, outputs)

    def _distributed(self, data: object, model: keras.Model) -> object:
        """`data` as replicas get it: split already, or each replica's rows sent to it alone."""
        if isinstance(data, PaddedBatch | WholeBatch):
            know_rows(data)
            if isinstance(data, PaddedBatch) and self._batch_rows is not None:
                checked_to_fit(self.experimental_local_results(data.totals)[0])
            return data
        if any(isinstance(leaf, PerReplica) for leaf in keras.tree.flatten(data)):
            return data
        count = num_replicas(self)
        with tf.device(self.extended._cutting_host):
            data = keras.tree.map_structure(_as_tensor, data)
            total = num_rows(data)
            if isinstance(total, int):
                self._most_rows = max(total, self._most_rows or 0)
            most = self._batch_rows or self._most_rows
            if (
                isinstance(total, int)
                and total % count == 0
                and not (self._batch_rows or 0) > total
            ):
                return parts_by_replica(data, count, total // count)
            why = why_never_padded(model)
            if why is not None or most is None:
                why = why or "no batch of a known size came before it"
                raise ValueError(
                    f"{type(self).__name__} needs as many rows for each of its {count} replicas, "
                    f"and cannot fill the batch with rows of padding: {why}. Received: {total} "
                    f"rows. Give it a multiple of {count} rows."
                )
            rows = -(-most // count)
            with tf.control_dependencies([checked_at_most(data, count * rows)]):
                data = keras.tree.map_structure(_identity, data)
            return parts_by_replica(padded(data, count, rows), count, rows)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> Iterable:
        """`tf.distribute.Strategy.experimental_distribute_dataset`.

        For `fit`, `evaluate` and `predict`, batches that may differ in size are filled with rows of
        padding, which count nowhere.
        """
        call = calling_trainer()
        if call is None:
            return super().experimental_distribute_dataset(dataset, options)
        checks.check_model(self, call.model)
        why_whole, count = why_never_padded(call.model), num_replicas(self)
        size = batch_size_of(dataset, call, count, self._batch_rows, why_whole)
        model_hooks.build_without_reading(call, dataset.element_spec)
        return distributed_by_host(self, dataset, call, size, count)

    def all_rows(self, tensors: Nest) -> Nest:
        """The rows that all replicas have: as `KerasStrategy.all_rows`, of equally many each."""
        return all_rows(self, tensors)

    def profile(self, model: keras.Model, batch: object) -> "StepLanes":
        """Measures when cores and the host do what in a training step; as `KerasStrategy.profile`.

        A step is one XLA program for each core, of whose instructions the TPU's own profiler tells
        the times. A lane for each core, and one for what it sends and receives beside.

        Args:
            model: built and compiled under this strategy.
            batch: what `train_step` takes: `(x, y)` or `(x, y, sample_weight)` of arrays.

        Raises:
            ValueError: inside of a scope, and for a model that is not this strategy's.
            RuntimeError: if the profiler tells nothing of the cores.
        """
        from tfparallel.replicas.step_profile import profile_step  # loads the profiler's format

        most_rows = self._most_rows
        try:
            drawn = profile_step(self, model, batch)
        finally:
            self._most_rows = most_rows  # as of batches that were trained on
        cores = short_names(self.extended.worker_devices)
        if not any(core in lane for lane in drawn.lanes for core in cores):
            raise RuntimeError(
                f"TensorFlow's profiler is expected to tell what {cores} ran. Received: "
                f"{list(drawn.lanes)}. keras.callbacks.TensorBoard(folder, profile_batch=(10, 12)) "
                "writes what it does tell."
            )
        return drawn

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas that train together; 1 inside a Keras step, which is written for one device."""
        return 1 if current_replica_step() is not None else super().num_replicas_in_sync


def _step_on_replica(step_function: MethodType, segments: StepSegments) -> Callable:
    """`step_function` of this replica's rows, with outputs averaged over all rows."""
    is_training = is_train_step(step_function)
    weights_loss = is_training and is_stock_step(step_function)
    model = step_function.__self__

    def on_replica(batch: object) -> object:
        step: ReplicaStep
        if isinstance(batch, PaddedBatch):
            step, data = _padded_step(batch, weights_loss), batch.data
        else:
            data = batch.data if isinstance(batch, WholeBatch) else batch
            rows, total = _rows_of_all(data)
            dtype = keras.config.floatx()  # a TPU has no float64 but where a user asks for it
            weight = tf.cast(rows, dtype) / tf.cast(total, dtype)
            step = ReplicaStep(rows, weight, weights_loss, statistics=[])
            step.by_row = targets_by_row(model) if is_training else []
        with active_step(step):
            if isinstance(batch, PaddedBatch):
                _check_rows_are_apart(model, batch)
            outputs = step_function(data)
            segments.finish_own()
        if is_training and isinstance(step, PaddedStep):
            average_statistics(model, step.weight)
        return _mean_over_rows(outputs, step.weight)

    return on_replica


def _padded_step(batch: PaddedBatch, weights_loss: bool) -> PaddedStep:
    return PaddedStep(batch.totals, weights_loss, keras.config.floatx())


def _check_rows_are_apart(model: keras.Model, batch: PaddedBatch) -> None:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch.data)
    check_rows_are_apart(model, x)


def _real_rows(rows: tf.Tensor, is_real: tf.Tensor) -> tf.Tensor:
    if rows.shape.rank == 0 or rows.shape[0] != is_real.shape[0]:
        raise ValueError(
            f"Predictions have a row for each row of a batch. Received: shape {rows.shape} for "
            f"{is_real.shape[0]} rows, some of which are padding."
        )
    return tf.boolean_mask(rows, is_real)


def _as_tensor(leaf: object) -> OfRows | None:
    return leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)


def _identity(leaf: OfRows | None) -> OfRows | None:
    return leaf if leaf is None else tf.identity(leaf)


def _rows_of_all(data: object) -> tuple[Rows, Rows]:
    """How many rows this replica has, and all together; no communication where they are known."""
    context, rows = distribute_lib.get_replica_context(), num_rows(data)
    if isinstance(rows, int):  # one program for all replicas: it is the same number for each
        return rows, rows * num_replicas(context.strategy)
    return rows, context.all_reduce(ReduceOp.SUM, rows)


def _mean_over_rows(outputs: object, weight: tf.Tensor) -> object:
    """The scalars among `outputs` averaged over all rows, in one all-reduce."""
    flat = keras.tree.flatten(outputs)
    chosen = [
        i
        for i, value in enumerate(flat)
        if tf.is_tensor(value) and value.dtype.is_floating and value.shape.rank == 0
    ]
    if not chosen:
        return outputs
    values = tf.stack([tf.cast(flat[i], weight.dtype) for i in chosen])
    packed = tf.math.multiply_no_nan(values, weight)  # of no rows a mean is 0/0
    means = distribute_lib.get_replica_context().all_reduce(ReduceOp.SUM, packed)
    for i, mean in zip(chosen, tf.unstack(means), strict=True):
        flat[i] = tf.cast(mean, flat[i].dtype)
    return keras.tree.pack_sequence_as(outputs, flat)
