"""Whatever a loss divides by, it divides by it once for the whole global batch."""

import keras
import numpy as np
from keras import ops

from tests.conformance.case import Run, case
from tests.conformance.models import MODELS
from tests.helpers import ODD_ROWS, in_float64, tiny_data


def _options(reduction: str) -> dict:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    return {"loss": loss, "metrics": ["accuracy"]}


def _weights() -> np.ndarray:
    return np.linspace(0, 2, ODD_ROWS, dtype="float32")


def _gentle_sgd() -> keras.Optimizer:
    return keras.optimizers.SGD(0.01)  # a sum over rows is twelve times a mean


@case()
def reduction_sum(run: Run):
    return run.train(compile_options=lambda: _options("sum"), optimizer=_gentle_sgd).results()


@case()
def reduction_sum_with_sample_weight(run: Run):
    return run.train(
        compile_options=lambda: _options("sum"), optimizer=_gentle_sgd, sample_weight=_weights()
    ).results()


@case()
def mean_with_sample_weight(run: Run):
    """Divides by the sum of the weights of all rows, not by that of a replica's rows."""
    return run.train(
        compile_options=lambda: _options("mean_with_sample_weight"), sample_weight=_weights()
    ).results()


@case()
def mean_with_sample_weight_without_weights(run: Run):
    return run.train(compile_options=lambda: _options("mean_with_sample_weight")).results()


@case()
def sum_next_to_mean(run: Run):
    """Two outputs: one loss is a sum over rows, the other a mean."""

    def options():
        summed = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        return {"loss": {"class": summed, "value": "mse"}}

    return run.train(
        "dict_inputs_and_outputs", compile_options=options, optimizer=_gentle_sgd
    ).results()


@case()
def sum_with_regularizer(run: Run):
    return run.train(
        "regularized", compile_options=lambda: _options("sum"), optimizer=_gentle_sgd
    ).results()


@case()
def masked_sequence(run: Run):
    """A mean over the steps that are not masked: replicas hold different numbers of them."""
    return run.train(build=_masked_model, data=_labels_of_tokens).results()


def _masked_model():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(20, 4, mask_zero=True),
            keras.layers.LSTM(4, return_sequences=True),
            keras.layers.Dense(3),
        ]
    )


def _labels_of_tokens(rows):
    tokens, _ = MODELS["masking"].data(rows)
    return tokens, tokens % 3


