"""Each loss and metric of Keras, by the kind of what it compares."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import keras
import numpy as np
from keras import losses, metrics

CLASSES = 3


class Kind(NamedTuple):
    """What losses and metrics compare.

    Attributes:
        truth: of a generator and a number of rows, what is to be predicted.
        activation: of the layer that predicts it.
        losses: by name; each takes the argument `reduction`.
        metrics: by name.
    """

    truth: Callable[[np.random.Generator, int], np.ndarray]
    activation: str | None
    losses: Mapping[str, Callable]
    metrics: Mapping[str, Callable]


def _binary(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(0, 2, (rows, CLASSES)).astype("float64")


def _classes(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(0, CLASSES, rows)


def _distance(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), -1)


def _named(*classes: type) -> dict[str, Callable]:
    return {each.__name__: each for each in classes}


KINDS = {
    "numbers": Kind(
        lambda rng, rows: rng.normal(size=(rows, CLASSES)),
        None,
        _named(
            losses.CosineSimilarity,
            losses.Huber,
            losses.LogCosh,
            losses.MeanAbsoluteError,
            losses.MeanSquaredError,
        ),
        {
            **_named(
                metrics.ConcordanceCorrelation,
                metrics.CosineSimilarity,
                metrics.LogCoshError,
                metrics.MeanAbsoluteError,
                metrics.MeanSquaredError,
                metrics.PearsonCorrelation,
                metrics.R2Score,
                metrics.RootMeanSquaredError,
            ),
            "MeanMetricWrapper": lambda: metrics.MeanMetricWrapper(_distance, name="wrapped"),
        },
    ),
    "positive": Kind(
        lambda rng, rows: rng.uniform(0.1, 2, (rows, CLASSES)),
        "softplus",
        _named(
            losses.MeanAbsolutePercentageError, losses.MeanSquaredLogarithmicError, losses.Poisson
        ),
        _named(
            metrics.MeanAbsolutePercentageError,
            metrics.MeanSquaredLogarithmicError,
            metrics.Poisson,
        ),
    ),
    "signs": Kind(
        lambda rng, rows: 2 * _binary(rng, rows) - 1,
        "tanh",
        _named(losses.Hinge, losses.SquaredHinge),
        _named(metrics.Hinge, metrics.SquaredHinge),
    ),
    "binary": Kind(
        _binary,
        "sigmoid",
        _named(
            losses.BinaryCrossentropy, losses.BinaryFocalCrossentropy, losses.Dice, losses.Tversky
        ),
        {
            **_named(
                metrics.Accuracy,
                metrics.AUC,
                metrics.BinaryAccuracy,
                metrics.BinaryCrossentropy,
                metrics.BinaryIoU,
                metrics.F1Score,
                metrics.FalseNegatives,
                metrics.FalsePositives,
                metrics.FBetaScore,
                metrics.Precision,
                metrics.Recall,
                metrics.TrueNegatives,
                metrics.TruePositives,
            ),
            "PrecisionAtRecall": lambda: metrics.PrecisionAtRecall(0.5),
            "RecallAtPrecision": lambda: metrics.RecallAtPrecision(0.5),
            "SensitivityAtSpecificity": lambda: metrics.SensitivityAtSpecificity(0.5),
            "SpecificityAtSensitivity": lambda: metrics.SpecificityAtSensitivity(0.5),
        },
    ),
    "rounded": Kind(
        _binary,
        "hard_sigmoid",  # whose integers are 0 and 1
        {},
        {
            "IoU": lambda: metrics.IoU(2, [0, 1]),
            "MeanIoU": lambda: metrics.MeanIoU(2),
        },
    ),
    "one_hot": Kind(
        lambda rng, rows: np.eye(CLASSES)[_classes(rng, rows)],
        "softmax",
        _named(
            losses.CategoricalCrossentropy,
            losses.CategoricalFocalCrossentropy,
            losses.CategoricalHinge,
            losses.KLDivergence,
        ),
        {
            **_named(
                metrics.CategoricalAccuracy,
                metrics.CategoricalCrossentropy,
                metrics.CategoricalHinge,
                metrics.KLDivergence,
            ),
            "OneHotIoU": lambda: metrics.OneHotIoU(CLASSES, [0, 2]),
            "OneHotMeanIoU": lambda: metrics.OneHotMeanIoU(CLASSES),
        },
    ),
    "classes": Kind(
        _classes,
        "softmax",
        {
            **_named(losses.Circle, losses.SparseCategoricalCrossentropy),
            "CategoricalGeneralizedCrossEntropy": losses.CategoricalGeneralizedCrossEntropy,
        },
        _named(metrics.SparseCategoricalAccuracy, metrics.SparseCategoricalCrossentropy),
    ),
    "ranked": Kind(
        lambda rng, rows: np.eye(CLASSES)[_classes(rng, rows)],
        "softmax",
        {},
        {"TopKCategoricalAccuracy": lambda: metrics.TopKCategoricalAccuracy(2)},
    ),
    "ranked_classes": Kind(
        _classes,
        "softmax",
        {},
        {"SparseTopKCategoricalAccuracy": lambda: metrics.SparseTopKCategoricalAccuracy(2)},
    ),
}
OTHER_LOSSES = {"CTC": "a conformance case", "Loss": "for subclasses"}
OTHER_METRICS = {
    **dict.fromkeys(("MeanMetricWrapper", "Metric"), "for subclasses"),
    **dict.fromkeys(("Mean", "Sum"), "of one argument, the loss among others"),
}
