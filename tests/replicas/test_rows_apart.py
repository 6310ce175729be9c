"""A model in which rows of a batch meet is refused, where replicas have some each."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfparallel
from tests.helpers import assert_same_training, in_float64, train
from tfparallel.replicas import rows_apart
from tfparallel.replicas.rows_apart import rows_never_meet

ROWS = np.random.default_rng(0).normal(size=(9, 4)).astype("float32")


class Applied(layers.Layer):
    """A function of a user's."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def capacity(x):
    """An expert takes the first two rows that choose it."""
    chosen = ops.one_hot(ops.argmax(x, -1), 4, dtype=x.dtype)
    return x * chosen * ops.cast(ops.cumsum(chosen, 0) <= 2, x.dtype)


def attention(x):
    return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x)


MEET = {
    "centred": lambda x: x - ops.mean(x, 0, keepdims=True),
    "spread": lambda x: x * ops.std(x),
    "capacity": capacity,
    "attention": attention,
    "neighbour": lambda x: x + ops.roll(x, 1, axis=0),
    "turned": lambda x: x + ops.flip(x, axis=0),
    "first": lambda x: x - x[:1],
    "number": lambda x: x / ops.cast(ops.shape(x)[0], x.dtype),
}
APART = {
    "transposed": lambda x: ops.transpose(ops.cumsum(ops.transpose(x), axis=0)),
    "reshaped": lambda x: ops.reshape(ops.flip(ops.reshape(x, (-1, 2, 2)), axis=1), (-1, 4)),
    "penalised": lambda x: x[:, ::-1] + ops.stop_gradient(ops.mean(x, axis=-1, keepdims=True)),
}


def _model(function) -> keras.Model:
    dense = [layers.Dense(4, "tanh"), layers.BatchNormalization(), layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((4,)), *dense, Applied(function), layers.Dense(4)])


def _functional(function) -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(4)(function(layers.Dense(4, "tanh")(inputs))))


def _compiled(build, strategy) -> keras.Model:
    with strategy.scope():
        model = build()
        model.compile("sgd", "mse")
    return model


def _mirrored() -> tfparallel.MirroredStrategy:
    return tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])


STRATEGIES = {
    "mirrored": _mirrored,
    "pipeline": lambda: tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], 2),
}


@pytest.mark.parametrize("function", MEET)
def test_a_layer_in_which_rows_meet_is_refused(function):
    model = _compiled(lambda: _model(MEET[function]), _mirrored())
    before = model.get_weights()
    with pytest.raises(ValueError, match="computed of that row alone.*Rows may meet in '.*applied"):
        model.fit(ROWS, ROWS, batch_size=9, verbose=0)
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("function", ["attention", "centred"])
def test_so_is_a_functional_model_that_computes_it_without_a_layer(function, strategy):
    model = _compiled(lambda: _functional(MEET[function]), STRATEGIES[strategy]())
    with pytest.raises(ValueError, match="computed of that row alone.*all_rows"):
        model.fit(ROWS, ROWS, batch_size=9, verbose=0)


def test_a_layer_of_keras_that_equalizes_a_batch_is_refused():
    def build():
        equalized = [layers.Equalization(value_range=(0, 1)), layers.Flatten(), layers.Dense(4)]
        return keras.Sequential([keras.Input((8, 8, 1)), *equalized])

    images = np.random.default_rng(0).random((9, 8, 8, 1)).astype("float32")
    model = _compiled(build, _mirrored())
    with pytest.raises(ValueError, match="computed of that row alone.*equalization"):
        model.fit(images, ROWS, batch_size=9, verbose=0)


def test_it_trains_where_it_is_said_to_be_meant():
    model = _compiled(lambda: tfparallel.mean_loss(_model(MEET["centred"])), _mirrored())
    model.fit(ROWS, ROWS, batch_size=9, verbose=0)


def test_it_trains_as_on_one_device_of_the_rows_of_all():
    strategy = _mirrored()

    def attends_all(x, of_strategy):
        every = of_strategy.all_rows(x) if of_strategy else x
        return ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(every))), every)

    def trained(own):
        def build():
            return keras.Sequential(
                [keras.Input((4,)), layers.Dense(4), Applied(lambda x: attends_all(x, own))]
            )

        options = {"compile_options": lambda: {"loss": "mse"}, "rows": 9, "batch_size": 5}
        return train(own, build=build, data=lambda rows: (ROWS[:rows], ROWS[:rows]), **options)

    with in_float64():
        assert_same_training(trained(None), trained(strategy), atol=1e-9)


@pytest.mark.parametrize("build", [_model, _functional])
@pytest.mark.parametrize("function", APART)
def test_rows_that_never_meet_train(function, build):
    model = _compiled(lambda: build(APART[function]), _mirrored())
    model.fit(ROWS, ROWS, batch_size=9, verbose=0)


def test_it_is_said_that_a_model_for_one_number_of_rows_was_not_looked_at(caplog):
    whole = _compiled(lambda: _model(lambda x: ops.reshape(x, (int(x.shape[0]), 4))), _mirrored())
    whole.fit(ROWS, ROWS, batch_size=9, verbose=0)
    assert "seen whether rows of a batch meet" in caplog.text
    caplog.clear()
    any_rows = _compiled(lambda: _model(lambda x: ops.reshape(x, (-1, 4))), _mirrored())
    any_rows.fit(ROWS, ROWS, batch_size=9, verbose=0)
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


def test_layers_of_keras_cost_nothing(monkeypatch):
    monkeypatch.setattr(rows_apart, "_where_rows_may_meet", None)
    inputs = keras.Input((4,))
    x = layers.Dense(4, activity_regularizer="l2")(inputs) + inputs
    model = keras.Model(inputs, layers.Dense(4)(layers.Concatenate()([x, inputs])))
    assert rows_never_meet(model)
    assert not rows_never_meet(_functional(MEET["turned"]))


def test_what_needs_no_trial_is_not_tried(monkeypatch):
    """No rows may meet in it, as far as its graph tells."""
    monkeypatch.setattr(rows_apart.StepOfOwnRows, "kinds_of", None)
    model = _compiled(lambda: _model(lambda x: ops.tanh(x[:, ::-1]) * 2), _mirrored())
    model.fit(ROWS, ROWS, batch_size=9, verbose=0)