class WithComputeLoss(keras.Model):
    """Keras' guide: `compute_loss` overridden with a mean over rows and the model's losses."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = keras.ops.mean(keras.ops.square(y_pred - y))
        return loss + sum(self.losses)


@case()
def overridden_compute_loss(run: Run):
    def build():
        x = keras.Input((6,))
        hidden = keras.layers.Dense(5, "tanh", kernel_regularizer="l2")(x)
        return WithComputeLoss(x, keras.layers.Dense(2)(hidden))

    return run.train("values", build=build, compile_options=lambda: {"metrics": ["mae"]}).results()


@case()
def extended_compute_loss(run: Run):
    """`compute_loss` that adds to what Keras computes."""

    class Model(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            usual = super().compute_loss(x, y, y_pred, sample_weight, training)
            return usual + 0.1 * keras.ops.mean(keras.ops.abs(y_pred))

    def build():
        x = keras.Input((6,))
        return Model(x, keras.layers.Dense(2)(keras.layers.Dense(5, "tanh")(x)))

    return run.train("values", build=build).results()


@case()
def function_as_loss(run: Run):
    """A plain function that gives one number per row."""

    def options():
        return {"loss": lambda y, p: keras.ops.mean(keras.ops.square(y - p), axis=-1)}

    return run.train("values", compile_options=options).results()


@case(atol=1e-4)
def sure_probabilities(run: Run):
    """Keras computes a cross entropy from the logits of what softmax or sigmoid gives.

    Of the probability alone, which is 0 in float32, there would be no gradient.
    """

    def build():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(4, "tanh")(inputs)
        steep = keras.initializers.RandomNormal(stddev=40.0, seed=3)
        dense = keras.layers.Dense(3, "softmax", kernel_initializer=steep, name="softmax")
        logits = keras.layers.Dense(1, kernel_initializer=steep)(hidden)
        sigmoid = keras.layers.Activation("sigmoid", name="sigmoid")(logits)
        return keras.Model(inputs, {"softmax": dense(hidden), "sigmoid": sigmoid})

    def options():
        losses = {"softmax": "sparse_categorical_crossentropy", "sigmoid": "binary_crossentropy"}
        return {"loss": losses, "weighted_metrics": dict(losses)}

    def data(rows):
        x, y = tiny_data(rows)
        return x, {"softmax": y, "sigmoid": (y % 2)[:, None]}

    training = run.train(build=build, compile_options=options, data=data)
    evaluated = training.model.evaluate(*data(ODD_ROWS), batch_size=5, verbose=0)
    return {**training.results(), "evaluated": np.asarray(evaluated)}


@case()
def activity_regularizer(run: Run):
    """Keras 3 sums it over the rows of the batch."""

    def build():
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5, "tanh", activity_regularizer=keras.regularizers.L2(0.01)),
                keras.layers.Dense(3),
            ]
        )

    return run.train(build=build).results()


class AddsLoss(keras.layers.Layer):
    """Adds the mean square of its input."""

    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


@case()
def added_loss_before_a_collective_in_the_loss(run: Run):
    """Replicas wait for one another inside the compiled loss, before added losses are read."""

    def build():
        x = keras.Input((6,))
        hidden = AddsLoss()(keras.layers.Dense(5, "tanh")(x))
        return keras.Model(x, keras.layers.Dense(3)(keras.layers.Dense(4, "tanh")(hidden)))

    return run.train(
        build=build,
        compile_options=lambda: _options("mean_with_sample_weight"),
        sample_weight=_weights(),
    ).results()


class KeepsTheLargest(keras.Loss):
    """Keeps a moving average of a batch's largest error, by which no trial of its value differs."""

    def __init__(self):
        super().__init__()
        dtype = keras.config.floatx()
        self.largest = keras.Variable(1.0, trainable=False, name="largest", dtype=dtype)

    def call(self, y_true, y_pred):
        errors = ops.logsumexp(y_pred, axis=-1) - ops.take_along_axis(
            y_pred, ops.expand_dims(ops.cast(y_true, "int32"), 1), axis=1
        )
        self.largest.assign(0.9 * self.largest + 0.1 * ops.max(errors))
        return ops.mean(errors, axis=-1)


@case(atol=1e-12)
def state_of_a_loss(run: Run):
    with in_float64():
        training = run.train(compile_options=lambda: {"loss": KeepsTheLargest()}, batch_size=10)
        training.extra["largest"] = np.asarray(training.model.loss.largest)
        return training.results()


@case(atol=1e-11)
def values_of_rows(run: Run):
    """A tape adds up what a loss leaves unreduced, and what a `compute_loss` gives for each row."""

    class ByRow(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.ops.square(y_pred - y), axis=-1)

    def build():
        x = keras.Input((6,))
        hidden = keras.layers.Dense(4)(keras.layers.Dense(5, "tanh")(x))
        return ByRow(x, keras.layers.Dense(2)(keras.layers.Activation("tanh")(hidden)))

    def unreduced():
        return {"loss": keras.losses.MeanSquaredError(reduction="none")}

    def masked():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        return {"loss": loss}

    with in_float64():
        options = {"optimizer": _gentle_sgd, "validation_data": MODELS["values"].data(5)}
        of_model = run.train("values", build=build, **options).results()
        of_loss = run.train("values", compile_options=unreduced, **options).results()
        options = {"build": _masked_model, "data": _labels_of_tokens, "optimizer": _gentle_sgd}
        of_mask = run.train(compile_options=masked, **options).results()
    others = {"unreduced": of_loss, "masked": of_mask}
    return of_model | {
        f"{kind}/{name}": each for kind, own in others.items() for name, each in own.items()
    }
