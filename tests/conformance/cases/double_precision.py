"""In float64 nothing is left of rounding: a weight, a sum or a log in float32 shows at once."""

import keras
import numpy as np

from tests.conformance.case import Run, case
from tests.conformance.cases.batch_norm import OwnStep
from tests.helpers import BATCH, ODD_ROWS, in_float64, tiny_data, tiny_model

ATOL = 1e-12


def _results(run: Run, *model: str, **options) -> dict:
    with in_float64():
        return run.train(*model, **options).results()


def _sample_weight() -> np.ndarray:
    return np.linspace(0.1, 2, ODD_ROWS)


def _with_batch_norm() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(synchronized=True),
            keras.layers.Dense(3),
        ]
    )


def _options() -> dict:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weighted = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss, "metrics": ["accuracy"], "weighted_metrics": ["accuracy", weighted]}


@case(core=True, atol=ATOL)
def uneven_batches(run: Run):
    """With clipping, sample weights and metrics that are weighted by them."""
    return _results(
        run,
        compile_options=_options,
        optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.02),
        sample_weight=_sample_weight(),
    )


@case(core=True, atol=ATOL)
def batch_norm_with_few_rows(run: Run):
    """A last batch of one row: most replicas have none."""
    return _results(
        run, build=_with_batch_norm, compile_options=_options, rows=BATCH + 1, batch_size=BATCH
    )


@case(atol=ATOL)
def few_rows(run: Run):
    return _results(run, rows=BATCH + 1, batch_size=BATCH)


@case(atol=ATOL)
def several_losses(run: Run):
    return _results(run, "dict_inputs_and_outputs")


@case(atol=ATOL)
def class_weight(run: Run):
    return _results(run, class_weight={0: 1.0, 1: 0.3, 2: 2.7})


@case(atol=ATOL)
def adam(run: Run):
    return _results(run, optimizer=lambda: keras.optimizers.Adam(0.01, clipnorm=0.02))


@case(atol=ATOL)
def sparse_gradients(run: Run):
    return _results(run, "embedding")


@case(atol=ATOL)
def mean_with_sample_weight(run: Run):
    loss = keras.losses.SparseCategoricalCrossentropy
    return _results(
        run,
        compile_options=lambda: {"loss": loss(True, reduction="mean_with_sample_weight")},
        sample_weight=_sample_weight(),
    )


@case(atol=ATOL)
def own_train_step(run: Run):
    """Gradients are weighted late."""

    def build():
        inner = tiny_model()
        return OwnStep(inner.inputs, inner.outputs)

    return _results(run, build=build, compile_options=lambda: {"loss": _options()["loss"]})


@case(atol=ATOL)
def kinks_and_ties(run: Run):
    """Whole numbers: ReLUs get zeros, and pools several largest numbers."""

    def whole(shape, dtype=None):
        return keras.ops.cast(np.random.default_rng(4).integers(-1, 2, shape), dtype)

    def build():
        layers = [
            keras.layers.Conv2D(3, 2, activation="relu", kernel_initializer=whole),
            keras.layers.MaxPooling2D(2),
            keras.layers.Conv2D(2, 2, activation="relu", kernel_initializer=whole),
            keras.layers.GlobalMaxPooling2D(),
            keras.layers.Dense(3, kernel_initializer=whole),
        ]
        return keras.Sequential([keras.Input((7, 7, 1)), *layers])

    def data(rows):
        rng = np.random.default_rng(2)
        return rng.integers(-1, 2, (rows, 7, 7, 1)).astype("float64"), rng.integers(0, 3, rows)

    return _results(run, build=build, data=data)


@case(atol=ATOL)
def evaluation(run: Run):
    x, y = tiny_data(ODD_ROWS)
    with in_float64():
        model = run.train(compile_options=_options).model
        result = model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
        return {**result, "predicted": model.predict(x, batch_size=7, verbose=0)}
