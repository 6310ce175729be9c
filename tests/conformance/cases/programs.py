"""Programs as others write them, tiny: what they do in a step, around `fit`, in optimizers."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.conformance.case import Run, case
from tests.helpers import ODD_ROWS, in_float64, numbered

ATOL = 1e-10


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def _mlp(inputs: int, *units: int, last: str | None = None) -> keras.Sequential:
    hidden = [layers.Dense(n, "tanh") for n in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(units[-1], last)])


def _sgd(rate: float = 0.05) -> keras.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.9)


def _trained(run: Run, build, compile_options=dict, **options) -> dict:
    with in_float64():
        options = {"data": None, "batch_size": 10, **options}
        return run.train(build=build, compile_options=compile_options, **options).results()


class Diffusion(keras.Model):
    """Learns noise that is in the data, with a network and its moving average (DDIM)."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.normalizer.adapt(_normal(50, 4, seed=9) * 3 + 1)
        self.network, self.average = _mlp(5, 6, 4), _mlp(5, 6, 4)
        self.average.set_weights(self.network.get_weights())
        self.noise_loss = keras.metrics.Mean(name="noise_loss")
        self.signal_loss = keras.metrics.Mean(name="signal_loss")

    @property
    def metrics(self):
        return [self.noise_loss, self.signal_loss]

    def _noise_and_signal(self, network, data, training):
        rows, noise, time = data
        rows = self.normalizer(rows)
        signal, amount = ops.cos(time), ops.sin(time)
        noisy = signal * rows + amount * noise
        found = network(ops.concatenate([noisy, amount**2], axis=1), training=training)
        clean = (noisy - amount * found) / signal
        return self.compute_loss(y=noise, y_pred=found), ops.mean(ops.abs(rows - clean))

    def _told(self, noise, signal):
        self.noise_loss.update_state(noise)
        self.signal_loss.update_state(signal)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            noise, signal = self._noise_and_signal(self.network, data[0], True)
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(noise, weights), weights, strict=True))
        for own, average in zip(self.network.weights, self.average.weights, strict=True):
            average.assign(0.99 * average + 0.01 * own)
        return self._told(noise, signal)

    def test_step(self, data):
        return self._told(*self._noise_and_signal(self.average, data[0], False))


@case(atol=ATOL, long=True)
def diffusion(run: Run):
    times = np.random.default_rng(2).uniform(0.1, 1.2, (ODD_ROWS, 1))
    data = (_normal(ODD_ROWS, 4), _normal(ODD_ROWS, 4, seed=1), times)
    validation = tuple(part[:7] for part in data)
    return _trained(
        run,
        Diffusion,
        lambda: {"loss": keras.losses.MeanAbsoluteError(), "optimizer": _sgd()},
        x=data,
        validation_data=(validation,),
    )


