"""Every replica draws random numbers of its own, from one seed that all of them store.

Keras keeps a seed generator's state `[seed, counter]` in a variable that is equal on all replicas,
so that one copy is saved and any number of replicas can restore it. Equal seeds give equal Dropout
masks; so replica r draws `[seed + r * stride, counter]`. Replica 0 draws what one device draws.
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.tf_internals import distribute_lib

_STRIDE = 0x9E3779B9  # 2**32 / golden ratio: seeds of different replicas differ in all their bits


def hook_seed_generator(
    generator: keras.random.SeedGenerator, strategy: tf.distribute.Strategy
) -> None:
    """Makes `generator` draw a stream of its own on each replica of `strategy`.

    Hooking twice changes nothing.
    """
    if "next" not in vars(generator):
        draw = functools.partial(_next_of_replica, strategy, generator.next)
        vars(generator)["next"] = functools.wraps(generator.next)(draw)


def _next_of_replica(
    strategy: tf.distribute.Strategy, next_seed: Callable, ordered: bool = True
) -> tf.Tensor:
    seed = next_seed(ordered=ordered)
    context = distribute_lib.get_replica_context()
    if context is None or context.strategy is not strategy:
        return seed
    replica = tf.cast(context.replica_id_in_sync_group, seed.dtype)
    return seed + tf.stack([replica * _STRIDE, tf.zeros_like(replica)])
