"""A model that is as it was before: state, metrics, random generators, and what was traced."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.internals import GLOBAL_SEED_GENERATOR, global_state
from tfparallel.replicas.checking.step import value_of, variables_of
from tfparallel.replicas.compression_state import compression_state, set_compression_state
from tfparallel.replicas.local_copies import copies_of
from tfparallel.replicas.random_states import RandomState, random_state, set_random_state

_NAMES = "object_name_uids"  # how often Keras has given each name


@contextlib.contextmanager
def no_trace(model: keras.Model, strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Puts back at its end all that training steps of `model`, and models made within, change."""
    variables = [*variables_of(model), *model.metrics_variables]
    before = [[value_of(copy) for copy in copies_of(variable)] for variable in variables]
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    random, names = random_state(), dict(global_state.get_global_attribute(_NAMES) or {})
    compression = compression_state(model)
    try:
        yield
    finally:
        for variable, values in zip(variables, before, strict=True):
            for copy, value in zip(copies_of(variable), values, strict=True):
                copy.assign(value)
        set_compression_state(model, [compression], 1)
        counts = global_state.get_global_attribute(_NAMES)
        if counts is not None:
            counts.clear()
            counts.update(names)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        put_back_seeds(random, strategy)


def put_back_seeds(random: RandomState, strategy: tf.distribute.Strategy) -> None:
    """Sets the global generators to `random`, a `random_state`."""
    if random["keras"] is None:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    set_random_state(random, strategy)
