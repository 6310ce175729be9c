"""A user's own `train_step` and a user's own loop train as on one device."""

import functools
import re
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.case import Run, case
from tests.conformance.models import MODELS
from tests.helpers import (
    BATCH,
    EVEN_ROWS,
    ODD_BATCH,
    UNEVEN_ROWS,
    Training,
    numbered,
    tiny_compile_options,
    tiny_data,
    tiny_model,
)


class GuideModel(keras.Model):
    """The `train_step` of Keras' guide, word for word."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class StopsAfterThreeSteps(keras.Sequential):
    """Applies its optimizer in a branch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)

        def update():
            self.optimizer.apply(gradients, self.trainable_weights)
            return 0

        tf.cond(self.optimizer.iterations < 3, update, lambda: 0)
        return {"loss": loss}


class OwnEverything(keras.Model):
    """No `compute_loss`, no compiled optimizer: all of it is the model's own."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own_optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.loss_tracker, self.error]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = keras.losses.MeanSquaredError()(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.own_optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class AddsUpGradients(keras.Model):
    """Applies the mean gradient of every two steps, which it adds up in weights of its own."""

    def make_sums(self) -> keras.Model:
        options = {"initializer": "zeros", "trainable": False}
        self.steps = self.add_weight(name="steps", shape=(), dtype="int32", **options)
        self.sums = [
            self.add_weight(name=f"sum_{i}", shape=weight.shape, **options)
            for i, weight in enumerate(self.trainable_weights)
        ]
        return self

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        self.steps.assign_add(1)
        is_due = tf.cast(self.steps % 2 == 0, self.sums[0].dtype)
        self.optimizer.apply([total * is_due / 2 for total in self.sums], self.trainable_weights)
        for total in self.sums:
            total.assign(total * (1 - is_due))
        return {"loss": loss}


class TwoOptimizers(keras.Model):
    """Two parts, each with its optimizer, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)
        self.first_optimizer = keras.optimizers.SGD(0.1)
        self.second_optimizer = keras.optimizers.Adam(0.01)

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(x, y, self(x))
        for part, optimizer in [
            (self.first, self.first_optimizer),
            (self.second, self.second_optimizer),
        ]:
            weights = part.trainable_weights
            gradients = tape.gradient(loss, weights)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def _functional(model_class: type) -> keras.Model:
    x = keras.Input((6,))
    return model_class(x, keras.layers.Dense(2)(keras.layers.Dense(5, "tanh")(x)))


@case(core=True)
def guide_train_step(run: Run):
    return run.train("values", build=lambda: _functional(GuideModel)).results()


@case()
def guide_train_step_with_uneven_batch(run: Run):
    model = lambda: _functional(GuideModel)  # noqa: E731
    return run.train("values", build=model, rows=UNEVEN_ROWS, batch_size=BATCH).results()


@case()
def own_loss_and_optimizer(run: Run):
    return _train_own(run, rows=EVEN_ROWS, batch_size=BATCH)


@case()
def own_loss_and_optimizer_with_uneven_batch(run: Run):
    return _train_own(run, rows=UNEVEN_ROWS, batch_size=BATCH)


@case()
def own_sums_of_gradients(run: Run):
    """Of batches of 12 rows and of one, which not all replicas have."""
    return run.train(
        "values",
        build=lambda: _functional(AddsUpGradients).make_sums(),
        compile_options=lambda: {"loss": "mse"},
        rows=BATCH + 1,
        batch_size=BATCH,
    ).results()


@case()
def two_optimizers(run: Run):
    training = run.train("values", build=TwoOptimizers, compile_options=lambda: {"loss": "mse"})
    model = training.model
    return _with_own_optimizers(training, model.first_optimizer, model.second_optimizer)


