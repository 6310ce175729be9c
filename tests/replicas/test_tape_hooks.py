"""`tape.gradient` of a loss with a value for each row, in a step of the user's own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import train
from tfparallel import (
    CentralStorageStrategy,
    MirroredStrategy,
    PipelineStrategy,
    ShardedStrategy,
)

pytestmark = pytest.mark.turns

_GRADIENT = tf.GradientTape.gradient


def _data(rows):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.normal(size=(rows, 2)).astype(
        "float32"
    )


def _model_class(gradients_of):
    class Own(keras.Model):
        def train_step(self, data):
            assert tf.GradientTape.gradient is _GRADIENT
            x, y = data
            gradients = gradients_of(lambda: (y, self(x, training=True)), self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"one": tf.ones([])}

    return Own


def _by_row(y, y_pred):
    return keras.losses.mean_squared_error(y, y_pred)


def by_row(forward, variables):
    with tf.GradientTape() as tape:
        loss = _by_row(*forward())
    return tape.gradient(loss, variables)


def mean(forward, variables):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(_by_row(*forward()))
    return tape.gradient(loss, variables)


def both_at_once(forward, variables):
    """Two targets: one by row, one a mean over rows."""
    with tf.GradientTape() as tape:
        rows = _by_row(*forward())
        total = tf.reduce_mean(tf.square(rows))
    return tape.gradient([rows, total], variables)


def persistent(forward, variables):
    with tf.GradientTape(persistent=True) as tape:
        rows = _by_row(*forward())
        total = tf.reduce_mean(tf.square(rows))
    pairs = zip(tape.gradient(rows, variables), tape.gradient(total, variables), strict=True)
    twice = tape.gradient(rows, variables)
    return [a + b + c for (a, b), c in zip(pairs, twice, strict=True)]


def with_output_gradients(forward, variables):
    with tf.GradientTape() as tape:
        rows = _by_row(*forward())
    return tape.gradient(rows, variables, output_gradients=0.5 * tf.ones_like(rows))


def while_recording(forward, variables):
    """Asked for within its `with`; and an outer tape of the user's looks on."""
    with tf.GradientTape(), tf.GradientTape(persistent=True) as tape:
        rows = _by_row(*forward())
        return tape.gradient(rows, variables)


def unconnected(forward, variables):
    """Another tape, which has not seen the loss, is asked first."""
    with tf.GradientTape() as tape:
        rows = _by_row(*forward())
    with tf.GradientTape() as other:
        pass
    assert other.gradient(rows, variables) == [None] * len(variables)
    return tape.gradient(rows, variables)


def means_of_tasks(forward, variables):
    """As many as a replica has rows, by chance: of the batches of four, two tasks and two rows."""
    with tf.GradientTape() as tape:
        y, y_pred = forward()
        losses = tf.reduce_mean(tf.square(y - y_pred), axis=0)
    return tape.gradient(losses, variables)


KINDS = [by_row, mean, both_at_once, persistent, with_output_gradients, while_recording]
KINDS += [unconnected]


def _train(strategy, gradients_of, run_eagerly=False, **batches):
    def build():
        x = keras.Input((4,))
        return _model_class(gradients_of)(
            x, keras.layers.Dense(2)(keras.layers.Dense(5, "tanh")(x))
        )

    options = {"compile_options": lambda: {"run_eagerly": run_eagerly}, "data": _data}
    optimizer = lambda: keras.optimizers.SGD(0.01)  # noqa: E731
    return train(
        strategy, build=build, optimizer=optimizer, **options, **batches
    ).model.get_weights()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_gradients_are_those_of_one_device(kind):
    expected = _train(None, kind)
    for strategy in (
        MirroredStrategy(["CPU:0", "CPU:1"]),
        CentralStorageStrategy(["CPU:0", "CPU:1"]),
        PipelineStrategy(["CPU:0", "CPU:1"], 3),
    ):
        for a, b in zip(expected, _train(strategy, kind), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, err_msg=type(strategy).__name__)


@pytest.mark.parametrize("make", [MirroredStrategy, ShardedStrategy, PipelineStrategy])
def test_gradients_without_a_tape_are_refused(make):
    """Of weights in parts they were others, without a word; on stages there were none."""

    def without_a_tape(forward, variables):
        loss = tf.reduce_mean(_by_row(*forward()))
        return tf.gradients(loss, [variable.value for variable in variables])

    with pytest.raises(ValueError, match=r"tf\.GradientTape.*Received: tf\.gradients"):
        _train(make(["CPU:0", "CPU:1"]), without_a_tape)


def test_means_of_as_many_tasks_as_there_are_rows_are_no_loss_by_row():
    expected = _train(None, means_of_tasks, rows=4, batch_size=4)
    ours = _train(MirroredStrategy(["CPU:0", "CPU:1"]), means_of_tasks, rows=4, batch_size=4)
    for a, b in zip(expected, ours, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("kind", [by_row, both_at_once], ids=lambda kind: kind.__name__)
def test_gradients_of_an_eager_step_are_those_of_one_device(kind):
    expected = _train(None, kind)
    for a, b in zip(
        expected, _train(MirroredStrategy(["CPU:0", "CPU:1"]), kind, run_eagerly=True), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)
