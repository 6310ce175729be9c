"""What a variable is under our strategies: where its copies live, and who may change them.

Note: the four kinds of variable
--------------------------------
kind        Keras's use                  copies         assigned in a replica context
----------  ---------------------------  -------------  --------------------------------------
replicated  weights, optimizer slots,    one a replica  by every replica to its own copy, with
            counters, learning rate,                    values all computed alike from reduced
            seeds                                       gradients
central     the same, under              one            by replica 0 only, for the same reason
            CentralStorageStrategy
statistics  BatchNorm's moving mean      one a replica  by every replica from its own rows; the
            and variance                                step ends with their mean (keras_step)
metric      `Metric.add_variable`        one a replica  by every replica; their sum when read
            (ON_READ)                                   outside of replicas, where it is assigned
                                                        to the first copy, and 0 to the others

A variable with an explicit aggregation that Keras did not create follows `tf.distribute`: values
assigned in a replica context are aggregated first. To be summed, they have to be a value of each
replica: one that they share (a number, a tensor from outside) is refused, as its sum could be it or
that many times it.

Outside of replicas one device computes: it reads and differentiates copy 0 of what is replicated.
"""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

from tfparallel.internals import (
    BaseOptimizer,
    DistributedValues,
    MirroredVariable,
    ReduceOp,
    SyncOnReadVariable,
    distribute_lib,
    values_util,
)
from tfparallel.internals.distribute import first_replica_of_process
from tfparallel.internals.keras_layers import behind, layers_of, own_state
from tfparallel.internals.keras_state import variable_under_creation
from tfparallel.internals.ordered_sums import sum_in_order
from tfparallel.replicas.joined_values import join_up, split_up
from tfparallel.replicas.replica_step import current_replica_step
from tfparallel.replicas.tape_hooks import told_of_gradient


class ReadsAsNumber:
    """`float(variable)`, `"%d" % variable`, `np.asarray(variable)`, as one device's variables read.

    TensorFlow's distributed variables lack them, its plain ones have them.
    """

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.numpy())  # type: ignore[attr-defined]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype)  # type: ignore[attr-defined]


class ReplicatedVariable(ReadsAsNumber, MirroredVariable):
    """One copy a replica, kept equal because every replica assigns what it computed alike.

    Attributes set after creation, by `mark_owner`:
        _assigned_alike: replicas assign equal values, nothing is aggregated.
        _is_statistics: replicas assign values of their own rows, averaged at the end of a step.

    Of a class:
        _not_followed: what its variables are, if no `tf.autodiff.ForwardAccumulator` follows them.
    """

    _not_followed = ""
    _assigned_alike = False
    _is_statistics = False

    @property
    def handle(self) -> tf.Tensor:
        """The resource of the calling replica's copy; outside of replicas, of the one read there.

        Raises:
            ValueError: outside of replicas, where other workers have rows of the same batch.
        """
        told_of_gradient(self._not_followed)
        if _replica_id() is not None or values_util.is_saving_non_distributed():
            return super().handle
        check_outside_of_replicas(self)
        return self._primary.handle

    def _get_cross_replica(self) -> tf.Tensor:
        return tf.identity(self._primary)

    def _update_replica(self, update_fn: Callable, value: object, **kwargs: object) -> tf.Variable:
        step = current_replica_step()
        if self._is_statistics and step is not None and not step.has_all_rows:
            step.statistics.append(self)
        if self._needs_aggregation():
            if self.aggregation == tf.VariableAggregation.SUM:
                self._check_is_of_each_replica(value)
            value = tf.convert_to_tensor(value, self.dtype)
            return super()._update_replica(update_fn, value, **kwargs)
        return update_fn(self._get_replica(_replica_id()), value, **kwargs)

    def _check_is_of_each_replica(self, value: tf.Tensor | float) -> None:
        extended = self.distribute_strategy.extended
        if len(extended.worker_devices) == 1 or (not tf.is_tensor(value) and not np.any(value)):
            return

        def check(_: tf.distribute.Strategy, value: object) -> None:
            if not isinstance(value, DistributedValues):
                raise ValueError(
                    f"A non-DistributedValues value {value} cannot be reduced with the given "
                    f"reduce op {ReduceOp.SUM}. Variable '{self.name}' adds up what replicas "
                    "assign, which must be a tensor of each replica. Received: one that all "
                    "share. Assign tf.identity(value) to count it once for each replica, or assign "
                    "it outside of strategy.run to count it once."
                )

        distribute_lib.get_replica_context().merge_call(check, args=(value,))

    def _needs_aggregation(self) -> bool:
        no_aggregation = self.aggregation == tf.VariableAggregation.NONE
        return not (self._assigned_alike or no_aggregation)


