"""Which losses of steps are refused; `conformance/cases/own_losses.py` trains what is not."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfparallel
from tfparallel.replicas.step_build import build

ROWS = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")


class Step(keras.Model):
    """Its step takes gradients of `loss(model, x)`, of a model with what draws and normalises."""

    def __init__(self, loss):
        super().__init__()
        parts = [layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dropout(0.5)]
        self.tower = keras.Sequential([*parts, layers.Dense(4)])
        self.loss_of_rows, self.seed = loss, keras.random.SeedGenerator(1)
        self.queue = keras.Variable(np.ones((8, 4), "float32"), trainable=False, name="queue")

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss_of_rows(self, x)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": ops.mean(loss)}


def _output(model, x):
    return model.tower(x, training=True)


def mean(model, x):
    return ops.mean(ops.square(_output(model, x)))


def by_row(model, x):
    return ops.sum(ops.square(_output(model, x)), axis=1)


def by_position(model, x):
    """A value for each position of each row."""
    return ops.reshape(ops.square(_output(model, x)), (-1,))


def sum_by_number(model, x):
    return ops.sum(_output(model, x)) / ops.cast(ops.shape(x)[0], "float32")


def of_weights_alone(model, x):
    _output(model, x)
    return ops.sum(ops.square(model.tower.layers[0].kernel))


def small_difference(model, x):
    """What is left of two sums is rounding."""
    same = _output(model, x)
    return ops.mean(same + 1.0) - ops.mean(same) - 1.0


def of_noise(model, x):
    noise = keras.random.normal(ops.shape(x), seed=model.seed)
    return ops.mean(ops.square(_output(model, x + noise) - noise))


def against_a_queue(model, x):
    scores = ops.matmul(_output(model, x), ops.transpose(model.queue))
    return -ops.mean(ops.log_softmax(scores)[:, 0])


def of_all_rows(model, x):
    return ops.mean(ops.std(tf.distribute.get_strategy().all_rows(_output(model, x)), axis=0))


def gradient_penalty(model, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        scores = _output(model, x)
    norms = ops.norm(tape.gradient(scores, x), axis=1)
    return ops.mean(scores) + ops.cast(ops.mean(ops.square(norms - 1.0)), scores.dtype)


def in_a_function(model, x):
    return tf.function(mean)(model, x)


RIGHT = [
    *(mean, by_row, by_position, sum_by_number, of_weights_alone, small_difference, of_noise),
    *(against_a_queue, of_all_rows, gradient_penalty, in_a_function),
]


def built(loss, batch=ROWS, declared=lambda model: model, **options) -> keras.Model:
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = declared(Step(loss))
        model.compile(optimizer="adam", **options)
        build(model, "fit", batch)
    return model


@pytest.mark.parametrize("loss", RIGHT)
def test_what_parts_make_is_not_refused(loss, caplog):
    assert built(loss).tower.built
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def spread(model, x):
    return ops.mean(ops.std(_output(model, x), axis=0))


def a_small_spread(model, x):
    return mean(model, x) - 0.05 * spread(model, x)


def sum_over_rows(model, x):
    return ops.sum(ops.square(_output(model, x)))


def of_other_rows(model, x):
    return ops.sum(ops.square(_output(model, x) - _output(model, x[::-1])), axis=1)


def of_a_queue_that_it_has_filled(model, x):
    model.queue.assign(0.5 * model.queue + ops.mean(x, axis=0))
    return ops.mean(ops.square(_output(model, x) - model.queue[0]))


def of_two_halves(model, x):
    """A mean over rows where their number is even."""
    rows, half = by_row(model, x), ops.shape(x)[0] // 2
    return 0.5 * (ops.mean(rows[:half]) + ops.mean(rows[half:]))


def of_what_a_small_step_has_learned(model, x):
    """https://arxiv.org/abs/1703.03400; of each replica's own rows that is a step of its own."""
    with tf.GradientTape() as tape:
        loss = mean(model, x)
    weights = model.tower.trainable_variables
    pairs = zip(weights, tape.gradient(loss, weights), strict=True)
    kernel, bias = [w - 1e-4 * g for w, g in pairs][-2:]
    return ops.mean(ops.square(ops.matmul(x, kernel) + bias))


def spread_after_some_steps(model, x):
    started = ops.cast(model.optimizer.iterations >= 100, x.dtype)
    return mean(model, x) + started * spread(model, x)


WRONG = [spread, a_small_spread, sum_over_rows, of_other_rows, of_a_queue_that_it_has_filled]
WRONG += [of_two_halves, of_what_a_small_step_has_learned, spread_after_some_steps]


@pytest.mark.parametrize("loss", WRONG)
def test_what_parts_do_not_make_is_refused(loss):
    with pytest.raises(ValueError, match=r"must be a mean over rows.*MirroredStrategy, .*'step"):
        built(loss)


@pytest.mark.turns
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_digits_of_a_dtype_are_no_difference(dtype):
    keras.config.set_dtype_policy(dtype)
    try:
        built(mean)
        built(gradient_penalty)
        with pytest.raises(ValueError, match="must be a mean over rows"):
            built(spread)
    finally:
        keras.config.set_dtype_policy("float32")


def test_what_is_declared_is_not_tried():
    built(spread, declared=tfparallel.mean_loss)


def of_a_permutation(model, x):
    return ops.mean(ops.square(_output(model, 0.5 * x + 0.5 * tf.random.shuffle(x))))


def of_a_shuffled_range(model, x):
    order = tf.random.shuffle(tf.range(tf.shape(x)[0]))
    return ops.mean(ops.square(_output(model, x) - tf.gather(x, order)))


def of_random_order(model, x):
    order = ops.argsort(keras.random.uniform(ops.shape(x)[:1], seed=model.seed))
    return ops.mean(ops.square(_output(model, x + ops.take(x, order, axis=0))))


@pytest.mark.parametrize("loss", [of_a_shuffled_range, of_random_order])
def test_rows_that_chance_brings_together_are_said_to_be_of_one_replica(loss, caplog):
    with caplog.at_level(logging.WARNING):
        built(loss)
    assert "none meets the other" in caplog.text


def test_a_step_for_one_number_of_rows_is_said_to_be_untried(caplog):
    """And an error of the step itself is raised."""

    def of_known_rows(model, x):
        return ops.sum(_output(model, x)) / x.shape[0]

    def wrong(model, x):
        raise KeyError("of the user")

    with caplog.at_level(logging.WARNING):
        built(of_known_rows)
    assert "cannot be traced for any number of rows" in caplog.text
    assert "None values" in caplog.text
    with pytest.raises(KeyError, match="of the user"):
        built(wrong)


def test_a_step_that_takes_no_random_rows_is_said_to_be_untried(caplog):
    def of_names(model, batch):
        return mean(model, batch["x"])

    batch = {"x": ROWS, "names": tf.ragged.constant([["a"]] * 6)}
    with caplog.at_level(logging.WARNING):
        built(of_names, batch)
    assert "cannot be tried on random rows" in caplog.text


def test_building_reads_no_number_and_leaves_none():
    model = built(mean)
    assert model.seed.state.numpy().tolist() == [1, 0]
    assert model.optimizer.iterations.numpy() == 0
    assert model.losses == []
