"""Dropout draws a mask of its own for every row, and the same ones for the same seed."""

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tests.conformance.case import Run, case, claim
from tests.helpers import BATCH, EVEN_ROWS

WIDTH = 64  # two masks of 64 coins are never equal by chance


class Recorder(keras.layers.Layer):
    """Passes its input on and, while training, shows it to `record`."""

    def __init__(self, record: Callable[[np.ndarray], None]):
        super().__init__()
        self._record = record

    def call(self, x, training=False):
        if not training:
            return x
        recorded = tf.numpy_function(self._record, [x], [])
        with tf.control_dependencies([recorded]):
            return tf.identity(x)


class GlobalSeedDropout(keras.layers.Layer):
    """Draws from Keras' global seed generator."""

    def call(self, x, training=False):
        return keras.random.dropout(x, 0.5) if training else x


def _masks(run: Run, name: str, dropout, before_fit=lambda: None) -> tuple[np.ndarray, list]:
    """Every mask drawn by all workers in two epochs, sorted, and the final weights."""
    rows: list = []

    def build():
        return keras.Sequential(
            [keras.Input((WIDTH,)), dropout(), Recorder(rows.extend), keras.layers.Dense(3)]
        )

    def data(rows):
        before_fit()
        return np.ones((rows, WIDTH), "float32"), np.arange(rows) % 3

    training = run.train(build=build, data=data, rows=EVEN_ROWS, batch_size=BATCH)
    np.save(run.folder / f"{name}-{run.rank}.npy", np.array(rows))
    run.barrier()
    everyone = [np.load(file) for file in sorted(run.folder.glob(f"{name}-*.npy"))]
    each = run.row.ranks_of_a_replica
    first, *others = (everyone[i::each] for i in range(each))
    for own in others:
        np.testing.assert_equal(own, first)
    masks = np.concatenate(first) != 0
    return masks[np.lexsort(masks.T)], training.model.get_weights()


def _differ_and_repeat(run: Run, dropout) -> None:
    masks, weights = _masks(run, "first", dropout)
    assert len(masks) == 2 * EVEN_ROWS
    assert len(np.unique(masks, axis=0)) == len(masks), "Two rows were given the same mask."
    assert 0.45 < masks.mean() < 0.55
    again, weights_again = _masks(run, "again", dropout)
    np.testing.assert_array_equal(masks, again)
    for weight, weight_again in zip(weights, weights_again, strict=True):
        np.testing.assert_allclose(weight, weight_again, atol=1e-6)


@claim(core=True)
def masks_differ_and_repeat(run: Run):
    _differ_and_repeat(run, lambda: keras.layers.Dropout(0.5))


@claim()
def masks_with_a_seed_of_their_own_differ_and_repeat(run: Run):
    _differ_and_repeat(run, lambda: keras.layers.Dropout(0.5, seed=7))


@claim()
def masks_from_the_global_seed_differ_and_repeat(run: Run):
    _differ_and_repeat(run, GlobalSeedDropout)


@claim()
def a_global_seed_drawn_from_before_the_scope_works(run: Run):
    """A random number drawn first creates Keras' global generator outside the strategy."""
    masks, _ = _masks(run, "masks", GlobalSeedDropout, lambda: keras.random.uniform((1,)))
    assert len(np.unique(masks, axis=0)) == 2 * EVEN_ROWS, "Two rows were given the same mask."


@claim()
def masks_differ_in_a_custom_loop(run: Run):
    with run.scope():
        _differ_in_a_custom_loop(run, keras.layers.Dropout(0.5))


@claim()
def masks_from_the_global_seed_differ_in_a_custom_loop(run: Run):
    """The first draw of all is made by the replicas."""
    keras.utils.set_random_seed(1)
    _differ_in_a_custom_loop(run, GlobalSeedDropout())


def _differ_in_a_custom_loop(run: Run, dropout: keras.layers.Layer):
    strategy = run.strategy or tf.distribute.get_strategy()

    @tf.function
    def step():
        masks = strategy.run(lambda: dropout(tf.ones((2, WIDTH)), training=True))
        return strategy.gather(masks, axis=0)

    masks = np.concatenate([step().numpy(), step().numpy()])
    assert len(masks) == 4 * run.row.num_replicas
    assert len(np.unique(masks, axis=0)) == len(masks), "Two rows were given the same mask."


@case()
def the_first_replica_draws_from_the_global_seed_as_one_device(run: Run):
    """Also where one device has drawn before, and after."""
    strategy = run.strategy or tf.distribute.get_strategy()
    draws = {}
    for name, number in {"first_by_replicas": 0, "first_outside": 1}.items():
        keras.utils.set_random_seed(1)
        before = [keras.random.uniform((1,)) for _ in range(number)]
        each = [strategy.run(lambda: keras.random.uniform((1,))) for _ in range(3)]
        during = [strategy.gather(values, axis=0)[:1] for values in each]
        with run.scope():
            after = [keras.random.uniform((1,))]
        draws[name] = np.concatenate([*before, *during, *after])
    return draws


@claim()
def nothing_is_dropped_in_evaluation(run: Run):
    with run.scope():
        layers = [keras.Input((WIDTH,)), *(keras.layers.Dropout(0.2) for _ in range(4))]
        model = keras.Sequential(layers)
        model.compile(loss="mse")
    ones = np.ones((5, WIDTH), "float32")
    np.testing.assert_array_equal(model.predict(ones, verbose=0), ones)