class CentralVariable(ReplicatedVariable):
    """One copy that all replicas read, and replica 0 assigns for all."""

    def _get_replica(self, replica_id: int) -> tf.Variable:
        del replica_id
        return self._primary

    def _get(self) -> object:
        return self._get_cross_replica() if _replica_id() is None else self._primary

    def _get_on_device_or_primary(self) -> tf.Variable:
        return self._primary

    @property
    def handle(self) -> tf.Tensor:
        """The resource of the only copy.

        Raises:
            ValueError: as `ReplicatedVariable`.
        """
        told_of_gradient(self._not_followed)
        check_outside_of_replicas(self)
        return self._primary.handle

    def _update_replica(self, update_fn: Callable, value: object, **kwargs: object) -> tf.Variable:
        updated = None
        if self._needs_aggregation() or _replica_id() == 0:
            updated = super()._update_replica(update_fn, value, **kwargs)
        return self._primary if updated is None else updated


class SummedWhenRead:
    """A variable whose value is the sum over all replicas, of all workers."""

    values: tuple
    aggregation: tf.VariableAggregation

    @property
    def is_sum_of_copies(self) -> bool:
        """Whether this process has several copies, whose sum it is."""
        return len(self.values) > 1 and self.aggregation == tf.VariableAggregation.SUM

    def _prefetched(self) -> tf.Tensor | None:
        """The sum, where it is known."""
        return getattr(_prefetched, "values", {}).get(id(self))


class MetricVariable(SummedWhenRead, ReadsAsNumber, SyncOnReadVariable):
    """One copy a replica, reduced when read outside of replicas.

    Where each replica computes on the rows of all, the first counts for all: what a Keras metric
    begins with is in the first copy, so that the first replica may do with it as one device does.

    Attributes set after creation, by `mark_owner`:
        _is_of_keras: a Keras variable; others are assigned as `tf.distribute` says.
    """

    _is_of_keras = False

    def assign(self, value: tf.Tensor, *args: object, **kwargs: object) -> object:
        """`tf.Variable.assign`. A metric that is reset or loaded is in the first copy of all."""
        is_sum = self.aggregation == tf.VariableAggregation.SUM
        if not (self._is_of_keras and is_sum) or values_util.is_saving_non_distributed():
            return super().assign(value, *args, **kwargs)
        with distribute_lib.enter_or_assert_strategy(self.distribute_strategy):
            is_updating = distribute_lib.get_update_replica_id() is not None
            if is_updating or not distribute_lib.in_cross_replica_context():
                return super().assign(value, *args, **kwargs)
            value = tf.convert_to_tensor(value, self.dtype)
            values_util.mark_as_unsaveable()
            for i, copy in enumerate(self.values):
                with tf.device(copy.device):
                    copy.assign(value_of_copy(value, i, self.distribute_strategy.extended))
            return self

    def _update_replica(self, update_fn: Callable, value: object, **kwargs: object) -> tf.Variable:
        if is_left_to_first_replica(self.distribute_strategy.extended):
            return self
        return super()._update_replica(update_fn, value, **kwargs)

    def _get_cross_replica(self) -> tf.Tensor:
        prefetched = self._prefetched()
        if prefetched is not None:
            return prefetched
        is_sum = self.aggregation == tf.VariableAggregation.SUM
        if not is_sum or self.distribute_strategy.extended._num_workers > 1:
            return super()._get_cross_replica()
        # A SavedModel has the sum in one variable, which would stand for each copy.
        values_util.mark_as_unsaveable()
        with tf.device(self._primary.device):  # and not on the host, which would wait for a GPU
            return sum_in_order([copy.read_value() for copy in self.values])


def is_left_to_first_replica(extended: tf.distribute.StrategyExtended) -> bool:
    """Whether the calling replica computes on the rows of all, and another one counts them."""
    step = current_replica_step()
    number = (_replica_id() or 0) + first_replica_of_process(extended)
    return step is not None and step.has_all_rows and number != 0


def is_new_metric(kwargs: Mapping[str, object]) -> bool:
    """Whether a variable of a Keras metric is being created.

    Args:
        kwargs: what a variable creator gets.
    """
    is_sum = kwargs.get("aggregation") == tf.VariableAggregation.SUM
    is_read_together = kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ
    return is_sum and is_read_together and variable_under_creation() is not None