@case()
def loss_by_row(run: Run):
    """A tape adds up a loss that has a value for each row: a sum over all rows, and not a mean."""

    class ByRow(keras.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                losses = keras.losses.mean_squared_error(y, self(x, training=True))
            gradients = tape.gradient(losses, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": keras.ops.mean(losses)}

    options = {"compile_options": dict, "optimizer": lambda: keras.optimizers.SGD(0.01)}
    return run.train("values", build=lambda: _functional(ByRow), **options).results()


def _train_own(run: Run, **options) -> dict:
    training = run.train("values", build=lambda: _functional(OwnEverything), **options)
    return _with_own_optimizers(training, training.model.own_optimizer)


def _with_own_optimizers(training: Training, *own: keras.Optimizer) -> dict:
    slots = [v.numpy() for optimizer in own for v in optimizer.variables]
    return {**training.results(), **numbered("own_optimizer", slots)}


@case(core=True)
def loop(run: Run):
    """`experimental_distribute_dataset`, `run`, `reduce`, `gather`; an uneven last batch."""
    return _loop(run, lambda: keras.optimizers.Adam(0.01), rows=UNEVEN_ROWS)


@case()
def loop_with_clipnorm(run: Run):
    return _loop(run, lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.02))


@case()
def loop_with_global_clipnorm(run: Run):
    return _loop(run, lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.02))


@case()
def loop_without_tf_function(run: Run):
    return _loop(run, lambda: keras.optimizers.SGD(0.1), compiled=_eagerly)


@case()
def loop_over_a_tf_variable(run: Run):
    """No Keras at all: `tf.Variable`, reduced by hand and updated with `assign_sub`."""
    strategy = run.strategy or tf.distribute.get_strategy()
    with run.scope():
        slope = tf.Variable(tf.zeros((6,)))
    x, y = MODELS["values"].data(EVEN_ROWS)
    dataset = tf.data.Dataset.from_tensor_slices((x, y[:, 0])).batch(BATCH)

    def replica_step(x, y):
        with tf.GradientTape() as tape:
            error = tf.square(tf.linalg.matvec(x, slope) - y)
            loss = tf.nn.compute_average_loss(error, global_batch_size=BATCH)
        gradient = tape.gradient(loss, slope)
        slope.assign_sub(0.1 * tf.distribute.get_replica_context().all_reduce("SUM", gradient))
        return loss

    @tf.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    with run.scope():
        slope_losses = [step(b) for b in strategy.experimental_distribute_dataset(dataset)]
    return {"slope": slope.numpy(), "losses": [loss.numpy() for loss in slope_losses]}


@case()
def loop_that_reduces_an_argument(run: Run):
    """It is on no device when the function is traced."""
    strategy = run.strategy or tf.distribute.get_strategy()
    replica = tf.distribute.get_replica_context

    @tf.function
    def mean(x):
        return strategy.run(lambda x: replica().all_reduce("MEAN", x), args=(x,))

    values = strategy.experimental_local_results(mean(tf.range(5.0)))
    return {"values": np.stack([value.numpy() for value in values[:1]])}


@case()
def loop_of_a_sum_that_one_replica_reads(run: Run):
    """The others ask for it, too, and nothing else that reads it tells TensorFlow to keep it."""
    strategy = run.strategy or tf.distribute.get_strategy()

    def first(x):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("MEAN", tf.reduce_sum(x))
        is_first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        return total if is_first else tf.zeros_like(total)

    @tf.function
    def step(x):
        first_one = strategy.reduce("SUM", strategy.run(first, args=(x,)), axis=None)
        return first_one + strategy.reduce("SUM", strategy.run(first, args=(x + 1,)), axis=None)

    return {"twice": step(tf.range(5.0)).numpy()}


@case(core=True)
def loop_of_a_compiled_replica_step(run: Run):
    """What goes to `strategy.run` is a `tf.function`: replicas meet inside of it."""
    optimizer = lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05)  # noqa: E731
    return _loop(run, optimizer, compiled=_eagerly, compiled_step=tf.function)


@case()
def loop_of_signatures(run: Run):
    """What `strategy.run` is given has an `input_signature`, and what calls it one of all."""
    x, y = tiny_data(BATCH)
    specs = [tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y)]
    optimizer = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
    step = functools.partial(tf.function, input_signature=specs)
    return _loop(run, optimizer, rows=UNEVEN_ROWS, compiled=_of_its_data, compiled_step=step)


