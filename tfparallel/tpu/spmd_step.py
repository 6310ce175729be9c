"""A Keras step as the one program that every replica runs: what a TPU can do of `keras_step.py`.

There, every replica has a graph of its own and the step begins and ends outside of them. Here all
replicas run the same compiled program, which asks for its replica's number: rows are sliced and
outputs averaged inside of it. The mathematics are the same.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import keras
import tensorflow as tf

from tfparallel.internals import (
    BaseOptimizer,
    PerReplica,
    ReduceOp,
    distribute_lib,
    is_called_by_trainer,
    is_compiled_step,
    is_keras_step,
    is_predict_step,
    is_stock_step,
    owner_of_new_variable,
)
from tfparallel.internals.distribute import num_replicas
from tfparallel.replicas import checks, model_hooks
from tfparallel.replicas.all_rows import all_rows
from tfparallel.replicas.batch import num_rows, split_rows
from tfparallel.replicas.described_strategy import DescribedStrategy
from tfparallel.replicas.device_names import short_names
from tfparallel.replicas.long_starts import spoken_of
from tfparallel.replicas.owners import hook_owner
from tfparallel.replicas.replica_step import ReplicaStep, current_replica_step
from tfparallel.replicas.tape_hooks import told_of_gradient
from tfparallel.replicas.variables import is_statistics


class SpmdKerasSteps(DescribedStrategy):
    """Mixin, before a `tf.distribute.Strategy`: `run` of a Keras step is right for the whole batch.

    Its `extended` needs `SpmdExtended` as a mixin.
    """

    def run(
        self, fn: Any, args: tuple = (), kwargs: dict | None = None, options: Any = None
    ) -> Any:
        """`tf.distribute.Strategy.run`; a batch that is not distributed yet is split."""
        is_split = any(isinstance(leaf, PerReplica) for leaf in keras.tree.flatten(args))
        if is_keras_step(fn):
            checks.check_model(self, fn.__self__)
            checks.check_states_of_rows(self, fn.__self__)
            model, step = fn.__self__, _step_on_replica(fn, is_split)
            with spoken_of(self, fn), model_hooks.weighted_losses(model):
                return super().run(step, args, kwargs, options)
        if is_compiled_step(fn) or is_called_by_trainer():
            checks.check_is_not_compiled(fn)
        with spoken_of(self, fn):
            if is_predict_step(fn) and not is_split:
                return super().run(lambda data: fn(_own_rows(data)[0]), args, kwargs, options)
            return super().run(fn, args, kwargs, options)

    def all_rows(self, tensors: Any) -> Any:
        """The rows that all replicas have: as `KerasStrategy.all_rows`, of equally many each."""
        return all_rows(self, tensors)

    def profile(self, model: keras.Model, batch: Any) -> NoReturn:
        """Not on a TPU: other strategies have it, a TPU tells its own profiler alone.

        Raises:
            NotImplementedError: always; it says what does show a step of a TPU.
        """
        name = getattr(model, "name", model)
        raise NotImplementedError(
            f"{type(self).__name__} draws no step. Received: profile of model '{name}'. A TPU runs "
            "a step as one XLA program, whose operations have no times on the host. "
            "keras.callbacks.TensorBoard(folder, profile_batch=(10, 12)) asks the TPU for them, "
            "TensorBoard's trace viewer draws them; callbacks.Measure() tells the shares of the "
            "time."
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas that train together; 1 inside a Keras step, which is written for one device."""
        return 1 if current_replica_step() is not None else super().num_replicas_in_sync


