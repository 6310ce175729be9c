"""Every replica draws random numbers of its own, from one seed that all of them store.

Keras keeps a seed generator's state `[seed, counter]` in a variable that is equal on all replicas,
so that one copy is saved and any number of replicas can restore it. Equal seeds give equal Dropout
masks; so replica r draws `[seed + r * stride, counter]`. Replica 0 draws what one device draws.
Where rows draw (`row_seeds.py`), all replicas draw `[seed, counter]`, each for its rows.

Keras's global generator (`keras.random.normal(shape)` without a seed) is a global of each thread.
Replicas run in threads of their own and are given that of the thread that runs them.
"""

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import keras
import tensorflow as tf

from tfparallel.internals import (
    GLOBAL_SEED_GENERATOR,
    distribute_lib,
    global_seed_generator,
    global_state,
)
from tfparallel.internals.hooks import hook_once, wrapped
from tfparallel.replicas.checks import belongs_to

_STRIDE = 0x9E3779B9  # 2**32 / golden ratio: seeds of different replicas differ in all their bits


def hook_seed_generator(
    generator: keras.random.SeedGenerator, strategy: tf.distribute.Strategy
) -> None:
    """Makes `generator` draw a stream of its own on each replica of `strategy`.

    Hooking twice changes nothing.
    """
    hook_once(
        generator,
        "next",
        wrapped(generator, "next", functools.partial(_next_of_replica, strategy, generator)),
        why="Each replica draws random numbers of its own, from the one seed that is stored.",
    )


def _next_of_replica(
    strategy: tf.distribute.Strategy,
    generator: keras.random.SeedGenerator,
    next_seed: Callable,
    ordered: bool = True,
) -> tf.Tensor:
    context = distribute_lib.get_replica_context()
    if context is None or context.strategy is not strategy:
        return next_seed(ordered=ordered)
    row_seeds = strategy.extended._row_seeds
    if row_seeds is not None:
        return row_seeds.seed_of(generator, lambda: next_seed(ordered=ordered))
    device = strategy.extended._seed_device
    with contextlib.nullcontext() if device is None else tf.device(device):
        number = context.replica_id_in_sync_group - strategy.extended._stored_stream
        return seed_of_stream(next_seed(ordered=ordered), number)


def seed_of_stream(seed: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """The state `[seed, counter]` of stream `number`; 0 is the one that is stored."""
    number = tf.cast(number, seed.dtype)
    return seed + tf.stack([number * _STRIDE, tf.zeros_like(number)])


def call_with_global_seed(strategy: tf.distribute.Strategy, run: Callable, fn: Callable) -> object:
    """`run(fn)`, where `fn` finds the caller's global seed generator in the thread of a replica."""
    exists = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR) is not None
    generator = global_generator_under(strategy) if exists else _LateGlobalGenerator(strategy)

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> object:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        return fn(*args, **kwargs)

    try:
        return run(call)
    finally:
        if isinstance(generator, _LateGlobalGenerator) and generator.created is not None:
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator.created)


class _LateGlobalGenerator:
    """Stands for a global generator that does not exist until a replica draws from it."""

    def __init__(self, strategy: tf.distribute.Strategy):
        self._strategy = strategy
        self.created: keras.random.SeedGenerator | None = None

    def next(self, ordered: bool = True) -> tf.Tensor:
        """A draw; the first of all creates the generator. Replicas are traced one at a time."""
        if self.created is None:
            # In a thread that is no replica's: a replica cannot enter the strategy's scope.
            with ThreadPoolExecutor(1) as elsewhere:
                self.created = elsewhere.submit(global_generator_under, self._strategy).result()
        return self.created.next(ordered=ordered)


def global_generator_under(strategy: tf.distribute.Strategy) -> keras.random.SeedGenerator:
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
