"""Models that Keras cannot build from `fit`'s data go on as others do, with the same names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.callbacks.test_backup import Interrupt
from tests.conformance.cases.unbuilt import GAN
from tests.helpers import tiny_data
from tfparallel.callbacks import BackupAndRestore
from tfparallel.replicas.model_optimizers import optimizers_of

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class TakesMore(keras.Model):
    """Its `call` does not take the data of `fit`."""

    def __init__(self):
        super().__init__()
        self.hidden, self.top = keras.layers.Dense(4), keras.Sequential([keras.layers.Dense(3)])
        self.drops = keras.layers.Dropout(0.5, seed=3)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x, scale):
        return self.top(self.drops(self.hidden(x), training=True) * scale)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, keras.ops.ones(4)))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.seen.update_state(loss)
        return {"seen": self.seen.result()}


class RunsPython(TakesMore):
    """Its step cannot be traced."""

    def train_step(self, data):
        if float(np.asarray(data[0]).max()) > 1e9:
            raise ValueError("too large")
        return super().train_step(data)


def takes_more(model, **options):
    model.compile("adam", LOSS, **options)
    return model


def with_optimizer_around(hide):
    """Its optimizer is no attribute: `train_step` closes over it, or over what `hide` makes."""
    holder = hide(keras.optimizers.Adam(0.1))

    class ClosesOver(TakesMore):
        def train_step(self, data):
            optimizer = holder if isinstance(holder, keras.optimizers.Optimizer) else holder.get()
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.ops.square(self(data[0], keras.ops.ones(4))))
            weights = self.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    model = ClosesOver()
    model.compile()
    return model


class Holder:
    """Whose attributes nobody looks at."""

    def __init__(self, optimizer):
        self.hidden = optimizer

    def get(self):
        return self.hidden


def scaled():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(use_ema=True, gradient_accumulation_steps=2), initial_scale=4.0
    )
    model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)])
    model.compile(optimizer, LOSS, metrics=["accuracy"])
    return model


def gan():
    model = GAN()
    model.compile(d_optimizer=keras.optimizers.Adam(), g_optimizer=keras.optimizers.Nadam())
    return model


MODELS = {
    "takes more": lambda: takes_more(TakesMore()),
    "runs Python": lambda: takes_more(RunsPython(), run_eagerly=True),
    "scaled loss": scaled,
    "GAN": gan,
    "closure": lambda: with_optimizer_around(lambda optimizer: optimizer),
}


def fit(make, *callbacks):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model, (x, y) = make(), tiny_data(12)
    y = np.zeros((12, 3), "float32") if isinstance(model, GAN) else y
    fitted = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=list(callbacks))
    of_optimizers = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    state = [(v.path, v.numpy()) for v in [*model.variables, *of_optimizers]]
    return state, fitted.history


@pytest.mark.parametrize("name", MODELS)
def test_goes_on_with_the_same_names_and_bits(tmp_path, name):
    expected, history = fit(MODELS[name])
    with pytest.raises(KeyboardInterrupt):
        fit(MODELS[name], BackupAndRestore(tmp_path, save_freq=1, asynchronous=False), Interrupt(5))
    received, resumed_history = fit(MODELS[name], BackupAndRestore(tmp_path, save_freq=1))
    assert resumed_history == history
    assert [path for path, _ in received] == [path for path, _ in expected]
    pairs = zip(received, expected, strict=True)
    assert all(np.array_equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_an_optimizer_that_is_not_found_is_named_once(tmp_path, caplog):
    def make():
        return with_optimizer_around(Holder)

    with caplog.at_level("WARNING", "tensorflow"):
        fit(make, BackupAndRestore(tmp_path, save_freq=1))
    assert caplog.text.count("Not saved: Adam 'adam'") == 1
    caplog.clear()
    with caplog.at_level("WARNING", "tensorflow"):
        fit(MODELS["scaled loss"], BackupAndRestore(tmp_path, save_freq=1))
    assert "Not saved" not in caplog.text