@case()
def loop_that_goes_on_after_what_does_not_fit(run: Run):
    """A batch that the signature refuses leaves nothing: the next call is as if it had not been."""
    strategy = run.strategy or tf.distribute.get_strategy()
    with run.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def add(x):
        return total.assign_add(tf.reduce_sum(x))

    def of_rows(rows):
        dataset = tf.data.Dataset.from_tensors(rows)
        (batch,) = strategy.experimental_distribute_dataset(dataset)
        strategy.run(add, args=(batch,))
        return total.numpy()

    right = np.arange(8, dtype="float32").reshape(4, 2)
    totals = [of_rows(right)]
    for wrong in (right.astype("int64"), right[:, :1], right[:, 0]):
        with pytest.raises((TypeError, ValueError)):
            of_rows(wrong)
        totals.append(of_rows(right[:2]))
    return {"totals": totals}


@case()
def step_that_returns_more_than_metrics(run: Run):
    """A number is the mean over all rows; what is none comes back as it is."""

    class Model(keras.Model):
        def train_step(self, data):
            constants = {"whole": tf.constant(7), "vector": tf.constant([1.0, 2.0]), "own": 2.5}
            mean = keras.ops.mean(data[0])
            variables = {"rate": self.optimizer.learning_rate}
            return {**super().train_step(data), **constants, **variables, "mean": mean}

    return run.train("values", build=lambda: _functional(Model)).results()


@case(core=True)
def optimizer_in_a_branch(run: Run):
    """Exact, or refused where replicas cannot meet in it: then Python runs the branch."""

    def trained(eagerly: bool):
        loss = tiny_compile_options()["loss"]
        return run.train(
            build=lambda: StopsAfterThreeSteps(tiny_model().layers),
            compile_options=lambda: {"loss": loss, "run_eagerly": eagerly},
        ).results()

    try:
        return trained(eagerly=False)
    except RuntimeError as refused:
        assert run.row.num_replicas > 1
        assert re.search(r"tf\.cond.*run_eagerly=True", str(refused))
    return trained(eagerly=True)


@case(core=True)
def loop_without_run(run: Run):
    """The loop of Keras's guide, in the scope: one device computes, of all rows."""
    keras.utils.set_random_seed(1)
    with run.scope():
        model = tiny_model()
        optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        accuracy = keras.metrics.SparseCategoricalAccuracy()

        def train_step(x, y):
            with tf.GradientTape() as tape:
                scores = model(x, training=True)
                loss = loss_function(y, scores)
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply(gradients, model.trainable_weights)
            accuracy.update_state(y, scores)
            return loss

        x, y = tiny_data(ODD_BATCH)
        losses = [step(x, y).numpy() for step in (train_step, tf.function(train_step))]
    model.optimizer = optimizer
    return Training(model, {}, {"losses": losses, "accuracy": accuracy.result().numpy()}).results()


def _eagerly(function, distributed) -> Callable:
    return function


def _of_its_data(function, distributed) -> Callable:
    return tf.function(function, input_signature=[distributed.element_spec])


def _loop(
    run: Run,
    make_optimizer,
    rows: int = 2 * BATCH,
    compiled=lambda function, distributed: tf.function(function),
    compiled_step=lambda fn: fn,
) -> dict:
    strategy = run.strategy or tf.distribute.get_strategy()
    keras.utils.set_random_seed(1)
    with run.scope():
        model, optimizer = tiny_model(), make_optimizer()
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    dataset = tf.data.Dataset.from_tensor_slices(tiny_data(rows)).batch(BATCH)
    distributed = strategy.experimental_distribute_dataset(dataset)

    @compiled_step
    def replica_step(x, y):
        with tf.GradientTape() as tape:
            scores = model(x, training=True)
            loss = tf.nn.compute_average_loss(loss_function(y, scores), global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, scores)
        return loss

    def train_step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    def predict_step(batch):
        return strategy.gather(strategy.run(lambda x, y: model(x), args=batch), axis=0)

    train_step, predict_step = [compiled(f, distributed) for f in (train_step, predict_step)]
    losses = [train_step(batch).numpy() for _ in range(2) for batch in distributed]
    one_row = tf.data.Dataset.from_tensor_slices(tiny_data(1)).batch(BATCH)
    batches = [*distributed, *strategy.experimental_distribute_dataset(one_row)]
    gathered = [predict_step(batch).numpy() for batch in batches]
    model.optimizer = optimizer
    extra = {"losses": losses, "accuracy": accuracy.result().numpy()}
    # The order of the rows is the strategy's own affair; that all are there is not.
    rows = [batch[batch[:, 0].argsort()] for batch in gathered]
    return Training(model, {}, {**extra, **numbered("gathered", rows)}).results()