class Flow(keras.Model):
    """Couplings that can be inverted; the loss is a density (RealNVP)."""

    def __init__(self):
        super().__init__()
        self.scales = [_mlp(2, 4, 2, last="tanh") for _ in range(3)]
        self.shifts = [_mlp(2, 4, 2) for _ in range(3)]
        self.masks = tf.constant([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]], keras.config.floatx())
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x):
        logarithm = 0.0
        for i, (scale, shift) in enumerate(zip(self.scales, self.shifts, strict=True)):
            mask = self.masks[i]
            s, t = scale(x * mask) * (1 - mask), shift(x * mask) * (1 - mask)
            x = (1 - mask) * (x * ops.exp(-s) - t * ops.exp(-s)) + mask * x
            logarithm -= ops.sum(s, axis=1)
        return x, logarithm

    def _loss(self, x):
        y, logarithm = self(x)
        return -ops.mean(-0.5 * ops.sum(y**2, axis=1) + logarithm)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._loss(data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def test_step(self, data):
        self.tracker.update_state(self._loss(data))
        return {"loss": self.tracker.result()}


@case(atol=ATOL, long=True)
def normalizing_flow(run: Run):
    return _trained(run, Flow, x=_normal(ODD_ROWS, 2), validation_data=(_normal(7, 2),))


class Distance(keras.Model):
    """A function whose gradient by its inputs has length 1 (the eikonal equation)."""

    def call(self, x):
        return super().call(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                found = self(x, training=True)
            slope = inner.gradient(found, x)
            equation = ops.mean((ops.sqrt(ops.sum(slope**2, axis=1)) - 1.0) ** 2)
            loss = ops.mean((found - y) ** 2) + 0.1 * equation
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "equation": equation}


def _distance() -> keras.Model:
    inputs = keras.Input((3,))
    hidden = layers.Dense(6, "tanh")(inputs)
    return Distance(inputs, layers.Dense(1)(layers.Dense(5, "tanh")(hidden)))


@case(atol=ATOL, long=True)
def eikonal_equation(run: Run):
    x = _normal(ODD_ROWS, 3)
    return _trained(run, _distance, x=x, y=np.linalg.norm(x, axis=1, keepdims=True))


class Cycle(keras.Model):
    """Two generators and two discriminators, four optimizers and one tape (CycleGAN)."""

    def __init__(self):
        super().__init__()
        self.there, self.back = _mlp(3, 5, 3), _mlp(3, 5, 3)
        self.judge_there, self.judge_back = _mlp(3, 4, 1), _mlp(3, 4, 1)

    def compile(self, optimizers, **options):
        super().compile(**options)
        self.optimizers = optimizers

    def train_step(self, data):
        x, y = data
        mse, mae = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()
        with tf.GradientTape(persistent=True) as tape:
            made_y, made_x = self.there(x, training=True), self.back(y, training=True)
            cycle = mae(x, self.back(made_y)) + mae(y, self.there(made_x))
            same = mae(y, self.there(y)) + mae(x, self.back(x))
            of_y, of_x = self.judge_there(made_y), self.judge_back(made_x)
            there = mse(ops.ones_like(of_y), of_y) + 10 * cycle + 5 * same
            back = mse(ops.ones_like(of_x), of_x) + 10 * cycle + 5 * same
            real_y, real_x = self.judge_there(y), self.judge_back(x)
            told_y = mse(ops.ones_like(real_y), real_y) + mse(ops.zeros_like(of_y), of_y)
            told_x = mse(ops.ones_like(real_x), real_x) + mse(ops.zeros_like(of_x), of_x)
        parts = [self.there, self.back, self.judge_there, self.judge_back]
        for part, loss, own in zip(
            parts, (there, back, told_y, told_x), self.optimizers, strict=True
        ):
            weights = part.trainable_variables
            own.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"there": there, "back": back, "judges": told_x + told_y}


@case(atol=ATOL, long=True)
def cycle_of_generators(run: Run):
    return _trained(
        run,
        Cycle,
        lambda: {"optimizers": [_sgd(0.01 * (i + 1)) for i in range(4)]},
        x=_normal(ODD_ROWS, 3),
        y=_normal(ODD_ROWS, 3, seed=1),
    )


