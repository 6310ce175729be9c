"""A TPU's Keras steps, on logical CPUs: the same mixins over the stock strategy for CPUs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.helpers import (
    assert_same_training,
    momentum_sgd,
    tiny_compile_options,
    tiny_data,
    tiny_model,
    train,
)
from tests.tpu.on_cpus import CpuStrategy
from tfparallel.callbacks import Measure

pytestmark = pytest.mark.turns


@pytest.fixture(scope="module")
def strategy():
    return CpuStrategy()


class OwnLoss(keras.Sequential):
    """A `train_step` written for one device: its loss is a plain mean, divided by nothing."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), logits)
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


class ComputeLoss(OwnLoss):
    """A `train_step` that uses `compute_loss`, which Keras scales under a strategy."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"own_loss": loss}


class MoreThanMetrics(keras.Sequential):
    """A `train_step` whose outputs are not all means over rows."""

    def train_step(self, data):
        constants = {"whole": tf.constant(7), "vector": tf.constant([1.0, 2.0]), "own": 2.5}
        return {**super().train_step(data), **constants}


def build(model_class):
    return lambda: model_class(tiny_model().layers)


def sum_loss_alone():
    return {"loss": sum_loss()["loss"]}


WHOLE = {"rows": 24, "batch_size": 12}  # steps of one's own get no rows of padding


def sum_loss():
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return {"loss": loss, "metrics": ["accuracy"]}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"build": build(OwnLoss), "compile_options": sum_loss_alone, **WHOLE},
        {"build": build(ComputeLoss), "compile_options": sum_loss_alone, **WHOLE},
        {"build": build(MoreThanMetrics), **WHOLE},
        {"compile_options": sum_loss},
        {"optimizer": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1)},
    ],
    ids=["stock", "own_loss", "compute_loss", "more_than_metrics", "sum", "clipping"],
)
def test_fit_equals_one_device(strategy, options):
    assert_same_training(train(None, **options), train(strategy, **options))


def test_a_coupled_loss_is_of_all_rows(strategy):
    """Batches of one size, known when tracing, as a TPU needs them."""

    def binary(rows):
        x, y = tiny_data(rows)
        return x, (y > 0).astype("float32")[:, None]

    def trained(strategy):
        data = tf.data.Dataset.from_tensor_slices(binary(16)).batch(8, drop_remainder=True)
        return train(
            strategy,
            build=lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")]),
            compile_options=lambda: {"loss": keras.losses.Dice()},
            data=None,
            x=data,
        )

    assert_same_training(trained(None), trained(strategy))


@pytest.mark.parametrize("rows", [8, 7])
def test_on_batch_gives_each_replica_its_rows(strategy, rows):
    x, y = tiny_data(rows)

    def results(scope):
        with scope:
            keras.utils.set_random_seed(1)
            model = tiny_model()
            model.compile(momentum_sgd(), **tiny_compile_options())
        losses = [model.train_on_batch(x, y) for _ in range(2)] + [model.test_on_batch(x, y)]
        return np.array(losses), model.predict_on_batch(x), model.get_weights()

    reference = results(tf.distribute.get_strategy().scope())
    tf.nest.map_structure(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5),
        results(strategy.scope()),
        reference,
    )
    assert reference[1].shape == (rows, 3)


def test_a_model_of_another_strategy_is_refused(strategy):
    model = tiny_model()
    model.compile(momentum_sgd(), **tiny_compile_options())
    with strategy.scope(), pytest.raises(ValueError, match="outside of its scope|another"):
        strategy.run(model.train_step, args=(tiny_data(4),))


def test_a_training_is_measured(strategy):
    """Shares that sum up, of a training that is one device's."""
    measure = Measure(verbose=0)
    with strategy.scope():
        model = tiny_model()
        model.compile(momentum_sgd(), **tiny_compile_options())
    data = tf.data.Dataset.from_tensor_slices(tiny_data(16)).batch(8, drop_remainder=True)
    model.fit(data, epochs=2, verbose=0, callbacks=[measure])
    assert (measure.total.steps, measure.total.rows) == (4, 32)
    for record in [*measure.records, measure.total]:
        assert sum(record.seconds.values()) == pytest.approx(record.wall_s, rel=5e-3)
        assert record.rows_per_s == pytest.approx(record.rows / record.wall_s)
    assert [record.rows for record in measure.records] == [16, 16]


class ByRow(OwnLoss):
    """Its tape adds up a loss that has a value for each row."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.sparse_categorical_crossentropy(
                y, self(x, training=True), from_logits=True
            )
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": tf.reduce_mean(loss)}


def test_a_loss_by_row_is_summed_over_all_rows(strategy):
    options = {"rows": 24, "batch_size": 12, "compile_options": dict}
    options["optimizer"] = lambda: keras.optimizers.SGD(0.01)

    def build():
        return ByRow([keras.Input((6,)), keras.layers.Dense(3)])

    reference, candidate = (train(each, build=build, **options) for each in (None, strategy))
    assert_same_training(reference.results(), candidate.results())


class SumByHand(ByRow):
    """A loss of a batch that is no mean of those of its parts."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            scores = self(x, training=True)
            loss = tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y, scores, True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class ClipsByHand(ByRow):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data[0]))
        gradients = tape.gradient(loss, self.trainable_variables)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply(clipped, self.trainable_variables)
        return {"loss": loss}


class Descends(ByRow):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data[0]))
        weight = self.trainable_variables[0]
        weight.assign_sub(tape.gradient(loss, weight))
        return {"loss": loss}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SumByHand, "must be a mean over rows"),
        (ClipsByHand, "clipped or normalised by hand"),
        (Descends, "must not assign to a weight"),
    ],
)
def test_steps_that_parts_of_a_batch_do_not_make_are_refused(strategy, kind, message):
    with strategy.scope():
        model = kind([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd")
    with pytest.raises(ValueError, match=message):
        model.fit(tf.data.Dataset.from_tensors(tiny_data(8)))
    assert model.optimizer.iterations.numpy() == 0


class Noting(keras.Sequential):
    """Notes how many rows its steps are traced for."""

    def train_step(self, data):
        self.traced.append(data[0].shape[0])
        return super().train_step(data)


def test_arrays_of_whole_batches_are_traced_for_their_size(strategy):
    """Two replicas have six rows each of a batch of twelve; smaller ones: `test_padding.py`."""
    x, y = tiny_data(24)
    weights = {"sample_weight": np.linspace(0.5, 1.5, 24)}

    def trained(scope):
        with scope:
            keras.utils.set_random_seed(1)
            model = Noting(tiny_model().layers)
            model.traced = []
            model.compile(momentum_sgd(), **tiny_compile_options())
        history = model.fit(x, y, batch_size=12, epochs=2, verbose=0, shuffle=False, **weights)
        return model, history.history

    model, history = trained(strategy.scope())
    reference, expected = trained(tf.distribute.get_strategy().scope())
    assert set(model.traced[1:]) == {6}  # the first is of Keras's symbolic build
    for ours, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert history.keys() == expected.keys()
    np.testing.assert_allclose(history["loss"], expected["loss"], atol=1e-5)
