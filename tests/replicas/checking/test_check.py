"""`strategy.check` finds what is wrong, and says why where it knows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.helpers import momentum_sgd, tiny_compile_options, tiny_data, tiny_model
from tfparallel.data_parallel.mirrored import MirroredLocalExtended

DEVICES = ["CPU:0", "CPU:1"]
BATCH = tiny_data(13)


class WrongExtended(MirroredLocalExtended):
    """Adds a thousandth to every gradient."""

    def _sum_gradients(self, gradients):
        return [1.001 * gradient for gradient in super()._sum_gradients(gradients)]


class WrongStrategy(tfparallel.MirroredStrategy):
    """A strategy with a bug."""

    def __init__(self, devices):
        super().__init__(devices)
        self._extended.__class__ = WrongExtended


def compiled(strategy, build=tiny_model, **options):
    with strategy.scope():
        model = build()
        model.compile(**{"optimizer": momentum_sgd(), **tiny_compile_options(), **options})
    return model


def check(make=tiny_model, strategy_class=tfparallel.MirroredStrategy, **options):
    strategy = strategy_class(DEVICES)
    return strategy.check(compiled(strategy, make), BATCH, **options)


def with_layer(layer):
    inputs = [keras.Input((6,)), layers.Dense(8, "tanh")]
    return lambda: keras.Sequential([*inputs, layer(), layers.Dense(3)])


def test_a_wrong_strategy_is_found_and_not_explained():
    result = check(strategy_class=WrongStrategy)
    assert result.verdict == "unexplained"
    assert not result.causes
    assert "report" in str(result)
    weights = [each for each in result.differences if each.kind == "weight"]
    assert len(weights) == 4 and not any(each.is_equal for each in weights)
    for each in weights:
        assert each.difference == pytest.approx(each.change / 1000, rel=0.01)


def test_a_wrong_strategy_is_not_excused_by_dropout():
    result = check(with_layer(lambda: layers.Dropout(0.5)), WrongStrategy)
    assert result.verdict == "unexplained"
    assert "differs, too" in result.causes[-1]


def test_batch_norm_by_replica_is_named():
    result = check(with_layer(layers.BatchNormalization))
    assert result.verdict == "explained"
    assert "synchronized=True" in result.causes[0]


def test_synchronised_batch_norm_is_equal():
    assert (
        check(with_layer(lambda: layers.BatchNormalization(synchronized=True))).verdict == "equal"
    )


def test_in_float64_rounding_is_small():
    result = check(float64=True)
    assert result.verdict == "equal"
    assert max(each.in_float64 for each in result.differences) < 1e-8
    assert "in float64" in str(result)


class Subclassed(keras.Model):
    """Keras cannot make it again: its argument has no configuration."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def call(self, x):
        return self.head(x)

    def get_config(self):
        raise NotImplementedError("no configuration")


def test_a_model_that_cannot_be_made_again_is_refused():
    with pytest.raises(ValueError, match=r"Received: NotImplementedError: no conf.*`build=`"):
        check(lambda: Subclassed(layers.Dense(3)))


def test_a_model_that_cannot_be_made_again_is_built_again():
    def build():
        model = Subclassed(layers.Dense(3))
        model.compile(optimizer=momentum_sgd(), **tiny_compile_options())
        return model

    assert check(lambda: Subclassed(layers.Dense(3)), build=build).verdict == "equal"


def test_another_model_is_refused():
    def build():
        model = with_layer(lambda: layers.Dense(5))()
        model.compile(optimizer=momentum_sgd(), **tiny_compile_options())
        return model

    with pytest.raises(ValueError, match="same variables"):
        check(build=build)


def test_within_the_scope_is_refused():
    strategy = tfparallel.MirroredStrategy(DEVICES)
    model = compiled(strategy)
    with strategy.scope(), pytest.raises(ValueError, match="Call it after that block"):
        strategy.check(model, BATCH)


def test_names_and_the_trained_function_stay():
    strategy = tfparallel.MirroredStrategy(DEVICES)
    model = compiled(strategy, with_layer(lambda: layers.Dropout(0.5)))
    model.fit(*BATCH, verbose=0)
    function, result = model.train_function, model.get_metrics_result()
    number = int(layers.Dense(1).name.rpartition("_")[2])
    strategy.check(model, BATCH)
    assert layers.Dense(1).name == f"dense_{number + 1}"
    assert model.train_function is function
    assert model.get_metrics_result() == result
    assert all("call" not in vars(layer) for layer in model.layers)


def test_own_layers_losses_and_several_inputs():
    class Scale(layers.Layer):  # in a function: found by the model, not by its module
        def build(self, shape):
            self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

        def call(self, x):
            return x * self.scale

    def squashed(x):
        return keras.ops.tanh(x)

    def build():
        x, z = keras.Input((6,), name="x"), keras.Input((6,), name="z")
        hidden = layers.Dense(4, activation=squashed)(layers.Add()([x, z]))
        return keras.Model({"x": x, "z": z}, layers.Dense(2)(Scale()(hidden)))

    strategy = tfparallel.MirroredStrategy(DEVICES)
    model = compiled(
        strategy,
        build,
        loss=lambda y, p: keras.ops.mean(keras.ops.square(y - p), axis=-1),
        metrics=["mae"],
    )
    rows = np.random.default_rng(0).normal(size=(13, 6))
    weights = np.linspace(0.0, 2.0, 13)
    result = strategy.check(model, ({"x": rows, "z": -0.5 * rows}, rows[:, :2], weights))
    assert result.verdict == "equal", str(result)


def test_numbers_are_compared_without_tf32():
    """Which GPUs would multiply with, by default."""
    seen = []

    class Sees(layers.Layer):
        def call(self, x):
            seen.append(tf.config.experimental.tensor_float_32_execution_enabled())
            return x

    strategy = tfparallel.MirroredStrategy(DEVICES)
    sees = lambda: keras.Sequential([keras.Input((6,)), Sees(), layers.Dense(3)])  # noqa: E731
    model = compiled(strategy, sees)
    seen.clear()
    strategy.check(model, BATCH, build=lambda: compiled(tf.distribute.get_strategy(), sees))
    assert seen and not any(seen)
    assert tf.config.experimental.tensor_float_32_execution_enabled()


class Spread(keras.Sequential):
    """Its step minimises the deviations of its outputs, which couple rows."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.std(self(data[0]), axis=0))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_a_loss_of_parts_that_is_declared_is_compared():
    def declared():
        return tfparallel.mean_loss(Spread(tiny_model().layers))

    assert check(declared, float64=True).verdict == "unexplained"