class Stylist(keras.Model):
    """Gives content the mean and the variance of a style; its encoder is frozen (AdaIN)."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6, 2)), layers.Conv1D(3, 3, padding="same")])
        self.decoder = keras.Sequential([keras.Input((6, 3)), layers.Conv1D(2, 3, padding="same")])
        self.encoder.trainable = False
        self.totals = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.totals]

    def train_step(self, data):
        style, content = data
        with tf.GradientTape() as tape:
            of_style, of_content = self.encoder(style), self.encoder(content)
            mean, variance = ops.moments(of_content, axes=[1], keepdims=True)
            wanted_mean, wanted_variance = ops.moments(of_style, axes=[1], keepdims=True)
            scale = ops.sqrt(wanted_variance + 1e-5) / ops.sqrt(variance + 1e-5)
            target = (of_content - mean) * scale + wanted_mean
            made = self.encoder(self.decoder(target))
            own_mean, own_variance = ops.moments(made, axes=[1], keepdims=True)
            loss = self.compute_loss(y=target, y_pred=made)
            loss += ops.mean((own_mean - wanted_mean) ** 2)
            loss += ops.mean((ops.sqrt(own_variance) - ops.sqrt(wanted_variance)) ** 2)
        weights = self.decoder.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.totals.update_state(loss)
        return {"total_loss": self.totals.result()}


@case(atol=ATOL, long=True)
def style_transfer(run: Run):
    return _trained(
        run,
        Stylist,
        lambda: {"loss": "mse"},
        x=_normal(ODD_ROWS, 6, 2),
        y=_normal(ODD_ROWS, 6, 2, seed=1),
    )


class Neighbours(keras.Model):
    """Compares rows with those of batches before, which a queue keeps (MoCo, NNCLR)."""

    def __init__(self, all_rows):
        super().__init__()
        self.tower, self.all_rows = _mlp(4, 6, 3), all_rows
        start = _normal(12, 3, seed=5)
        self.queue = keras.Variable(start, trainable=False, name="queue")

    def call(self, x):
        return self.tower(x)

    def train_step(self, data):
        one, other = data
        with tf.GradientTape() as tape:
            own, key = self(one, training=True), ops.stop_gradient(self(other))
            best = ops.argmax(ops.matmul(key, ops.transpose(self.queue)), axis=1)
            near = ops.take(self.queue, best, axis=0)
            right = ops.sum(own * near, axis=1, keepdims=True)
            scores = ops.concatenate([right, ops.matmul(own, ops.transpose(self.queue))], axis=1)
            loss = ops.mean(ops.logsumexp(scores, axis=1) - scores[:, 0])
        weights = self.tower.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.queue.assign(ops.concatenate([self.all_rows(key), self.queue], axis=0)[:12])
        return {"loss": loss}


@case(atol=ATOL, long=True)
def queue_of_neighbours(run: Run):
    all_rows = run.strategy.all_rows if run.strategy else lambda rows: rows
    return _trained(
        run,
        lambda: Neighbours(all_rows),
        x=_normal(ODD_ROWS, 4),
        y=_normal(ODD_ROWS, 4, seed=1),
    )


def _mixture_density(y_true, y_pred):
    """The likelihood of a number, of which a model gives a mixture of three normals."""
    means, spreads, weights = ops.split(y_pred, 3, axis=-1)
    spreads = ops.softplus(spreads) + 0.1
    each = -0.5 * ((y_true - means) / spreads) ** 2 - ops.log(spreads)
    return -ops.logsumexp(each + ops.log_softmax(weights, axis=-1), axis=-1)


@case(atol=ATOL, long=True)
def mixture_density_network(run: Run):
    return _trained(
        run,
        lambda: _mlp(2, 7, 6, 9),
        lambda: {"loss": _mixture_density, "metrics": [_mixture_density]},
        x=_normal(ODD_ROWS, 2),
        y=_normal(ODD_ROWS, 1),
        sample_weight=np.linspace(0, 2, ODD_ROWS),
        validation_split=0.3,
    )


def _speech_model() -> keras.Model:
    given = keras.Input((7, 3))
    x = layers.Conv1D(4, 3, padding="same", activation="tanh")(given)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    return keras.Model(given, layers.Dense(5)(x))


@case(atol=1e-6, long=True)  # TensorFlow computes this loss in float32
def speech_by_ctc(run: Run):
    labels = np.random.default_rng(1).integers(1, 5, (ODD_ROWS, 3))
    labels[::3, 2] = 0
    return _trained(
        run,
        _speech_model,
        lambda: {"loss": keras.losses.CTC()},
        x=_normal(ODD_ROWS, 7, 3),
        y=labels,
    )


@keras.saving.register_keras_serializable("tfparallel_tests")
class FourierFeatures(layers.Layer):
    """Cosines of a random projection that is not trained, with a scale that is."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units

    def build(self, shape):
        normal = keras.initializers.RandomNormal(seed=3)
        uniform = keras.initializers.RandomUniform(0, 6, seed=4)
        self.kernel = self.add_weight(
            name="kernel", shape=(shape[-1], self.units), initializer=normal, trainable=False
        )
        self.bias = self.add_weight(
            name="bias", shape=(self.units,), initializer=uniform, trainable=False
        )
        self.scale = self.add_weight(name="scale", initializer="ones", constraint="non_neg")

    def call(self, x):
        return ops.cos(ops.matmul(x / self.scale, self.kernel) + self.bias)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def _quasi_svm() -> keras.Model:
    given = [keras.Input((4,)), layers.Dense(5, kernel_regularizer="l1"), FourierFeatures(8)]
    return keras.Sequential(
        [*given, layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(1))]
    )


