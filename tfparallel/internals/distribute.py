"""`tf.distribute`: the classes that we extend, and what strategies know of their replicas."""

import functools
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

# StrategyExtended implementations we build on: the device bookkeeping, custom loops, `tf.data`
# distribution and replica threads of `tf.distribute` are kept as they are.
from tensorflow.python.distribute import (
    collective_all_reduce_strategy,
    cross_device_ops,
    cross_device_utils,
    device_util,
    distribute_lib,
    distribute_utils,
    mirrored_strategy,
    numpy_dataset,
    reduce_util,
    tpu_strategy,
    values,
    values_util,
)

# How a variable that is in parts is saved as one.
from tensorflow.python.training.saving.saveable_object import SaveableObject, SaveSpec

from tfparallel.internals.hooks import hook_once, wrapped

_COUNTED = "_tfparallel_counted"

MirroredExtended = mirrored_strategy.MirroredExtended
CollectiveAllReduceExtended = collective_all_reduce_strategy.CollectiveAllReduceExtended
TPUExtended = tpu_strategy.TPUExtended
CollectiveAllReduce = cross_device_ops.CollectiveAllReduce
CollectiveKeys = cross_device_utils.CollectiveKeys  # which groups of devices are told apart by
CommunicationImplementation = tf.distribute.experimental.CommunicationImplementation
ReductionToOneDevice = cross_device_ops.ReductionToOneDevice
DistributedValues = values.DistributedValues
DistributedVariable = values.DistributedVariable
Mirrored = values.Mirrored
MirroredVariable = values.MirroredVariable
SyncOnReadVariable = values.SyncOnReadVariable
PerReplica = values.PerReplica
PerReplicaSpec = values.PerReplicaSpec
ReduceOp = reduce_util.ReduceOp
ReplicaContext = distribute_lib.ReplicaContext

__all__ = [
    "CollectiveAllReduce",
    "CollectiveAllReduceExtended",
    "CollectiveKeys",
    "DistributedValues",
    "DistributedVariable",
    "Mirrored",
    "MirroredExtended",
    "MirroredVariable",
    "PerReplica",
    "PerReplicaSpec",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "SaveSpec",
    "SaveableObject",
    "SyncOnReadVariable",
    "TPUExtended",
    "become_copy_of",
    "container_of",
    "count_collectives",
    "device_util",
    "draw_keys_at_call_time",
    "distribute_lib",
    "distribute_utils",
    "exchange_rows",
    "first_replica_of_process",
    "gather",
    "gather_alike",
    "give_to",
    "launchers_of",
    "num_replicas",
    "num_replicas_of",
    "number_of_first_copy",
    "strategy_behind",
    "numpy_dataset",
    "reduces_by_nccl",
    "scatter_sum_by_nccl",
    "values_util",
]


def num_replicas(strategy: tf.distribute.Strategy) -> int:
    """Of all processes. The public property says 1 in a Keras step, which is for one device."""
    return num_replicas_of(strategy.extended)


def num_replicas_of(extended: tf.distribute.StrategyExtended) -> int:
    """The same of `strategy.extended`."""
    return extended._num_replicas_in_sync


def first_replica_of_process(extended: tf.distribute.StrategyExtended) -> int:
    """The number among all of the first replica in this process, in the strategy's order."""
    return extended._get_replica_id_in_sync_group(0)


def gather(
    operations: cross_device_ops.CrossDeviceOps,
    value: object,
    destinations: object,
    axis: int,
    options: object = None,
) -> object:
    """`value` of all replicas one behind the other, by the operations of one process.

    The public `gather` of a strategy asks `extended`, which is who calls this.
    """
    return operations._gather(value, destinations, axis, options)


def launchers_of(
    operations: cross_device_ops.CrossDeviceOps,
) -> Sequence[cross_device_utils.CollectiveReplicaLauncher]:
    """What launches collectives, for each local replica.

    They can gather, which TensorFlow does not offer, and decide when a collective's key is drawn.
    """
    return operations._launchers


def gather_alike(
    launcher: cross_device_utils.CollectiveReplicaLauncher, part: tf.Tensor
) -> tf.Tensor:
    """All workers' `[length, ...]`, alike, one after the other.

    The public gather first exchanges lengths.
    """
    gathered, length = launcher._all_gather(part, None), part.shape[0]
    total = None if length is None else length * launcher._group_size
    return tf.ensure_shape(gathered, [total, *part.shape[1:]])


def exchange_rows(launcher: object, rows: tf.Tensor) -> tf.Tensor:
    """`[workers, length]`: row j goes to worker j, row i came from worker i.

    TensorFlow reduce-scatters by NCCL only; this sends as many bytes, and its rows' sum is that.
    """
    exchange = functools.partial(_launched, tf.raw_ops.CollectiveAllToAllV2, launcher)
    return tf.ensure_shape(_counted_by(launcher)(exchange, rows), rows.shape)


