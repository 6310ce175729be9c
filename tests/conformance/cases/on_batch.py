"""`*_on_batch` splits the caller's rows, gives back all of them, and reports on all of them."""

import keras
import numpy as np

from tests.conformance.case import Run, case
from tests.helpers import Training, momentum_sgd, numbered, tiny_compile_options, tiny_data
from tests.helpers import tiny_model as build


@case(core=True)
def train_on_batch(run: Run):
    """Batches of 12, 5 and 1 rows."""
    model = _model(run)
    logs = [model.train_on_batch(*tiny_data(rows, seed=rows)) for rows in (12, 5, 1, 12)]
    return Training(model, {}, numbered("logs", logs)).results()


@case()
def train_on_batch_with_weights(run: Run):
    model = _model(run)
    (x, y), weights = tiny_data(5), np.linspace(0, 2, 5, dtype="float32")
    by_row = model.train_on_batch(x, y, sample_weight=weights)
    by_class = model.train_on_batch(x, y, class_weight={0: 0.1, 1: 1.0, 2: 4.0}, return_dict=True)
    logs = numbered("logs", by_row) | by_class
    return Training(model, {}, logs).results()


@case(core=True)
def test_on_batch(run: Run):
    model = _model(run)
    return numbered("logs", [model.test_on_batch(*tiny_data(rows)) for rows in (12, 5, 1)])


@case(core=True)
def predict_on_batch(run: Run):
    model = _model(run)
    return numbered("predict", [model.predict_on_batch(tiny_data(rows)[0]) for rows in (12, 5, 1)])


def _model(run: Run) -> keras.Model:
    keras.utils.set_random_seed(1)
    with run.scope():
        model = build()
        model.compile(optimizer=momentum_sgd(), **tiny_compile_options())
    return model
