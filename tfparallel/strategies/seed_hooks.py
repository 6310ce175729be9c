"""Every replica draws random numbers of its own, from one seed that all of them store.

Keras keeps a seed generator's state `[seed, counter]` in a variable that is equal on all replicas,
so that one copy is saved and any number of replicas can restore it. Equal seeds give equal Dropout
masks; so replica r draws `[seed + r * stride, counter]`. Replica 0 draws what one device draws.

Keras's global generator (`keras.random.normal(shape)` without a seed) is a global of each thread.
Replicas run in threads of their own and are given that of the thread that runs them.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.strategies.checks import belongs_to
from tfparallel.tf_internals import (
    GLOBAL_SEED_GENERATOR,
    distribute_lib,
    global_seed_generator,
    global_state,
)

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


def with_global_seed(strategy: tf.distribute.Strategy, replica_function: Callable) -> Callable:
    """`replica_function`, with the caller's global seed generator in the thread of each replica."""
    exists = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None
    generator = _global_generator(strategy) if exists else _LateGlobalGenerator(strategy)

    @functools.wraps(replica_function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        return replica_function(*args, **kwargs)

    return call


class _LateGlobalGenerator:
    """Stands for a global generator that does not exist until somebody draws from it."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy

    def next(self, ordered: bool = True) -> tf.Tensor:
        """The first draw, the same way on all replicas: it creates the generator."""
        context = distribute_lib.get_replica_context()
        generator = context.merge_call(_global_generator)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        return generator.next(ordered=ordered)


def _global_generator(strategy: tf.distribute.Strategy) -> keras.random.SeedGenerator:
    """The calling thread's global generator, moved under `strategy` if it was drawn from outside.

    It draws on where it was: a replica cannot change a variable that is not its strategy's.
    """
    with tf.init_scope(), strategy.scope():
        generator = global_seed_generator()
        if not belongs_to(generator.state, strategy):
            moved = keras.random.SeedGenerator(seed=0, name=generator.name)
            moved.state.assign(generator.state)
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, moved)
            generator = moved
    hook_seed_generator(generator, strategy)
    return generator
