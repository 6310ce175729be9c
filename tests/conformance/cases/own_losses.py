"""Losses of a model's own that are no means over rows: exact in `compute_loss`, else refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.conformance.case import Run, case, claim
from tests.helpers import ODD_BATCH, ODD_ROWS, in_float64, tiny_data

ATOL = 1e-11


def _towers(model_class: type, *arguments) -> keras.Model:
    """Of four layers, as many as any pipeline has stages."""
    x = keras.Input((6,))
    hidden = layers.Dense(5, kernel_regularizer=keras.regularizers.L2(0.01))(x)
    hidden = layers.Dense(4, "tanh")(layers.Activation("tanh")(hidden))
    return model_class(*arguments, inputs=x, outputs=layers.Dense(4)(hidden))


def _trained(run: Run, model_class: type, **options) -> dict:
    """Also validated, with batches of a few rows."""
    with in_float64():
        x, y = tiny_data(9)
        return run.train(
            build=lambda: _towers(model_class),
            **{
                "compile_options": dict,
                "rows": ODD_ROWS,
                "batch_size": ODD_BATCH,
                "optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
                "validation_data": (x, y),
                "validation_batch_size": 5,
                **options,
            },
        ).results()


def _halves(y_pred):
    return ops.split(y_pred, 2, axis=-1)


def barlow_twins(one, other):
    """Two views' features are to be correlated with themselves alone."""
    one = (one - ops.mean(one, axis=0)) / ops.std(one, axis=0)
    other = (other - ops.mean(other, axis=0)) / ops.std(other, axis=0)
    rows = ops.cast(ops.shape(one)[0], one.dtype)
    gap = ops.square(ops.matmul(ops.transpose(one), other) / rows - ops.eye(2))
    return ops.sum(gap * (0.995 * ops.eye(2, dtype=gap.dtype) + 0.005))


class BarlowTwins(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return barlow_twins(*_halves(y_pred)) + sum(self.losses)


@case(core=True, atol=ATOL)
def cross_correlation(run: Run):
    """Barlow Twins, with what regularizers add."""
    return _trained(run, BarlowTwins)


class VicReg(keras.Model):
    """Three terms: a mean over rows, a hinge of standard deviations, covariances."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        one, other = _halves(y_pred)
        loss = ops.mean(ops.square(one - other))
        for each in (one, other):
            each = each - ops.mean(each, axis=0)
            spread = ops.sqrt(ops.var(each, axis=0) + 1e-4)
            rows = ops.cast(ops.shape(each)[0], each.dtype)
            covariance = ops.matmul(ops.transpose(each), each) / rows
            loss += ops.mean(ops.relu(1.0 - spread)) + 0.1 * ops.square(covariance[0, 1])
        return loss


@case(atol=ATOL)
def spread_and_covariance(run: Run):
    return _trained(run, VicReg)


class DeepCca(keras.Model):
    """The correlation of two views after whitening, by inverse roots of covariances."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        one, other = [each - ops.mean(each, axis=0) for each in _halves(y_pred)]
        rows = ops.cast(ops.shape(one)[0], one.dtype)

        def covariance(a, b):
            return ops.matmul(ops.transpose(a), b) / rows

        roots = []
        for each in (one, other):
            values, vectors = ops.eigh(covariance(each, each) + 0.1 * ops.eye(2, dtype=each.dtype))
            roots.append(ops.matmul(vectors / ops.sqrt(values), ops.transpose(vectors)))
        found = ops.matmul(ops.matmul(roots[0], covariance(one, other)), roots[1])
        return -ops.sum(ops.square(found))


@case(atol=ATOL, long=True)
def canonical_correlation(run: Run):
    return _trained(run, DeepCca)


class MmdAutoencoder(keras.Model):
    """What is compiled, and a distance of codes to samples that come with the data (InfoVAE)."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        usual = super().compute_loss(x, y, y_pred, sample_weight, training)

        def kernel(a, b):
            apart = ops.sum(ops.square(a[:, None] - b[None]), axis=-1)
            return ops.mean(ops.exp(-apart / 2))

        samples, codes = x[:, :4], y_pred
        distance = kernel(samples, samples) + kernel(codes, codes) - 2 * kernel(samples, codes)
        return usual + distance


@case(atol=ATOL, long=True)
def distance_of_distributions(run: Run):
    return _trained(
        run,
        MmdAutoencoder,
        compile_options=lambda: {"loss": "mse", "metrics": ["mae"]},
        data=_values,
        validation_data=_values(9),
        sample_weight=np.linspace(0, 2, ODD_ROWS),
    )


def _values(rows: int):
    x, _ = tiny_data(rows)
    return x, np.tanh(x[:, :4])


class Correlated(keras.Model):
    """One minus Pearson's correlation over the batch, with weights of rows; it counts its calls."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = keras.metrics.Mean(name="seen")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        weights = sample_weight[:, None] / ops.sum(sample_weight)

        def centred(values):
            return values - ops.sum(weights * values, axis=0)

        a, b = centred(y), centred(y_pred)
        both = ops.sum(weights * a * b, axis=0)
        alone = ops.sum(weights * a * a, axis=0) * ops.sum(weights * b * b, axis=0)
        self.seen.update_state(ops.abs(y_pred))
        return ops.mean(1 - both / ops.sqrt(alone + 1e-6))


@case(atol=ATOL)
def correlation_with_weights(run: Run):
    weights = np.linspace(0.5, 2, ODD_ROWS)
    return _trained(
        run,
        Correlated,
        data=_values,
        validation_data=(*_values(9), weights[:9]),
        sample_weight=weights,
    )


class SumsOfRows(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.01 * ops.sum(ops.square(y_pred)) + sum(self.losses)


@case(atol=ATOL)
def sum_over_rows(run: Run):
    return _trained(run, SumsOfRows)


class OwnStep(keras.Model):
    """A `train_step` that calls its own `compute_loss`, of rows and of a mean over them."""

    def compute_loss(self, rows, size):
        return barlow_twins(*_halves(rows)) * (1 + size)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            rows = self(x, training=True)
            loss = self.compute_loss(rows, ops.mean(ops.square(rows))) + sum(self.losses)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}

    def test_step(self, data):
        rows = self(data[0])
        return {"loss": self.compute_loss(rows, size=ops.mean(ops.square(rows)))}


@case(atol=ATOL)
def in_a_step_of_its_own(run: Run):
    return _trained(run, OwnStep)


# ---- refused, where a step has a loss that nothing can be gathered for ---------------------------


class Step(keras.Model):
    """Its step takes gradients of `loss(model, x)`."""

    def __init__(self, loss, **options):
        super().__init__(**options)
        self.own_loss = loss
        self.centre = keras.Variable(
            np.zeros(4, keras.config.floatx()), trainable=False, name="centre"
        )

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = self.own_loss(self, x)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss if len(loss.shape) == 0 else ops.mean(loss)}