@case(atol=ATOL, long=True)
def quasi_svm(run: Run):
    y = np.eye(3)[np.random.default_rng(1).integers(0, 3, ODD_ROWS)]
    return _trained(
        run,
        _quasi_svm,
        lambda: {
            "loss": keras.losses.CategoricalHinge(),
            "metrics": ["accuracy", "categorical_hinge", keras.metrics.F1Score("macro")],
        },
        x=_normal(ODD_ROWS, 4),
        y=y,
        class_weight={0: 0.5, 1: 1.0, 2: 3.0},
    )


class StandardizedConv(layers.Conv2D):
    """A convolution whose kernel is standardised in each call."""

    def convolution_op(self, inputs, kernel):
        mean, variance = ops.moments(kernel, axes=[0, 1, 2], keepdims=True)
        return super().convolution_op(inputs, (kernel - mean) / ops.sqrt(variance + 1e-6))


@tf.custom_gradient
def _sign_that_passes(x):
    """Signs, whose gradient is that of a clipped identity (straight-through)."""
    return tf.sign(x), lambda upstream: tf.where(tf.abs(x) < 1, upstream, tf.zeros_like(upstream))


class Binary(layers.Layer):
    def call(self, x):
        return _sign_that_passes(x)

    def compute_output_shape(self, shape):
        return shape


def _binary_model() -> keras.Model:
    given = keras.Input((6, 1, 2))
    x = layers.GroupNormalization(2)(StandardizedConv(4, (3, 1))(given))
    x = Binary()(layers.Dense(5)(layers.Flatten()(x)))
    return keras.Model(given, layers.UnitNormalization()(layers.Dense(3)(x)))


@case(atol=ATOL, long=True)
def gradients_of_its_own(run: Run):
    return _trained(
        run,
        _binary_model,
        lambda: {"loss": keras.losses.Huber(0.3)},
        x=_normal(ODD_ROWS, 6, 1, 2),
        y=_normal(ODD_ROWS, 3),
    )


