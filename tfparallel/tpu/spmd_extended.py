"""What optimizers, layers and variables ask of an `extended` whose replicas run one program."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfparallel.communication.link_journal import LinkJournal
from tfparallel.internals import (
    BaseOptimizer,
    ReduceOp,
    device_util,
    distribute_lib,
    owner_of_new_variable,
)
from tfparallel.replicas.device_names import short_names
from tfparallel.replicas.owners import hook_owner
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.row_seeds import RowSeeds
from tfparallel.replicas.tape_hooks import told_of_gradient
from tfparallel.replicas.variables import is_statistics
from tfparallel.replicas.weighed_gradients import weigh_gradient
from tfparallel.tpu.padded_step import PaddedStep


class SpmdExtended(tf.distribute.StrategyExtended):
    """Mixin of `SpmdKerasSteps`' extended: hooks for what is created in the scope."""

    _id_in_cluster, _num_workers = 0, 1  # one process drives the devices of all hosts
    _sees_what_a_step_assigns = True
    _row_seeds: RowSeeds | None = None  # each core draws numbers of its own
    _seed_device: str | None = None
    _stored_stream = 0

    def _description(self) -> str:
        """What the strategy is made of, for its `repr`."""
        return (
            f"num_replicas={self._num_replicas_in_sync}, devices={short_names(self.worker_devices)}"
        )

    @property
    def _cutting_host(self) -> str:
        """The CPU that a batch is cut on which is not distributed by TensorFlow."""
        return device_util.get_host_for_device(self.worker_devices[0])

    def _link_journal(self) -> contextlib.AbstractContextManager[LinkJournal]:
        """An empty one: what cores send one another is within the program."""
        return contextlib.nullcontext(LinkJournal())

    def _steps_at_once(self, model: keras.Model, batch: object) -> None:
        """None, as all cores take part in each step."""

    def _create_variable(self, next_creator: Callable, **kwargs: object) -> tf.Variable:
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
            gradients = [weigh_gradient(gradient, step) for gradient in gradients]
        return self._reduce_gradients(gradients)

    def _optimizer_hooks(self, optimizer: BaseOptimizer) -> Mapping[str, Callable]:
        """None: an optimizer computes as ever."""
        del optimizer
        return {}

    def _apply_reduced(
        self, apply: Callable, gradients: list, variables: Sequence[keras.Variable] | None
    ) -> object:
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
        if isinstance(current_replica_step(), PaddedStep):
            raise ValueError(
                "all_rows would gather rows of padding, too, which fill up batches that may differ "
                "in size. Use batches of one size, a multiple of the number of replicas "
                "(drop_remainder=True)."
            )
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