def value_of_copy(
    value: tf.Tensor, index: int, extended: tf.distribute.StrategyExtended
) -> tf.Tensor:
    """What copy number `index` of this process has of `value`, which is the sum of all copies."""
    is_first = index == 0 and first_replica_of_process(extended) == 0
    return value if is_first else tf.zeros_like(value)


_prefetched = threading.local()


@contextlib.contextmanager
def prefetched_metrics(values: Mapping[int, tf.Tensor]) -> Iterator[None]:
    """Within it, a `SummedWhenRead` reads as `values[id(variable)]`."""
    _prefetched.values = values
    try:
        yield
    finally:
        _prefetched.values = {}


def sums_of_copies(
    variables: Sequence["ReplicatedVariable"],
    add_up: Callable[[list[tf.Tensor]], tf.Tensor] = sum_in_order,
) -> list[tf.Tensor]:
    """Of each variable the sum of its copies, on the device of the first.

    Variables of one type are one tensor, which crosses from device to device once. Integers, which
    GPUs have in the host's memory, are added up where they are.

    Args:
        add_up: sums what the devices have, to where it is called.
    """
    together = collections.defaultdict(list)
    for variable in variables:
        alone = None if variable.dtype.is_floating else id(variable)
        places = tuple(copy.device for copy in variable.values)
        together[variable.dtype, places, alone].append(variable)
    sums = {}
    for (_, places, _), group in together.items():
        copies = [joined_copies(group, i) for i in range(len(places))]
        with tf.device(places[0]):  # not the host, which would wait for a GPU
            parts = split_up(add_up(copies), group)
        sums.update({id(variable): part for variable, part in zip(group, parts, strict=True)})
    return [sums[id(variable)] for variable in variables]


def joined_copies(variables: Sequence["ReplicatedVariable"], i: int) -> tf.Tensor:
    """`[values of all variables]`: their copies number `i`, where they are."""
    with tf.device(variables[0].values[i].device):
        return join_up([variable.values[i].read_value() for variable in variables])


def is_statistics(owner: object, kwargs: Mapping[str, object]) -> bool:
    """Whether a layer creates a variable that each replica will assign from its own rows.

    Synchronised BatchNorm computes the same statistics everywhere: nothing is left to average.

    Args:
        owner: the Keras object that creates the variable, or None.
        kwargs: what a variable creator gets.
    """
    return (
        isinstance(owner, keras.layers.Layer)
        and not kwargs.get("trainable", True)
        and kwargs.get("synchronization") != tf.VariableSynchronization.ON_READ
        and tf.as_dtype(kwargs.get("dtype") or tf.float32).is_floating
        and not getattr(owner, "synchronized", False)
    )


def mark_owner(variable: tf.Variable, owner: object, statistics: bool) -> None:
    """Tells a new variable how it will be assigned, by who created it."""
    if isinstance(variable, ReplicatedVariable):
        variable._is_statistics = statistics
        variable._assigned_alike = isinstance(owner, BaseOptimizer)
    if isinstance(variable, MetricVariable):
        variable._is_of_keras = variable_under_creation() is not None


def statistics_of(model: keras.Model) -> list[ReplicatedVariable]:
    """What replicas of `model` assign of their own rows; known once a step has begun."""
    variables = [behind(variable) for variable in model.non_trainable_variables]
    return [v for v in variables if isinstance(v, ReplicatedVariable) and v._is_statistics]


def mark_statistics(model: keras.Model) -> None:
    """Tells the variables of `model`'s layers which of them are statistics.

    Their owner is not known when Keras creates them late, building a model from its first batch.
    """
    for layer in layers_of(model):
        for variable in own_state(layer):
            if isinstance(behind(variable), ReplicatedVariable):
                kwargs = {"trainable": False, "dtype": variable.dtype}
                behind(variable)._is_statistics = is_statistics(layer, kwargs)


def check_outside_of_replicas(variable: tf.Variable) -> None:
    """Refuses to differentiate a variable outside of replicas, where other workers have rows."""
    if _replica_id() is None and not values_util.is_saving_non_distributed():
        variable.distribute_strategy.extended._check_outside_of_replicas(variable.name)


def _replica_id() -> int | None:
    """The calling replica's number in this process; None in a cross-replica context."""
    return values_util.get_current_replica_id_as_int()