def reduces_by_nccl(launcher: cross_device_utils.CollectiveReplicaLauncher) -> bool:
    """Whether its collectives are NCCL's, on a GPU."""
    return launcher._options.implementation == CommunicationImplementation.NCCL


def scatter_sum_by_nccl(launcher: object, rows: tf.Tensor) -> tf.Tensor:
    """This worker's row of the sum of all workers' `[workers, length]`, by NCCL.

    TensorFlow has the operation, and no public function that calls it between workers.
    """
    reduce_scatter = functools.partial(
        tf.raw_ops.CollectiveReduceScatterV2, merge_op="Add", final_op="Id"
    )
    own = _counted_by(launcher)(functools.partial(_launched, reduce_scatter, launcher), rows)
    return tf.ensure_shape(own[0], rows.shape[1:])


def _counted_by(launcher: object) -> Callable:
    return getattr(launcher, _COUNTED, lambda launch, rows: launch(rows))


def _launched(
    collective: Callable,
    launcher: cross_device_utils.CollectiveReplicaLauncher,
    rows: tf.Tensor,
) -> tf.Tensor:
    token = launcher._get_ordering_token()
    return collective(
        input=rows,
        group_size=launcher._group_size,
        group_key=launcher._group_key,
        instance_key=launcher._next_instance_key(),
        ordering_token=[] if token is None else [token],
        communication_hint=launcher._options.implementation.value.lower(),
        timeout_seconds=launcher._options.timeout_seconds or 0,
    )


def count_collectives(
    launcher: cross_device_utils.CollectiveReplicaLauncher, counted: Callable
) -> None:
    """Has `counted(launch, tensor, ...)` launch each collective of `launcher`, on its device."""

    def on_device(launch: Callable, *args: object, **kwargs: object) -> tf.Tensor:
        with tf.device(launcher._device):
            return counted(launch, *args, **kwargs)

    for name in ("all_reduce", "_all_gather"):
        hook_once(
            launcher,
            name,
            wrapped(launcher, name, on_device),
            why="A collective that a worker does not come to is noticed, and ended.",
        )
    setattr(launcher, _COUNTED, on_device)


def draw_keys_at_call_time(launcher: object, draws: Callable[[], bool]) -> None:
    """Asks `draws` whether a collective's key is drawn when it runs; else tracing fixes it."""
    hook_once(
        launcher,
        "_use_unique_instance_key",
        functools.partial(draws),
        why="Several workers trace alike, so that a key may be fixed when tracing.",
    )


def collectives_of_device(
    operations: cross_device_ops.CollectiveAllReduce, i: int, num_processes: int
) -> cross_device_ops.CollectiveAllReduce:
    """Between local device `i` of each process; in one order with `operations`, of all devices.

    Kernels of two groups of NCCL that a GPU is in, begun in another order than on the next one,
    would wait for one another.
    """
    of_all = operations._launchers[i]
    own = cross_device_ops.CollectiveAllReduce(
        [of_all._device], num_processes, of_all._options, of_all._collective_keys
    )
    own._launchers[0]._ordering_token = of_all._ordering_token
    return own


def become_copy_of(variable: tf.Variable, index: int, new: tf.Variable, old: tf.Variable) -> None:
    """Makes `new` copy number `index` of `variable`, in the place of `old`.

    Optimizers of Keras know a variable by its number, and copies know what they are copies of.
    """
    new._distributed_container = weakref.ref(variable)
    new._unique_id = old._unique_id
    variable._values = (*variable._values[:index], new, *variable._values[index + 1 :])


def become_part_of(variable: tf.Variable, new: tf.Variable, old: tf.Variable) -> None:
    """Makes `new` a part of `variable`, in the place of `old`.

    A gradient tape finds the variable by the part's handle.
    """
    new._distributed_container = weakref.ref(variable)
    new.handle._distributed_container = weakref.ref(variable)
    new._unique_id = old._unique_id


def container_of(copy: tf.Variable) -> tf.Variable:
    """The distributed variable that `copy` is a copy of; for a variable of its own itself."""
    return distribute_utils.value_container(copy)


def give_to(extended: tf.distribute.StrategyExtended, strategy: tf.distribute.Strategy) -> None:
    """Makes `extended` that of `strategy`: what variables and replicas call theirs."""
    extended._container_strategy_weakref = weakref.ref(strategy)


def number_of_first_copy(variable: tf.Variable) -> object:
    """What Keras's optimizers know `variable` by, in every replica."""
    return variable._values[0]._unique_id


def strategy_behind(variable: tf.Variable) -> tf.distribute.Strategy:
    """The strategy of a distributed variable, also while that is being made."""
    return variable._distribute_strategy


def keep_number(new: values.DistributedVariable, old: values.DistributedVariable) -> None:
    """Gives `new` the number of `old`, by which optimizers of Keras know a variable."""
    new._primary._unique_id = old._primary._unique_id
