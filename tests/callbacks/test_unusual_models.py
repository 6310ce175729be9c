"""Models that Keras cannot build from `fit`'s data go on as others do, with the same names."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.callbacks.test_backup import Interrupt
from tests.conformance.cases.unbuilt import GAN
from tests.helpers import tiny_data
from tfparallel.callbacks import BackupAndRestore
from tfparallel.callbacks.backup.model_state import mirrored_state, set_mirrored_state
from tfparallel.callbacks.backup.storage import BackupError
from tfparallel.replicas.model_optimizers import optimizers_of

pytestmark = pytest.mark.turns

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


class HoldsVariables(keras.Model):
    """With variables of TensorFlow that Keras does not list, and that its step reads."""

    def __init__(self):
        super().__init__()
        self.top = keras.layers.Dense(3)
        self.calls = tf.Variable(1.0)
        self.decays = [tf.Variable(0.9, trainable=False), {"second": tf.Variable([0.5, 0.25])}]
        self.module = tf.Module()
        self.module.factor = tf.Variable(2.0)

    def call(self, x):
        return self.top(x) * self.decays[0] * self.decays[1]["second"][0] * self.module.factor

    def train_step(self, data):
        logs = super().train_step(data)
        self.calls.assign_add(1.0)
        self.decays[0].assign(1.0 / self.calls)
        self.decays[1]["second"].assign(self.decays[1]["second"] * 0.9)
        self.module.factor.assign(self.module.factor + 0.125)
        return logs


MODELS = {
    "takes more": lambda: takes_more(TakesMore()),
    "runs Python": lambda: takes_more(RunsPython(), run_eagerly=True),
    "scaled loss": scaled,
    "GAN": gan,
    "holds variables": lambda: takes_more(HoldsVariables()),
    "closure": lambda: with_optimizer_around(lambda optimizer: optimizer),
}


def fit(make, *callbacks, strategy=contextlib.nullcontext):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with strategy():
        model, (x, y) = make(), tiny_data(12)
    y = np.zeros((12, 3), "float32") if isinstance(model, GAN) else y
    fitted = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=list(callbacks))
    of_optimizers = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    state = [(v.path, v.numpy()) for v in [*model.variables, *of_optimizers]]
    return state, fitted.history


def mirrored():
    return tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope()


def pipeline():
    return tfparallel.PipelineStrategy(["CPU:0", "CPU:1"], num_microbatches=2).scope()


CASES = [
    *((name, contextlib.nullcontext) for name in MODELS),
    ("runs Python", mirrored),
    ("holds variables", mirrored),
    pytest.param("GAN", pipeline, marks=pytest.mark.long),
    pytest.param("takes more", mirrored, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_goes_on_with_the_same_names_and_bits(tmp_path, name, strategy):
    def train(*callbacks):
        return fit(MODELS[name], *callbacks, strategy=strategy)

    expected, history = train()
    with pytest.raises(KeyboardInterrupt):
        train(BackupAndRestore(tmp_path, save_freq=1, asynchronous=False), Interrupt(5))
    received, resumed_history = train(BackupAndRestore(tmp_path, save_freq=1))
    assert resumed_history == history
    assert [path for path, _ in received] == [path for path, _ in expected]
    pairs = zip(received, expected, strict=True)
    assert all(np.array_equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_a_backup_of_before_leaves_variables_in_attributes_alone_and_says_so(caplog):
    _, model = fit(MODELS["holds variables"]), takes_more(HoldsVariables())
    model.build((None, 6))
    state = mirrored_state(model)
    assert len(state.pop("plain")["paths"]) == 4
    with caplog.at_level("WARNING", "tensorflow"):
        set_mirrored_state(model, state, {})
    assert "holds_variables" in caplog.text and "/calls, " in caplog.text
    state["plain"] = {"paths": ["calls"], "arrays": [np.zeros(2, "float32")]}
    with pytest.raises(BackupError, match="a model with 4 variables and a backup with 1"):
        set_mirrored_state(model, state, {})


def test_variables_with_a_term_on_each_replica_are_named(tmp_path, caplog):
    def make():
        model = takes_more(HoldsVariables())
        on_read = tf.VariableSynchronization.ON_READ
        sums = tf.VariableAggregation.SUM
        model.seen = tf.Variable(0.0, synchronization=on_read, aggregation=sums, trainable=False)
        return model

    with caplog.at_level("WARNING", "tensorflow"):
        fit(make, BackupAndRestore(tmp_path, save_freq=1), strategy=mirrored)
    assert caplog.text.count("/seen, with a term on each replica") == 1


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