def _barlow(model, x):
    return barlow_twins(*_halves(model(x, training=True)))


def _spread(model, x):
    return ops.mean(ops.square(model(x))) - 0.1 * ops.mean(ops.std(model(x), axis=0))


def _soft_maximum(model, x):
    return ops.mean(ops.logsumexp(model(x), axis=0))


def _sum(model, x):
    return ops.sum(ops.square(model(x)))


def _of_neighbours(model, x):
    """A value for each row, of another row too."""
    return ops.mean(ops.square(model(x) - model(x[::-1])), axis=1) + ops.sum(x, axis=1)


def _of_a_mixture(model, x):
    y_pred = model(0.7 * x + 0.3 * ops.roll(x, 1, axis=0))
    return ops.mean(ops.square(y_pred))


def _of_what_it_has_assigned(model, x):
    y_pred = model(x)
    model.centre.assign(0.9 * model.centre + 0.1 * ops.mean(y_pred, axis=0))
    return ops.mean(ops.square(y_pred - model.centre))


REFUSED = [
    *(_barlow, _spread, _soft_maximum, _sum),
    *(_of_neighbours, _of_a_mixture, _of_what_it_has_assigned),
]


@claim()
def losses_of_steps_are_refused(run: Run):
    """Each of them, by name, before the first step."""
    has_parts = run.row.num_replicas > 1
    for loss in REFUSED:
        with run.scope():
            model = _towers(Step, loss)
            model.compile(optimizer="sgd")
        if not has_parts:
            model.fit(*tiny_data(6), batch_size=6, verbose=0)
            continue
        with pytest.raises(ValueError, match=r"must be a mean over rows.*all_rows.*mean_loss"):
            model.fit(*tiny_data(6), batch_size=6, verbose=0)
        assert model.optimizer.iterations.numpy() == 0


@claim()
def a_loss_that_is_declared_is_not_refused(run: Run):
    with run.scope():
        import tfparallel  # in the process of the strategy

        model = tfparallel.mean_loss(_towers(Step, _barlow))
        model.compile(optimizer="sgd")
    model.fit(*tiny_data(6), batch_size=6, verbose=0)
    assert model.optimizer.iterations.numpy() == 1
