"""A mistake is answered at once by a ValueError that says what to do."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.case import Run, claim
from tests.conformance.cases.losses import KeepsTheLargest
from tests.helpers import BATCH, momentum_sgd, tiny_compile_options, tiny_data, tiny_model


def _compile(model: keras.Model) -> None:
    model.compile(optimizer=momentum_sgd(), **tiny_compile_options())


def _fit(model: keras.Model) -> None:
    x, y = tiny_data(BATCH)
    model.fit(x, y, batch_size=BATCH, verbose=0)


def _refused():
    return pytest.raises(ValueError, match=r"scope\(\)")


@claim(core=True)
def built_outside_and_fitted_inside_is_refused(run: Run):
    model = tiny_model()
    _compile(model)
    with run.scope(), _refused():
        _fit(model)


@claim()
def built_outside_and_compiled_inside_is_refused(run: Run):
    model = tiny_model()
    with _refused(), run.scope():
        _compile(model)
        _fit(model)


@claim(core=True)
def compiled_outside_is_refused(run: Run):
    with run.scope():
        model = tiny_model()
    with _refused():
        _compile(model)
        _fit(model)


@claim()
def an_optimizer_made_outside_is_refused(run: Run):
    optimizer = momentum_sgd()
    with _refused():
        with run.scope():
            model = tiny_model()
            model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
        _fit(model)


@claim(core=True)
def gradients_outside_of_run_are_refused_where_other_workers_have_rows(run: Run):
    """Each worker would train on what it was given, and go its own way."""
    if run.row.num_workers == 1 or run.row.num_replicas == 1:
        return
    with run.scope():
        model = tiny_model()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tiny_data(BATCH)[0]))
        with pytest.raises(ValueError, match=r"call strategy\.run"):
            tape.gradient(loss, model.trainable_variables)


@claim(core=True)
def a_gather_that_does_not_fit_leaves_the_next_one_working(run: Run):
    if run.row.num_replicas == 1:
        return

    def gathered(columns):
        values = run.strategy.experimental_distribute_values_from_function(
            lambda context: tf.fill(
                (1, columns(context.replica_id_in_sync_group)), context.replica_id_in_sync_group
            )
        )
        return run.strategy.gather(values, axis=0)

    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        gathered(lambda replica: 1 + replica)
    expected = [[replica, replica] for replica in range(run.row.num_replicas)]
    np.testing.assert_array_equal(gathered(lambda replica: 2), expected)


@claim()
def a_metric_made_outside_is_refused(run: Run):
    """Its variables belong to no strategy: what one worker counts, the others would not know."""
    metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    with _refused():
        run.train(compile_options=lambda: {**tiny_compile_options(), "metrics": [metric]})


@claim()
def a_loss_whose_variable_was_made_outside_is_refused(run: Run):
    loss = KeepsTheLargest()
    with _refused():
        run.train(compile_options=lambda: {"loss": loss})


@claim(core=True)
def fitted_under_another_strategy_is_refused(run: Run):
    with run.scope():
        model = tiny_model()
        _compile(model)
    with run.row.make().scope(), _refused():
        _fit(model)


@claim()
def layers_made_outside_are_refused(run: Run):
    """A model assembled inside from a built layer of outside has foreign variables."""
    layer = keras.layers.Dense(3)
    layer.build((None, 6))
    with _refused():
        with run.scope():
            model = keras.Sequential([keras.Input((6,)), layer])
            _compile(model)
        _fit(model)


class Descends(keras.Model):
    """A weight moves by a gradient, without an optimizer."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weight = self.trainable_variables[0]
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return {"loss": loss}


@claim()
def a_weight_moved_by_a_gradient_of_own_rows_is_refused(run: Run):
    """Every copy would go its own way."""
    in_whole = "must not assign to a weight .* 'descends' .*/kernel'"
    in_shards = "may assign only variables that are not in shards.*/kernel'"
    _refuses_step_of(run, Descends, f"{in_whole}|{in_shards}")


class ClipsByHand(keras.Model):
    """An optimizer gets gradients that are no sum of those of parts of a batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_variables
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, weights)]
        self.optimizer.apply(tf.clip_by_global_norm(gradients, 0.1)[0], weights)
        return {"loss": loss}


@claim()
def gradients_that_are_clipped_by_hand_are_refused(run: Run):
    """Each replica would clip those of its own rows."""
    _refuses_step_of(run, ClipsByHand, "clipped or normalised by hand")


@claim()
def rows_that_meet_are_refused(run: Run):
    """Each replica would subtract the mean of its own rows."""

    def centred(inputs, outputs):
        (scores,) = outputs
        return keras.Model(inputs, scores - keras.ops.mean(scores, axis=0, keepdims=True))

    _refuses_step_of(run, centred, "computed of that row alone")


def _refuses_step_of(run: Run, kind: Callable[..., keras.Model], message: str) -> None:
    """Where several replicas have rows."""
    if run.row.num_replicas == 1:
        return
    with run.scope():
        inner = tiny_model()
        model = kind(inner.inputs, inner.outputs)
        _compile(model)
    with pytest.raises(ValueError, match=message):
        _fit(model)