class SpmdExtended(tf.distribute.StrategyExtended):
    """Mixin of `SpmdKerasSteps`' extended: hooks for what is created in the scope."""

    _id_in_cluster, _num_workers = 0, 1  # one process drives the devices of all hosts

    def _description(self) -> str:
        """What the strategy is made of, for its `repr`."""
        return (
            f"num_replicas={self._num_replicas_in_sync}, devices={short_names(self.worker_devices)}"
        )

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        owner = owner_of_new_variable()
        hook_owner(owner, self._container_strategy())
        if is_statistics(owner, kwargs):
            kwargs["synchronization"] = tf.VariableSynchronization.ON_READ
            kwargs["aggregation"] = tf.VariableAggregation.MEAN
        variable = super()._create_variable(next_creator, **kwargs)
        if hasattr(type(variable), "handle"):
            variable.__class__ = _telling_of_gradients(type(variable))  # type: ignore[arg-type]
        return variable

    def _reduce_gradients(self, gradients: list) -> list:
        context = distribute_lib.get_replica_context()
        return context.all_reduce(ReduceOp.SUM, gradients) if gradients else []

    def _weigh_and_reduce(self, gradients: list) -> list:
        """Gradients of all rows, from those of this replica's."""
        step = current_replica_step()
        if step is not None:
            gradients = [step.weigh_gradient(gradient) for gradient in gradients]
        return self._reduce_gradients(gradients)

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable]:
        """None: an optimizer computes as ever."""
        del optimizer
        return {}

    def _apply_reduced(self, apply: Callable, gradients: list, variables: Any) -> Any:
        return apply(gradients, variables)

    def _all_rows(self, tensors: list) -> list:
        """The rows of all replicas of each tensor; a sum of what each has at its own place."""
        return [self._placed_and_summed(tensor) for tensor in tensors]

    def _own_rows_of_sum(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """This replica's rows of the sum of all replicas' `rows`, of equally many each."""
        context = distribute_lib.get_replica_context()
        number, total = context.replica_id_in_sync_group, context.all_reduce(ReduceOp.SUM, rows)
        count = rows.shape[0] // self._num_replicas_in_sync
        del counts  # an XLA program knows the length of a slice when it is compiled
        return tf.slice(
            total, [number * count, *[0] * (rows.shape.rank - 1)], [count, *rows.shape[1:]]
        )

    def _placed_and_summed(self, tensor: tf.Tensor) -> tf.Tensor:
        context = distribute_lib.get_replica_context()
        number, count = context.replica_id_in_sync_group, self._num_replicas_in_sync
        rows = tensor.shape[0]
        if rows is None:
            raise ValueError(
                "One program for all replicas gathers rows of which each has as many, a number "
                f"that is known when tracing. Received: shape {tensor.shape}. Use batches of one "
                "size, a multiple of the number of replicas (drop_remainder=True)."
            )
        sent = tf.cast(tensor, tf.int32) if tensor.dtype == tf.bool else tensor
        own = tf.one_hot(number, count, dtype=sent.dtype)
        placed = tf.reshape(own, [count, *[1] * sent.shape.rank]) * sent[tf.newaxis]
        total = context.all_reduce(ReduceOp.SUM, tf.stop_gradient(placed))
        return tf.cast(tf.reshape(total, [count * rows, *tensor.shape[1:]]), tensor.dtype)


class _TellsOfGradients:
    """A variable of TensorFlow's that says when its handle is read, as ours do."""

    @property
    def handle(self) -> tf.Tensor:
        """The resource of the calling replica's copy."""
        told_of_gradient()
        return super().handle  # type: ignore[misc]


@functools.cache
def _telling_of_gradients(kind: type) -> type:
    """A class for those variables of class `kind` that are ours."""
    return type(kind.__name__, (_TellsOfGradients, kind), {})


def _step_on_replica(step_function: Any, is_split: bool) -> Callable:
    """`step_function` of this replica's rows, with outputs averaged over all rows."""
    weights_loss = step_function.__name__ == "train_step" and is_stock_step(step_function)

    def on_replica(data: Any) -> Any:
        data, rows, total = (data, *_rows_of_all(data)) if is_split else _own_rows(data)
        dtype = keras.config.floatx()  # a TPU has no float64 but where a user asks for it
        weight = tf.cast(rows, dtype) / tf.cast(total, dtype)
        with ReplicaStep(rows, weight, weights_loss, statistics=[]).active():
            outputs = step_function(data)
        return _mean_over_rows(outputs, weight)

    return on_replica


def _own_rows(data: Any) -> tuple[Any, Any, Any]:
    """This replica's part of a whole batch, how many rows it has, and how many the batch has.

    Slices of a size that is known when tracing are all that XLA compiles for a TPU: the batch must
    have a known number of rows, a multiple of the number of replicas.
    """
    context = distribute_lib.get_replica_context()
    count = num_replicas(context.strategy)
    replica, total = context.replica_id_in_sync_group, num_rows(data)
    if isinstance(total, int) and total % count == 0:
        rows = total // count
        start = replica * rows
    else:
        ((start, end),) = split_rows(tf.convert_to_tensor(total), count, [replica])
        rows = end - start

    def part(leaf: Any) -> Any:
        if leaf is None or leaf.shape.rank == 0:
            return leaf
        others = [0] * (leaf.shape.rank - 1)
        return tf.slice(leaf, [start, *others], [rows, *[-1 for _ in others]])

    return keras.tree.map_structure(part, data), rows, total


def _rows_of_all(data: Any) -> tuple[Any, Any]:
    """How many rows this replica has, and all together; no communication where they are known."""
    context, rows = distribute_lib.get_replica_context(), num_rows(data)
    if isinstance(rows, int):  # one program for all replicas: it is the same number for each
        return rows, rows * num_replicas(context.strategy)
    return rows, context.all_reduce(ReduceOp.SUM, rows)


def _mean_over_rows(outputs: Any, weight: tf.Tensor) -> Any:
    """The scalars among `outputs` averaged over all rows, in one all-reduce."""
    flat = keras.tree.flatten(outputs)
    chosen = [
        i
        for i, value in enumerate(flat)
        if tf.is_tensor(value) and value.dtype.is_floating and value.shape.rank == 0
    ]
    if not chosen:
        return outputs
    packed = tf.stack([tf.cast(flat[i], weight.dtype) * weight for i in chosen])
    means = distribute_lib.get_replica_context().all_reduce(ReduceOp.SUM, packed)
    for i, mean in zip(chosen, tf.unstack(means), strict=True):
        flat[i] = tf.cast(mean, flat[i].dtype)
    return keras.tree.pack_sequence_as(outputs, flat)
