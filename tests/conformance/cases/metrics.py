"""Metrics count every row once."""

import keras
import numpy as np

from tests.conformance.case import Run, add_case, case
from tests.conformance.models import MODELS
from tests.helpers import ODD_BATCH, ODD_ROWS

metrics = keras.metrics
METRICS = {
    "binary": lambda: [metrics.AUC(num_thresholds=20), metrics.F1Score(threshold=0.5)],
    "thresholds": lambda: [
        metrics.Precision(),
        metrics.Recall(),
        metrics.BinaryAccuracy(),
        metrics.BinaryIoU(),
    ],
    "values": lambda: [
        metrics.MeanSquaredError(),
        metrics.RootMeanSquaredError(),
        metrics.R2Score(),
        metrics.MeanAbsolutePercentageError(),
        metrics.CosineSimilarity(),
    ],
    "mlp": lambda: [
        metrics.SparseCategoricalAccuracy(),
        metrics.SparseTopKCategoricalAccuracy(k=2),
        metrics.SparseCategoricalCrossentropy(from_logits=True),
    ],
}


def _train(run: Run, name: str) -> dict:
    """As metrics, as weighted metrics and in validation."""
    model = "binary" if name == "thresholds" else name

    def options():
        return {
            "loss": "mse" if model == "values" else _LOSSES[model](),
            "metrics": METRICS[name](),
            "weighted_metrics": METRICS[name]()[:1],
        }

    weights = np.random.default_rng(3).uniform(0, 2, ODD_ROWS).astype("float32")
    x, y = _data(model, ODD_BATCH)
    return run.train(
        model,
        compile_options=options,
        sample_weight=weights,
        validation_data=(x, y, weights[:ODD_BATCH]),
    ).results()


_LOSSES = {
    "binary": lambda: "binary_crossentropy",
    "mlp": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
}


def _data(model: str, rows: int):
    return MODELS[model].data(rows)


for _name in METRICS:
    add_case(f"metrics.{_name}", lambda run, name=_name: _train(run, name), core=_name == "binary")


@case()
def logs_of_every_batch(run: Run):
    """What callbacks see after each batch is already the number of the whole batch."""
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append([batch, logs["loss"], logs["accuracy"]])
    )
    training = run.train(callbacks=[watch])
    training.extra["batches"] = np.array(seen)
    return training.results()
