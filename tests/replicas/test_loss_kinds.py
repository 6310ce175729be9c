"""How a loss of a part of the rows is found to relate to that of all: declared, known or tried."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfparallel
from tests.conformance.cases import coupled_losses
from tests.helpers import assert_same_training, tiny_data, train
from tfparallel.internals import set_keras_mask
from tfparallel.replicas import loss_kinds, row_trial
from tfparallel.replicas.loss_kinds import kind_of_loss, kind_of_metric

LABELS, CLASSES = tf.zeros([7], tf.int64), tf.zeros([7, 3])
NUMBERS, IMAGES, TOKENS = tf.zeros([7]), tf.zeros([7, 32, 32, 3]), tf.zeros([7, 5], tf.int32)


def _wrapped(loss):
    wrapper = keras.losses.MeanSquaredError.__base__  # what Keras makes of functions
    return loss if isinstance(loss, keras.Loss) else wrapper(loss, name=loss.__name__)


def _kind(loss, y_true, y_pred, sample_weight=None):
    return kind_of_loss(_wrapped(loss), y_true, y_pred, sample_weight)


def mean_square(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred))


def root_mean_square(y_true, y_pred):
    """Of images, whose many positions make all rows much alike."""
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def focused(y_true, y_pred):
    """Each row by what it has itself."""
    losses = keras.losses.mean_squared_error(y_true, y_pred)
    return losses * tf.stop_gradient(ops.tanh(losses))


def eager_only(y_true, y_pred):
    return mean_square(y_true, y_pred) + 0.0 * float(y_pred.numpy().max())


def by_position(y_true, y_pred):
    return ops.reshape(ops.square(y_true - y_pred), [-1])


def mean_of_labelled(y_true, y_pred):
    """-100 is no label."""
    has_label = ops.cast(y_true != -100, "float32")
    losses = keras.losses.sparse_categorical_crossentropy(
        ops.where(y_true != -100, y_true, 0), y_pred, from_logits=True
    )
    return ops.sum(losses * has_label) / ops.sum(has_label)


def back(gradient):
    """An identity whose gradient is `gradient` of that of its output."""

    @tf.custom_gradient
    def function(x):
        return tf.identity(x), gradient

    return function


at_most = back(lambda upstream: tf.clip_by_value(upstream, -1e-2, 1e-2))
of_norm_1 = back(lambda upstream: upstream / tf.norm(upstream))


def squares(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


class Doubled(keras.losses.Dice):
    def call(self, y_true, y_pred):
        return 2 * super().call(y_true, y_pred)


class Centered(keras.losses.MeanSquaredError):
    """A loss of Keras whose own rows are not all that it looks at."""

    def call(self, y_true, y_pred):
        return super().call(y_true, y_pred - ops.mean(y_pred, axis=0))


class OwnCall(keras.Loss):
    def __call__(self, y_true, y_pred, sample_weight=None):
        return ops.sum(ops.abs(y_true - y_pred))


@pytest.mark.parametrize(
    ("loss", "arguments", "kind"),
    [
        (keras.losses.MeanSquaredError(), (CLASSES, CLASSES), "rows"),
        (keras.losses.MeanSquaredError(), (NUMBERS, NUMBERS), "mean"),
        (keras.losses.CosineSimilarity(), (NUMBERS, NUMBERS), "coupled"),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=1), (LABELS, CLASSES), "masked"),
        (keras.losses.CTC(), (TOKENS, tf.zeros([7, 9, 4])), "rows"),
        (keras.losses.Dice(), (IMAGES, IMAGES), "coupled"),
        (keras.losses.Dice(reduction="sum"), (IMAGES, IMAGES), "coupled"),
        (keras.losses.Dice(axis=(1, 2, 3)), (IMAGES, IMAGES), "rows"),
        (keras.losses.Tversky(), (IMAGES, IMAGES), "coupled"),
        (keras.losses.Circle(), (LABELS, CLASSES), "coupled"),
        (Doubled(axis=-1), (CLASSES, CLASSES), "rows"),
        (Doubled(), (CLASSES, CLASSES), "coupled"),
        (Centered(), (CLASSES, CLASSES), "coupled"),
        (OwnCall(), (CLASSES, CLASSES), "sum"),
        (mean_square, (IMAGES, IMAGES), "mean"),
        (mean_square, (CLASSES, CLASSES, NUMBERS), "coupled"),
        (root_mean_square, (IMAGES, IMAGES), "coupled"),
        (coupled_losses.divided_by_itself, (CLASSES, CLASSES), "coupled"),
        (focused, (CLASSES, CLASSES), "rows"),
        (lambda y, p: at_most(squares(y, p)), (CLASSES, CLASSES), "rows"),
        (lambda y, p: ops.mean(at_most(squares(y, p))), (CLASSES, CLASSES), "mean"),
        (lambda y, p: at_most(mean_square(y, p)), (CLASSES, CLASSES), "coupled"),
        (lambda y, p: of_norm_1(squares(y, p)), (CLASSES, CLASSES), "coupled"),
        (lambda y, p: ops.sum(squares(y, of_norm_1(p))), (CLASSES, CLASSES), "coupled"),
        (eager_only, (CLASSES, CLASSES), "mean"),
        (by_position, (CLASSES, CLASSES), "mean"),
        (mean_of_labelled, (TOKENS, tf.zeros([7, 5, 3])), "coupled"),
        (coupled_losses.squares, (CLASSES, CLASSES), "sum"),
        (coupled_losses.clip, (LABELS, tf.zeros([7, 4])), "coupled"),
        (coupled_losses.nt_xent, (LABELS, tf.zeros([7, 4])), "coupled"),
        (lambda y, p: -ops.mean(p), (NUMBERS, CLASSES), "mean"),
        (lambda y, p: p[:, 0] * y, (NUMBERS, CLASSES), "rows"),
    ],
)
def test_kinds(loss, arguments, kind):
    assert _kind(loss, *arguments) == kind


@pytest.mark.parametrize(
    ("metric", "arguments", "kind"),
    [
        (keras.metrics.CategoricalCrossentropy(), (CLASSES, CLASSES), "rows"),
        (keras.metrics.CategoricalCrossentropy(axis=0), (CLASSES, CLASSES), "coupled"),
        (keras.metrics.CategoricalAccuracy(), (CLASSES, CLASSES), "rows"),
        (keras.metrics.MeanMetricWrapper(lambda y, p: p[:, 0] * y), (NUMBERS, CLASSES), "rows"),
        (keras.metrics.MeanMetricWrapper(mean_square), (CLASSES, CLASSES), "mean"),
        (keras.metrics.MeanMetricWrapper(root_mean_square), (CLASSES, CLASSES), "coupled"),
    ],
)
def test_kinds_of_metrics(metric, arguments, kind):
    assert kind_of_metric(metric, *arguments, None) == kind


def test_a_loss_of_all_rows_with_a_custom_gradient_reads_no_weights():
    """A replica counts such a loss once, and would count the gradient of the weight once, too."""
    weight = keras.Variable(1.0, name="temperature")

    def scaled(y_true, y_pred):
        return at_most(root_mean_square(y_true, weight * y_pred))

    assert _kind(scaled, CLASSES, CLASSES) == "coupled"
    with pytest.raises(ValueError, match=r"loss 'scaled', .* which reads 'temperature"):
        loss_kinds.has_own_backward(_wrapped(scaled), CLASSES, CLASSES, None)
    assert not loss_kinds.has_own_backward(keras.losses.Dice(), CLASSES, CLASSES, None)


def test_a_mask_makes_a_number_of_the_batch_coupled():
    y_pred = tf.zeros([7, 5])
    assert _kind(mean_square, y_pred, y_pred) == "mean"
    set_keras_mask(y_pred, tf.ones([7, 5], tf.bool))
    assert _kind(mean_square, y_pred, y_pred) == "coupled"


def test_what_cannot_be_tried_is_coupled_and_said_once(caplog):
    def stubborn(y_true, y_pred):
        raise ZeroDivisionError("not with me")

    loss = _wrapped(stubborn)
    assert [_kind(loss, NUMBERS, CLASSES) for _ in range(2)] == ["coupled"] * 2
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'stubborn' cannot be tried on random rows (ZeroDivisionError('not with me'))" in message


def test_a_loss_of_ragged_tensors_has_to_be_declared():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(NotImplementedError, match="'mean_square', of .*RaggedTensor.*Declare it"):
        _kind(mean_square, ragged, tf.zeros([2, 2]))


def test_a_trial_reads_nothing_and_leaves_nothing():
    count = keras.Variable(0.0)

    def counting(y_true, y_pred):
        count.assign(count + 1)
        return ops.mean(keras.random.uniform(ops.shape(y_pred), seed=1) * y_pred)

    np_state = np.random.get_state()[1].copy()
    assert _kind(counting, NUMBERS, CLASSES) == "coupled"  # it is random
    assert float(count.numpy()) == 0
    np.testing.assert_array_equal(np.random.get_state()[1], np_state)


def test_trials_do_not_depend_on_rows_or_seeds():
    kinds = set()
    for rows in (2, 5, None):
        keras.utils.set_random_seed(rows or 7)
        loss = _wrapped(mean_square)
        kinds.add(_kind(loss, *[tf.zeros([rows or 1, 3])] * 2))
        specs = [key[0] for key in loss_kinds._known[loss]]
        assert specs == [str((tf.TensorSpec([None, 3]), tf.TensorSpec([None, 3]), None))]
    assert kinds == {"mean"}


def test_declared_kinds_stay_with_a_loss():
    @tfparallel.coupled_loss
    def function(y_true, y_pred):
        return ops.mean(y_pred)

    @tfparallel.sum_loss
    class Class(keras.Loss):
        def call(self, y_true, y_pred):
            return ops.mean(y_pred)

    class Holder:
        def method(self, y_true, y_pred):
            return ops.mean(y_pred)

    assert _kind(function, NUMBERS, CLASSES) == "coupled"
    assert _kind(Class(), NUMBERS, CLASSES) == "sum"
    assert _kind(tfparallel.mean_loss(keras.losses.Dice()), CLASSES, CLASSES) == "mean"
    assert _kind(tfparallel.sum_loss(Holder().method), NUMBERS, CLASSES) == "sum"
    assert _kind(tfparallel.coupled_loss("mse"), CLASSES, CLASSES) == "coupled"
    assert _kind(keras.losses.mean_squared_error, CLASSES, CLASSES) == "rows"
    with pytest.raises(TypeError, match="Received: 3"):
        tfparallel.coupled_loss(3)


def test_a_mean_of_parts_can_be_asked_for():
    """Dice of each replica's rows, weighted by rows, as data parallelism elsewhere does it."""

    def binary(rows):
        x, y = tiny_data(rows)
        return x, (y > 0).astype("float32")[:, None]

    def dice_in_parts(y_true, y_pred):
        rows = ops.shape(y_pred)[0]
        parts = [slice(None, (rows + 1) // 2), slice((rows + 1) // 2, None)]
        shares = [(rows + 1) // 2, rows // 2]
        losses = [keras.losses.dice(y_true[part], y_pred[part]) for part in parts]
        weighted = [ops.cast(n, "float32") * x for n, x in zip(shares, losses, strict=True)]
        return sum(weighted) / ops.cast(rows, "float32")

    def trained(strategy, loss):
        def build():
            return keras.Sequential([keras.Input((6,)), layers.Dense(1, "sigmoid")])

        return train(strategy, build=build, data=binary, compile_options=lambda: {"loss": loss})

    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    parts = trained(strategy, tfparallel.mean_loss(keras.losses.Dice()))
    assert_same_training(trained(None, dice_in_parts), parts)


class Added(layers.Layer):
    """Adds `function` of its input to the loss."""

    def __init__(self, function):
        super().__init__(name="added")
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


def _train_with(layer_of, strategy=None):
    def build():
        return keras.Sequential([keras.Input((6,)), layers.Dense(5), layer_of(), layers.Dense(3)])

    return train(strategy, build=build)


def test_a_layer_that_couples_rows_is_refused_or_declared():
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])

    def spread(x):
        return 0.1 * ops.sqrt(ops.mean(ops.square(x - ops.mean(x, axis=0))))

    with pytest.raises(ValueError, match=r"layer 'added', whose loss couples rows.*all_rows"):
        _train_with(lambda: Added(spread), strategy)
    _train_with(lambda: tfparallel.mean_loss(Added(spread)), strategy)
    gathered = _train_with(lambda: Added(lambda x: spread(strategy.all_rows(x))), strategy)
    assert_same_training(_train_with(lambda: Added(spread)), gathered)


@pytest.fixture
def few_digits(request):
    """A policy of float16 or bfloat16, for what is built; half of its digits."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(f"mixed_{request.param}")
    yield {"float16": 2.0**-5, "bfloat16": 2.0**-3}[request.param]
    keras.config.set_dtype_policy(before)


@pytest.mark.turns
@pytest.mark.parametrize("few_digits", ["float16", "bfloat16"], indirect=True)
@pytest.mark.parametrize("reduce", [ops.mean, ops.sum])
def test_rounding_of_few_digits_couples_no_rows(few_digits, reduce):
    """A mean in float16 was refused as one that couples rows; bfloat16 ended in numpy's error."""

    def trained(function, strategy=None):
        def build():
            return keras.Sequential([keras.Input((6,)), layers.Dense(5), Added(function)])

        x, _ = tiny_data(13)
        return train(strategy, build, dict, None, x=x, batch_size=7, epochs=1)

    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    for loss in (
        lambda x: 0.1 * reduce(ops.square(x)),
        lambda x: 0.1 * ops.cast(reduce(ops.square(x)), "float32"),
    ):
        assert_same_training(trained(loss), trained(loss, strategy), few_digits)
    with pytest.raises(ValueError, match="couples rows"):
        trained(lambda x: reduce(ops.square(x - ops.mean(x, axis=0))), strategy)


def test_a_shared_layer_adds_a_sum_in_each_call():
    """It was taken for a mean, as one call adds one loss, and there were two."""

    def build():
        added = Added(lambda x: 0.1 * ops.sum(ops.square(x)))
        x = keras.Input((6,))
        return keras.Model(x, layers.Dense(3)(added(layers.Dense(5)(added(x)))))

    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    assert_same_training(train(None, build=build), train(strategy, build=build))


def test_a_random_loss_of_a_layer_is_taken_for_a_mean_and_said(caplog):
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])

    def added():
        seeds = keras.random.SeedGenerator(1)
        return Added(lambda x: ops.mean(x + keras.random.normal(ops.shape(x), seed=seeds)))

    _train_with(added, strategy)
    (message,) = [r.getMessage() for r in caplog.records if "mean over rows" in r.getMessage()]
    assert "layer 'added'" in message and "it is random" in message


def test_rows_of_draws_differ():
    """Or means of many positions would be too much alike to tell what couples rows."""
    spec = tf.TensorSpec([None, 10_000])
    rng = np.random.default_rng(0)
    for draw in row_trial._DRAWS:
        means = np.abs(row_trial._drawn_leaf(spec, draw, rng, is_target=False)).mean(axis=1)
        assert means.max() > 1.5 * means.min()


def test_a_layer_that_adds_more_losses_in_a_trial_than_in_a_step_cannot_be_tried(caplog):
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])

    class Unsteady(Added):
        def call(self, x):
            if tf.is_symbolic_tensor(x):  # as no trial has it
                self.add_loss(0.1 * ops.mean(x))
                return x
            self.add_loss(ops.sum(x))
            self.add_loss(ops.mean(x))
            return x

    training = _train_with(lambda: Unsteady(None), strategy)
    (message,) = [r.getMessage() for r in caplog.records if "mean over rows" in r.getMessage()]
    assert "2 losses instead of 1" in message
    assert_same_training(_train_with(lambda: Unsteady(None)), training)
