"""PipelineStrategy: what BatchNorm does with microbatches."""

import keras
import numpy as np
import pytest
from keras import layers

from tests.conformance.models import MODELS
from tests.helpers import tiny_data, train
from tfparallel import PipelineStrategy

pytestmark = pytest.mark.turns

CPUS = ["CPU:0", "CPU:1"]
MOMENTUM = 0.9


def hidden_batch_norm():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5),
            layers.BatchNormalization(momentum=MOMENTUM),
            layers.Dense(3),
        ]
    )


def first_batch_norm():
    """BatchNorm of the data itself, whose statistics are known."""
    batch_norm = layers.BatchNormalization(momentum=MOMENTUM, name="first")
    return keras.Sequential([keras.Input((6,)), batch_norm, layers.Dense(3)])


def test_it_equals_one_device_that_accumulates_over_microbatches():
    strategy = PipelineStrategy(CPUS, num_microbatches=4)
    piped = train(strategy, hidden_batch_norm, rows=24, batch_size=12)
    accumulated = train(
        None,
        hidden_batch_norm,
        rows=24,
        batch_size=3,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=4),
    )
    for ours, theirs in zip(piped.model.get_weights(), accumulated.model.get_weights()):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    np.testing.assert_allclose(piped.history["loss"], accumulated.history["loss"], atol=1e-5)


def after_batches(moving, batches, statistics):
    for batch in batches:
        moving = MOMENTUM * moving + (1 - MOMENTUM) * statistics(batch, axis=0)
    return moving


def test_microbatches_of_no_rows_leave_averages_as_they_are():
    """Their mean is NaN."""
    strategy = PipelineStrategy(CPUS, num_microbatches=4)
    training = train(strategy, first_batch_norm, rows=3, batch_size=3, epochs=1)
    layer = training.model.get_layer("first")
    microbatches = [row[None] for row in tiny_data(3)[0]]
    expected = after_batches(np.zeros(6), microbatches, np.mean)
    np.testing.assert_allclose(layer.moving_mean, expected, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance, [MOMENTUM**3] * 6, atol=1e-6)


@pytest.mark.parametrize(
    ("batch_size", "num_microbatches"), [(13, 4), (3, 4)], ids=["uneven", "too small"]
)
def test_deferred_averages_are_those_of_whole_batches(batch_size, num_microbatches):
    """With microbatches of different numbers of rows, some of none."""
    rows = 2 * batch_size
    strategy = PipelineStrategy(CPUS, num_microbatches, batch_norm="deferred")
    training = train(strategy, first_batch_norm, rows=rows, batch_size=batch_size, epochs=1)
    layer = training.model.get_layer("first")
    x, _ = tiny_data(rows)
    batches = [x[:batch_size], x[batch_size:]]
    expected = after_batches(np.zeros(6), batches, np.mean)
    np.testing.assert_allclose(layer.moving_mean, expected, atol=1e-6)
    expected = after_batches(np.ones(6), batches, np.var)
    np.testing.assert_allclose(layer.moving_variance, expected, atol=1e-6)
    training.model.predict(x, verbose=0)  # leaves them
    np.testing.assert_allclose(layer.moving_variance, expected, atol=1e-6)


def test_deferring_leaves_weights_and_losses_as_they_are():
    """Training reads no moving averages."""
    results = [
        train(PipelineStrategy(CPUS, 4, batch_norm=batch_norm), hidden_batch_norm)
        for batch_norm in ("per_microbatch", "deferred")
    ]
    for ours, theirs in zip(*(result.model.trainable_weights for result in results)):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    np.testing.assert_allclose(*(result.history["loss"] for result in results), atol=1e-6)
    averages = [result.model.non_trainable_weights[0].numpy() for result in results]
    assert not np.allclose(*averages, atol=1e-3)


def test_a_layer_called_twice_takes_in_the_batch_twice():
    def build():
        x = keras.Input((6,))
        shared = layers.BatchNormalization(momentum=MOMENTUM, name="first")
        return keras.Model(x, layers.Dense(3)(layers.Add()([shared(x), shared(3 * x + 1)])))

    strategy = PipelineStrategy(CPUS, 4, batch_norm="deferred")
    training = train(strategy, build, rows=13, epochs=1)
    layer = training.model.get_layer("first")
    x, _ = tiny_data(13)
    expected = after_batches(np.zeros(6), [x, 3 * x + 1], np.mean)
    np.testing.assert_allclose(layer.moving_mean, expected, atol=1e-5)
    expected = after_batches(np.ones(6), [x, 3 * x + 1], np.var)
    np.testing.assert_allclose(layer.moving_variance, expected, atol=1e-5)


def test_synchronized_batch_norm_is_refused():
    case = MODELS["cnn"]
    with pytest.raises(ValueError, match="synchronized=True.*microbatches.*synchronized=False"):
        train(
            PipelineStrategy(CPUS, 2),
            build=case.build,
            compile_options=case.compile_options,
            data=case.data,
        )


def test_deferring_without_a_traced_step_is_refused():
    strategy = PipelineStrategy(CPUS, 2, batch_norm="deferred")
    with strategy.scope():
        model = first_batch_norm()
        model.compile(optimizer="sgd", loss="mse", run_eagerly=True)
    with pytest.raises(ValueError, match="deferred.*Received: run_eagerly=True"):
        model.train_on_batch(np.zeros([4, 6]), np.zeros([4, 3]))
