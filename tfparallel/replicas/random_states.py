"""The states of the global random generators: Python's, NumPy's, TensorFlow's and Keras's.

They are what `keras.utils.set_random_seed` seeds. Generators of layers are variables of the model
(`keras.random.SeedGenerator`). A `tf.random.Generator` is not among them, nor what an op such as
`tf.random.normal` keeps to itself inside a `tf.function`.
"""

import random
from types import ModuleType
from typing import TypedDict

import keras
import numpy as np
import tensorflow as tf

from tfparallel.internals import (
    GLOBAL_SEED_GENERATOR,
    global_seed_generator,
    global_state,
)
from tfparallel.internals.eager import operation_seeds, set_operation_seeds


class HostRandomState(TypedDict):
    """The state of the generators that need no framework."""

    python: list
    numpy: dict


class RandomState(TypedDict):
    """The state of all global generators; None of one that is not there."""

    host: HostRandomState
    tensorflow: list | None
    keras: np.ndarray | None


def host_random_state() -> HostRandomState:
    """The state of Python's and NumPy's global generators."""
    return {"python": _state_of(random), "numpy": np.random.get_state(legacy=False)}


def set_host_random_state(state: HostRandomState) -> None:
    """Sets what `host_random_state` returned, in this process or another."""
    _set_state_of(random, state["python"])
    np.random.set_state(state["numpy"])


def random_state() -> RandomState:
    """The state of all global generators."""
    seeds = operation_seeds()
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return {
        "host": host_random_state(),
        "tensorflow": None if seeds is None else _state_of(seeds),
        "keras": None if generator is None else keras.ops.convert_to_numpy(generator.state),
    }


def set_random_state(state: RandomState, strategy: tf.distribute.Strategy) -> None:
    """Sets what `random_state` returned.

    Args:
        state: what it returned.
        strategy: the model's; Keras's global generator is created in its scope if it is missing.
    """
    if state["keras"] is not None:
        with strategy.scope():
            global_seed_generator().state.assign(state["keras"])
    if state["tensorflow"] is not None:
        seeds = random.Random()
        _set_state_of(seeds, state["tensorflow"])
        set_operation_seeds(seeds)
    set_host_random_state(state["host"])  # last: creating a generator draws from it


def _state_of(generator: random.Random | ModuleType) -> list:
    version, internal, next_gauss = generator.getstate()
    return [version, np.array(internal, np.uint32), next_gauss]


def _set_state_of(generator: random.Random | ModuleType, state: list) -> None:
    version, internal, next_gauss = state
    generator.setstate((version, tuple(internal.tolist()), next_gauss))
