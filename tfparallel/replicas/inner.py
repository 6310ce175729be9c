"""A strategy of one process, inside of one over several."""

import inspect
from collections.abc import Callable

import tensorflow as tf

from tfparallel.coordination.cluster import without_tf_config
from tfparallel.internals.distribute import give_to
from tfparallel.replicas.axis_of_processes import AxisOfProcesses
from tfparallel.replicas.base import KerasStrategy
from tfparallel.replicas.interface import KerasExtended
from tfparallel.replicas.local import LocalExtended

Inner = KerasStrategy | Callable[[], KerasStrategy]


def made(inner: Inner) -> KerasStrategy:
    """The inner strategy, made where `inner` is a function that makes it; on local devices alone.

    Raises:
        TypeError: for something that is no strategy of one process of this library.
    """
    with without_tf_config():
        strategy = inner if isinstance(inner, KerasStrategy) else _called(inner)
    extended = strategy.extended
    if not isinstance(extended, LocalExtended) or not extended._takes_workers:
        raise TypeError(
            "`inner` must be a strategy of the devices of one process, which divides each batch "
            "in its step: PipelineStrategy, TensorParallelStrategy, ShardedStrategy, "
            f"HybridStrategy, MirroredStrategy or CentralStorageStrategy. Received: {strategy}."
        )
    return strategy


def _called(inner: object) -> KerasStrategy:
    must = (
        "`inner` must be a strategy of tfparallel, or a function without arguments that makes one"
    )
    if not callable(inner):
        raise TypeError(f"{must}. Received: {inner!r}.")
    try:
        inspect.signature(inner).bind()
    except TypeError as error:
        raise TypeError(
            f"{must}. Received: {inner!r}, called without arguments: {error}. Write a lambda."
        ) from None
    strategy = inner()
    if not isinstance(strategy, KerasStrategy):
        raise TypeError(f"{must}. Received: a function that gives {strategy!r}.")
    return strategy


def inside_of(
    outer: tf.distribute.Strategy, strategy: KerasStrategy, workers: AxisOfProcesses
) -> KerasExtended:
    """The `extended` of `strategy`, as that of `outer`: its processes are `workers`.

    Raises:
        ValueError: if the workers train in rounds.
    """
    extended = strategy.extended
    if not workers._meets_every_step:
        raise ValueError(
            "Rounds of local steps average the weights of whole replicas. Received: LocalSGD or "
            f"DiLoCo with inner={strategy}. Leave one of them out."
        )
    give_to(extended, outer)
    if workers._num_workers > 1:
        extended._join(workers)
    return extended