class Lookahead(keras.optimizers.SGD):
    """Slow weights that follow fast ones every second step; centralised gradients."""

    def build(self, variables):
        super().build(variables)
        self.slow = [
            self.add_variable_from_reference(v, name="slow", initializer="zeros") for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        if len(gradient.shape) > 1:
            axes = tuple(range(len(gradient.shape) - 1))
            gradient = gradient - ops.mean(gradient, axis=axes, keepdims=True)
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        is_time = ops.equal(ops.mod(self.iterations + 1, 2), 0)
        moved = slow + 0.5 * (variable - slow)
        self.assign(slow, ops.where(is_time, moved, slow))
        self.assign(variable, ops.where(is_time, moved, variable))


@case(atol=ATOL, long=True)
def optimizer_that_looks_ahead(run: Run):
    return _trained(
        run,
        lambda: _mlp(4, 6, 5, 3),
        lambda: {"loss": "mse", "optimizer": Lookahead(0.1, weight_decay=0.01, clipnorm=0.5)},
        x=_normal(ODD_ROWS, 4),
        y=_normal(ODD_ROWS, 3),
    )


class EveryBatch(keras.callbacks.Callback):
    """Moves the learning rate in each batch, and averages weights over epochs."""

    def __init__(self):
        super().__init__()
        self.batches, self.averages, self.epochs = 0, None, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1
        self.model.optimizer.learning_rate = 0.02 * (1 + self.batches % 3)

    def on_epoch_end(self, epoch, logs=None):
        own = self.model.get_weights()
        before = self.averages or [0.0 for _ in own]
        mean = [(a * self.epochs + w) / (self.epochs + 1) for a, w in zip(before, own, strict=True)]
        self.averages, self.epochs = mean, self.epochs + 1

    def on_train_end(self, logs=None):
        self.model.set_weights(self.averages)


class ScoresOfPredictions(keras.callbacks.Callback):
    """What is computed of predictions, beside the logs of each epoch."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y, self.scores = x, y, []

    def on_epoch_end(self, epoch, logs=None):
        scores = self.model.predict(self.x, batch_size=5, verbose=0)
        right = np.argmax(scores, axis=1) == self.y
        self.scores.append(float(np.mean(right)) + float(np.sum(scores)))
        logs["score"] = self.scores[-1]


@case(atol=ATOL, long=True)
def frozen_then_tuned(run: Run):
    """Compiled again midway, saved and loaded between, with callbacks that change weights."""
    x, y = _normal(ODD_ROWS, 4), np.random.default_rng(1).integers(0, 3, ODD_ROWS)
    with in_float64(), run.scope():
        keras.utils.set_random_seed(1)
        base = keras.Sequential(
            [keras.Input((4,)), layers.Dense(6, "tanh"), layers.Dense(5, "tanh")], name="base"
        )
        model = keras.Sequential([keras.Input((4,)), base, layers.Dense(3, name="head")])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        base.trainable = False
        model.compile(_sgd(), loss, metrics=["accuracy"])
        options = {"batch_size": 10, "shuffle": False, "verbose": 0}
        first = model.fit(x, y, epochs=2, callbacks=[EveryBatch()], **options)
        scores = ScoresOfPredictions(x, y)
        base.trainable = True
        model.compile(
            keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], steps_per_execution=2
        )
        second = model.fit(x, y, epochs=2, callbacks=[scores], **options)
        path = run.own_folder / "midway.keras"
        model.save(path)
        model = keras.models.load_model(path)
        third = model.fit(x, y, epochs=1, validation_data=(x, y), **options)
    return {
        **numbered("weights", model.get_weights()),
        **{
            f"{i}/{k}": np.array(v)
            for i, h in enumerate((first, second, third))
            for k, v in h.history.items()
        },
        "scores": np.array(scores.scores),
    }


def _two_tasks() -> keras.Model:
    given = {"left": keras.Input((3,), name="left"), "right": keras.Input((2,), name="right")}
    shared = layers.Dense(5, "tanh")(layers.Concatenate()([given["left"], given["right"]]))
    kind = layers.Dense(3, name="kind")(layers.Dense(4, "tanh")(shared))
    return keras.Model(given, {"kind": kind, "size": layers.Dense(1, name="size")(shared)})


@case(atol=ATOL, long=True)
def batches_by_hand(run: Run):
    """Several tasks, `train_on_batch` and its like with dicts, and metrics reset by hand."""
    rng = np.random.default_rng(1)
    x = {"left": _normal(ODD_ROWS, 3), "right": _normal(ODD_ROWS, 2)}
    y = {"kind": rng.integers(0, 3, ODD_ROWS), "size": _normal(ODD_ROWS, 1)}
    weights = {"kind": rng.uniform(size=ODD_ROWS), "size": rng.uniform(size=ODD_ROWS)}
    found = {}
    with in_float64(), run.scope():
        keras.utils.set_random_seed(1)
        model = _two_tasks()
        kind = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(
            keras.optimizers.Adam(
                0.01, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2
            ),
            loss={"kind": kind, "size": "mae"},
            loss_weights={"kind": 2.0, "size": 0.5},
            metrics={"kind": ["accuracy"], "size": ["mse"]},
            weighted_metrics={"size": [keras.metrics.RootMeanSquaredError()]},
        )
        for step in range(6):
            part = slice(step * 4, step * 4 + 7)
            cut = [{k: v[part] for k, v in each.items()} for each in (x, y, weights)]
            if step % 3 == 0:
                model.reset_metrics()
            logs = model.train_on_batch(*cut, return_dict=True)
            found |= {f"{step}/{name}": np.array(value) for name, value in logs.items()}
        found |= {
            f"test/{name}": np.array(value)
            for name, value in model.evaluate(
                x, y, 5, sample_weight=weights, return_dict=True, verbose=0
            ).items()
        }
        model.optimizer.finalize_variable_values(model.trainable_variables)
        rows = model.predict(x, batch_size=9, verbose=0)
    return {**numbered("weights", model.get_weights()), **found, **rows}


@case(atol=ATOL, long=True)
def averages_swapped_for_evaluation(run: Run):
    """Keras's callback has weights' moving averages evaluated, and saved at the end."""
    return _trained(
        run,
        lambda: _mlp(4, 6, 5, 3),
        lambda: {"loss": "mse", "optimizer": keras.optimizers.Adam(0.01, use_ema=True)},
        x=_normal(ODD_ROWS, 4),
        y=_normal(ODD_ROWS, 3),
        validation_data=(_normal(7, 4), _normal(7, 3)),
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    )
