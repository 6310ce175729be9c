"""A mistake is answered at once by a ValueError that says what to do."""

import keras
import pytest

from tests.conformance.case import Run, claim
from tests.helpers import BATCH, momentum_sgd, tiny_compile_options, tiny_data, tiny_model


def _compile(model: keras.Model) -> None:
    model.compile(optimizer=momentum_sgd(), **tiny_compile_options())


def _fit(model: keras.Model) -> None:
    x, y = tiny_data(BATCH)
    model.fit(x, y, batch_size=BATCH, verbose=0)


def _refused():
    return pytest.raises(ValueError, match=r"scope\(\)")


@claim(core=True)
def built_outside_and_fitted_inside_is_refused(run: Run):
    model = tiny_model()
    _compile(model)
    with run.scope(), _refused():
        _fit(model)


@claim()
def built_outside_and_compiled_inside_is_refused(run: Run):
    model = tiny_model()
    with _refused(), run.scope():
        _compile(model)
        _fit(model)


@claim(core=True)
def compiled_outside_is_refused(run: Run):
    with run.scope():
        model = tiny_model()
    with _refused():
        _compile(model)
        _fit(model)


@claim()
def an_optimizer_made_outside_is_refused(run: Run):
    optimizer = momentum_sgd()
    with _refused():
        with run.scope():
            model = tiny_model()
            model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy")
        _fit(model)


@claim()
def a_metric_made_outside_is_refused(run: Run):
    """Its variables belong to no strategy: what one worker counts, the others would not know."""
    metric = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    with _refused():
        run.train(compile_options=lambda: {**tiny_compile_options(), "metrics": [metric]})


@claim(core=True)
def fitted_under_another_strategy_is_refused(run: Run):
    with run.scope():
        model = tiny_model()
        _compile(model)
    with run.row.make().scope(), _refused():
        _fit(model)


@claim()
def layers_made_outside_are_refused(run: Run):
    """A model assembled inside from a built layer of outside has foreign variables."""
    layer = keras.layers.Dense(3)
    layer.build((None, 6))
    with _refused():
        with run.scope():
            model = keras.Sequential([keras.Input((6,)), layer])
            _compile(model)
        _fit(model)
